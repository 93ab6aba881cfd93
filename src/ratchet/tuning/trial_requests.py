"""Requests of people about trials of a study: to stop, pause, resume or clone a trial, while the sweep runs or not.

A request is a note of the study, which is never changed. Its effect is computed from the requests and the trials, so it
is the same for every worker, and a worker that is killed before the effect is replaced by one that finds the request
again. Samplers and pruners do not treat a request as their own decision: a clone does not count as one of the sampler's
trials, and the end of a trial that a person has stopped or paused is no evidence about its values.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ratchet.errors import DataError, SettingsError
from ratchet.models.start_adapter import INIT_ADAPTER
from ratchet.storage.records.sweep import RequestAction, Trial, TrialRequest
from ratchet.tuning.search_space import SearchSpace, format_value, to_tuples

DECISIONS: Mapping[RequestAction, Literal["", "stopped", "paused"]] = {
    "stop": "stopped", "pause": "paused", "resume": "", "clone": "",
}  # fmt: skip
"""Decision about a training (`Trial.decision`) by action."""


def describe_request(request: TrialRequest) -> str:
    """Return a request to stop or pause a trial as the reason of its end."""
    return f"{'paused' if request.action == 'pause' else 'stopped'} by {request.by}"


def describe_clone(trial: Trial) -> str:
    """Return from which trial a person has cloned a trial; empty if the sampler chose its values."""
    request = trial.request
    if request is None:
        return ""
    start = f", from the weights in {trial.values[INIT_ADAPTER]}" if INIT_ADAPTER in trial.values else ""
    return f"clone of trial {request.trial} of study {request.study}{start}, requested by {request.by}"


def find_decision(requests: Sequence[TrialRequest], number: int) -> TrialRequest | None:
    """Return the last request to stop, pause or resume a trial; None if there is none."""
    about = [request for request in requests if request.trial == number and request.action != "clone"]
    return about[-1] if about else None


def apply_requests(trials: Sequence[Trial], requests: Sequence[TrialRequest]) -> list[Trial]:
    """Return the trials with the decisions of people, and with these as reasons of trials that have ended.

    A complete or infeasible trial keeps its result, even if it ended after the request.
    """
    applied = []
    for trial in trials:
        request = find_decision(requests, trial.number)
        decision = "" if request is None else DECISIONS[request.action]
        if request is not None and decision and trial.state not in ("complete", "infeasible"):
            changes: dict[str, Any] = {"decision": decision}
            if trial.is_over:
                # The reason of the pruner or of a failure is kept; that of an earlier request is not.
                before = "" if trial.is_ended_by_person else trial.reason
                changes["reason"] = "; before: ".join(filter(None, (describe_request(request), before)))
            trial = trial.model_copy(update=changes)  # noqa: PLW2901
        applied.append(trial)
    return applied


def carry_over_requests(
    study: str, trials: Sequence[Trial], requests: Sequence[TrialRequest], numbers: Mapping[int, int]
) -> list[TrialRequest]:
    """Return the decisions about trials for a fork of their study, in which trials have new numbers."""
    continued = {trial.continues for trial in trials}
    decisions = [find_decision(requests, number) for number in numbers if number not in continued]
    return [
        request.model_copy(update={"study": study, "trial": numbers[request.trial]}) for request in decisions if request
    ]


def find_requested_work(trials: Sequence[Trial], requests: Sequence[TrialRequest]) -> TrialRequest | int | None:
    """Return the first clone that has not begun, or else the number of a trial that was paused while it ran and is
    resumed; None without such work."""
    begun = [trial.request for trial in trials if trial.request is not None]
    waiting = [request for request in requests if request.action == "clone" and request not in begun]
    if waiting:
        return waiting[0]
    continued = {trial.continues for trial in trials}
    resumed = [t.number for t in trials if t.is_ended_by_person and not t.decision and t.number not in continued]
    return min(resumed, default=None)


def list_paused(trials: Sequence[Trial]) -> list[int]:
    """Return the numbers of trials that have ended and that a person has paused."""
    return [trial.number for trial in trials if trial.is_over and trial.decision == "paused"]


def make_request(
    study: str, trials: Sequence[Trial], requests: Sequence[TrialRequest], action: RequestAction, number: int, by: str
) -> TrialRequest:
    """Return a request to stop, pause or resume a trial. A request that is in effect already is returned unchanged.

    The request applies to the whole training of the trial, so its `trial` is the last trial that continues this one.

    Raises:
        DataError: the study has no trial with this number, or its state does not allow the action.
    """
    trial = find_newest(study, trials, action, number)
    decision = find_decision(requests, trial.number)
    where = f"--{action} {number}: trial {trial.number} of study {study}"
    if decision is not None and decision.action == action:
        return decision
    if trial.state in ("complete", "infeasible"):
        raise DataError(
            f"{where} is {trial.state}; expected a trial that is running or paused, or that can be continued"
        )
    if action == "resume" and trial.decision != "paused":
        paused = ", ".join(str(other.number) for other in trials if other.decision == "paused")
        raise DataError(f"{where} is not paused by a person; trials that are: {paused or 'none'}")
    if action == "pause" and trial.decision == "stopped":
        raise DataError(f"{where} was stopped ({trial.reason or 'it ends now'}), which is final; clone it instead")
    return TrialRequest(action=action, study=study, trial=trial.number, by=by, at=time.time())


def make_clone_request(  # noqa: PLR0913, PLR0917 (the study, and the request)
    study: str,
    space: SearchSpace,
    trials: Sequence[Trial],
    requests: Sequence[TrialRequest],
    compute_run_id: Callable[[Mapping[str, Any]], str],
    number: int,
    changes: Mapping[str, Any],
    by: str,
    start: str | None = None,
) -> TrialRequest:
    """Return a request for a new trial with the values of a trial, changed.

    The new trial starts from the weights in the directory `start`; None: as the trial.

    `compute_run_id` returns the RunId of values, and raises SettingsError if their combination is invalid.

    Raises:
        DataError: the study has no trial with this number, or a trial or an earlier request has the same values.
        SettingsError: a changed setting is not searched, or does not accept the value.
    """
    where = f"--clone {number}"
    source = find_newest(study, trials, "clone", number)
    if not changes and start is None:
        keys = ", ".join(dimension.name for dimension in space.dimensions())
        raise SettingsError(f"{where}: found no changed value; add --warm, or --set KEY=VALUE for one of: {keys}")
    try:
        values = space.change_values(trials[number].values, changes)
        if start is not None:
            values[INIT_ADAPTER] = start
        elif INIT_ADAPTER in source.values:
            values[INIT_ADAPTER] = source.values[INIT_ADAPTER]
        run_id = compute_run_id(values)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None
    same = next((f"trial {trial.number}" for trial in trials if trial.run_id == run_id), None)
    waiting = [r for r in requests if {key: to_tuples(value) for key, value in r.values.items()} == values]
    if same is None and waiting:
        same = f"a clone of trial {waiting[0].trial}, which {waiting[0].by} requested,"
    if same is not None:
        text = ", ".join(f"{key} {format_value(value)}" for key, value in values.items())
        raise DataError(f"{where}: {same} has these values already ({text}); set another value")
    return TrialRequest(action="clone", study=study, trial=number, by=by, at=time.time(), values=values)


def find_newest(study: str, trials: Sequence[Trial], action: RequestAction, number: int) -> Trial:
    """Return the trial, or the last trial that continues it. Raises DataError if there is no trial with the number."""
    if not 0 <= number < len(trials):
        known = f"it has trials 0 to {len(trials) - 1}" if trials else "it has no trials yet"
        raise DataError(f"--{action} {number}: study {study} has no trial {number}; {known}")
    trial = trials[number]
    while (later := next((t for t in trials if t.continues == trial.number), None)) is not None:
        trial = later
    return trial
