"""Tests several processes that use one experiment at the same time: points are stored once, one run is created."""

import random
import sqlite3
from contextlib import closing
from typing import Any

import pytest

from journaled import NAME
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.experiments import LATE_TAG, RUN_TAG, Experiment, log_batch

PROCESSES, ROUNDS = 4, 25
KEYS = [f"key-{number}" for number in range(8)]


def log_overlapping_batches(layout: ProjectLayout, mlflow_id: str, seed: int, together: Any) -> None:
    """Log points at the same time as other processes; some points are also logged by others."""
    from mlflow.entities import Metric

    chosen = random.Random(seed)
    with Experiment(layout, NAME, None).connected() as client:
        for step in range(ROUNDS):
            metrics = [Metric(key, 0.5, 1000, step) for key in chosen.sample(KEYS, 6)]
            together.wait()
            log_batch(client, mlflow_id, metrics=metrics)


def test_overlapping_batches_of_several_processes_are_stored_once(
    tracked_project: ProjectLayout, processes: Any
) -> None:
    with Experiment(tracked_project, NAME, None).connected() as client:
        run = client.create_run(client.get_experiment_by_name(NAME).experiment_id).info.run_id
    together = processes.Barrier(PROCESSES)
    several = [
        processes.Process(target=log_overlapping_batches, args=(tracked_project, run, seed, together))
        for seed in range(PROCESSES)
    ]
    for process in several:
        process.start()
    for process in several:
        process.join()
    assert [process.exitcode for process in several] == [0] * PROCESSES
    expected = set()
    for seed in range(PROCESSES):
        chosen = random.Random(seed)
        expected |= {(key, step) for step in range(ROUNDS) for key in chosen.sample(KEYS, 6)}
    with closing(sqlite3.connect(tracked_project.mlflow_database)) as connection:
        stored = connection.execute("select key, step from metrics where run_uuid = ?", (run,)).fetchall()
    assert sorted(stored) == sorted(expected)


def test_other_errors_are_raised_at_once(tracked_project: ProjectLayout) -> None:
    from mlflow.entities import Metric
    from mlflow.exceptions import MlflowException

    with (
        Experiment(tracked_project, NAME, None).connected() as client,
        pytest.raises(MlflowException, match="not found"),
    ):
        log_batch(client, "0" * 32, metrics=[Metric("loss", 0.5, 1000, 1)])


def test_of_several_runs_of_one_id_the_oldest_that_was_made_in_time_is_found(tracked_project: ProjectLayout) -> None:
    experiment = Experiment(tracked_project, NAME, None)
    with experiment.connected() as client:
        late, newer, first, other = (
            client.create_run(experiment.id, start_ms, {RUN_TAG: run_id} | more).info.run_id
            for start_ms, run_id, more in (
                (1000, "a" * 12, {LATE_TAG: "true"}), (3000, "a" * 12, {}), (2000, "a" * 12, {}), (500, "b" * 12, {})
            )
        )  # fmt: skip
        found = []
        for kept in (first, newer, late):
            found.append(experiment.find("a" * 12).info.run_id)
            client.delete_run(kept)
    assert found == [first, newer, late]
    assert experiment.find("a" * 12) is None
    assert experiment.find("b" * 12).info.run_id == other
