"""How much of what trials came to is due to each knob."""

import difflib
from collections import Counter
from collections.abc import Sequence
from typing import Any

from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.importance import FanovaImportanceEvaluator, get_param_importances
from optuna.trial import create_trial

from ratchet.config.params_file import amend_text, get_value
from ratchet.config.schema import Settings
from ratchet.errors import DataError
from ratchet.runs.directory import RunPaths
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import FinalRound, SweepObjective, SweepReport, Trial
from ratchet.tuning import final_round, pruners, samplers
from ratchet.tuning.final_round import STOPPED
from ratchet.tuning.in_memory_study import (
    create_empty_study,
    group_by_lineage,
    is_infeasible,
    minimized_objectives,
    replace_non_finite,
)
from ratchet.tuning.parameter_scale import encode_value, to_distribution, to_unit
from ratchet.tuning.parameters import SearchDimension
from ratchet.tuning.scheduler import FINALS
from ratchet.tuning.search_space import SearchSpace
from ratchet.tuning.trial_store import TrialStore

FEWEST = 6
"""Trials below which a forest says nothing."""

PER_KNOB = 2
"""Trials that each knob needs."""


def compute_importances(
    space: SearchSpace, measures: Sequence[SweepObjective], history: Sequence[Trial], seed: int
) -> dict[str, float]:
    """Share of the variance of the first objective that each knob explains by itself, the greatest first; sum 1.

    Functional analysis of variance over a random forest (Hutter et al. 2014), of complete trials, each training once,
    every range on its own scale (a learning rate by its logarithm: on the plain scale nine tenths of the space would
    be its last decade). Knobs that some of these trials did not have are left out, and so are ties, which have no
    values of their own. Where pruning has left too few complete trials, and validation loss is the objective, it is
    that of the first validation which counts, of all trials that had theirs after as many rows. Empty where even so
    there are too few trials, or all came to the same.
    """
    found = _explained_variance(space, _completed_losses(measures, history), seed)
    if not found and measures[0].metric == "validation_loss":
        found = _explained_variance(space, _first_losses(history), seed)
    return found


def _completed_losses(measures: Sequence[SweepObjective], history: Sequence[Trial]) -> list[tuple[Trial, float]]:
    told = [line.told for line in group_by_lineage(history)]
    over = [trial for trial in told if trial.state == "complete" and not is_infeasible(trial)]
    return [(trial, minimized_objectives(trial, measures)[0]) for trial in over]


def _first_losses(history: Sequence[Trial]) -> list[tuple[Trial, float]]:
    """Loss of the first validation, of trials whose first came after as many rows as that of most."""
    firsts = [
        (line.trials[0], *min(curve.items()))
        for line in group_by_lineage(history)
        if (curve := replace_non_finite(line.curve))
    ]
    if not firsts:
        return []
    rows, _ = Counter(rows for _, rows, _ in firsts).most_common(1)[0]
    return [(trial, loss) for trial, at, loss in firsts if at == rows]


def _explained_variance(space: SearchSpace, known: Sequence[tuple[Trial, float]], seed: int) -> dict[str, float]:
    free = [space.free(trial.values) for trial, _ in known]
    dimensions = [space.dimension(name) for name in free[0] if all(name in one for one in free)] if free else []
    if len(known) < max(FEWEST, PER_KNOB * len(dimensions)) or not dimensions:
        return {}
    values = [value for _, value in known]
    if len(set(values)) == 1 or all(len({repr(one[knob.name]) for one in free}) == 1 for knob in dimensions):
        return {}
    study = create_empty_study(1)
    distributions = {dimension.name: _scaled_distribution(dimension) for dimension in dimensions}
    for one, value in zip(free, values, strict=True):
        params = {dimension.name: _scaled_value(dimension, one[dimension.name]) for dimension in dimensions}
        study.add_trial(create_trial(value=value, params=params, distributions=distributions))
    return get_param_importances(study, evaluator=FanovaImportanceEvaluator(n_trees=64, max_depth=64, seed=seed))


def _scaled_distribution(dimension: SearchDimension) -> BaseDistribution:
    return to_distribution(dimension) if dimension.kind == "choice" else FloatDistribution(0.0, 1.0)


def _scaled_value(dimension: SearchDimension, value: Any) -> Any:
    return encode_value(value) if dimension.kind == "choice" else min(max(to_unit(dimension, value), 0.0), 1.0)


# Everything about a study as one record, for pages, MLflow, terminal and adoption.


def build_report(
    register: TrialStore, settings: Settings, space: SearchSpace, identity: dict[str, Any], whole: bool = True
) -> SweepReport:
    """The study as it stands now; without importances, which take seconds, unless it is to be `whole`."""
    history, judged, notes = register.trials(), final_round.objective_measures(settings.sweep), register.notes()
    finals = FinalRound.model_validate(notes[FINALS]) if FINALS in notes else None
    return SweepReport(
        study=register.study,
        storage=register.storage.kind,
        objectives=judged,
        axes=space.axes(),
        sampler=samplers.describe(settings.sweep.sampler, space),
        pruner=pruners.describe(settings.sweep.pruner),
        versions=samplers.library_versions(),
        data_digest=str(identity["data"])[: digests.SHORT],
        base_digest=str(identity["base"])[: digests.SHORT],
        wanted_trials=settings.sweep.trials + register.carried,
        trials=tuple(history),
        importances=compute_importances(space, judged, history, settings.sweep.sampler.seed) if whole else {},
        best=final_round.leader_numbers(history, judged),
        finals=finals,
        winner=finals.winner if finals and all(trial.is_over for trial in history) else None,
        stopped=str(notes.get(STOPPED, "")),
    )


# Write a trial's values into params.yaml: a minimal diff, to be reviewed and committed.


def adopt_trial(layout: ProjectLayout, settings: Settings, report: SweepReport, number: int | None) -> str:
    """Write the values of the winner, or of a trial named by number; returns the diff, for people.

    Args:
        layout: the project, whose params.yaml is changed.
        settings: as it stands there.
        report: of the study.
        number: of the trial; None: the winner.

    Raises:
        DataError: there is no winner yet, or no complete trial of that number.
        SettingsError: the file cannot be changed without touching other keys.
    """
    path, trial = layout.params, _select_trial(report, number)
    here = RunPaths(layout.runs / str(trial.run_id)).is_finished()
    then = "finds this run already trained" if here else "trains it again, for its run is not here"
    text = path.read_text(encoding="utf-8")
    wanted = {key: value for key, value in trial.values.items() if get_value(settings, key) != _to_tuples(value)}
    head = f"trial {trial.number} of study {report.study} (run {trial.run_id})"
    if not wanted:
        return f"{head}: params.yaml has these values already; `dvc repro` {then}"
    changed = amend_text(text, wanted)
    files.write_atomic(path, changed)
    before, after = text.splitlines(), changed.splitlines()
    conditional = [axis.knob for axis in report.axes if axis.conditional and axis.knob in wanted]
    more = f"; {', '.join(conditional)} counts for trials without it, so going on with the study needs --fork"
    lines = difflib.unified_diff(before, after, path.name, path.name, lineterm="", n=1)
    return "\n".join(
        (
            *lines,
            f"{head}: written to {path.name}. Review and commit it; `dvc repro` {then}{more if conditional else ''}",
        )
    )


def _select_trial(report: SweepReport, number: int | None) -> Trial:
    if number is None:
        if report.winner is not None:
            return report.trials[report.winner]
        over = final_round.count_trials(trial for trial in report.trials if trial.is_over)
        if len(report.best) > 1:
            front = ", ".join(map(str, report.best))
            advice = f"of several objectives there is a front and no winner: name one of trials {front}"
        elif not report.best:
            advice = f"no trial is complete ({over} are over); repeat `ratchet sweep`"
        else:
            advice = (
                f"the sweep is not over ({over} of {report.wanted_trials} trials; finalists are compared at its end): "
                f"repeat `ratchet sweep`, or name a trial (the best until now is {report.best[0]})"
            )
        raise DataError(f"--adopt: {advice}")
    complete = [trial.number for trial in report.trials if trial.state == "complete"]
    if number not in complete:
        state = report.trials[number].state if 0 <= number < len(report.trials) else "not there"
        raise DataError(
            f"--adopt {number}: trial {number} of study {report.study} is {state}; complete ones are: "
            f"{', '.join(map(str, complete)) or 'none'}"
        )
    return report.trials[number]


def _to_tuples(value: Any) -> Any:
    """As settings hold it: JSON knows no tuples."""
    return tuple(value) if isinstance(value, list) else value
