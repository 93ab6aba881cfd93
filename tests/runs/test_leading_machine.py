"""Tests of which of several machines reports a run to a shared server. Each machine decides it from its own journal."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.machine import Machine
from ratchet.runs import tracking_payload
from ratchet.runs.callbacks import Status
from ratchet.runs.journal import Journal, JournalEvent, JournalReader
from ratchet.runs.tracking_payload import LeaderCallback

ELSEWHERE = os.getpid() + 1
"""Process id of an earlier command, or of another machine."""
Calls = list[tuple[str, Any]]


class Shown:
    """Records its calls. The next `failures` calls of `on_events` fail."""

    name = "shown"

    def __init__(self) -> None:
        self.calls: Calls = []
        self.failures = 0

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the server is away")
        self.calls.append(("see", [event.data["step"] for event in events if event.kind == "step"]))

    def forget(self) -> None:
        self.calls.append(("forget", None))

    def on_end(self, status: Status) -> None:
        self.calls.append(("finish", status))


class Member:
    """Journal of a machine, with its callback."""

    def __init__(self, path: Path) -> None:
        self.shown = Shown()
        self.lead = LeaderCallback(self.shown, path)
        self._journal, self._reader = Journal(path, 1), JournalReader(path)
        self._waiting: list[JournalEvent] = []

    def attempt(self, pid: int | None = None) -> "Member":
        self._journal.append("attempt_started", pid=pid or os.getpid(), code_version="1")
        return self

    def ready(self, leads: bool) -> "Member":
        self._journal.append("worker_ready", start_step=0, has_rank_zero=leads)
        return self

    def steps(self, *numbers: int) -> "Member":
        for number in numbers:
            self._journal.append("step", step=number)
        return self

    def told(self) -> Calls:
        """Pass the new events to the callback as the supervisor does; return the calls. After a failure, the same
        events come again."""
        self._waiting += self._reader.read()
        self.shown.calls.clear()
        self.lead.on_events(self._waiting)
        self._waiting = []
        return list(self.shown.calls)

    def ended(self, status: Status) -> Calls:
        self.shown.calls.clear()
        self.lead.on_end(status)
        return list(self.shown.calls)

    def close(self) -> None:
        self._journal.close()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Member]:
    made = Member(tmp_path / "journal.jsonl")
    yield made
    made.close()


def test_who_leads_tells_all(machine: Member) -> None:
    assert machine.attempt().ready(leads=True).steps(1, 2).told() == [("forget", None), ("see", [1, 2])]
    assert machine.steps(3).told() == [("see", [3])]
    assert machine.ended("FINISHED") == [("finish", "FINISHED")]


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_who_does_not_tells_nothing_not_even_the_end(machine: Member, status: Status) -> None:
    assert machine.attempt().ready(leads=False).steps(1, 2).told() == []
    assert machine.ended(status) == []


def test_who_takes_over_looks_at_what_is_there_and_tells_all_that_it_knows(machine: Member) -> None:
    assert machine.attempt().ready(leads=False).steps(1, 2, 3).told() == []
    assert machine.attempt().ready(leads=True).steps(4).told() == [("forget", None), ("see", [1, 2, 3, 4])]
    # Another machine may have led an attempt in which this machine took no part.
    assert machine.attempt().ready(leads=True).told() == [("forget", None), ("see", [1, 2, 3, 4])]


def test_what_was_done_in_the_lead_is_told_while_machines_meet_anew(machine: Member) -> None:
    machine.attempt().ready(leads=True).steps(1).told()
    assert machine.steps(2).attempt().told() == [("see", [2])]
    assert machine.ready(leads=False).steps(3).told() == []
    assert machine.ended("FINISHED") == []


def test_events_that_a_failing_server_missed_are_sent_later_by_the_leader(machine: Member) -> None:
    machine.shown.failures = 3
    for step in (1, 2):
        with pytest.raises(OSError, match="away"):
            machine.attempt().ready(leads=True).steps(step).told()
    with pytest.raises(OSError, match="away"):
        machine.steps(3).told()
    assert machine.attempt().ready(leads=False).told() == []
    assert machine.attempt().ready(leads=True).steps(4).told() == [("forget", None), ("see", [1, 2, 3, 4])]


def test_what_an_earlier_process_led_waits_for_the_next_meeting(machine: Member) -> None:
    machine.attempt(ELSEWHERE).ready(leads=True).steps(1, 2)
    assert machine.told() == []
    assert machine.attempt().told() == []
    assert machine.ready(leads=True).steps(3).told() == [("forget", None), ("see", [1, 2, 3])]


def test_repeated_after_the_end_only_who_led_sends_what_was_missed(machine: Member, tmp_path: Path) -> None:
    assert machine.attempt(ELSEWHERE).ready(leads=True).steps(1, 2).told() == []
    assert machine.ended("FINISHED") == [("see", [1, 2]), ("finish", "FINISHED")]
    assert machine.ended("KILLED") == [], "nothing has ended: it may go on elsewhere"
    other = Member(tmp_path / "other.jsonl")
    assert other.attempt(ELSEWHERE).ready(leads=False).steps(1, 2).told() == []
    assert other.ended("FINISHED") == []
    other.close()


TOGETHER = Machine(nodes="2", rendezvous="one:29400", tracking_uri="http://mlflow.example")


def test_after_the_end_one_of_them_has_led(machine: Member, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    assert not tracking_payload.should_report(tmp_path / "none.jsonl", TOGETHER)
    machine.attempt().ready(leads=True).steps(1)
    assert tracking_payload.should_report(path, TOGETHER)
    machine.attempt().ready(leads=False)
    assert not tracking_payload.should_report(path, TOGETHER)


@pytest.mark.parametrize("change", [{"nodes": "1"}, {"tracking_uri": None}])
def test_alone_or_with_a_store_of_its_own_every_machine_tells(change: dict[str, Any], tmp_path: Path) -> None:
    path, shown = tmp_path / "journal.jsonl", Shown()
    machine = TOGETHER.model_copy(update=change)
    assert tracking_payload.wrap_callback(shown, path, machine) is shown
    assert tracking_payload.should_report(path, machine)
    assert isinstance(tracking_payload.wrap_callback(shown, path, TOGETHER), LeaderCallback)
