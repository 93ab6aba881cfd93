"""Tests of recoveries and lost steps of a fault trial, and of fault times, which are defined by progress."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.runs.fault_injection.outcome import BaselineTiming, FaultTrialTimeline, TrainingMoment
from ratchet.runs.journal import Journal

CLOCK = BaselineTiming(first_step_s=10.0, steps_s={1: 10.0, 2: 12.0, 3: 14.0, 4: 16.0}, finished_s=18.0)


class Told:
    """Writes a journal, and a timeline that reads the journal at times that the test chooses."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal.jsonl"
        self.journal = Journal(self.path, attempt=1)
        self.seen = FaultTrialTimeline()

    def at(self, now_s: float, kind: str, **data: Any) -> None:
        self.journal.append(kind, **data)
        assert self.seen.read(self.path, now_s)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.journal.close()


@pytest.mark.parametrize(
    ("step", "started", "fraction", "moment"),
    [
        (0, True, 0.0, TrainingMoment(0, 0.0, is_loading=True)),
        (0, True, 0.5, TrainingMoment(0, 9.0, is_loading=True)),
        (2, True, 0.5, TrainingMoment(2, 8.0, is_loading=True)),
        (1, False, 0.0, TrainingMoment(1, 0.0)),
        (1, False, 0.5, TrainingMoment(3, 0.0)),
        (1, False, 0.625, TrainingMoment(3, 1.0)),
        (4, False, 0.5, TrainingMoment(4, 1.0)),
        (2, True, 0.75, TrainingMoment(3, 0.0)),
    ],
)
def test_a_fraction_of_the_time_left_is_a_moment(
    step: int, started: bool, fraction: float, moment: TrainingMoment
) -> None:
    assert CLOCK.find_moment(step, started, fraction) == moment


def test_recovery_lasts_from_the_fault_to_the_next_new_step(told: Told) -> None:
    told.at(0.0, "attempt_started", pid=1)
    told.at(1.0, "worker_ready", start_step=0, device="cpu")
    told.at(2.0, "step", step=1)
    told.at(2.5, "step", step=2)
    told.seen.record_fault(3.0, "kill worker")
    told.at(3.1, "worker_exited", failure_class="killed")
    told.at(3.2, "attempt_started", pid=2)
    told.at(5.0, "worker_ready", start_step=1)
    told.at(7.0, "step", step=2)
    told.at(8.0, "step", step=3)
    assert told.seen.recoveries_s == [4.0]
    assert told.seen.lost_steps == [1]
    assert told.seen.facts == {"device": "cpu"}
    assert (told.seen.last_step, told.seen.worker_steps, told.seen.delivered) == (3, 2, 1)


def test_a_death_of_its_own_counts_from_the_last_sign_of_life(told: Told) -> None:
    told.at(0.0, "attempt_started", pid=1)
    told.at(1.0, "worker_ready", start_step=0)
    told.at(2.0, "step", step=1)
    told.at(12.0, "worker_exited", failure_class="stalled")
    told.at(12.1, "attempt_started", pid=2)
    told.at(16.0, "step", step=1)
    assert told.seen.recoveries_s == [14.0]
    assert told.seen.kinds["worker_exited:stalled"] == 1


def test_a_second_fault_before_recovery_restarts_the_clock(told: Told) -> None:
    told.seen.record_fault(1.0, "kill worker")
    told.seen.record_fault(5.0, "kill worker")
    told.at(6.0, "attempt_started", pid=1)
    told.at(9.0, "step", step=1)
    assert told.seen.recoveries_s == [4.0]


def test_our_own_changes_of_the_journal_are_not_read_again(told: Told) -> None:
    told.at(0.0, "step", step=1)
    told.path.write_bytes(b"garbage\n" + told.path.read_bytes() + b'{"half')
    told.seen.skip_to_end(told.path)
    told.journal.close()
    told.journal = Journal(told.path, attempt=2)
    told.at(1.0, "step", step=2)
    assert [step for _, step in told.seen.steps] == [1, 2]
