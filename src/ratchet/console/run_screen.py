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
    Line,
    Pen,
    Size,
    bar,
    chosen,
    scale_of,
    sparkline,
)
from ratchet.runs import event_messages
from ratchet.runs.progress_view import Answering, RankPace, Vitals, number
from ratchet.runs.run_source import Aside
from ratchet.runs.status import duration

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


def lines_of(pen: Pen, name: str, vitals: Vitals, aside: Aside, now: float) -> list[Line]:
    """All lines that there are, in their order. For the arguments see `panel`."""
    return [
        head(pen, name, vitals, aside, now),
        progress(pen, vitals, aside, now),
        *_losses(pen, vitals),
        *_speeds(pen, vitals),
        *_memory(pen, vitals),
        *machine(pen, vitals),
        *_copies(pen, vitals, aside, now),
        *_guards(pen, vitals),
        *attempts(pen, vitals),
        *_ranks(pen, vitals),
        *news(pen, vitals),
    ]


def state_of(vitals: Vitals, aside: Aside) -> str:
    """What the run is doing, in a word or two."""
    if (vitals.at_work or vitals.state in ("starting", "waiting")) and not aside.running:
        return "not running" if vitals.state != "starting" or vitals.progress.attempts else "not begun"
    return {"starting": "loading", "waiting": "waiting to start again"}.get(vitals.state, vitals.state)


def style_of(vitals: Vitals, aside: Aside) -> str:
    """The colour of that; it repeats the words."""
    return WARNING if state_of(vitals, aside) == "not running" else STATES.get(vitals.state, "")


def time_left(vitals: Vitals, aside: Aside, now: float) -> str:
    """What is known of the time left; empty of a run that does not go on now."""
    if not vitals.at_work or not aside.running:
        return ""
    left = vitals.outlook.left(now)
    return left.describe() if left else ""


def head(pen: Pen, name: str, vitals: Vitals, aside: Aside, now: float) -> Line:
    p = vitals.progress
    state = state_of(vitals, aside)
    clauses: list[str | Text] = [Text.assemble((name, "bold"), "  ", (state, style_of(vitals, aside)))]
    silent_s = now - p.last_t
    if vitals.state == "training" and aside.running and silent_s > max(SILENT_S, SILENT_STEPS / (p.steps_per_s or 1.0)):
        clauses.append(Text(f"! told nothing for {duration(silent_s)}", WARNING))
    if p.attempts > 1:
        clauses.append(f"attempt {p.attempts}")
    if where := event_messages.computing(vitals.device, vitals.compute_dtype) if vitals.device else "":
        clauses.append(f"{where}{p.among}")
    if vitals.began_t is not None:
        until = now if aside.running else p.last_t
        clauses.append(f"{duration(max(0.0, until - vitals.began_t))} since it began")
    return pen.line(HEAD, clauses)


def progress(pen: Pen, vitals: Vitals, aside: Aside, now: float) -> Line:
    """Steps, a bar, the time left: what there is room for, the words first."""
    p, unit = vitals.progress, "answer" if vitals.answering else "step"
    planned = p.planned_steps
    if not planned:
        return pen.line(HEAD, [f"{unit} {p.step:,}" if p.step else f"no {unit} yet"])
    share = min(1.0, p.step / planned)
    left = time_left(vitals, aside, now)
    unknown = vitals.at_work and aside.running and not left and p.step < planned
    after = [
        f"{share:.0%}".replace("%", " %"),
        f"{left} left" if left else "time left not known yet" if unknown else "",
    ]
    tail = ", ".join(filter(None, after))
    for count in (f"{unit} {p.step:,} of {planned:,}", f"{p.step}/{planned}"):
        room = pen.size.width - len(count) - len(tail) - 2
        if room >= LEAST_BAR:
            drawn = bar(share, min(room, LONGEST_BAR), pen.letters)
            return Line(Text.assemble(f"{count} ", (drawn, GOOD), f" {tail}"), HEAD)
    return pen.line(HEAD, [f"{p.step}/{planned}", *after[:1], *filter(None, (left,))])


def _losses(pen: Pen, vitals: Vitals) -> Iterator[Line]:
    """Both curves on one scale and one axis."""
    p = vitals.progress
    train, validation = vitals.train.points(), vitals.validation.points()
    if not train and not validation:
        return
    span = (1, max(one[-1][0] for one in (train, validation) if one))
    scale = scale_of([value for _, value in (*train, *validation)])
    tail = TAIL if pen.size.width >= WIDE + 10 else 0
    width = pen.room - 9 - tail

    def drawn(weight: int, label: str, value: float | None, points: list[tuple[int, float]], said: str) -> Line:
        figure = "" if value is None else f"{value:.4f}" if abs(value) < 1e4 else f"{value:.2e}"
        curve = sparkline(points, span, scale, width, pen.letters)
        return pen.row(weight, label, [Text.assemble(figure.ljust(9)[:9], (curve, "cyan"), f" {said}"[:tail])])

    if train:
        yield drawn(LOSS, "train loss" if tail else "loss", p.loss, train, f"steps {span[0]:,} to {span[1]:,}")
    if validation:
        best = "" if p.best_loss is None else f"best {p.best_loss:.4f} at {p.best_step:,}"
        yield drawn(VALIDATION, "validation", p.validation_loss, validation, best)


def _speeds(pen: Pen, vitals: Vitals) -> Iterator[Line]:
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


def _memory(pen: Pen, vitals: Vitals) -> Iterator[Line]:
    """The most that was held of what the device has, and a mark where the forecast said that it would be."""
    memory = vitals.progress.memory
    whole = memory.device_bytes or vitals.available_bytes
    if whole and (memory.peaks or memory.forecast):
        held, foreseen = max(memory.peaks.values(), default=0), max(memory.forecast.values(), default=0)
        yield memory_row(pen, held, foreseen, whole)


def memory_row(pen: Pen, held: int, foreseen: int, whole: int) -> Line:
    """A bar: bytes that are held of the whole, and a mark at those that were foreseen, if any were."""
    unit, name = units.unit_for(whole)
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
    drawn = (bar(held / whole, width, pen.letters, mark), "cyan")
    return pen.row(MEMORY, "memory", [Text.assemble(drawn, " ", said[0]), *said[1:]])


def machine(pen: Pen, vitals: Vitals) -> Iterator[Line]:
    """Figures of the machine; damaged ones are left out."""
    found = vitals.system
    said = []
    for key, name in (("cpu_percent", "CPU"), ("memory_percent", "memory"), ("disk_used_percent", "disk")):
        if isinstance(value := found.get(key), int | float):
            said.append(f"{name} {value:.0f} %")
    if isinstance(rss := found.get("worker_memory_bytes"), int | float):
        said.append(f"worker {units.written(rss)}")
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


def _copies(pen: Pen, vitals: Vitals, aside: Aside, now: float) -> Iterator[Line]:
    p = vitals.progress
    said: list[str | Text] = []
    if p.checkpoint_t is not None:
        said.append(f"step {p.checkpoint_step:,}, sealed {duration(max(0.0, now - p.checkpoint_t))} ago")
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
            said.append(f"{units.written(noted.behind_bytes)} to send")
        yield pen.row(MIRROR, "mirror", said)


def _guards(pen: Pen, vitals: Vitals) -> Iterator[Line]:
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


def attempts(pen: Pen, vitals: Vitals) -> Iterator[Line]:
    p = vitals.progress
    if p.attempts < 2 and not p.ends:
        return
    again = [f"{p.lost_steps:,} step{'s' * (p.lost_steps != 1)} done again"] if p.lost_steps else []
    told = {one.text for one in vitals.news}  # below, with the time of day
    last = [end for end in p.ends[-1:] if end.replace(":", " died:", 1) not in told]
    yield pen.row(ATTEMPTS, "attempts", ["; ".join([f"{p.attempts}", *again, *last])])
    for place, end in enumerate(reversed(p.ends[-4:-1])):
        yield pen.row(MORE + place, "", [end])


def _ranks(pen: Pen, vitals: Vitals) -> Iterator[Line]:
    """A row each, those that the others wait for first to be kept."""
    if not vitals.ranks:
        return
    slow = vitals.stragglers
    for rank in slow[:1]:
        text = f"! {_named(rank)} computes {rank.relative - 1:.0%} longer than the median: the others wait for it"
        yield pen.row(STRAGGLER, "ranks", [Text(text.replace("%", " %"), WARNING)])
    if not slow:
        yield pen.row(RATE, "ranks", [f"{len(vitals.ranks)}, none holds the others up"])
    listed = sorted(vitals.ranks, key=lambda one: (not one.straggles, one.rank))[:RANKS_SHOWN]
    for rank in sorted(listed, key=lambda one: one.rank):
        drawn = bar(rank.busy, 12, pen.letters)
        said = f"{'!' if rank.straggles else ' '}{rank.rank:>3} {drawn} {rank.busy:.0%} busy".replace("%", " %")
        style = WARNING if rank.straggles else ""
        weight = MACHINE if rank.straggles else MORE + 1 + rank.rank
        yield pen.row(weight, "", [Text(said, style), f"{rank.relative:.2f}x", *filter(None, (rank.host,))])


def _named(rank: RankPace) -> str:
    return f"rank {rank.rank} on {rank.host}" if rank.host else f"rank {rank.rank}"


def news(pen: Pen, vitals: Vitals) -> Iterator[Line]:
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


def generation_lines(pen: Pen, name: str, vitals: Vitals, aside: Aside, now: float) -> list[Line]:
    """All lines that there are, in their order. For the arguments see `panel`."""
    found = vitals.answering or Answering()
    return [
        head(pen, name, vitals, aside, now),
        progress(pen, vitals, aside, now),
        *_speed(pen, vitals, found),
        *_batch(pen, found),
        *_generation_memory(pen, found),
        *machine(pen, vitals),
        *_ends(pen, found),
        *_generation_guards(pen, vitals),
        *attempts(pen, vitals),
        *news(pen, vitals),
    ]


def _speed(pen: Pen, vitals: Vitals, found: Answering) -> Iterator[Line]:
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
    curve = sparkline(told, (1, len(told)), (0.0, scale_of(values)[1]), min(width, len(told)), pen.letters)
    after = " tokens/s" if pen.size.width >= WIDE else ""
    yield pen.row(SPEED, "", [Text.assemble(f"{points[-1][1]:,.0f}".ljust(FIGURE)[:FIGURE], (curve, "cyan"), after)])


def _batch(pen: Pen, found: Answering) -> Iterator[Line]:
    rows, held, budget, waiting = (
        number(found.live, name) for name in ("rows", "held_tokens", "budget_tokens", "waiting")
    )
    if rows is None:
        return
    said = [f"{rows:,} row{'s' * (rows != 1)} under way"]
    if held is not None and budget is not None:
        said.append(f"{held:,} of {budget:,} padded tokens")
    if waiting:
        said.append(f"{waiting:,} wait in the window")
    yield pen.row(VALIDATION, "batch", said)


def _generation_memory(pen: Pen, found: Answering) -> Iterator[Line]:
    held, foreseen, whole = (number(found.live, f"{name}_bytes") for name in ("held", "forecast", "device"))
    if held and whole:
        yield memory_row(pen, held, foreseen or 0, whole)


def _ends(pen: Pen, found: Answering) -> Iterator[Line]:
    """How answers ended; those without one are marked."""
    if not found.finishes:
        return
    said = [
        Text(f"! {count:,} {name}" if name in UNANSWERED else f"{count:,} {name}", WARNING * (name in UNANSWERED))
        for name, count in found.finishes.most_common()
    ]
    yield pen.row(CHECKPOINT, "ends", said)


def _generation_guards(pen: Pen, vitals: Vitals) -> Iterator[Line]:
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


def panel(name: str, vitals: Vitals, aside: Aside, now: float, size: Size) -> Text:
    """One whole run, in so many columns and lines, from 40 x 10 on.

    Args:
        name: of the run.
        vitals: what its journal has told.
        aside: what its directory tells.
        now: Unix time, for ages.
        size: of the screen.
    """
    drawing = generation_lines if vitals.answering else lines_of
    lines = chosen(drawing(Pen(size), name, vitals, aside, now), size.height)
    return _joined(lines)


def table(rows: Sequence[tuple[str, Vitals, Aside]], now: float, size: Size) -> Text:
    """Several runs, a row each, those that are trained first; columns and rows that there is no room for are left out.

    Args:
        rows: name of the run, what its journal has told, what its directory tells.
        now: Unix time, for ages.
        size: of the screen.
    """
    pen = Pen(size)
    ordered = sorted(rows, key=lambda row: not row[2].running)
    room = max(1, size.height - 1)
    shown = ordered if len(ordered) <= room else ordered[: max(1, room - 1)]
    columns = _fitting(_columns(shown, now), size.width)
    blanks = " " * GAP
    lines = [Text(blanks.join(pen.padded(one.title, one.width, one.right) for one in columns), "underline")]
    for place, (_, vitals, aside) in enumerate(shown):
        cells = (pen.padded(pen.safe(one.cells[place]).plain, one.width, one.right) for one in columns)
        lines.append(pen.cut(Text(blanks.join(cells).rstrip(), style_of(vitals, aside)), size.width))
    if len(shown) < len(ordered):
        lines.append(Text(f"and {len(ordered) - len(shown)} more"))
    return _joined(lines[: size.height])


def _joined(lines: Sequence[Text]) -> Text:
    return Text("\n", no_wrap=True, overflow="crop", end="").join(lines)


@dataclass(frozen=True)
class _Column:
    title: str
    cells: tuple[str, ...]
    weight: int
    """Those with the greatest are left out first."""
    right: bool = True

    @property
    def width(self) -> int:
        return max(map(cell_len, (self.title, *self.cells)))


def _columns(rows: Sequence[tuple[str, Vitals, Aside]], now: float) -> list[_Column]:
    """All columns, from left to right, that say something of at least one run."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    def age(t: float | None) -> str:
        return "" if t is None else duration(max(0.0, now - t))

    runs = [(vitals.progress, vitals, aside) for _, vitals, aside in rows]
    made = [
        _Column("run", tuple(name[:NAME_COLUMNS] for name, _, _ in rows), 0, False),
        _Column("state", tuple(_mark(v) + state_of(v, a) for _, v, a in runs), 1, False),
        _Column("step", tuple(f"{p.step}/{p.planned_steps}" if p.planned_steps else "" for p, _, _ in runs), 2),
        _Column("left", tuple(time_left(v, a, now).removeprefix("about ") for _, v, a in runs), 4, False),
        _Column("loss", tuple(number(p.loss, ".4f") for p, _, _ in runs), 3),
        _Column("validation", tuple(number(p.validation_loss, ".4f") for p, _, _ in runs), 5),
        _Column("tokens/s", tuple(number(_tokens_per_s(v), ",.0f") for _, v, _ in runs), 6),
        _Column("checkpoint", tuple(age(p.checkpoint_t) for p, _, _ in runs), 7),
        _Column("attempts", tuple(str(p.attempts or "") for p, _, _ in runs), 8),
        _Column("alerts", tuple(str(len(p.alerts) or "") for p, _, _ in runs), 9),
    ]
    return [column for column in made if any(column.cells)]


def _tokens_per_s(vitals: Vitals) -> float | None:
    return vitals.answering.tokens_per_s if vitals.answering else vitals.input_tokens_per_s


def _mark(vitals: Vitals) -> str:
    return "! " if vitals.state in ("failed", "waiting") or vitals.stragglers else "  "


def _fitting(columns: Sequence[_Column], width: int) -> list[_Column]:
    """The columns that fit into so many characters; the first one is always there."""
    left = width + GAP
    kept: list[int] = []
    for place in sorted(range(len(columns)), key=lambda place: columns[place].weight):
        if not kept or columns[place].width + GAP <= left:
            left -= columns[place].width + GAP
            kept.append(place)
    return [columns[place] for place in sorted(kept)]
