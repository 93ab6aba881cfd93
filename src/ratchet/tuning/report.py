"""Everything about a study as one record, for pages, MLflow, terminal and adoption."""

import difflib
from typing import Any

from ratchet.config.params_file import amended, value_of
from ratchet.config.schema import Settings
from ratchet.errors import DataError
from ratchet.runs.directory import RunPaths
from ratchet.storage import digests, files
from ratchet.storage.layout import Layout
from ratchet.storage.records.sweep import Finals, SweepReport, Trial
from ratchet.tuning import budget, final_round, importance, pruners, samplers
from ratchet.tuning.budget import STOPPED
from ratchet.tuning.final_round_scheduler import FINALS
from ratchet.tuning.search_space import Space
from ratchet.tuning.trial_store import Register


def report(
    register: Register, settings: Settings, space: Space, identity: dict[str, Any], whole: bool = True
) -> SweepReport:
    """The study as it stands now; without importances, which take seconds, unless it is to be `whole`."""
    history, judged, notes = register.trials(), final_round.objective_measures(settings.sweep), register.notes()
    finals = Finals.model_validate(notes[FINALS]) if FINALS in notes else None
    return SweepReport(
        study=register.study,
        storage=register.storage.kind,
        objectives=judged,
        axes=space.axes(),
        sampler=samplers.describe(settings.sweep.sampler, space),
        pruner=pruners.describe(settings.sweep.pruner),
        versions=samplers.versions(),
        data_digest=str(identity["data"])[: digests.SHORT],
        base_digest=str(identity["base"])[: digests.SHORT],
        wanted_trials=settings.sweep.trials + register.carried,
        trials=tuple(history),
        importances=importance.importances(space, judged, history, settings.sweep.sampler.seed) if whole else {},
        best=final_round.leaders(history, judged),
        finals=finals,
        winner=finals.winner if finals and all(trial.is_over for trial in history) else None,
        stopped=str(notes.get(STOPPED, "")),
    )


# Write a trial's values into params.yaml: a minimal diff, to be reviewed and committed.


def adopt(layout: Layout, settings: Settings, report: SweepReport, number: int | None) -> str:
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
    path, trial = layout.params, _chosen(report, number)
    here = RunPaths(layout.runs / str(trial.run_id)).is_finished()
    then = "finds this run already trained" if here else "trains it again, for its run is not here"
    text = path.read_text(encoding="utf-8")
    wanted = {key: value for key, value in trial.values.items() if value_of(settings, key) != _setting(value)}
    head = f"trial {trial.number} of study {report.study} (run {trial.run_id})"
    if not wanted:
        return f"{head}: params.yaml has these values already; `dvc repro` {then}"
    changed = amended(text, wanted)
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


def _chosen(report: SweepReport, number: int | None) -> Trial:
    if number is None:
        if report.winner is not None:
            return report.trials[report.winner]
        over = budget.counted(trial for trial in report.trials if trial.is_over)
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


def _setting(value: Any) -> Any:
    """As settings hold it: JSON knows no tuples."""
    return tuple(value) if isinstance(value, list) else value
