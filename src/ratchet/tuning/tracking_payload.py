"""Pure functions that turn a sweep report into MLflow runs: a parent with metrics, and a child for each training."""

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
"""Status of the child of a trial that is over. A run whose training is complete is FINISHED in any case."""

STATES: tuple[TrialState, ...] = ("running", *STATUS)

MAX_TEXT = 2000  # characters of a tag; MLflow rejects more than 8,000


@dataclass(frozen=True)
class ChildRun:
    """The child run of one training, with all trials that it belongs to."""

    key: str
    """Run id; for a trial without a run, its study and number."""
    run_id: str | None
    trial: Trial
    """The newest trial of the training."""
    name: str
    started: float
    ended: float
    """Unix times in seconds; `ended` is used only if there is a status."""
    status: Status | None
    """None while it runs."""
    tags: Mapping[str, str]
    """Tags without the state, which is written last."""
    state: TrialState
    values: Mapping[str, str]
    metrics: Mapping[str, float]
    """Metrics of the whole training."""
    curve: Mapping[int, float]
    """Validation loss by rows, ascending."""


def group_trials_by_run(report: SweepReport) -> dict[str, list[Trial]]:
    """Return the trials of each training by run id: one trial, or one and its continuations."""
    groups: dict[str, list[Trial]] = {}
    for trial in report.trials:
        groups.setdefault(trial.run_id or f"{report.study}/{trial.number}", []).append(trial)
    return groups


def count_states(trials: Iterable[Trial]) -> Counter[TrialState]:
    """Count trials by state; of a continued trial only the continuation counts."""
    listed = list(trials)
    continued = {trial.continues for trial in listed}
    return Counter(trial.state for trial in listed if trial.number not in continued)


def build_child_runs(report: SweepReport) -> list[ChildRun]:
    """Return a child run for each training, and for each training of a finalist with a further seed."""
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
        "ratchet.workers": ", ".join(dict.fromkeys(take.worker for take in trial.executions)),
        "ratchet.checkpoints": _format_checkpoints(trial),
    }
    metrics = {f"trial/{m.metric}": value for m, value in zip(report.objectives, trial.objectives, strict=False)}
    begun = min(other.started for other in trials)
    curve = sorted((rows, loss) for other in trials for rows, loss in other.curve.items())
    return ChildRun(
        key=key,
        run_id=trial.run_id,
        trial=trial,
        name=f"trial {trial.number}",
        started=begun,
        ended=trial.ended or begun,
        status=STATUS[trial.state] if trial.is_over else None,
        tags={name: _truncate_text(value) for name, value in tags.items()},
        state=trial.state,
        values={name: format_setting(value) for name, value in trial.values.items()},
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        curve={rows: loss for rows, loss in curve if math.isfinite(loss)},
    )


def _build_finalist_runs(report: SweepReport) -> list[ChildRun]:
    """Return child runs of finalists' trainings with further seeds."""
    if report.final_round is None:
        return []
    found, metric = [], f"finalist/{report.final_round.metric}"
    for finalist in report.final_round.finalists:
        trial = report.trials[finalist.number]
        at = trial.ended or trial.started
        tags = {STUDY_TAG: report.study, ROLE_TAG: "finalist", TRIAL_TAG: str(finalist.number)}
        values = {name: format_setting(value) for name, value in finalist.values.items()}
        for seed, (run_id, mean) in enumerate(zip(finalist.run_ids[1:], finalist.means[1:], strict=False), start=2):
            metrics = {metric: mean} if math.isfinite(mean) else {}
            name = f"trial {finalist.number}, seed {seed}"
            found.append(
                ChildRun(run_id, run_id, trial, name, at, at, "FINISHED", tags, "complete", values, metrics, {})
            )
    return found


def _format_checkpoints(trial: Trial) -> str:
    """Return short digests by step as JSON; the newest if there are many."""
    last = sorted(trial.checkpoints.items())[-MAX_TEXT // (digests.SHORT + 16) :]
    return json.dumps({str(step): value[: digests.SHORT] for step, value in last}) if last else ""


def summary_metrics(report: SweepReport) -> dict[str, float]:
    """Return metrics of the parent: best value of each objective, importances, trials by state."""
    by_state = count_states(report.trials)
    found = {f"trials/{state}": float(by_state[state]) for state in STATES}
    found |= {f"importance/{parameter}": share for parameter, share in report.importances.items()}
    front = [values for number in report.best if (values := report.trials[number].objectives)]
    for place, objective in enumerate(report.objectives if front else ()):
        best = min if objective.direction == "minimize" else max
        found[f"best/{objective.metric}"] = best(one[place] for one in front)
    return {key: value for key, value in found.items() if math.isfinite(value)}


def parent_tags(report: SweepReport) -> dict[str, str]:
    """Return progress and best runs of the study as tags; empty while unknown."""

    def runs(numbers: Sequence[int]) -> str:
        return ",".join(report.trials[number].run_id or "" for number in numbers)

    winner = () if report.winner is None else (report.winner,)
    tags = {
        "ratchet.sweep_trials": f"{count_states(report.trials).total()} of {report.planned_trials}",
        "ratchet.best_trial": ",".join(map(str, report.best)),
        "ratchet.best_run": runs(report.best),
        "ratchet.winner_trial": ",".join(map(str, winner)),
        "ratchet.winner_run": runs(winner),
        "ratchet.winner_reason": report.final_round.reason if report.final_round else "",
        "ratchet.sweep_stopped": report.stopped,
    }
    return {name: _truncate_text(value) for name, value in tags.items()}


def parent_params(report: SweepReport) -> dict[str, str]:
    """Return the parameters of the parent, which identify the study and never change."""
    flat = {"sampler": report.sampler, "pruner": report.pruner, "storage": report.storage}
    flat["objectives"] = ", ".join(f"{m.direction} {m.metric}" for m in report.objectives)
    flat |= {"data.digest": report.data_digest[: digests.SHORT], "base.digest": report.base_digest[: digests.SHORT]}
    flat |= {f"versions.{name}": version for name, version in report.versions.items()}
    flat |= {f"space.{axis.name}": _format_axis(axis) for axis in report.axes}
    return {key: _truncate_text(value) for key, value in flat.items()}


def _format_axis(axis: ParameterAxis) -> str:
    if axis.kind == "tie":
        return f"= {axis.tie}"
    if axis.kind == "choice":
        return " | ".join(format_setting(choice) for choice in axis.choices)
    return f"{axis.low:g} to {axis.high:g}{', log' if axis.log else ''}"


def format_setting(value: Any) -> str:
    """Return a setting as text, as in the params of every run."""
    return _truncate_text(",".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def _truncate_text(text: str) -> str:
    """Return text that a database accepts: limited in length, without invalid characters."""
    return text[:MAX_TEXT].encode(errors="replace").decode()
