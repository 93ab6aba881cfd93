"""Observers that are told at once, and those that wait until training has begun."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ratchet.runs import callbacks
from ratchet.runs.callbacks import CallbackList, Status
from ratchet.runs.journal import Journal, JournalEvent

PATIENCE_S = 30.0


class Listener:
    """Notes what it is told."""

    name = "listener"

    def __init__(self) -> None:
        self.told: list[list[str]] = []
        self.ended: Status | None = None
        self.heard = threading.Event()

    def see(self, events: Sequence[JournalEvent]) -> None:
        self.told.append([event.kind for event in events])
        self.heard.set()

    def finish(self, status: Status) -> None:
        self.ended = status

    def kinds(self) -> list[str]:
        return [kind for told in self.told for kind in told]


class Patient(Listener):
    """Waits until training has begun."""

    patient = True


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
    for kind in ("attempt", "forecast", "memory", "system", "ready"):
        eager.heard.clear()
        journal.append(kind)
        assert eager.heard.wait(PATIENCE_S)
    assert patient.told == []
    journal.append("step", step=1)
    assert patient.heard.wait(PATIENCE_S)
    audience.end("FINISHED", PATIENCE_S)
    assert patient.told == [["attempt", "forecast", "memory", "system", "ready", "step"]]
    assert eager.kinds() == patient.kinds()
    assert (eager.ended, patient.ended) == ("FINISHED", "FINISHED")


@pytest.mark.parametrize("last", ["failure", "died", "stopped", "finished"])
def test_end_before_the_first_step_is_passed_on(journal: Journal, last: str) -> None:
    patient = Patient()
    audience = started(journal, patient)
    journal.append("attempt")
    journal.append(last)
    assert patient.heard.wait(PATIENCE_S)
    audience.end("FAILED", PATIENCE_S)
    assert patient.kinds() == ["attempt", last]


def test_end_of_a_run_that_never_began_is_passed_on(journal: Journal) -> None:
    patient = Patient()
    audience = started(journal, patient)
    journal.append("attempt")
    audience.end("KILLED", PATIENCE_S)
    assert (patient.kinds(), patient.ended) == (["attempt"], "KILLED")


def test_end_is_passed_on_without_waiting_for_the_next_round(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "PATIENT_POLL_S", 10 * PATIENCE_S)
    patient = Patient()
    audience = started(journal, patient)
    journal.append("step", step=1)
    assert patient.heard.wait(PATIENCE_S)
    journal.append("step", step=2)
    audience.end("FINISHED", PATIENCE_S)
    assert (patient.kinds(), patient.ended) == (["step", "step"], "FINISHED")
