"""The lines of a run's screen, by subject; how important each is decides what a small screen leaves out."""

import time
from collections.abc import Iterator

from rich.text import Text

from ratchet import sizes
from ratchet.run import telling
from ratchet.run.aside import Aside
from ratchet.run.status import duration
from ratchet.run.vitals import RankPace, Vitals
from ratchet.terminal.glyphs import bar, scale_of, sparkline
from ratchet.terminal.pen import BAD, GOOD, QUIET, WARNING, WIDE, Line, Pen

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
    if where := telling.computing(vitals.device, vitals.compute_dtype) if vitals.device else "":
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
    unit, name = sizes.unit_for(whole)
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
        said.append(f"worker {sizes.written(rss)}")
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
            said.append(f"{sizes.written(noted.behind_bytes)} to send")
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
