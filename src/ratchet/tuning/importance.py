"""How much of what trials came to is due to each knob."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.trial import create_trial

from ratchet.storage.records.sweep import Measure, Trial
from ratchet.tuning.in_memory_study import finite, fresh_study, is_infeasible, losses
from ratchet.tuning.parameter_scale import distribution, stored, to_unit
from ratchet.tuning.parameters import Dimension
from ratchet.tuning.search_space import Space
from ratchet.tuning.trial_lineage import lineages

FEWEST = 6
"""Trials below which a forest says nothing."""

PER_KNOB = 2
"""Trials that each knob needs."""


def importances(space: Space, measures: Sequence[Measure], history: Sequence[Trial], seed: int) -> dict[str, float]:
    """Share of the variance of the first objective that each knob explains by itself, the greatest first; sum 1.

    Functional analysis of variance over a random forest (Hutter et al. 2014), of complete trials, each training once,
    every range on its own scale (a learning rate by its logarithm: on the plain scale nine tenths of the space would
    be its last decade). Knobs that some of these trials did not have are left out, and so are ties, which have no
    values of their own. Where pruning has left too few complete trials, and validation loss is the objective, it is
    that of the first validation which counts, of all trials that had theirs after as many rows. Empty where even so
    there are too few trials, or all came to the same.
    """
    found = _explained(space, _complete(measures, history), seed)
    if not found and measures[0].metric == "validation_loss":
        found = _explained(space, _at_first(history), seed)
    return found


def _complete(measures: Sequence[Measure], history: Sequence[Trial]) -> list[tuple[Trial, float]]:
    told = [line.told for line in lineages(history)]
    over = [trial for trial in told if trial.state == "complete" and not is_infeasible(trial)]
    return [(trial, losses(trial, measures)[0]) for trial in over]


def _at_first(history: Sequence[Trial]) -> list[tuple[Trial, float]]:
    """Loss of the first validation, of trials whose first came after as many rows as that of most."""
    firsts = [(line.trials[0], *min(curve.items())) for line in lineages(history) if (curve := finite(line.curve))]
    if not firsts:
        return []
    rows, _ = Counter(rows for _, rows, _ in firsts).most_common(1)[0]
    return [(trial, loss) for trial, at, loss in firsts if at == rows]


def _explained(space: Space, known: Sequence[tuple[Trial, float]], seed: int) -> dict[str, float]:
    free = [space.free(trial.values) for trial, _ in known]
    dimensions = [space.dimension(name) for name in free[0] if all(name in one for one in free)] if free else []
    if len(known) < max(FEWEST, PER_KNOB * len(dimensions)) or not dimensions:
        return {}
    values = [value for _, value in known]
    if len(set(values)) == 1 or all(len({repr(one[knob.name]) for one in free}) == 1 for knob in dimensions):
        return {}
    study = fresh_study(1)
    distributions = {dimension.name: _scaled(dimension) for dimension in dimensions}
    for one, value in zip(free, values, strict=True):
        params = {dimension.name: _placed(dimension, one[dimension.name]) for dimension in dimensions}
        study.add_trial(create_trial(value=value, params=params, distributions=distributions))
    return get_param_importances(study, evaluator=FanovaImportanceEvaluator(n_trees=64, max_depth=64, seed=seed))


def _scaled(dimension: Dimension) -> BaseDistribution:
    return distribution(dimension) if dimension.kind == "choice" else FloatDistribution(0.0, 1.0)


def _placed(dimension: Dimension, value: Any) -> Any:
    return stored(value) if dimension.kind == "choice" else min(max(to_unit(dimension, value), 0.0), 1.0)
