"""Which faults befall a training, and when: drawn from a seed, before anything runs.

A plan is a tuple of trials. The draw of a trial depends on (seed, row, number in its row) only, so that a row that
failed can be tried again alone.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ratchet.errors import SettingsError
from ratchet.runs.fault_injection.injection import Fault

MOST_KILLS = 4
"""In one trial."""

LATEST = 0.9
"""Of the time that is left: a blow that is due later might come after the end of training."""

FEWEST_STEPS = 12
"""Of a training that faults are tried on: there must be steps before, between and after them."""

What = Literal[
    "kill worker", "kill supervisor", "terminate", "terminate twice", "stop worker",
    "flip a bit", "cut a file", "remove a file", "damage the journal", "move the project",
]  # fmt: skip

DOWN: frozenset[What] = frozenset(
    {"flip a bit", "cut a file", "remove a file", "damage the journal", "move the project"}
)
"""Done while nothing runs: the supervisor is killed, and the worker with it, before."""

Guard = tuple[str, str | int]
"""A setting of `train.guards` and its value."""


@dataclass(frozen=True)
class Blow:
    """Something done to a training from outside.

    It comes `fraction` of the time that is expected to be left after the moment at which this worker has done
    `own_steps` new steps (0: has been started), and any worker of the trial step `past_step`.
    """

    what: What
    fraction: float
    own_steps: int = 0
    past_step: int = 0
    draw: int = 0
    """Seed of what is left to choose: which file, which bit."""


@dataclass(frozen=True)
class Trial:
    """One training, what befalls it, and what its result is compared with."""

    row: str
    number: int
    """Within the row, from 0."""
    blows: tuple[Blow, ...] = ()
    faults: tuple[Fault, ...] = ()
    """Made inside every worker, but for those of a repeated command if the trial `heals`."""
    same_fault: bool = False
    """Compared with an undisturbed training that meets the same faults; otherwise with one that meets none."""
    heals: bool = False
    """A repeated command meets none of the faults: what was decided on them stands in the journal."""
    guards: tuple[Guard, ...] = ()
    """Settings of `train.guards` that differ from the project's, in what it is compared with too."""
    shows: tuple[str, ...] = ()
    """Kinds of journal events (`died:CLASS` for a class of death) of which one proves that the fault took place."""
    stalls: bool = False
    """A worker that does nothing is part of the trial: it is given less time than the project's settings say."""

    @property
    def name(self) -> str:
        """Such as `sigkill-0`; also the name of its directory."""
        return f"{self.row}-{self.number}"

    @property
    def reference(self) -> tuple[tuple[Fault, ...], tuple[Guard, ...]]:
        """What decides which undisturbed training it is compared with."""
        return (self.faults if self.same_fault else ()), self.guards


@dataclass(frozen=True)
class Shape:
    """What a plan must know of the training that it is made for."""

    steps: int
    """Optimizer steps; at least FEWEST_STEPS."""
    validate_every_steps: int
    fitting_tokens: int
    """Padded tokens of a micro-batch that hold the longest sequence but not a whole micro-batch: the `oom` row."""


Draw = Callable[[random.Random, Shape, int], Trial]
"""Draws one trial; the number says which of its row (for blows: how many there are in it)."""


@dataclass(frozen=True)
class Row:
    """A kind of fault."""

    text: str
    """What befalls the training, for people."""
    draw: Draw
    kills: bool = False
    """Its trials have several blows each, as many as are asked for in all; otherwise a trial is one."""
    least: int = 1
    """Trials, where a trial is one blow or fault."""


def _several(row: str, *whats: What, shows: tuple[str, ...] = (), stalls: bool = False) -> Draw:
    """Blows one after another, by turns at any time and at a time when steps are made.

    Start-up takes most of the time of a small training: uniform in time alone, hardly a blow would meet a step.
    """

    def draw(chance: random.Random, shape: Shape, count: int) -> Trial:
        blows = tuple(
            Blow(chance.choice(whats), chance.uniform(0, LATEST), own_steps=0 if turn % 2 else 1)
            for turn in range(count)
        )
        return Trial(row, 0, blows, shows=shows, stalls=stalls)

    return draw


def _stopped(chance: random.Random, shape: Shape, number: int) -> Trial:
    """Not before the third step of the worker: until then its deadlines are those of start-up."""
    blow = Blow("stop worker", chance.uniform(0, LATEST), own_steps=3)
    return Trial("sigstop", number, (blow,), shows=("died:stalled",), stalls=True)


def _down(row: str, what: What, shows: tuple[str, ...] = ()) -> Draw:
    def draw(chance: random.Random, shape: Shape, number: int) -> Trial:
        # Not before two checkpoints are there, which are two steps apart.
        blow = Blow(what, chance.uniform(0, LATEST), past_step=5, draw=chance.randrange(2**32))
        return Trial(row, number, (blow,), shows=shows)

    return draw


def _disk(row: str, code: Literal["ENOSPC", "EIO", "EROFS"]) -> Draw:
    def draw(chance: random.Random, shape: Shape, number: int) -> Trial:
        step = chance.randint(2, shape.steps // 2)
        fault = Fault(kind="disk", errno=code, step=step, times=chance.randint(1, 4))
        return Trial(row, number, faults=(fault,), shows=("alert",))

    return draw


def _once(row: str, kind: Literal["hang", "weights"], shows: tuple[str, ...]) -> Draw:
    def draw(chance: random.Random, shape: Shape, number: int) -> Trial:
        fault = Fault(kind=kind, step=chance.randint(4, shape.steps - 3), mark=f"{kind}-took-place")
        return Trial(row, number, faults=(fault,), shows=shows, stalls=kind == "hang")

    return draw


def _killed_after(chance: random.Random, step: int, heals: bool) -> tuple[Blow, ...]:
    """A kill soon after a step: of the supervisor if the repeated command is to find the fault gone."""
    return (Blow("kill supervisor" if heals else "kill worker", chance.uniform(0, 0.15), past_step=step),)


def _memory(chance: random.Random, shape: Shape, number: int) -> Trial:
    """By turns in training, for some steps, and in validation, from the first on."""
    phase: Literal["train", "validation"] = "validation" if number % 2 else "train"
    begin = 1 if phase == "validation" else chance.randint(3, shape.steps // 2)
    steps = 0 if phase == "validation" else chance.randint(1, 3)
    fault = Fault(kind="memory", step=begin, steps=steps, tokens=shape.fitting_tokens, phase=phase)
    last = shape.validate_every_steps + 1 if phase == "validation" else begin + steps
    heals = phase == "train" and chance.random() < 0.5
    blows = _killed_after(chance, last, heals)
    return Trial("oom", number, blows, (fault,), same_fault=True, heals=heals, shows=("budget",))


def _non_finite(chance: random.Random, shape: Shape, number: int) -> Trial:
    """By turns once (the step is repeated), always and skipped, always and rolled back."""
    step = chance.randint(shape.steps // 2, shape.steps - 5)
    if number % 3 == 0:
        fault = Fault(kind="non_finite", step=step, times=1)
        return Trial("nan", number, faults=(fault,), shows=("repeated",))
    rules: tuple[Guard, ...] = (("on_non_finite", "skip"),)
    if number % 3 == 2:
        rules = (("on_non_finite", "roll_back"), ("snapshot_every_steps", max(2, shape.steps // 4)))
    fault = Fault(kind="non_finite", step=step, times=0)
    heals = chance.random() < 0.5
    blows = _killed_after(chance, step, heals)
    return Trial("nan", number, blows, (fault,), same_fault=True, heals=heals, guards=rules, shows=("skipped",))


def _spike(chance: random.Random, shape: Shape, number: int) -> Trial:
    """By turns skipped and rolled back; late, for a median needs steps."""
    step = chance.randint(max(10, shape.steps * 2 // 3), shape.steps - 2)
    rule = "roll_back" if number % 2 else "skip"
    rules: tuple[Guard, ...] = (("on_spike", rule), ("window_steps", 8), ("snapshot_every_steps", 4))
    fault = Fault(kind="spike", step=step, times=0)
    heals = chance.random() < 0.5
    blows = _killed_after(chance, step, heals)
    return Trial("spike", number, blows, (fault,), same_fault=True, heals=heals, guards=rules, shows=("skipped",))


def _nothing(chance: random.Random, shape: Shape, number: int) -> Trial:
    return Trial("none", number)


ROWS: Mapping[str, Row] = {
    "none": Row("nothing: two undisturbed trainings must be equal, too", _nothing),
    "sigkill": Row("the worker is killed", _several("sigkill", "kill worker", shows=("died:killed",)), kills=True),
    "supervisor": Row(
        "the supervisor is killed, its worker must die; the command is repeated",
        _several("supervisor", "kill supervisor"), kills=True,
    ),
    "sigterm": Row(
        "the command is asked to stop, half the times twice; it is repeated",
        _several("sigterm", "terminate", "terminate twice"), kills=True,
    ),
    "sigstop": Row("the worker is stopped and must be noticed", _stopped),
    "hang": Row("a step never ends and must be noticed", _once("hang", "hang", ("died:stalled",))),
    "oom": Row("memory runs out, in training or validation; then a kill", _memory, least=2),
    "nan": Row("the loss is not finite: once, or always and then a kill", _non_finite, least=3),
    "spike": Row("the gradient is far too large; then a kill", _spike),
    "weights": Row("a weight becomes NaN", _once("weights", "weights", ("died:hardware",))),
    "enospc": Row("the disk is full for a while", _disk("enospc", "ENOSPC")),
    "eio": Row("the disk fails for a while", _disk("eio", "EIO")),
    "erofs": Row("the disk is read-only for a while", _disk("erofs", "EROFS")),
    "bitflip": Row("a bit of the newest checkpoint flips", _down("bitflip", "flip a bit", ("notice",))),
    "torn": Row("a file of the newest checkpoint is cut", _down("torn", "cut a file", ("notice",))),
    "missing": Row("a file of the newest checkpoint is gone", _down("missing", "remove a file", ("notice",))),
    "journal": Row("the journal has a torn end and garbage inside", _down("journal", "damage the journal")),
    "moved": Row("the project is moved", _down("moved", "move the project")),
}  # fmt: skip
"""Every fault by the name that `--faults` takes."""


def counts(names: Iterable[str], kills: int) -> dict[str, int]:
    """Blows or faults of each row: `kills` of those that kill or ask to stop; of the others a fifth, at least `least`.

    Raises:
        SettingsError: a name is none of ROWS, or there is nothing to do.
    """
    wanted = list(names)
    unknown = sorted(set(wanted) - set(ROWS))
    if unknown or not wanted:
        found = f"{', '.join(unknown)}: unknown" if unknown else "no fault is named"
        raise SettingsError(f"--faults: {found}; there are: {', '.join(ROWS)}")
    if kills < 1:
        raise SettingsError(f"--kills: {kills} is no number of kills; take 1 or more")
    return {name: kills if row.kills else max(row.least, kills // 5) for name, row in ROWS.items() if name in wanted}


def draw(seed: int, numbers: Mapping[str, int], shape: Shape) -> tuple[Trial, ...]:
    """The plan of this seed.

    Args:
        seed: decides everything that is drawn.
        numbers: blows or faults of each row; see `counts`.
        shape: of the training that it is for.

    Raises:
        SettingsError: the training is too short.
    """
    if shape.steps < FEWEST_STEPS:
        raise SettingsError(f"--steps: {shape.steps} are too few to try faults on; take {FEWEST_STEPS} or more")
    return tuple(trial for name, number in numbers.items() for trial in _row(seed, name, number, shape))


def _row(seed: int, name: str, number: int, shape: Shape) -> Iterable[Trial]:
    row = ROWS[name]
    sizes = _shares(number) if row.kills else range(number)
    for place, size in enumerate(sizes):
        trial = row.draw(random.Random(f"{seed}/{name}/{place}"), shape, size)
        yield Trial(**{**vars(trial), "number": place})


def _shares(number: int) -> list[int]:
    """So many kills as trials of nearly equal size, none of more than MOST_KILLS."""
    trials = -(-number // MOST_KILLS)
    return [number // trials + (place < number % trials) for place in range(trials)]
