"""CMA-ES whose state is a function of the history: it is rebuilt for every proposal, and none is ever saved."""

import importlib.metadata
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import optuna
from cmaes import CMA
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler

from ratchet.config.sweep import SamplerSettings
from ratchet.storage import digests
from ratchet.storage.records.sweep import SweepObjective, Trial
from ratchet.tuning.in_memory_study import (
    TrialLineage,
    build_in_memory_study,
    constraint_violations,
    group_by_lineage,
    is_infeasible,
    minimized_objectives,
    replace_non_finite,
)
from ratchet.tuning.parameter_scale import decode_value, draw_value, encode_value, from_unit, iterate_points, to_unit
from ratchet.tuning.parameters import SearchDimension
from ratchet.tuning.search_space import SearchSpace

SIGMA = 0.3
"""Of the first generation, in widths of the ranges: the best is expected somewhere inside (Hansen 2016, section B)."""

FEWEST = 2
"""Numeric knobs below which there is no covariance to learn."""


def numeric_dimensions(space: SearchSpace) -> list[SearchDimension]:
    """The knobs that it searches: ranges that are there in every trial. All others are drawn at random."""
    ranges = [axis.knob for axis in space.axes() if axis.kind in ("float", "int") and not axis.conditional]
    dimensions = [space.dimension(knob) for knob in ranges]
    return [dimension for dimension in dimensions if dimension.high > dimension.low and dimension.points != 1]


def draw_cma_point(
    space: SearchSpace, measures: Sequence[SweepObjective], history: Sequence[Trial], seed: int
) -> dict[str, Any]:
    """A point from the distribution that the finished generations have led to.

    Ranges are searched on their own scales as 0 to 1, and rounded. The first trial of a study is the middle of
    everything, unless it was given: what that trial is, is where the first generation starts.
    """
    dimensions = numeric_dimensions(space)
    ordered = sorted(history, key=lambda trial: trial.number)
    if ordered:
        optimizer = _replay_optimizer(
            dimensions, _unit_vector(dimensions, ordered[0]), measures, group_by_lineage(ordered)
        )
        optimizer.reseed_rng(seed)
        point = optimizer.ask()
    else:
        point = np.full(len(dimensions), 0.5)
    place = {dimension.name: float(position) for dimension, position in zip(dimensions, point, strict=True)}
    return space.draw(partial(_pick_value, place, random.Random(seed)))


def population_size(dimensions: int) -> int:
    """Trials in a generation: 4 + 3 ln d (Hansen 2016, equation 48)."""
    return 4 + int(3 * np.log(dimensions))


def _pick_value(place: dict[str, float], source: random.Random, dimension: SearchDimension) -> Any:
    if dimension.name in place:
        return from_unit(dimension, place[dimension.name])
    return draw_value(dimension, source)


def _unit_vector(dimensions: Sequence[SearchDimension], trial: Trial) -> np.ndarray:
    return np.array([min(max(to_unit(one, trial.values[one.name]), 0.0), 1.0) for one in dimensions])


def _replay_optimizer(
    dimensions: Sequence[SearchDimension],
    start: np.ndarray,
    measures: Sequence[SweepObjective],
    known: Sequence[TrialLineage],
) -> CMA:
    """The optimizer after all generations that are over, in the order in which trials were begun.

    Trials belong to generations by number, whoever finishes first, and a generation that is not over ends the replay:
    what runs meanwhile is drawn from the distribution before it. Failed trials belong to none.
    """
    bounds = np.array([[0.0, 1.0]] * len(dimensions))
    optimizer = CMA(mean=start, sigma=SIGMA, bounds=bounds, population_size=population_size(len(dimensions)), seed=0)
    counted = [line for line in known if line.told.state != "failed"]
    size = optimizer.population_size
    for begin in range(0, len(counted) - size + 1, size):
        generation = counted[begin : begin + size]
        if any(line.told.state == "running" for line in generation):
            break
        ranked = sorted(generation, key=lambda line: _ranking_key(line, measures))
        # Only their order matters to CMA-ES, and an order there is between trials that share no unit.
        optimizer.tell([(_unit_vector(dimensions, line.told), float(rank)) for rank, line in enumerate(ranked)])
    return optimizer


def _ranking_key(line: TrialLineage, measures: Sequence[SweepObjective]) -> tuple[float, ...]:
    """Best first: complete ones by their loss, pruned ones by how far they came, infeasible ones by their violation."""
    if is_infeasible(line.told):
        return (2.0, sum(constraint_violations(line.told).values()), 0.0)
    if line.told.state == "complete":
        return (0.0, minimized_objectives(line.told, measures)[0], 0.0)
    rows, loss = next(reversed(replace_non_finite(line.curve).items()), (0, 0.0))
    return (1.0, -float(rows), loss)


# Values of the next trial: a function of the settings, the trials so far, and the number of the one to come.

Values = dict[str, Any]

ATTEMPTS = {"tpe": 20, "gp": 3, "random": 20, "cmaes": 20}
"""Times that a sampler may propose what has been tried; a Gaussian process thinks for a second and hardly varies."""

COUNTED = 4096
"""Points up to which the untried ones of a finite space are listed to choose one evenly; else values are drawn."""

DRAWS = 200
"""Random values in a row that have all been tried, before a space counts as used up (or is gone through in order)."""


def propose(  # noqa: PLR0913, PLR0917 (what is searched, what is known, and which trial it is for)
    space: SearchSpace,
    sampler: SamplerSettings,
    measures: Sequence[SweepObjective],
    history: Sequence[Trial],
    number: int,
    known: Callable[[Mapping[str, Any]], bool],
    current: Mapping[str, Any] | None = None,
) -> Values | None:
    """Values of trial `number`, ties included; None when a grid or a finite space is used up.

    Nothing is remembered between calls: the same arguments give the same values in any process. What `known` says has
    been tried is never proposed again while there is anything else.

    Args:
        space: The knobs.
        sampler: Its kind and seed.
        measures: What trials are judged by; complete trials have their objectives in this order.
        history: All trials of the study, in any order.
        number: Of the trial to come, from 0; together with the seed it makes the random numbers.
        known: Whether values have been tried.
        current: The project's own values by dotted key. They are the first trial of any sampler but a grid, where
            they lie in the space: a sweep without what one has says little.
    """
    if sampler.kind == "grid":
        return next((values for values in space.grid(sampler.points) if not known(values)), None)
    first = _current_values(space, current) if number == 0 and current is not None else None
    if first is not None and not known(first):
        return first
    for values in _iterate_proposals(space, sampler, measures, history, number):
        if not known(values):
            return values
    return _draw_untried(space, random.Random(derive_seed(sampler.seed, number, -1)), known)


def derive_seed(seed: int, number: int, attempt: int) -> int:
    """Seed of one proposal, 31 bits: settings, trial and attempt, hashed, so that neighbours have nothing in common."""
    return int(digests.hash_json([seed, number, attempt])[:8], 16) & 0x7FFFFFFF


def describe(sampler: SamplerSettings, space: SearchSpace) -> str:
    """What proposes values, for people: method, version of the library, seed."""
    version = library_versions()
    seed = f"seed {sampler.seed}"
    if sampler.kind == "grid":
        return f"grid of {len(space.grid(sampler.points))} points, in order"
    if sampler.kind == "random":
        return f"random, {seed}"
    if sampler.kind == "cmaes":
        knobs = [dimension.name for dimension in numeric_dimensions(space)]
        if len(knobs) < FEWEST:
            return f"random, {seed} (CMA-ES needs two numeric knobs that every trial has; there is {len(knobs)})"
        size = population_size(len(knobs))
        return f"CMA-ES over {', '.join(knobs)} (cmaes {version['cmaes']}), generations of {size}, {seed}"
    method = "TPE" if sampler.kind == "tpe" else "Gaussian process"
    return f"{method} (optuna {version['optuna']}), {seed}, {sampler.startup} random trials first"


def library_versions() -> dict[str, str]:
    """The libraries whose other versions might propose other values."""
    return {name: importlib.metadata.version(name) for name in ("optuna", "cmaes")}


def _current_values(space: SearchSpace, current: Mapping[str, Any]) -> Values | None:
    """The project's own values, ties included, where they lie in the space."""
    try:
        values = space.draw(lambda dimension: current[dimension.name])
    except (KeyError, ValueError):  # one of them is not given, or is none of the knob's values
        return None
    return values if all(current.get(name, value) == value for name, value in values.items()) else None


def _iterate_proposals(
    space: SearchSpace,
    sampler: SamplerSettings,
    measures: Sequence[SweepObjective],
    history: Sequence[Trial],
    number: int,
) -> Iterator[Values]:
    """What the sampler proposes, attempt by attempt."""
    seeds = [derive_seed(sampler.seed, number, attempt) for attempt in range(ATTEMPTS[sampler.kind])]
    if sampler.kind in ("tpe", "gp"):
        # One study for all attempts: what was asked for in vain runs in it, and is avoided the next time.
        study = build_in_memory_study(space, measures, history, sampler.kind)
        for seed in seeds:
            study.sampler = _create_sampler(sampler, space, seed)
            yield space.draw(partial(_suggest_value, study.ask()))
    elif sampler.kind == "cmaes" and len(numeric_dimensions(space)) >= FEWEST:
        yield from (draw_cma_point(space, measures, history, seed) for seed in seeds)
    else:
        yield from (_draw_random(space, random.Random(seed)) for seed in seeds)


def _create_sampler(sampler: SamplerSettings, space: SearchSpace, seed: int) -> BaseSampler:
    """Optuna's, every argument that decides about values given: defaults change between its versions.

    Conditional knobs are sampled jointly with those they appear with (`group`). That argument is called experimental,
    which concerns its interface, and that is pinned by our tests; hence no warning.
    """
    if sampler.kind == "gp":
        # Warns once that local searches run one after the other without greenlet: 0.3 s a proposal all the same.
        logging.getLogger("optuna._gp.batched_lbfgsb").setLevel(logging.ERROR)
        return GPSampler(
            seed=seed,
            independent_sampler=RandomSampler(seed=seed),
            n_startup_trials=sampler.startup,
            deterministic_objective=False,
            warn_independent_sampling=False,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(
            seed=seed,
            n_startup_trials=sampler.startup,
            n_ei_candidates=24,
            multivariate=True,
            group=any(axis.conditional for axis in space.axes()),
            constant_liar=True,
        )


def _suggest_value(trial: optuna.Trial, dimension: SearchDimension) -> Any:
    name = dimension.name
    if dimension.kind == "choice":
        return decode_value(
            dimension, trial.suggest_categorical(name, [encode_value(value) for value in dimension.choices])
        )
    low, high, log = dimension.low, dimension.high, dimension.log
    if dimension.kind == "int":
        return trial.suggest_int(name, int(low), int(high), log=log, step=int(dimension.step or 1))
    return trial.suggest_float(name, low, high, log=log, step=dimension.step)


def _draw_random(space: SearchSpace, source: random.Random) -> Values:
    return space.draw(partial(draw_value, source=source))


def _draw_untried(
    space: SearchSpace, source: random.Random, known: Callable[[Mapping[str, Any]], bool]
) -> Values | None:
    """Something that has not been tried, drawn evenly; None if there is nothing left."""
    size = space.size()
    if size is None or size > COUNTED:
        drawn = (_draw_random(space, source) for _ in range(DRAWS))
        found = next((values for values in drawn if not known(values)), None)
        if found is not None or size is None:
            return found
        return next((values for values in iterate_points(space) if not known(values)), None)
    left = [values for values in iterate_points(space) if not known(values)]
    return source.choice(left) if left else None
