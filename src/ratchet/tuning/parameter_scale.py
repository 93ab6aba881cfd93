"""Converts hyperparameter values to positions from 0 to 1, to indices, and to Optuna's distributions."""

import json
import math
import random
from collections.abc import Iterator
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from ratchet.tuning.parameters import SearchDimension
from ratchet.tuning.search_space import SearchSpace, stepped_value


def value_at(dimension: SearchDimension, index: int) -> Any:
    """Return the value with an index from 0; the dimension must be finite."""
    return dimension.choices[index] if dimension.kind == "choice" else stepped_value(dimension, index)


def to_unit(dimension: SearchDimension, value: float) -> float:
    """Return the position of a value in its range, 0 to 1; each value of a finite range has an equal share."""
    low, high = _scale_bounds(dimension)
    position = math.log(value) if dimension.log else float(value)
    return (position - low) / (high - low) if high > low else 0.5


def from_unit(dimension: SearchDimension, position: float) -> float | int:
    """Return the value at a position (clipped to 0 and 1), rounded to a value of a finite range."""
    low, high = _scale_bounds(dimension)
    value = low + min(max(position, 0.0), 1.0) * (high - low)
    value = math.exp(value) if dimension.log else value
    points = dimension.points
    if points is None:
        return min(max(value, dimension.low), dimension.high)
    index = round((value - dimension.low) / (dimension.step or 1))
    return stepped_value(dimension, min(max(index, 0), points - 1))


def draw_value(dimension: SearchDimension, source: random.Random) -> Any:
    """Draw a value uniformly on the dimension's scale."""
    if dimension.kind == "choice":
        return source.choice(dimension.choices)
    return from_unit(dimension, source.random())


def iterate_points(space: SearchSpace) -> Iterator[dict[str, Any]]:
    """Yield all points of a finite space, the last parameter changing fastest."""
    path: list[int] = []
    while True:
        sizes: list[int] = []

        def pick(dimension: SearchDimension, sizes: list[int] = sizes) -> Any:
            sizes.append(dimension.points or 1)
            if len(sizes) > len(path):
                path.append(0)
            return value_at(dimension, path[len(sizes) - 1])

        yield space.draw(pick)
        while path and path[-1] + 1 >= sizes[len(path) - 1]:
            path.pop()
        if not path:
            return
        path[-1] += 1


def _scale_bounds(dimension: SearchDimension) -> tuple[float, float]:
    """Return the ends of the range on its scale; half a step wider if finite, so that all values have equal shares."""
    points = dimension.points
    if points is None:
        low, high = dimension.low, dimension.high
    else:
        half = (dimension.step or 1) / 2
        low, high = dimension.low - half, value_at(dimension, points - 1) + half
    return (math.log(low), math.log(high)) if dimension.log else (low, high)


# Optuna's distributions and stored values (JSON, without lists as choices).


def to_distribution(dimension: SearchDimension) -> BaseDistribution:
    """Return the dimension as an Optuna distribution."""
    if dimension.kind == "choice":
        return CategoricalDistribution([encode_value(value) for value in dimension.choices])
    if dimension.kind == "int":
        low, high = int(dimension.low), int(dimension.high)
        return IntDistribution(low, high, log=dimension.log, step=int(dimension.step or 1))
    return FloatDistribution(dimension.low, dimension.high, log=dimension.log, step=dimension.step)


def encode_value(value: Any) -> Any:
    """Return a value as Optuna stores it: a list of names becomes its JSON text."""
    return json.dumps(value) if isinstance(value, list | tuple) else value


def decode_value(dimension: SearchDimension, value: Any) -> Any:
    """Return the value that `encode_value` has encoded."""
    if dimension.kind != "choice":
        return value
    for choice in dimension.choices:
        encoded = encode_value(choice)
        if encoded == value and type(encoded) is type(value):  # because 1 == 1.0 == True
            return choice
    return value
