"""Dimensions as Optuna's distributions, and values as Optuna stores them (JSON; no lists among the choices)."""

import json
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from ratchet.studies.dimension import Dimension


def distribution(dimension: Dimension) -> BaseDistribution:
    """The same in Optuna's words."""
    if dimension.kind == "choice":
        return CategoricalDistribution([stored(value) for value in dimension.choices])
    if dimension.kind == "int":
        low, high = int(dimension.low), int(dimension.high)
        return IntDistribution(low, high, log=dimension.log, step=int(dimension.step or 1))
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def stored(value: Any) -> Any:
    """A value as Optuna takes it: a list of names becomes its JSON text."""
    return json.dumps(value) if isinstance(value, list | tuple) else value


def restored(dimension: Dimension, value: Any) -> Any:
    """The value that `stored` was given."""
    if dimension.kind != "choice":
        return value
    alike = (one for one in dimension.choices if stored(one) == value and type(stored(one)) is type(value))
    return next(alike, value)  # 1, 1.0 and true are equal to each other
