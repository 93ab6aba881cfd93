"""The lines of a run's screen, by subject; how important each is decides what a small screen leaves out."""

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
from ratchet.runs import event_messages
from ratchet.runs.progress_view import GenerationProgress, ProgressView, RankUtilization, get_live_number
from ratchet.runs.run_source import SidecarState
from ratchet.runs.status import format_duration

LEAST_BAR, LONGEST_BAR = 6, 40
TAIL = 26
"""Columns beside curves for what is said of them."""
NEWS_SHOWN, RANKS_SHOWN = 6, 16
SILENT_S, SILENT_STEPS = 60.0, 5.0
"""A training that has told nothing for so long, and so many steps, is said to be silent."""

STATES = {"training": GOOD, "answering": GOOD, "finished": GOOD, "failed": BAD, "waiting": WARNING, "stopped": WARNING}

HEAD, LOSS, GRAVE, VALIDATION, CHECKPOINT, SPEED, ATTEMPTS, STRAGGLER, MEMORY, MIRROR, RATE, GUARDS, MACHINE, MORE = (
    range(14)
)
"""What is left out last comes first."""


def render_training_lines(
    pen: LineFormatter, name: str, vitals: ProgressView, aside: SidecarState, now: float
) -> list[ScreenLine]:
    """All lines that there are, in their order. For the arguments see `render_panel`."""
    return [
        render_heading(pen, name, vitals, aside, now),
        render_progress(pen, vitals, aside, now),
        *_losses(pen, vitals),
        *_speeds(pen, vitals),
        *_memory(pen, vitals),
        *render_machine(pen, vitals),
        *_copies(pen, vitals, aside, now),
        *_guards(pen, vitals),
        *render_attempts(pen, vitals),
        *_ranks(pen, vitals),
        *render_recent_events(pen, vitals),
    ]


def describe_state(vitals: ProgressView, aside: SidecarState) -> str:
    """What the run is doing, in a word or two."""
    if (vitals.at_work or vitals.state in ("starting", "waiting")) and not aside.running:
        return "not running" if vitals.state != "starting" or vitals.progress.attempts else "not begun"
    return {"starting": "loading", "waiting": "waiting to start again"}.get(vitals.state, vitals.state)


def state_style(vitals: ProgressView, aside: SidecarState) -> str:
    """The colour of that; it repeats the words."""
    return WARNING if describe_state(vitals, aside) == "not running" else STATES.get(vitals.state, "")


def describe_time_left(vitals: ProgressView, aside: SidecarState, now: float) -> str:
    """What is known of the time left; empty of a run that does not go on now."""
    if not vitals.at_work or not aside.running:
        return ""
    left = vitals.outlook.left(now)
    return left.describe() if left else ""


def render_heading(pen: LineFormatter, name: str, vitals: ProgressView, aside: SidecarState, now: float) -> ScreenLine:
    p = vitals.progress
    state = describe_state(vitals, aside)
    clauses: list[str | Text] = [Text.assemble((name, "bold"), "  ", (state, state_style(vitals, aside)))]
    silent_s = now - p.last_t
    if vitals.state == "training" and aside.running and silent_s > max(SILENT_S, SILENT_STEPS / (p.steps_per_s or 1.0)):
        clauses.append(Text(f"! told nothing for {format_duration(silent_s)}", WARNING))
    if p.attempts > 1:
        clauses.append(f"attempt {p.attempts}")
    if where := event_messages.describe_device(vitals.device, vitals.compute_dtype) if vitals.device else "":
        clauses.append(f"{where}{p.among}")
    if vitals.began_t is not None:
        until = now if aside.running else p.last_t
        clauses.append(f"{format_duration(max(0.0, until - vitals.began_t))} since it began")
    return pen.line(HEAD, clauses)


def render_progress(pen: LineFormatter, vitals: ProgressView, aside: SidecarState, now: float) -> ScreenLine:
    """Steps, a bar, the time left: what there is room for, the words first."""
    p, unit = vitals.progress, "answer" if vitals.answering else "step"
    planned = p.planned_steps
    if not planned:
        return pen.line(HEAD, [f"{unit} {p.step:,}" if p.step else f"no {unit} yet"])
    share = min(1.0, p.step / planned)
    left = describe_time_left(vitals, aside, now)
    unknown = vitals.at_work and aside.running and not left and p.step < planned
    after = [
        f"{share:.0%}".replace("%", " %"),
        f"{left} left" if left else "time left not known yet" if unknown else "",
    ]
    tail = ", ".join(filter(None, after))
    for count in (f"{unit} {p.step:,} of {planned:,}", f"{p.step}/{planned}"):
        room = pen.size.width - len(count) - len(tail) - 2
        if room >= LEAST_BAR:
            drawn = draw_bar(share, min(room, LONGEST_BAR), pen.letters)
            return ScreenLine(Text.assemble(f"{count} ", (drawn, GOOD), f" {tail}"), HEAD)
    return pen.line(HEAD, [f"{p.step}/{planned}", *after[:1], *filter(None, (left,))])


def _losses(pen: LineFormatter, vitals: ProgressView) -> Iterator[ScreenLine]:
    """Both curves on one scale and one axis."""
    p = vitals.progress
    train, validation = vitals.train.points(), vitals.validation.points()
    if not train and not validation:
        return
    span = (1, max(one[-1][0] for one in (train, validation) if one))
    scale = sparkline_range([value for _, value in (*train, *validation)])
    tail = TAIL if pen.size.width >= WIDE + 10 else 0
    width = pen.room - 9 - tail

    def drawn(weight: int, label: str, value: float | None, points: list[tuple[int, float]], said: str) -> ScreenLine:
        figure = "" if value is None else f"{value:.4f}" if abs(value) < 1e4 else f"{value:.2e}"
        curve = draw_sparkline(points, span, scale, width, pen.letters)
        return pen.row(weight, label, [Text.assemble(figure.ljust(9)[:9], (curve, "cyan"), f" {said}"[:tail])])

    if train:
        yield drawn(LOSS, "train loss" if tail else "loss", p.loss, train, f"steps {span[0]:,} to {span[1]:,}")
    if validation:
        best = "" if p.best_loss is None else f"best {p.best_loss:.4f} at {p.best_step:,}"
        yield drawn(VALIDATION, "validation", p.validation_loss, validation, best)


def _speeds(pen: LineFormatter, vitals: ProgressView) -> Iterator[ScreenLine]:
    p = vitals.progress
    if p.learning_rate is not None:
        norm = "" if vitals.gradient_norm is None else f"gradient norm {vitals.gradient_norm:.3g}"
        yield pen.row(RATE, "learn rate", [f"{p.learning_rate:.2e}", *filter(None, (norm,))])
    tokens, trained = vitals.input_tokens_per_s, vitals.trained_tokens_per_s
    if tokens is None:
        return
    pace = "" if not p.steps_per_s else _pace(p.steps_per_s)
    used = "" if vitals.mfu is None else f"MFU {vitals.mfu:.1%}".replace("%", " %")
    learned = f"{trained:,.0f} trained" if trained is not None else ""
    yield pen.row(SPEED, "speed", [f"{tokens:,.0f} tokens/s input", *filter(None, (learned, used, pace))])


def _pace(steps_per_s: float) -> str:
    return f"{steps_per_s:.2f} steps/s" if steps_per_s >= 0.5 else f"{1 / steps_per_s:.1f} s a step"


def _memory(pen: LineFormatter, vitals: ProgressView) -> Iterator[ScreenLine]:
    """The most that was held of what the device has, and a mark where the forecast said that it would be."""
    memory = vitals.progress.memory
    whole = memory.device_bytes or vitals.available_bytes
    if whole and (memory.peaks or memory.forecast):
        held, foreseen = max(memory.peaks.values(), default=0), max(memory.forecast.values(), default=0)
        yield render_memory_row(pen, held, foreseen, whole)


def render_memory_row(pen: LineFormatter, held: int, foreseen: int, whole: int) -> ScreenLine:
    """A bar: bytes that are held of the whole, and a mark at those that were foreseen, if any were."""
    unit, name = units.choose_unit(whole)
    figures = f"{held / unit:.1f} of {whole / unit:.1f} {name}"
    over = held > 0.95 * whole
    said = [Text(f"! {figures}" if over else figures, WARNING if over else "")]
    if foreseen:
        off = f" ({round(100 * (foreseen / held - 1)):+d} %)" if held else ""
        said.append(Text(f"{pen.letters.mark} forecast {foreseen / unit:.1f}{off}"))
    width = min(LONGEST_BAR, pen.room - sum(len(one.plain) + 2 for one in said))
    if width < LEAST_BAR:
        width = max(LEAST_BAR, min(LONGEST_BAR, pen.room - len(said[0].plain) - 1))
    mark = foreseen / whole if foreseen else None
    drawn = (draw_bar(held / whole, width, pen.letters, mark), "cyan")
    return pen.row(MEMORY, "memory", [Text.assemble(drawn, " ", said[0]), *said[1:]])


def render_machine(pen: LineFormatter, vitals: ProgressView) -> Iterator[ScreenLine]:
    """Figures of the machine; damaged ones are left out."""
    found = vitals.system
    said = []
    for key, name in (("cpu_percent", "CPU"), ("memory_percent", "memory"), ("disk_used_percent", "disk")):
        if isinstance(value := found.get(key), int | float):
            said.append(f"{name} {value:.0f} %")
    if isinstance(rss := found.get("worker_memory_bytes"), int | float):
        said.append(f"worker {units.format_bytes(rss)}")
    gpus = [gpu for gpu in found.get("gpus") or () if isinstance(gpu, dict)]
    said_of_gpus = [text for gpu in gpus if (text := _gpu(gpu))]
    if len(said_of_gpus) == 1:
        said.insert(1, said_of_gpus[0])
    if said:
        yield pen.row(MACHINE, "machine", said)
    if len(said_of_gpus) > 1:
        for place, text in enumerate(said_of_gpus):
            yield pen.row(MORE + place, "", [text])


def _gpu(gpu: dict[str, object]) -> str:
    said = []
    for key, form in (("utilization_percent", "{:.0f} %"), ("power_w", "{:.0f} W"), ("temperature_c", "{:.0f} C")):
        if isinstance(value := gpu.get(key), int | float):
            said.append(form.format(value))
    return f"GPU {gpu.get('index', '?')} {' '.join(said)}" if said else ""


def _copies(pen: LineFormatter, vitals: ProgressView, aside: SidecarState, now: float) -> Iterator[ScreenLine]:
    p = vitals.progress
    said: list[str | Text] = []
    if p.checkpoint_t is not None:
        said.append(f"step {p.checkpoint_step:,}, sealed {format_duration(max(0.0, now - p.checkpoint_t))} ago")
    elif vitals.ready:
        said.append("none yet")
    if aside.saving is not None:
        said.append(Text(f"step {aside.saving:,} is being written", GOOD))
    if p.saves.count:
        said.append(f"{p.saves.count} in all")
    if said:
        yield pen.row(CHECKPOINT, "checkpoint", said)
    if aside.mirror is not None:
        noted, lost = aside.mirror, aside.mirror.failed_since is not None
        said = [Text(("! " if lost else "") + noted.describe(p.checkpoint_step, now), WARNING if lost else "")]
        if noted.in_flight is not None:
            said.append(Text(f"step {noted.in_flight:,} is being sent", GOOD))
        if noted.behind_bytes and not noted.result:  # it was noted before the last of it was sent
            said.append(f"{units.format_bytes(noted.behind_bytes)} to send")
        yield pen.row(MIRROR, "mirror", said)


def _guards(pen: LineFormatter, vitals: ProgressView) -> Iterator[ScreenLine]:
    p = vitals.progress
    counts = (
        (len(p.skipped), "step left out", "steps left out"),
        (vitals.rollbacks, "of them rolled back", "of them rolled back"),
        (vitals.shrinks, "micro-batch shrunk", "micro-batches shrunk"),
        (p.repeats, "step computed twice", "steps computed twice"),
        (p.spikes, "gradient spike", "gradient spikes"),
    )
    said = [f"{count:,} {one if count == 1 else many}" for count, one, many in counts if count]
    said += [f"{phase} at most {tokens:,} tokens" for phase, (tokens, _) in p.budgets.items() if tokens is not None]
    if said:
        yield pen.row(GUARDS, "guards", [Text(f"! {said[0]}", WARNING), *said[1:]])


def render_attempts(pen: LineFormatter, vitals: ProgressView) -> Iterator[ScreenLine]:
    p = vitals.progress
    if p.attempts < 2 and not p.ends:
        return
    again = [f"{p.lost_steps:,} step{'s' * (p.lost_steps != 1)} done again"] if p.lost_steps else []
    told = {one.text for one in vitals.news}  # below, with the time of day
    last = [end for end in p.ends[-1:] if end.replace(":", " died:", 1) not in told]
    yield pen.row(ATTEMPTS, "attempts", ["; ".join([f"{p.attempts}", *again, *last])])
    for place, end in enumerate(reversed(p.ends[-4:-1])):
        yield pen.row(MORE + place, "", [end])


def _ranks(pen: LineFormatter, vitals: ProgressView) -> Iterator[ScreenLine]:
    """A row each, those that the others wait for first to be kept."""
    if not vitals.ranks:
        return
    slow = vitals.stragglers
    for rank in slow[:1]:
        text = f"! {_format_rank(rank)} computes {rank.relative - 1:.0%} longer than the median: the others wait for it"
        yield pen.row(STRAGGLER, "ranks", [Text(text.replace("%", " %"), WARNING)])
    if not slow:
        yield pen.row(RATE, "ranks", [f"{len(vitals.ranks)}, none holds the others up"])
    listed = sorted(vitals.ranks, key=lambda one: (not one.straggles, one.rank))[:RANKS_SHOWN]
    for rank in sorted(listed, key=lambda one: one.rank):
        drawn = draw_bar(rank.busy, 12, pen.letters)
        said = f"{'!' if rank.straggles else ' '}{rank.rank:>3} {drawn} {rank.busy:.0%} busy".replace("%", " %")
        style = WARNING if rank.straggles else ""
        weight = MACHINE if rank.straggles else MORE + 1 + rank.rank
        yield pen.row(weight, "", [Text(said, style), f"{rank.relative:.2f}x", *filter(None, (rank.host,))])


def _format_rank(rank: RankUtilization) -> str:
    return f"rank {rank.rank} on {rank.host}" if rank.host else f"rank {rank.rank}"


def render_recent_events(pen: LineFormatter, vitals: ProgressView) -> Iterator[ScreenLine]:
    """The last things out of the ordinary, the latest at the bottom."""
    last = list(vitals.news)[-NEWS_SHOWN:]
    for place, one in enumerate(last):
        clock = time.strftime("%H:%M:%S", time.localtime(one.t))
        weight = GRAVE if one.grave and place == len(last) - 1 else MORE + len(last) - place
        said = (f"{'! ' if one.grave else '  '}{one.text}", WARNING if one.grave else QUIET)
        yield pen.line(weight, [Text.assemble((f"{clock} ", QUIET), said)])


# The lines of a generation's screen.

UNANSWERED = ("refused", "memory", "invalid", "context", "filtered")
"""Ends without a whole answer, that a person should look at."""
FIGURE = 9
"""Columns of a figure before its curve."""


def render_generation_lines(
    pen: LineFormatter, name: str, vitals: ProgressView, aside: SidecarState, now: float
) -> list[ScreenLine]:
    """All lines that there are, in their order. For the arguments see `render_panel`."""
    found = vitals.answering or GenerationProgress()
    return [
        render_heading(pen, name, vitals, aside, now),
        render_progress(pen, vitals, aside, now),
        *_speed(pen, vitals, found),
        *_batch(pen, found),
        *_generation_memory(pen, found),
        *render_machine(pen, vitals),
        *_ends(pen, found),
        *_generation_guards(pen, vitals),
        *render_attempts(pen, vitals),
        *render_recent_events(pen, vitals),
    ]


def _speed(pen: LineFormatter, vitals: ProgressView, found: GenerationProgress) -> Iterator[ScreenLine]:
    answers, tokens, points = found.answers_per_s, found.tokens_per_s, found.speed.points()
    if answers is None or tokens is None or not points:
        return
    pace = f"{answers:,.2f} answers/s" if answers >= 0.5 or not answers else f"{1 / answers:,.1f} s an answer"
    counted = sum(found.finishes.values())
    mean = f"{found.tokens / counted:,.0f} tokens an answer" if counted else ""
    yield pen.row(LOSS, "speed", [pace, f"{tokens:,.0f} tokens/s", *filter(None, (mean,))])
    width = pen.room - FIGURE - (len(" tokens/s") if pen.size.width >= WIDE else 0)
    values = [value for _, value in points]
    told = list(enumerate(values, start=1))  # each about a second's, and all of them as wide
    curve = draw_sparkline(told, (1, len(told)), (0.0, sparkline_range(values)[1]), min(width, len(told)), pen.letters)
    after = " tokens/s" if pen.size.width >= WIDE else ""
    yield pen.row(SPEED, "", [Text.assemble(f"{points[-1][1]:,.0f}".ljust(FIGURE)[:FIGURE], (curve, "cyan"), after)])


def _batch(pen: LineFormatter, found: GenerationProgress) -> Iterator[ScreenLine]:
    rows, held, budget, waiting = (
        get_live_number(found.live, name) for name in ("rows", "held_tokens", "budget_tokens", "waiting")
    )
    if rows is None:
        return
    said = [f"{rows:,} row{'s' * (rows != 1)} under way"]
    if held is not None and budget is not None:
        said.append(f"{held:,} of {budget:,} padded tokens")
    if waiting:
        said.append(f"{waiting:,} wait in the window")
    yield pen.row(VALIDATION, "batch", said)


def _generation_memory(pen: LineFormatter, found: GenerationProgress) -> Iterator[ScreenLine]:
    held, foreseen, whole = (get_live_number(found.live, f"{name}_bytes") for name in ("held", "forecast", "device"))
    if held and whole:
        yield render_memory_row(pen, held, foreseen or 0, whole)


def _ends(pen: LineFormatter, found: GenerationProgress) -> Iterator[ScreenLine]:
    """How answers ended; those without one are marked."""
    if not found.finishes:
        return
    said = [
        Text(f"! {count:,} {name}" if name in UNANSWERED else f"{count:,} {name}", WARNING * (name in UNANSWERED))
        for name, count in found.finishes.most_common()
    ]
    yield pen.row(CHECKPOINT, "ends", said)


def _generation_guards(pen: LineFormatter, vitals: ProgressView) -> Iterator[ScreenLine]:
    if vitals.shrinks:
        times = "time" if vitals.shrinks == 1 else "times"
        said: list[str | Text] = [Text(f"! batch made smaller {vitals.shrinks:,} {times} for want of memory", WARNING)]
        limits = [tokens for tokens, _ in vitals.progress.budgets.values() if tokens is not None]
        said += [f"now at most {tokens:,} padded tokens" for tokens in limits[-1:]]
        yield pen.row(GUARDS, "guards", said)


# A run on one screen, and several runs in a table.

GAP = 2
"""Blanks between columns."""
NAME_COLUMNS = 12


def render_panel(name: str, vitals: ProgressView, aside: SidecarState, now: float, size: ScreenSize) -> Text:
    """One whole run, in so many columns and lines, from 40 x 10 on.

    Args:
        name: of the run.
        vitals: what its journal has told.
        aside: what its directory tells.
        now: Unix time, for ages.
        size: of the screen.
    """
    drawing = render_generation_lines if vitals.answering else render_training_lines
    lines = select_lines(drawing(LineFormatter(size), name, vitals, aside, now), size.height)
    return _join_lines(lines)


def render_table(rows: Sequence[tuple[str, ProgressView, SidecarState]], now: float, size: ScreenSize) -> Text:
    """Several runs, a row each, those that are trained first; columns and rows that there is no room for are left out.

    Args:
        rows: name of the run, what its journal has told, what its directory tells.
        now: Unix time, for ages.
        size: of the screen.
    """
    pen = LineFormatter(size)
    ordered = sorted(rows, key=lambda row: not row[2].running)
    room = max(1, size.height - 1)
    shown = ordered if len(ordered) <= room else ordered[: max(1, room - 1)]
    columns = _select_columns(_columns(shown, now), size.width)
    blanks = " " * GAP
    lines = [Text(blanks.join(pen.padded(one.title, one.width, one.right) for one in columns), "underline")]
    for place, (_, vitals, aside) in enumerate(shown):
        cells = (pen.padded(pen.safe(one.cells[place]).plain, one.width, one.right) for one in columns)
        lines.append(pen.cut(Text(blanks.join(cells).rstrip(), state_style(vitals, aside)), size.width))
    if len(shown) < len(ordered):
        lines.append(Text(f"and {len(ordered) - len(shown)} more"))
    return _join_lines(lines[: size.height])


def _join_lines(lines: Sequence[Text]) -> Text:
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)


@dataclass(frozen=True)
class _RunTableColumn:
    title: str
    cells: tuple[str, ...]
    weight: int
    """Those with the greatest are left out first."""
    right: bool = True

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.title, *self.cells)))


def _columns(rows: Sequence[tuple[str, ProgressView, SidecarState]], now: float) -> list[_RunTableColumn]:
    """All columns, from left to right, that say something of at least one run."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def age(t: float | None) -> str:
        return "" if t is None else format_duration(max(0.0, now - t))

    runs = [(vitals.progress, vitals, aside) for _, vitals, aside in rows]
    made = [
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
    return [column for column in made if any(column.cells)]


def _tokens_per_s(vitals: ProgressView) -> float | None:
    return vitals.answering.tokens_per_s if vitals.answering else vitals.input_tokens_per_s


def _attention_mark(vitals: ProgressView) -> str:
    return "! " if vitals.state in ("failed", "waiting") or vitals.stragglers else "  "


def _select_columns(columns: Sequence[_RunTableColumn], width: int) -> list[_RunTableColumn]:
    """The columns that fit into so many characters; the first one is always there."""
    left = width + GAP
    kept: list[int] = []
    for place in sorted(range(len(columns)), key=lambda place: columns[place].weight):
        if not kept or columns[place].width + GAP <= left:
            left -= columns[place].width + GAP
            kept.append(place)
    return [columns[place] for place in sorted(kept)]
