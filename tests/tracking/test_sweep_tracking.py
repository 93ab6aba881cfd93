"""Tests a sweep in MLflow: one parent, one child per training, correct statuses after any interruption."""

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import sweep_example
from ratchet.config.settings import Settings
from ratchet.errors import TrackingError
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import (
    Finalist,
    FinalRound,
    ParameterAxis,
    SweepObjective,
    SweepReport,
    Trial,
    TrialExecution,
)
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.sweeps import MlflowSweepTracker
from ratchet.tuning import tracking_sync

NAME = Settings().promote.model_name
RUNS = [f"{number:012x}" for number in range(1, 50)]


def trial(number: int, state: Any, run: str | None = "", **more: Any) -> Trial:
    """Build a trial; by default it has its own run."""
    ended = None if state == "running" else 200.0 + number
    run_id = RUNS[number] if run == "" else run
    values = {"train.rank": 4 + number, "train.learning_rate": 0.001, "train.target_modules": ("q", "v")}
    fields = {
        "started": 100.0 + number,
        "ended": ended,
        "executions": (TrialExecution(worker="node/1", started=0, last_seen=0),),
    }
    return Trial(number=number, values=values, run_id=run_id, state=state, **(fields | more))


def report(*trials: Trial, study: str = "sweep", **more: Any) -> SweepReport:
    complete = [t for t in trials if t.state == "complete"]
    best = min(complete, key=lambda t: t.objectives, default=None)
    fields: dict[str, Any] = {
        "study": study, "storage": "journal", "sampler": "TPE", "pruner": "asha", "versions": {"optuna": "5.0.0"},
        "objectives": (SweepObjective(metric="validation_loss", direction="minimize"),), "data_digest": "d" * 64,
        "base_digest": "b" * 64, "planned_trials": 20, "best": () if best is None else (best.number,),
        "axes": (ParameterAxis(name="train.rank", kind="int", low=4, high=64, log=True),
                 ParameterAxis(name="train.alpha", kind="tie", tie="2 * train.rank")),
    }  # fmt: skip
    return SweepReport(trials=trials, **(fields | more))


ALL_STATES = report(
    trial(0, "complete", objectives=(1.5,), curve={10: 2.0, 20: 1.5}, checkpoints={20: "c" * 64}),
    trial(1, "pruned", reason="rank 5 of 9", curve={10: 3.0}),
    trial(2, "infeasible", cause="too_large", reason="needs 9 GiB", constraints={"memory": 0.5}),
    trial(3, "failed", cause="bug", reason="IndexError"),
    trial(4, "infeasible", run=None, cause="data", reason="rank above 8"),
    trial(5, "running", curve={10: 2.5}),
    importances={"train.rank": 0.75},
)


def sweeps(layout: ProjectLayout, figures: Mapping[str, float] | None = None) -> MlflowSweepTracker:
    """Return a tracker as a new process has it, without remembered state."""
    return MlflowSweepTracker(MlflowTracker(layout, NAME), lambda _: figures or {})


def stored(layout: ProjectLayout) -> list[Any]:
    """Return every run of the experiment."""
    with MlflowTracker(layout, NAME).connected() as client:
        experiment = client.get_experiment_by_name(NAME).experiment_id
        return list(client.search_runs([experiment], order_by=["attributes.start_time ASC"]))


def parent(layout: ProjectLayout, study: str = "sweep") -> Any:
    wanted = {"ratchet.sweep": study, "ratchet.sweep_role": "parent"}
    (found,) = [run for run in stored(layout) if wanted.items() <= run.data.tags.items()]
    assert found.info.run_name == study
    return found


def children(layout: ProjectLayout, study: str = "sweep") -> dict[str, Any]:
    """Return the child runs of this study by name."""
    above = parent(layout, study).info.run_id
    found = [run for run in stored(layout) if run.data.tags.get("mlflow.parentRunId") == above]
    assert len({run.info.run_name for run in found}) == len(found)
    return {run.info.run_name: run for run in found}


def rows(layout: ProjectLayout, table: str) -> list[tuple[Any, ...]]:
    """Return all rows of a table in the database file, read without MLflow."""
    with closing(sqlite3.connect(layout.mlflow_database)) as connection:
        return sorted(connection.execute(f"select * from {table}"), key=repr)  # noqa: S608 (our names)


def everything(layout: ProjectLayout) -> dict[str, list[tuple[Any, ...]]]:
    return {table: rows(layout, table) for table in ("runs", "tags", "params", "metrics", "latest_metrics")}


def validation_curve(layout: ProjectLayout, run: Any) -> list[tuple[int, float]]:
    with MlflowTracker(layout, NAME).connected() as client:
        points = client.get_metric_history(run.info.run_id, "curve/validation_loss")
    return [(point.step, point.value) for point in points]


def test_child_and_parent_runs_hold_states_params_metrics_and_tags(tracked_project: ProjectLayout) -> None:
    sweeps(tracked_project, {"saved/tokens": 4200}).update(ALL_STATES)
    found = children(tracked_project)
    assert {name: (run.info.status, run.data.tags["ratchet.trial_state"]) for name, run in found.items()} == {
        "trial 0": ("FINISHED", "complete"),
        "trial 1": ("KILLED", "pruned"),
        "trial 2": ("FAILED", "infeasible"),
        "trial 3": ("FAILED", "failed"),
        "trial 4": ("FAILED", "infeasible"),
        "trial 5": ("RUNNING", "running"),
    }
    assert len(stored(tracked_project)) == len(found) + 1
    run_ids = [run.data.tags["ratchet.run_id"] for name, run in found.items() if name != "trial 4"]
    assert run_ids == [RUNS[number] for number in (0, 1, 2, 3, 5)]
    complete, refused = found["trial 0"], found["trial 4"]
    assert complete.data.metrics["trial/validation_loss"] == 1.5
    assert json.loads(complete.data.tags["ratchet.checkpoints"]) == {"20": "c" * 12}
    assert complete.data.params == {
        "train.rank": "4", "train.learning_rate": "0.001", "train.target_modules": "q,v"
    }  # fmt: skip
    assert (complete.info.start_time, complete.info.end_time) == (100_000, 200_000)
    assert found["trial 1"].data.tags["ratchet.trial_reason"] == "rank 5 of 9"
    assert found["trial 2"].data.tags["ratchet.trial_cause"] == "too_large"
    assert found["trial 5"].data.tags["ratchet.workers"] == "node/1"
    assert (refused.data.tags["ratchet.trial_key"], refused.data.params["train.rank"]) == ("sweep/4", "8")
    assert refused.data.tags["ratchet.trial_reason"] == "rank above 8"
    assert validation_curve(tracked_project, complete) == [(10, 2.0), (20, 1.5)]

    top = parent(tracked_project)
    assert "mlflow.parentRunId" not in top.data.tags
    assert (top.info.status, top.info.start_time) == ("RUNNING", 100_000)
    assert top.data.params["sampler"] == "TPE"
    assert top.data.params["space.train.rank"] == "4 to 64, log"
    assert top.data.params["space.train.alpha"] == "= 2 * train.rank"
    assert top.data.metrics == {
        "best/validation_loss": 1.5, "importance/train.rank": 0.75, "saved/tokens": 4200, "trials/running": 1,
        "trials/complete": 1, "trials/pruned": 1, "trials/infeasible": 2, "trials/failed": 1,
    }  # fmt: skip
    assert (top.data.tags["ratchet.best_run"], top.data.tags["ratchet.sweep_trials"]) == (RUNS[0], "6 of 20")


def test_repeated_update_changes_nothing_and_asks_mlflow_nothing(tracked_project: ProjectLayout) -> None:
    first = sweeps(tracked_project)
    first.update(ALL_STATES)
    before = everything(tracked_project)
    assert before["metrics"]
    for _ in range(2):
        other_process = sweeps(tracked_project)
        other_process.completed_trials("sweep")
        other_process.update(ALL_STATES)
    with first.tracking.connected() as client:
        client._tracking_client = None  # every request of this client fails from here
    first.update(ALL_STATES)
    assert everything(tracked_project) == before
    with pytest.raises(AttributeError):
        first.update(ALL_STATES.model_copy(update={"stopped": "news"}))


def test_a_continued_trial_is_one_run_with_the_newest_number(tracked_project: ProjectLayout) -> None:
    sweep = sweeps(tracked_project)
    pruned = trial(0, "pruned", reason="rank 5 of 9", curve={10: 3.0})
    sweep.update(report(pruned))
    assert children(tracked_project)["trial 0"].info.status == "KILLED"
    assert sweep.completed_trials("sweep") == {RUNS[0]: 0}
    going_on = trial(1, "running", run=RUNS[0], continues=0)
    sweep.update(report(pruned, going_on))
    (found,) = children(tracked_project).values()
    assert (found.info.run_name, found.info.status) == ("trial 1", "RUNNING")
    assert (found.data.tags["ratchet.trials"], found.data.tags["ratchet.trial_reason"]) == ("0", "")
    assert sweep.completed_trials("sweep") == {}
    over = trial(1, "complete", run=RUNS[0], continues=0, objectives=(2.0,), curve={10: 3.0, 20: 2.0})
    sweep.update(report(pruned, over))
    (found,) = children(tracked_project).values()
    assert (found.info.status, found.info.end_time) == ("FINISHED", 201_000)
    assert parent(tracked_project).data.metrics["trials/pruned"] == 0
    assert sweeps(tracked_project).completed_trials("sweep") == {RUNS[0]: 1}
    assert validation_curve(tracked_project, found) == [(10, 3.0), (20, 2.0)]


def test_a_run_that_was_finished_before_stays_finished_and_gets_a_parent(tracked_project: ProjectLayout) -> None:
    tracking = MlflowTracker(tracked_project, NAME)
    for number in range(3):
        run = tracking.find_or_create(RUNS[number], 5_000)
        with tracking.connected() as client:
            client.set_terminated(run.info.run_id, "FINISHED", 6_000)
    sweeps(tracked_project).update(report(trial(0, "pruned"), trial(1, "failed"), trial(2, "running")))
    found = children(tracked_project)
    assert [(run.info.status, run.info.end_time) for run in found.values()] == [("FINISHED", 6_000)] * 3
    assert found["trial 1"].data.tags["ratchet.trial_state"] == "failed"


def test_a_run_of_two_sweeps_is_a_child_of_the_later(tracked_project: ProjectLayout) -> None:
    for study in ("sweep", "sweep.2"):
        sweeps(tracked_project).update(report(trial(0, "complete", objectives=(1.5,)), study=study))
    assert children(tracked_project) == {}
    assert children(tracked_project, "sweep.2")["trial 0"].data.tags["ratchet.sweep"] == "sweep.2"


def test_a_run_whose_journal_is_not_sent_is_not_shown_as_over(tracked_project: ProjectLayout) -> None:
    sweep = sweeps(tracked_project)
    found = report(trial(0, "complete", objectives=(1.5,)), trial(1, "pruned"))
    sweep.update(found, pending=[RUNS[0]])
    child = children(tracked_project)["trial 0"]
    assert (child.info.status, "ratchet.trial_state" in child.data.tags) == ("RUNNING", False)
    assert sweep.completed_trials("sweep") == sweeps(tracked_project).completed_trials("sweep") == {RUNS[1]: 1}
    sweep.update(found)
    assert children(tracked_project)["trial 0"].info.status == "FINISHED"
    assert sweep.completed_trials("sweep") == {RUNS[0]: 0, RUNS[1]: 1}


def test_finish_and_going_on(tracked_project: ProjectLayout, tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "history.png"
    page.write_text("page")
    picture.write_text("picture")
    sweep = sweeps(tracked_project)
    sweep.update(ALL_STATES)
    news = {"winner": 0, "importances": {"train.rank": 0.5}, "stopped": "3 trials failed"}
    last = ALL_STATES.model_copy(update=news)
    sweep.finish(last, {"": [page], "plots": [picture]}, "FAILED")
    found = parent(tracked_project)
    assert (found.info.status, found.data.tags["ratchet.winner_run"]) == ("FAILED", RUNS[0])
    assert found.data.tags["ratchet.sweep_stopped"] == "3 trials failed"
    assert found.data.metrics["importance/train.rank"] == 0.5
    artifacts = tracked_project.artifacts / found.info.run_id / "artifacts"
    assert (artifacts / "page.html").read_text() == "page"
    assert (artifacts / "plots/history.png").read_text() == "picture"
    sweeps(tracked_project).update(ALL_STATES)
    assert parent(tracked_project).info.status == "RUNNING"


def test_the_end_is_told_even_when_no_file_can_be_stored(tracked_project: ProjectLayout) -> None:
    sweep = sweeps(tracked_project)
    with pytest.raises(TrackingError):
        sweep.finish(ALL_STATES, {"": [tracked_project.root / "not there"]}, "KILLED")
    assert parent(tracked_project).info.status == "KILLED"


def test_finalists_are_children_too(tracked_project: ProjectLayout) -> None:
    finalist = Finalist(
        number=0, values={"train.rank": 4}, run_ids=(RUNS[0], RUNS[30], RUNS[31]), means=(1.5, 1.6, 1.7), mean=1.6,
        cost=ALL_STATES.trials[0].cost,
    )  # fmt: skip
    finals = FinalRound(
        metric="accuracy", direction="maximize", rows=8, finalists=(finalist,), comparisons=(), winner=0,
        reason="better than all",
    )  # fmt: skip
    found = report(trial(0, "complete", objectives=(1.5,)), final_round=finals, winner=0)
    sweeps(tracked_project).update(found)
    named = children(tracked_project)
    assert sorted(named) == ["trial 0", "trial 0, seed 2", "trial 0, seed 3"]
    assert named["trial 0, seed 3"].data.metrics == {"finalist/accuracy": 1.7}
    assert sweeps(tracked_project).completed_trials("sweep") == dict.fromkeys((RUNS[0], RUNS[30], RUNS[31]), 0)


def test_only_the_reconciling_of_sweeps_ends_parents_of_killed_sweeps(tracked_project: ProjectLayout) -> None:
    for study in ("alive", "dead", "done"):
        sweep = sweeps(tracked_project)
        sweep.update(report(trial(0, "running", run=None), study=study))
        if study == "done":
            sweep.finish(report(study=study), {}, "FINISHED")
    assert MlflowTracker(tracked_project, NAME).reconcile(tracked_project.runs) == []
    assert parent(tracked_project, "dead").info.status == "RUNNING"
    notes = sweeps(tracked_project).reconcile(lambda study: study == "alive")
    assert [note.split(":")[0] for note in notes] == ["sweep dead"]
    statuses = {study: parent(tracked_project, study).info.status for study in ("alive", "dead", "done")}
    assert statuses == {"alive": "RUNNING", "dead": "KILLED", "done": "FINISHED"}
    assert sweeps(tracked_project).reconcile(lambda study: study == "alive") == []


class Dying:
    """An MLflow client that fails after `calls` requests, as if MLflow were down."""

    def __init__(self, client: Any, calls: int) -> None:
        self._client, self._calls = client, calls

    def __getattr__(self, name: str) -> Any:
        self._calls -= 1
        if self._calls < 0:
            raise OSError("MLflow is gone")
        return getattr(self._client, name)


def test_whenever_mlflow_dies_it_is_made_good(tracked_project: ProjectLayout) -> None:
    calls, failures = 0, 0
    while True:
        sweep = sweeps(tracked_project)
        with sweep.tracking.connected() as client:
            sweep.tracking.store._client = Dying(client, calls)
        try:
            sweep.update(ALL_STATES)
            break
        except TrackingError:
            failures, calls = failures + 1, calls + 1
        assert all(
            run.data.metrics["trial/validation_loss"] == 1.5
            for run in stored(tracked_project)
            if run.data.tags.get("ratchet.trial_state") == "complete"
        )
    assert failures > 10
    found = children(tracked_project)
    statuses = [found[f"trial {number}"].info.status for number in range(6)]
    assert statuses == ["FINISHED", "KILLED", "FAILED", "FAILED", "FAILED", "RUNNING"]
    assert len(stored(tracked_project)) == 7
    keys = [key for key, *_ in rows(tracked_project, "metrics")]
    assert len(keys) == len({(row[0], row[3], row[4]) for row in rows(tracked_project, "metrics")})


def test_one_child_that_cannot_be_shown_keeps_no_other_from_it(tracked_project: ProjectLayout) -> None:
    with closing(sqlite3.connect(tracked_project.mlflow_database)) as connection:
        connection.execute(
            "create trigger full before insert on params when new.value = '5' "
            "begin select raise(abort, 'disk is full'); end"
        )
        for _ in range(2):
            with pytest.raises(TrackingError, match="disk is full"):
                sweeps(tracked_project).update(ALL_STATES)
        assert len([run for run in children(tracked_project).values() if run.info.status != "RUNNING"]) == 4
        connection.execute("drop trigger full")
    sweeps(tracked_project).update(ALL_STATES)
    assert children(tracked_project)["trial 1"].info.status == "KILLED"


def test_what_was_deleted_by_hand_comes_back(tracked_project: ProjectLayout) -> None:
    sweep = sweeps(tracked_project)
    sweep.update(ALL_STATES)
    for run in (children(tracked_project)["trial 0"], parent(tracked_project)):
        with MlflowTracker(tracked_project, NAME).connected() as client:
            client.delete_run(run.info.run_id)
    changed = [t.model_copy(update={"reason": "looked at again"}) if t.number == 0 else t for t in ALL_STATES.trials]
    news = ALL_STATES.model_copy(update={"trials": tuple(changed), "stopped": "news"})
    with pytest.raises(TrackingError):
        sweep.update(news)
    sweep.update(news)
    assert children(tracked_project)["trial 0"].data.tags["ratchet.trial_reason"] == "looked at again"


def test_hostile_and_long_texts_are_stored(tracked_project: ProjectLayout) -> None:
    made = sweep_example.report(30)
    assert made.final_round is not None
    hostile = {"reason": sweep_example.HOSTILE, "values": {"train.target_modules": sweep_example.HOSTILE}}
    trials = tuple(t.model_copy(update=hostile) if t.state == "failed" else t for t in made.trials)
    sweeps(tracked_project).update(made.model_copy(update={"trials": trials, "stopped": sweep_example.HOSTILE}))
    expected = len({t.run_id or t.number for t in trials}) + sum(
        len(one.run_ids) - 1 for one in made.final_round.finalists
    )
    assert len(children(tracked_project)) == expected
    failed = [run for run in children(tracked_project).values() if run.data.tags["ratchet.trial_state"] == "failed"]
    assert "alert" in failed[0].data.tags["ratchet.trial_reason"]
    long = trial(0, "failed", reason="x" * 20_000, checkpoints=dict.fromkeys(range(1, 5000), "c" * 64))
    sweeps(tracked_project).update(report(long, study="long", stopped="y" * 20_000))
    child = children(tracked_project, "long")["trial 0"]
    assert child.data.tags["ratchet.trial_reason"] == "x" * tracking_sync.MAX_TEXT
    assert "4999" in json.loads(child.data.tags["ratchet.checkpoints"])


def show(root: Path, study: str) -> None:
    for state in ("running", "complete"):
        objectives = (1.0,) if state == "complete" else ()
        trials = [trial(n, state, objectives=objectives, run=RUNS[n] if n else None) for n in range(4)]
        sweeps(ProjectLayout(root)).update(report(*trials, study=study))


def test_processes_that_begin_together_make_everything_once(tracked_project: ProjectLayout, processes: Any) -> None:
    several = [processes.Process(target=show, args=(tracked_project.root, "sweep")) for _ in range(4)]
    for process in several:
        process.start()
    for process in several:
        process.join()
    assert [process.exitcode for process in several] == [0, 0, 0, 0]
    assert sorted(children(tracked_project)) == ["trial 0", "trial 1", "trial 2", "trial 3"]
    assert len(stored(tracked_project)) == 5
