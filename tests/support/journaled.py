"""Runs with a journal but without a training, and their state in MLflow."""

import sqlite3
from contextlib import closing
from typing import Any

from ratchet.config.settings import Settings
from ratchet.reports import plots
from ratchet.runs.directory import RESULT, RunDirectory, RunPaths, RunSpec
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard, LengthDistribution
from ratchet.storage.records.training import TrainReport
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.run_logger import MlflowRunCallback

SETTINGS = Settings()
NAME = SETTINGS.promote.model_name
LENGTHS = LengthDistribution(least=1, median=2, p95=3, greatest=4, total=10, trained=5)
CARD = DatasetCard(
    digest="d" * 64,
    sources={"data/raw/a.jsonl": "1" * 64, "data/raw/b.csv": "2" * 64},
    base_digest="b" * 64,
    task="text",
    rows_in=12,
    rows_out=10,
    dropped={},
    splits={"train": 8, "validation": 1, "test": 1},
    lengths={"train": LENGTHS},
    labels={},
)


def opened(layout: ProjectLayout, seed: int = 0) -> RunDirectory:
    """Open a run in a project with prepared data. The test holds the lock of the run."""
    CARD.save(layout.dataset_card)
    train = SETTINGS.train.model_copy(update={"seed": seed})
    return RunDirectory.open(layout.runs, RunSpec(train=train, data_digest=CARD.digest, base_digest="b" * 64))


def attempt(run: RunDirectory, number: int, first: int, last: int, pid: int = 1) -> None:
    """Append the events of an attempt to the journal: steps first..last, with a validation after every tenth step."""
    run.journal.attempt = number
    run.journal.append("attempt_started", pid=pid, code_version=f"code-{number}")
    run.journal.append("worker_ready", start_step=first - 1, planned_steps=100)
    for step in range(first, last + 1):
        run.journal.append(
            "step", step=step, loss=1 / step, learning_rate=1e-3, grad_norm=0.5, trained_tokens=5,
            input_tokens=10, step_s=0.1,
        )  # fmt: skip
        if step % 10 == 0:
            run.journal.append("validation", step=step, loss=2 / step, tokens=9, seconds=0.1, improved=True)


def seal_result(paths: RunPaths, best: int = 10, last: int = 20) -> None:
    report = TrainReport(
        run_id=paths.root.name, adapter_digest="a" * 64, base_digest="b" * 64, data_digest=CARD.digest, steps=last,
        planned_steps=100, best_step=best, kept_step=best, validation_loss={best: 2 / best}, final_train_loss=1.0,
        trained_tokens=70, input_tokens=700, trainable_parameters=10, total_parameters=1000,
    )  # fmt: skip
    with files.sealed_directory(paths.result, RESULT) as scratch:
        report.save(scratch / "train.json")
        (scratch / "adapter").mkdir()
        files.write_json(scratch / "adapter" / "adapter_config.json", {"r": 4})
        (scratch / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")


def callback(layout: ProjectLayout, run: RunDirectory) -> MlflowRunCallback:
    """Create a callback as a new process does, without state from earlier callbacks."""
    return MlflowTracker(layout, NAME).create_callback(run.paths, SETTINGS, plots.draw_loss_curve)


def journal(run: RunDirectory) -> list[JournalEvent]:
    return list(JournalReader(run.paths.journal).read())


def stored(layout: ProjectLayout, run: RunDirectory) -> Any:
    found = MlflowTracker(layout, NAME).find(run.spec.run_id)
    assert found is not None
    return found


def points(layout: ProjectLayout, run: RunDirectory, key: str) -> list[tuple[int, float, int]]:
    """Read the rows of a metric from the metrics table without MLflow: (step, value, time in ms)."""
    with closing(sqlite3.connect(layout.mlflow_database)) as connection:
        rows = connection.execute(
            "select step, value, timestamp from metrics where key = ? and run_uuid = ? order by step, timestamp",
            (key, stored(layout, run).info.run_id),
        )
        return list(rows)
