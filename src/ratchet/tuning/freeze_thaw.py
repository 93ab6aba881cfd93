"""Freeze-thaw search: the next unit of work goes to the training, paused or new, with the highest expected improvement.

After the first trials, a model predicts the final loss of every training from all losses so far (learning_curves.py).
A training is paused at a rung if another one, paused or not yet begun, has a higher expected improvement; it is
continued when its own is the highest (Swersky et al. 2014, arXiv 1406.3896). Decisions are functions of the history.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.distance import cdist
from scipy.stats import qmc

from ratchet.config.sweep import SamplerSettings
from ratchet.storage.records.sweep import Trial
from ratchet.tuning.learning_curves import (
    MIN_LOSS,
    LearningCurve,
    LearningCurveModel,
    log_expected_improvement,
    log_feasibility,
)
from ratchet.tuning.pruners import compute_rungs
from ratchet.tuning.samplers import TrialLineage, Values, derive_seed, draw_untried, group_by_lineage, is_infeasible
from ratchet.tuning.search_space import SearchSpace, from_unit, to_unit

MIN_IMPROVEMENT, MIN_LAST_IMPROVEMENT = 0.01, 0.005
"""Expected improvement below which a paused training is continued only for the final round: while new trainings may
begin, and afterwards. The unit is the standard deviation of all losses (as logarithms), because small improvements
count where losses differ little."""

MIN_RELATIVE_IMPROVEMENT = 0.001
"""The same as a share of the loss; the larger of the two counts. Seeds alone change losses by more."""

RUNG_FACTOR = 2
"""Each rung is at this many times the rows of the rung before it."""

KEEP_SHARE = 0.7
"""A running training continues while its expected improvement is at least this share of the best alternative's, because
another training needs another process."""

MIN_DISTANCE = 0.06
"""Smallest distance of new values from those of other trials, as a share of a range. Nearer values add little
information."""

MAX_DISTANCE = 0.3
"""Largest distance of new values from those with the best prediction, in each dimension, as a share of a range
(a trust region: Eriksson et al. 2019, arXiv 1910.01739). Without it, many trials are spent at the corners of the
space, where least is known."""

SPREAD_CANDIDATES = 1024
"""Number of candidates for new values that are spread over the space; a power of 2."""

LOCAL_CENTERS = 3
"""Number of trainings with the best predictions, near which there are more candidates."""

LOCAL_SPREADS = (0.05, 0.1, 0.2)
"""Standard deviations of these candidates' distances from a training, as shares of a range."""

LOCAL_CANDIDATES = 128
"""Number of candidates for each training and standard deviation."""


class NewTrial(NamedTuple):
    """Begin a trial with these values."""

    values: Values


class Continuation(NamedTuple):
    """Continue the training of this pruned trial."""

    number: int


class _Proposal(NamedTuple):
    values: Values
    score: float
    """Logarithm of the expected improvement."""


def has_reached_rung(first_rung: float, history: Sequence[Trial], trial: Trial, longest_rows: int) -> bool:
    """Return whether the last validation of a running trial is its training's first one at or after a rung.

    A worker that continues or takes over a training reports its earlier validations again; they reach no rung.

    Args:
        first_rung: first rung, as a share of `longest_rows`.
        history: all trials as they are stored.
        trial: the trial with the curve that its worker has reported so far.
        longest_rows: rows of a complete training.
    """
    lineage = next(lineage for lineage in group_by_lineage(history) if trial.number in lineage.numbers)
    now = max(trial.curve)
    if now < max(history[trial.number].curve, default=0):
        return False
    earlier = [rows for other in lineage.trials if other.number < trial.number for rows in other.curve]
    past = max([*earlier, *(rows for rows in trial.curve if rows < now)], default=0)
    return any(past < rung <= now for rung in compute_rungs(first_rung, RUNG_FACTOR, longest_rows))


@dataclass(frozen=True)
class FreezeThawSearch:
    """The search at one point of its history.

    Args:
        space: a space of ranges that every trial has.
        sampler: seed and number of first trials.
        history: all trials, by number; at least one.
        longest_rows: rows of a complete training.
        is_tried: whether a trial has these values.
        may_begin: whether the budget allows another trial.
        may_improve: whether the budget allows to continue a training for an improvement.
        missing_trainings: number of complete trainings that the final round needs in addition to complete and running
            ones (without the trial at a rung).
        trial_at_rung: number of a running trial that has reached a rung, and counts as paused; None if there is none.
        is_best_kept: whether a training keeps its best checkpoint, and not its last one.
    """

    space: SearchSpace
    sampler: SamplerSettings
    history: Sequence[Trial]
    longest_rows: int
    is_tried: Callable[[Mapping[str, Any]], bool]
    may_begin: bool
    may_improve: bool = True
    missing_trainings: int = 0
    trial_at_rung: int | None = None
    is_best_kept: bool = True

    def choose(self) -> NewTrial | Continuation | None:
        """Return the training to begin or to continue; None if there is none now."""
        if self._first_values is not None:
            return NewTrial(self._first_values)
        if not self._curves:
            return None
        best = max(self._paused_scores, key=lambda index: self._paused_scores[index], default=None)
        score = -math.inf if best is None else self._paused_scores[best]
        is_worthwhile = self.may_improve and score >= self._min_score
        if self._proposal is not None and (not is_worthwhile or self._proposal.score >= score):
            return NewTrial(self._proposal.values)
        if best is not None and is_worthwhile:
            return Continuation(self._lineages[best].trials[-1].number)
        if self._next_finalist is not None:
            return Continuation(self._lineages[self._next_finalist].trials[-1].number)
        return None

    def reason_to_pause(self) -> str | None:
        """Return the reason to pause the trial at a rung; None to continue it."""
        if self._first_values is not None:
            return "the first trials are compared at this rung"
        own = next(i for i, lineage in enumerate(self._lineages) if self.trial_at_rung in lineage.numbers)
        own_score = self._paused_scores[own]
        others = {f"trial {self._lineages[i].first}": score for i, score in self._paused_scores.items() if i != own}
        if self._proposal is not None:
            others["a trial with other values"] = self._proposal.score
        best = max(others, key=lambda name: others[name], default="")
        best_score = others.get(best, -math.inf)
        if self.may_improve and own_score >= max(self._min_score, best_score + math.log(KEEP_SHARE)):
            return None
        reason = f"its expected improvement is {_format_improvement(own_score)} of the loss"
        finalist = self._next_finalist
        if finalist is not None and self._proposal is None and not (self.may_improve and best_score >= self._min_score):
            found = self._model.predict_observed([self._curve_indices[index] for index in (own, finalist)])
            if found.mean[0] - found.mean[1] < np.hypot(*found.std):  # not clearly lower, so this one is completed
                return None
            other = self._lineages[finalist].first
            return f"{reason}; trial {other} has a clearly lower predicted loss, and is completed for the final round"
        if best_score > own_score:
            return f"{reason}; {best} has {_format_improvement(best_score)}"
        return f"{reason}, less than {_format_improvement(self._min_score)}" if self.may_improve else reason

    # What the history says.

    @cached_property
    def _lineages(self) -> list[TrialLineage]:
        return group_by_lineage(self.history)

    @cached_property
    def _curve_indices(self) -> dict[int, int]:
        """Index of the curve of each lineage that has one, by the index of the lineage, without infeasible and failed
        ones and those that start from trained weights."""
        known = [
            index
            for index, lineage in enumerate(self._lineages)
            if lineage.curve and not lineage.starts_from_weights
            if lineage.decisive.state != "failed" and not is_infeasible(lineage.decisive)
        ]
        return {index: position for position, index in enumerate(known)}

    @cached_property
    def _curves(self) -> list[LearningCurve]:
        return [self._to_curve(self._lineages[index]) for index in self._curve_indices]

    def _to_curve(self, lineage: TrialLineage) -> LearningCurve:
        rows, losses = np.array(list(lineage.curve), float), np.array(list(lineage.curve.values()), float)
        if self.is_best_kept:
            losses = np.minimum.accumulate(np.where(np.isfinite(losses), losses, np.inf))
        progress = np.minimum(rows / self.longest_rows, 1.0)
        return LearningCurve(self._to_position(lineage.values), tuple(progress.tolist()), tuple(losses.tolist()))

    def _to_position(self, values: Mapping[str, Any]) -> tuple[float, ...]:
        return tuple(to_unit(dimension, values[dimension.name]) for dimension in self.space.dimensions())

    def _to_values(self, position: Sequence[float]) -> Values:
        positions = {d.name: float(p) for d, p in zip(self.space.dimensions(), position, strict=True)}
        return self.space.draw(lambda dimension: from_unit(dimension, positions[dimension.name]))

    # Predictions.

    @cached_property
    def _model(self) -> LearningCurveModel:
        return LearningCurveModel(self._curves)

    @cached_property
    def _predicted(self) -> list[float]:
        """Predicted logarithms of the final losses, by curve."""
        predicted: list[float] = self._model.predict_observed(range(len(self._curves))).mean.tolist()
        return predicted

    @cached_property
    def _best(self) -> float:
        """Logarithm of the loss that must be improved: of the best complete training, or else the best prediction.

        Predictions of running trainings always count, except of those that start from trained weights. The prediction
        of a training that a person has stopped or paused counts only if there is no other.
        """
        complete = [
            math.log(max(self._curves[curve].losses[-1], MIN_LOSS))
            for index, curve in self._curve_indices.items()
            if self._lineages[index].decisive.state == "complete"
        ]
        running = [
            log_loss for index, log_loss in self._running.items() if not self._lineages[index].starts_from_weights
        ]
        predicted = [
            self._predicted[curve]
            for index, curve in self._curve_indices.items()
            if not self._lineages[index].trials[-1].decision
        ]
        return min([*(complete or predicted), *running] or self._predicted)

    @cached_property
    def _paused_scores(self) -> dict[int, float]:
        """Logarithm of the expected improvement by completing each paused training, by the index of its lineage."""
        paused = [
            index
            for index in self._curve_indices
            if (self._lineages[index].trials[-1].state == "pruned" and not self._lineages[index].trials[-1].decision)
            or self.trial_at_rung in self._lineages[index].numbers
        ]
        if not paused:
            return {}
        prediction = self._model.predict_observed([self._curve_indices[index] for index in paused])
        return dict(zip(paused, log_expected_improvement(prediction, self._best).tolist(), strict=True))

    @cached_property
    def _next_finalist(self) -> int | None:
        """The paused training with the lowest prediction, by the index of its lineage, if the final round needs another
        complete training; otherwise None."""
        if not self._paused_scores or self.missing_trainings <= 0:
            return None
        return min(self._paused_scores, key=lambda index: self._predicted[self._curve_indices[index]])

    @property
    def _min_score(self) -> float:
        improvement = MIN_IMPROVEMENT if self.may_begin else MIN_LAST_IMPROVEMENT
        return math.log(max(improvement * self._model.log_loss_std, MIN_RELATIVE_IMPROVEMENT))

    # New values.

    @cached_property
    def _first_values(self) -> Values | None:
        """Values of the next of the first trials, which are spread over the space.

        None if all of them have begun, or all values were tried. Further ones begin while no training has a loss.
        """
        begun_count = sum(not lineage.is_requested for lineage in self._lineages)
        are_all_begun = begun_count >= self.sampler.n_startup_trials
        if not self.may_begin or (are_all_begun and self._curves):
            return None
        dimensions = self.space.dimensions()
        rng = np.random.default_rng(derive_seed(self.sampler.seed, 0, 0))
        count = 1 << max(6, (2 * begun_count).bit_length())
        points = qmc.Sobol(len(dimensions), scramble=True, rng=rng).random(count)
        for point in points[max(0, begun_count - 1) :]:
            if not self.is_tried(values := self._to_values(point)):
                return values
        return draw_untried(self.space, random.Random(self._seed), self.is_tried)

    @property
    def _seed(self) -> int:
        return derive_seed(self.sampler.seed, len(self.history), 0)

    @cached_property
    def _proposal(self) -> _Proposal | None:
        """The untried values with the highest expected improvement, near the best ones if there are any.

        None without budget, or if all values were tried.
        """
        if not self.may_begin:
            return None
        points = self._draw_candidates()
        scores = log_expected_improvement(self._model_with_running.predict_new(points), self._best)
        infeasible = np.array([is_infeasible(lineage.decisive) for lineage in self._lineages])
        positions = np.array([self._to_position(lineage.values) for lineage in self._lineages])
        if infeasible.any():
            is_known = [infeasible[index] or bool(lineage.curve) for index, lineage in enumerate(self._lineages)]
            scores += log_feasibility(points, positions[is_known], infeasible[is_known])
        distances = cdist(points, positions).min(axis=1)
        best = self._curves[int(np.argmin(self._predicted))].position
        is_far = np.abs(points - best).max(axis=1) > MAX_DISTANCE
        order = np.lexsort((-scores, is_far))
        for min_distance in (MIN_DISTANCE, MIN_DISTANCE / 4, 0.0):
            for index in order:
                if distances[index] >= min_distance and not self.is_tried(values := self._to_values(points[index])):
                    return _Proposal(values, float(scores[index]))
        return None

    def _draw_candidates(self) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """Return positions of values that the space has, without duplicates."""
        dimensions = self.space.dimensions()
        rng = np.random.default_rng(self._seed)
        spread = qmc.Sobol(len(dimensions), scramble=True, rng=rng).random(SPREAD_CANDIDATES)
        near = [
            np.clip(self._curves[index].position + rng.normal(0, width, (LOCAL_CANDIDATES, len(dimensions))), 0, 1)
            for index in np.argsort(self._predicted, kind="stable")[:LOCAL_CENTERS]
            for width in LOCAL_SPREADS
        ]
        points = np.concatenate([spread, *near])
        exact = [[to_unit(d, from_unit(d, p)) for d, p in zip(dimensions, point, strict=True)] for point in points]
        return np.unique(np.array(exact), axis=0)

    @cached_property
    def _running(self) -> dict[int, float]:
        """Predicted logarithms of the final losses of running trainings, by the index of the lineage."""
        running = {}
        for index, lineage in enumerate(self._lineages):
            if lineage.trials[-1].state != "running" or self.trial_at_rung in lineage.numbers:
                continue
            if (curve := self._curve_indices.get(index)) is not None:
                running[index] = self._predicted[curve]
            else:
                position = np.array([self._to_position(lineage.values)])
                running[index] = float(self._model.predict_new(position).mean[0])
        return running

    @cached_property
    def _model_with_running(self) -> LearningCurveModel:
        """Model in which running trainings have ended as predicted, so that other values are proposed meanwhile
        (Ginsbourger et al. 2010, "kriging believer")."""
        curves = list(self._curves)
        for index, log_loss in self._running.items():
            if (known := self._curve_indices.get(index)) is None:
                position = self._to_position(self._lineages[index].values)
                curves.append(LearningCurve(position, (1.0,), (math.exp(log_loss),)))
            elif (curve := curves[known]).progress[-1] < 1.0:
                losses = (*curve.losses, math.exp(log_loss))
                curves[known] = LearningCurve(curve.position, (*curve.progress, 1.0), losses)
        return LearningCurveModel(curves, self._model.hyperparameters) if curves != self._curves else self._model


def _format_improvement(score: float) -> str:
    return f"{100 * math.exp(score):.2g} %"
