"""Where a run stands, from its journal alone."""

from pathlib import Path

import pytest

from ratchet.run import status
from ratchet.run.directory import RunPaths
from ratchet.run.journal import Event, Journal
from ratchet.run.status import Progress, replay


class Story:
    """Builds the events of a run; each takes a second of its time."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.attempt = 0

    def add(self, kind: str, **data: object) -> "Story":
        self.events.append(Event(kind, 1000.0 + len(self.events), self.attempt, dict(data)))
        return self

    def start(self, start_step: int = 0) -> "Story":
        self.attempt += 1
        self.add("attempt", pid=1, code_version="1")
        return self.add("ready", start_step=start_step, planned_steps=10)

    def steps(self, first: int, last: int, step_s: float = 0.5) -> "Story":
        for number in range(first, last + 1):
            self.add("step", step=number, loss=10.0 - number, learning_rate=1e-3, grad_norm=1.0,
                     trained_tokens=7, input_tokens=100, step_s=step_s)  # fmt: skip
        return self

    def validation(self, step: int, loss: float, improved: bool) -> "Story":
        return self.add("validation", step=step, loss=loss, improved=improved, tokens=50, seconds=0.1)

    def checkpoint(self, step: int) -> "Story":
        return self.add("checkpoint", step=step, digest="d", size_bytes=1, seconds=0.1, best=False)

    def progress(self) -> Progress:
        return replay(self.events)

    def written(self, root: Path) -> RunPaths:
        paths = RunPaths(root)
        root.mkdir(parents=True)
        paths.journal.write_bytes(b"".join(event.line() for event in self.events))
        return paths


def died(story: Story, cause: str = "killed by SIGKILL") -> Story:
    return story.add("died", exit_code=-9, **{"class": "killed"}, decision="Retry", text=cause)


def test_a_run_that_has_not_begun_stands_at_nothing() -> None:
    p = replay([])
    assert (p.step, p.planned_steps, p.attempts, p.loss, p.best_loss, p.finished) == (0, 0, 0, None, None, None)
    assert (p.steps_per_s, p.tokens_per_s, p.remaining_s) == (None, None, None)


def test_the_fold_of_a_run_without_trouble() -> None:
    story = Story().start().steps(1, 5).validation(5, 0.9, True).checkpoint(5)
    story.steps(6, 10).validation(10, 0.95, False).checkpoint(10)
    p = story.add("finished", step=10, reason="completed", adapter_digest="a").progress()
    assert (p.step, p.planned_steps, p.loss, p.learning_rate) == (10, 10, 0.0, 1e-3)
    assert (p.validation_loss, p.validation_step, p.best_loss, p.best_step) == (0.95, 10, 0.9, 5)
    assert (p.checkpoint_step, p.attempts, p.finished) == (10, 1, "completed")
    assert p.trained_tokens == 70
    assert p.steps_per_s == pytest.approx(2.0)
    assert p.tokens_per_s == pytest.approx(200.0)
    assert p.remaining_s is None


def test_steps_done_again_after_a_resume_are_counted_once() -> None:
    story = Story().start().steps(1, 4).checkpoint(4).steps(5, 7)
    p = died(story).start(start_step=4).steps(5, 8).progress()
    assert (p.step, p.attempts, p.trained_tokens) == (8, 2, 8 * 7)
    assert p.ends == ["attempt 1: killed, killed by SIGKILL"]


def test_a_resumed_run_stands_at_its_checkpoint_until_it_has_done_a_step() -> None:
    story = died(Story().start().steps(1, 4).checkpoint(4).steps(5, 7)).start(start_step=4)
    assert story.progress().step == 4


def test_the_best_validation_stays_the_best_when_it_is_done_again() -> None:
    story = Story().start().steps(1, 3).validation(3, 0.8, True).steps(4, 6).validation(6, 0.7, True)
    p = (
        died(story)
        .start(start_step=3)
        .steps(4, 6)
        .validation(6, 0.7, True)
        .steps(7, 9)
        .validation(9, 0.9, False)
        .progress()
    )
    assert (p.best_loss, p.best_step, p.validation_loss) == (0.7, 6, 0.9)


def test_speed_and_time_left_are_those_of_the_recent_steps() -> None:
    story = Story().start()
    story.events[-1] = Event("ready", 0.0, 1, {"start_step": 0, "planned_steps": 300})
    p = story.steps(1, 100, step_s=8.0).steps(101, 101 + status.RATE_WINDOW - 1, step_s=0.25).progress()
    assert p.steps_per_s == pytest.approx(4.0)
    assert p.tokens_per_s == pytest.approx(400.0)
    assert p.remaining_s == pytest.approx((300 - 150) / 4.0)


def test_the_fold_is_the_same_in_one_go_or_event_by_event() -> None:
    story = died(Story().start().steps(1, 4).checkpoint(4).steps(5, 7)).start(start_step=4).steps(5, 8)
    bit_by_bit = Progress()
    for event in story.events:
        bit_by_bit.see(event)
    assert bit_by_bit.step == story.progress().step
    assert bit_by_bit.trained_tokens == story.progress().trained_tokens


def test_a_running_run_is_described(tmp_path: Path) -> None:
    paths = Story().start().steps(1, 6).validation(6, 0.75, True).checkpoint(6).written(tmp_path / "abc")
    with paths.lock().acquire():
        text = status.describe(paths)
    assert "run abc: running" in text
    assert "step        6 of 10" in text
    assert "loss        4.0000 (learning rate 1.00e-03)" in text
    assert "validation  0.7500 at step 6; best 0.7500 at step 6" in text
    assert "rate        2.00 steps/s, 200 tokens/s" in text
    assert "time left   about 2 s" in text
    assert "checkpoint  step 6, sealed" in text
    assert "attempts    1" in text


def test_a_finished_run_is_described(tmp_path: Path) -> None:
    story = Story().start().steps(1, 6).add("finished", step=6, reason="early_stopped", adapter_digest="a")
    text = status.describe(story.written(tmp_path / "abc"))
    assert "run abc: finished (early stopped)" in text
    assert "time left" not in text
    assert "dvc repro" not in text


def test_a_stopped_run_says_how_it_goes_on(tmp_path: Path) -> None:
    text = status.describe(Story().start().steps(1, 6).add("stopped", step=6).written(tmp_path / "abc"))
    assert "stopped on request; repeat the command that started it (`dvc repro`) and it goes on" in text
    assert "attempt 1: stopped on request at step 6" in text


def test_a_run_that_died_with_its_supervisor_says_how_it_goes_on(tmp_path: Path) -> None:
    text = status.describe(Story().start().steps(1, 6).written(tmp_path / "abc"))
    assert "run abc: not running; repeat the command" in text


def test_a_run_that_goes_on_after_a_stop_is_running(tmp_path: Path) -> None:
    paths = Story().start().steps(1, 6).add("stopped", step=6).start(start_step=6).written(tmp_path / "abc")
    with paths.lock().acquire():
        text = status.describe(paths)
    assert "run abc: running" in text
    assert "attempts    2" in text


def test_a_run_whose_result_was_lost_and_that_trains_again_is_running(tmp_path: Path) -> None:
    story = Story().start().steps(1, 10).add("finished", step=10, reason="completed", adapter_digest="a")
    paths = story.start(start_step=8).steps(9, 9).written(tmp_path / "abc")
    with paths.lock().acquire():
        assert "run abc: running" in status.describe(paths)


def test_why_earlier_attempts_ended_and_what_was_noticed_is_told(tmp_path: Path) -> None:
    story = died(Story().start().steps(1, 3), "out of disk").start().add("notice", text="code version changed")
    text = status.describe(story.written(tmp_path / "abc"))
    assert "attempt 1: killed, out of disk" in text
    assert "notice      code version changed" in text


def test_damaged_lines_of_the_journal_are_told(tmp_path: Path) -> None:
    paths = Story().start().steps(1, 3).written(tmp_path / "abc")
    with paths.journal.open("ab") as stream:
        stream.write(b"garbage\n\x00\x00\n")
    text = status.describe(paths)
    assert "step        3 of 10" in text
    assert "2 damaged journal line(s) skipped" in text


def test_a_run_that_has_not_begun_is_described(tmp_path: Path) -> None:
    (tmp_path / "abc").mkdir()
    Journal(tmp_path / "abc" / "journal.jsonl", 0).close()
    assert "step        0 of ?" in status.describe(RunPaths(tmp_path / "abc"))
    assert status.of(RunPaths(tmp_path / "abc")).attempts == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (0.4, "0 s"), (42.2, "42 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"),
     (3599.4, "59 min 59 s"), (3599.6, "1 h 00 min"), (7620, "2 h 07 min"), (100_000, "27 h 46 min")],
)  # fmt: skip
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert status.duration(seconds) == text
