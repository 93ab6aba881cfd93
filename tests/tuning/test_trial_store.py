"""Tests the trial store on both storages: it has every trial, whichever process is killed and when."""

import json
import os
import time
from dataclasses import replace
from typing import Any

import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from ratchet.config.sweep import ObjectiveSettings, PrunerSettings, SamplerSettings, SweepParameter
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import TrainingCost, Trial, TrialExecution, TrialRequest
from ratchet.tuning import leases
from ratchet.tuning.leases import SweepWorker, TrialLeaseLostError
from ratchet.tuning.search_space import SearchSpace
from ratchet.tuning.storage import StudyStorage, open_storage
from ratchet.tuning.study import OUTCOME, TrialStore, compute_identity, deserialize_trial
from ratchet.tuning.trial_requests import find_requested_work
from trial_store_cases import (
    DATA,
    LONG,
    NARROW,
    TINY_BASE,
    Dying,
    begin,
    ended,
    here,  # noqa: F401 (a fixture)
    opened,
    populate,
    settings,
    store,  # noqa: F401 (a fixture)
    values,
)


def elsewhere(worker: SweepWorker, pid: int = 4711) -> SweepWorker:
    """Return a worker on another machine; this machine cannot see whether its process is alive."""
    return SweepWorker("node7", "another boot", pid, worker.started)


def frozen(store: TrialStore, number: int = 0) -> optuna.trial.FrozenTrial:
    """Return the trial as Optuna and its dashboard see it."""
    study = optuna.load_study(study_name=store.study, storage=store.storage.optuna)
    return study.get_trials(deepcopy=False)[number]


def reopened(store: TrialStore, project: ProjectLayout, url: str | None) -> tuple[StudyStorage, TrialStore]:
    """Open the storage and the trial store as another process does."""
    storage = open_storage(project, url)
    return storage, opened(storage, settings())


FULL = {
    "curve": {70: 2.5, 140: 1.75},
    "cause": "memory",
    "reason": "it did",
    "adapter_digest": "a" * 64,
    "checkpoints": {5: "c" * 64},
    "cost": TrainingCost(trained_tokens=7, train_seconds=1.5, attempts=2),
}


@pytest.mark.parametrize(
    ("state", "changes", "in_optuna"),
    [
        ("complete", {"objectives": (1.25,)}, TrialState.COMPLETE),
        ("pruned", {}, TrialState.PRUNED),
        ("infeasible", {"constraints": {"memory": 0.5, "diverged": 0.0}}, TrialState.PRUNED),
        ("failed", {}, TrialState.FAIL),
    ],
)
def test_the_outcome_of_a_trial_is_read_as_it_was_written(
    store: TrialStore, project: ProjectLayout, url: str | None, state: str, changes: Any, in_optuna: TrialState
) -> None:
    here = SweepWorker.current()
    outcome = ended(state, **FULL, **changes)
    assert begin(store, here) == 0
    store.report(0, 70, 2.5)
    store.finish(0, outcome, here)
    storage, other = reopened(store, project, url)
    (trial,) = other.trials()
    assert store.trials() == [trial]
    took = trial.executions[0]
    assert (took.worker, trial.started) == (here.name, took.started)
    assert trial == outcome.model_copy(update={"started": trial.started, "executions": trial.executions})
    there = frozen(other)
    assert (there.state, there.constraints) == (in_optuna, changes.get("constraints", {}))
    assert there.params == {"train.rank": 8, "train.learning_rate": 1e-3}
    assert there.intermediate_values == FULL["curve"]
    assert there.values == (list(outcome.objectives) or None)
    storage.close()


def test_a_trial_that_runs_is_there_in_one_piece(store: TrialStore, here: SweepWorker) -> None:
    assert [begin(store, here), begin(store, here, values(16), continues=0)] == [0, 1]
    first, second = store.trials()
    assert (first.state, first.values, first.run_id, first.continues) == ("running", values(), "run-1", None)
    assert (second.number, second.values, second.continues) == (1, values(16), 0)
    store.report(1, 70, 3.0)
    store.report(1, 70, 9.0)
    assert store.trials()[1].curve == {70: 3.0}


def test_lists_and_nothing_come_back_as_settings_have_them(storage: StudyStorage, here: SweepWorker) -> None:
    wanted = settings({"train.target_modules": SweepParameter(choices=(("q_proj",), ("q_proj", "v_proj"), "all"))})
    space = SearchSpace.from_settings(wanted)
    store = opened(storage, wanted)
    for choice in space.grid(2):
        store.begin(choice, space.to_params(choice), None, here)
    assert [trial.values for trial in store.trials()] == space.grid(2)
    assert store.trials()[1].values == {"train.target_modules": ("q_proj", "v_proj")}
    assert store.trials()[0].run_id is None


def test_a_trial_that_is_over_is_added_in_one_piece(store: TrialStore, here: SweepWorker) -> None:
    begin(store, here)
    store.finish(0, ended(), here)
    take = TrialExecution(worker="node7/1", started=1.0, last_seen=2.0)
    done = ended(executions=(take,), curve={70: 1.0})
    assert store.add(done, SearchSpace.from_settings(settings()).to_params(done.values)) == 1
    assert store.trials()[1] == done.model_copy(update={"number": 1})
    refused = ended("infeasible", run_id=None, constraints={"memory": 1.0})
    assert store.add(refused, SearchSpace.from_settings(settings()).to_params(refused.values)) == 2
    assert store.trials()[2] == refused.model_copy(update={"number": 2})
    assert frozen(store, 2).constraints == {"memory": 1.0}
    # An earlier version wrote an additional field.
    attributes = frozen(store, 1).user_attrs
    older = create_trial(
        state=TrialState.COMPLETE, values=list(done.objectives), intermediate_values={70: 1.0},
        user_attrs={**attributes, OUTCOME: {**attributes[OUTCOME], "same_as": None}},
    )  # fmt: skip
    backend = store.storage.optuna
    backend.create_new_trial(backend.get_study_id_from_name(store.study), older)
    assert store.trials()[3] == done.model_copy(update={"number": 3})


def test_invalid_outcomes_are_refused(store: TrialStore, here: SweepWorker) -> None:
    begin(store, here)
    for wrong in (ended(objectives=(1.0, 2.0)), ended(objectives=()), ended("running")):
        with pytest.raises(ValueError, match=r"objectives|over|running"):
            store.finish(0, wrong, here)
        with pytest.raises(ValueError, match=r"objectives|over|running"):
            store.add(wrong, ({}, {}))
    assert [trial.state for trial in store.trials()] == ["running"]


@pytest.mark.parametrize("write", range(1, 7))
def test_an_end_that_is_cut_off_anywhere_is_written_again(
    store: TrialStore, here: SweepWorker, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    begin(store, here)
    dying = Dying(store.storage.optuna, write)
    written = [f"set_trial_{what}" for what in ("user_attr", "system_attr", "intermediate_value", "state_values")]
    with monkeypatch.context() as patched:
        dying.replace(patched, *written)
        first = ended("infeasible", curve={70: 2.0, 140: 3.0}, constraints={"memory": 0.5, "diverged": 1.0}, reason="x")
        with pytest.raises(KeyboardInterrupt):
            store.finish(0, first, here)
    (trial,) = store.trials()
    assert (trial.state, trial.constraints, trial.reason) == ("running", {}, "")
    store.release(0, here)
    taken = store.take_over(here, LONG)
    assert taken is not None
    second = ended("infeasible", curve={70: 2.0, 140: 3.0}, constraints={"memory": 0.25})
    store.finish(0, second, here)
    (trial,) = store.trials()
    assert (trial.constraints, trial.curve, trial.reason) == ({"memory": 0.25}, {70: 2.0, 140: 3.0}, "")
    assert {key: value for key, value in frozen(store).constraints.items() if value > 0} == {"memory": 0.25}


def test_a_trial_whose_process_ended_is_taken_at_once(store: TrialStore, here: SweepWorker, processes: Any) -> None:
    child = processes.Process(target=time.sleep, args=(600,))
    child.start()
    lives = replace(here, pid=child.pid, started=leases._read_process(child.pid)[1])
    begin(store, lives)
    assert store.take_over(here, LONG) is None
    child.kill()
    child.join()
    taken = store.take_over(here, LONG)
    assert taken is not None
    assert (taken.number, [take.worker for take in taken.executions]) == (0, [lives.name, here.name])
    assert store.take_over(here, LONG) is None  # the trial has a holder that is alive
    with pytest.raises(TrialLeaseLostError, match=rf"trial 0: {here.name} holds it now"):
        store.finish(0, ended(), lives)
    store.finish(0, ended(), here)


def test_a_reused_process_id_and_a_zombie_are_gone(here: SweepWorker) -> None:
    assert not here.is_gone(here)
    assert replace(here, started=here.started - 1).is_gone(here)
    assert not replace(here, boot="another", pid=2**22 + 1).is_gone(here)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    zombie = replace(here, pid=pid, started=leases._read_process(pid)[1])
    while not zombie.is_gone(here):
        time.sleep(0.01)
    assert leases._read_process(pid)[0] == "Z"
    os.waitpid(pid, 0)
    assert zombie.is_gone(here)


def test_a_silent_holder_loses_its_trial_and_writes_nothing_more(store: TrialStore, here: SweepWorker) -> None:
    """The other worker is on another machine: its process cannot be seen, but its counter can."""
    other = elsewhere(here)
    begin(store, other)
    assert store.take_over(here, 0.2) is None  # the first look cannot tell
    time.sleep(0.3)
    store.renew(0, other)
    assert store.take_over(here, 0.2) is None  # the holder renewed the trial since then
    assert store.take_over(here, LONG) is None
    time.sleep(0.3)
    taken = store.take_over(here, 0.2)
    assert taken is not None
    assert [take.worker for take in taken.executions] == [other.name, here.name]
    store.report(0, 70, 2.0)
    for late in (
        lambda: store.renew(0, other),
        lambda: store.finish(0, ended(objectives=(9.0,)), other),
        lambda: store.release(0, other),
    ):
        with pytest.raises(TrialLeaseLostError, match=f"{here.name} holds it now; {other.name}"):
            late()
    store.renew(0, here)
    store.finish(0, ended(), here)
    for late in (
        lambda: store.renew(0, here),
        lambda: store.finish(0, ended(), here),
        lambda: store.report(0, 9, 1),
    ):
        with pytest.raises(TrialLeaseLostError, match="is over"):
            late()
    (trial,) = store.trials()
    assert (trial.objectives, trial.curve) == ((1.5,), {70: 2.0})
    assert trial.executions[0].last_seen > trial.executions[0].started
    assert store.take_over(here, 0.0) is None


def test_a_late_renewal_changes_nothing(store: TrialStore, here: SweepWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder was stopped between its read and its write."""
    other = elsewhere(here)
    begin(store, other)
    store.take_over(here, 0.0)
    backend = store.storage.optuna
    real = backend.set_trial_user_attr
    store.release(0, here)
    begun = store.take_over(other, LONG)
    assert begun is not None

    def slow(*arguments: Any) -> None:
        monkeypatch.setattr(backend, "set_trial_user_attr", real)
        store.take_over(here, 0.0)
        real(*arguments)

    monkeypatch.setattr(backend, "set_trial_user_attr", slow)
    with pytest.raises(TrialLeaseLostError, match=f"{here.name} holds it now"):
        store.renew(0, other)
    store.renew(0, here)
    (trial,) = store.trials()
    assert [take.worker for take in trial.executions] == [other.name, here.name, other.name, here.name]


def test_a_trial_that_was_given_back_is_anybodys(store: TrialStore, here: SweepWorker) -> None:
    begin(store, here)
    begin(store, here)
    store.release(1, here)
    with pytest.raises(TrialLeaseLostError, match="no worker holds it now"):
        store.renew(1, here)
    other = elsewhere(here)
    taken = store.take_over(other, LONG)
    assert taken is not None
    assert (taken.number, taken.executions[-1].worker) == (1, other.name)
    assert store.take_over(here, LONG) is None


def test_notes_are_kept_with_the_study(store: TrialStore, project: ProjectLayout, url: str | None) -> None:
    assert store.notes() == {}
    store.note("stopped", {"why": ["memory"]})
    store.note("stopped", None)
    store.note("final_round", [1, 2.5])
    storage, other = reopened(store, project, url)
    assert other.notes() == {"stopped": None, "final_round": [1, 2.5]}
    storage.close()
    with pytest.raises(ValueError, match="JSON"):
        store.note("bad", float("nan"))


def test_requests_of_people_are_kept_in_order_and_begin_a_trial_once(
    store: TrialStore, storage: StudyStorage, here: SweepWorker
) -> None:
    begin(store, here)
    stop, resume = (
        TrialRequest(action=action, study=store.study, trial=0, by="alice", at=1 / 3) for action in ("pause", "resume")
    )
    clone = stop.model_copy(update={"action": "clone", "values": {**values(), "train.learning_rate": 0.1 + 0.2}})
    other = TrialStore.newest(storage, store.study)
    assert other is not None
    for request in (clone, stop):
        store.add_request(request)
    assert other.requests() == [clone, stop]
    assert other.trials()[0].decision == "paused"
    assert find_requested_work(other.trials(), other.requests()) == clone
    other.begin(clone.values, ({}, {}), "run-2", here, request=clone)
    assert store.trials()[1].request == clone
    assert find_requested_work(store.trials(), store.requests()) is None
    other.add_request(resume)
    assert [trial.decision for trial in store.trials()] == ["", ""]
    store.release(1, here)
    assert store.take_over(here, 1e9, only=0) is None  # its worker runs
    taken = store.take_over(here, 1e9, only=1)
    assert taken is not None
    assert taken.request == clone
    other.note("request.3", {"action": "merge"})
    with pytest.raises(DamagedFileError, match="a request about a trial cannot be read"):
        store.requests()


def test_the_same_study_is_found_again(store: TrialStore, storage: StudyStorage) -> None:
    again = opened(storage, settings(trials=99, max_hours=3))  # these settings do not belong to the identity of a study
    assert again.study == store.study == "sweep"
    assert again.versions["optuna"] == optuna.__version__
    assert set(again.versions) == {"optuna", "cmaes", "scipy", "ratchet"}
    assert again.carried == 0
    newest = TrialStore.newest(storage, store.study)
    assert newest is not None
    assert newest.identity == json.loads(json.dumps(compute_identity(settings(), DATA, TINY_BASE)))
    assert TrialStore.newest(storage, "other") is None


def test_directions_are_those_of_the_objectives_and_a_fork_reorders_them(storage: StudyStorage) -> None:
    aims = (ObjectiveSettings(metric="accuracy"), ObjectiveSettings(metric="memory_bytes"))
    first = opened(storage, settings(objectives=aims, pruner=PrunerSettings(kind="none")))
    study = optuna.load_study(study_name=first.study, storage=storage.optuna)
    assert study.directions == [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE]
    done = ended(objectives=(0.5, 7.0))
    first.add(done, SearchSpace.from_settings(settings()).to_params(done.values))
    second = opened(storage, settings(objectives=aims[::-1], pruner=PrunerSettings(kind="none")), fork=True)
    assert [trial.objectives for trial in second.trials()] == [(7.0, 0.5)]
    assert frozen(second).values == [7.0, 0.5]


def test_another_space_is_refused_with_the_differences(store: TrialStore, storage: StudyStorage) -> None:
    with pytest.raises(SettingsError) as refused:
        opened(storage, settings(NARROW))
    told = str(refused.value)
    assert "space.train.rank.high: 64 -> 16\n" in told and "space.train.rank.low: 2 -> 4\n" in told
    assert "'sweep.2'" in told and "--fork" in told and "sweep.name" in told
    assert opened(storage, settings(NARROW), name="other").study == "other"


def test_a_fork_takes_over_the_trials_inside_the_new_space(
    store: TrialStore, storage: StudyStorage, here: SweepWorker
) -> None:
    populate(store, here)
    forked = opened(storage, settings(NARROW, sampler=SamplerSettings(kind="random")), fork=True)
    assert (forked.study, forked.carried) == ("sweep.2", 6)
    old = store.trials()
    taken = [old[number].model_copy(update={"number": new}) for new, number in enumerate((0, 1, 2, 3, 5))]
    assert forked.trials()[:5] == taken
    assert forked.trials()[5] == old[9].model_copy(update={"number": 5, "continues": 1})
    assert [frozen(forked, number).user_attrs["from"] for number in range(6)] == [
        ["sweep", n] for n in (0, 1, 2, 3, 5, 9)
    ]
    assert [trial.number for trial in store.trials()] == list(range(10))  # the old study is unchanged
    # After the fork, each study is found by its identity, with or without `fork`.
    assert opened(storage, settings(NARROW, sampler=SamplerSettings(kind="random"))).study == "sweep.2"
    assert opened(storage, settings(), fork=True).study == "sweep"
    assert begin(forked, here) == 6


def test_a_fork_knows_what_a_setting_was_that_was_not_searched(storage: StudyStorage, here: SweepWorker) -> None:
    """A setting that was fixed and is now searched had one value.

    For a setting that was searched and is now fixed, only trials with the current value count.
    """
    now = settings().train.rank
    one = settings({"train.rank": SweepParameter(choices=(now, 2 * now))})
    first = opened(storage, one)
    for rank in (now, 2 * now):
        chosen = {"train.rank": rank}
        first.add(ended(values=chosen), SearchSpace.from_settings(one).to_params(chosen))
    two = settings({"train.learning_rate": SweepParameter(low=1e-5, high=1e-1, log=True)})
    second = opened(storage, two, fork=True)
    assert [trial.values for trial in second.trials()] == [{"train.learning_rate": two.train.learning_rate}]
    assert frozen(second).user_attrs["from"] == ["sweep", 0]


@pytest.mark.parametrize("change", ["data", "metric", "train"])
def test_a_fork_takes_nothing_that_cannot_be_compared(
    store: TrialStore, storage: StudyStorage, here: SweepWorker, change: str
) -> None:
    populate(store, here)
    train = settings().train.model_copy(update={"dropout": 0.25})
    wanted, data = {
        "data": (settings(), "e" * 64),
        "metric": (settings(objectives=(ObjectiveSettings(metric="accuracy"),)), DATA),
        "train": (settings().model_copy(update={"train": train}), DATA),
    }[change]
    changed = opened(storage, wanted, fork=True, data=data)
    assert (changed.study, changed.carried, changed.trials()) == ("sweep.2", 0, [])


def test_an_unfinished_beginning_does_not_bind_the_next_and_a_study_of_another_program_is_kept(
    storage: StudyStorage,
) -> None:
    storage.optuna.create_new_study([StudyDirection.MINIMIZE], "sweep")
    two = settings(
        objectives=(ObjectiveSettings(metric="accuracy"), ObjectiveSettings(metric="memory_bytes")),
        pruner=PrunerSettings(kind="none"),
    )
    assert opened(storage, two).study == "sweep"
    theirs = storage.optuna.create_new_study([StudyDirection.MINIMIZE], "theirs")
    storage.optuna.create_new_trial(theirs)
    with pytest.raises(SettingsError, match=r"'theirs' was created by another program; choose another sweep.name"):
        opened(storage, settings(), name="theirs")


def test_a_study_of_a_newer_version_is_left_alone(store: TrialStore, storage: StudyStorage) -> None:
    study = storage.optuna.get_study_id_from_name("sweep")
    storage.optuna.set_study_user_attr(study, "ratchet.format", 2)
    with pytest.raises(DamagedFileError, match=r"'sweep' was written by a newer version of Ratchet \(format 2"):
        opened(storage, settings())


def test_changes_by_another_program_are_reported(store: TrialStore, storage: StudyStorage, here: SweepWorker) -> None:
    begin(store, here)
    study = storage.optuna.get_study_id_from_name("sweep")
    # Ended by hand, as in the dashboard.
    storage.optuna.set_trial_state_values(frozen(store)._trial_id, TrialState.FAIL)
    (trial,) = store.trials()
    assert (trial.state, trial.reason) == ("failed", "ended by another program")
    foreign = create_trial(value=1.0, params={"x": 0.5}, distributions={"x": FloatDistribution(0, 1)})
    storage.optuna.create_new_trial(study, foreign)
    with pytest.raises(DamagedFileError, match="study sweep, trial 1: another program has added this trial"):
        store.trials()


def test_many_trials_are_read_in_no_time(store: TrialStore, here: SweepWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished trials are converted to records only once."""
    free = SearchSpace.from_settings(settings()).to_params(values())
    for _ in range(30):
        store.add(ended(), free)
    begin(store, here)
    assert len(store.trials()) == 31
    read = []

    def counted(study: str, one: optuna.trial.FrozenTrial) -> Trial:
        read.append(one.number)
        return deserialize_trial(study, one)

    monkeypatch.setattr("ratchet.tuning.study.deserialize_trial", counted)
    assert len(store.trials()) == 31
    assert read == [30]
