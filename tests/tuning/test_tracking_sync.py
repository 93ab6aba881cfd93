"""Tests that the sync sends everything to MLflow exactly once, and that its failures do not affect the sweep."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ratchet.runs.callbacks import RunCallback, Status
from ratchet.runs.directory import RunDirectory
from ratchet.runs.journal import JournalEvent
from ratchet.tracking.mlflow.sweeps import MlflowSweepTracker
from ratchet.tuning.tracking_sync import TrialProgressReader
from tracking_sync_cases import (
    Study,
    quick,  # noqa: F401 (a fixture)
    shown,
    started,
    steps,
    stored,
    study,  # noqa: F401 (a fixture)
)


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, for at most 60 s; only a broken sync needs that long."""
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.05)


def test_trials_are_followed_and_settled(study: Study) -> None:
    sync = started(study)
    for number, state in enumerate(("complete", "pruned", "failed", "infeasible")):
        study.train(study.begin(), 1, 5)
        until(lambda number=number: shown(study, number) == ("RUNNING", "running"))  # type: ignore[misc]
        until(lambda number=number: steps(study, number) == [1, 2, 3, 4, 5])  # type: ignore[misc]
        study.train(number, 4, 10)
        study.end(number, state, sealed=False)
    assert sync.close(60)
    assert [shown(study, number) for number in range(4)] == [
        ("FINISHED", "complete"), ("KILLED", "pruned"), ("FAILED", "failed"), ("FAILED", "infeasible"),
    ]  # fmt: skip
    for number in range(4):
        assert steps(study, number) == list(range(1, 11))
        run = stored(study, number)
        artifacts = study.layout.artifacts / run.info.run_id / "artifacts"
        assert (artifacts / "journal.jsonl").read_bytes() == study.runs[number].paths.journal.read_bytes()
        assert run.info.run_name == f"trial {number}"


def test_settled_trials_are_never_sent_again_and_a_complete_training_is_finished(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    for state in ("complete", "pruned", "failed"):
        study.train(number := study.begin(), 1, 5)
        study.end(number, state)
    assert started(study).close(60)
    assert shown(study, 2) == ("FINISHED", "failed")  # its training sealed a result
    asked: list[str] = []
    seen: list[RunCallback] = []
    settled = MlflowSweepTracker.completed_trials
    monkeypatch.setattr(
        MlflowSweepTracker, "completed_trials", lambda self, name: asked.append(name) or settled(self, name)
    )
    sync = started(study, lambda one: seen.append(one) or one)  # type: ignore[func-returns-value]
    study.train(study.begin(), 1, 3)
    until(lambda: shown(study, 3) == ("RUNNING", "running"))
    study.end(3, "pruned")
    assert sync.close(60)
    assert asked == ["sweep"]
    assert [one.run_id for one in seen] == [study.trials[3].run_id]  # type: ignore[attr-defined]


def test_a_continued_trial_is_one_run_without_a_gap(study: Study) -> None:
    sync = started(study)
    study.train(study.begin(), 1, 10)
    study.end(0, "pruned")
    until(lambda: shown(study, 0) == ("KILLED", "pruned"))
    study.begin(continues=0)
    study.train(1, 9, 20)
    until(lambda: shown(study, 1) == ("RUNNING", "running"))
    study.end(1, "complete")
    assert sync.close(60)
    assert shown(study, 0) == shown(study, 1) == ("FINISHED", "complete")
    assert steps(study, 1) == list(range(1, 21))
    assert stored(study, 1).info.run_name == "trial 1"


def test_a_sweep_that_is_stopped_leaves_no_run_running(study: Study) -> None:
    sync = started(study)
    for number in range(2):
        study.train(study.begin(), 1, 5)
        until(lambda number=number: shown(study, number) == ("RUNNING", "running"))  # type: ignore[misc]
    study.runs[0].journal.append("interrupted", step=5)
    study.runs[0].close()  # this worker has released its run; the other run is on another machine and continues
    assert sync.close(60)
    assert [shown(study, number)[0] for number in range(2)] == ["KILLED", "RUNNING"]
    again = started(study)
    study.runs[0] = RunDirectory.open(study.layout.runs, study.runs[0].spec)
    study.runs[0].journal.attempt = 1
    study.train(0, 6, 10)
    until(lambda: shown(study, 0)[0] == "RUNNING")
    study.end(0, "complete")
    study.runs[1].close()
    assert again.close(60)
    assert shown(study, 0) == ("FINISHED", "complete")
    assert steps(study, 0) == list(range(1, 11))


def test_a_dead_mlflow_is_reported_once_and_gets_everything_later(
    study: Study, mlflow_template: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study.layout.mlflow_database.write_bytes(b"damaged" * 1000)
    failures: list[int] = []
    settled = MlflowSweepTracker.completed_trials

    def counted(self: MlflowSweepTracker, name: str) -> dict[str, int]:
        try:
            return settled(self, name)
        except Exception:
            failures.append(1)
            raise

    monkeypatch.setattr(MlflowSweepTracker, "completed_trials", counted)
    sync = started(study)
    study.train(study.begin(), 1, 5)
    study.end(0, "complete")
    until(lambda: len(failures) > 2)
    assert sync.is_alive()
    study.layout.mlflow_database.write_bytes(mlflow_template.read_bytes())
    until(lambda: shown(study, 0) == ("FINISHED", "complete"))
    assert sync.close(60)
    complaints = [line for line in capsys.readouterr().err.splitlines() if "not a database" in line]
    assert len(complaints) == 1
    assert "the sweep continues" in complaints[0]


def test_one_run_that_cannot_be_sent_keeps_no_other_from_it(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(6):
        study.train(number := study.begin(), 1, 5)
        study.end(number, "complete")
    whole = study.runs[0].paths.spec.read_bytes()
    for number in range(4):
        study.runs[number].paths.spec.write_bytes(b"{}")
    sync = started(study)
    until(lambda: [shown(study, number)[1] for number in (4, 5)] == ["complete", "complete"])
    assert not sync.close(60)
    said = capsys.readouterr().err.splitlines()
    assert "does not have 4 runs completely yet; the next start of this sweep sends the rest" in said[-1]
    assert sum(f"{study.trials[0].run_id}: DamagedFileError" in line for line in said) == 1
    assert shown(study, 0)[1] is None
    study.runs[0].paths.spec.write_bytes(whole)
    assert not started(study).close(60)
    assert shown(study, 0) == ("FINISHED", "complete")


def test_closing_waits_no_longer_than_it_may(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    stuck, freed = threading.Event(), threading.Event()

    class Stuck:
        """An MLflow callback that does not return."""

        name = "stuck"

        def on_events(self, events: Sequence[JournalEvent]) -> None:
            stuck.set()
            freed.wait(60)

        def on_end(self, status: Status) -> None:
            raise AssertionError("it has not seen everything")

    study.train(study.begin(), 1, 5)
    sync = started(study, lambda _: Stuck())
    assert stuck.wait(60)
    concluded: list[int] = []
    assert not sync.close(0.2, lambda: concluded.append(1))
    assert "completely yet" in capsys.readouterr().err
    freed.set()
    sync.join(60)
    assert not sync.is_alive()
    assert concluded == []


def test_the_prelude_is_repeated_until_it_succeeds_and_the_conclusion_comes_last(
    study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def prelude() -> None:
        assert shown(study, 0)[1] is None
        calls.append(1)
        if len(calls) < 3:
            raise ValueError("not yet")

    study.train(study.begin(), 1, 5)
    study.end(0, "complete")
    sync = started(study, prelude=prelude)
    until(lambda: shown(study, 0) == ("FINISHED", "complete"))
    states: list[tuple[str, str | None]] = []
    assert sync.close(60, lambda: states.append(shown(study, 0)))
    assert (len(calls), states) == (3, [("FINISHED", "complete")])

    def fail() -> None:
        raise ValueError("no picture")

    assert not started(study).close(60, fail)
    assert "ValueError: no picture" in capsys.readouterr().err


def test_standings_of_trials_that_run(study: Study) -> None:
    standings = TrialProgressReader(study.layout.runs)
    assert standings.read(study.report()) == {}
    study.train(study.begin(), 1, 5)
    study.begin()
    assert {number: (one.step, one.planned_steps) for number, one in standings.read(study.report()).items()} == {
        0: (5, 100)
    }
    study.train(0, 4, 8)
    study.train(1, 1, 2)
    found = standings.read(study.report())
    assert {number: (one.step, one.attempts) for number, one in found.items()} == {0: (8, 2), 1: (2, 1)}
    study.end(0, "pruned")
    assert list(standings.read(study.report())) == [1]
    study.runs[1].close()
