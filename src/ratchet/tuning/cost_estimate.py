"""Estimates answer tokens and time of a sweep before it starts."""

import math
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from ratchet.config.settings import Settings
from ratchet.config.sweep import Sweep
from ratchet.config.units import format_count, format_duration
from ratchet.data.batches import count_validation_interval
from ratchet.errors import RatchetError
from ratchet.runs.directory import RunSpec, list_runs, recency
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard
from ratchet.training.run_spec import build_run_spec
from ratchet.tuning.group_worker import count_concurrent_trials
from ratchet.tuning.pruners import LAST_RUNG
from ratchet.tuning.search_space import SearchSpace, longest_epochs
from ratchet.tuning.trial import compute_cost, read_run_summary

MIN_SHARE_OF_TRAINING = 0.1
"""A run with less than this share of a complete training's answer tokens says nothing about the speed: its first steps
take longer than later ones."""


@dataclass(frozen=True)
class SweepEstimate:
    """Cost of a sweep."""

    trials: int
    complete_trainings: int
    """Minimum number of complete trainings."""
    training_tokens: int
    """Answer tokens of a complete training."""
    first_pruning: float
    """Share of a training after which a trial can first be pruned; 1 if nothing is pruned."""
    tokens_per_s: float | None
    """Answer tokens per second of the newest complete run with the same base that was trained alone and is long enough
    (MIN_SHARE_OF_TRAINING); None if there is none."""
    workers: int
    concurrent_trials: int = 1
    """Trials that each worker trains together."""
    max_tokens: int | None = None
    """Limit of the search in answer tokens; it completes one training nevertheless."""
    final_trainings: int = 0
    """Maximum number of trainings in the final round."""
    may_skip_final_trainings: bool = False
    """Whether a limit may end the search with one finalist, or the final round may drop finalists."""

    @property
    def least_tokens(self) -> int:
        """Answer tokens if all trials except the complete ones are pruned at the first rung."""
        complete = min(self.complete_trainings, self.trials)
        search = round((complete + (self.trials - complete) * self.first_pruning) * self.training_tokens)
        final = 0 if self.may_skip_final_trainings else self.final_trainings
        return self._limit(search) + final * self.training_tokens

    @property
    def most_tokens(self) -> int:
        """Answer tokens if no trial is pruned."""
        return self._limit(self.trials * self.training_tokens) + self.final_trainings * self.training_tokens

    def _limit(self, search_tokens: int) -> int:
        """Return the answer tokens of the search with its limit, by those without."""
        if self.max_tokens is None:
            return search_tokens
        return min(search_tokens, max(self.max_tokens, self.training_tokens))

    def format(self) -> str:
        """Return the estimate as a line of text."""
        trainings = format_count(self.final_trainings, "training")
        final = f" and {trainings} of finalists" if self.final_trainings else ""
        text = (
            f"{self.trials} trials{final}; a complete training has {self.training_tokens:,} answer tokens, the sweep "
            "needs "
        )
        is_open = self.least_tokens < self.most_tokens
        text += f"{self.least_tokens:,} to {self.most_tokens:,}" if is_open else f"{self.most_tokens:,}"
        if self.tokens_per_s is None:
            why = "no complete run with this base was trained alone and is long enough for an estimate"
            return f"{text}; the time left is shown while the sweep runs: {why}"
        times = [
            format_duration(tokens / self.tokens_per_s / self.workers)
            for tokens in dict.fromkeys((self.least_tokens, self.most_tokens))
        ]
        if (count := self.concurrent_trials) > 1:
            return (
                f"{text}; {' to '.join(times)} for one trial at a time on each worker, at the speed of the last "
                f"complete run; how much faster {count} at a time (sweep.concurrent_trials) are is not known"
            )
        return f"{text}; at best {' to '.join(times)}, at the speed of the last complete run"


def estimate_sweep(layout: ProjectLayout, settings: Settings, space: SearchSpace, workers: int) -> SweepEstimate:
    """Return the estimate for a new study."""
    sweep, card, epochs = settings.sweep, DatasetCard.load(layout.dataset_card), longest_epochs(space, settings)
    training_tokens, concurrent = round(card.lengths["train"].trained * epochs), count_concurrent_trials(settings)
    limits = sweep.max_tokens, sweep.max_hours, sweep.finalists.wilcoxon_p_threshold
    trials, sampler = sweep.trials, sweep.resolved_sampler
    if sampler.kind == "grid":
        trials = min(trials, len(space.grid(sampler.grid_points)))
    elif space.is_finite:
        trials = sum(1 for _ in islice(space.iterate_points(), trials))
    return SweepEstimate(
        trials=trials,
        complete_trainings=max(1, sweep.finalists.top_k),
        training_tokens=training_tokens,
        first_pruning=_compute_first_pruning_share(settings, card.splits["train"] * epochs, card.splits["train"]),
        tokens_per_s=_measure_speed(layout, settings, MIN_SHARE_OF_TRAINING * training_tokens),
        workers=workers,
        concurrent_trials=concurrent,
        max_tokens=sweep.max_tokens,
        final_trainings=_count_final_trainings(sweep, trials, concurrent),
        may_skip_final_trainings=any(limit is not None for limit in limits),
    )


def _count_final_trainings(sweep: Sweep, trials: int, concurrent_trials: int) -> int:
    """Return the maximum number of trainings in the final round: further seeds, and trials that were not trained alone.

    With several objectives there is no final round, because a person chooses from the Pareto front.
    """
    if len(sweep.objectives) > 1:
        return 0
    finalists = min(max(1, sweep.finalists.top_k), trials)
    seeds = sweep.finalists.seeds if finalists > 1 else 1
    return finalists * (seeds if concurrent_trials > 1 else seeds - 1)


def _compute_first_pruning_share(settings: Settings, longest_rows: float, epoch_rows: int) -> float:
    """Return the share of the longest training after which a trial can first be pruned: the first validation at or
    after the first rung.

    Each row counts as a sequence, as without packing.
    """
    pruner = settings.sweep.resolved_pruner
    if pruner.kind == "none" or pruner.min_resource_fraction >= LAST_RUNG:
        return 1.0
    rows_between = count_validation_interval(settings.train, epoch_rows) * settings.train.batch_size
    validations = max(1, math.ceil(pruner.min_resource_fraction * longest_rows / rows_between))
    return min(1.0, validations * rows_between / longest_rows)


def _measure_speed(layout: ProjectLayout, settings: Settings, min_tokens: float) -> float | None:
    """Return the answer tokens per second of the newest complete run with this project's base and at least this many
    answer tokens; None without one.

    Runs that a group has trained do not count, because their steps contain the time of other runs.
    """
    base_digest = build_run_spec(layout, settings).base_digest
    runs = [paths for paths in list_runs(layout.runs) if paths.is_finished()]
    for paths in sorted(runs, key=recency, reverse=True):
        with suppress(RatchetError):  # a damaged run of another training must not stop a sweep
            spec = RunSpec.load(paths.spec)
            if spec.base_digest == base_digest and not spec.is_grouped:
                cost = compute_cost(paths, read_run_summary(paths))
                if cost.train_seconds > 0 and cost.trained_tokens >= max(1.0, min_tokens):
                    return cost.trained_tokens / cost.train_seconds
    return None
