"""Proves row R12 for sweeps: if the process that sends trials to MLflow is killed at any point, the next process
completes the sync."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from ratchet.storage.layout import ProjectLayout
from ratchet.tuning import tracking_sync
from tracking_sync_cases import (
    Study,
    found,
    quick,  # noqa: F401 (a fixture)
    shown,
    started,
    steps,
    study,  # noqa: F401 (a fixture)
)

PACKAGES = ("tuning", "reports")


def rows(study: Study, table: str) -> int:
    with closing(sqlite3.connect(study.layout.mlflow_database)) as connection:
        (count,) = connection.execute(f"select count(*) from {table}").fetchone()  # noqa: S608 (our names)
    return int(count)


def watch(root: Path) -> None:
    """Send a study with finished trials to MLflow. This function is the target of a process."""
    tracking_sync.INTERVAL_S = 0.01
    assert started(found(ProjectLayout(root))).close(60)


def test_the_next_sync_completes_a_sync_killed_at_any_point(study: Study, processes: Any) -> None:
    for _ in range(3):
        study.train(number := study.begin(), 1, 50)
        study.end(number, "complete")
    # A complete sync stores 612 points: 4 per step, 1 objective per trial, and those of the parent run.
    for stored_points in (0, 40, 210, 420, 600):
        victim = processes.Process(target=watch, args=(study.layout.root,))
        victim.start()
        while victim.is_alive() and rows(study, "metrics") <= stored_points:
            time.sleep(0.01)
        victim.kill()
        victim.join()
    assert started(study).close(60)
    for number in range(3):
        assert shown(study, number) == ("FINISHED", "complete")
        assert steps(study, number) == list(range(1, 51))
    assert rows(study, "runs") == 4
