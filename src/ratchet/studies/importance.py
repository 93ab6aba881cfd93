"""How much of what trials came to is due to each knob."""

from collections.abc import Sequence
from typing import Any

from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.trial import create_trial

from ratchet.records_sweep import Measure, Trial
from ratchet.studies.dimension import Dimension
from ratchet.studies.distributions import distribution, stored
from ratchet.studies.lineage import lineages
from ratchet.studies.scale import to_unit
from ratchet.studies.shadow import fresh_study, is_infeasible, losses
from ratchet.studies.space import Space

FEWEST = 6
"""Complete trials below which a forest says nothing."""

PER_KNOB = 2
"""Complete trials that each knob needs."""


def importances(space: Space, measures: Sequence[Measure], history: Sequence[Trial], seed: int) -> dict[str, float]:
    """Share of the variance of the first objective that each knob explains by itself, the greatest first; sum 1.

    Functional analysis of variance over a random forest (Hutter et al. 2014), of complete trials, each training once,
    every range on its own scale (a learning rate by its logarithm: on the plain scale nine tenths of the space would
    be its last decade). Knobs that some of these trials did not have are left out, and so are ties, which have no
    values of their own. Empty where there are too few trials, or all came to the same.
    """
    over = [line.told for line in lineages(history) if line.told.state == "complete" and not is_infeasible(line.told)]
    free = [space.free(trial.values) for trial in over]
    dimensions = [space.dimension(name) for name in free[0] if all(name in one for one in free)] if free else []
    if len(over) < max(FEWEST, PER_KNOB * len(dimensions)) or not dimensions:
        return {}
    values = [losses(trial, measures)[0] for trial in over]
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
