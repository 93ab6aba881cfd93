"""Renders the pages of one training: profile (Markdown), memory forecast, and training report."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.config.units import choose_unit, format_bytes, format_count
from ratchet.reports import pages, plots
from ratchet.reports.plots import Figure
from ratchet.storage.html import NONE, format_percentage
from ratchet.storage.records.training import (
    AdapterAnalysis,
    MemoryForecast,
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

PART_STYLES = 14
"""Number of styles of memory parts (`part0` ... in templates/style.css)."""
DEVICES = {"cpu": "CPU", "cuda": "GPU"}


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


def summarize_memory(forecast: MemoryForecast | None, measured: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the values of macro `memory`; None if nothing was forecast or measured."""
    if forecast is None:
        measured_rows = [(phase.replace("_", " "), format_bytes(count)) for phase, count in measured.items()]
        return {"parts": [], "phases": measured_rows} if measured else None
    parts = list(dict.fromkeys(part for phase in forecast.phases for part in phase.parts))
    classes = {part: f"part{number % PART_STYLES}" for number, part in enumerate(parts)}
    most = max([forecast.peak.total_bytes, *measured.values(), 1])
    size, unit = choose_unit(most)
    bar = pages.macros().bar
    phases: list[tuple[object, ...]] = []
    for phase in forecast.phases:
        count = measured.get(phase.phase)
        shares = [(classes[part], phase.parts.get(part, 0) / most) for part in parts]
        row = (phase.phase.replace("_", " "), bar(shares, None if count is None else count / most),
               format_bytes(phase.total_bytes))  # fmt: skip
        error = (format_bytes(count), f"{phase.total_bytes / count - 1:+.1%}") if count else (NONE, NONE)
        phases.append((*row, *error) if measured else row)

    def amount(count: int) -> str:
        return f"{count / size:,.2f}" if count else NONE

    rows = [(part, *(amount(phase.parts.get(part, 0)) for phase in forecast.phases)) for part in parts]
    rows.append(("total", *(amount(phase.total_bytes) for phase in forecast.phases)))
    names = [phase.phase.replace("_", " ") for phase in forecast.phases]
    legend = [(classes[part], part) for part in parts]
    return {"measured": bool(measured), "legend": legend, "phases": phases, "unit": unit, "names": names, "parts": rows}


# Pages of a training and of a memory forecast.


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
    loss: Figure | None = None,
    loss_description: str = "nats per answer token",
) -> str:
    """Return the page of one training. Equal arguments give equal pages.

    Args:
        report: Report of stage train.
        analysis: Analysis of the adapter after training.
        forecast: Memory forecast before training, if available.
        measured: Peak bytes of each phase.
        loss: Figure of the loss (`plots.build_loss_figure`).
        loss_description: Unit of the loss.
    """
    best, is_early = report.validation_loss.get(report.best_step), report.steps < report.planned_steps
    figures = [
        ("Validation loss", NONE if best is None else f"{best:.4f}", f"{loss_description}, step {report.best_step:,}"),
        ("Steps", report.steps, f"of {report.planned_steps:,} planned" if is_early else "as planned"),
        _trained_share(report),
        ("Barely moved", len(analysis.unchanged_modules), f"of {format_count(len(analysis.modules), 'module')}"),
    ]
    return pages.render(
        "training",
        title=f"Training {report.run_id}",
        sections=("Loss", "Recommendations for the next run", "Gradients", "Updates", "Modules", "Memory"),
        kind=f"Training {report.run_id}",
        heading=f"{format_count(report.trained_tokens, 'answer token')} trained",
        note=f"adapter {report.adapter_digest[:12]}, of step {report.kept_step:,}",
        figures=figures,
        report=report,
        analysis=analysis,
        loss=loss,
        gradients=plots.build_gradient_map(analysis),
        updates=plots.build_update_figure(analysis),
        kinds=_summarize_kinds(analysis),
        memory=summarize_memory(forecast, measured),
    )


def _trained_share(counts: TrainReport | MemoryForecast) -> tuple[str, str, str]:
    trainable, total = counts.trainable_parameters, counts.total_parameters
    return "Trained", format_percentage(trainable, total), f"{trainable:,} of {total:,} parameters"


def write_forecast_page(forecast: MemoryForecast, headroom: MemoryHeadroom | None, about: Sequence[str]) -> str:
    """Return the page of a forecast: a stacked bar for each phase, tables, maximum settings, and notes."""
    peak = forecast.peak
    figures = [("Peak", format_bytes(peak.total_bytes), f"in phase {peak.phase.replace('_', ' ')}")]
    if headroom:
        fits = forecast.needed_bytes(headroom.local_ranks) <= headroom.available_bytes
        figures.append(("Available", format_bytes(headroom.available_bytes), "it fits" if fits else "it does not fit"))
    figures += [("Host", format_bytes(forecast.host_bytes), "memory of the machine"), _trained_share(forecast)]
    heading, note = describe_forecast(forecast)
    return pages.render(
        "training",
        title="Memory forecast",
        sections=("Memory", "Maximum settings", "Notes"),
        kind="Memory forecast",
        heading=heading,
        note=note,
        figures=figures,
        report=None,
        memory=summarize_memory(forecast, {}),
        headroom=headroom,
        notes=(*forecast.notes, *about),
    )


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


def _summarize_kinds(analysis: AdapterAnalysis) -> list[tuple[object, ...]]:
    """Return a row for each kind of module, with medians."""
    kinds: dict[str, list[str]] = {}
    for name in analysis.modules:
        kinds.setdefault(parse_module_name(name).kind, []).append(name)
    rows: list[tuple[object, ...]] = []
    for kind, names in kinds.items():
        modules = [analysis.modules[name] for name in names]
        ranks = sorted({module.rank for module in modules})
        ratio = statistics.median(module.update_ratio for module in modules)
        rows.append((
            kind, len(modules), f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}",
            f"{statistics.median(module.effective_rank for module in modules):.1f}", format_percentage(ratio, 1),
            len(set(names) & set(analysis.unchanged_modules)) or NONE,
        ))  # fmt: skip
    return rows
