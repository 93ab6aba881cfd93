"""What is shown of a study elsewhere, as in MLflow: a child for each training, and figures of the whole; all pure."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ratchet.storage import digests
from ratchet.storage.records.sweep import ParameterAxis, SweepReport, Trial, TrialState

Status = Literal["FINISHED", "FAILED", "KILLED"]

PARENT_TAG = "mlflow.parentRunId"
STUDY_TAG = "ratchet.sweep"
ROLE_TAG = "ratchet.sweep_role"
RUN_TAG = "ratchet.run_id"
TRIAL_TAG = "ratchet.trial"
STATE_TAG = "ratchet.trial_state"
KEY_TAG = "ratchet.trial_key"

STATUS: dict[TrialState, Status] = {
    "complete": "FINISHED",
    "pruned": "KILLED",
    "infeasible": "FAILED",
    "failed": "FAILED",
}
"""Of the child of a trial that is over. A run whose training came to its end is FINISHED, whatever the trial is."""

STATES: tuple[TrialState, ...] = ("running", *STATUS)

MAX_TEXT = 2000  # characters of a tag; MLflow refuses more than 8,000, and its pages show the first few


@dataclass(frozen=True)
class ChildRun:
    """What is shown of one training: of the trials that it belongs to."""

    key: str
    """Run id; of a trial without a run its study and number."""
    run_id: str | None
    trial: Trial
    """The newest that trained it."""
    name: str
    begun: float
    ended: float
    """Unix times, in seconds; `ended` is read only where there is a status."""
    status: Status | None
    """None while it is trained."""
    tags: Mapping[str, str]
    """Without the state, which is written last."""
    state: TrialState
    values: Mapping[str, str]
    figures: Mapping[str, float]
    """Of the whole training."""
    curve: Mapping[int, float]
    """Validation loss by rows, ascending."""


def group_trials_by_run(report: SweepReport) -> dict[str, list[Trial]]:
    """The trials of each training, by run id: one, or one and its continuations."""
    groups: dict[str, list[Trial]] = {}
    for trial in report.trials:
        groups.setdefault(trial.run_id or f"{report.study}/{trial.number}", []).append(trial)
    return groups


def count_states(trials: Iterable[Trial]) -> Counter[TrialState]:
    """Trials by state; of a trial that was continued the continuation alone."""
    listed = list(trials)
    continued = {trial.continues for trial in listed}
    return Counter(trial.state for trial in listed if trial.number not in continued)


def build_child_runs(report: SweepReport) -> list[ChildRun]:
    """One for each training, with the number of its newest trial, and for each finalist's with another seed."""
    found = [_build_trial_run(report, key, trials) for key, trials in group_trials_by_run(report).items()]
    return found + _build_finalist_runs(report)


def _build_trial_run(report: SweepReport, key: str, trials: Sequence[Trial]) -> ChildRun:
    trial = trials[-1]
    tags = {
        STUDY_TAG: report.study,
        ROLE_TAG: "trial",
        TRIAL_TAG: str(trial.number),
        "ratchet.trials": ",".join(str(other.number) for other in trials if other is not trial),
        "ratchet.trial_reason": trial.reason,
        "ratchet.trial_cause": trial.cause,
        "ratchet.workers": ", ".join(dict.fromkeys(take.worker for take in trial.takes)),
        "ratchet.checkpoints": _format_checkpoints(trial),
    }
    figures = {f"trial/{m.metric}": value for m, value in zip(report.objectives, trial.objectives, strict=False)}
    begun = min(other.begun for other in trials)
    curve = sorted((rows, loss) for other in trials for rows, loss in other.curve.items())
    return ChildRun(
        key=key,
        run_id=trial.run_id,
        trial=trial,
        name=f"trial {trial.number}",
        begun=begun,
        ended=trial.ended or begun,
        status=STATUS[trial.state] if trial.is_over else None,
        tags={name: _truncate_text(value) for name, value in tags.items()},
        state=trial.state,
        values={name: format_setting(value) for name, value in trial.values.items()},
        figures={name: value for name, value in figures.items() if math.isfinite(value)},
        curve={rows: loss for rows, loss in curve if math.isfinite(loss)},
    )


def _build_finalist_runs(report: SweepReport) -> list[ChildRun]:
    """Trainings of finalists with other seeds than the trial's own."""
    if report.finals is None:
        return []
    found, metric = [], f"finalist/{report.finals.metric}"
    for finalist in report.finals.finalists:
        trial = report.trials[finalist.number]
        at = trial.ended or trial.begun
        tags = {STUDY_TAG: report.study, ROLE_TAG: "finalist", TRIAL_TAG: str(finalist.number)}
        values = {name: format_setting(value) for name, value in finalist.values.items()}
        for seed, (run_id, mean) in enumerate(zip(finalist.run_ids[1:], finalist.means[1:], strict=False), start=2):
            figures = {metric: mean} if math.isfinite(mean) else {}
            name = f"trial {finalist.number}, seed {seed}"
            found.append(
                ChildRun(run_id, run_id, trial, name, at, at, "FINISHED", tags, "complete", values, figures, {})
            )
    return found


def _format_checkpoints(trial: Trial) -> str:
    """Digests by step as JSON, short; of many the newest."""
    last = sorted(trial.checkpoints.items())[-MAX_TEXT // (digests.SHORT + 16) :]
    return json.dumps({str(step): value[: digests.SHORT] for step, value in last}) if last else ""


def summary_metrics(report: SweepReport) -> dict[str, float]:
    """Metrics of the parent: best value of each objective, importances, trials by state (a continued one once)."""
    by_state = count_states(report.trials)
    found = {f"trials/{state}": float(by_state[state]) for state in STATES}
    found |= {f"importance/{knob}": share for knob, share in report.importances.items()}
    front = [values for number in report.best if (values := report.trials[number].objectives)]
    for place, measure in enumerate(report.objectives if front else ()):
        best = min if measure.direction == "minimize" else max
        found[f"best/{measure.metric}"] = best(one[place] for one in front)
    return {key: value for key, value in found.items() if math.isfinite(value)}


def parent_tags(report: SweepReport) -> dict[str, str]:
    """How far the study is, and which runs are the best; empty texts where nothing can be said yet."""

    def runs(numbers: Sequence[int]) -> str:
        return ",".join(report.trials[number].run_id or "" for number in numbers)

    winner = () if report.winner is None else (report.winner,)
    tags = {
        "ratchet.sweep_trials": f"{count_states(report.trials).total()} of {report.wanted_trials}",
        "ratchet.best_trial": ",".join(map(str, report.best)),
        "ratchet.best_run": runs(report.best),
        "ratchet.winner_trial": ",".join(map(str, winner)),
        "ratchet.winner_run": runs(winner),
        "ratchet.winner_reason": report.finals.reason if report.finals else "",
        "ratchet.sweep_stopped": report.stopped,
    }
    return {name: _truncate_text(value) for name, value in tags.items()}


def parent_params(report: SweepReport) -> dict[str, str]:
    """What identifies the study, so it never changes."""
    flat = {"sampler": report.sampler, "pruner": report.pruner, "storage": report.storage}
    flat["objectives"] = ", ".join(f"{m.direction} {m.metric}" for m in report.objectives)
    flat |= {"data.digest": report.data_digest[: digests.SHORT], "base.digest": report.base_digest[: digests.SHORT]}
    flat |= {f"versions.{name}": version for name, version in report.versions.items()}
    flat |= {f"space.{axis.knob}": _format_axis(axis) for axis in report.axes}
    return {key: _truncate_text(value) for key, value in flat.items()}


def _format_axis(axis: ParameterAxis) -> str:
    if axis.kind == "tie":
        return f"= {axis.tie}"
    if axis.kind == "choice":
        return " | ".join(format_setting(choice) for choice in axis.choices)
    return f"{axis.low:g} to {axis.high:g}{', log' if axis.log else ''}"


def format_setting(value: Any) -> str:
    """A setting as text, as the params of every run are written."""
    return _truncate_text(",".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def _truncate_text(text: str) -> str:
    """Text of others as a database takes it: not too long, and of characters that exist."""
    return text[:MAX_TEXT].encode(errors="replace").decode()
