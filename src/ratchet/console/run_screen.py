"""Draws the screen of one run, and a table of several runs. A small screen shows the most important lines."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from ratchet.config import units
from ratchet.console.text_layout import (
    BAD,
    GOOD,
    QUIET,
    WARNING,
    WIDE,
    LineFormatter,
    ScreenLine,
    ScreenSize,
    draw_bar,
    draw_sparkline,
    select_lines,
    sparkline_range,
)
from ratchet.runs import progress_view
from ratchet.runs.progress_view import GenerationProgress, ProgressView, RankUtilization, SidecarState, get_live_number
from ratchet.runs.status import format_duration

LEAST_BAR, LONGEST_BAR = 6, 40
"""Minimum and maximum width of a bar in columns."""
TAIL = 26
"""Width in columns of the text after a curve."""
FIGURE = 9
"""Width in columns of the value before a curve."""
GAP = 2
"""Number of blanks between columns of the table."""
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


def render_training_lines(
    formatter: LineFormatter, name: str, view: ProgressView, sidecar: SidecarState, now: float
) -> list[ScreenLine]:
    """Return all lines of a training in order. For the arguments see `render_panel`."""
    return [
        render_heading(formatter, name, view, sidecar, now),
        render_progress(formatter, view, sidecar, now),
        *_render_losses(formatter, view),
        *_render_speeds(formatter, view),
        *_render_memory(formatter, view),
        *render_machine(formatter, view),
        *_render_checkpoints(formatter, view, sidecar, now),
        *_render_guards(formatter, view),
        *render_attempts(formatter, view),
        *_render_ranks(formatter, view),
        *render_recent_events(formatter, view),
    ]


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
    if not view.is_working or not sidecar.running:
        return ""
    left = view.eta.estimate(now)
    return left.describe() if left else ""


def render_heading(
    formatter: LineFormatter, name: str, view: ProgressView, sidecar: SidecarState, now: float
) -> ScreenLine:
    p = view.progress
    state = describe_state(view, sidecar)
    clauses: list[str | Text] = [Text.assemble((name, "bold"), "  ", (state, state_style(view, sidecar)))]
    silent_s = now - p.last_t
    if view.state == "training" and sidecar.running and silent_s > max(SILENT_S, SILENT_STEPS / (p.steps_per_s or 1.0)):
        clauses.append(Text(f"! no events for {format_duration(silent_s)}", WARNING))
    if p.attempts > 1:
        clauses.append(f"attempt {p.attempts}")
    if where := progress_view.describe_device(view.device, view.compute_dtype) if view.device else "":
        clauses.append(f"{where}{p.ranks_text}")
    if view.began_t is not None:
        until = now if sidecar.running else p.last_t
        clauses.append(f"{format_duration(max(0.0, until - view.began_t))} since the start")
    return formatter.line(HEAD, clauses)


def render_progress(formatter: LineFormatter, view: ProgressView, sidecar: SidecarState, now: float) -> ScreenLine:
    """Format steps, a bar and the time left, as far as they fit. The bar is omitted before the text."""
    p, unit = view.progress, "answer" if view.generation else "step"
    planned = p.planned_steps
    if not planned:
        return formatter.line(HEAD, [f"{unit} {p.step:,}" if p.step else f"no {unit} yet"])
    share = min(1.0, p.step / planned)
    left = describe_time_left(view, sidecar, now)
    is_unknown = view.is_working and sidecar.running and not left and p.step < planned
    suffixes = [
        f"{share:.0%}".replace("%", " %"),
        f"{left} left" if left else "time left unknown" if is_unknown else "",
    ]
    tail = ", ".join(filter(None, suffixes))
    for count in (f"{unit} {p.step:,} of {planned:,}", f"{p.step}/{planned}"):
        room = formatter.size.width - len(count) - len(tail) - 2
        if room >= LEAST_BAR:
            bar_text = draw_bar(share, min(room, LONGEST_BAR), formatter.letters)
            return ScreenLine(Text.assemble(f"{count} ", (bar_text, GOOD), f" {tail}"), HEAD)
    return formatter.line(HEAD, [f"{p.step}/{planned}", *suffixes[:1], *filter(None, (left,))])


def _render_losses(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    """Format both loss curves with the same vertical scale and the same range of steps."""
    p = view.progress
    train, validation = view.train.points(), view.validation.points()
    if not train and not validation:
        return
    span = (1, max(points[-1][0] for points in (train, validation) if points))
    scale = sparkline_range([value for _, value in (*train, *validation)])
    tail = TAIL if formatter.size.width >= WIDE + 10 else 0
    width = formatter.room - FIGURE - tail

    def draw_row(
        weight: int, label: str, value: float | None, points: list[tuple[int, float]], note: str
    ) -> ScreenLine:
        figure = "" if value is None else f"{value:.4f}" if abs(value) < 1e4 else f"{value:.2e}"
        curve = draw_sparkline(points, span, scale, width, formatter.letters)
        return formatter.row(
            weight, label, [Text.assemble(figure.ljust(FIGURE)[:FIGURE], (curve, "cyan"), f" {note}"[:tail])]
        )

    if train:
        yield draw_row(LOSS, "train loss" if tail else "loss", p.loss, train, f"steps {span[0]:,} to {span[1]:,}")
    if validation:
        best = "" if p.best_loss is None else f"best {p.best_loss:.4f} at {p.best_step:,}"
        yield draw_row(VALIDATION, "validation", p.validation_loss, validation, best)


def _render_speeds(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    p = view.progress
    if p.learning_rate is not None:
        norm = "" if view.gradient_norm is None else f"gradient norm {view.gradient_norm:.3g}"
        yield formatter.row(RATE, "learn rate", [f"{p.learning_rate:.2e}", *filter(None, (norm,))])
    tokens, trained = view.input_tokens_per_s, view.trained_tokens_per_s
    if tokens is None:
        return
    pace = "" if not p.steps_per_s else _format_pace(p.steps_per_s)
    used = "" if view.mfu is None else f"MFU {view.mfu:.1%}".replace("%", " %")
    learned = f"{trained:,.0f} trained" if trained is not None else ""
    yield formatter.row(SPEED, "speed", [f"{tokens:,.0f} tokens/s input", *filter(None, (learned, used, pace))])


def _format_pace(steps_per_s: float) -> str:
    return f"{steps_per_s:.2f} steps/s" if steps_per_s >= 0.5 else f"{1 / steps_per_s:.1f} s a step"


def _render_memory(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    """Format the peak memory as a share of the device's memory, with a mark at the forecast."""
    memory = view.progress.memory
    total = memory.device_bytes or view.available_bytes
    if total and (memory.peaks or memory.forecast):
        peak, foreseen = max(memory.peaks.values(), default=0), max(memory.forecast.values(), default=0)
        yield render_memory_row(formatter, peak, foreseen, total)


def render_memory_row(formatter: LineFormatter, used: int, forecast: int, total: int) -> ScreenLine:
    """Format a bar of used bytes as a share of `total`, with a mark at the forecast, if any."""
    unit, name = units.choose_unit(total)
    figures = f"{used / unit:.1f} of {total / unit:.1f} {name}"
    is_high = used > 0.95 * total
    clauses = [Text(f"! {figures}" if is_high else figures, WARNING if is_high else "")]
    if forecast:
        deviation = f" ({round(100 * (forecast / used - 1)):+d} %)" if used else ""
        clauses.append(Text(f"{formatter.letters.mark} forecast {forecast / unit:.1f}{deviation}"))
    width = min(LONGEST_BAR, formatter.room - sum(len(clause.plain) + 2 for clause in clauses))
    if width < LEAST_BAR:
        width = max(LEAST_BAR, min(LONGEST_BAR, formatter.room - len(clauses[0].plain) - 1))
    mark = forecast / total if forecast else None
    bar_text = (draw_bar(used / total, width, formatter.letters, mark), "cyan")
    return formatter.row(MEMORY, "memory", [Text.assemble(bar_text, " ", clauses[0]), *clauses[1:]])


def render_machine(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    """Format the system metrics. Damaged values are omitted."""
    system = view.system
    clauses = []
    for key, name in (("cpu_percent", "CPU"), ("memory_percent", "memory"), ("disk_used_percent", "disk")):
        if isinstance(value := system.get(key), int | float):
            clauses.append(f"{name} {value:.0f} %")
    if isinstance(rss := system.get("worker_memory_bytes"), int | float):
        clauses.append(f"worker {units.format_bytes(rss)}")
    gpus = [gpu for gpu in system.get("gpus") or () if isinstance(gpu, dict)]
    gpu_texts = [text for gpu in gpus if (text := _format_gpu(gpu))]
    if len(gpu_texts) == 1:
        clauses.insert(1, gpu_texts[0])
    if clauses:
        yield formatter.row(MACHINE, "machine", clauses)
    if len(gpu_texts) > 1:
        for index, text in enumerate(gpu_texts):
            yield formatter.row(MORE + index, "", [text])


def _format_gpu(gpu: dict[str, object]) -> str:
    values = []
    for key, form in (("utilization_percent", "{:.0f} %"), ("power_w", "{:.0f} W"), ("temperature_c", "{:.0f} C")):
        if isinstance(value := gpu.get(key), int | float):
            values.append(form.format(value))
    return f"GPU {gpu.get('index', '?')} {' '.join(values)}" if values else ""


def _render_checkpoints(
    formatter: LineFormatter, view: ProgressView, sidecar: SidecarState, now: float
) -> Iterator[ScreenLine]:
    p = view.progress
    clauses: list[str | Text] = []
    if p.checkpoint_t is not None:
        clauses.append(f"step {p.checkpoint_step:,}, sealed {format_duration(max(0.0, now - p.checkpoint_t))} ago")
    elif view.is_ready:
        clauses.append("none yet")
    if sidecar.saving is not None:
        clauses.append(Text(f"writing step {sidecar.saving:,}", GOOD))
    if p.checkpoint_costs.count:
        clauses.append(f"{p.checkpoint_costs.count} in total")
    if clauses:
        yield formatter.row(CHECKPOINT, "checkpoint", clauses)
    if sidecar.replica is not None:
        replica, is_failing = sidecar.replica, sidecar.replica.failed_since is not None
        clauses = [
            Text(("! " if is_failing else "") + replica.describe(p.checkpoint_step, now), WARNING if is_failing else "")
        ]
        if replica.in_flight is not None:
            clauses.append(Text(f"sending step {replica.in_flight:,}", GOOD))
        if replica.behind_bytes and not replica.result:  # the result may be recorded before the upload ends
            clauses.append(f"{units.format_bytes(replica.behind_bytes)} to send")
        yield formatter.row(REPLICA, "replica", clauses)


def _render_guards(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
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
        yield formatter.row(GUARDS, "guards", [Text(f"! {clauses[0]}", WARNING), *clauses[1:]])


def render_attempts(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    p = view.progress
    if p.attempts < 2 and not p.attempt_ends:
        return
    repeated = [f"{p.lost_steps:,} step{'s' * (p.lost_steps != 1)} repeated"] if p.lost_steps else []
    shown_events = {event.text for event in view.notable_events}  # `render_recent_events` shows them with their time
    newest = [end for end in p.attempt_ends[-1:] if end.replace(":", " died:", 1) not in shown_events]
    yield formatter.row(ATTEMPTS, "attempts", ["; ".join([f"{p.attempts}", *repeated, *newest])])
    for index, end in enumerate(reversed(p.attempt_ends[-4:-1])):
        yield formatter.row(MORE + index, "", [end])


def _render_ranks(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    """Format a summary, and a row for each rank. On small screens, rows of stragglers are omitted last."""
    if not view.ranks:
        return
    stragglers = view.stragglers
    for rank in stragglers[:1]:
        text = (
            f"! {_format_rank(rank)} computes {rank.relative_to_median - 1:.0%} longer than the median: other "
            "ranks wait for it"
        )
        yield formatter.row(STRAGGLER, "ranks", [Text(text.replace("%", " %"), WARNING)])
    if not stragglers:
        yield formatter.row(RATE, "ranks", [f"{len(view.ranks)}, no stragglers"])
    selected = sorted(view.ranks, key=lambda rank: (not rank.is_straggler, rank.rank))[:RANKS_SHOWN]
    for rank in sorted(selected, key=lambda rank: rank.rank):
        bar_text = draw_bar(rank.busy, 12, formatter.letters)
        row_text = f"{'!' if rank.is_straggler else ' '}{rank.rank:>3} {bar_text} {rank.busy:.0%} busy".replace(
            "%", " %"
        )
        style = WARNING if rank.is_straggler else ""
        weight = MACHINE if rank.is_straggler else MORE + 1 + rank.rank
        yield formatter.row(
            weight, "", [Text(row_text, style), f"{rank.relative_to_median:.2f}x", *filter(None, (rank.host,))]
        )


def _format_rank(rank: RankUtilization) -> str:
    return f"rank {rank.rank} on {rank.host}" if rank.host else f"rank {rank.rank}"


def render_recent_events(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    """Format the last notable events, the latest one at the bottom."""
    events = list(view.notable_events)[-NEWS_SHOWN:]
    for index, event in enumerate(events):
        clock = time.strftime("%H:%M:%S", time.localtime(event.t))
        weight = GRAVE if event.is_urgent and index == len(events) - 1 else MORE + len(events) - index
        text = (f"{'! ' if event.is_urgent else '  '}{event.text}", WARNING if event.is_urgent else QUIET)
        yield formatter.line(weight, [Text.assemble((f"{clock} ", QUIET), text)])


# Lines of a generation's screen.


def render_generation_lines(
    formatter: LineFormatter, name: str, view: ProgressView, sidecar: SidecarState, now: float
) -> list[ScreenLine]:
    """Return all lines of a generation in order. For the arguments see `render_panel`."""
    generation = view.generation or GenerationProgress()
    return [
        render_heading(formatter, name, view, sidecar, now),
        render_progress(formatter, view, sidecar, now),
        *_render_generation_speed(formatter, view, generation),
        *_render_batch(formatter, generation),
        *_render_generation_memory(formatter, generation),
        *render_machine(formatter, view),
        *_render_ends(formatter, generation),
        *_render_generation_guards(formatter, view),
        *render_attempts(formatter, view),
        *render_recent_events(formatter, view),
    ]


def _render_generation_speed(
    formatter: LineFormatter, view: ProgressView, generation: GenerationProgress
) -> Iterator[ScreenLine]:
    answers, tokens, points = generation.answers_per_s, generation.tokens_per_s, generation.speed.points()
    if answers is None or tokens is None or not points:
        return
    pace = f"{answers:,.2f} answers/s" if answers >= 0.5 or not answers else f"{1 / answers:,.1f} s per answer"
    answer_count = sum(generation.finish_counts.values())
    mean = f"{generation.tokens / answer_count:,.0f} tokens per answer" if answer_count else ""
    yield formatter.row(LOSS, "speed", [pace, f"{tokens:,.0f} tokens/s", *filter(None, (mean,))])
    width = formatter.room - FIGURE - (len(" tokens/s") if formatter.size.width >= WIDE else 0)
    values = [value for _, value in points]
    numbered = list(enumerate(values, start=1))  # each value covers about one second
    curve = draw_sparkline(
        numbered, (1, len(numbered)), (0.0, sparkline_range(values)[1]), min(width, len(numbered)), formatter.letters
    )
    suffix = " tokens/s" if formatter.size.width >= WIDE else ""
    yield formatter.row(
        SPEED, "", [Text.assemble(f"{points[-1][1]:,.0f}".ljust(FIGURE)[:FIGURE], (curve, "cyan"), suffix)]
    )


def _render_batch(formatter: LineFormatter, generation: GenerationProgress) -> Iterator[ScreenLine]:
    rows, held_tokens, budget, waiting = (
        get_live_number(generation.live, name) for name in ("rows", "held_tokens", "budget_tokens", "waiting")
    )
    if rows is None:
        return
    clauses = [f"{rows:,} row{'s' * (rows != 1)} in progress"]
    if held_tokens is not None and budget is not None:
        clauses.append(f"{held_tokens:,} of {budget:,} padded tokens")
    if waiting:
        clauses.append(f"{waiting:,} in the window")
    yield formatter.row(VALIDATION, "batch", clauses)


def _render_generation_memory(formatter: LineFormatter, generation: GenerationProgress) -> Iterator[ScreenLine]:
    used, foreseen, total = (
        get_live_number(generation.live, f"{name}_bytes") for name in ("held", "forecast", "device")
    )
    if used and total:
        yield render_memory_row(formatter, used, foreseen or 0, total)


def _render_ends(formatter: LineFormatter, generation: GenerationProgress) -> Iterator[ScreenLine]:
    """Format how answers ended. Reasons without an answer are marked."""
    if not generation.finish_counts:
        return
    clauses = [
        Text(f"! {count:,} {name}" if name in UNANSWERED else f"{count:,} {name}", WARNING * (name in UNANSWERED))
        for name, count in generation.finish_counts.most_common()
    ]
    yield formatter.row(CHECKPOINT, "ends", clauses)


def _render_generation_guards(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    if view.budget_shrinks:
        times = "time" if view.budget_shrinks == 1 else "times"
        clauses: list[str | Text] = [
            Text(f"! batch reduced {view.budget_shrinks:,} {times} for lack of memory", WARNING)
        ]
        limits = [tokens for tokens, _ in view.progress.budgets.values() if tokens is not None]
        clauses += [f"now at most {tokens:,} padded tokens" for tokens in limits[-1:]]
        yield formatter.row(GUARDS, "guards", clauses)


# One run on a screen, and several runs as a table.


def render_panel(name: str, view: ProgressView, sidecar: SidecarState, now: float, size: ScreenSize) -> Text:
    """Render one run on a screen of at least 40 x 10.

    Args:
        name: Name of the run.
        view: Progress from its journal.
        sidecar: State from its directory.
        now: Unix time, for ages.
        size: Size of the screen.
    """
    render_lines = render_generation_lines if view.generation else render_training_lines
    lines = select_lines(render_lines(LineFormatter(size), name, view, sidecar, now), size.height)
    return _join_lines(lines)


def render_table(rows: Sequence[tuple[str, ProgressView, SidecarState]], now: float, size: ScreenSize) -> Text:
    """Render several runs as a table, active ones first. Columns and rows that do not fit are omitted.

    Args:
        rows: Name, progress and directory state of each run.
        now: Unix time, for ages.
        size: Size of the screen.
    """
    formatter = LineFormatter(size)
    sorted_rows = sorted(rows, key=lambda row: not row[2].running)
    room = max(1, size.height - 1)
    visible = sorted_rows if len(sorted_rows) <= room else sorted_rows[: max(1, room - 1)]
    columns = _select_columns(_build_columns(visible, now), size.width)
    blanks = " " * GAP
    lines = [
        Text(blanks.join(formatter.padded(column.title, column.width, column.right) for column in columns), "underline")
    ]
    for index, (_, view, sidecar) in enumerate(visible):
        cells = (
            formatter.padded(formatter.safe(column.cells[index]).plain, column.width, column.right)
            for column in columns
        )
        lines.append(formatter.cut(Text(blanks.join(cells).rstrip(), state_style(view, sidecar)), size.width))
    if len(visible) < len(sorted_rows):
        lines.append(Text(f"and {len(sorted_rows) - len(visible)} more"))
    return _join_lines(lines[: size.height])


def _join_lines(lines: Sequence[Text]) -> Text:
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)


@dataclass(frozen=True)
class _RunTableColumn:
    title: str
    cells: tuple[str, ...]
    weight: int
    """Columns with the greatest weight are omitted first."""
    right: bool = True

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.title, *self.cells)))


def _build_columns(rows: Sequence[tuple[str, ProgressView, SidecarState]], now: float) -> list[_RunTableColumn]:
    """Return all columns with a value for at least one run, from left to right."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def age(t: float | None) -> str:
        return "" if t is None else format_duration(max(0.0, now - t))

    runs = [(view.progress, view, sidecar) for _, view, sidecar in rows]
    columns = [
        _RunTableColumn("run", tuple(name[:NAME_COLUMNS] for name, _, _ in rows), 0, False),
        _RunTableColumn("state", tuple(_attention_mark(v) + describe_state(v, a) for _, v, a in runs), 1, False),
        _RunTableColumn("step", tuple(f"{p.step}/{p.planned_steps}" if p.planned_steps else "" for p, _, _ in runs), 2),
        _RunTableColumn(
            "left", tuple(describe_time_left(v, a, now).removeprefix("about ") for _, v, a in runs), 4, False
        ),
        _RunTableColumn("loss", tuple(number(p.loss, ".4f") for p, _, _ in runs), 3),
        _RunTableColumn("validation", tuple(number(p.validation_loss, ".4f") for p, _, _ in runs), 5),
        _RunTableColumn("tokens/s", tuple(number(_tokens_per_s(v), ",.0f") for _, v, _ in runs), 6),
        _RunTableColumn("checkpoint", tuple(age(p.checkpoint_t) for p, _, _ in runs), 7),
        _RunTableColumn("attempts", tuple(str(p.attempts or "") for p, _, _ in runs), 8),
        _RunTableColumn("alerts", tuple(str(len(p.alerts) or "") for p, _, _ in runs), 9),
    ]
    return [column for column in columns if any(column.cells)]


def _tokens_per_s(view: ProgressView) -> float | None:
    return view.generation.tokens_per_s if view.generation else view.input_tokens_per_s


def _attention_mark(view: ProgressView) -> str:
    return "! " if view.state in ("failed", "waiting") or view.stragglers else "  "


def _select_columns(columns: Sequence[_RunTableColumn], width: int) -> list[_RunTableColumn]:
    """Return the columns that fit into this width, from left to right. The column of smallest weight is always
    included."""
    free_columns = width + GAP
    selected: list[int] = []
    for index in sorted(range(len(columns)), key=lambda index: columns[index].weight):
        if not selected or columns[index].width + GAP <= free_columns:
            free_columns -= columns[index].width + GAP
            selected.append(index)
    return [columns[index] for index in sorted(selected)]
