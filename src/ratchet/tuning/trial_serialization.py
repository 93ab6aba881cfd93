"""Converts trial records to Optuna's trials: what its dashboard shows, and the rest as user attributes.

Attributes of a trial, each JSON: `values`, `run_id`, `continues`, `serialize_running` (fixed when it begins), `lease`,
`heartbeat.N` (leases.py), `outcome_fields` (all results; they are valid only if the trial's state is final, because the
writer may die before), `from` (study and number of the original, for a copy of a fork).
"""

from collections.abc import Mapping
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

from ratchet.errors import DamagedFileError, first_line
from ratchet.storage.records.sweep import Trial
from ratchet.storage.records.sweep import TrialState as State
from ratchet.tuning import parameter_scale
from ratchet.tuning.leases import LEASE, TrialLease
from ratchet.tuning.parameters import SearchDimension
from ratchet.tuning.search_space import SearchSpace

Free = Mapping[str, tuple[SearchDimension, Any]]
"""Values that were searched, with where they may lie."""

OUTCOME = "outcome"
ORIGIN = "from"
_AT_THE_END = {"state", "cause", "reason", "adapter_digest", "checkpoints", "cost", "constraints", "ended"}
_GONE = "same_as"
"""Of outcomes that earlier versions stored: always null."""
_STATES: dict[State, TrialState] = {
    "running": TrialState.RUNNING,
    "complete": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "infeasible": TrialState.PRUNED,
    "failed": TrialState.FAIL,
}
_FOREIGN: dict[TrialState, State] = {
    TrialState.COMPLETE: "complete",
    TrialState.PRUNED: "pruned",
    TrialState.FAIL: "failed",
}


def select_searched(space: SearchSpace, values: Mapping[str, Any]) -> Free:
    """Return the drawn values of a trial with their dimensions."""
    return {name: (space.dimension(name), value) for name, value in space.select_drawn(values).items()}


def to_optuna_state(trial: Trial) -> TrialState:
    """Return Optuna's state of a trial."""
    return _STATES[trial.state]


def serialize_running(trial: Trial, free: Free, lease: TrialLease) -> FrozenTrial:
    """Return a running trial, to be stored in one operation."""
    params, spaces = _split_params(free)
    attributes = {**_start_fields(trial), LEASE: lease.document()}
    return create_trial(state=TrialState.RUNNING, params=params, distributions=spaces, user_attrs=attributes)


def serialize_finished(trial: Trial, free: Free, origin: tuple[str, int] | None = None) -> FrozenTrial:
    """Return a trial that is over, to be stored in one operation; `origin`: study and number of the original."""
    params, spaces = _split_params(free)
    attributes = {**_start_fields(trial), OUTCOME: outcome_fields(trial)}
    attributes[OUTCOME]["executions"] = [take.model_dump(mode="json") for take in trial.executions]
    return create_trial(
        state=to_optuna_state(trial),
        values=objective_values(trial),
        params=params,
        distributions=spaces,
        user_attrs=attributes if origin is None else {**attributes, ORIGIN: list(origin)},
        intermediate_values=dict(trial.curve),
        constraints=dict(trial.constraints),
    )


def objective_values(trial: Trial) -> list[float] | None:
    """Return the objectives for Optuna, which has them for complete trials only."""
    return list(trial.objectives) if trial.state == "complete" else None


def outcome_fields(trial: Trial) -> dict[str, Any]:
    """Outcome of a finished trial, in addition to its curve and objectives."""
    return trial.model_dump(mode="json", include=_AT_THE_END)


def constraint_attributes(trial: Trial, earlier: FrozenTrial) -> dict[str, float]:
    """Constraints under Optuna's keys, those that an earlier, interrupted end had set back to satisfied."""
    wanted = {**dict.fromkeys(earlier.constraints, 0.0), **trial.constraints}
    return create_trial(state=TrialState.FAIL, constraints=wanted).system_attrs


def deserialize_trial(study: str, frozen: FrozenTrial) -> Trial:
    """The record of a stored trial. Raises DamagedFileError for one that Ratchet has not written."""
    attributes = frozen.user_attrs
    if "values" not in attributes:
        raise DamagedFileError(
            f"study {study}, trial {frozen.number}: another program has put it there, and what it means to train is "
            "not known; start a new study with `ratchet sweep --fork`, or with another sweep.name"
        )
    lease = TrialLease.from_attributes(attributes)
    known: dict[str, Any] = {
        "number": frozen.number,
        "values": {parameter: _to_tuples(value) for parameter, value in attributes["values"].items()},
        "run_id": attributes["run_id"],
        "continues": attributes["continues"],
        "started": attributes["started"],
        "curve": dict(sorted(frozen.intermediate_values.items())),
        "executions": lease.executions(attributes) if lease else (),
    }
    if not frozen.state.is_finished():
        return Trial(state="running", **known)
    if OUTCOME not in attributes:
        known |= {
            "state": _FOREIGN[frozen.state],
            "reason": "ended by another program",
            "constraints": frozen.constraints,
        }
        known["ended"] = frozen.datetime_complete.timestamp() if frozen.datetime_complete else None
    values = frozen.values if frozen.state == TrialState.COMPLETE else ()
    told = {key: value for key, value in attributes.get(OUTCOME, {}).items() if key != _GONE}
    try:
        return Trial.model_validate({**known, **told, "objectives": values})
    except ValueError as error:
        raise DamagedFileError(f"study {study}, trial {frozen.number}: {first_line(error)}") from error


def _start_fields(trial: Trial) -> dict[str, Any]:
    return trial.model_dump(mode="json", include={"values", "run_id", "continues", "started"})


def _split_params(free: Free) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
    params = {parameter: parameter_scale.encode_value(value) for parameter, (_, value) in free.items()}
    return params, {parameter: parameter_scale.to_distribution(dimension) for parameter, (dimension, _) in free.items()}


def _to_tuples(value: Any) -> Any:
    """A value as settings hold it: JSON has no tuples."""
    return tuple(value) if isinstance(value, list) else value
