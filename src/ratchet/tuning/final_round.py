"""Whether another trial may begin, and why a sweep stops: pure functions of its history."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ratchet.config.schema import Settings
from ratchet.config.sweep import Sweep
from ratchet.errors import DataError
from ratchet.gate import finalists as statistics
from ratchet.gate.finalists import FinalistComparator, FinalistScores
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import LOSS, MEASURED, HeldOutJob, HeldOutMetric, HeldOutScores, ObjectiveSet
from ratchet.storage.records.sweep import Finalist, FinalRound, SweepObjective, Trial

STOPPED = "stopped"
"""Note of a study that has ended before its budget: the diagnosis; an empty text once it has been started again."""
FORGIVEN = "forgiven"
"""Note: trials before this number are no reason to stop any more, for somebody has started the sweep again since."""

ALL_INFEASIBLE = 3
"""Times `sweep.stop_after`: so many trials, and not one that fits, are no search any more."""


def count_trials(history: Iterable[Trial]) -> int:
    """Trials that the budget counts: one that goes on with a pruned one is none of its own."""
    return sum(trial.continues is None for trial in history)


def sum_costs(history: Sequence[Trial]) -> tuple[float, int]:
    """Hours and answer tokens that all trainings came to; a continued one, told with all of it, counts once."""
    superseded = {trial.continues for trial in history if trial.is_over}
    own = [trial for trial in history if trial.number not in superseded]
    return sum(t.cost.train_seconds for t in own) / 3600, sum(t.cost.trained_tokens for t in own)


def check_budget(sweep: Sweep, history: Sequence[Trial]) -> str | None:
    """Why no further values may be tried; None: one more may. Trials under way go to their end."""
    if count_trials(history) >= sweep.trials:
        return f"all {sweep.trials} trials"
    return check_limits(sweep, history)


def check_limits(sweep: Sweep, history: Sequence[Trial]) -> str | None:
    """Which limit, hours or tokens, is reached: then not even a pruned trial goes on."""
    hours, tokens = sum_costs(history)
    if sweep.hours is not None and hours >= sweep.hours:
        return f"{hours:.2f} hours trained of {sweep.hours:g}"
    if sweep.tokens is not None and tokens >= sweep.tokens:
        return f"{tokens:,} tokens learned from, of {sweep.tokens:,}"
    return None


def diagnose_failures(sweep: Sweep, history: Sequence[Trial]) -> str | None:
    """Why the sweep has to stop: the same failure again and again, or nothing that fits; None: it goes on.

    Args:
        sweep: stop_after is read.
        history: trials since it was last stopped and started again.
    """
    failed = [trial for trial in history if trial.state == "failed"]
    for trial in reversed(failed):
        alike = [other for other in failed if _failure_signature(other) == _failure_signature(trial)]
        if len(alike) >= sweep.stop_after:
            numbers = ", ".join(str(other.number) for other in alike)
            return (
                f"{len(alike)} trials failed for the same cause ({trial.cause.replace('_', ' ') or 'unknown'}; trials "
                f"{numbers}): {trial.reason}"
            )
    over = [trial for trial in history if trial.is_over]
    infeasible = [trial for trial in over if trial.state == "infeasible"]
    if len(over) == len(infeasible) >= ALL_INFEASIBLE * sweep.stop_after:
        return f"none of {len(over)} trials was feasible; the last one: {infeasible[-1].reason}"
    return None


def _failure_signature(trial: Trial) -> tuple[str, str]:
    """Cause and first line without its numbers and names of runs: those differ each time."""
    first = (trial.reason.splitlines() or [""])[0]
    return trial.cause, re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}\b|\d+(\.\d+)?", "#", first)


# Which trials of a study are best: by one objective, or on the Pareto front of several.


def objective_measures(sweep: Sweep) -> tuple[SweepObjective, ...]:
    """What trials are judged by."""
    return tuple(SweepObjective(metric=aim.metric, direction=aim.better) for aim in sweep.objectives)


def eligible_trials(trials: Iterable[Trial]) -> list[Trial]:
    """Trials that can be named best, each training once: complete, with objectives that are numbers."""
    found: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda one: one.number):
        numbers = bool(trial.objectives) and all(map(math.isfinite, trial.objectives))
        if trial.state == "complete" and trial.run_id is not None and numbers:
            found.setdefault(trial.run_id, trial)
    return list(found.values())


def pareto_front(trials: Iterable[Trial], measures: Sequence[SweepObjective]) -> list[Trial]:
    """Those that no other is better than by one objective without being worse by another; by number."""
    some = eligible_trials(trials)
    prices = {trial.number: _minimized_values(trial, measures) for trial in some}
    return [trial for trial in some if not any(_dominates(other, prices[trial.number]) for other in prices.values())]


def best_trials(trials: Iterable[Trial], measures: Sequence[SweepObjective], count: int) -> list[Trial]:
    """The best so many by the first objective, of several objectives on their front; of equals the earlier one."""
    some = pareto_front(trials, measures) if len(measures) > 1 else eligible_trials(trials)
    return sorted(some, key=lambda trial: (_minimized_values(trial, measures)[0], trial.number))[:count]


def leader_numbers(trials: Iterable[Trial], measures: Sequence[SweepObjective]) -> tuple[int, ...]:
    """Number of the best trial; of several objectives those of the front."""
    found = pareto_front(trials, measures) if len(measures) > 1 else best_trials(trials, measures, 1)
    return tuple(trial.number for trial in found)


def _minimized_values(trial: Trial, measures: Sequence[SweepObjective]) -> tuple[float, ...]:
    """Objectives, turned so that less is better."""
    return tuple(
        -value if measure.direction == "maximize" else value
        for value, measure in zip(trial.objectives, measures, strict=True)
    )


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


# What is still to be done for the finalists of a sweep: train, score, or name the winner; a function of what is there.
#
# Round s trains seed s of every finalist that is not dropped, so that all of them have the same seeds when they are
# compared. Nothing is remembered between two calls: whoever asks again, after a kill or on another machine, is told
# the
# same.

SEED = "train.seed"


@dataclass(frozen=True)
class FinalistTraining:
    """A finalist that was trained with a further seed, or could not be."""

    number: int
    """Of the trial."""
    index: int
    """Of the seed, from 1: 0 is the trial's own run."""
    run_id: str
    failed: str = ""
    """Why there is no result, and will not be (it diverged, say): such a finalist is dropped."""


@dataclass(frozen=True)
class FinalistTrainingBatch:
    """To be trained next, in this order, in any number at once."""

    wanted: tuple[tuple[int, int], ...]
    """Trial numbers with indices of seeds."""


Step = FinalistTrainingBatch | HeldOutJob | FinalRound
"""A HeldOutJob is to be scored (sweeping.held.ask), and what comes of it added to the scores."""


def plan_next_step(
    sweep: Sweep, trials: Sequence[Trial], trainings: Iterable[FinalistTraining], scores: Mapping[str, HeldOutScores]
) -> Step:
    """What is to be done next for the finalists.

    Args:
        sweep: objectives and finalists are read.
        trials: of the search, all over.
        trainings: of finalists, with further seeds; those under way are none yet.
        scores: by run id, of finalists' runs.

    Raises:
        DataError: no trial was trained to its end, or runs were scored on different rows.
    """
    measures = objective_measures(sweep)
    chosen = best_trials(trials, measures, max(1, sweep.finalists.top))
    if not chosen:
        raise DataError(f"none of the {len(trials)} trials was trained to its end: there is nobody to compare")
    if len(chosen) == 1:
        return _decide_without_comparison(chosen[0], measures[0], sweep)
    return _FinalRound(sweep, chosen, {(one.number, one.index): one for one in trainings}, scores).next()


def select_comparison_measure(sweep: Sweep) -> tuple[HeldOutMetric, SweepObjective]:
    """What finalists are compared by: the first objective where rows have scores of it, else validation loss."""
    first = sweep.objectives[0]
    for metric in MEASURED:
        if metric == first.metric:
            return metric, SweepObjective(metric=metric, direction=first.better)
    return LOSS, SweepObjective(metric=LOSS, direction="minimize")


def values_for_seed(settings: Settings, trial: Trial, index: int) -> dict[str, Any]:
    """Values of a finalist for the seed of an index: the trial's own seed, and so many further."""
    own = int(trial.values.get(SEED, settings.train.seed))
    return {**trial.values, SEED: own + index} if index else dict(trial.values)


def write_objective(layout: ProjectLayout, study: str, ids: Iterable[str]) -> None:
    """Note that models are chosen by these rows, so that the gate refuses to judge by them; repeating changes nothing.

    Rows that were noted before stay: models were chosen by them. Raises DamagedFileError when the file is no such set.
    """
    path = layout.objectives / f"{study}.json"
    known = set(ObjectiveSet.load(path).sample_ids) if path.exists() else set[str]()
    noted = ObjectiveSet(name=f"sweep {study}", sample_ids=tuple(sorted(known.union(ids))))
    if len(noted.sample_ids) > len(known):
        files.make_directory(path.parent)
        noted.save(path)


def _decide_without_comparison(trial: Trial, measure: SweepObjective, sweep: Sweep) -> FinalRound:
    value = trial.objectives[0]
    asked = f"sweep.finalists.top is {sweep.finalists.top}" if sweep.finalists.top < 2 else "there is no other"
    finalist = Finalist(
        number=trial.number, values=trial.values, run_ids=(str(trial.run_id),), means=(value,), mean=value,
        cost=trial.cost,
    )  # fmt: skip
    return FinalRound(
        metric=measure.metric, direction=measure.direction, rows=0, finalists=(finalist,), comparisons=(),
        winner=trial.number, reason=f"trial {trial.number} is the best of the search, and compared with none: {asked}",
    )  # fmt: skip


@dataclass(frozen=True)
class _FinalRound:
    """Two finalists or more, and how far they are."""

    sweep: Sweep
    chosen: Sequence[Trial]
    trainings: Mapping[tuple[int, int], FinalistTraining]
    scores: Mapping[str, HeldOutScores]

    def next(self) -> Step:
        """The next thing to do."""
        wanted = self.sweep.finalists
        dropped, missing = dict[int, str](), list[tuple[int, int]]()
        for index in range(wanted.seeds):
            dropped = self._failed(index) | dropped
            alive = [trial for trial in self.chosen if trial.number not in dropped]
            if index and len(alive) < 2:
                break  # who is left has won: further seeds would change nothing
            missing += [(trial.number, index) for trial in alive if self._run(trial, index) is None]
            if wanted.wilcoxon is None or index + 1 == wanted.seeds:
                continue
            if (undone := self._undone(missing, alive, index + 1)) is not None:
                return undone
            some = [self._contender(trial, index + 1) for trial in alive]
            dropped |= statistics.find_trailing(self._contest, some, wanted.wilcoxon)
        if (undone := self._undone(missing, self.chosen, wanted.seeds)) is not None:
            return undone
        everyone = [self._contender(trial, wanted.seeds, dropped.get(trial.number, "")) for trial in self.chosen]
        return statistics.choose_winner(self._contest, everyone)

    def _failed(self, index: int) -> dict[int, str]:
        found = [(one, self.trainings.get((one.number, index))) for one in self.chosen]
        return {
            trial.number: f"could not be trained with another seed: {training.failed}"
            for trial, training in found
            if training is not None and training.failed
        }

    def _run(self, trial: Trial, index: int) -> str | None:
        """The run of a finalist with the seed of an index, if it was trained."""
        if index == 0:
            return trial.run_id
        found = self.trainings.get((trial.number, index))
        return found.run_id if found is not None and not found.failed else None

    def _runs(self, trial: Trial, seeds: int) -> list[str]:
        return [run for index in range(seeds) if (run := self._run(trial, index)) is not None]

    def _undone(
        self, missing: Sequence[tuple[int, int]], trials: Sequence[Trial], seeds: int
    ) -> FinalistTrainingBatch | HeldOutJob | None:
        """What keeps these trials from being compared by their first so many seeds."""
        if missing:
            return FinalistTrainingBatch(tuple(missing))
        metric, _ = select_comparison_measure(self.sweep)
        rows = self.sweep.finalists.rows
        runs = [run for trial in trials for run in self._runs(trial, seeds)]
        known = {run for run, one in self.scores.items() if metric in one.values and one.rows == rows}
        unscored = tuple(dict.fromkeys(run for run in runs if run not in known))
        return HeldOutJob(run_ids=unscored, metrics=(metric,), rows=rows) if unscored else None

    @cached_property
    def _first(self) -> HeldOutScores:
        """Whose rows all must have."""
        return self.scores[self._runs(self.chosen[0], 1)[0]]

    @cached_property
    def _kept(self) -> list[int]:
        """Rows with tokens that are learned from: others have no loss."""
        return [row for row, tokens in enumerate(self._first.tokens) if tokens]

    @cached_property
    def _contest(self) -> FinalistComparator:
        metric, measure = select_comparison_measure(self.sweep)
        return FinalistComparator(
            measure=measure,
            confidence=self.sweep.finalists.confidence,
            weights=[float(self._first.tokens[row]) for row in self._kept] if metric == LOSS else None,
            groups=[self._first.groups[row] for row in self._kept],
        )

    def _contender(self, trial: Trial, seeds: int, dropped: str = "") -> FinalistScores:
        runs = self._runs(trial, seeds)
        return FinalistScores(
            number=trial.number,
            values=trial.values,
            run_ids=tuple(runs),
            scores=[self._scores(run) for run in runs],
            cost=trial.cost,
            dropped=dropped,
        )

    def _scores(self, run: str) -> list[float]:
        found, first = self.scores[run], self._first
        if (found.ids, found.tokens) != (first.ids, first.tokens):
            raise DataError(
                f"run {run} was scored on other validation rows than run {first.run_id}: the data has changed; bring "
                "it back (`dvc checkout`), or begin a new study"
            )
        metric, _ = select_comparison_measure(self.sweep)
        return [found.values[metric][row] for row in self._kept]
