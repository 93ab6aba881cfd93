"""Tests that each logger has every point of a run once, as MLflow does, after kills of worker and supervisor."""

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

import logged_points
import tracking_sync_cases
from journaled import SETTINGS, attempt, callback, journal, opened
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.errors import SettingsError
from ratchet.runs.callbacks import CallbackList, Status
from ratchet.runs.directory import RunPaths
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import Trial
from ratchet.tracking.loggers import (
    JsonLinesLogger,
    LoggedRun,
    LoggerCallback,
    LoggerCallbackGroup,
    MetricRow,
    load_loggers,
)
from ratchet.tuning.tracking_sync import SweepTrackingSync
from tracking_sync_cases import study  # noqa: F401 (a fixture)

DEADLINE_S = 300.0


@pytest.mark.parametrize("name", logged_points.READERS)
def test_a_logger_has_the_points_of_mlflow(
    name: str, tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    machine = SETTINGS.machine.model_copy(update={"loggers": (name,)})
    [create] = load_loggers(SETTINGS.model_copy(update={"machine": machine})).values()
    with closing(opened(tracked_project)) as run:
        attempt(run, 1, 1, 30)
        run.journal.append("system_metrics", sample=1, cpu_percent=10.0, network_sent_bytes=1000)
        first = LoggerCallback(name, create, run.paths, SETTINGS, None)
        first.on_events(journal(run))
        first.forget()
        attempt(run, 2, 21, 40)
        run.journal.append("system_metrics", sample=2, cpu_percent=20.0, network_sent_bytes=3000)
        mlflow = callback(tracked_project, run)
        mlflow.on_events(journal(run))
        second = LoggerCallback(name, create, run.paths, SETTINGS, None)
        second.on_events(journal(run))
        second.on_end("KILLED")
    expected = logged_points.read_mlflow(tracked_project, run.paths)
    assert expected.total() == len(expected) == 4 * 40 + 4 + 2 * 2
    assert logged_points.read(name, run.paths) == expected


class Recorder:
    """Logger that remembers its rows and may fail."""

    made: list["Recorder"]
    is_broken = False

    def __init__(self, run: LoggedRun) -> None:
        assert list(run.folder.iterdir()) == []
        (run.folder / "output").touch()
        self.run, self.rows, self.status = run, list[MetricRow](), ""
        self.made.append(self)

    def log(self, rows: Sequence[MetricRow]) -> None:
        self.rows += rows[:5]
        if self.is_broken:
            raise OSError("disk is full")
        self.rows += rows[5:]

    def finish(self, status: Status) -> None:
        self.status = status


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setattr(Recorder, "made", [], raising=False)
    return Recorder


def losses(rows: Sequence[MetricRow]) -> list[int]:
    return [row.step for row in rows if "train/loss" in row.values]


def test_a_logger_that_fails_gets_all_rows_again_in_a_new_folder(
    project: ProjectLayout, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(opened(project)) as run:
        attempt(run, 1, 1, 30)
        logger = LoggerCallback("recorder", recorder, run.paths, SETTINGS, None)
        monkeypatch.setattr(recorder, "is_broken", True)
        with pytest.raises(OSError, match="full"):
            logger.on_events(journal(run))
        monkeypatch.setattr(recorder, "is_broken", False)
        logger.on_events(journal(run))
        attempt(run, 2, 21, 40)
        logger.on_events([])
        logger.on_end("KILLED")
    first, second = recorder.made
    assert (first.status, second.status) == ("KILLED", "KILLED")
    assert losses(second.rows) == list(range(1, 41))
    assert second.rows[9].values["train/loss"] == 1 / 10


def test_a_run_that_has_not_changed_is_not_logged_again(project: ProjectLayout, recorder: type[Recorder]) -> None:
    def log(status: Status) -> None:
        logger = LoggerCallback("recorder", recorder, run.paths, SETTINGS, None)
        logger.on_events(journal(run))
        logger.on_end(status)

    with closing(opened(project)) as run:
        run.journal.append("attempt_started", pid=1, code_version="a")
        log("KILLED")
        assert recorder.made == []  # there is nothing to log
        attempt(run, 2, 1, 10)
        log("KILLED")
        log("KILLED")
        assert len(recorder.made) == 1
        run.journal.append("notice", text="no row")
        log("FINISHED")  # it was killed between its last step and its end
        log("FINISHED")
        assert [logger.status for logger in recorder.made] == ["KILLED", "FINISHED"]
        attempt(run, 3, 11, 12)
        log("FINISHED")
    assert losses(recorder.made[-1].rows) == list(range(1, 13))


def test_rows_that_a_server_has_are_not_sent_again(
    project: ProjectLayout, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "logged_rows", 12, raising=False)
    with closing(opened(project)) as run:
        attempt(run, 1, 1, 20)
        LoggerCallback("recorder", recorder, run.paths, SETTINGS, None).on_events(journal(run))
    assert losses(recorder.made[0].rows) == list(range(12, 21))  # 12 rows: 11 steps and a validation


def test_a_failing_logger_is_reported_once_and_disturbs_no_other(project: ProjectLayout) -> None:
    def fail(run: LoggedRun) -> JsonLinesLogger:
        raise RuntimeError("no connection")

    with closing(opened(project)) as run:
        attempt(run, 1, 1, 10)
        callbacks = [
            LoggerCallback(name, create, run.paths, SETTINGS, None)
            for name, create in (("broken", fail), ("json_lines", JsonLinesLogger))
        ]
        threads = CallbackList(callbacks, run.journal)
        threads.start()
        threads.end("FINISHED", DEADLINE_S)
        notices = [event.data["text"] for event in journal(run) if event.kind == "notice"]
        assert notices == ["broken failed (RuntimeError: no connection); retrying, training continues"]
        assert len([key for key, _, _ in logged_points.read("json_lines", run.paths) if key == "train/loss"]) == 10


def test_trials_of_a_sweep_are_logged_with_their_study(
    study: tracking_sync_cases.Study, recorder: type[Recorder]
) -> None:
    def create_group(run_id: str, trial: Trial) -> LoggerCallbackGroup:
        run, place = RunPaths(study.layout.runs / run_id), ("colours", trial.number)
        return LoggerCallbackGroup([LoggerCallback("recorder", recorder, run, SETTINGS, place)])

    def sync() -> None:
        sender = SweepTrackingSync(study.layout.runs, study.report, create_group, None, receiver="recorder")
        sender.start()
        assert sender.close(DEADLINE_S)

    for state in ("complete", "pruned"):
        number = study.begin()
        study.train(number, 1, 9)
        study.end(number, state)
    sync()
    sync()  # a second start of the sweep sends nothing
    logged = {logger.run.name: logger for logger in recorder.made}
    assert len(recorder.made) == len(logged) == 2
    assert {logger.run.group for logger in recorder.made} == {"colours"}
    assert (logged["trial 0"].status, logged["trial 1"].status) == ("FINISHED", "KILLED")
    assert losses(logged["trial 1"].rows) == list(range(1, 10))


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (
            "[tensorbord]",
            r"found 'tensorbord'; expected .* registers in ratchet.loggers; did you mean tensorboard\?",
        ),
        ("[mlflow, mlflow]", "expected each logger once"),
    ],
)
def test_a_wrong_list_of_loggers_is_refused(found: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        params_file.parse(f"machine:\n  loggers: {found}\n")


@pytest.mark.usefixtures("calm")
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_logger_without_its_library_is_refused_before_anything_starts(
    command: str, prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = params_file.load(prepared / "params.yaml")
    machine = settings.machine.model_copy(update={"loggers": ("wandb",)})
    monkeypatch.setattr(params_file, "load", lambda *_: settings.model_copy(update={"machine": machine}))
    monkeypatch.setattr("ratchet.config.extras.find_spec", lambda module: None if module == "wandb" else os)
    assert main(["--project", str(prepared), command]) == 2
    assert capsys.readouterr().err == (
        f"ratchet {command}: machine.loggers: wandb needs wandb, which is not installed; install it with: "
        "pip install 'ratchet-llm[wandb]'\n"
    )
    assert list(ProjectLayout(prepared).runs.glob("*")) == []
