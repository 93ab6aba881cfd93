"""Plans of `ratchet chaos`: the faults of each training and their times, drawn from a seed in advance.

A plan is a tuple of trials. A trial depends only on (seed, category, number in its category), so a category that failed
can be repeated alone.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ratchet.errors import SettingsError
from ratchet.runs.fault_injection.injection import InjectedFault

MAX_KILLS = 4

MAX_FRACTION = 0.9
"""Maximum of `ExternalFault.fraction`. A later fault might come after the end of training."""

MIN_STEPS = 12
"""Minimum number of steps of a training, because there must be steps before, between and after faults."""

FaultAction = Literal[
    "kill worker", "kill supervisor", "terminate", "terminate twice", "stop worker",
    "flip a bit", "cut a file", "remove a file", "damage the journal", "move the project",
]  # fmt: skip

DOWN: frozenset[FaultAction] = frozenset(
    {"flip a bit", "cut a file", "remove a file", "damage the journal", "move the project"}
)
"""Actions before which the supervisor is killed, and with it the worker."""

Guard = tuple[str, str | int]


@dataclass(frozen=True)
class ExternalFault:
    """A fault that is injected from outside the worker.

    The fault is injected after `fraction` of the remaining time that is expected at a certain moment. This moment has
    come when the current worker has done `worker_steps` steps (0: when it has started) and any worker of the trial has
    done step `min_step`.
    """

    action: FaultAction
    fraction: float
    worker_steps: int = 0
    min_step: int = 0
    seed: int = 0


@dataclass(frozen=True)
class FaultTrial:
    """A training, its faults, and the reference for its result."""

    category: str
    number: int
    external_faults: tuple[ExternalFault, ...] = ()
    faults: tuple[InjectedFault, ...] = ()
    """Faults inside the workers; see `is_transient`."""
    reference_has_faults: bool = False
    """Whether the reference training has the same injected faults; otherwise it has none."""
    is_transient: bool = False
    """Whether a repeated command runs without the faults in `faults`. The workers of the repeated command must follow
    the decisions in the journal."""
    guards: tuple[Guard, ...] = ()
    """Settings of `train.guards` that differ from those of the project. The reference has them too."""
    expected_events: tuple[str, ...] = ()
    """Kinds of journal events (`worker_exited:CLASS` for a failure class). At least one of them must occur, which
    proves the fault."""
    can_stall: bool = False
    """Whether a worker of the trial stalls, so the trial has shorter timeouts than the settings of the project."""

    @property
    def name(self) -> str:
        """Name of the trial and its directory, such as `sigkill-0`."""
        return f"{self.category}-{self.number}"

    @property
    def reference(self) -> tuple[tuple[InjectedFault, ...], tuple[Guard, ...]]:
        """Key of the reference training that the trial is compared with."""
        return (self.faults if self.reference_has_faults else ()), self.guards


@dataclass(frozen=True)
class TrainingShape:
    """Properties of a training that a plan depends on."""

    steps: int
    """Number of optimizer steps; at least MIN_STEPS."""
    validate_every_steps: int
    fitting_tokens: int
    """Padded tokens that suffice for the longest sequence but not for a full micro-batch, for category `oom`."""


Draw = Callable[[random.Random, TrainingShape, int], FaultTrial]
"""Function that draws a trial. The last argument is the number of the trial in its category; for a category with kills,
it is the number of kills."""


@dataclass(frozen=True)
class FaultCategory:
    """A category of faults."""

    description: str
    draw: Draw
    kills: bool = False
    """Whether a trial has several kills, so that the number of faults of the category is a number of kills. Otherwise,
    each trial has one fault."""
    min_trials: int = 1
    """Minimum number of trials, if each trial has one fault."""


def _plan_several(category: str, *actions: FaultAction, expected_events: tuple[str, ...] = ()) -> Draw:
    """Plan consecutive faults, alternately at any time and after the first step of a worker.

    Start-up takes most of the time of a small training, so uniformly distributed faults would rarely occur in a step.
    """

    def draw(chance: random.Random, shape: TrainingShape, count: int) -> FaultTrial:
        faults = tuple(
            ExternalFault(chance.choice(actions), chance.uniform(0, MAX_FRACTION), worker_steps=0 if turn % 2 else 1)
            for turn in range(count)
        )
        return FaultTrial(category, 0, faults, expected_events=expected_events)

    return draw


def _plan_stopped(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
    """Plan that a worker is stopped after its third step, because the deadlines of start-up apply until then."""
    fault = ExternalFault("stop worker", chance.uniform(0, MAX_FRACTION), worker_steps=3)
    return FaultTrial("sigstop", number, (fault,), expected_events=("worker_exited:stalled",), can_stall=True)


def _plan_damage(category: str, action: FaultAction, expected_events: tuple[str, ...] = ()) -> Draw:
    def draw(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
        # Step 5, so that there are two checkpoints, which are two steps apart.
        fault = ExternalFault(action, chance.uniform(0, MAX_FRACTION), min_step=5, seed=chance.randrange(2**32))
        return FaultTrial(category, number, (fault,), expected_events=expected_events)

    return draw


def _plan_disk(category: str, code: Literal["ENOSPC", "EIO", "EROFS"]) -> Draw:
    def draw(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
        step = chance.randint(2, shape.steps // 2)
        fault = InjectedFault(kind="disk", errno=code, step=step, times=chance.randint(1, 4))
        return FaultTrial(category, number, faults=(fault,), expected_events=("alert",))

    return draw


def _plan_once(category: str, kind: Literal["hang", "weights"], expected_events: tuple[str, ...]) -> Draw:
    def draw(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
        fault = InjectedFault(kind=kind, step=chance.randint(4, shape.steps - 3), mark=f"{kind}-took-place")
        return FaultTrial(category, number, faults=(fault,), expected_events=expected_events, can_stall=kind == "hang")

    return draw


def _plan_decision(
    trial: FaultTrial, chance: random.Random, fault: InjectedFault, last_step: int, is_transient: bool
) -> FaultTrial:
    """Add a fault, and a kill soon after its last step: the next worker must follow the decisions in the journal. The
    supervisor is killed if the repeated command should not have the fault."""
    action: FaultAction = "kill supervisor" if is_transient else "kill worker"
    kill = ExternalFault(action, chance.uniform(0, 0.15), min_step=last_step)
    return replace(
        trial, external_faults=(kill,), faults=(fault,), reference_has_faults=True, is_transient=is_transient
    )


def _plan_memory(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
    """Plan lack of memory, alternately in training for some steps, and in validation from the first validation on."""
    phase: Literal["train", "validation"] = "validation" if number % 2 else "train"
    begin = 1 if phase == "validation" else chance.randint(3, shape.steps // 2)
    steps = 0 if phase == "validation" else chance.randint(1, 3)
    fault = InjectedFault(kind="memory", step=begin, steps=steps, tokens=shape.fitting_tokens, phase=phase)
    last = shape.validate_every_steps + 1 if phase == "validation" else begin + steps
    is_transient = phase == "train" and chance.random() < 0.5
    trial = FaultTrial("oom", number, expected_events=("microbatch_budget",))
    return _plan_decision(trial, chance, fault, last, is_transient)


def _plan_non_finite(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
    """Plan a loss that is not finite, in turn: once (the step is repeated), always (skip), always (rollback)."""
    step = chance.randint(shape.steps // 2, shape.steps - 5)
    if number % 3 == 0:
        fault = InjectedFault(kind="non_finite", step=step, times=1)
        return FaultTrial("nan", number, faults=(fault,), expected_events=("step_repeated",))
    rules: tuple[Guard, ...] = (("on_non_finite", "skip"),)
    if number % 3 == 2:
        rules = (("on_non_finite", "roll_back"), ("snapshot_every_steps", max(2, shape.steps // 4)))
    fault = InjectedFault(kind="non_finite", step=step, times=0)
    trial = FaultTrial("nan", number, guards=rules, expected_events=("step_skipped",))
    return _plan_decision(trial, chance, fault, step, chance.random() < 0.5)


def _plan_spike(chance: random.Random, shape: TrainingShape, number: int) -> FaultTrial:
    """Plan a gradient spike, skipped and rolled back in turn; late in training, because the median needs steps."""
    step = chance.randint(max(10, shape.steps * 2 // 3), shape.steps - 2)
    rule = "roll_back" if number % 2 else "skip"
    rules: tuple[Guard, ...] = (("on_spike", rule), ("window_steps", 8), ("snapshot_every_steps", 4))
    fault = InjectedFault(kind="spike", step=step, times=0)
    trial = FaultTrial("spike", number, guards=rules, expected_events=("step_skipped",))
    return _plan_decision(trial, chance, fault, step, chance.random() < 0.5)


FAULT_CATEGORIES: Mapping[str, FaultCategory] = {
    "none": FaultCategory("nothing: two undisturbed trainings must be equal", lambda *_: FaultTrial("none", 0)),
    "sigkill": FaultCategory(
        "the worker is killed",
        _plan_several("sigkill", "kill worker", expected_events=("worker_exited:killed",)), kills=True,
    ),
    "supervisor": FaultCategory(
        "the supervisor is killed, its worker must end; the command is repeated",
        _plan_several("supervisor", "kill supervisor"), kills=True,
    ),
    "sigterm": FaultCategory(
        "the command is asked to stop, sometimes twice; it is repeated",
        _plan_several("sigterm", "terminate", "terminate twice"), kills=True,
    ),
    "sigstop": FaultCategory("the worker is stopped and must be detected", _plan_stopped),
    "hang": FaultCategory(
        "a step never ends and must be detected",
        _plan_once("hang", "hang", ("worker_exited:stalled",)),
    ),
    "oom": FaultCategory("memory runs out, in training or validation; then a kill", _plan_memory, min_trials=2),
    "nan": FaultCategory("the loss is not finite: once, or always and then a kill", _plan_non_finite, min_trials=3),
    "spike": FaultCategory("the gradient is far too large; then a kill", _plan_spike),
    "weights": FaultCategory("a weight becomes NaN", _plan_once("weights", "weights", ("worker_exited:hardware",))),
    "enospc": FaultCategory("the disk is full for a while", _plan_disk("enospc", "ENOSPC")),
    "eio": FaultCategory("the disk fails for a while", _plan_disk("eio", "EIO")),
    "erofs": FaultCategory("the disk is read-only for a while", _plan_disk("erofs", "EROFS")),
    "bitflip": FaultCategory(
        "a bit of the newest checkpoint flips",
        _plan_damage("bitflip", "flip a bit", ("notice",)),
    ),
    "torn": FaultCategory("a file of the newest checkpoint is cut", _plan_damage("torn", "cut a file", ("notice",))),
    "missing": FaultCategory(
        "a file of the newest checkpoint is gone",
        _plan_damage("missing", "remove a file", ("notice",)),
    ),
    "journal": FaultCategory(
        "the journal has a torn end and garbage inside",
        _plan_damage("journal", "damage the journal"),
    ),
    "moved": FaultCategory("the project is moved", _plan_damage("moved", "move the project")),
}  # fmt: skip


def allocate_counts(names: Iterable[str], kills: int) -> dict[str, int]:
    """Return the number of faults of each category: `kills` for categories with kills; for the other categories a fifth
    of `kills`, but at least `min_trials`. Raises SettingsError if a name is not in FAULT_CATEGORIES, there are no
    names, or `kills` is below 1."""
    chosen = set(names)
    unknown = sorted(chosen - set(FAULT_CATEGORIES))
    if unknown or not chosen:
        problem = f"unknown: {', '.join(unknown)}" if unknown else "no fault given"
        raise SettingsError(f"--faults: {problem}; choose from {', '.join(FAULT_CATEGORIES)}")
    if kills < 1:
        raise SettingsError(f"--kills: found {kills}; expected a number >= 1")
    return {
        name: kills if category.kills else max(category.min_trials, kills // 5)
        for name, category in FAULT_CATEGORIES.items()
        if name in chosen
    }


def draw_plan(seed: int, counts: Mapping[str, int], shape: TrainingShape) -> tuple[FaultTrial, ...]:
    """Draw the plan of a seed. Raises SettingsError if the training is too short."""
    if shape.steps < MIN_STEPS:
        raise SettingsError(f"--steps: found {shape.steps}; expected at least {MIN_STEPS}, so that faults can occur")
    trials = []
    for name, count in counts.items():
        category = FAULT_CATEGORIES[name]
        # Kills are divided into trials of nearly equal size, with at most MAX_KILLS each.
        parts = -(-count // MAX_KILLS)
        kills = [count // parts + (number < count % parts) for number in range(parts)]
        for number, size in enumerate(kills if category.kills else range(count)):
            chance = random.Random(f"{seed}/{name}/{number}")
            trials.append(replace(category.draw(chance, shape, size), number=number))
    return tuple(trials)
