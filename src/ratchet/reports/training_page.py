"""Renders the pages of one training: profile (Markdown), memory forecast, and training report."""

import base64
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.units import choose_unit, format_bytes
from ratchet.storage import html
from ratchet.storage.html import NONE, Html, bar, explanation, format_count, format_percentage, tag
from ratchet.storage.records.training import (
    AdapterAnalysis,
    MemoryForecast,
    ModuleAnalysis,
    StepPart,
    TrainingProfile,
    TrainReport,
    parse_module_name,
)

PART_DESCRIPTIONS = {
    "data": "batch plan, padding, copies to the device",
    "forward": "body of the model",
    "loss": "head and cross entropy, gradient of the head",
    "backward": "gradient of the body",
    "optimizer": "clipping, optimizer step",
    "snapshot": "copy of the state for a checkpoint",
    "evaluation": "all validation rows",
    "waiting": "everything else: journal, guards, Python",
}
"""Description of each part of a step."""
UNEVEN = 0.3
"""Ratio of the interquartile range of step times to their median, above which the page warns that step times vary."""
LONGEST_NAME = 60
"""Maximum number of characters of an operator's name."""

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8b8f96")
"""Colours of memory parts for light and dark pages and all kinds of colour vision (Okabe and Ito 2008)."""
MEMORY_STYLE = "".join(
    f".part{number} {{ background: {COLOURS[number % len(COLOURS)]}; }}\n"
    # Parts beyond the number of colours reuse the colours with stripes.
    if number < len(COLOURS)
    else f".part{number} {{ background: repeating-linear-gradient(45deg, {COLOURS[number % len(COLOURS)]} 0 4px, "
    "transparent 4px 6px); }\n"
    for number in range(2 * len(COLOURS))
)
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
ROWS_OPEN = 8
"""Maximum number of validations for which the table is expanded."""
PICTURES = {
    "loss": "Training and validation loss by optimizer step",
    "gradients": "Gradient norm of every module over time, one panel per kind of module, one line per layer",
    "updates": "Update over weight and effective rank of every module by layer, and singular values by kind of module",
}
"""Description of each plot for screen readers."""
OWN_STYLE = f"figure img {{ display: block; max-width: 100%; height: auto; background: #fff; }}\n{MEMORY_STYLE}"
UPDATES_NOTE = (
    "Update: the Frobenius norm of the change of the weights, scale\u00b7B\u00b7A (for DoRA including magnitudes). "
    "Effective rank: the exponential of the entropy of the singular values (Roy and Vetterli 2007), that is, the "
    "number of directions in use."
)

PAGE_STYLE = Path(__file__).with_name("page.css")


def format_profile(profile: TrainingProfile) -> str:
    """Format the profile as Markdown."""
    return "\n".join(_profile_lines(profile)) + "\n"


def _profile_lines(profile: TrainingProfile) -> Iterator[str]:
    limits = profile.limits
    yield f"# Step time profile: run {profile.run_id}"
    yield ""
    yield (
        f"{profile.device}, {profile.compute_dtype}, {profile.threads} threads, torch {profile.torch}: "
        f"{profile.measured_steps} steps measured after {profile.warmup_steps} warm-up steps; "
        f"{profile.traced_steps} more traced."
    )
    yield ""
    first, third = profile.quartiles_s
    yield (
        f"- a step: {_format_duration(profile.step_s)} "
        f"(median; quartiles {_format_duration(first)} to {_format_duration(third)})"
    )
    if third - first > UNEVEN * profile.step_s:
        yield (
            "- **step times vary a lot: rows have very different lengths, or the machine is busy; measure again on an "
            "idle machine**"
        )
    if profile.synchronised_step_s is not None:
        yield f"- with GPU synchronization between the parts, as below: {_format_duration(profile.synchronised_step_s)}"
    yield (
        f"- {profile.input_tokens / profile.step_s:,.0f} input tokens/s, "
        f"{profile.trained_tokens / profile.step_s:,.0f} trained tokens/s"
    )
    yield (
        f"- a step has {profile.micro_batches:,.1f} micro-batches, {profile.input_tokens:,.0f} input tokens, "
        f"{profile.trained_tokens:,.0f} of them trained; {profile.padding_share:.1%} of the computed tokens are padding"
    )
    yield (
        f"- peak memory: {format_bytes(profile.peak_bytes)}; "
        f"{format_bytes(profile.saved_activation_bytes)} of it saved for the backward pass"
    )
    yield ""
    yield from _format_table(
        ("part", "time", "every", "per step", "share", "description"), "lrrrrl", map(_profile_row, profile.parts)
    )
    yield ""
    yield (
        f"Writing a snapshot as a checkpoint takes {_format_duration(profile.save_s)}, in a thread parallel to "
        "training."
    )
    yield ""
    yield "## Lower bounds"
    yield ""
    rows = [
        (
            "operations", f"{limits.flops / 1e9:,.3g} GFLOP", _format_flops(limits.model_flops_per_s),
            _format_duration(limits.compute_s), f"{limits.compute_s / profile.step_s:.0%}",
        ),
        (
            "bytes moved", format_bytes(sum(limits.moved_bytes.values())),
            f"{format_bytes(limits.bandwidth_bytes_per_s)}/s", _format_duration(limits.transfer_s),
            f"{limits.transfer_s / profile.step_s:.0%}",
        ),
    ]  # fmt: skip
    yield from _format_table(("limit", "count", "measured rate", "takes", "share of step"), "lrrrr", rows)
    yield ""
    yield (
        f"The step takes {profile.step_s / limits.min_step_s:.2f} times the greater lower bound. The rate is that "
        f"of torch.mm with the model's shapes; for large square matrices it is "
        f"{_format_flops(limits.square_flops_per_s)}."
    )
    if (utilization := profile.flops_utilization) is not None and limits.datasheet_flops_per_s is not None:
        yield (
            f"FLOPs utilization, recomputed activations included: {utilization:.1%} of the datasheet's "
            f"{_format_flops(limits.datasheet_flops_per_s)}."
        )
    yield from (f"- {name}: {format_bytes(amount)}" for name, amount in limits.moved_bytes.items())
    yield ""
    yield "## Operators"
    yield ""
    operators = (
        (
            operator.name[:LONGEST_NAME],
            f"{operator.calls:,.0f}",
            _format_duration(operator.self_s),
            f"{operator.share:.1%}",
        )
        for operator in profile.operators
    )
    yield from _format_table(("operator", "calls per step", "self time per step", "share"), "lrrr", operators)
    yield ""
    yield from profile.notes


def _profile_row(part: StepPart) -> Sequence[str]:
    frequency = "" if part.every_steps == 1 else f"{part.every_steps:,.0f}"
    return (
        part.name,
        _format_duration(part.duration_s),
        frequency,
        _format_duration(part.step_s),
        f"{part.share:.1%}",
        PART_DESCRIPTIONS[part.name],
    )


def _format_duration(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.2f} ms"


def _format_flops(flops_s: float) -> str:
    return f"{flops_s / 1e12:,.1f} TFLOP/s" if flops_s >= 1e12 else f"{flops_s / 1e9:,.1f} GFLOP/s"


def _format_table(heads: Sequence[str], sides: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a Markdown table with padded columns. `sides` has l (left) or r (right) for each column."""
    all_rows = [heads, *rows]
    widths = [max(3, *(len(row[place]) for row in all_rows)) for place in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        cells = (c.ljust(w) if side == "l" else c.rjust(w) for c, w, side in zip(row, widths, sides, strict=True))
        return f"| {' | '.join(cells)} |"

    yield line(heads)
    rules = ("-" * w if side == "l" else "-" * (w - 1) + ":" for w, side in zip(widths, sides, strict=True))
    yield f"| {' | '.join(rules)} |"
    yield from map(line, all_rows[1:])


# Forecast and measured memory of a training, by phase.


def render_memory(forecast: MemoryForecast | None, measured: Mapping[str, int]) -> Sequence[Html] | str:
    """Render a bar for each phase on one scale, a table of phases with measured values, and a table of parts."""
    if forecast is None:
        if not measured:
            return "No memory was forecast or measured."
        measured_rows = [(phase.replace("_", " "), format_bytes(count)) for phase, count in measured.items()]
        return [html.table("Measured memory", "tn", ("phase", "measured"), measured_rows)]
    parts = list(dict.fromkeys(part for phase in forecast.phases for part in phase.parts))
    classes = {part: f"part{number % (2 * len(COLOURS))}" for number, part in enumerate(parts)}
    most = max([forecast.peak.total_bytes, *measured.values(), 1])
    size, unit = choose_unit(most)
    bars = []
    for phase in forecast.phases:
        measured_bytes = measured.get(phase.phase)
        shares = [(classes[part], phase.parts.get(part, 0) / most) for part in parts]
        phase_bar = bar(*shares, mark=None if measured_bytes is None else measured_bytes / most)
        measured_cells = (
            (format_bytes(measured_bytes), f"{phase.total_bytes / measured_bytes - 1:+.1%}")
            if measured_bytes
            else (NONE, NONE)
        )
        bars.append(
            (
                phase.phase.replace("_", " "),
                phase_bar,
                format_bytes(phase.total_bytes),
                *(measured_cells if measured else ()),
            )
        )
    heads = ("phase", "", "forecast", *(("measured", "forecast error") if measured else ()))
    rows = [(part, *(_format_amount(phase.parts.get(part, 0), size) for phase in forecast.phases)) for part in parts]
    rows.append(("total", *(_format_amount(phase.total_bytes, size) for phase in forecast.phases)))
    names = [phase.phase.replace("_", " ") for phase in forecast.phases]
    line = ", with a line at the measured value" if measured else ""
    return [
        explanation(f"Memory at the peak of each phase{line}."),
        html.legend(*((classes[part], part) for part in parts)),
        html.table("Phases", "tbnnn"[: len(heads)], heads, bars),
        html.table("Parts by phase", "t" + "n" * len(names), (unit, *names), rows),
    ]


def _format_amount(count: int, size: int) -> str:
    return f"{count / size:,.2f}" if count else NONE


# Pages of a training and of a memory forecast: single HTML files without external resources or scripts. Callers draw
# the plots with reports/plots.py, and the pages embed them as PNG.


@dataclass(frozen=True)
class MemoryHeadroom:
    """Available memory, and the largest value of each setting that fits while all others are unchanged."""

    available_bytes: int
    largest: Mapping[str, int | None]
    local_ranks: int = 1
    """Number of ranks that share the memory. `available_bytes` is the share of one rank."""


def write_train_page(
    report: TrainReport,
    analysis: AdapterAnalysis,
    forecast: MemoryForecast | None,
    measured: Mapping[str, int],
    plots: Mapping[str, bytes],
) -> str:
    """Return the page of one training. Equal arguments give equal pages.

    Args:
        report: Report of stage train.
        analysis: Analysis of the adapter after training.
        forecast: Memory forecast before training, if available.
        measured: Peak bytes of each phase.
        plots: PNG by the names of PICTURES. Missing plots are omitted.
    """
    sections = {
        "Loss": [*_render_picture("loss", plots), _render_losses(report)],
        "Recommendations for the next run": [_render_list(analysis.advice)]
        if analysis.advice
        else "No recommendations.",
        "Gradients": _render_picture("gradients", plots) or "No plot is available.",
        "Updates": [*_render_picture("updates", plots), explanation(UPDATES_NOTE)],
        "Modules": _render_modules(analysis),
        "Memory": render_memory(forecast, measured),
    }
    return _render_page(f"Training {report.run_id}", _render_train_header(report, analysis), sections)


def write_forecast_page(forecast: MemoryForecast, headroom: MemoryHeadroom | None, about: Sequence[str]) -> str:
    """Return the page of a forecast: a stacked bar for each phase, tables, maximum settings, and notes."""
    sections = {
        "Memory": render_memory(forecast, {}),
        "Maximum settings": _render_headroom(headroom),
        "Notes": [_render_list((*forecast.notes, *about))] if forecast.notes or about else "There are no notes.",
    }
    return _render_page("Memory forecast", _render_forecast_header(forecast, headroom), sections)


def _render_page(title: str, header: Html, sections: Mapping[str, Sequence[Html] | str]) -> str:
    main = tag("main", *(html.section(name, body) for name, body in sections.items()))
    style = PAGE_STYLE.read_text(encoding="utf-8") + OWN_STYLE
    return html.document(title, style, header, main, images=True)


def _render_header(kind: str, title: str, note: str, figures: Iterator[tuple[str, str, str]]) -> Html:
    items = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", more)))
        for name, value, more in figures
    ]
    return tag("header", tag("p", kind, class_="quiet"), tag("h1", title, tag("span", note)), tag("dl", *items))


def _render_train_header(report: TrainReport, analysis: AdapterAnalysis) -> Html:
    def figures() -> Iterator[tuple[str, str, str]]:
        best = report.validation_loss.get(report.best_step)
        early = report.steps < report.planned_steps
        yield "Validation loss", NONE if best is None else f"{best:.4f}", f"nats per token, step {report.best_step:,}"
        yield "Steps", f"{report.steps:,}", f"of {report.planned_steps:,} planned" if early else "as planned"
        share = format_percentage(report.trainable_parameters, report.total_parameters)
        yield "Trained", share, f"{report.trainable_parameters:,} of {report.total_parameters:,} parameters"
        yield (
            "Barely moved",
            f"{len(analysis.unchanged_modules):,}",
            f"of {format_count(len(analysis.modules), 'module')}",
        )

    title = f"{format_count(report.trained_tokens, 'answer token')} trained"
    note = f"adapter {report.adapter_digest[:12]}, of step {report.kept_step:,}"
    return _render_header(f"Training {report.run_id}", title, note, figures())


def _render_forecast_header(forecast: MemoryForecast, headroom: MemoryHeadroom | None) -> Html:
    def figures() -> Iterator[tuple[str, str, str]]:
        yield "Peak", format_bytes(forecast.peak.total_bytes), f"in phase {forecast.peak.phase.replace('_', ' ')}"
        if headroom:
            fits = forecast.needed_bytes(headroom.local_ranks) <= headroom.available_bytes
            yield "Available", format_bytes(headroom.available_bytes), "it fits" if fits else "it does not fit"
        yield "Host", format_bytes(forecast.host_bytes), "memory of the machine"
        share = format_percentage(forecast.trainable_parameters, forecast.total_parameters)
        yield "Trained", share, f"{forecast.trainable_parameters:,} of {forecast.total_parameters:,} parameters"

    return _render_header("Memory forecast", *describe_forecast(forecast), figures())


def describe_forecast(forecast: MemoryForecast) -> tuple[str, str]:
    """Return title and description of a forecast."""
    size = f"{format_count(forecast.rows, 'row')} of {format_count(forecast.row_tokens, 'token')}"
    title = f"{size} on a {DEVICES[forecast.device]}"
    checkpointing = "with" if forecast.activation_checkpointing else "without"
    ranks = f", on each of {forecast.ranks} ranks" if forecast.ranks > 1 else ""
    shared = ", with a share of the base" if forecast.shard_base else ""
    return (
        title,
        f"{forecast.learned_tokens:,} of them trained, {checkpointing} activation checkpointing{ranks}{shared}",
    )


def _render_picture(name: str, plots: Mapping[str, bytes]) -> list[Html]:
    if name not in plots:
        return []
    source = f"data:image/png;base64,{base64.b64encode(plots[name]).decode('ascii')}"
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
    return tag("ul", *(tag("li", tag("bdi", sentence)) for sentence in sentences))


def _render_modules(analysis: AdapterAnalysis) -> Sequence[Html] | str:
    if not analysis.modules:
        return "No module was adapted."
    kinds: dict[str, list[str]] = {}
    for name in analysis.modules:
        kinds.setdefault(parse_module_name(name).kind, []).append(name)
    unchanged = set(analysis.unchanged_modules)
    rows = [_module_kind_row(kind, [analysis.modules[name] for name in names], unchanged & set(names))
            for kind, names in kinds.items()]  # fmt: skip
    heads = ("kind of module", "modules", "rank", "effective rank", "update over weight", "barely moved")
    module_rows = [_module_row(name, module, name in unchanged) for name, module in analysis.modules.items()]
    module_heads = ("module", "rank", "effective rank", "update", "weight", "update over weight", "")
    modules_table = html.table("All modules", "tnnnnnt", module_heads, module_rows)
    return [
        explanation("Medians of each kind, followed by all modules."),
        html.table("Kinds of modules", "tnnnnn", heads, rows),
        tag("details", tag("summary", format_count(len(module_rows), "module")), modules_table),
    ]


def _module_kind_row(kind: str, members: Sequence[ModuleAnalysis], unchanged: set[str]) -> tuple[str, ...]:
    ranks = sorted({module.rank for module in members})
    ranks_text = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    effective_rank = statistics.median(module.effective_rank for module in members)
    ratio = statistics.median(module.update_ratio for module in members)
    return (
        kind,
        f"{len(members):,}",
        ranks_text,
        f"{effective_rank:.1f}",
        format_percentage(ratio, 1),
        f"{len(unchanged):,}" if unchanged else NONE,
    )


def _module_row(name: str, module: ModuleAnalysis, is_unchanged: bool) -> tuple[str, ...]:
    return (
        tag("bdi", name), f"{module.rank:,}", f"{module.effective_rank:.1f}", f"{module.update_norm:.3g}",
        f"{module.weight_norm:.3g}", format_percentage(module.update_ratio, 1), "barely moved" if is_unchanged else "",
    )  # fmt: skip


def _render_headroom(headroom: MemoryHeadroom | None) -> Sequence[Html] | str:
    if headroom is None:
        return "The memory of the device is unknown; set it with --memory."
    rows = [
        (tag("code", name), "not even one" if count is None else f"{count:,}")
        for name, count in headroom.largest.items()
    ]
    return [
        explanation(
            f"Maximum that fits into {format_bytes(headroom.available_bytes)}, if all other settings are unchanged."
        ),
        html.table("Maximum settings", "tn", ("setting", "largest"), rows),
    ]
