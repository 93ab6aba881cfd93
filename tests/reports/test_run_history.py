"""Tests the history of a run: exact totals, and no spike lost in summaries."""

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import trained_runs
from ratchet.reports import run_history
from ratchet.reports.run_history import MAX_BUCKETS, MOST_MARKS, BucketedSeries, average_curves
from ratchet.runs import status
from ratchet.runs.journal import JournalEvent, JournalReader
from trained_runs import STEP_S, TRAINED_TOKENS, VALIDATION_S, Training

PLAIN = Training(steps=60, restarts=((37, 30), (52, 50)))


def journal(folder: Path, one: Training) -> Path:
    path = folder / "journal.jsonl"
    path.write_bytes(b"".join(event.line() for event in trained_runs.events(one)))
    return path


def test_each_step_counts_once_whatever_was_done_again(tmp_path: Path) -> None:
    found = run_history.read_history(journal(tmp_path, PLAIN))
    line = found.steps.line()
    assert line.step.tolist() == list(range(1, 61))
    assert line.mean["loss"].tolist() == [PLAIN.loss(step) for step in range(1, 61)]
    assert line.tokens.tolist() == [TRAINED_TOKENS * step for step in range(1, 61)]
    # A validation follows every tenth step; its time counts before the next step.
    assert line.seconds.tolist() == [STEP_S * step + VALIDATION_S * ((step - 1) // 10) for step in range(1, 61)]
    assert (found.step, found.repeated_steps, found.trained_tokens) == (60, 7 + 2, 60 * TRAINED_TOKENS)
    assert found.seconds == 60 * STEP_S + 6 * VALIDATION_S
    validated = found.validations.line()
    assert validated.step.tolist() == [10, 20, 30, 40, 50, 60]
    assert validated.seconds.tolist() == [
        step * STEP_S + step // 10 * VALIDATION_S for step in (10, 20, 30, 40, 50, 60)
    ]
    assert found.best == (60, PLAIN.validation_loss(60))


def test_course_agrees_with_the_status_of_the_run_and_marks_restarts(tmp_path: Path) -> None:
    path = journal(tmp_path, PLAIN)
    found, told = run_history.read_history(path), status.replay_events(JournalReader(path).read())
    assert (found.step, found.loss, found.trained_tokens) == (told.step, told.loss, told.trained_tokens)
    assert found.validation == (told.validation_step, told.validation_loss)
    assert (found.progress.attempt_ends, found.progress.attempts, found.progress.finished) == (
        told.attempt_ends,
        3,
        "completed",
    )
    assert (found.checkpoints, found.repeated_steps) == (told.checkpoint_costs.count, told.lost_steps)
    marks = [(mark.step, mark.kind) for mark in found.marks]
    assert marks == [(37, "died"), (30, "resumed"), (52, "died"), (50, "resumed")]
    assert "killed" in found.marks[0].text


def test_steps_left_out_shrinks_and_alerts_are_marked_too(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    budget = {"tokens": 64, "failed_tokens": None, "good_steps": 0, "wait_steps": 1, "grown": 0}
    lines = [event.line() for event in trained_runs.events(Training(steps=20))]
    told = [
        ("step_skipped", {"step": 21, "action": "skip", "reason": "loss is NaN", "rows": [1], "rollback_step": None}),
        ("step_skipped", {"step": 22, "action": "roll_back", "reason": "twice", "rows": [1], "rollback_step": 20}),
        (
            "microbatch_budget",
            {"step": 23, "phase": "train", "action": "shrink", "failed_tokens": 128, "budget": budget},
        ),
        ("gradient_spike", {"step": 24, "grad_norm": 9.0, "median": 1.0, "deviations": 8.0, "rows": [2]}),
        ("step_repeated", {"step": 25, "reason": "not finite: {a, b}"}),
        ("alert", {"text": "the disk is full: é, {x}"}),
    ]
    lines[-1:] = [JournalEvent(kind, 1.0, 1, data).line() for kind, data in told]
    path.write_bytes(b"".join(lines))
    found = run_history.read_history(path)
    assert [(mark.kind, mark.step) for mark in found.marks] == [
        ("skipped", 21), ("rolled back", 22), ("shrunk", 23), ("spike", 24), ("repeated", 25), ("alert", 20),
    ]  # fmt: skip
    assert found.marks[-1].text == "the disk is full: é, {x}"
    assert found.damaged == found.progress.damaged_events == 0


def test_of_very_many_events_some_are_kept_and_all_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"".join(JournalEvent("alert", 1.0, 1, {"text": f"{k}"}).line() for k in range(500)))
    found = run_history.read_history(path)
    assert (len(found.marks), found.counts["alert"]) == (MOST_MARKS, 500)


@pytest.mark.parametrize("steps", [MAX_BUCKETS - 1, MAX_BUCKETS, MAX_BUCKETS + 1, 5000])
def test_a_summary_keeps_every_spike_and_every_sum(tmp_path: Path, steps: int) -> None:
    one = Training(steps=steps, spike=(steps // 2 + 3, 77.0), restarts=((steps // 3, steps // 4),))
    line = run_history.read_history(journal(tmp_path, one)).steps.line(100)
    assert len(line) <= 100
    losses = np.array([math.nan, *(one.loss(step) for step in range(1, steps + 1))])
    at = [range(int(end) // line.width * line.width, int(end) + 1) for end in line.step]
    for place, numbers in enumerate(at):
        inside = losses[[step for step in numbers if step > 0]]
        assert line.low["loss"][place] == inside.min()
        assert line.high["loss"][place] == inside.max()
        assert line.mean["loss"][place] == pytest.approx(inside.mean())
        assert line.tokens[place] == TRAINED_TOKENS * numbers[-1]
    assert line.step[-1] == steps
    assert line.high["loss"].max() == 77.0


def test_a_long_journal_takes_no_more_memory_than_a_short_one(tmp_path: Path) -> None:
    path = journal(tmp_path, Training(steps=2_000))
    lines = path.read_bytes()
    with path.open("ab") as stream:
        for k in range(1, 60):
            stream.write(lines.replace(b'"step":', b'"step":%d' % k))
    assert path.stat().st_size > 25_000_000
    tracemalloc.start()
    try:
        found = run_history.RunHistory()
        for block in run_history.read_blocks(path, 1 << 20):
            found.add(block)
        assert tracemalloc.get_traced_memory()[1] < 15_000_000
    finally:
        tracemalloc.stop()
    assert found.lines > 120_000
    assert len(found.steps.line()) <= MAX_BUCKETS


@pytest.mark.parametrize(
    "text", [b"", b'{"attempt":1,"event":"attempt_started","pid":1,"t":1.0}\n'], ids=["empty", "begun"]
)
def test_a_journal_without_a_step_is_a_course(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(text)
    found = run_history.read_history(path)
    assert (len(found.steps.line()), len(found.validations.line()), found.step, found.best) == (0, 0, 0, None)


def test_seeds_are_a_mean_and_a_standard_deviation(tmp_path: Path) -> None:
    lines = [
        run_history.read_history(journal(tmp_path, one)).steps.line()
        for one in trained_runs.seeds(replace(PLAIN, restarts=()), 3)
    ]
    found = average_curves(lines, 60)
    losses = np.stack([line.mean["loss"] for line in lines])
    assert found.mean["loss"] == pytest.approx(losses.mean(axis=0))
    assert found.high["loss"] - found.low["loss"] == pytest.approx(2 * losses.std(axis=0, ddof=1))
    assert found.step.tolist() == list(range(1, 61))
    shorter = run_history.read_history(journal(tmp_path, Training(done=33, seed=1))).steps.line()
    assert average_curves([lines[0], shorter], 500).step[-1] == 33, "as far as all of the group"


def test_a_series_may_begin_anywhere() -> None:
    series = BucketedSeries(["x"], most=4)
    steps = np.array([1e9, 1e9 + 1])
    series.add({"step": steps, "tokens": steps, "seconds": steps}, {"x": np.array([1.0, 5.0])})
    line = series.line()
    assert (line.step.tolist(), line.low["x"].tolist(), line.high["x"].tolist()) == ([1e9 + 1], [1.0], [5.0])
