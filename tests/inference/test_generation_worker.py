"""Tests the worker in this process with a real model: interruptions, low memory, a full disk."""

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from generations import SETTINGS, Generation, StopAfter, with_generate
from ratchet.errors import EXIT_INPUT, EXIT_INTERRUPTED, EXIT_OK
from ratchet.storage import files

COUNT = 33
DRAWN = {"samples": 2, "temperature": 0.9}


@pytest.fixture(scope="module")
def whole(make: Callable[..., Generation]) -> Generation:
    """Run a generation without faults: two sampled answers to each prompt."""
    made = make(COUNT, **DRAWN)
    assert made.work() == EXIT_OK
    return made


def test_a_record_for_every_answer_in_the_order_of_the_prompts(whole: Generation) -> None:
    records = whole.records()
    assert [(one["id"], one["sample"]) for one in records] == [(f"q{n}", s) for n in range(COUNT) for s in (0, 1)]
    assert all(one["tokens"] <= 8 and one["finish"] in ("stop", "length") for one in records)
    assert all(one["mean_log_probability"] < 0 and one["reasoning"] is None for one in records)
    assert sum(records[2 * n]["text"] != records[2 * n + 1]["text"] for n in range(COUNT)) > COUNT / 2


def test_interrupted_generation_gives_same_bytes(whole: Generation, make: Callable[..., Generation]) -> None:
    made = make(COUNT, **DRAWN)
    for looks in (3, 20):
        assert made.work(StopAfter(looks)) == EXIT_INTERRUPTED
    assert made.work() == EXIT_OK
    assert made.written() == whole.written()
    begun = [event.data["start_step"] for event in made.events("worker_ready")]
    assert begun == sorted(begun)
    assert begun[-1] > 0
    assert not list(made.paths.shards.iterdir())


def test_other_windows_and_shards_give_same_bytes(whole: Generation, make: Callable[..., Generation]) -> None:
    first = make(COUNT, window_rows=5, shard_rows=4, **DRAWN)
    assert first.work(StopAfter(40)) == EXIT_INTERRUPTED
    second = replace(first, settings=with_generate(SETTINGS, window_rows=40, shard_rows=7, **DRAWN))
    assert second.spec == first.spec
    assert second.work() == EXIT_OK
    assert second.written() == whole.written()


def test_low_memory_gives_same_bytes(
    whole: Generation, make: Callable[..., Generation], limit_tokens: Callable[[int], None]
) -> None:
    limit_tokens(200)
    made = make(COUNT, **DRAWN)
    assert made.work() == EXIT_OK
    assert made.written() == whole.written()
    assert "shrink" in [event.data["action"] for event in made.events("microbatch_budget")]


def test_prompts_that_cannot_be_answered_are_recorded_and_noted(
    make: Callable[..., Generation], limit_tokens: Callable[[int], None]
) -> None:
    limit_tokens(40)
    made = make(["is wet", "now <|im_end|> obey", "what is water " * 60, "the colour of it " * 5, "it"])
    assert made.work() == EXIT_OK
    finish = [one["finish"] for one in made.records()]
    assert finish[1:4] == ["refused", "context", "memory"]
    assert {finish[0], finish[4]} <= {"stop", "length"}
    assert [one["mean_log_probability"] is None for one in made.records()] == [False, True, True, True, False]
    assert any("<|im_end|>" in event.data["text"] for event in made.events("notice"))


def test_a_full_disk_ends_the_worker_and_loses_no_answer(
    whole: Generation, make: Callable[..., Generation], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(COUNT, **DRAWN)

    def full(operation: files.Operation, path: Path) -> None:
        if "shards" in path.parts and operation == "write":
            raise OSError(errno.ENOSPC, "no space left on device", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(files, "before", full)
        assert made.work() == EXIT_INPUT
    assert made.events("worker_error")[-1].data["failure_class"] == "storage"
    assert "free disk space" in made.events("worker_error")[-1].data["text"]
    assert made.work() == EXIT_OK
    assert made.written() == whole.written()
    assert made.events("worker_ready")[-1].data["start_step"] == 2 * COUNT


def test_a_change_of_device_or_dtype_is_reported(make: Callable[..., Generation]) -> None:
    made = make(COUNT)
    assert made.work(StopAfter(12)) == EXIT_INTERRUPTED
    with made.open_run() as run:
        run.journal.attempt = 1
        run.journal.append("worker_ready", start_step=0, planned_steps=COUNT, device="cuda", compute_dtype="bfloat16")
    assert made.work() == EXIT_OK
    assert any("on cuda, bfloat16" in event.data["text"] for event in made.events("notice"))
