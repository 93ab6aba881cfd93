"""Tests the screen of a generation in all sizes, its table and its lines."""

from functools import partial

import pytest

from faked_terminal import GIB, SIZES, Events, T, assert_fits, drawn
from ratchet.console.callback import RunEventFormatter, step_unit, summarize_run
from ratchet.console.run_screen import render_panel, render_table
from ratchet.runs.journal import JournalEvent
from ratchet.runs.progress_view import GenerationProgress, ProgressView, SidecarState

LIVE = {
    "rows": 64, "held_tokens": 12_800, "waiting": 20, "budget_tokens": 40_000, "available_bytes": 20 * GIB,
    "device_bytes": 24 * GIB, "held_bytes": 6 * GIB, "forecast_bytes": 7 * GIB, "tokens_chosen": 10_000,
    "tokens_rechecked": 3,
}  # fmt: skip


def eventful() -> Events:
    """Return the journal events of a generation with events of many kinds."""
    found = Events()
    for attempt, (start, end) in enumerate(((0, 200), (200, 500)), start=1):
        found.add("attempt_started", start, attempt, pid=1, code_version="1")
        found.add(
            "worker_ready",
            start,
            attempt,
            start_step=start,
            planned_steps=2000,
            device="cuda",
            compute_dtype="bfloat16",
        )
        for step in range(start + 10, end + 1, 10):
            finish = {"stop": 9, "length": 1}
            found.add(
                "generation_progress", step, attempt, step=step, tokens=1_000, seconds=10.0, finish=finish, **LIVE
            )
        if attempt == 1:
            found.add_killed(end)
    found.add(
        "microbatch_budget",
        501,
        2,
        step=500,
        phase="generate",
        action="shrink",
        failed_tokens=50_000,
        budget={"tokens": 40_000},
    )
    found.add("generation_progress", 510, 2, step=510, tokens=0, seconds=10.0, finish={"refused": 10}, **LIVE)
    found.add(
        "system_metrics", 510, 2, sample=1, cpu_percent=35.0, memory_percent=61.0, disk_used_percent=40.0, gpus=[]
    )
    found.add("notice", 510, 2, text="prompt q7 is recorded as refused" + " long" * 60)
    return found


def view(events: list[JournalEvent] | None = None) -> ProgressView:
    found = ProgressView(generation=GenerationProgress())
    for event in eventful() if events is None else events:
        found.update(event)
    return found


def shown(width: int, height: int, encoding: str = "utf-8", events: list[JournalEvent] | None = None) -> list[str]:
    render = partial(render_panel, "generation abc", view(events), SidecarState(running=True), T + 511)
    return drawn(render, width, height, encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_it_fits(width: int, height: int, encoding: str) -> None:
    lines = shown(width, height, encoding)
    assert_fits(lines, width, height)
    assert lines[0].startswith("generation abc  an")
    assert "510/2000" in lines[1] or "answer 510 of 2,000" in lines[1]


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_one_that_has_only_begun_fits_too(width: int, height: int, count: int) -> None:
    assert_fits(shown(width, height, events=eventful()[:count]), width, height)


def test_all_of_it_on_a_large_screen() -> None:
    text = "\n".join(shown(120, 40))
    for part in (
        "answering, attempt 2", "cuda in bfloat16", "answer 510 of 2,000", "26 %", "about 25 min", "left",
        "1.00 answers/s, 86 tokens/s, 98 tokens per answer", "64 rows in progress, 12,800 of 40,000 padded tokens",
        "20 in the window", "6.0 of 24.0 GiB", "forecast 7.0 (+17 %)", "CPU 35 %",
        "450 stop, 50 length, ! 10 refused", "! batch reduced 1 time for lack of memory",
        "now at most 40,000 padded tokens", "attempt 1 died: killed",
        "answer 500: batch limited to 40,000 padded tokens: 50,000 did not fit", "prompt q7 is recorded as refused",
    ):  # fmt: skip
        assert part in text, part
    assert "step" not in text
    assert "train" not in text


def test_whoever_says_nothing_of_batches_has_no_line_of_them() -> None:
    events = [JournalEvent(one.kind, one.t, one.attempt, {k: None if k in LIVE else v for k, v in one.data.items()})
              for one in eventful()]  # fmt: skip
    text = "\n".join(shown(120, 40, events=events))
    assert "in progress" not in text
    assert "GiB" not in text
    assert "tokens/s" in text


def test_damaged_events_change_nothing() -> None:
    damage = ({}, {"step": "x"}, {"step": 600, "tokens": None, "seconds": 1})
    whole = view().generation
    damaged = view([*eventful(), *(JournalEvent("generation_progress", T, 2, data) for data in damage)]).generation
    assert damaged is not None
    assert whole is not None
    assert (damaged.finish_counts, damaged.tokens) == (whole.finish_counts, whole.tokens)


def test_what_is_left_is_told_from_answers_however_many_come_at_once() -> None:
    begun = [one for one in eventful() if one.kind in ("attempt_started", "worker_ready")][:2]
    bursts = [
        JournalEvent(
            "generation_progress", T + 10 * n, 1, {"step": 20 * (n // 2), "tokens": 1, "seconds": 10.0, "finish": {}}
        )
        for n in range(1, 41)
    ]  # twenty answers every twenty seconds
    left = view([*begun, *bursts]).eta.estimate(T + 400)
    assert left is not None
    assert left.estimate_s == pytest.approx(2000 - 400, rel=0.01)
    assert left.low_s <= left.estimate_s <= left.high_s


def test_beside_trainings_in_a_table_and_in_lines() -> None:
    found = view()
    rows = [("abc", found, SidecarState(running=True)), ("def", ProgressView(), SidecarState())]
    lines = drawn(partial(render_table, rows, T + 511), 120, 10)
    assert "answering" in lines[1]
    assert "510/2000" in lines[1]
    assert " 86" in lines[1]
    assert summarize_run(found, SidecarState(running=True), T + 511).startswith(
        "answering, answer 510/2000, about 25 min"
    )
    said: list[str] = []
    telling = RunEventFormatter(said.append, "abc ", step_unit(found))
    for event in eventful()[:2]:
        telling.event(event)
    telling.figures(found, T + 511)
    assert said[0] == "abc starting, 2000 answers on cuda in bfloat16"
    assert said[1].startswith(
        "abc answer 510/2000: 1.00 answers/s, 86 tokens/s, 64 rows per batch, 20.00 GiB free, about 25 min"
    )
