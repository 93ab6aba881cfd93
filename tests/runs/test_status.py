"""Tests of the status of a run, which is computed from its journal alone."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from ratchet.errors import DamagedFileError
from ratchet.runs import status
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import Journal, JournalEvent
from ratchet.runs.status import RunProgress, replay_events
from ratchet.stages.status import read_run_status


class Story:
    """Builds the events of a run, one second apart."""

    def __init__(self) -> None:
        self.events: list[JournalEvent] = []
        self.attempt = 0

    def add(self, kind: str, **data: object) -> "Story":
        self.events.append(JournalEvent(kind, 1000.0 + len(self.events), self.attempt, dict(data)))
        return self

    def start(self, start_step: int = 0) -> "Story":
        self.attempt += 1
        self.add("attempt_started", pid=1, code_version="1")
        return self.add("worker_ready", start_step=start_step, planned_steps=10)

    def steps(self, first: int, last: int, step_s: float = 0.5) -> "Story":
        for number in range(first, last + 1):
            self.add("step", step=number, loss=10.0 - number, learning_rate=1e-3, grad_norm=1.0,
                     trained_tokens=7, input_tokens=100, step_s=step_s)  # fmt: skip
        return self

    def validation(self, step: int, loss: float, improved: bool) -> "Story":
        return self.add("validation", step=step, loss=loss, improved=improved, tokens=50, seconds=0.1)

    def checkpoint(self, step: int) -> "Story":
        return self.add("checkpoint_saved", step=step, digest="d", size_bytes=1, seconds=0.1, is_best=False)

    def progress(self) -> RunProgress:
        return replay_events(self.events)

    def written(self, root: Path) -> RunPaths:
        paths = RunPaths(root)
        root.mkdir(parents=True)
        paths.journal.write_bytes(b"".join(event.line() for event in self.events))
        return paths


def died(story: Story, cause: str = "killed by SIGKILL") -> Story:
    return story.add("worker_exited", exit_code=-9, failure_class="killed", decision="Retry", text=cause)


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


def test_resumed_run_counts_repeated_steps_once_and_as_lost(tmp_path: Path) -> None:
    story = died(Story().start().steps(1, 4).checkpoint(4).steps(5, 7)).start(start_step=4)
    assert story.progress().step == 4  # the step of its checkpoint, until a step is done
    p = story.steps(5, 8).progress()
    assert (p.step, p.attempts, p.trained_tokens, p.lost_steps) == (8, 2, 8 * 7, 3)
    assert p.attempt_ends == ["attempt 1: killed by SIGKILL"]
    story = died(story).start(start_step=6).steps(7, 10)
    assert story.progress().lost_steps == 3 + 2
    assert "attempts    3; 5 steps repeated" in read_run_status(story.written(tmp_path / "abc")).description
    at_checkpoint = died(Story().start().steps(1, 4).checkpoint(4)).start(start_step=4).steps(5, 6)
    assert at_checkpoint.progress().lost_steps == 0


def test_a_kill_for_memory_counts_until_the_next_worker_has_smaller_micro_batches() -> None:
    story = Story().start()
    story.add("worker_exited", exit_code=-9, failure_class="out_of_memory", decision="Retry", text="killed")
    assert story.progress().killed_for_memory
    story.attempt += 1
    story.add("attempt_started", pid=1, code_version="1").add("interrupted", signal="SIGTERM", step=0)
    assert story.progress().killed_for_memory, "no worker was ready"
    assert not story.start().progress().killed_for_memory
    assert story.progress().start_step == 0


def test_best_validation_stays_the_best_when_it_is_done_again() -> None:
    story = Story().start().steps(1, 3).validation(3, 0.8, True).steps(4, 6).validation(6, 0.7, True)
    story = died(story).start(start_step=3).steps(4, 6).validation(6, 0.7, True)
    p = story.steps(7, 9).validation(9, 0.9, False).progress()
    assert (p.best_loss, p.best_step, p.validation_loss) == (0.7, 6, 0.9)


def test_speed_and_time_left_are_those_of_the_recent_steps() -> None:
    story = Story().start()
    story.events[-1] = JournalEvent("worker_ready", 0.0, 1, {"start_step": 0, "planned_steps": 300})
    p = story.steps(1, 100, step_s=8.0).steps(101, 101 + status.RATE_WINDOW - 1, step_s=0.25).progress()
    assert p.steps_per_s == pytest.approx(4.0)
    assert p.tokens_per_s == pytest.approx(400.0)
    assert p.remaining_s == pytest.approx((300 - 150) / 4.0)


def test_a_running_run_is_described(tmp_path: Path) -> None:
    paths = Story().start().steps(1, 6).validation(6, 0.75, True).checkpoint(6).written(tmp_path / "abc")
    with paths.lock().acquire():
        text = read_run_status(paths).description
    assert "run abc: running" in text
    assert "step        6 of 10" in text
    assert "loss        4.0000 (learning rate 1.00e-03)" in text
    assert "validation  0.7500 at step 6; best 0.7500 at step 6" in text
    assert "rate        2.00 steps/s, 200 tokens/s" in text
    assert "time left   about 2 s" in text
    assert "checkpoint  step 6, saved" in text
    assert "attempts    1" in text


STOPPED = "stopped on request; run the same command again (`dvc repro`; `ratchet sweep` for a trial) to resume"
FINISHED = {"step": 6, "reason": "early_stopped", "adapter_digest": "a"}


@pytest.mark.parametrize(
    ("story", "trained", "says"),
    [
        (Story().start().steps(1, 6).add("finished", **FINISHED), False, ["run abc: finished (early stopped)"]),
        (
            Story().start().steps(1, 6).add("interrupted", step=6),
            False,
            [STOPPED, "attempt 1: stopped on request at step 6"],
        ),
        (Story().start().steps(1, 6), False, ["run abc: not running; run the same command"]),
        (Story().start().steps(1, 6).add("interrupted", step=6).start(6), True, ["run abc: running", "attempts    2"]),
        (Story().start().steps(1, 6).add("finished", **FINISHED).start(4).steps(5, 5), True, ["run abc: running"]),
    ],
    ids=["finished", "stopped", "supervisor died", "resumed after a stop", "trains again, its result was lost"],
)
def test_state_of_a_run_is_described(tmp_path: Path, story: Story, trained: bool, says: list[str]) -> None:
    paths = story.written(tmp_path / "abc")
    with paths.lock().acquire() if trained else nullcontext():
        text = read_run_status(paths).description
    for words in says:
        assert words in text
    if "finished" in says[0]:
        assert "time left" not in text
        assert "dvc repro" not in text


def test_causes_of_earlier_ends_notices_and_the_last_alerts_are_shown(tmp_path: Path) -> None:
    story = died(Story().start().steps(1, 3), "out of disk").start().add("notice", text="code version changed")
    story.add("worker_exited", exit_code=-9, failure_class="out_of_memory", decision="Retry", text="too much")
    for number in range(9):
        story.add("alert", text=f"storage fails, {number}")
    text = read_run_status(story.written(tmp_path / "abc")).description
    assert "attempt 1: killed, out of disk" in text
    assert "attempt 2: out of memory, too much" in text
    assert "notice      code version changed" in text
    assert "alert       storage fails, 8" in text
    assert text.count("alert  ") == status.SHOWN


def test_damaged_lines_of_the_journal_are_counted(tmp_path: Path) -> None:
    paths = Story().start().steps(1, 3).written(tmp_path / "abc")
    with paths.journal.open("ab") as stream:
        stream.write(b"garbage\n\x00\x00\n")
        stream.write(Story().steps(4, 4).events[0].line().replace(b'"step_s"', b'"steps"'))  # a number is missing
    text = read_run_status(paths).description
    assert "step        4 of 10" in text
    assert "3 damaged journal line(s) skipped" in text


LONG = Story().start().steps(1, 2000).validation(2000, 0.75, True).checkpoint(2000).steps(2001, 3000)


def shown(content: bytes, root: Path) -> str:
    """Return the output of `ratchet status` for a journal, without the age of the checkpoint."""
    paths = Story().written(root)
    paths.journal.write_bytes(content)
    return re.sub("sealed .* ago", "sealed", read_run_status(paths).description)


@pytest.mark.parametrize("at", [3, 1500, 2500])
@pytest.mark.parametrize("cut", [1, 60, -2])
def test_a_damaged_line_in_the_middle_costs_that_line_only(tmp_path: Path, at: int, cut: int) -> None:
    lines = [event.line() for event in LONG.events]
    without = shown(b"".join(lines[:at] + lines[at + 1 :]), tmp_path / "without" / "abc")
    damaged = shown(b"".join([*lines[:at], lines[at][:cut] + b"\n", *lines[at + 1 :]]), tmp_path / "damaged" / "abc")
    assert damaged == f"{without}\n  notice      1 damaged journal line(s) skipped"


def test_a_torn_tail_is_not_told_yet_and_is_no_damage(tmp_path: Path) -> None:
    lines = [event.line() for event in LONG.events]
    whole = shown(b"".join(lines[:-1]), tmp_path / "whole" / "abc")
    assert shown(b"".join(lines)[:-1], tmp_path / "torn" / "abc") == whole
    assert "step        2999 of 10" in whole


def test_a_journal_that_was_shortened_or_replaced_is_told_as_it_is_now(tmp_path: Path) -> None:
    paths = LONG.written(tmp_path / "abc")
    assert "step        3000 of 10" in read_run_status(paths).description
    paths.journal.write_bytes(paths.journal.read_bytes()[: -500 * len(LONG.events[-1].line())])
    assert "step        2500 of 10" in read_run_status(paths).description
    other = b"".join(event.line() for event in Story().start().steps(1, 7).events)
    paths.journal.write_bytes(other)
    assert "step        7 of 10" in read_run_status(paths).description


def test_run_without_events_is_described(tmp_path: Path) -> None:
    (tmp_path / "abc").mkdir()
    Journal(tmp_path / "abc" / "journal.jsonl", 0).close()
    assert "step        0 of ?" in read_run_status(RunPaths(tmp_path / "abc")).description
    p = status.read_progress(RunPaths(tmp_path / "abc"))
    assert (p.step, p.planned_steps, p.attempts, p.loss, p.best_loss, p.finished) == (0, 0, 0, None, None, None)
    assert (p.steps_per_s, p.tokens_per_s, p.remaining_s) == (None, None, None)


# ---------------------------------------------------------------------------------------------- failures and their cost


def saved(story: Story, step: int, blocked_s: float, written: int = 1000, linked: int = 0) -> Story:
    return story.add("checkpoint_saved", step=step, is_best=False, size_bytes=written + linked, bytes_written=written,
                     bytes_linked=linked, blocked_s=blocked_s, seconds=1.0)  # fmt: skip


def skipped(story: Story, step: int, rollback_step: int | None = None) -> Story:
    return story.add("step_skipped", step=step, action="skip" if rollback_step is None else "roll_back",
        reason="loss is nan",
                     rows=[3, 1, 2], rollback_step=rollback_step, learning_rate_scale=1.0)  # fmt: skip


def test_cost_of_checkpoints_is_shown(tmp_path: Path) -> None:
    story = Story().start().steps(1, 10, step_s=1.0)
    for number in range(1, 101):
        saved(story, number, blocked_s=number / 1000, written=2_000_000, linked=500_000)
    text = read_run_status(story.written(tmp_path / "abc")).description
    assert "checkpoint  step 100, saved" in text
    assert "100 saved: training blocked p50 50.0 ms, p99 99.0 ms, 33.55 % of the time" in text
    assert "190.7 MiB written, 47.7 MiB linked" in text
    old = read_run_status(Story().start().steps(1, 1).checkpoint(1).written(tmp_path / "first format")).description
    # An old journal has no blocked_s, so the duration of the save counts.
    assert "1 saved: training blocked p50 100.0 ms, p99 100.0 ms" in old


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [([], 0.5, 0.0), ([7.0], 0.5, 7.0), ([7.0], 0.99, 7.0), ([3.0, 1.0, 2.0], 0.5, 2.0), ([2.0, 1.0], 0.5, 1.0),
     ([float(n) for n in range(1, 201)], 0.99, 198.0), ([1.0, 2.0], 1.0, 2.0), ([1.0, 2.0], 0.0, 1.0)],
)  # fmt: skip
def test_quantiles_are_of_the_nearest_rank(values: list[float], share: float, found: float) -> None:
    assert status.compute_quantile(values, share) == found


def test_steps_that_were_left_out_are_told_and_count_as_steps(tmp_path: Path) -> None:
    story = skipped(skipped(Story().start().steps(1, 4), 5).steps(6, 7), 8, rollback_step=6)
    p = story.progress()
    assert (p.step, sorted(p.skipped_steps), p.trained_tokens) == (8, [5, 8], 6 * 7)
    text = read_run_status(story.written(tmp_path / "abc")).description
    assert (
        "skipped     2 of the steps; the last is 8: loss is nan, rolled back to the weights of step 6; rows 3, 1, 2"
        in text
    )


def test_repeats_spikes_and_budgets_are_told(tmp_path: Path) -> None:
    story = Story().start().steps(1, 2).add("step_repeated", step=3, reason="loss is nan").steps(3, 3)
    story.add("gradient_spike", step=4, grad_norm=9.0, median=1.0, deviations=30.0, rows=[1]).steps(4, 4)
    for step, tokens in ((5, 800), (7, 1200), (9, None)):
        story.add(
            "microbatch_budget",
            step=step,
            phase="train",
            action="shrink",
            failed_tokens=1000,
            budget={"tokens": tokens},
        )
    story.add(
        "microbatch_budget", step=9, phase="validation", action="shrink", failed_tokens=9, budget={"tokens": 4096}
    )
    text = read_run_status(story.written(tmp_path / "abc")).description
    assert "doubtful    1 steps computed twice, 1 with a spike" in text
    assert "micro-batch of train no longer limited, since step 9" in text
    assert "micro-batch of validation limited to 4,096 padded tokens, since step 9" in text


def test_a_quiet_run_shows_no_trouble(tmp_path: Path) -> None:
    text = read_run_status(Story().start().steps(1, 6).checkpoint(6).written(tmp_path / "abc")).description
    for word in ("skipped", "doubtful", "memory", "alert", "notice", "again\n"):
        assert word not in text


@pytest.mark.parametrize(
    "kind",
    [
        "step",
        "step_skipped",
        "validation",
        "checkpoint_saved",
        "microbatch_budget",
        "worker_exited",
        "worker_ready",
        "alert",
    ],
)
@pytest.mark.parametrize("data", [{}, {"step": "x"}, {"step": 3}, {"text": 7, "failure_class": None}], ids=str)
def test_damaged_events_are_counted_and_harm_nothing(tmp_path: Path, kind: str, data: dict[str, object]) -> None:
    story = Story().start().steps(1, 3)
    story.add(kind, **data)
    text = read_run_status(story.steps(4, 5).written(tmp_path / "abc")).description
    assert "step        5 of 10" in text


def test_a_run_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    paths = Story().start().written(tmp_path / "abc")
    paths.format.write_text('{"format": 3}')
    with pytest.raises(DamagedFileError, match="newer version"):
        read_run_status(paths)
