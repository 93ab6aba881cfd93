"""Tests the outcome of a trial's run, read from its journal."""

from pathlib import Path

import pytest

from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import Journal
from ratchet.tuning import trial


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def step(journal: Journal, number: int) -> None:
    journal.append(
        "step", step=number, loss=2.0, learning_rate=1e-3, grad_norm=1.0, trained_tokens=10, input_tokens=40,
        step_s=0.5, batch="0" * 12,
    )  # fmt: skip


def ready(journal: Journal, start: int = 0) -> None:
    journal.append("worker_ready", start_step=start, planned_steps=8, trainable_parameters=77, total_parameters=100)


def failed(paths: RunPaths, cause: str, text: str, **more: int) -> Journal:
    """Write the journal of a run in which an attempt failed; return it open."""
    journal = Journal(paths.journal, 1)
    journal.append("attempt_started", pid=1, code_version="x")
    journal.append("worker_error", failure_class=cause, text=text, **more)
    return journal


def test_tokens_of_steps_that_were_done_twice_count_once_and_the_rest_is_extrapolated(paths: RunPaths) -> None:
    journal = Journal(paths.journal, 1)
    journal.append("attempt_started", pid=1, code_version="x")
    ready(journal)
    step(journal, 1)
    step(journal, 2)
    journal.attempt = 2
    journal.append("attempt_started", pid=2, code_version="x")
    ready(journal, 1)
    step(journal, 2)
    journal.append("memory_peak", phase="steady", peak_bytes=900, allocated_bytes=0, host_bytes=0, device_bytes=4000)
    journal.append("memory_peak", phase="loaded", peak_bytes=500, allocated_bytes=0, host_bytes=0, device_bytes=4000)
    journal.close()
    spent = trial.compute_cost(paths, trial.read_run_summary(paths))
    assert (spent.trained_tokens, spent.planned_tokens, spent.steps, spent.planned_steps) == (20, 80, 2, 8)
    assert (spent.train_seconds, spent.memory_bytes, spent.trainable_parameters, spent.attempts) == (1.5, 900, 77, 2)


@pytest.mark.parametrize(
    ("cause", "constraint"),
    [("too_large", "memory"), ("out_of_memory", "memory"), ("diverged", "diverged"), ("bug", None), ("killed", None)],
)
def test_a_failure_that_depends_on_the_values_is_a_constraint(
    paths: RunPaths, cause: str, constraint: str | None
) -> None:
    failed(paths, cause, "so it was").close()
    found = trial.read_run_summary(paths)
    assert (found.cause, found.text) == (cause, "so it was")
    assert found.constraints == ({constraint: 1.0} if constraint else {})


def test_the_forecast_says_how_much_memory_was_missing(paths: RunPaths) -> None:
    journal = failed(paths, "too_large", "too large", needed_bytes=3000, available_bytes=2000)
    journal.append("worker_exited", exit_code=2, failure_class="too_large", decision="GiveUp", text="too large")
    journal.close()
    assert trial.read_run_summary(paths).constraints == {"memory": 0.5}


def test_a_failure_of_an_earlier_attempt_is_none_of_a_later_one(paths: RunPaths) -> None:
    journal = failed(paths, "diverged", "NaN")
    journal.attempt = 2
    journal.append("attempt_started", pid=2, code_version="x")
    journal.append("worker_exited", exit_code=-9, failure_class="killed", decision="GiveUp", text="killed by SIGKILL")
    journal.close()
    found = trial.read_run_summary(paths)
    assert (found.cause, found.text, found.constraints) == ("killed", "killed by SIGKILL", {})
