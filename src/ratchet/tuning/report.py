"""Builds the report of a study with importances of its parameters, and writes a trial's values into params.yaml."""

import difflib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from optuna.distributions import FloatDistribution
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.trial import create_trial

from ratchet.config.params_file import amend_text, get_value
from ratchet.config.settings import Settings
from ratchet.config.sweep import Sweep
from ratchet.errors import DataError
from ratchet.models.start_adapter import INIT_ADAPTER
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.sweep import FinalRound, SweepObjective, SweepReport, Trial
from ratchet.tuning import final_round, pruners, samplers
from ratchet.tuning.samplers import create_empty_study, group_by_lineage, is_infeasible, replace_non_finite
from ratchet.tuning.scheduler import DECIDED_AFTER, FINAL_ROUND_NOTE
from ratchet.tuning.search_space import SearchSpace, encode_value, to_distribution, to_tuples, to_unit
from ratchet.tuning.study import TrialStore

MIN_TRIALS = 6
"""Minimum number of trials for a random forest."""

TRIALS_PER_PARAMETER = 2
"""Minimum number of trials for each hyperparameter of a random forest."""


def _describe_sampler(sweep: Sweep, space: SearchSpace) -> str:
    sampler = sweep.resolved_sampler
    if sweep.resolved_pruner.kind != "freeze_thaw":
        return samplers.describe(sampler, space)
    first = f"seed {sampler.seed}, {sampler.n_startup_trials} trials spread over the space first"
    return f"Gaussian process over values and progress (scipy {samplers.library_versions()['scipy']}), {first}"


def build_report(
    store: TrialStore, settings: Settings, space: SearchSpace, identity: dict[str, Any], with_importances: bool = True
) -> SweepReport:
    """Return the current report of a study. The computation of importances takes seconds."""
    history, objectives, notes = store.trials(), final_round.sweep_objectives(settings.sweep), store.notes()
    is_decided = FINAL_ROUND_NOTE in notes and notes.get(DECIDED_AFTER, len(history)) == len(history)
    finals = FinalRound.model_validate(notes[FINAL_ROUND_NOTE]) if is_decided else None
    return SweepReport(
        study=store.study,
        storage=store.storage.kind,
        objectives=objectives,
        axes=space.axes(),
        sampler=_describe_sampler(settings.sweep, space),
        pruner=pruners.describe(settings.sweep.resolved_pruner),
        versions=samplers.library_versions(),
        data_digest=str(identity["data"])[: digests.SHORT],
        base_digest=str(identity["base"])[: digests.SHORT],
        planned_trials=_count_planned(settings.sweep, history, store.carried),
        trials=tuple(history),
        importances=compute_importances(space, objectives, history, settings.sweep.sampler.seed)
        if with_importances
        else {},
        best=final_round.leader_numbers(history, objectives),
        final_round=finals,
        winner=finals.winner if finals and all(trial.is_over for trial in history) else None,
        requests=tuple(store.requests()),
        stopped=str(notes.get(final_round.STOPPED, "")),
    )


def _count_planned(sweep: Sweep, history: Sequence[Trial], carried: int) -> int:
    """Return the planned number of trials: at least those that began before a person lowered sweep.trials."""
    from_fork = sum(trial.continues is None for trial in history[:carried])
    requested = sum(trial.request is not None for trial in history[carried:])
    return max(sweep.trials + from_fork + requested, sum(trial.continues is None for trial in history))


# Importances of the parameters.


def compute_importances(
    space: SearchSpace, objectives: Sequence[SweepObjective], history: Sequence[Trial], seed: int
) -> dict[str, float]:
    """Return the share of the variance of the first objective that each parameter explains, largest first; sum 1.

    The method is functional analysis of variance over a random forest (Hutter et al. 2014). The forest is fitted to the
    complete trials; each training counts once. Every range has its own scale: a learning rate has a logarithmic scale,
    because its last decade would be nine tenths of a linear scale. Derived parameters, and parameters that some of
    these trials did not have, are left out.

    Pruning may leave too few complete trials. Then, if validation loss is the first objective, the loss of the first
    validation is used instead, of all trials whose first validation came after the same number of rows. The result is
    empty if there are still too few trials, or if all of them have the same loss.
    """
    lineages = group_by_lineage(history)
    lineages = [line for line in lineages if space.contains(line.values)]
    decisive = [line.decisive for line in lineages]
    complete = [trial for trial in decisive if trial.state == "complete" and not is_infeasible(trial)]
    results = [(trial, trial.minimized_objectives(objectives)[0]) for trial in complete]
    importances = _explained_variance(space, results, seed)
    if importances or objectives[0].metric != "validation_loss":
        return importances
    firsts = [(line.trials[0], *min(replace_non_finite(line.curve).items())) for line in lineages if line.curve]
    frequency = Counter(rows for _, rows, _ in firsts).most_common(1)
    results = [(trial, loss) for trial, rows, loss in firsts if rows == frequency[0][0]]
    return _explained_variance(space, results, seed)


def _explained_variance(space: SearchSpace, results: Sequence[tuple[Trial, float]], seed: int) -> dict[str, float]:
    free = [space.select_drawn(trial.values) for trial, _ in results]
    dimensions = [space.dimension(name) for name in free[0] if all(name in drawn for drawn in free)] if free else []
    if len(results) < max(MIN_TRIALS, TRIALS_PER_PARAMETER * len(dimensions)) or not dimensions:
        return {}
    values = [value for _, value in results]
    if len(set(values)) == 1 or all(len({repr(drawn[d.name]) for drawn in free}) == 1 for d in dimensions):
        return {}
    study = create_empty_study(1)
    distributions = {d.name: to_distribution(d) if d.kind == "choice" else FloatDistribution(0, 1) for d in dimensions}
    for drawn, value in zip(free, values, strict=True):
        params = {
            d.name: encode_value(drawn[d.name]) if d.kind == "choice" else min(max(to_unit(d, drawn[d.name]), 0.0), 1.0)
            for d in dimensions
        }
        study.add_trial(create_trial(value=value, params=params, distributions=distributions))
    return get_param_importances(study, evaluator=FanovaImportanceEvaluator(n_trees=64, max_depth=64, seed=seed))


# Adoption: a minimal diff of params.yaml, which the user reviews and commits.


class AdoptedTrial(Record):
    """A trial whose hyperparameters were written into params.yaml."""

    study: str
    trial: int
    run_id: str
    is_trained_here: bool
    """Whether the trial's run is complete on this machine, so that `dvc repro` does not train it again."""
    diff: tuple[str, ...]
    """Lines of a unified diff of params.yaml; empty if the file already had these values."""
    conditional: tuple[str, ...]
    """Changed hyperparameters that not all trials set: under a condition, or the weights from which a clone starts. In
    params.yaml, they apply to all."""


def adopt_trial(layout: ProjectLayout, settings: Settings, report: SweepReport, number: int | None) -> AdoptedTrial:
    """Write the hyperparameters of a trial into params.yaml; without a number, those of the winner.

    Raises:
        DataError: there is no winner yet, or no complete trial with this number.
        SettingsError: the file cannot be changed without a change of other keys.
    """
    path, trial = layout.params, _select_trial(report, number)
    text = path.read_text(encoding="utf-8")
    changes = {key: value for key, value in trial.values.items() if get_value(settings, key) != to_tuples(value)}
    diff: tuple[str, ...] = ()
    if changes:
        changed = amend_text(text, changes)
        files.write_atomic(path, changed)
        lines = difflib.unified_diff(text.splitlines(), changed.splitlines(), path.name, path.name, lineterm="", n=1)
        diff = tuple(lines)
    run_id = _own_run_id(layout, str(trial.run_id))
    return AdoptedTrial(
        study=report.study,
        trial=trial.number,
        run_id=run_id,
        is_trained_here=RunPaths(layout.runs / run_id).is_finished(),
        diff=diff,
        conditional=tuple(
            [axis.name for axis in report.axes if axis.conditional and axis.name in changes]
            + [name for name in changes if name == INIT_ADAPTER]
        ),
    )


def _own_run_id(layout: ProjectLayout, run_id: str) -> str:
    """Return the id of the run that `dvc repro` trains for a trial: if a group has trained it, the run is another
    one."""
    path = RunPaths(layout.runs / run_id).spec
    return RunSpec.load(path).model_copy(update={"is_grouped": None}).run_id if path.exists() else run_id


def _select_trial(report: SweepReport, number: int | None) -> Trial:
    if number is None:
        if report.winner is not None:
            return report.trials[report.winner]
        ended = sum(trial.is_over and trial.continues is None for trial in report.trials)
        if len(report.best) > 1:
            front = ", ".join(map(str, report.best))
            advice = f"with several objectives there is no winner; choose a trial of the Pareto front: {front}"
        elif not report.best:
            advice = f"no trial is complete ({ended} are over); run `ratchet sweep` again"
        else:
            advice = (
                f"the sweep is not over ({ended} of {report.planned_trials} trials; finalists are compared at the "
                f"end); run `ratchet sweep` again, or give a trial number (the best so far is {report.best[0]})"
            )
        raise DataError(f"--adopt: {advice}")
    complete = [trial.number for trial in report.trials if trial.state == "complete"]
    if number not in complete:
        state = report.trials[number].state if 0 <= number < len(report.trials) else "missing"
        raise DataError(
            f"--adopt {number}: trial {number} of study {report.study} is {state}; complete trials: "
            f"{', '.join(map(str, complete)) or 'none'}"
        )
    return report.trials[number]
