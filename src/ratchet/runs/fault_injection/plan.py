"""Which faults befall a training, and when: drawn from a seed, before anything runs.

A plan is a tuple of trials. The draw of a trial depends on (seed, row, number in its row) only, so that a row that
failed can be tried again alone.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ratchet.errors import SettingsError
from ratchet.runs.fault_injection.injection import InjectedFault

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
class ExternalFault:
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
class FaultTrial:
    """One training, what befalls it, and what its result is compared with."""

    row: str
    number: int
    """Within the row, from 0."""
    blows: tuple[ExternalFault, ...] = ()
    faults: tuple[InjectedFault, ...] = ()
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
    def reference(self) -> tuple[tuple[InjectedFault, ...], tuple[Guard, ...]]:
        """What decides which undisturbed training it is compared with."""
        return (self.faults if self.same_fault else ()), self.guards


@dataclass(frozen=True)
class TrainingShape:
    """What a plan must know of the training that it is made for."""

    steps: int
    """Optimizer steps; at least FEWEST_STEPS."""
    validate_every_steps: int
    fitting_tokens: int
    """Padded tokens of a micro-batch that hold the longest sequence but not a whole micro-batch: the `oom` row."""


Draw = Callable[[random.Random, TrainingShape, int], FaultTrial]
"""Draws one trial; the number says which of its row (for blows: how many there are in it)."""


@dataclass(frozen=True)
class FaultCategory:
    """A kind of fault."""

    text: str
    """What befalls the training, for people."""
    draw: Draw
    kills: bool = False
    """Its trials have several blows each, as many as are asked for in all; otherwise a trial is one."""
    least: int = 1
    """Trials, where a trial is one blow or fault."""


def _plan_several(row: str, *whats: What, shows: tuple[str, ...] = (), stalls: bool = False) -> Draw:
    """Blows one after another, by turns at any time and at a time when steps are made.

    Start-up takes most of the time of a small training: uniform in time alone, hardly a blow would meet a step.
    """

    def draw(chance: random.Random, shape: TrainingShape, count: int) -> FaultTrial:
        blows = tuple(
            ExternalFault(chance.choice(whats), chance.uniform(0, LATEST), own_steps=0 if turn % 2 else 1)
            for turn in range(count)
        )
        return FaultTrial(row, 0, blows, shows=shows, stalls=stalls)

    return draw


def _plan_stopped(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
    """Not before the third step of the worker: until then its deadlines are those of start-up."""
    blow = ExternalFault("stop worker", chance.uniform(0, LATEST), own_steps=3)
    return FaultTrial("sigstop", number, (blow,), shows=("died:stalled",), stalls=True)


def _plan_outage(row: str, what: What, shows: tuple[str, ...] = ()) -> Draw:
    def draw(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
        # Not before two checkpoints are there, which are two steps apart.
        blow = ExternalFault(what, chance.uniform(0, LATEST), past_step=5, draw=chance.randrange(2**32))
        return FaultTrial(row, number, (blow,), shows=shows)

    return draw


def _plan_disk(row: str, code: Literal["ENOSPC", "EIO", "EROFS"]) -> Draw:
    def draw(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
        step = chance.randint(2, shape.steps // 2)
        fault = InjectedFault(kind="disk", errno=code, step=step, times=chance.randint(1, 4))
        return FaultTrial(row, number, faults=(fault,), shows=("alert",))

    return draw


def _plan_once(row: str, kind: Literal["hang", "weights"], shows: tuple[str, ...]) -> Draw:
    def draw(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
        fault = InjectedFault(kind=kind, step=chance.randint(4, shape.steps - 3), mark=f"{kind}-took-place")
        return FaultTrial(row, number, faults=(fault,), shows=shows, stalls=kind == "hang")

    return draw


def _plan_kill_after(chance: random.Random, step: int, heals: bool) -> tuple[ExternalFault, ...]:
    """A kill soon after a step: of the supervisor if the repeated command is to find the fault gone."""
    return (ExternalFault("kill supervisor" if heals else "kill worker", chance.uniform(0, 0.15), past_step=step),)


def _plan_memory(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
    """By turns in training, for some steps, and in validation, from the first on."""
    phase: Literal["train", "validation"] = "validation" if number % 2 else "train"
    begin = 1 if phase == "validation" else chance.randint(3, shape.steps // 2)
    steps = 0 if phase == "validation" else chance.randint(1, 3)
    fault = InjectedFault(kind="memory", step=begin, steps=steps, tokens=shape.fitting_tokens, phase=phase)
    last = shape.validate_every_steps + 1 if phase == "validation" else begin + steps
    heals = phase == "train" and chance.random() < 0.5
    blows = _plan_kill_after(chance, last, heals)
    return FaultTrial("oom", number, blows, (fault,), same_fault=True, heals=heals, shows=("budget",))


def _plan_non_finite(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
    """By turns once (the step is repeated), always and skipped, always and rolled back."""
    step = chance.randint(shape.steps // 2, shape.steps - 5)
    if number % 3 == 0:
        fault = InjectedFault(kind="non_finite", step=step, times=1)
        return FaultTrial("nan", number, faults=(fault,), shows=("repeated",))
    rules: tuple[Guard, ...] = (("on_non_finite", "skip"),)
    if number % 3 == 2:
        rules = (("on_non_finite", "roll_back"), ("snapshot_every_steps", max(2, shape.steps // 4)))
    fault = InjectedFault(kind="non_finite", step=step, times=0)
    heals = chance.random() < 0.5
    blows = _plan_kill_after(chance, step, heals)
    return FaultTrial("nan", number, blows, (fault,), same_fault=True, heals=heals, guards=rules, shows=("skipped",))


def _plan_spike(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
    """By turns skipped and rolled back; late, for a median needs steps."""
    step = chance.randint(max(10, shape.steps * 2 // 3), shape.steps - 2)
    rule = "roll_back" if number % 2 else "skip"
    rules: tuple[Guard, ...] = (("on_spike", rule), ("window_steps", 8), ("snapshot_every_steps", 4))
    fault = InjectedFault(kind="spike", step=step, times=0)
    heals = chance.random() < 0.5
    blows = _plan_kill_after(chance, step, heals)
    return FaultTrial("spike", number, blows, (fault,), same_fault=True, heals=heals, guards=rules, shows=("skipped",))


def _plan_nothing(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
    return FaultTrial("none", number)


ROWS: Mapping[str, FaultCategory] = {
    "none": FaultCategory("nothing: two undisturbed trainings must be equal, too", _plan_nothing),
    "sigkill": FaultCategory(
        "the worker is killed",
        _plan_several("sigkill", "kill worker", shows=("died:killed",)), kills=True,
    ),
    "supervisor": FaultCategory(
        "the supervisor is killed, its worker must die; the command is repeated",
        _plan_several("supervisor", "kill supervisor"), kills=True,
    ),
    "sigterm": FaultCategory(
        "the command is asked to stop, half the times twice; it is repeated",
        _plan_several("sigterm", "terminate", "terminate twice"), kills=True,
    ),
    "sigstop": FaultCategory("the worker is stopped and must be noticed", _plan_stopped),
    "hang": FaultCategory("a step never ends and must be noticed", _plan_once("hang", "hang", ("died:stalled",))),
    "oom": FaultCategory("memory runs out, in training or validation; then a kill", _plan_memory, least=2),
    "nan": FaultCategory("the loss is not finite: once, or always and then a kill", _plan_non_finite, least=3),
    "spike": FaultCategory("the gradient is far too large; then a kill", _plan_spike),
    "weights": FaultCategory("a weight becomes NaN", _plan_once("weights", "weights", ("died:hardware",))),
    "enospc": FaultCategory("the disk is full for a while", _plan_disk("enospc", "ENOSPC")),
    "eio": FaultCategory("the disk fails for a while", _plan_disk("eio", "EIO")),
    "erofs": FaultCategory("the disk is read-only for a while", _plan_disk("erofs", "EROFS")),
    "bitflip": FaultCategory(
        "a bit of the newest checkpoint flips",
        _plan_outage("bitflip", "flip a bit", ("notice",)),
    ),
    "torn": FaultCategory("a file of the newest checkpoint is cut", _plan_outage("torn", "cut a file", ("notice",))),
    "missing": FaultCategory(
        "a file of the newest checkpoint is gone",
        _plan_outage("missing", "remove a file", ("notice",)),
    ),
    "journal": FaultCategory(
        "the journal has a torn end and garbage inside",
        _plan_outage("journal", "damage the journal"),
    ),
    "moved": FaultCategory("the project is moved", _plan_outage("moved", "move the project")),
}  # fmt: skip
"""Every fault by the name that `--faults` takes."""


def allocate_counts(names: Iterable[str], kills: int) -> dict[str, int]:
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


def draw_plan(seed: int, numbers: Mapping[str, int], shape: TrainingShape) -> tuple[FaultTrial, ...]:
    """The plan of this seed.

    Args:
        seed: decides everything that is drawn.
        numbers: blows or faults of each row; see `allocate_counts`.
        shape: of the training that it is for.

    Raises:
        SettingsError: the training is too short.
    """
    if shape.steps < FEWEST_STEPS:
        raise SettingsError(f"--steps: {shape.steps} are too few to try faults on; take {FEWEST_STEPS} or more")
    return tuple(trial for name, number in numbers.items() for trial in _draw_category(seed, name, number, shape))


def _draw_category(seed: int, name: str, number: int, shape: TrainingShape) -> Iterable[FaultTrial]:
    row = ROWS[name]
    sizes = _divide_kills(number) if row.kills else range(number)
    for place, size in enumerate(sizes):
        trial = row.draw(random.Random(f"{seed}/{name}/{place}"), shape, size)
        yield FaultTrial(**{**vars(trial), "number": place})


def _divide_kills(number: int) -> list[int]:
    """So many kills as trials of nearly equal size, none of more than MOST_KILLS."""
    trials = -(-number // MOST_KILLS)
    return [number // trials + (place < number % trials) for place in range(trials)]
