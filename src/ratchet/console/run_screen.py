"""Formats the lines of a run's screen by subject. A small screen shows the most important ones."""

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
TAIL = 26
"""Columns for the text next to a curve."""
NEWS_SHOWN, RANKS_SHOWN = 6, 16
SILENT_S, SILENT_STEPS = 60.0, 5.0
"""A training without events for this long, and for this many steps, is marked as silent."""

STATES = {"training": GOOD, "answering": GOOD, "finished": GOOD, "failed": BAD, "waiting": WARNING, "stopped": WARNING}

HEAD, LOSS, GRAVE, VALIDATION, CHECKPOINT, SPEED, ATTEMPTS, STRAGGLER, MEMORY, REPLICA, RATE, GUARDS, MACHINE, MORE = (
    range(14)
)
"""Weights of lines. The line with the smallest weight is the last to be omitted."""


def render_training_lines(
    formatter: LineFormatter, name: str, view: ProgressView, sidecar: SidecarState, now: float
) -> list[ScreenLine]:
    """Return all lines of a training in order. For the arguments see `render_panel`."""
    return [
        render_heading(formatter, name, view, sidecar, now),
        render_progress(formatter, view, sidecar, now),
        *_losses(formatter, view),
        *_speeds(formatter, view),
        *_memory(formatter, view),
        *render_machine(formatter, view),
        *_copies(formatter, view, sidecar, now),
        *_guards(formatter, view),
        *render_attempts(formatter, view),
        *_ranks(formatter, view),
        *render_recent_events(formatter, view),
    ]


def describe_state(view: ProgressView, sidecar: SidecarState) -> str:
    """Describe the state of the run in a few words."""
    if (view.is_working or view.state in ("starting", "waiting")) and not sidecar.running:
        return "not running" if view.state != "starting" or view.progress.attempts else "not started"
    return {"starting": "loading", "waiting": "waiting to restart"}.get(view.state, view.state)


def state_style(view: ProgressView, sidecar: SidecarState) -> str:
    """Return the colour of the state. It repeats the words."""
    return WARNING if describe_state(view, sidecar) == "not running" else STATES.get(view.state, "")


def describe_time_left(view: ProgressView, sidecar: SidecarState, now: float) -> str:
    """Describe the estimated time left. Empty if the run is not active."""
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
    """Format steps, a bar and the time left, as far as they fit. The text has priority over the bar."""
    p, unit = view.progress, "answer" if view.generation else "step"
    planned = p.planned_steps
    if not planned:
        return formatter.line(HEAD, [f"{unit} {p.step:,}" if p.step else f"no {unit} yet"])
    share = min(1.0, p.step / planned)
    left = describe_time_left(view, sidecar, now)
    unknown = view.is_working and sidecar.running and not left and p.step < planned
    after = [
        f"{share:.0%}".replace("%", " %"),
        f"{left} left" if left else "time left unknown" if unknown else "",
    ]
    tail = ", ".join(filter(None, after))
    for count in (f"{unit} {p.step:,} of {planned:,}", f"{p.step}/{planned}"):
        room = formatter.size.width - len(count) - len(tail) - 2
        if room >= LEAST_BAR:
            bar_text = draw_bar(share, min(room, LONGEST_BAR), formatter.letters)
            return ScreenLine(Text.assemble(f"{count} ", (bar_text, GOOD), f" {tail}"), HEAD)
    return formatter.line(HEAD, [f"{p.step}/{planned}", *after[:1], *filter(None, (left,))])


def _losses(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    """Format both loss curves on one scale and one axis."""
    p = view.progress
    train, validation = view.train.points(), view.validation.points()
    if not train and not validation:
        return
    span = (1, max(one[-1][0] for one in (train, validation) if one))
    scale = sparkline_range([value for _, value in (*train, *validation)])
    tail = TAIL if formatter.size.width >= WIDE + 10 else 0
    width = formatter.room - 9 - tail

    def draw_row(
        weight: int, label: str, value: float | None, points: list[tuple[int, float]], said: str
    ) -> ScreenLine:
        figure = "" if value is None else f"{value:.4f}" if abs(value) < 1e4 else f"{value:.2e}"
        curve = draw_sparkline(points, span, scale, width, formatter.letters)
        return formatter.row(weight, label, [Text.assemble(figure.ljust(9)[:9], (curve, "cyan"), f" {said}"[:tail])])

    if train:
        yield draw_row(LOSS, "train loss" if tail else "loss", p.loss, train, f"steps {span[0]:,} to {span[1]:,}")
    if validation:
        best = "" if p.best_loss is None else f"best {p.best_loss:.4f} at {p.best_step:,}"
        yield draw_row(VALIDATION, "validation", p.validation_loss, validation, best)


def _speeds(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    p = view.progress
    if p.learning_rate is not None:
        norm = "" if view.gradient_norm is None else f"gradient norm {view.gradient_norm:.3g}"
        yield formatter.row(RATE, "learn rate", [f"{p.learning_rate:.2e}", *filter(None, (norm,))])
    tokens, trained = view.input_tokens_per_s, view.trained_tokens_per_s
    if tokens is None:
        return
    pace = "" if not p.steps_per_s else _pace(p.steps_per_s)
    used = "" if view.mfu is None else f"MFU {view.mfu:.1%}".replace("%", " %")
    learned = f"{trained:,.0f} trained" if trained is not None else ""
    yield formatter.row(SPEED, "speed", [f"{tokens:,.0f} tokens/s input", *filter(None, (learned, used, pace))])


def _pace(steps_per_s: float) -> str:
    return f"{steps_per_s:.2f} steps/s" if steps_per_s >= 0.5 else f"{1 / steps_per_s:.1f} s a step"


def _memory(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
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
    over = used > 0.95 * total
    clauses = [Text(f"! {figures}" if over else figures, WARNING if over else "")]
    if forecast:
        off = f" ({round(100 * (forecast / used - 1)):+d} %)" if used else ""
        clauses.append(Text(f"{formatter.letters.mark} forecast {forecast / unit:.1f}{off}"))
    width = min(LONGEST_BAR, formatter.room - sum(len(one.plain) + 2 for one in clauses))
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
    said_of_gpus = [text for gpu in gpus if (text := _gpu(gpu))]
    if len(said_of_gpus) == 1:
        clauses.insert(1, said_of_gpus[0])
    if clauses:
        yield formatter.row(MACHINE, "machine", clauses)
    if len(said_of_gpus) > 1:
        for place, text in enumerate(said_of_gpus):
            yield formatter.row(MORE + place, "", [text])


def _gpu(gpu: dict[str, object]) -> str:
    values = []
    for key, form in (("utilization_percent", "{:.0f} %"), ("power_w", "{:.0f} W"), ("temperature_c", "{:.0f} C")):
        if isinstance(value := gpu.get(key), int | float):
            values.append(form.format(value))
    return f"GPU {gpu.get('index', '?')} {' '.join(values)}" if values else ""


def _copies(formatter: LineFormatter, view: ProgressView, sidecar: SidecarState, now: float) -> Iterator[ScreenLine]:
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
        noted, lost = sidecar.replica, sidecar.replica.failed_since is not None
        clauses = [Text(("! " if lost else "") + noted.describe(p.checkpoint_step, now), WARNING if lost else "")]
        if noted.in_flight is not None:
            clauses.append(Text(f"sending step {noted.in_flight:,}", GOOD))
        if noted.behind_bytes and not noted.result:  # the note precedes the end of the upload
            clauses.append(f"{units.format_bytes(noted.behind_bytes)} to send")
        yield formatter.row(REPLICA, "replica", clauses)


def _guards(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    p = view.progress
    counts = (
        (len(p.skipped_steps), "skipped step", "skipped steps"),
        (view.rollbacks, "rolled back", "rolled back"),
        (view.budget_shrinks, "micro-batch shrunk", "micro-batches shrunk"),
        (p.repeats, "step computed twice", "steps computed twice"),
        (p.spikes, "gradient spike", "gradient spikes"),
    )
    clauses = [f"{count:,} {one if count == 1 else many}" for count, one, many in counts if count]
    clauses += [f"{phase} at most {tokens:,} tokens" for phase, (tokens, _) in p.budgets.items() if tokens is not None]
    if clauses:
        yield formatter.row(GUARDS, "guards", [Text(f"! {clauses[0]}", WARNING), *clauses[1:]])


def render_attempts(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    p = view.progress
    if p.attempts < 2 and not p.attempt_ends:
        return
    again = [f"{p.lost_steps:,} step{'s' * (p.lost_steps != 1)} repeated"] if p.lost_steps else []
    shown_events = {one.text for one in view.notable_events}  # shown below, with the time of day
    last = [end for end in p.attempt_ends[-1:] if end.replace(":", " died:", 1) not in shown_events]
    yield formatter.row(ATTEMPTS, "attempts", ["; ".join([f"{p.attempts}", *again, *last])])
    for place, end in enumerate(reversed(p.attempt_ends[-4:-1])):
        yield formatter.row(MORE + place, "", [end])


def _ranks(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    """Format a row for each rank. Stragglers are the last to be omitted."""
    if not view.ranks:
        return
    slow = view.stragglers
    for rank in slow[:1]:
        text = (
            f"! {_format_rank(rank)} computes {rank.relative_to_median - 1:.0%} longer than the median: other "
            "ranks wait for it"
        )
        yield formatter.row(STRAGGLER, "ranks", [Text(text.replace("%", " %"), WARNING)])
    if not slow:
        yield formatter.row(RATE, "ranks", [f"{len(view.ranks)}, no stragglers"])
    selected = sorted(view.ranks, key=lambda one: (not one.is_straggler, one.rank))[:RANKS_SHOWN]
    for rank in sorted(selected, key=lambda one: one.rank):
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
    """Format the last notable events, latest at the bottom."""
    last = list(view.notable_events)[-NEWS_SHOWN:]
    for place, one in enumerate(last):
        clock = time.strftime("%H:%M:%S", time.localtime(one.t))
        weight = GRAVE if one.is_urgent and place == len(last) - 1 else MORE + len(last) - place
        text = (f"{'! ' if one.is_urgent else '  '}{one.text}", WARNING if one.is_urgent else QUIET)
        yield formatter.line(weight, [Text.assemble((f"{clock} ", QUIET), text)])


# Lines of a generation's screen.

UNANSWERED = ("refused", "memory", "invalid", "context", "filtered")
"""Finish reasons without a complete answer, which need attention."""
FIGURE = 9
"""Columns of a value before its curve."""


def render_generation_lines(
    formatter: LineFormatter, name: str, view: ProgressView, sidecar: SidecarState, now: float
) -> list[ScreenLine]:
    """Return all lines of a generation in order. For the arguments see `render_panel`."""
    generation = view.generation or GenerationProgress()
    return [
        render_heading(formatter, name, view, sidecar, now),
        render_progress(formatter, view, sidecar, now),
        *_speed(formatter, view, generation),
        *_batch(formatter, generation),
        *_generation_memory(formatter, generation),
        *render_machine(formatter, view),
        *_ends(formatter, generation),
        *_generation_guards(formatter, view),
        *render_attempts(formatter, view),
        *render_recent_events(formatter, view),
    ]


def _speed(formatter: LineFormatter, view: ProgressView, generation: GenerationProgress) -> Iterator[ScreenLine]:
    answers, tokens, points = generation.answers_per_s, generation.tokens_per_s, generation.speed.points()
    if answers is None or tokens is None or not points:
        return
    pace = f"{answers:,.2f} answers/s" if answers >= 0.5 or not answers else f"{1 / answers:,.1f} s per answer"
    counted = sum(generation.finish_counts.values())
    mean = f"{generation.tokens / counted:,.0f} tokens per answer" if counted else ""
    yield formatter.row(LOSS, "speed", [pace, f"{tokens:,.0f} tokens/s", *filter(None, (mean,))])
    width = formatter.room - FIGURE - (len(" tokens/s") if formatter.size.width >= WIDE else 0)
    values = [value for _, value in points]
    numbered = list(enumerate(values, start=1))  # each covers about one second
    curve = draw_sparkline(
        numbered, (1, len(numbered)), (0.0, sparkline_range(values)[1]), min(width, len(numbered)), formatter.letters
    )
    after = " tokens/s" if formatter.size.width >= WIDE else ""
    yield formatter.row(
        SPEED, "", [Text.assemble(f"{points[-1][1]:,.0f}".ljust(FIGURE)[:FIGURE], (curve, "cyan"), after)]
    )


def _batch(formatter: LineFormatter, generation: GenerationProgress) -> Iterator[ScreenLine]:
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


def _generation_memory(formatter: LineFormatter, generation: GenerationProgress) -> Iterator[ScreenLine]:
    used, foreseen, total = (
        get_live_number(generation.live, f"{name}_bytes") for name in ("held", "forecast", "device")
    )
    if used and total:
        yield render_memory_row(formatter, used, foreseen or 0, total)


def _ends(formatter: LineFormatter, generation: GenerationProgress) -> Iterator[ScreenLine]:
    """Format how answers ended. Reasons without an answer are marked."""
    if not generation.finish_counts:
        return
    clauses = [
        Text(f"! {count:,} {name}" if name in UNANSWERED else f"{count:,} {name}", WARNING * (name in UNANSWERED))
        for name, count in generation.finish_counts.most_common()
    ]
    yield formatter.row(CHECKPOINT, "ends", clauses)


def _generation_guards(formatter: LineFormatter, view: ProgressView) -> Iterator[ScreenLine]:
    if view.budget_shrinks:
        times = "time" if view.budget_shrinks == 1 else "times"
        clauses: list[str | Text] = [
            Text(f"! batch reduced {view.budget_shrinks:,} {times} for lack of memory", WARNING)
        ]
        limits = [tokens for tokens, _ in view.progress.budgets.values() if tokens is not None]
        clauses += [f"now at most {tokens:,} padded tokens" for tokens in limits[-1:]]
        yield formatter.row(GUARDS, "guards", clauses)


# One run on a screen, and several runs as a table.

GAP = 2
"""Blanks between columns."""
NAME_COLUMNS = 12


def render_panel(name: str, view: ProgressView, sidecar: SidecarState, now: float, size: ScreenSize) -> Text:
    """Render one run on a screen of at least 40 x 10.

    Args:
        name: Name of the run.
        view: Progress from its journal.
        sidecar: State from its directory.
        now: Unix time, for ages.
        size: Size of the screen.
    """
    drawing = render_generation_lines if view.generation else render_training_lines
    lines = select_lines(drawing(LineFormatter(size), name, view, sidecar, now), size.height)
    return _join_lines(lines)


def render_table(rows: Sequence[tuple[str, ProgressView, SidecarState]], now: float, size: ScreenSize) -> Text:
    """Render several runs as a table, active ones first. Columns and rows that do not fit are omitted.

    Args:
        rows: Name, progress and directory state of each run.
        now: Unix time, for ages.
        size: Size of the screen.
    """
    formatter = LineFormatter(size)
    ordered = sorted(rows, key=lambda row: not row[2].running)
    room = max(1, size.height - 1)
    visible = ordered if len(ordered) <= room else ordered[: max(1, room - 1)]
    columns = _select_columns(_columns(visible, now), size.width)
    blanks = " " * GAP
    lines = [Text(blanks.join(formatter.padded(one.title, one.width, one.right) for one in columns), "underline")]
    for place, (_, view, sidecar) in enumerate(visible):
        cells = (formatter.padded(formatter.safe(one.cells[place]).plain, one.width, one.right) for one in columns)
        lines.append(formatter.cut(Text(blanks.join(cells).rstrip(), state_style(view, sidecar)), size.width))
    if len(visible) < len(ordered):
        lines.append(Text(f"and {len(ordered) - len(visible)} more"))
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


def _columns(rows: Sequence[tuple[str, ProgressView, SidecarState]], now: float) -> list[_RunTableColumn]:
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
    """Return the columns that fit into this width. The first one is always included."""
    left = width + GAP
    selected: list[int] = []
    for place in sorted(range(len(columns)), key=lambda place: columns[place].weight):
        if not selected or columns[place].width + GAP <= left:
            left -= columns[place].width + GAP
            selected.append(place)
    return [columns[place] for place in sorted(selected)]
