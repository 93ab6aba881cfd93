"""Tests the next step of a worker, with a real trial store in a real project. Tests set the results of trials."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import journaled
import tiny_project
import tiny_sweep
from ratchet.config.settings import Settings
from ratchet.config.sweep import FinalistSettings, ObjectiveSettings, PrunerSettings, SamplerSettings, SweepParameter
from ratchet.console.sweep_table import count_finished
from ratchet.errors import InterruptedRunError
from ratchet.runs.device_lock import DeviceLock
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import TrainingCost, Trial
from ratchet.storage.records.training import TrainReport
from ratchet.tuning import final_round
from ratchet.tuning.report import build_report
from ratchet.tuning.scheduler import FinalRoundScheduler, TrialScheduler, open_final_store
from ratchet.tuning.study_session import StudySession
from ratchet.tuning.trial import TrialTask

RANDOM = SamplerSettings(kind="random")
NEVER = PrunerSettings(kind="none")
ASHA = PrunerSettings(kind="asha", min_resource_fraction=0.25, reduction_factor=3)  # rungs at 0.25 and 0.75
QUARTERS = (0.25, 0.5, 0.75)
FOUR_POINTS = {
    "train.rank": SweepParameter(choices=(2, 4)),
    "train.learning_rate": SweepParameter(choices=(0.001, 0.01)),
}
LEASE_S = 3600.0

Begin = Callable[..., TrialScheduler]


@pytest.fixture
def copied(tmp_path: Path) -> ProjectLayout:
    return tiny_project.prepared(tmp_path / "a project", tiny_sweep.settings())


@pytest.fixture
def begin(copied: ProjectLayout) -> Iterator[Begin]:
    """Return a function that opens the study of the project, with these settings of the sweep."""
    with ExitStack() as stack:

        def opened(fork: bool = False, train: Mapping[str, Any] | None = None, **sweep: Any) -> TrialScheduler:
            settings = _settings(train or {}, {"sampler": RANDOM, **sweep})
            return tiny_sweep.open_scheduler(stack, copied, settings, fork)[0]

        yield opened


def _settings(train: Mapping[str, Any], sweep: Mapping[str, Any]) -> Settings:
    wanted = tiny_sweep.settings(**sweep)
    machine = wanted.machine.model_copy(update={"lease_timeout_s": LEASE_S})
    return wanted.model_copy(update={"machine": machine, "train": wanted.train.model_copy(update=train)})


def work(search: TrialScheduler) -> TrialTask:
    """Return the next trial; the test fails if there is none."""
    found = search.next()
    assert isinstance(found, TrialTask), found
    return found


def curve(search: TrialScheduler, losses: Sequence[float]) -> dict[int, float]:
    """Return the losses by row, at the quarters of the longest training."""
    return {math.ceil(share * search.longest_rows): loss for share, loss in zip(QUARTERS, losses, strict=False)}


def end(search: TrialScheduler, given: TrialTask, state: str, losses: Sequence[float] = (), **fields: Any) -> Trial:
    """End a trial with these losses at the quarters; return its record in the study."""
    if state == "complete":
        fields = {"objectives": (losses[-1],), **fields}
    told = {"state": state, "curve": curve(search, losses), "ended": time.time(), **fields}
    search.store.finish(given.trial.number, given.trial.model_copy(update=told), search.worker)
    return search.store.trials()[given.trial.number]


def judged(search: TrialScheduler, given: TrialTask, *losses: float) -> str | None:
    """Return the pruner's reason to end the trial after validations with these losses, or None."""
    assert given.decide_pruning is not None
    return given.decide_pruning(given.trial.model_copy(update={"curve": curve(search, losses)}))


def left(search: TrialScheduler, *losses: float) -> list[Trial]:
    """Start new trials, each pruned with one of these losses at the first rung."""
    found = []
    for loss in losses:
        given = work(search)
        assert given.trial.continues is None
        found.append(end(search, given, "pruned", [loss]))
    return found


def test_answers_are_scored_only_while_no_group_trains(begin: Begin, copied: ProjectLayout, tmp_path: Path) -> None:
    lock = DeviceLock(tmp_path)

    def stop_waiting() -> None:
        assert lock.has_queue()
        raise InterruptedRunError("stopped on request")

    search = begin(objectives=(ObjectiveSettings(metric="exact_match"),))
    search.device_lock, search.check_stop = lock, stop_waiting
    task = work(search)
    paths = RunPaths(copied.runs / str(task.trial.run_id))
    journaled.seal_result(paths)
    with DeviceLock(tmp_path).hold_shared(), pytest.raises(InterruptedRunError, match="stopped on request"):
        task.compute_objectives(TrainReport.load(paths.result / "train.json"), TrainingCost())


# First trials, and their number


def test_the_first_trial_has_the_values_of_the_project_and_is_the_run_of_its_settings(begin: Begin) -> None:
    search = begin()
    first = work(search)
    assert first.trial.values == {"train.rank": 4, "train.alpha": 8, "train.learning_rate": 0.01}
    assert first.settings.train == search.settings.train
    assert first.rows_per_step == first.settings.train.batch_size
    identity = search.store.identity
    digests = {"data_digest": identity["data"], "base_digest": identity["base"]}
    assert first.trial.run_id == RunSpec.model_validate({**digests, "train": first.settings.train}).run_id
    assert search.store.trials() == [first.trial]
    assert work(search).trial.values != first.trial.values


def test_no_more_trials_begin_than_the_budget_has(begin: Begin) -> None:
    search = begin(trials=4, pruner=NEVER)
    given = [work(search) for _ in range(4)]
    assert len({one.trial.run_id for one in given}) == 4
    assert search.next() == "wait"
    end(search, given[0], "failed", cause="bug", reason="it broke")  # a failure does not raise the number of trials
    end(search, given[1], "infeasible", constraints={"memory": 0.5}, cause="too_large", reason="9 GiB")
    end(search, given[2], "complete", [2.0, 1.0])
    assert search.next() == "wait"
    end(search, given[3], "complete", [2.0, 1.5])
    assert search.next() == "over"
    assert len(search.store.trials()) == 4


def test_those_of_a_fork_come_on_top(begin: Begin) -> None:
    before = begin(trials=2, pruner=NEVER)
    for loss in (1.0, 2.0):
        end(before, work(before), "complete", [loss])
    assert before.next() == "over"
    after = begin(fork=True, trials=2, pruner=NEVER, sampler=SamplerSettings(kind="random", seed=1))
    assert after.store.carried == 2
    for loss in (3.0, 4.0):
        end(after, work(after), "complete", [loss])
    assert after.next() == "over"
    assert len({trial.run_id for trial in after.store.trials()}) == 4


def test_a_fork_plans_a_training_that_was_continued_once(begin: Begin) -> None:
    before = begin(trials=3, pruner=ASHA, finalists=FinalistSettings(top_k=1))
    left(before, 1.0, 2.0, 3.0)
    continued = work(before)
    assert continued.trial.continues == 0
    end(before, continued, "complete", [1.0, 0.9, 0.8, 0.7])
    after = begin(fork=True, trials=2, pruner=NEVER, sampler=SamplerSettings(kind="random", seed=1))
    assert after.store.carried == 4
    for loss in (3.0, 4.0):
        end(after, work(after), "complete", [loss])
    report = build_report(after.store, after.settings, after.space, after.store.identity, with_importances=False)
    assert count_finished(report) == report.planned_trials == 5
    fewer = after.settings.model_copy(update={"sweep": after.settings.sweep.model_copy(update={"trials": 1})})
    report = build_report(after.store, fewer, after.space, after.store.identity, with_importances=False)
    assert count_finished(report) == report.planned_trials == 5


def test_a_released_trial_is_taken_over_before_anything_else(begin: Begin) -> None:
    search = begin(trials=3, pruner=NEVER)
    work(search)
    given = work(search)
    search.store.release(given.trial.number, search.worker)
    again = work(search)
    assert (again.trial.number, again.trial.values) == (1, given.trial.values)
    assert len(again.trial.executions) == 2
    assert work(search).trial.number == 2


# Promotion


def test_a_promoted_trial_is_continued_before_anything_new_is_tried(begin: Begin) -> None:
    search = begin(trials=8, pruner=ASHA)
    first, best, _ = left(search, 3.0, 2.0, 4.0)
    given = work(search)
    assert given.trial.continues == best.number
    assert (given.trial.values, given.trial.run_id) == (best.values, best.run_id)
    assert final_round.count_trials(search.store.trials()) == 3
    assert work(search).trial.continues is None  # the same trial is not promoted twice
    assert first.state == "pruned"


@pytest.mark.parametrize("trials", [8, 3], ids=["more may begin", "no further may begin"])
def test_a_promoted_one_is_judged_at_the_next_rung_and_not_again_at_its_own(begin: Begin, trials: int) -> None:
    """The promotion applies to the next rung only, not to all later ones."""
    search = begin(trials=trials, pruner=ASHA)
    left(search, 3.0, 2.0, 4.0)
    given = work(search)
    assert given.trial.continues == 1
    assert judged(search, given, 2.0) is None
    assert judged(search, given, 2.0, 1.9) is None
    reason = judged(search, given, 2.0, 1.9, 1.8)
    assert reason is not None
    assert "is number 1 of 1; asha continues one in 3" in reason


def test_the_curves_of_others_are_looked_at_when_it_is_judged(begin: Begin) -> None:
    search = begin(trials=8, pruner=ASHA)
    left(search, 3.0, 4.0)
    given = work(search)
    other = work(search)
    assert judged(search, given, 2.0) is None  # the best of three
    end(search, other, "complete", [1.0, 0.9, 0.8])
    assert judged(search, given, 2.0) is not None


# Continuation when no new trial is left


def test_at_the_end_the_most_promising_are_continued_until_there_are_finalists(begin: Begin) -> None:
    search = begin(trials=4, pruner=ASHA, finalists=FinalistSettings(top_k=2))
    left(search, 3.0, 2.0, 4.0)
    end(search, work(search), "pruned", [2.0, 1.9, 1.8])  # trial 3 continues 1, and is pruned at the next rung
    left(search, 5.0)
    farthest, next_best = work(search), work(search)
    assert (farthest.trial.continues, next_best.trial.continues) == (3, 0)
    assert farthest.trial.run_id == search.store.trials()[1].run_id
    assert search.next() == "wait"  # two trials are running
    end(search, farthest, "failed", cause="bug", reason="it broke")
    instead = work(search)
    assert instead.trial.continues == 2  # not the trial whose continuation failed
    end(search, next_best, "complete", [3.0, 2.0, 1.0])
    assert search.next() == "wait"
    end(search, instead, "complete", [4.0, 3.0, 2.0])
    assert search.next() == "over"
    assert sum(trial.state == "complete" for trial in search.store.trials()) == 2


@pytest.mark.parametrize("top", [0, 1])
def test_one_is_completed_by_any_worker_even_where_no_finals_are_wanted(begin: Begin, top: int) -> None:
    search = begin(trials=2, pruner=ASHA, finalists=FinalistSettings(top_k=top))
    left(search, 3.0, 2.0)
    given = work(search)
    assert given.trial.continues == 1
    assert judged(search, given, 2.0, 9.0, 9.0) is None
    search.store.release(given.trial.number, search.worker)
    other = begin(trials=2, pruner=ASHA, finalists=FinalistSettings(top_k=top))
    again = work(other)
    assert (again.trial.number, again.trial.continues) == (given.trial.number, 1)
    assert judged(other, again, 2.0, 9.0, 9.0) is None
    end(other, again, "complete", [2.0, 1.0])
    assert other.next() == "over"


def test_an_infinite_result_makes_no_winner(begin: Begin) -> None:
    search = begin(trials=2, pruner=ASHA)
    end(search, work(search), "complete", [9.0], objectives=(float("inf"),))
    left(search, 3.0)
    assert work(search).trial.continues == 1


def test_a_search_with_nothing_to_continue_is_over(begin: Begin) -> None:
    search = begin(trials=2, pruner=ASHA)
    for _ in range(2):
        end(search, work(search), "infeasible", constraints={"diverged": 1.0}, cause="diverged", reason="NaN")
    assert search.next() == "over"


# Limits


@pytest.mark.parametrize(
    ("limit", "cost"),
    [({"max_tokens": 1000}, TrainingCost(trained_tokens=400)), ({"max_hours": 1}, TrainingCost(train_seconds=1300.0))],
    ids=["tokens", "hours"],
)
def test_at_a_limit_nothing_is_promoted_and_one_is_completed(
    begin: Begin, limit: dict[str, Any], cost: TrainingCost
) -> None:
    search = begin(trials=8, pruner=ASHA, finalists=FinalistSettings(top_k=3), **limit)
    for loss in (3.0, 2.0, 4.0):
        end(search, work(search), "pruned", [loss], cost=cost)
    given = work(search)  # the rule promotes it; because of the limit it is continued to its end
    assert given.trial.continues == 1
    assert judged(search, given, 2.0, 9.0, 9.0) is None
    assert search.next() == "wait"
    end(search, given, "complete", [2.0, 1.0], cost=cost)
    assert search.next() == "over"


def test_at_a_limit_nothing_is_continued_when_one_is_complete(begin: Begin) -> None:
    search = begin(trials=8, pruner=ASHA, max_tokens=1000, finalists=FinalistSettings(top_k=3))
    end(search, work(search), "complete", [2.0, 1.0], cost=TrainingCost(trained_tokens=900))
    end(search, work(search), "pruned", [3.0], cost=TrainingCost(trained_tokens=99))
    under_way = work(search)
    assert under_way.trial.continues is None  # 999 of 1000 tokens are used
    end(search, under_way, "pruned", [4.0], cost=TrainingCost(trained_tokens=1))
    assert search.next() == "over"


# Freeze-thaw


THAW = {
    "trials": 4, "sampler": SamplerSettings(n_startup_trials=3), "finalists": FinalistSettings(top_k=2),
    "pruner": PrunerSettings(kind="freeze_thaw", min_resource_fraction=0.25),
}  # fmt: skip


def test_freeze_thaw_pauses_the_first_trials_and_continues_the_best(begin: Begin) -> None:
    search = begin(**THAW)
    for loss in (3.0, 1.0, 2.0):
        given = work(search)
        assert given.trial.continues is None
        reason = judged(search, given, loss)
        if given.trial.number < 2:
            assert reason == "the first trials are compared at this rung"
        end(search, given, "pruned", [loss])
    while (given := work(search)).trial.continues is None:
        end(search, given, "pruned", [2.5])
    assert given.trial.continues == 1
    assert judged(search, given, 1.0, 0.9) is None
    end(search, given, "complete", [1.0, 0.9, 0.8])
    rest = []
    while isinstance(found := search.next(), TrialTask):
        rest.append(found.trial)
        end(search, found, "complete", [2.0, 1.9, 1.8])
    assert found == "over"
    assert final_round.count_trials(search.store.trials()) == 4
    assert len(final_round.eligible_trials(search.store.trials())) >= 2
    assert len({trial.run_id for trial in search.store.trials()}) == 4


def test_freeze_thaw_completes_what_the_final_round_needs_and_a_rung_does_not_pause_it_again(begin: Begin) -> None:
    search = begin(**{**THAW, "trials": 3})
    left(search, 3.0, 1.0, 2.0)
    first = work(search)
    assert first.trial.continues == 1
    end(search, first, "complete", [1.0, 0.5, 0.4])
    second = work(search)
    assert second.trial.continues == 2
    assert judged(search, second, 2.0, 1.9) is None
    end(search, second, "complete", [2.0, 1.9, 1.8])
    assert search.next() == "over"


def test_after_the_last_token_freeze_thaw_completes_one_training(begin: Begin) -> None:
    search = begin(**THAW, max_tokens=1000)
    for loss in (3.0, 1.0):
        end(search, work(search), "pruned", [loss], cost=TrainingCost(trained_tokens=600))
    given = work(search)
    assert given.trial.continues == 1
    assert judged(search, given, 1.0, 0.9) is None
    end(search, given, "complete", [1.0, 0.9], cost=TrainingCost(trained_tokens=1200))
    assert search.next() == "over"


def test_two_workers_of_freeze_thaw_begin_different_trials(begin: Begin) -> None:
    search = begin(**{**THAW, "trials": 8})
    left(search, 3.0, 1.0, 2.0)
    given = [work(search) for _ in range(4)]
    assert len({one.trial.run_id for one in given}) == 4
    continued = [one.trial.continues for one in given if one.trial.continues is not None]
    assert len(set(continued)) == len(continued)


# An exhausted search space


@pytest.mark.parametrize("kind", ["random", "grid", "tpe"])
def test_a_finite_space_is_used_up(begin: Begin, kind: str) -> None:
    search = begin(
        trials=9,
        pruner=NEVER,
        space=FOUR_POINTS,
        sampler=SamplerSettings.model_validate({"kind": kind, "n_startup_trials": 2}),
    )
    for number in range(4):
        end(search, work(search), "complete", [1.0 + number])
    assert search.next() == "over"
    tried = {(trial.values["train.rank"], trial.values["train.learning_rate"]) for trial in search.store.trials()}
    assert tried == {(rank, rate) for rank in (2, 4) for rate in (0.001, 0.01)}


def test_then_the_most_promising_is_continued_to_its_end(begin: Begin) -> None:
    search = begin(
        trials=9, pruner=PrunerSettings(kind="asha", min_resource_fraction=0.09, reduction_factor=8), space=FOUR_POINTS
    )  # rungs at 0.09 and 0.72
    left(search, 3.0, 2.0, 4.0, 5.0)
    given = work(search)
    assert given.trial.continues == 1
    assert judged(search, given, 2.0, 9.0, 9.0) is None
    end(search, given, "complete", [2.0, 1.0])
    assert search.next() == "over"


# Values that the settings refuse


def test_values_that_settings_refuse_are_infeasible_without_a_run(begin: Begin) -> None:
    space = {
        "train.adapter": SweepParameter(choices=("adalora", "lora")),
        "train.rank": SweepParameter(choices=(2, 16)),
    }
    search = begin(trials=4, pruner=NEVER, space=space, sampler=SamplerSettings(kind="grid"))
    assert work(search).trial.values == {"train.adapter": "adalora", "train.rank": 16}
    refused = search.store.trials()[0]
    assert refused.values == {"train.adapter": "adalora", "train.rank": 2}
    assert (refused.state, refused.cause, refused.run_id) == ("infeasible", "data", None)
    assert refused.constraints == {"settings": 1.0}
    assert "adalora.target_rank: found 8; expected less than the initial rank (2)" in refused.reason
    assert [work(search).trial.number for _ in range(2)] == [2, 3]
    assert search.next() == "wait"
    # Refused values inform the sampler and count as a trial.
    assert final_round.count_trials(search.store.trials()) == 4


@pytest.mark.parametrize("kind", ["grid", "random", "tpe"])
def test_values_that_only_the_rows_refuse_are_tried_once(begin: Begin, kind: str) -> None:
    space = {"train.pack_tokens": SweepParameter(choices=(2, 128, 256))}
    sampler = SamplerSettings.model_validate({"kind": kind, "n_startup_trials": 1})
    search = begin(train={"batching": "packed"}, trials=9, pruner=NEVER, space=space, sampler=sampler)
    while isinstance(found := search.next(), TrialTask):
        assert found.rows_per_step > found.settings.train.batch_size  # a pack holds several rows
        end(search, found, "complete", [1.0])
    told = {trial.values["train.pack_tokens"]: trial for trial in search.store.trials()}
    assert len(told) == len(search.store.trials()) == 3
    assert {tokens: trial.state for tokens, trial in told.items()} == {
        2: "infeasible", 128: "complete", 256: "complete",
    }  # fmt: skip
    assert told[2].run_id is None
    assert "train.pack_tokens: found 2, but row" in told[2].reason


def test_a_space_in_which_nothing_fits_stops_with_the_diagnosis(begin: Begin) -> None:
    ranges = {"train.pack_tokens": SweepParameter(low=1, high=8)}
    search = begin(train={"batching": "packed"}, trials=20, space=ranges, max_repeated_failures=2)
    assert search.next() == "over"
    assert len(search.store.trials()) == final_round.ALL_INFEASIBLE * 2
    assert "none of 6 trials was feasible" in search.store.notes()[final_round.STOPPED]


# Stopped studies


def failed(search: TrialScheduler) -> Trial:
    return end(search, work(search), "failed", cause="bug", reason="worker died at step 3")


def test_a_study_stopped_by_failures_continues_when_it_is_started_again(begin: Begin) -> None:
    search = begin(trials=20, pruner=ASHA, max_repeated_failures=2)
    left(search, 3.0, 2.0, 4.0)
    under_way = work(search)
    assert under_way.trial.continues == 1
    failed(search)
    failed(search)
    assert search.next() == "wait"
    assert "2 trials failed for the same reason" in search.store.notes()[final_round.STOPPED]
    end(search, under_way, "pruned", [2.0, 1.9, 1.8])
    assert search.next() == "over"  # nothing is continued to its end either, because trials fail
    assert "2 trials failed" in _desk(search).resume_after_failures()
    first = work(search)  # after a restart, failed trials run first
    assert (first.trial.number, first.trial.continues) == (6, 4)
    assert first.trial.run_id == search.store.trials()[4].run_id
    end(search, first, "complete", [9.0, 8.0, 7.0])
    assert failed(search).continues == 5
    # Trial 5 is not tried a third time; the restart forgave two of three failures.
    assert failed(search).continues is None
    assert search.next() == "over"
    assert "trials 7, 8" in search.store.notes()[final_round.STOPPED]


def test_one_that_failed_is_judged_as_ever_when_it_is_tried_again(begin: Begin) -> None:
    search = begin(trials=2, pruner=ASHA, max_repeated_failures=2)
    failed(search)
    failed(search)
    assert search.next() == "over"
    _desk(search).resume_after_failures()
    again = work(search)
    assert again.trial.continues == 0  # although both trials of the budget have started
    assert judged(search, again, 2.0) is not None
    end(search, again, "pruned", [2.0])
    end(search, work(search), "pruned", [1.0])
    last = work(search)
    assert last.trial.continues == 3
    assert judged(search, last, 1.0, 9.0, 9.0) is None


def test_a_single_failure_is_tried_once_more_by_the_repeated_command(begin: Begin) -> None:
    search = begin(trials=2, pruner=NEVER, finalists=FinalistSettings(top_k=1), max_repeated_failures=2)
    end(search, work(search), "complete", [1.0])
    failed(search)
    assert search.next() == "over"
    assert _desk(search).resume_after_failures() == ""
    assert failed(search).continues == 1
    assert search.next() == "over"
    _desk(search).resume_after_failures()
    assert search.next() == "over", "it failed twice for the same reason"
    assert not search.store.notes().get(final_round.STOPPED)


def test_failed_trials_do_not_hide_that_no_trial_is_feasible(begin: Begin) -> None:
    search = begin(trials=9, pruner=NEVER, max_repeated_failures=2)
    failed(search)
    for _ in range(6):
        end(search, work(search), "infeasible", constraints={"memory": 1.0}, cause="oom", reason="too large")
    assert search.next() == "over"
    assert "none of 6 trials was feasible" in search.store.notes()[final_round.STOPPED]


def test_validations_that_a_worker_reports_again_prune_nothing(begin: Begin) -> None:
    search = begin(trials=20, pruner=ASHA)
    left(search, 3.0, 2.9)
    first = work(search)

    def report(given: TrialTask, *losses: float) -> str | None:
        for rows, loss in curve(search, losses).items():
            search.store.report(given.trial.number, rows, loss)
        return judged(search, given, *losses)

    assert report(first, 2.0) is None
    assert report(first, 2.0, 1.5) is None
    for losses in ([1.9, 1.2, 1.1], [1.8, 1.2, 1.1]):  # of another worker
        end(search, work(search), "complete", losses)
    search.store.release(first.trial.number, search.worker)
    again = work(search)
    assert again.trial.number == first.trial.number
    assert report(again, 2.0) is None, "it was not pruned when this validation was new"


def _open_finals(search: TrialScheduler) -> FinalRoundScheduler:
    seeds = open_final_store(search.store, search.store.identity, search.settings, search.space)
    return FinalRoundScheduler(
        search.layout, search.settings, search.store, seeds, search.worker, search.server, lambda: None
    )


def test_a_failed_training_of_the_final_round_decides_nothing_until_it_fails_again(begin: Begin) -> None:
    search = begin(trials=2, pruner=NEVER, finalists=FinalistSettings(top_k=2, seeds=2))
    for loss in (1.0, 2.0):
        end(search, work(search), "complete", [loss])
    assert search.next() == "over"
    finals = _open_finals(search)

    def fail() -> int:
        task = finals.next()
        assert isinstance(task, TrialTask)
        changes = {"state": "failed", "cause": "storage", "reason": "No space left on device", "ended": 1.0}
        finals.seeds.finish(task.trial.number, task.trial.model_copy(update=changes), finals.worker)
        return int(task.trial.values["train.seed"])

    seed = fail()
    assert finals.next() == "over"
    assert "final round failed (storage): No space left" in search.store.notes()[final_round.STOPPED]
    assert "final round failed" in _desk(search).resume_after_failures()
    assert final_round.FORGIVEN not in search.store.notes(), "failures of the search still count"
    finals = _open_finals(search)
    assert fail() == seed
    assert finals.next() != "over", "the other finalist is scored"
    assert not search.store.notes()[final_round.STOPPED]


def test_a_winner_is_out_of_date_when_the_search_has_gone_on(begin: Begin) -> None:
    search = begin(trials=2, pruner=NEVER, finalists=FinalistSettings(top_k=1))
    for loss in (1.0, 2.0):
        end(search, work(search), "complete", [loss])
    assert _open_finals(search).next() == "over"
    assert _desk(search).report(False).winner == 0
    search = begin(trials=3, pruner=NEVER, finalists=FinalistSettings(top_k=1))
    end(search, work(search), "complete", [0.1])
    report = _desk(search).report(False)
    assert (report.winner, report.final_round) == (None, None)
    assert _open_finals(search).next() == "over"
    assert _desk(search).report(False).winner == 2


def test_at_a_limit_nothing_that_failed_is_tried_again(begin: Begin) -> None:
    search = begin(trials=9, pruner=NEVER, max_repeated_failures=2, max_tokens=100)
    for tokens in (60, 60):
        end(search, work(search), "failed", cause="bug", reason="it broke", cost=TrainingCost(trained_tokens=tokens))
    assert search.next() == "over"
    _desk(search).resume_after_failures()
    assert search.next() == "over"


def test_the_forgiven_of_a_fork_are_counted_from_its_own(begin: Begin) -> None:
    before = begin(trials=2, pruner=NEVER)
    for loss in (1.0, 2.0):
        end(before, work(before), "complete", [loss])
    search = begin(
        fork=True, trials=9, pruner=NEVER, sampler=SamplerSettings(kind="random", seed=1), max_repeated_failures=2
    )
    failed(search)
    failed(search)
    assert search.next() == "over"
    _desk(search).resume_after_failures()
    assert [failed(search).continues for _ in range(2)] == [2, 3]
    assert search.next() == "over"
    assert "trials 4, 5" in search.store.notes()[final_round.STOPPED]


def test_a_running_trial_is_taken_over_in_a_stopped_study(begin: Begin) -> None:
    search = begin(trials=20, pruner=NEVER, max_repeated_failures=2)
    under_way = work(search)
    failed(search)
    failed(search)
    assert search.next() == "wait"
    search.store.release(under_way.trial.number, search.worker)
    assert work(search).trial.number == under_way.trial.number


def _desk(search: TrialScheduler) -> StudySession:
    """Build the session that a repeated command has."""
    return StudySession(
        search.layout, search.settings, search.store.storage, search.store, search.space,
        dict(search.store.identity),
    )  # fmt: skip
