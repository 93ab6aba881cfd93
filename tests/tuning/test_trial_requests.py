"""Tests requests of people about trials: what the scheduler does with them, in a real study of a real project."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import sweep_example
import tiny_project
import tiny_sweep
from ratchet.config.sweep import FinalistSettings, PrunerSettings, SamplerSettings
from ratchet.errors import DataError, RatchetError, SettingsError
from ratchet.reports import sweep_page
from ratchet.stages import sweep as stage
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import RequestAction, Trial, TrialRequest
from ratchet.tuning import final_round
from ratchet.tuning.freeze_thaw import Continuation, FreezeThawSearch
from ratchet.tuning.pruners import find_most_promising, find_promotable
from ratchet.tuning.samplers import build_in_memory_study, propose
from ratchet.tuning.scheduler import TrialScheduler
from ratchet.tuning.study_session import StudySession
from ratchet.tuning.trial import TrialTask
from ratchet.tuning.trial_requests import make_clone_request, make_request
from ratchet.tuning.trial_summary import compute_savings
from study_histories import LOSS, RANK, RATE, drawn, space_of, trial, tried

NO_PRUNER = {"pruner": PrunerSettings(kind="none"), "sampler": SamplerSettings(kind="random")}
ASHA = {"pruner": PrunerSettings(kind="asha", min_resource_fraction=0.25), "sampler": SamplerSettings(kind="random")}
ACTOR = "alice@example.org"


class Search:
    """A scheduler in an open study of a project, and the requests of one person."""

    def __init__(self, scheduler: TrialScheduler, session: StudySession) -> None:
        self.scheduler, self.session, self.store = scheduler, session, scheduler.store

    def begin(self) -> Trial:
        """Begin or continue a trial as a worker does."""
        task = self.scheduler.next()
        assert isinstance(task, TrialTask), task
        return task.trial

    def end(self, trial: Trial, state: str, losses: Sequence[float] = (), **fields: Any) -> Trial:
        """End a trial with these losses at the quarters of the longest training."""
        if state == "complete":
            fields = {"objectives": (losses[-1],), **fields}
        quarter = -(-self.scheduler.longest_rows // 4)
        curve = {quarter * (index + 1): loss for index, loss in enumerate(losses)}
        outcome = trial.model_copy(update={"state": state, "curve": curve, "ended": time.time(), **fields})
        self.store.finish(trial.number, outcome, self.scheduler.worker)
        return self.store.trials()[trial.number]

    def request(self, action: RequestAction, number: int) -> TrialRequest:
        study, trials, requests = self.store.study, self.store.trials(), self.store.requests()
        request = make_request(study, trials, requests, action, number, ACTOR)
        self.store.add_request(request)
        return request

    def clone(self, number: int, **changes: Any) -> TrialRequest:
        request = make_clone_request(
            self.store.study, self.session.space, self.store.trials(), self.store.requests(),
            self.scheduler.require_run_id, number, {f"train.{key}": value for key, value in changes.items()}, ACTOR,
        )  # fmt: skip
        self.store.add_request(request)
        return request


@pytest.fixture
def layout(tmp_path: Path) -> ProjectLayout:
    return tiny_project.prepared(tmp_path / "a project", tiny_sweep.settings())


@pytest.fixture
def opened(layout: ProjectLayout) -> Iterator[Any]:
    """Return a function that opens the study, for these settings of the sweep."""
    with ExitStack() as stack:

        def opened(fork: bool = False, **sweep: Any) -> Search:
            settings = tiny_sweep.settings(**sweep)
            return Search(*tiny_sweep.open_scheduler(stack, layout, settings, fork))

        yield opened


def test_a_clone_begins_once_and_before_the_trials_of_the_sampler_and_is_none_of_them(opened: Any) -> None:
    search = opened(trials=2, **NO_PRUNER)
    source = search.begin()
    request = search.clone(0, learning_rate=0.02)
    assert request.values == {**source.values, "train.learning_rate": 0.02}
    clone = search.begin()
    assert clone.values == request.values
    assert clone.request == request
    assert (clone.continues, clone.run_id) == (None, search.scheduler.run_id(request.values))
    other = search.begin()
    assert other.request is None
    assert search.scheduler.next() == "wait"  # two trials of the sampler and one clone
    for begun, loss in ((source, 1.0), (clone, 0.5), (other, 2.0)):
        search.end(begun, "complete", [loss])
    assert search.scheduler.next() == "over"
    report = search.session.report(with_importances=False)
    assert (report.planned_trials, len(report.trials), report.best) == (3, 3, (1,))
    assert report.requests == (request,)
    assert final_round.count_trials(report.trials) == 2


def test_a_clone_may_have_a_value_outside_of_a_range_and_derived_values_follow(opened: Any) -> None:
    search = opened(
        trials=8, sampler=SamplerSettings(kind="gp", n_startup_trials=2), pruner=PrunerSettings(kind="none")
    )
    for loss in (1.0, 2.0):
        search.end(search.begin(), "complete", [loss])
    search.clone(0, rank=16, learning_rate=0.5)  # the space ends at 8 and 0.1
    clone = search.begin()
    assert clone.values == {"train.rank": 16, "train.alpha": 32, "train.learning_rate": 0.5}
    search.end(clone, "complete", [0.5])
    assert search.begin().request is None  # Optuna's sampler proposes without it
    report = search.session.report()
    assert report.best == (2,)
    assert report.trials[2].objectives == (0.5,)
    page = sweep_page.render(report)
    assert f"clone of trial 0 of study sweep, requested by {ACTOR}" in page


def test_freeze_thaw_learns_from_a_clone_outside_of_the_range(opened: Any) -> None:
    search = opened(trials=2, sampler=SamplerSettings(n_startup_trials=2), pruner=PrunerSettings(kind="freeze_thaw"))
    for loss in (1.0, 2.0):
        search.end(search.begin(), "pruned", [loss])
    search.clone(0, learning_rate=0.5)
    search.end(search.begin(), "pruned", [0.2, 0.1])
    assert search.begin().continues == 2  # the clone is the most promising training


@pytest.mark.parametrize("sweep", [NO_PRUNER, ASHA], ids=["no pruner", "asha"])
def test_a_paused_trial_is_continued_only_after_it_was_resumed_and_then_once(
    opened: Any, sweep: dict[str, Any]
) -> None:
    search = opened(trials=2, finalists=FinalistSettings(top_k=2), **sweep)
    paused = search.begin()
    search.request("pause", 0)
    assert search.store.trials()[0].decision == "paused"
    search.end(paused, "pruned", [1.0], cause="paused", reason="paused")
    search.end(search.begin(), "complete", [2.0])
    assert search.scheduler.next() == "over"  # although two finalists are wanted
    search.request("resume", 0)
    resumed = search.begin()
    assert (resumed.continues, resumed.run_id, resumed.decision) == (0, paused.run_id, "")
    assert search.scheduler.next() == "wait"
    search.request("pause", 0)  # the number of the first trial names the training
    assert [trial.decision for trial in search.store.trials()] == ["", "", "paused"]


def test_a_trial_that_the_pruner_has_paused_is_not_continued_while_a_person_holds_it(opened: Any) -> None:
    search = opened(trials=3, **ASHA)
    for loss in (1.0, 2.0, 3.0):
        search.end(search.begin(), "pruned", [loss], reason="its place")
    search.request("pause", 0)
    assert search.store.trials()[0].reason == f"paused by {ACTOR}; before: its place"
    assert search.begin().continues == 1  # the only complete training that is still possible comes from the others
    search.request("resume", 0)
    assert search.store.trials()[0].reason == "its place"
    assert search.begin().continues == 0
    search.request("stop", 2)
    assert search.store.trials()[2].decision == "stopped"


def test_a_fork_respects_the_decisions_and_names_the_study_of_a_request(opened: Any) -> None:
    before = opened(trials=2, **ASHA)
    for loss in (1.0, 2.0):
        before.end(before.begin(), "pruned", [loss])
    before.request("stop", 0)
    before.clone(1, learning_rate=0.05)
    before.end(before.begin(), "complete", [3.0])
    after = opened(fork=True, trials=1, pruner=ASHA["pruner"], sampler=SamplerSettings(kind="random", seed=1))
    carried = after.store.trials()
    assert [trial.decision for trial in carried] == ["stopped", "", ""]
    assert carried[2].request is not None
    assert (carried[2].request.study, carried[2].request.trial) == ("sweep", 1)
    assert [(one.action, one.study, one.trial) for one in after.store.requests()] == [("stop", after.store.study, 0)]
    assert carried[0].cause == ""  # the pruner has ended it
    assert after.begin().continues is None  # the sampler's; neither the stopped trial nor the clone again


def test_a_fork_keeps_the_last_decision_about_each_training(opened: Any) -> None:
    before = opened(trials=3, **NO_PRUNER)
    for number in range(3):
        begun = before.begin()
        before.request("pause", number)
        before.end(begun, "pruned", [1.0], cause="paused", reason=f"paused by {ACTOR}")
    before.request("resume", 0)
    resumed = before.begin()
    before.end(resumed, "complete", [0.5])
    before.request("resume", 1)  # and it has not begun
    before.request("stop", 2)
    assert before.store.trials()[2].reason == f"stopped by {ACTOR}"
    after = opened(fork=True, trials=1, pruner=NO_PRUNER["pruner"], sampler=SamplerSettings(kind="random", seed=1))
    assert [trial.decision for trial in after.store.trials()] == ["", "", "stopped", ""]
    assert after.begin().continues == 1


def test_two_workers_begin_one_clone(opened: Any) -> None:
    first = opened(trials=2, **NO_PRUNER)
    first.begin()
    first.clone(0, learning_rate=0.02)
    second = opened(trials=2, **NO_PRUNER)
    assert first.begin().request is not None
    assert second.begin().request is None


def test_limits_hold_for_clones_too(opened: Any) -> None:
    search = opened(trials=5, max_hours=1e-9, **NO_PRUNER)
    begun = search.begin()
    cost = begun.cost.model_copy(update={"train_seconds": 5.0})
    search.end(begun, "complete", [1.0], cost=cost)
    search.clone(0, learning_rate=0.02)
    assert search.scheduler.next() == "over"
    assert search.scheduler.find_requested_step(search.store.trials()) is None


@pytest.mark.parametrize(
    ("action", "number", "error", "says"),
    [
        ("stop", 9, DataError, "--stop 9: study sweep has no trial 9; it has trials 0 to 2"),
        ("pause", -1, DataError, "--pause -1: study sweep has no trial -1"),
        ("stop", 1, DataError, "--stop 1: trial 1 of study sweep is complete; expected"),
        ("resume", 0, DataError, "--resume 0: trial 0 of study sweep is not paused by a person; trials that are: 2"),
    ],
)
def test_impossible_requests_are_refused(
    opened: Any, action: RequestAction, number: int, error: type[RatchetError], says: str
) -> None:
    search = opened(trials=3, **NO_PRUNER)
    search.begin()
    search.end(search.begin(), "complete", [1.0])
    search.end(search.begin(), "pruned", [1.0])
    search.request("pause", 2)
    with pytest.raises(error) as refused:
        search.request(action, number)
    assert says in str(refused.value)
    assert len(search.store.requests()) == 1


def test_a_repeated_request_is_the_same_and_a_stop_is_final(opened: Any) -> None:
    search = opened(trials=3, **NO_PRUNER)
    search.begin()
    assert search.request("stop", 0) == search.request("stop", 0)
    for action in ("pause", "resume"):
        with pytest.raises(DataError):
            search.request(action, 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, "add --warm, or --set KEY=VALUE for one of: train.rank, train.learning_rate"),
        ({"batch_size": 8}, "batch_size: not a setting of the search space; expected one of: train.rank"),
        ({"alpha": 8}, "train.alpha: follows from 2 * train.rank; set train.rank instead"),
        ({"rank": 0}, "train.rank: found 0: input should be greater than or equal to 1"),
        ({"rank": "high"}, "train.rank: found high: input should be a valid integer"),
        ({"learning_rate": float("nan")}, "train.learning_rate: found"),
        ({"rank": None}, "train.rank: found"),
        ({"rank": 4}, "--clone 0: trial 0 has these values already (train.rank 4"),
        ({"rank": 5}, f"--clone 0: a clone of trial 0, which {ACTOR} requested, has these values already"),
    ],
)
def test_impossible_clones_are_refused(opened: Any, changes: dict[str, Any], says: str) -> None:
    search = opened(trials=3, **NO_PRUNER)
    search.begin()
    search.clone(0, rank=5)
    with pytest.raises((DataError, SettingsError)) as refused:
        search.clone(0, **changes)
    assert says in str(refused.value)
    assert len(search.store.requests()) == 1


def test_a_released_trial_ends_in_the_call(opened: Any, layout: ProjectLayout) -> None:
    """No worker runs the trial, so the request itself ends it, and trains nothing."""
    search = opened(trials=2, **NO_PRUNER)
    tiny_project.save(layout, search.scheduler.settings)
    first, second = search.begin(), search.begin()
    search.store.release(first.number, search.scheduler.worker)
    stopped = stage.control_trial(Project(layout.root), "stop", first.number)
    assert (stopped.trial.state, stopped.trial.cause, stopped.trial.cost.steps) == ("pruned", "stopped", 0)
    assert stopped.trial.reason.startswith("stopped by ")
    for _ in range(2):
        running = stage.control_trial(Project(layout.root), "pause", second.number)
        assert (running.trial.state, running.trial.decision) == ("running", "paused")
    assert len(search.store.requests()) == 2
    with pytest.raises(SettingsError, match="expected them for `clone` only"):
        stage.control_trial(Project(layout.root), "pause", second.number, {"train.rank": 3})


def test_a_trial_of_another_machine_is_not_ended_here(opened: Any, layout: ProjectLayout) -> None:
    """Its cost is in its run directory, which only that machine may have."""
    search = opened(trials=2, **NO_PRUNER)
    tiny_project.save(layout, search.scheduler.settings)
    search.scheduler.worker = replace(search.scheduler.worker, host="elsewhere", boot="another")
    trial = search.begin()
    search.store.release(trial.number, search.scheduler.worker)
    stopped = stage.control_trial(Project(layout.root), "stop", trial.number)
    assert (stopped.trial.state, stopped.trial.decision) == ("running", "stopped")


KILLED = """
import os, signal, sys
from ratchet.cli.main import main
from ratchet.tuning.study import TrialStore
add = TrialStore.add_request
def killed(*arguments):
    if sys.argv[1] == "after":
        add(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
TrialStore.add_request = killed
main(sys.argv[2:])
"""


@pytest.mark.long
@pytest.mark.parametrize(("moment", "count"), [("before", 0), ("after", 1)])
def test_a_killed_process_leaves_a_request_or_nothing(
    opened: Any, layout: ProjectLayout, moment: str, count: int
) -> None:
    search = opened(trials=2, **NO_PRUNER)
    tiny_project.save(layout, search.scheduler.settings)
    search.begin()
    arguments = ["--project", str(layout.root), "sweep", "--clone", "0", "--set", "rank=7"]
    killed = subprocess.run([sys.executable, "-c", KILLED, moment, *arguments], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(search.store.requests()) == count
    again = tiny_project.ratchet(layout, "sweep", "--clone", "0", "--set", "rank=7")
    assert again.returncode == (0 if count == 0 else 2), again.stderr  # 2: it was requested before
    assert [request.values["train.rank"] for request in search.store.requests()] == [7]
    clone = search.begin()
    search.store.release(clone.number, search.scheduler.worker)  # its worker is gone: another one takes it over
    assert search.begin().number == clone.number
    assert search.begin().request is None


# What samplers and pruners learn.

SPACE = space_of(RANK, RATE)


@pytest.mark.parametrize("kind", ["tpe", "gp", "cmaes"])
def test_a_trial_that_a_person_has_ended_is_no_evidence_for_the_sampler(kind: Any) -> None:
    sampler = SamplerSettings(kind=kind, n_startup_trials=2)
    values = [drawn(SPACE, number) for number in range(9)]

    def propose_after(state: str, **fields: Any) -> dict[str, Any] | None:
        history = [trial(number, values[number], curve={10: 1.0 + number}) for number in range(8)]
        history.insert(4, trial(4, values[8], state, curve={10: 0.1}, **fields))
        history = [one.model_copy(update={"number": number}) for number, one in enumerate(history)]
        return propose(SPACE, sampler, LOSS, history, 9, partial(tried, history))

    assert propose_after("pruned", cause="stopped") == propose_after("failed")  # a failed trial is no evidence either
    if kind != "tpe":  # TPE has the same best trials with it and without it
        assert propose_after("pruned", cause="stopped") != propose_after("pruned")
    history = [trial(0, values[0], "pruned", curve={10: 1.0}), trial(1, values[1])]
    assert len(build_in_memory_study(SPACE, LOSS, history, "tpe").trials) == 2
    history[0] = history[0].model_copy(update={"cause": "stopped"})
    assert len(build_in_memory_study(SPACE, LOSS, history, "tpe").trials) == 1


def test_a_resumed_training_is_running_for_the_samplers() -> None:
    paused = trial(0, drawn(SPACE, 0), "pruned", curve={10: 1.0}, cause="paused")
    running = trial(1, drawn(SPACE, 0), "running", continues=0)
    [known] = build_in_memory_study(SPACE, LOSS, [paused, running], "tpe").trials
    assert known.state.name == "RUNNING"


def test_a_clone_is_an_observation_but_none_of_the_first_trials_of_the_sampler() -> None:
    sampler = SamplerSettings(kind="tpe", n_startup_trials=3)
    request = TrialRequest(action="clone", study="sweep", trial=0, by=ACTOR, at=1.0)
    history = [trial(number, drawn(SPACE, number)) for number in range(2)]
    history.append(trial(2, {**drawn(SPACE, 2), "train.learning_rate": 5.0}, request=request))
    found = [propose(SPACE, sampler, LOSS, history, 3, partial(tried, history), {})]
    study = build_in_memory_study(SPACE, LOSS, history, "tpe")
    assert len(study.trials) == 2  # Optuna cannot represent a value outside of the range
    history[2] = trial(2, drawn(SPACE, 2), request=request)
    assert len(build_in_memory_study(SPACE, LOSS, history, "tpe").trials) == 3
    found.append(propose(SPACE, sampler, LOSS, history, 3, partial(tried, history), {}))
    assert found[0] == found[1]  # both are random, because only two of the three first trials have begun
    history = [trial(number, drawn(SPACE, number)) for number in range(3)]
    model = propose(SPACE, sampler, LOSS, history, 4, partial(tried, history), {})
    outside = trial(3, {**drawn(SPACE, 3), "train.learning_rate": 5.0}, request=request)
    assert propose(SPACE, sampler, LOSS, [*history, outside], 4, partial(tried, history), {}) == model


def test_freeze_thaw_keeps_the_curve_of_a_stopped_training_and_never_continues_it() -> None:
    def search(**fields: Any) -> FreezeThawSearch:
        history = [
            trial(number, drawn(SPACE, number), "pruned", curve={100: 1.0 + 0.1 * number}) for number in range(4)
        ]
        history[0] = history[0].model_copy(update=fields)
        return FreezeThawSearch(
            SPACE, SamplerSettings(n_startup_trials=4), history, 1000, partial(tried, history), may_begin=False,
            missing_trainings=1,
        )  # fmt: skip

    free, held = search(), search(decision="stopped")
    first, second = free.choose(), held.choose()
    assert isinstance(first, Continuation)
    assert first.number == 0
    assert isinstance(second, Continuation)
    assert second.number != 0
    assert held._curves == free._curves
    assert held._best > free._best  # a loss that no training can reach any more need not be improved


def test_successive_halving_ranks_a_stopped_training_by_its_losses_and_never_promotes_it() -> None:
    asha = PrunerSettings(kind="asha", min_resource_fraction=0.25, reduction_factor=3)
    history = [trial(number, drawn(SPACE, number), "pruned", curve={250: 1.0 + number}) for number in range(6)]
    assert find_promotable(asha, history, 1000) == 0
    assert find_most_promising(history) == 0
    history[0] = history[0].model_copy(update={"decision": "stopped"})
    assert find_promotable(asha, history, 1000) == 1  # the second of six
    assert find_most_promising(history) == 1
    report = sweep_example.report(0).model_copy(update={"trials": tuple(history)})
    assert compute_savings(report).pruned.trials == 6  # the pruner ended the first one, before a person did
    trials = (history[0].model_copy(update={"cause": "stopped"}), *history[1:])
    assert compute_savings(report.model_copy(update={"trials": trials})).pruned.trials == 5
