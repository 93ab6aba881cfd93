"""Where a step's time goes, on a page of plain text: Markdown that a terminal shows as well."""

import base64
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.units import choose_unit, format_bytes
from ratchet.models.module_names import parse_module_name
from ratchet.storage import html
from ratchet.storage.html import NONE, Html, bar, explanation, format_count, format_percentage, tag
from ratchet.storage.records.base import TrainReport
from ratchet.storage.records.training import AdapterAnalysis, MemoryForecast, ModuleAnalysis, StepPart, TrainingProfile

MEANT = {
    "data": "batch plan, padding, copies to the device",
    "forward": "body of the model",
    "loss": "head and cross entropy, gradient of the head",
    "backward": "gradient of the body",
    "optimizer": "clipping, step",
    "snapshot": "copy of the state for a checkpoint",
    "evaluation": "all validation rows",
    "waiting": "everything between: journal, guards, Python",
}
UNEVEN = 0.3
"""Distance of the quartiles, as a share of the median, from which on figures say more of the machine than of a step."""
LONGEST_NAME = 60
"""Characters of an operator's name."""


def format_profile(profile: TrainingProfile) -> str:
    """The whole page."""
    return "\n".join(_profile_lines(profile)) + "\n"


def _profile_lines(profile: TrainingProfile) -> Iterator[str]:
    floors = profile.floors
    yield f"# Where the time goes: run {profile.run_id}"
    yield ""
    yield (
        f"{profile.device}, {profile.compute_dtype}, {profile.threads} threads, torch {profile.torch}: "
        f"{profile.measured_steps} steps measured, after {profile.warm_steps} to warm up; {profile.traced_steps} more "
        "traced."
    )
    yield ""
    first, third = profile.quartiles_s
    yield (
        f"- a step: {_format_duration(profile.step_s)} "
        f"(median; quartiles {_format_duration(first)} to {_format_duration(third)})"
    )
    if third - first > UNEVEN * profile.step_s:
        yield "- **steps differ much: rows of very different lengths, or a busy machine: measure again when it is not**"
    if profile.synchronised_step_s is not None:
        yield f"- waiting for the GPU between the parts, as below: {_format_duration(profile.synchronised_step_s)}"
    yield (
        f"- {profile.input_tokens / profile.step_s:,.0f} input tokens/s, "
        f"{profile.trained_tokens / profile.step_s:,.0f} trained tokens/s"
    )
    yield (
        f"- a step has {profile.micro_batches:,.1f} micro-batches, {profile.input_tokens:,.0f} input tokens, "
        f"{profile.trained_tokens:,.0f} of them learned from; {profile.padding:.1%} of what is computed is padding"
    )
    yield (
        f"- memory: {format_bytes(profile.peak_bytes)} at most; "
        f"{format_bytes(profile.saved_activation_bytes)} of it kept for the backward pass"
    )
    yield ""
    yield from _format_table(
        ("part", "one takes", "one in", "a step", "share", "what it is"), "lrrrrl", map(_profile_row, profile.parts)
    )
    yield ""
    yield f"A snapshot is sealed as a checkpoint in {_format_duration(profile.save_s)}, in a thread beside training."
    yield ""
    yield "## Floors"
    yield ""
    rows = [
        (
            "operations", f"{floors.flops / 1e9:,.3g} GFLOP", _format_flops(floors.shapes_flops_s),
            _format_duration(floors.flops_s), f"{floors.flops_s / profile.step_s:.0%}",
        ),
        (
            "bytes moved", format_bytes(sum(floors.moved_bytes.values())),
            f"{format_bytes(floors.bandwidth_bytes_s)}/s", _format_duration(floors.bytes_s),
            f"{floors.bytes_s / profile.step_s:.0%}",
        ),
    ]  # fmt: skip
    yield from _format_table(("of a step", "how many", "measured rate", "takes", "of the step"), "lrrrr", rows)
    yield ""
    yield (
        f"The step takes {profile.step_s / floors.floor_s:.2f} times the greater floor. The rate is that of torch.mm "
        f"on the model's own shapes; on large square matrices it is {_format_flops(floors.square_flops_s)}."
    )
    if (of_sheet := profile.of_sheet) is not None and floors.sheet_flops_s is not None:
        yield f"Model FLOP utilisation: {of_sheet:.1%} of the {_format_flops(floors.sheet_flops_s)} of the data sheet."
    yield from (f"- {name}: {format_bytes(amount)}" for name, amount in floors.moved_bytes.items())
    yield ""
    yield "## Operators"
    yield ""
    operators = (
        (one.name[:LONGEST_NAME], f"{one.calls:,.0f}", _format_duration(one.self_s), f"{one.share:.1%}")
        for one in profile.operators
    )
    yield from _format_table(("by time in itself", "calls a step", "a step", "share"), "lrrr", operators)
    yield ""
    yield from profile.notes


def _profile_row(part: StepPart) -> Sequence[str]:
    often = "" if part.every_steps == 1 else f"{part.every_steps:,.0f}"
    return (
        part.name,
        _format_duration(part.each_s),
        often,
        _format_duration(part.step_s),
        f"{part.share:.1%}",
        MEANT[part.name],
    )


def _format_duration(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.2f} ms"


def _format_flops(flops_s: float) -> str:
    return f"{flops_s / 1e12:,.1f} TFLOP/s" if flops_s >= 1e12 else f"{flops_s / 1e9:,.1f} GFLOP/s"


def _format_table(heads: Sequence[str], sides: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns of equal width; `sides`: l or r for each."""
    all_rows = [heads, *rows]
    widths = [max(3, *(len(row[place]) for row in all_rows)) for place in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        cells = (c.ljust(w) if side == "l" else c.rjust(w) for c, w, side in zip(row, widths, sides, strict=True))
        return f"| {' | '.join(cells)} |"

    yield line(heads)
    rules = ("-" * w if side == "l" else "-" * (w - 1) + ":" for w, side in zip(widths, sides, strict=True))
    yield f"| {' | '.join(rules)} |"
    yield from map(line, all_rows[1:])


# Memory of a training as it was forecast and as it was measured, phase by phase.

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8b8f96")
"""Of parts of memory, light page or dark; told apart with every kind of colour vision (Okabe and Ito 2008)."""

STYLE = "".join(
    f".part{number} {{ background: {COLOURS[number % len(COLOURS)]}; }}\n"
    # Once the colours are taken they come again, striped.
    if number < len(COLOURS)
    else f".part{number} {{ background: repeating-linear-gradient(45deg, {COLOURS[number % len(COLOURS)]} 0 4px, "
    "transparent 4px 6px); }\n"
    for number in range(2 * len(COLOURS))
)


def render_memory(forecast: MemoryForecast | None, measured: Mapping[str, int]) -> Sequence[Html] | str:
    """A bar for each phase, all on one scale; a table of phases and parts; what was measured beside it."""
    if forecast is None:
        if not measured:
            return "Nothing was forecast or measured."
        alone = [(phase.replace("_", " "), format_bytes(count)) for phase, count in measured.items()]
        return [html.table("Measured memory", "tn", ("phase", "measured"), alone)]
    parts = list(dict.fromkeys(part for phase in forecast.phases for part in phase.parts))
    classes = {part: f"part{number % (2 * len(COLOURS))}" for number, part in enumerate(parts)}
    most = max([forecast.peak.total_bytes, *measured.values(), 1])
    size, unit = choose_unit(most)
    bars = []
    for one in forecast.phases:
        found = measured.get(one.phase)
        shares = [(classes[part], one.parts.get(part, 0) / most) for part in parts]
        drawn = bar(*shares, mark=None if found is None else found / most)
        known = (format_bytes(found), f"{one.total_bytes / found - 1:+.1%}") if found else (NONE, NONE)
        bars.append((one.phase.replace("_", " "), drawn, format_bytes(one.total_bytes), *(known if measured else ())))
    heads = ("phase", "", "forecast", *(("measured", "forecast is off by") if measured else ()))
    rows = [(part, *(_format_amount(one.parts.get(part, 0), size) for one in forecast.phases)) for part in parts]
    rows.append(("in all", *(_format_amount(one.total_bytes, size) for one in forecast.phases)))
    names = [one.phase.replace("_", " ") for one in forecast.phases]
    line = ", and a line where it was measured" if measured else ""
    return [
        explanation(f"Held at the moment when the sum is greatest in each phase{line}."),
        html.legend(*((classes[part], part) for part in parts)),
        html.table("Phases", "tbnnn"[: len(heads)], heads, bars),
        html.table("Parts by phase", "t" + "n" * len(names), (unit, *names), rows),
    ]


def _format_amount(count: int, size: int) -> str:
    return f"{count / size:,.2f}" if count else NONE


# What training made and what memory it needs, as pages: one HTML file each, that needs no network and no script.
#
# Pictures come as PNG from reports/plots.py, by whoever asks for the page, and are written into it.

DEVICES = {"cpu": "CPU", "cuda": "GPU"}

ROWS_OPEN = 8
"""Validations in a table that is seen before it is opened."""

PAGE_STYLE = Path(__file__).with_name("page.css")

PICTURES = {
    "loss": "Training and validation loss by optimizer step",
    "gradients": "Gradient norm of every module over time, a panel for each kind of module, a line for each layer",
    "updates": "Update over weight and effective rank of every module by layer, and singular values by kind of module",
}
"""What each picture of a training shows, for those who hear it."""

OWN_STYLE = f"figure img {{ display: block; max-width: 100%; height: auto; background: #fff; }}\n{STYLE}"


@dataclass(frozen=True)
class MemoryHeadroom:
    """Memory at hand, and the largest that fits into it, each for itself, by what it is called in params.yaml."""

    available_bytes: int
    largest: Mapping[str, int | None]
    sharing: int = 1
    """Ranks that live in the same memory, of which `available_bytes` is the part of one."""


def write_train_page(
    report: TrainReport,
    analysis: AdapterAnalysis,
    forecast: MemoryForecast | None,
    measured: Mapping[str, int],
    pictures: Mapping[str, bytes],
) -> str:
    """The page of one training. Equal facts give equal bytes.

    Args:
        report: of stage train.
        analysis: made after it.
        forecast: made before it, if one was.
        measured: most bytes held in each phase.
        pictures: PNG, by the names of PICTURES; those that are missing are left out.
    """
    sections = {
        "Loss": [*_render_picture("loss", pictures), _render_losses(report)],
        "Advice for the next run": [_render_list(analysis.advice)] if analysis.advice else "Nothing stands out.",
        "Gradients": _render_picture("gradients", pictures) or "There is no picture.",
        "Updates": [*_render_picture("updates", pictures), explanation(UPDATES)],
        "Modules": _render_modules(analysis),
        "Memory": render_memory(forecast, measured),
    }
    return _render_page(f"Training {report.run_id}", _render_train_header(report, analysis), sections)


UPDATES = (
    "Update: what was added to the weights, scale\u00b7B\u00b7A (of DoRA with its magnitudes), as Frobenius norms. "
    "Effective rank: the exponential of the entropy of the singular values (Roy and Vetterli 2007): how many "
    "directions are really used."
)


def write_forecast_page(forecast: MemoryForecast, room: MemoryHeadroom | None, about: Sequence[str]) -> str:
    """The page of a forecast: the table, a stacked bar for each phase, what fits, and remarks."""
    sections = {
        "Memory": render_memory(forecast, {}),
        "What fits": _render_headroom(room),
        "Notes": [_render_list((*forecast.notes, *about))] if forecast.notes or about else "There are no notes.",
    }
    return _render_page("Memory forecast", _render_forecast_header(forecast, room), sections)


def _render_page(title: str, header: Html, sections: Mapping[str, Sequence[Html] | str]) -> str:
    main = tag("main", *(html.section(name, body) for name, body in sections.items()))
    style = PAGE_STYLE.read_text(encoding="utf-8") + OWN_STYLE
    return html.document(title, style, header, main, images=True)


def _render_header(what: str, title: str, note: str, figures: Iterator[tuple[str, str, str]]) -> Html:
    shown = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", more)))
        for name, value, more in figures
    ]
    return tag("header", tag("p", what, class_="quiet"), tag("h1", title, tag("span", note)), tag("dl", *shown))


def _render_train_header(report: TrainReport, analysis: AdapterAnalysis) -> Html:
    def figures() -> Iterator[tuple[str, str, str]]:
        best = report.validation_loss.get(report.best_step)
        early = report.steps < report.planned_steps
        yield "Validation loss", NONE if best is None else f"{best:.4f}", f"nats per token, step {report.best_step:,}"
        yield "Steps", f"{report.steps:,}", f"of {report.planned_steps:,} planned" if early else "as planned"
        share = format_percentage(report.trainable_parameters, report.total_parameters)
        yield "Trained", share, f"{report.trainable_parameters:,} of {report.total_parameters:,} parameters"
        yield "Barely moved", f"{len(analysis.still):,}", f"of {format_count(len(analysis.modules), 'module')}"

    title = f"{format_count(report.trained_tokens, 'answer token')} learned from"
    note = f"adapter {report.adapter_digest[:12]}, of step {report.kept_step:,}"
    return _render_header(f"Training {report.run_id}", title, note, figures())


def _render_forecast_header(forecast: MemoryForecast, room: MemoryHeadroom | None) -> Html:
    def figures() -> Iterator[tuple[str, str, str]]:
        yield "Peak", format_bytes(forecast.peak.total_bytes), f"in phase {forecast.peak.phase.replace('_', ' ')}"
        if room:
            fits = forecast.needed_bytes(room.sharing) <= room.available_bytes
            yield "At hand", format_bytes(room.available_bytes), "it fits" if fits else "it does not fit"
        yield "Host", format_bytes(forecast.host_bytes), "memory of the machine, at any time"
        share = format_percentage(forecast.trainable_parameters, forecast.total_parameters)
        yield "Trained", share, f"{forecast.trainable_parameters:,} of {forecast.total_parameters:,} parameters"

    return _render_header("Memory forecast", *describe_forecast(forecast), figures())


def describe_forecast(forecast: MemoryForecast) -> tuple[str, str]:
    """For what a forecast was made, in a title and a line."""
    size = f"{format_count(forecast.rows, 'row')} of {format_count(forecast.row_tokens, 'token')}"
    title = f"{size} on a {DEVICES[forecast.device]}"
    how = "with" if forecast.activation_checkpointing else "without"
    ranks = f", on each of {forecast.ranks} ranks" if forecast.ranks > 1 else ""
    shared = ", with a share of the base" if forecast.shard_base else ""
    return title, f"{forecast.learned_tokens:,} of them learned from, {how} activation checkpointing{ranks}{shared}"


def _render_picture(name: str, pictures: Mapping[str, bytes]) -> list[Html]:
    if name not in pictures:
        return []
    source = f"data:image/png;base64,{base64.b64encode(pictures[name]).decode('ascii')}"
    image = tag("img", src=source, alt=PICTURES[name])
    return [tag("figure", Html(image.replace("></img>", " />")))]


def _render_losses(report: TrainReport) -> Html:
    most = max(report.validation_loss.values(), default=1.0) or 1.0
    rows = [
        (f"{step:,}", bar(("train", loss / most)), f"{loss:.4f}", "kept" if step == report.kept_step else "")
        for step, loss in sorted(report.validation_loss.items())
    ]
    table = html.table("Validation loss by step", "tbnt", ("step", "", "validation loss", ""), rows)
    return (
        table
        if len(rows) <= ROWS_OPEN
        else tag("details", tag("summary", format_count(len(rows), "validation")), table)
    )


def _render_list(sentences: Sequence[str]) -> Html:
    return tag("ul", *(tag("li", tag("bdi", one)) for one in sentences))


def _render_modules(analysis: AdapterAnalysis) -> Sequence[Html] | str:
    if not analysis.modules:
        return "No module was adapted."
    kinds: dict[str, list[str]] = {}
    for name in analysis.modules:
        kinds.setdefault(parse_module_name(name).kind, []).append(name)
    still = set(analysis.still)
    rows = [_module_kind_row(kind, [analysis.modules[name] for name in names], still & set(names))
            for kind, names in kinds.items()]  # fmt: skip
    heads = ("kind of module", "modules", "rank", "effective rank", "update over weight", "barely moved")
    each = [_module_row(name, one, name in still) for name, one in analysis.modules.items()]
    of_each = ("module", "rank", "effective rank", "update", "weight", "update over weight", "")
    every = html.table("All modules", "tnnnnnt", of_each, each)
    return [
        explanation("Medians of each kind; below, module by module."),
        html.table("Kinds of modules", "tnnnnn", heads, rows),
        tag("details", tag("summary", format_count(len(each), "module")), every),
    ]


def _module_kind_row(kind: str, members: Sequence[ModuleAnalysis], still: set[str]) -> tuple[str, ...]:
    ranks = sorted({one.rank for one in members})
    span = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    used = statistics.median(one.effective_rank for one in members)
    ratio = statistics.median(one.update_ratio for one in members)
    return (
        kind,
        f"{len(members):,}",
        span,
        f"{used:.1f}",
        format_percentage(ratio, 1),
        f"{len(still):,}" if still else NONE,
    )


def _module_row(name: str, one: ModuleAnalysis, still: bool) -> tuple[str, ...]:
    return (
        tag("bdi", name), f"{one.rank:,}", f"{one.effective_rank:.1f}", f"{one.update_norm:.3g}",
        f"{one.weight_norm:.3g}", format_percentage(one.update_ratio, 1), "barely moved" if still else "",
    )  # fmt: skip


def _render_headroom(room: MemoryHeadroom | None) -> Sequence[Html] | str:
    if room is None:
        return "The memory of the device is not known here; name it with --memory."
    rows = [
        (tag("code", name), "not even one" if count is None else f"{count:,}") for name, count in room.largest.items()
    ]
    return [
        explanation(f"Into {format_bytes(room.available_bytes)}, each for itself, the others as they are set."),
        html.table("What fits", "tn", ("setting", "largest"), rows),
    ]
