"""CMA-ES whose state is a function of the history: it is rebuilt for every proposal, and none is ever saved."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from cmaes import CMA

from ratchet.records_sweep import Measure, Trial
from ratchet.studies.dimension import Dimension
from ratchet.studies.lineage import Lineage, lineages
from ratchet.studies.scale import at_random, from_unit, to_unit
from ratchet.studies.shadow import finite, is_infeasible, losses, violation
from ratchet.studies.space import Space

SIGMA = 0.3
"""Of the first generation, in widths of the ranges: the best is expected somewhere inside (Hansen 2016, section B)."""

FEWEST = 2
"""Numeric knobs below which there is no covariance to learn."""


def numeric(space: Space) -> list[Dimension]:
    """The knobs that it searches: ranges that are there in every trial. All others are drawn at random."""
    ranges = [axis.knob for axis in space.axes() if axis.kind in ("float", "int") and not axis.conditional]
    dimensions = [space.dimension(knob) for knob in ranges]
    return [dimension for dimension in dimensions if dimension.high > dimension.low and dimension.points != 1]


def draw(space: Space, measures: Sequence[Measure], history: Sequence[Trial], seed: int) -> dict[str, Any]:
    """A point from the distribution that the finished generations have led to.

    Ranges are searched on their own scales as 0 to 1, and rounded. The first trial of a study is the middle of
    everything, unless it was given: what that trial is, is where the first generation starts.
    """
    dimensions = numeric(space)
    ordered = sorted(history, key=lambda trial: trial.number)
    if ordered:
        optimizer = _replayed(dimensions, _unit(dimensions, ordered[0]), measures, lineages(ordered))
        optimizer.reseed_rng(seed)
        point = optimizer.ask()
    else:
        point = np.full(len(dimensions), 0.5)
    place = {dimension.name: float(position) for dimension, position in zip(dimensions, point, strict=True)}
    return space.draw(partial(_pick, place, random.Random(seed)))


def population(dimensions: int) -> int:
    """Trials in a generation: 4 + 3 ln d (Hansen 2016, equation 48)."""
    return 4 + int(3 * np.log(dimensions))


def _pick(place: dict[str, float], source: random.Random, dimension: Dimension) -> Any:
    if dimension.name in place:
        return from_unit(dimension, place[dimension.name])
    return at_random(dimension, source)


def _unit(dimensions: Sequence[Dimension], trial: Trial) -> np.ndarray:
    return np.array([min(max(to_unit(one, trial.values[one.name]), 0.0), 1.0) for one in dimensions])


def _replayed(
    dimensions: Sequence[Dimension], start: np.ndarray, measures: Sequence[Measure], known: Sequence[Lineage]
) -> CMA:
    """The optimizer after all generations that are over, in the order in which trials were begun.

    Trials belong to generations by number, whoever finishes first, and a generation that is not over ends the replay:
    what runs meanwhile is drawn from the distribution before it. Failed trials belong to none.
    """
    bounds = np.array([[0.0, 1.0]] * len(dimensions))
    optimizer = CMA(mean=start, sigma=SIGMA, bounds=bounds, population_size=population(len(dimensions)), seed=0)
    counted = [line for line in known if line.told.state != "failed"]
    size = optimizer.population_size
    for begin in range(0, len(counted) - size + 1, size):
        generation = counted[begin : begin + size]
        if any(line.told.state == "running" for line in generation):
            break
        ranked = sorted(generation, key=lambda line: _order(line, measures))
        # Only their order matters to CMA-ES, and an order there is between trials that share no unit.
        optimizer.tell([(_unit(dimensions, line.told), float(rank)) for rank, line in enumerate(ranked)])
    return optimizer


def _order(line: Lineage, measures: Sequence[Measure]) -> tuple[float, ...]:
    """Best first: complete ones by their loss, pruned ones by how far they came, infeasible ones by their violation."""
    if is_infeasible(line.told):
        return (2.0, sum(violation(line.told).values()), 0.0)
    if line.told.state == "complete":
        return (0.0, losses(line.told, measures)[0], 0.0)
    rows, loss = next(reversed(finite(line.curve).items()), (0, 0.0))
    return (1.0, -float(rows), loss)
