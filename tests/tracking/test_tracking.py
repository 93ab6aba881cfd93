"""Tests that MLflow shows the contents of the journal, once, after any interruption."""

import json
import os
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from journaled import CARD, NAME, SETTINGS, attempt, callback, journal, opened, points, seal_result, stored
from ratchet.errors import TrackingError
from ratchet.reports import plots
from ratchet.runs.directory import RunDirectory, RunPaths, RunSpec
from ratchet.storage import digests, files
from ratchet.storage.digests import revision_tags
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.experiments import HOST_TAG

PER_STEP = ("train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_second")


def assert_complete(layout: ProjectLayout, run: RunDirectory, last: int) -> None:
    for key in PER_STEP:
        assert [step for step, _, _ in points(layout, run, key)] == list(range(1, last + 1)), key
    assert [step for step, _, _ in points(layout, run, "validation/loss")] == list(range(10, last + 1, 10))


def test_a_resumed_run_is_stored_once_with_values_and_times_of_its_journal(tracked_project: ProjectLayout) -> None:
    run = opened(tracked_project)
    attempt(run, 1, 1, 600)  # 2400 points: more than one call of log_batch accepts
    watcher = callback(tracked_project, run)
    seen = journal(run)
    watcher.on_events(seen)
    watcher.on_events(seen)  # the supervisor repeats events after a failure
    steps = [e for e in seen if e.kind == "step"]
    assert points(tracked_project, run, "train/loss") == [
        (e.data["step"], e.data["loss"], round(e.t * 1000)) for e in steps
    ]
    assert points(tracked_project, run, "train/tokens_per_second")[0][1] == pytest.approx(100)
    attempt(run, 2, 501, 700)  # the worker died and resumed from its checkpoint
    watcher.on_events(journal(run)[len(seen) :])
    attempt(run, 3, 651, 720)  # the machine died: a new supervisor reads the journal from the start
    callback(tracked_project, run).on_events(journal(run))
    assert_complete(tracked_project, run, 720)
    tags = stored(tracked_project, run).data.tags
    assert (tags["ratchet.attempts"], tags["ratchet.code_version"]) == ("3", "code-3")


def test_a_failure_in_the_middle_of_a_batch_is_made_good(tracked_project: ProjectLayout) -> None:
    run = opened(tracked_project)
    attempt(run, 1, 1, 600)
    watcher = callback(tracked_project, run)
    watcher.on_events(journal(run)[:20])
    with closing(sqlite3.connect(tracked_project.mlflow_database)) as connection:
        connection.execute(
            "create trigger full before insert on metrics when new.step = 400 "
            "begin select raise(abort, 'database or disk is full'); end"
        )
        with pytest.raises(TrackingError, match="disk is full"):
            watcher.on_events(journal(run)[20:])
        assert len(points(tracked_project, run, "train/loss")) < 600
        connection.execute("drop trigger full")
    watcher.on_events(journal(run)[20:])
    assert_complete(tracked_project, run, 600)


def test_what_another_machine_has_sent_is_not_sent_again_and_gaps_are_filled(tracked_project: ProjectLayout) -> None:
    run = opened(tracked_project)
    attempt(run, 1, 1, 30)
    watcher, other = callback(tracked_project, run), callback(tracked_project, run)
    watcher.on_events([event for event in journal(run) if event.data.get("step", 0) <= 10])
    other.on_events([event for event in journal(run) if event.data.get("step", 0) > 20])
    watcher.forget()
    # This machine did the same steps at other times.
    watcher.on_events([event._replace(t=event.t + 1) for event in journal(run)])
    assert_complete(tracked_project, run, 30)


def test_a_run_that_goes_on_on_another_machine_is_shown_as_that_ones(
    tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(tracked_project)
    attempt(run, 3, 1, 2, pid=os.getpid())
    monkeypatch.setattr("socket.gethostname", lambda: "first")
    callback(tracked_project, run).on_events(journal(run))
    callback(tracked_project, run).on_end("KILLED")
    run.paths.journal.write_bytes(b"")
    attempt(run, 1, 3, 4, pid=os.getpid())  # the first attempt of the second machine
    monkeypatch.setattr("socket.gethostname", lambda: "second")
    callback(tracked_project, run).on_events(journal(run))
    found = stored(tracked_project, run)
    assert (found.info.status, found.data.tags[HOST_TAG], found.data.tags["ratchet.attempts"]) == (
        "RUNNING", "second", "1",
    )  # fmt: skip
    assert [step for step, _, _ in points(tracked_project, run, "train/loss")] == [1, 2, 3, 4]


def test_damaged_database_is_reported_without_retries_and_a_repaired_one_catches_up(
    project: ProjectLayout, mlflow_template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(project)
    attempt(run, 1, 1, 20)
    project.mlruns.mkdir()
    project.mlflow_database.write_bytes(b"damaged" * 1000)
    watcher = callback(project, run)
    slept_s: list[float] = []
    monkeypatch.setattr("mlflow.store.db.utils.time", SimpleNamespace(sleep=slept_s.append))
    for _ in range(2):
        with pytest.raises(TrackingError, match="not a database"):
            watcher.on_events(journal(run))
    assert slept_s == []
    project.mlflow_database.write_bytes(mlflow_template.read_bytes())
    watcher.on_events(journal(run))
    assert_complete(project, run, 20)


def test_params_tags_settings_and_dataset_of_a_run_that_has_not_ended(tracked_project: ProjectLayout) -> None:
    root = tracked_project.root
    run = opened(tracked_project, seed=7)
    attempt(run, 1, 1, 3, pid=os.getpid())
    (root / "dvc.lock").write_text(DVC_LOCK, encoding="utf-8")
    watcher = callback(tracked_project, run)
    watcher.on_events(journal(run))
    callback(tracked_project, run).on_events(journal(run))
    found = stored(tracked_project, run)
    assert found.data.params["train.seed"] == "7"
    assert found.data.params["data.digest"] == "d" * 12
    assert found.data.tags["dvc.base"] == "aaa.dir"
    assert found.data.tags["ratchet.base_digest"] == "b" * 64
    assert found.data.tags["mlflow.source.name"] == "ratchet"
    assert found.data.tags["ratchet.data_card"] == "experiments/data/card.json"
    assert found.data.tags["ratchet.data_card_digest"] == digests.hash_file(tracked_project.dataset_card)
    assert found.info.start_time == round(journal(run)[0].t * 1000)
    (dataset,) = [i.dataset for i in found.inputs.dataset_inputs]
    assert (dataset.name, dataset.digest) == ("a.jsonl, b.csv", "d" * 12)
    assert json.loads(dataset.profile)["splits"] == CARD.splits
    settings = tracked_project.artifacts / found.info.run_id / "artifacts" / "settings.yaml"
    assert "  seed: 7\n" in settings.read_text(encoding="utf-8")


def test_runs_that_differ_in_their_seed_alone_can_be_grouped(tracked_project: ProjectLayout) -> None:
    runs = [opened(tracked_project, seed) for seed in (1, 2)]
    other = RunSpec(train=SETTINGS.train.model_copy(update={"rank": 2}), data_digest=CARD.digest, base_digest="b" * 64)
    runs.append(RunDirectory.open(tracked_project.runs, other))
    for run in runs:
        attempt(run, 1, 1, 1)
        callback(tracked_project, run).on_events(journal(run))
    first, second, third = [stored(tracked_project, run).data.tags["ratchet.seed_group"] for run in runs]
    assert first == second != third


def test_figures_of_the_machine_go_where_mlflow_s_page_looks_for_them(tracked_project: ProjectLayout) -> None:
    run = opened(tracked_project)
    attempt(run, 1, 1, 2)
    for sample in (1, 2, 3):
        run.journal.append(
            "system_metrics", sample=sample, cpu_percent=10.0 * sample, gpus=[{"index": 1, "power_w": 250.0}]
        )
    for _ in range(2):
        callback(tracked_project, run).on_events(journal(run))
    key = "system/cpu_utilization_percentage"
    assert [(step, value) for step, value, _ in points(tracked_project, run, key)] == [(1, 10), (2, 20), (3, 30)]
    assert len(points(tracked_project, run, "system/gpu_1_power_usage_watts")) == 3


def test_catch_up_sends_a_whole_run_once(tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened(tracked_project)
    attempt(run, 1, 1, 30)
    run.journal.append("finished", step=30, reason="completed", adapter_digest="a")
    seal_result(run.paths)
    run.close()
    callback(tracked_project, run).catch_up()
    asked: list[str] = []
    from mlflow import MlflowClient

    with monkeypatch.context() as patch:
        for name in ("get_metric_history", "log_batch", "log_artifact", "set_terminated"):
            patch.setattr(MlflowClient, name, lambda *_, name=name, **__: asked.append(name))
        callback(tracked_project, run).catch_up()
    assert asked == []
    assert_complete(tracked_project, run, 30)
    assert stored(tracked_project, run).info.status == "FINISHED"


def test_checkout_and_data_of_another_time_are_not_recorded(tracked_project: ProjectLayout) -> None:
    run = opened(tracked_project)
    attempt(run, 1, 1, 3, pid=1)  # the attempt of another process, at another time
    (tracked_project.root / "dvc.lock").write_text(DVC_LOCK, encoding="utf-8")
    CARD.model_copy(update={"digest": "f" * 64}).save(tracked_project.dataset_card)
    callback(tracked_project, run).on_events(journal(run))
    found = stored(tracked_project, run)
    assert "dvc.lock" not in found.data.tags
    assert not found.inputs.dataset_inputs


DVC_LOCK = """\
schema: '2.0'
stages:
  base:
    cmd: ratchet base
    deps:
    - path: data/text
      hash: md5
      md5: 111.dir
    params:
      params.yaml:
        base.source: tiny
    outs:
    - path: experiments/base
      hash: md5
      md5: aaa.dir
      size: 5
      nfiles: 3
  prepare:
    cmd: ratchet prepare
    outs:
    - path: experiments/data
      hash: md5
      md5: bbb.dir
  train:
    cmd: ratchet train
    outs:
    - path: experiments/train
      hash: md5
      md5: ccc.dir
"""


def test_revision_of_git_and_dvc(tmp_path: Path) -> None:
    assert revision_tags(tmp_path) == {}
    (tmp_path / "dvc.lock").write_text(DVC_LOCK, encoding="utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x"]
    for command in (["init", "-q", "-b", "trunk"], ["add", "dvc.lock"], ["commit", "-qm", "c"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    tags = revision_tags(tmp_path)
    assert len(tags["git.revision"]) == 40
    assert (tags["git.dirty"], tags["dvc.base"], tags["dvc.prepare"]) == ("false", "aaa.dir", "bbb.dir")
    assert tags["git.branch"] == tags["mlflow.source.git.branch"] == "trunk"
    subprocess.run([*git, "checkout", "-q", "--detach"], check=True, capture_output=True)
    assert "git.branch" not in revision_tags(tmp_path)
    assert "dvc.train" not in tags
    (tmp_path / "dvc.lock").write_text("stages: {}\n", encoding="utf-8")
    tags = revision_tags(tmp_path)
    assert tags["git.dirty"] == "true"
    assert "dvc.base" not in tags


def test_the_end_of_a_run_and_its_files(tracked_project: ProjectLayout) -> None:
    run = opened(tracked_project)
    attempt(run, 1, 1, 10)
    run.journal.append("interrupted", step=10)
    watcher = callback(tracked_project, run)
    watcher.on_events(journal(run))
    assert stored(tracked_project, run).info.status == "RUNNING"
    watcher.on_end("KILLED")
    found = stored(tracked_project, run)
    assert (found.info.status, found.info.end_time) == ("KILLED", round(journal(run)[-1].t * 1000))
    assert found.data.tags["ratchet.status"] == "attempt 1: stopped on request at step 10; step 10 of 100"

    attempt(run, 2, 11, 20)
    watcher = callback(tracked_project, run)
    watcher.on_events(journal(run))
    assert stored(tracked_project, run).info.status == "RUNNING"
    run.journal.append("finished", step=20, reason="early_stopped", adapter_digest="a")
    seal_result(run.paths)
    watcher.on_events(journal(run)[-1:])
    watcher.on_end("FINISHED")
    found = stored(tracked_project, run)
    assert found.info.status == "FINISHED"
    assert found.data.tags["ratchet.status"].startswith("early stopped")
    artifacts = tracked_project.artifacts / found.info.run_id / "artifacts"
    names = {p.relative_to(artifacts).as_posix() for p in artifacts.rglob("*") if p.is_file()}
    assert names == {"train.json", "journal.jsonl", "settings.yaml", "plots/loss.html", "dataset/card.json"}
    assert (artifacts / "journal.jsonl").read_bytes() == run.paths.journal.read_bytes()
    assert "nats per answer token" in (artifacts / "plots/loss.html").read_text(encoding="utf-8")
    assert not (tracked_project.root / "mlflow.db").exists()


def test_the_status_is_true_even_when_no_file_can_be_stored(tracked_project: ProjectLayout) -> None:
    run = opened(tracked_project)
    attempt(run, 1, 1, 5)
    tracked_project.artifacts.write_text("a file where the folder should be")
    watcher = callback(tracked_project, run)
    watcher.on_events(journal(run))
    with pytest.raises(TrackingError):
        watcher.on_end("FAILED")
    assert stored(tracked_project, run).info.status == "FAILED"


def test_reconcile_ends_what_nobody_trains(tracked_project: ProjectLayout) -> None:
    runs = {
        name: opened(tracked_project, seed) for seed, name in enumerate(("alive", "killed", "failed", "done", "gone"))
    }
    for name, run in runs.items():
        attempt(run, 1, 1, 5)
        if name == "failed":
            run.journal.append("worker_exited", exit_code=1, decision="GiveUp", text="bug", failure_class="bug")
        if name == "done":
            seal_result(run.paths)
        callback(tracked_project, run).on_events(journal(run))
    for name, run in runs.items():  # after the loop, because each new callback also ends runs that are not in training
        if name != "alive":
            run.close()
    runs["gone"].paths.root.rename(tracked_project.root / "elsewhere")
    tracking = MlflowTracker(tracked_project, NAME)
    notes = tracking.reconcile(tracked_project.runs)
    statuses = {name: stored(tracked_project, run).info.status for name, run in runs.items()}
    assert statuses == {
        "alive": "RUNNING", "killed": "KILLED", "failed": "FAILED", "done": "FINISHED", "gone": "RUNNING"
    }  # fmt: skip
    assert len(notes) == 4
    assert [runs["gone"].spec.run_id in note for note in notes if "left unchanged" in note] == [True]
    assert len(tracking.reconcile(tracked_project.runs)) == 1


def test_a_report_is_stored_once_and_a_changed_figure_is_shown(tracked_project: ProjectLayout, tmp_path: Path) -> None:
    run = opened(tracked_project)
    attempt(run, 1, 1, 5)
    callback(tracked_project, run).on_events(journal(run))
    report = tmp_path / "eval.json"
    report.write_text("{}")
    tracking = MlflowTracker(tracked_project, NAME)
    for value, rows in ((0.5, 1), (0.5, 1), (0.25, 2), (0.25, 2)):
        tracking.log_report(run.spec.run_id, {"test/a": value, "test/b": 1.0}, {"reports": [report]}, {"gate": "HOLD"})
        assert len(points(tracked_project, run, "test/a")) == rows
        assert stored(tracked_project, run).data.metrics["test/a"] == value
    assert len(points(tracked_project, run, "test/b")) == 1
    found = stored(tracked_project, run)
    assert found.data.tags["gate"] == "HOLD"
    assert (tracked_project.artifacts / found.info.run_id / "artifacts/reports/eval.json").exists()
    with pytest.raises(TrackingError, match="run nowhere is not in"):
        tracking.log_report("nowhere", {}, {}, {})


def catch_up(root: Path, run: Path) -> None:
    MlflowTracker(ProjectLayout(root), NAME).create_callback(RunPaths(run), SETTINGS, plots.draw_loss_curve).catch_up()


@pytest.mark.long
def test_processes_that_meet_an_empty_directory(project: ProjectLayout, processes: Any) -> None:
    """The test kills one process while it creates the database.

    Four other processes find the remains and an empty file.
    """
    run = opened(project)
    attempt(run, 1, 1, 200)
    run.close()
    arguments = (project.root, run.paths.root)
    victim = processes.Process(target=catch_up, args=arguments)
    victim.start()
    while not any(p.stat().st_size for p in project.mlruns.glob(f"{files.PARTIAL}*/mlflow.db")):
        assert victim.is_alive(), "ended before it could be killed"
        time.sleep(0.005)
    victim.kill()
    victim.join()
    assert not project.mlflow_database.exists()
    project.mlflow_database.touch()  # an earlier sqlite3 connection leaves such a file
    others = [processes.Process(target=catch_up, args=arguments) for _ in range(4)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0, 0, 0]
    assert not list(project.mlruns.glob(f"{files.PARTIAL}*"))
    assert_complete(project, run, 200)
    with closing(sqlite3.connect(project.mlflow_database)) as connection:
        count = "select (select count(*) from runs), (select count(*) from experiments where name = ?)"
        assert connection.execute(count, (NAME,)).fetchone() == (1, 1)
