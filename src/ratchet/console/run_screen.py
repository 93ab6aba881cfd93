"""Draws the screen of one run, and a table of several runs. A small screen shows the most important lines."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import ConsoleOptions, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ratchet.config import units
from ratchet.config.units import format_count, format_duration
from ratchet.console.terminal import BAD, GOOD, QUIET, WARNING, TableColumn, build_table, choose_overflow, clean_text
from ratchet.runs import progress_view
from ratchet.runs.progress_view import GenerationProgress, ProgressView, RankUtilization, SidecarState, get_live_number

WIDE = 60
"""Minimum width in columns for full labels. Narrower screens use short labels."""
SHORT_LABELS = {
    "train loss": "loss", "validation": "valid", "learn rate": "lr", "checkpoint": "ckpt", "attempts": "tries",
}  # fmt: skip
CURVE = 32
"""Maximum width in columns of a curve."""
LEVELS, ASCII_LEVELS = "▁▂▃▄▅▆▇█", "_.,-~=+*#"
"""Letters of a curve, from the lowest to the highest."""
LEAST_BAR, LONGEST_BAR = 6, 40
"""Minimum and maximum width of the progress bar in columns."""
NAME_COLUMNS = 12
"""Maximum width in columns of a run's name in the table."""
NEWS_SHOWN, RANKS_SHOWN = 6, 16
"""Maximum numbers of recent events and of ranks on the screen."""
SILENT_S, SILENT_STEPS = 60.0, 5.0
"""A training is marked as silent after SILENT_S seconds without events, or after the time that SILENT_STEPS steps
usually take if this is longer."""

STATES = {"training": GOOD, "answering": GOOD, "finished": GOOD, "failed": BAD, "waiting": WARNING, "stopped": WARNING}
UNANSWERED = ("refused", "memory", "invalid", "context", "filtered")
"""Finish reasons without a complete answer, which need attention."""

HEAD, LOSS, GRAVE, VALIDATION, CHECKPOINT, SPEED, ATTEMPTS, STRAGGLER, MEMORY, REPLICA, RATE, GUARDS, MACHINE, MORE = (
    range(14)
)
"""Weights of lines. Lines with the greatest weight are omitted first."""


@dataclass(frozen=True)
class ScreenLine:
    """A line of a screen: a label, and clauses that are separated by commas. Long lines are cut at the end."""

    weight: int
    """Lines with the greatest weight are omitted first."""
    label: str
    clauses: Sequence[str | Text | None]
    """Clauses. Empty ones are omitted."""

    def render(self, options: ConsoleOptions) -> RenderableType:
        """Return the line for this screen."""
        text = Text(no_wrap=True, overflow=choose_overflow(options))
        if self.label.strip():
            text.append(_label(self.label, options), QUIET)
        elif self.label:
            text.append(_label("", options))
        clauses = [
            clause if isinstance(clause, Text) else Text(clean_text(clause)) for clause in self.clauses if clause
        ]
        return text.append_text(Text(", ").join(clauses))


def _label(label: str, options: ConsoleOptions) -> str:
    return label.ljust(12) if options.max_width >= WIDE else SHORT_LABELS.get(label, label).ljust(8)


def _mark(text: str, is_urgent: bool = True) -> Text:
    """Mark text that needs attention."""
    return Text(clean_text(f"! {text}" if is_urgent else text), WARNING if is_urgent else "")


def _percent(share: float, form: str = ".0%") -> str:
    return format(share, form).replace("%", " %")


def draw_curve(
    points: Sequence[tuple[int, float]], last: int, scale: tuple[float, float], width: int, levels: str
) -> str:
    """Draw a curve of steps 1 to `last` in one line: each letter shows the mean of its points, or is a blank.

    `scale` has the values of the lowest and of the highest letter of `levels`.
    """
    cells: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        cells[min(width - 1, (step - 1) * width // max(1, last))].append(value)
    low, high = scale
    shares = [(sum(cell) / len(cell) - low) / ((high - low) or 1.0) if cell else None for cell in cells]
    top = len(levels) - 1
    return "".join(" " if share is None else levels[min(top, max(0, int(share * (top + 1))))] for share in shares)


def describe_state(view: ProgressView, sidecar: SidecarState) -> str:
    """Describe the state of the run in a few words."""
    if (view.is_working or view.state in ("starting", "waiting")) and not sidecar.running:
        return "not running" if view.state != "starting" or view.progress.attempts else "not started"
    return {"starting": "loading", "waiting": "waiting to restart"}.get(view.state, view.state)


def state_style(view: ProgressView, sidecar: SidecarState) -> str:
    """Return the colour of the state. Screens without colours lose nothing: `describe_state` gives the state in
    words."""
    return WARNING if describe_state(view, sidecar) == "not running" else STATES.get(view.state, "")


def describe_time_left(view: ProgressView, sidecar: SidecarState, now: float) -> str:
    """Describe the estimated time left; empty if the run is not active or no estimate is possible yet."""
    left = view.eta.estimate(now) if view.is_working and sidecar.running else None
    return left.describe() if left else ""


def _head(name: str, view: ProgressView, sidecar: SidecarState, now: float) -> ScreenLine:
    p = view.progress
    silent_s = now - p.last_t
    is_silent = (
        view.state == "training" and sidecar.running and silent_s > max(SILENT_S, SILENT_STEPS / (p.steps_per_s or 1.0))
    )
    where = progress_view.describe_device(view.device, view.compute_dtype) if view.device else ""
    until = now if sidecar.running else p.last_t
    age = "" if view.began_t is None else f"{format_duration(max(0.0, until - view.began_t))} since the start"
    clauses = [
        Text.assemble((name, "bold"), "  ", (describe_state(view, sidecar), state_style(view, sidecar))),
        _mark(f"no events for {format_duration(silent_s)}") if is_silent else None,
        f"attempt {p.attempts}" if p.attempts > 1 else "",
        where and f"{where}{p.ranks_text}",
        age,
    ]
    return ScreenLine(HEAD, "", clauses)


def _render_progress(view: ProgressView, sidecar: SidecarState, now: float, options: ConsoleOptions) -> RenderableType:
    """Render steps, a bar and the time left. On a narrow screen, the bar is omitted before the text."""
    p, unit = view.progress, "answer" if view.generation else "step"
    planned = p.planned_steps
    if not planned:
        return ScreenLine(HEAD, "", [f"{unit} {p.step:,}" if p.step else f"no {unit} yet"]).render(options)
    left = describe_time_left(view, sidecar, now)
    is_unknown = view.is_working and sidecar.running and not left and p.step < planned
    tail = _percent(min(1.0, p.step / planned))
    tail += f", {left} left" if left else ", time left unknown" if is_unknown else ""
    for count in (f"{unit} {p.step:,} of {planned:,}", f"{p.step}/{planned}"):
        room = options.max_width - len(count) - len(tail) - 2
        if room >= LEAST_BAR:
            row = Table.grid(padding=(0, 1, 0, 0))
            row.add_row(count, ProgressBar(planned, p.step, width=min(room, LONGEST_BAR)), Text(tail, no_wrap=True))
            return row
    return ScreenLine(HEAD, "", [f"{p.step}/{planned}", tail]).render(options)


def _losses(view: ProgressView, options: ConsoleOptions) -> Iterator[ScreenLine]:
    """Yield both losses, and their curves with the same scale and the same range of steps.

    The highest 5 % of the values are cut off, so that one spike does not flatten the curve.
    """
    p = view.progress
    curves = [view.train.points(), view.validation.points()]
    values = sorted(value for points in curves for _, value in points)
    if not values:
        return
    scale = values[0], values[max(0, math.ceil(0.95 * len(values)) - 1)]
    last = max(points[-1][0] for points in curves if points)
    levels = ASCII_LEVELS if options.ascii_only else LEVELS
    is_wide = options.max_width >= WIDE
    width = min(CURVE, options.max_width - (42 if is_wide else 17))
    best = "" if p.best_loss is None else f" best {p.best_loss:.4f} at {p.best_step:,}"
    rows = ((LOSS, "train loss", p.loss, f" steps 1 to {last:,}"), (VALIDATION, "validation", p.validation_loss, best))
    for (weight, label, value, note), points in zip(rows, curves, strict=True):
        if points:
            figure = "" if value is None else f"{value:.4f}" if abs(value) < 1e4 else f"{value:.2e}"
            curve = draw_curve(points, last, scale, max(1, width), levels)
            yield ScreenLine(weight, label, [Text.assemble(f"{figure:9}", (curve, "cyan"), note * is_wide)])


def _speeds(view: ProgressView) -> Iterator[ScreenLine]:
    p = view.progress
    tokens, trained = p.tokens_per_s, p.trained_tokens_per_s
    if p.learning_rate is not None:
        norm = "" if view.gradient_norm is None else f"gradient norm {view.gradient_norm:.3g}"
        yield ScreenLine(RATE, "learn rate", [f"{p.learning_rate:.2e}", norm])
    if tokens is not None:
        pace = "" if not p.steps_per_s else _format_pace(p.steps_per_s, "step")
        clauses = [
            f"{tokens:,.0f} tokens/s input",
            "" if trained is None else f"{trained:,.0f} trained",
            "" if view.mfu is None else f"MFU {_percent(view.mfu, '.1%')}",
            pace,
        ]
        yield ScreenLine(SPEED, "speed", clauses)


def _format_pace(per_s: float, unit: str) -> str:
    return f"{per_s:,.2f} {unit}s/s" if per_s >= 0.5 or not per_s else f"{1 / per_s:,.1f} s per {unit}"


def _memory(used: int, forecast: int, total: int) -> Iterator[ScreenLine]:
    """Yield used bytes as a share of `total`, and the forecast, if any."""
    if total and (used or forecast):
        unit, name = units.choose_unit(total)
        figures = f"{used / unit:.1f} of {total / unit:.1f} {name} ({_percent(used / total)})"
        deviation = f" ({round(100 * (forecast / used - 1)):+d} %)" if used else ""
        foreseen = f"forecast {forecast / unit:.1f}{deviation}" if forecast else ""
        yield ScreenLine(MEMORY, "memory", [_mark(figures, used > 0.95 * total), foreseen])


def _machine(view: ProgressView) -> Iterator[ScreenLine]:
    """Yield the system metrics. Damaged values are omitted."""
    forms = {
        "cpu_percent": "CPU {:.0f} %", "memory_percent": "memory {:.0f} %", "disk_used_percent": "disk {:.0f} %",
        "utilization_percent": "{:.0f} %", "power_w": "{:.0f} W", "temperature_c": "{:.0f} C",
    }  # fmt: skip

    def describe(data: dict[str, object]) -> list[str]:
        return [form.format(value) for key, form in forms.items() if isinstance(value := data.get(key), int | float)]

    clauses = describe(view.system)
    if isinstance(rss := view.system.get("worker_memory_bytes"), int | float):
        clauses.append(f"worker {units.format_bytes(rss)}")
    gpus = [gpu for gpu in view.system.get("gpus") or () if isinstance(gpu, dict)]
    gpu_texts = [f"GPU {gpu.get('index', '?')} {' '.join(values)}" for gpu in gpus if (values := describe(gpu))]
    if len(gpu_texts) == 1:
        clauses.insert(1, gpu_texts.pop())
    if clauses:
        yield ScreenLine(MACHINE, "machine", clauses)
    for index, text in enumerate(gpu_texts):
        yield ScreenLine(MORE + index, " ", [text])


def _checkpoints(view: ProgressView, sidecar: SidecarState, now: float) -> Iterator[ScreenLine]:
    p, replica = view.progress, sidecar.replica
    newest = "none yet" if view.is_ready else ""
    if p.checkpoint_t is not None:
        newest = f"step {p.checkpoint_step:,}, sealed {format_duration(max(0.0, now - p.checkpoint_t))} ago"
    clauses = [
        newest,
        None if sidecar.saving is None else Text(f"writing step {sidecar.saving:,}", GOOD),
        f"{p.checkpoint_costs.count} in total" if p.checkpoint_costs.count else "",
    ]
    if any(clauses):
        yield ScreenLine(CHECKPOINT, "checkpoint", clauses)
    if replica is not None:
        # The result may be recorded before the upload ends.
        behind = units.format_bytes(replica.behind_bytes) if replica.behind_bytes and not replica.result else ""
        clauses = [
            _mark(replica.describe(p.checkpoint_step, now), replica.failed_since is not None),
            None if replica.in_flight is None else Text(f"sending step {replica.in_flight:,}", GOOD),
            behind and f"{behind} to send",
        ]
        yield ScreenLine(REPLICA, "replica", clauses)


def _guards(view: ProgressView) -> Iterator[ScreenLine]:
    p = view.progress
    counts = (
        (len(p.skipped_steps), "skipped step", "skipped steps"),
        (view.rollbacks, "rolled back", "rolled back"),
        (view.budget_shrinks, "micro-batch shrunk", "micro-batches shrunk"),
        (p.repeats, "step computed twice", "steps computed twice"),
        (p.spikes, "gradient spike", "gradient spikes"),
    )
    clauses = [f"{count:,} {singular if count == 1 else plural}" for count, singular, plural in counts if count]
    clauses += [f"{phase} at most {tokens:,} tokens" for phase, (tokens, _) in p.budgets.items() if tokens is not None]
    if clauses:
        yield ScreenLine(GUARDS, "guards", [_mark(clauses[0]), *clauses[1:]])


def _attempts(view: ProgressView) -> Iterator[ScreenLine]:
    p = view.progress
    if p.attempts < 2 and not p.attempt_ends:
        return
    repeated = [f"{format_count(p.lost_steps, 'step')} repeated"] if p.lost_steps else []
    shown_events = {event.text for event in view.notable_events}  # `_recent_events` shows them with their time
    newest = [end for end in p.attempt_ends[-1:] if end.replace(":", " died:", 1) not in shown_events]
    yield ScreenLine(ATTEMPTS, "attempts", ["; ".join([f"{p.attempts}", *repeated, *newest])])
    for index, end in enumerate(reversed(p.attempt_ends[-4:-1])):
        yield ScreenLine(MORE + index, " ", [end])


def _ranks(view: ProgressView) -> Iterator[ScreenLine]:
    """Yield a summary, and a line for each rank. On small screens, lines of stragglers are omitted last."""
    if view.ranks and not view.stragglers:
        yield ScreenLine(RATE, "ranks", [f"{len(view.ranks)}, no stragglers"])
    for rank in view.stragglers[:1]:
        name = f"rank {rank.rank} on {rank.host}" if rank.host else f"rank {rank.rank}"
        excess = _percent(rank.relative_to_median - 1)
        text = f"{name} computes {excess} longer than the median: other ranks wait for it"
        yield ScreenLine(STRAGGLER, "ranks", [_mark(text)])

    def order(rank: RankUtilization) -> tuple[bool, int]:
        return not rank.is_straggler, rank.rank

    for rank in sorted(sorted(view.ranks, key=order)[:RANKS_SHOWN], key=lambda rank: rank.rank):
        text = f"{'!' if rank.is_straggler else ' '}{rank.rank:>3} {_percent(rank.busy)} busy"
        weight = MACHINE if rank.is_straggler else MORE + 1 + rank.rank
        style = WARNING if rank.is_straggler else ""
        yield ScreenLine(weight, " ", [Text(text, style), f"{rank.relative_to_median:.2f}x", rank.host])


def _recent_events(view: ProgressView) -> Iterator[ScreenLine]:
    """Yield the last notable events, the latest one at the bottom."""
    events = list(view.notable_events)[-NEWS_SHOWN:]
    for index, event in enumerate(events):
        clock = time.strftime("%H:%M:%S", time.localtime(event.t))
        weight = GRAVE if event.is_urgent and index == len(events) - 1 else MORE + len(events) - index
        text = clean_text(f"{'! ' if event.is_urgent else '  '}{event.text}")
        yield ScreenLine(
            weight, "", [Text.assemble((f"{clock} ", QUIET), (text, WARNING if event.is_urgent else QUIET))]
        )


def _generation_lines(view: ProgressView, generation: GenerationProgress) -> Iterator[ScreenLine]:
    """Yield the lines that only a generation has."""
    answers, tokens = generation.answers_per_s, generation.tokens_per_s
    live = {name: get_live_number(generation.live, name) for name in generation.live}
    if answers is not None and tokens is not None:
        count = sum(generation.finish_counts.values())
        mean = f"{generation.tokens / count:,.0f} tokens per answer" if count else ""
        yield ScreenLine(LOSS, "speed", [_format_pace(answers, "answer"), f"{tokens:,.0f} tokens/s", mean])
    if (rows := live.get("rows")) is not None:
        held, budget, waiting = live.get("held_tokens"), live.get("budget_tokens"), live.get("waiting")
        clauses = [
            f"{format_count(rows, 'row')} in progress",
            "" if held is None or budget is None else f"{held:,} of {budget:,} padded tokens",
            f"{waiting:,} in the window" if waiting else "",
        ]
        yield ScreenLine(VALIDATION, "batch", clauses)
    if used := live.get("held_bytes"):
        yield from _memory(used, live.get("forecast_bytes") or 0, live.get("device_bytes") or 0)
    yield from _machine(view)
    if generation.finish_counts:
        ends = generation.finish_counts.most_common()
        yield ScreenLine(CHECKPOINT, "ends", [_mark(f"{count:,} {name}", name in UNANSWERED) for name, count in ends])
    if view.budget_shrinks:
        times = "time" if view.budget_shrinks == 1 else "times"
        limits = [tokens for tokens, _ in view.progress.budgets.values() if tokens is not None]
        limit = f"now at most {limits[-1]:,} padded tokens" if limits else ""
        yield ScreenLine(
            GUARDS, "guards", [_mark(f"batch reduced {view.budget_shrinks:,} {times} for lack of memory"), limit]
        )


def _training_lines(
    view: ProgressView, sidecar: SidecarState, now: float, options: ConsoleOptions
) -> Iterator[ScreenLine]:
    """Yield the lines that only a training has."""
    memory = view.progress.memory
    yield from _losses(view, options)
    yield from _speeds(view)
    yield from _memory(
        max(memory.peaks.values(), default=0), max(memory.forecast.values(), default=0),
        memory.device_bytes or view.available_bytes,
    )  # fmt: skip
    yield from _machine(view)
    yield from _checkpoints(view, sidecar, now)
    yield from _guards(view)


def render_panel(
    name: str, view: ProgressView, sidecar: SidecarState, now: float, options: ConsoleOptions
) -> RenderableType:
    """Render one run.

    Args:
        name: Name of the run.
        view: Progress from its journal.
        sidecar: State from its directory.
        now: Unix time, for ages.
        options: Size of the screen (`max_width`, `max_height`) and its encoding. Lines that do not fit are omitted.
    """
    own = (
        _generation_lines(view, view.generation)
        if view.generation is not None
        else _training_lines(view, sidecar, now, options)
    )
    lines = [*own, *_attempts(view), *_ranks(view), *_recent_events(view)]
    room = max(0, options.max_height - 2)
    kept = sorted(sorted(range(len(lines)), key=lambda index: (lines[index].weight, index))[:room])
    head = [_head(name, view, sidecar, now).render(options), _render_progress(view, sidecar, now, options)]
    return Group(*head[: options.max_height], *(lines[index].render(options) for index in kept))


def render_table(
    rows: Sequence[tuple[str, ProgressView, SidecarState]], now: float, options: ConsoleOptions
) -> RenderableType:
    """Render several runs as a table, active ones first. Columns and rows that do not fit are omitted.

    Args:
        rows: Name, progress and directory state of each run.
        now: Unix time, for ages.
        options: Size of the screen and its encoding.
    """

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    sorted_rows = sorted(rows, key=lambda row: not row[2].running)
    room = max(1, options.max_height - 1)
    visible = sorted_rows if len(sorted_rows) <= room else sorted_rows[: max(1, room - 1)]
    cells = []
    for name, view, sidecar in visible:
        p = view.progress
        is_urgent = view.state in ("failed", "waiting") or view.stragglers
        tokens_per_s = view.generation.tokens_per_s if view.generation else p.tokens_per_s
        cells.append((
            name[:NAME_COLUMNS],
            f"{'!' if is_urgent else ' '} {describe_state(view, sidecar)}",
            f"{p.step}/{p.planned_steps}" if p.planned_steps else "",
            describe_time_left(view, sidecar, now).removeprefix("about "),
            number(p.loss, ".4f"),
            number(p.validation_loss, ".4f"),
            number(tokens_per_s, ",.0f"),
            "" if p.checkpoint_t is None else format_duration(max(0.0, now - p.checkpoint_t)),
            str(p.attempts or ""),
            str(len(p.alerts) or ""),
        ))  # fmt: skip
    titles = (
        ("run", 0), ("state", 1), ("step", 2), ("left", 4), ("loss", 3), ("validation", 5), ("tokens/s", 6),
        ("checkpoint", 7), ("attempts", 8), ("alerts", 9),
    )  # fmt: skip
    columns = [
        TableColumn(title, tuple(row[at] for row in cells), weight, "left" if at in (0, 1, 3) else "right")
        for at, (title, weight) in enumerate(titles)
    ]
    table = build_table(columns, [state_style(view, sidecar) for _, view, sidecar in visible], options)
    more = len(sorted_rows) - len(visible)
    return Group(table, Text(f"and {more} more")) if more else table
