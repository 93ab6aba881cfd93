"""Tests of callbacks that receive events at once, and of deferred callbacks that wait until training has started."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ratchet.runs import callbacks
from ratchet.runs.callbacks import CallbackList, Status
from ratchet.runs.journal import Journal, JournalEvent

PATIENCE_S = 30.0


class Listener:
    """Records the events that it receives."""

    name = "listener"

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.ended: Status | None = None
        self.heard = threading.Event()

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        self.told.append([event.kind for event in events])
        self.heard.set()

    def on_end(self, status: Status) -> None:
        self.ended = status

    def kinds(self) -> list[str]:
        return [kind for told in self.told for kind in told]


class Patient(Listener):
    """Deferred callback: it receives nothing until training has started."""

    is_deferred = True


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "journal.jsonl", 1)
    yield made
    made.close()


def started(journal: Journal, *listeners: Listener) -> CallbackList:
    audience = CallbackList(list(listeners), journal)
    audience.start()
    return audience


def test_a_patient_observer_is_told_of_loading_together_with_the_first_step(journal: Journal) -> None:
    eager, patient = Listener(), Patient()
    audience = started(journal, eager, patient)
    for kind in ("attempt_started", "memory_forecast", "memory_peak", "system_metrics", "worker_ready"):
        eager.heard.clear()
        journal.append(kind)
        assert eager.heard.wait(PATIENCE_S)
    assert patient.told == []
    journal.append("step", step=1)
    assert patient.heard.wait(PATIENCE_S)
    audience.end("FINISHED", PATIENCE_S)
    assert patient.told == [
        ["attempt_started", "memory_forecast", "memory_peak", "system_metrics", "worker_ready", "step"]
    ]
    assert eager.kinds() == patient.kinds()
    assert (eager.ended, patient.ended) == ("FINISHED", "FINISHED")


@pytest.mark.parametrize("last", ["worker_error", "worker_exited", "interrupted", "finished"])
def test_end_before_the_first_step_is_passed_on(journal: Journal, last: str) -> None:
    patient = Patient()
    audience = started(journal, patient)
    journal.append("attempt_started")
    journal.append(last)
    assert patient.heard.wait(PATIENCE_S)
    audience.end("FAILED", PATIENCE_S)
    assert patient.kinds() == ["attempt_started", last]


def test_end_of_a_run_that_never_began_is_passed_on(journal: Journal) -> None:
    patient = Patient()
    audience = started(journal, patient)
    journal.append("attempt_started")
    audience.end("KILLED", PATIENCE_S)
    assert (patient.kinds(), patient.ended) == (["attempt_started"], "KILLED")


def test_end_is_passed_on_without_waiting_for_the_next_round(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "DEFERRED_POLL_S", 10 * PATIENCE_S)
    patient = Patient()
    audience = started(journal, patient)
    journal.append("step", step=1)
    assert patient.heard.wait(PATIENCE_S)
    journal.append("step", step=2)
    audience.end("FINISHED", PATIENCE_S)
    assert (patient.kinds(), patient.ended) == (["step", "step"], "FINISHED")
