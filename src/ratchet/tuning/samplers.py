"""Samplers: propose the values of the next trial, as a function of settings, history and trial number.

Nothing is remembered between calls: Optuna's samplers get a study in memory that is built from the history, and CMA-ES
is rebuilt from the history. Trials that share one training (a pruned or failed trial and its continuations) count once.
"""

import importlib.metadata
import logging
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
import optuna
from cmaes import CMA
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, GPSampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from ratchet.config.sweep import SamplerSettings
from ratchet.models.start_adapter import INIT_ADAPTER
from ratchet.storage import digests
from ratchet.storage.records.sweep import SweepObjective, Trial
from ratchet.tuning.search_space import (
    SearchDimension,
    SearchSpace,
    decode_value,
    draw_value,
    encode_value,
    from_unit,
    to_unit,
)

ATTEMPTS = {"tpe": 20, "gp": 3, "random": 20, "cmaes": 20}
"""Maximum number of attempts of a sampler to propose untried values. A Gaussian process has few attempts, because each
needs a second, and its proposals hardly differ."""

MAX_LISTED_POINTS = 4096
"""Maximum size of a finite space of which all points are listed, to draw an untried point uniformly."""

MAX_DRAWS = 200
"""Maximum number of random draws in search of untried values. If all drawn values were tried before, a finite space is
searched in order, and any other space counts as used up."""

WORST = 1e300
"""Value that replaces a loss that is not finite. It is worse than any other loss, but medians with it are finite."""

INFEASIBLE = "infeasible"
"""Name of the constraint for a Gaussian process; its value is above 0 if the trial is infeasible (`is_infeasible`)."""

SIGMA = 0.3
"""Standard deviation of the first generation, as a share of the width of a range (Hansen 2016, section B)."""

MIN_CMA_DIMENSIONS = 2
"""Minimum number of numeric parameters for CMA-ES."""

Values = dict[str, Any]
"""Values of a trial by dotted key."""


def propose(  # noqa: PLR0913, PLR0917 (what is searched, what is known, and which trial it is for)
    space: SearchSpace,
    sampler: SamplerSettings,
    objectives: Sequence[SweepObjective],
    history: Sequence[Trial],
    number: int,
    is_tried: Callable[[Mapping[str, Any]], bool],
    current: Mapping[str, Any] | None = None,
) -> Values | None:
    """Return the values of trial `number`, including derived ones; None if a grid or a finite space is used up.

    The same arguments give the same values in any process. Values that were tried are not proposed again while there
    are untried values. The number determines the random numbers, together with the seed. If the space contains
    `current` (values of params.yaml by dotted key), it is the first trial, as a baseline (not for a grid).
    """
    if sampler.kind == "grid":
        return next((values for values in space.grid(sampler.grid_points) if not is_tried(values)), None)
    if number == 0 and current is not None:
        first: Values = {}
        with suppress(KeyError, ValueError):  # a value is missing or outside of its range
            first = space.draw(lambda dimension: current[dimension.name])
        is_current = bool(first) and all(current.get(name, value) == value for name, value in first.items())
        if is_current and not is_tried(first):
            return first
    for values in _iterate_proposals(space, sampler, objectives, history, number):
        if not is_tried(values):
            return values
    return draw_untried(space, random.Random(derive_seed(sampler.seed, number, -1)), is_tried)


def derive_seed(seed: int, number: int, attempt: int) -> int:
    """Return the 31-bit seed of a proposal: a hash, so that seeds of neighbouring trials and attempts are unrelated."""
    return int(digests.hash_json([seed, number, attempt])[:8], 16) & 0x7FFFFFFF


def describe(sampler: SamplerSettings, space: SearchSpace) -> str:
    """Return the sampler as text: method, version of the library, seed."""
    version = library_versions()
    seed = f"seed {sampler.seed}"
    if sampler.kind == "grid":
        return f"grid of {len(space.grid(sampler.grid_points))} points, in order"
    if sampler.kind == "random":
        return f"random, {seed}"
    if sampler.kind == "cmaes":
        parameters = [dimension.name for dimension in numeric_dimensions(space)]
        if len(parameters) < MIN_CMA_DIMENSIONS:
            return f"random, {seed} (CMA-ES needs two numeric parameters that every trial has; found {len(parameters)})"
        size = population_size(len(parameters))
        return f"CMA-ES over {', '.join(parameters)} (cmaes {version['cmaes']}), generations of {size}, {seed}"
    method = "TPE" if sampler.kind == "tpe" else "Gaussian process"
    return f"{method} (optuna {version['optuna']}), {seed}, {sampler.n_startup_trials} random trials first"


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries that determine proposals."""
    return {name: importlib.metadata.version(name) for name in ("optuna", "cmaes", "scipy")}


def _iterate_proposals(
    space: SearchSpace,
    sampler: SamplerSettings,
    objectives: Sequence[SweepObjective],
    history: Sequence[Trial],
    number: int,
) -> Iterator[Values]:
    """Yield the proposals of the sampler, attempt by attempt."""
    seeds = [derive_seed(sampler.seed, number, attempt) for attempt in range(ATTEMPTS[sampler.kind])]
    if sampler.kind in ("tpe", "gp"):
        # All attempts use the same study, in which rejected proposals are running trials, so that they are avoided.
        study = build_in_memory_study(space, objectives, history, sampler.kind)
        # The first trials of the sampler are random. A person's trials are observations, but none of its first trials.
        known = _select_evidence(space, history)
        requested = sum(line.is_requested and line.decisive.state != "running" for line in known)
        sampler = sampler.model_copy(update={"n_startup_trials": sampler.n_startup_trials + requested})
        for seed in seeds:
            study.sampler = _create_sampler(sampler, space, seed)
            yield space.draw(partial(_suggest_value, study.ask()))
    elif sampler.kind == "cmaes" and len(numeric_dimensions(space)) >= MIN_CMA_DIMENSIONS:
        yield from (draw_cma_point(space, objectives, history, seed) for seed in seeds)
    else:
        yield from (space.draw(partial(draw_value, source=random.Random(seed))) for seed in seeds)


def _create_sampler(sampler: SamplerSettings, space: SearchSpace, seed: int) -> BaseSampler:
    """Return Optuna's sampler with all arguments that affect values, because defaults change between versions.

    Conditional parameters are sampled jointly with parameters of the same condition (`group`). The argument is
    experimental, but tests check its interface, so the warning is suppressed.
    """
    if sampler.kind == "gp":
        # Suppress a warning that local searches run sequentially without greenlet: a proposal takes only 0.3 s.
        logging.getLogger("optuna._gp.batched_lbfgsb").setLevel(logging.ERROR)
        return GPSampler(
            seed=seed,
            independent_sampler=RandomSampler(seed=seed),
            n_startup_trials=sampler.n_startup_trials,
            deterministic_objective=False,
            warn_independent_sampling=False,
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return TPESampler(
            seed=seed,
            n_startup_trials=sampler.n_startup_trials,
            n_ei_candidates=24,
            multivariate=True,
            group=any(axis.conditional for axis in space.axes()),
            constant_liar=True,
        )


def _suggest_value(trial: optuna.Trial, dimension: SearchDimension) -> Any:
    name = dimension.name
    if dimension.kind == "choice":
        return decode_value(dimension, trial.suggest_categorical(name, list(map(encode_value, dimension.choices))))
    low, high, log = dimension.low, dimension.high, dimension.log
    if dimension.kind == "int":
        return trial.suggest_int(name, int(low), int(high), log=log, step=int(dimension.step or 1))
    return trial.suggest_float(name, low, high, log=log, step=dimension.step)


def draw_untried(
    space: SearchSpace, source: random.Random, is_tried: Callable[[Mapping[str, Any]], bool]
) -> Values | None:
    """Draw untried values uniformly; None if all have been tried."""
    points = list(islice(space.iterate_points(), MAX_LISTED_POINTS + 1)) if space.is_finite else []
    if 0 < len(points) <= MAX_LISTED_POINTS:
        remaining = [values for values in points if not is_tried(values)]
        return source.choice(remaining) if remaining else None
    drawn = (space.draw(partial(draw_value, source=source)) for _ in range(MAX_DRAWS))
    untried = next((values for values in drawn if not is_tried(values)), None)
    if untried is not None or not space.is_finite:
        return untried
    return next((values for values in space.iterate_points() if not is_tried(values)), None)


# Trainings, and the study in memory for Optuna's samplers and pruners.


@dataclass(frozen=True)
class TrialLineage:
    """One training: the trial that began it, and the trials that continued it after it was pruned or had failed."""

    trials: tuple[Trial, ...]
    """Trials, ordered by number."""

    @property
    def first(self) -> int:
        """Number of the trial that began the training."""
        return self.trials[0].number

    @property
    def values(self) -> dict[str, Any]:
        """Values of the training."""
        return self.trials[0].values

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of its trials."""
        return tuple(trial.number for trial in self.trials)

    @cached_property
    def curve(self) -> dict[int, float]:
        """Validation loss in nats per token by processed rows, over all its trials, in order of rows."""
        return dict(sorted(point for trial in self.trials for point in trial.curve.items()))

    @property
    def decisive(self) -> Trial:
        """The trial with the result: the last trial that is complete, pruned or infeasible, or else the last trial.

        While a trial continues a pruned trial, the result is still that of the pruned trial. A failed continuation is
        no result, because it is no evidence about the values.
        """
        settled = [trial for trial in self.trials if trial.state in ("complete", "pruned", "infeasible")]
        if not settled or (settled[-1].is_ended_by_person and self.trials[-1].state == "running"):
            return self.trials[-1]  # a resumed training is running for other workers too
        return settled[-1]

    @property
    def is_evidence(self) -> bool:
        """Whether its end is evidence about its values; False if it failed, or if a person has ended it."""
        return self.decisive.state != "failed" and not self.decisive.is_ended_by_person

    @property
    def is_requested(self) -> bool:
        """Whether a person has chosen its values (`ratchet sweep --clone`), and not the sampler."""
        return self.trials[0].request is not None

    @property
    def starts_from_weights(self) -> bool:
        """Whether it starts from trained weights, so that its losses are not those of its values alone."""
        return INIT_ADAPTER in self.values

    @property
    def competes(self) -> bool:
        """Whether pruners compare other trainings with it; False if its last trial is failed or infeasible.

        Such a training may have a good curve.
        """
        return self.trials[-1].state not in ("failed", "infeasible") and not self.starts_from_weights


def group_by_lineage(history: Iterable[Trial]) -> list[TrialLineage]:
    """Return the trainings of a study, by the number of the trial that began them."""
    by_first: dict[int, list[Trial]] = {}
    first: dict[int, int] = {}
    for trial in sorted(history, key=lambda trial: trial.number):
        first[trial.number] = trial.number if trial.continues is None else first[trial.continues]
        by_first.setdefault(first[trial.number], []).append(trial)
    return [TrialLineage(tuple(trials)) for trials in by_first.values()]


def create_empty_study(objectives: int) -> optuna.Study:
    """Return an empty study in memory that minimises all objectives; Optuna does not log."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna.create_study(storage=optuna.storages.InMemoryStorage(), directions=["minimize"] * objectives)


def replace_non_finite(curve: Mapping[int, float]) -> dict[int, float]:
    """Return the curve with `WORST` for values that are not finite."""
    return {rows: value if math.isfinite(value) else WORST for rows, value in curve.items()}


def is_infeasible(trial: Trial) -> bool:
    """Return whether the trial is infeasible, or complete with an objective that is not finite."""
    is_not_finite = trial.state == "complete" and not all(map(math.isfinite, trial.objectives))
    return trial.state == "infeasible" or is_not_finite


def constraint_violations(trial: Trial) -> dict[str, float]:
    """Return how much an infeasible trial violated each constraint; 1.0 if it is unknown."""
    violated = {name: value for name, value in trial.constraints.items() if value > 0}
    return violated or {"unknown": 1.0}


def _select_evidence(space: SearchSpace, history: Iterable[Trial]) -> list[TrialLineage]:
    """Return the trainings from which Optuna's samplers learn."""
    return [line for line in group_by_lineage(history) if line.is_evidence and space.contains(line.values)]


def build_in_memory_study(
    space: SearchSpace, objectives: Sequence[SweepObjective], history: Sequence[Trial], kind: str
) -> optuna.Study:
    """Return the trials of `history` as a study for a sampler of this kind (`tpe` or `gp`).

    A training that several trials share counts once (`TrialLineage`). Failed trials and trials that a person has ended
    are left out, because their end is no evidence about their values; so are values that are not in the space, which
    Optuna's samplers cannot represent. Running trials are RUNNING with their values, so that no other worker tries the
    same values (Ginsbourger et al. 2010, "constant liar"). Less is better for all objectives, as for the curves.

    For TPE, a pruned trial is PRUNED with its curve, and an infeasible trial is PRUNED with its violated constraints.

    A Gaussian process would ignore PRUNED trials, so both kinds are COMPLETE for it. If validation loss is the only
    objective, the value of a pruned trial is its last validation loss. Otherwise, and for an infeasible trial, it is
    the worst value of any trial, or 0 if no trial has a value. If some trials are infeasible, every ended trial has
    a constraint, which is +1 for infeasible and -1 for feasible trials (Gardner et al. 2014) and keeps proposals away
    from infeasible values. While no trial is feasible, this constraint would be the same everywhere, so the sum of
    violations is minimised instead.
    """
    study = create_empty_study(len(objectives))
    counted = _select_evidence(space, history)
    ended = [line for line in counted if line.decisive.state != "running"]
    results = [values for line in ended if (values := _final_objectives(line, objectives)) is not None]
    worst = tuple(max(column) for column in zip(*results, strict=True)) if results else (0.0,) * len(objectives)
    are_all_infeasible = all(is_infeasible(line.decisive) for line in ended)
    has_infeasible = any(is_infeasible(line.decisive) for line in ended)
    for line in counted:
        params, distributions = space.to_params(line.decisive.values)
        if line.decisive.state == "running":
            content: dict[str, Any] = {"state": TrialState.RUNNING}
        elif kind == "tpe":
            content = _tpe_trial_fields(line, objectives)
        elif are_all_infeasible:
            content = {
                "state": TrialState.COMPLETE,
                "values": [sum(constraint_violations(line.decisive).values())] * len(objectives),
            }
        else:
            content = {"state": TrialState.COMPLETE, "values": _final_objectives(line, objectives) or worst}
            if has_infeasible:
                content["constraints"] = {INFEASIBLE: 1.0 if is_infeasible(line.decisive) else -1.0}
        study.add_trial(create_trial(params=params, distributions=distributions, **content))
    return study


def _tpe_trial_fields(line: TrialLineage, objectives: Sequence[SweepObjective]) -> dict[str, Any]:
    # TPE ranks pruned trials by their progress, and infeasible trials last.
    if is_infeasible(line.decisive):
        return {"state": TrialState.PRUNED, "constraints": constraint_violations(line.decisive)}
    if line.decisive.state == "complete":
        return {"state": TrialState.COMPLETE, "values": line.decisive.minimized_objectives(objectives)}
    return {
        "state": TrialState.PRUNED,
        # With several objectives, Optuna rejects curves.
        "intermediate_values": replace_non_finite(line.curve) if len(objectives) == 1 else {},
    }


def _final_objectives(line: TrialLineage, objectives: Sequence[SweepObjective]) -> tuple[float, ...] | None:
    """Return the result of a training that is over, in the unit of the objectives; None if it has no result.

    The result of a pruned training is its last validation loss, if that is the only objective. Further training would
    have lowered the loss, so this result is not too optimistic.
    """
    if is_infeasible(line.decisive):
        return None
    if line.decisive.state == "complete":
        return line.decisive.minimized_objectives(objectives)
    is_loss = [(objective.metric, objective.direction) for objective in objectives] == [("validation_loss", "minimize")]
    last = next(reversed(line.curve.values()), math.nan)
    return (last,) if is_loss and math.isfinite(last) else None


# CMA-ES.


def numeric_dimensions(space: SearchSpace) -> list[SearchDimension]:
    """Return the dimensions that CMA-ES searches: ranges that every trial has. Others are drawn at random."""
    ranges = [axis.name for axis in space.axes() if axis.kind in ("float", "int") and not axis.conditional]
    dimensions = [space.dimension(parameter) for parameter in ranges]
    return [dimension for dimension in dimensions if dimension.high > dimension.low and dimension.points != 1]


def draw_cma_point(
    space: SearchSpace, objectives: Sequence[SweepObjective], history: Sequence[Trial], seed: int
) -> dict[str, Any]:
    """Draw the values of a trial from the distribution of CMA-ES after the completed generations.

    CMA-ES searches positions from 0 to 1 on the scale of each range; the closest value of a finite range is used. The
    distribution starts at the study's first trial. Without trials, each position is the middle of its range.
    """
    dimensions = numeric_dimensions(space)
    ordered = sorted(history, key=lambda trial: trial.number)
    if ordered:
        optimizer = _replay_optimizer(
            dimensions, _unit_vector(dimensions, ordered[0]), objectives, group_by_lineage(ordered)
        )
        optimizer.reseed_rng(seed)
        point = optimizer.ask()
    else:
        point = np.full(len(dimensions), 0.5)
    positions = {dimension.name: float(position) for dimension, position in zip(dimensions, point, strict=True)}
    source = random.Random(seed)

    def pick(dimension: SearchDimension) -> Any:
        position = positions.get(dimension.name)
        return draw_value(dimension, source) if position is None else from_unit(dimension, position)

    return space.draw(pick)


def population_size(dimensions: int) -> int:
    """Return the number of trials of a generation: 4 + 3 ln d (Hansen 2016, equation 48)."""
    return 4 + int(3 * np.log(dimensions))


def _unit_vector(dimensions: Sequence[SearchDimension], trial: Trial) -> np.ndarray:
    return np.array([min(max(to_unit(d, trial.values[d.name]), 0.0), 1.0) for d in dimensions])


def _replay_optimizer(
    dimensions: Sequence[SearchDimension],
    start: np.ndarray,
    objectives: Sequence[SweepObjective],
    trainings: Sequence[TrialLineage],
) -> CMA:
    """Return the optimizer after all completed generations.

    Consecutive trainings form a generation; failed trainings belong to none, nor do those that a person has ended or
    whose values a person has chosen. The replay ends before the first
    generation that is not complete: until then, trials are drawn from the distribution before this generation.
    """
    bounds = np.array([[0.0, 1.0]] * len(dimensions))
    optimizer = CMA(mean=start, sigma=SIGMA, bounds=bounds, population_size=population_size(len(dimensions)), seed=0)
    counted = [line for line in trainings if line.is_evidence and not line.is_requested]
    size = optimizer.population_size
    for begin in range(0, len(counted) - size + 1, size):
        generation = counted[begin : begin + size]
        if any(line.decisive.state == "running" for line in generation):
            break
        ranked = sorted(generation, key=lambda line: _ranking_key(line, objectives))
        # CMA-ES uses only the order of trials. They have an order even if their results have different units.
        optimizer.tell([(_unit_vector(dimensions, line.decisive), float(rank)) for rank, line in enumerate(ranked)])
    return optimizer


def _ranking_key(line: TrialLineage, objectives: Sequence[SweepObjective]) -> tuple[float, ...]:
    """Return a key that sorts the best training first.

    Complete trainings come first, by their first objective; then pruned ones, by processed rows (most first) and loss;
    then infeasible ones, by the sum of their violations.
    """
    if is_infeasible(line.decisive):
        return (2.0, sum(constraint_violations(line.decisive).values()), 0.0)
    if line.decisive.state == "complete":
        return (0.0, line.decisive.minimized_objectives(objectives)[0], 0.0)
    rows, loss = next(reversed(replace_non_finite(line.curve).items()), (0, 0.0))
    return (1.0, -float(rows), loss)
