"""Which trials of a study are best: by one objective, or on the Pareto front of several."""

import math
from collections.abc import Iterable, Sequence

from ratchet.config_sweep import Sweep
from ratchet.records_sweep import Measure, Trial


def measures(sweep: Sweep) -> tuple[Measure, ...]:
    """What trials are judged by."""
    return tuple(Measure(metric=aim.metric, direction=aim.better) for aim in sweep.objectives)


def standing(trials: Iterable[Trial]) -> list[Trial]:
    """Trials that can be named best, each training once: complete, with objectives that are numbers."""
    found: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda one: one.number):
        numbers = bool(trial.objectives) and all(map(math.isfinite, trial.objectives))
        if trial.state == "complete" and trial.run_id is not None and numbers:
            found.setdefault(trial.run_id, trial)
    return list(found.values())


def front(trials: Iterable[Trial], measures: Sequence[Measure]) -> list[Trial]:
    """Those that no other is better than by one objective without being worse by another; by number."""
    some = standing(trials)
    prices = {trial.number: _prices(trial, measures) for trial in some}
    return [trial for trial in some if not any(_beats(other, prices[trial.number]) for other in prices.values())]


def best(trials: Iterable[Trial], measures: Sequence[Measure], count: int) -> list[Trial]:
    """The best so many by the first objective, of several objectives on their front; of equals the earlier one."""
    some = front(trials, measures) if len(measures) > 1 else standing(trials)
    return sorted(some, key=lambda trial: (_prices(trial, measures)[0], trial.number))[:count]


def leaders(trials: Iterable[Trial], measures: Sequence[Measure]) -> tuple[int, ...]:
    """Number of the best trial; of several objectives those of the front."""
    found = front(trials, measures) if len(measures) > 1 else best(trials, measures, 1)
    return tuple(trial.number for trial in found)


def _prices(trial: Trial, measures: Sequence[Measure]) -> tuple[float, ...]:
    """Objectives, turned so that less is better."""
    return tuple(
        -value if measure.direction == "maximize" else value
        for value, measure in zip(trial.objectives, measures, strict=True)
    )


def _beats(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
