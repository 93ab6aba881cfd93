"""Studies and their sync to MLflow, for tests."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.runs.callbacks import RunCallback
from ratchet.runs.directory import RESULT, RunDirectory, RunPaths, RunSpec
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard, LengthDistribution
from ratchet.storage.records.sweep import SweepObjective, SweepReport, Trial
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.sweeps import MlflowSweepTracker
from ratchet.tuning import tracking_sync
from ratchet.tuning.tracking_sync import SweepTrackingSync

SETTINGS = Settings()
NAME = SETTINGS.promote.model_name
LENGTHS = LengthDistribution(least=1, median=2, p95=3, greatest=4, total=10, trained=5)
CARD = DatasetCard(
    digest="d" * 64, sources={"data/raw/a.jsonl": "1" * 64}, base_digest="b" * 64, task="text", rows_in=12, rows_out=10,
    dropped={}, splits={"train": 8, "validation": 1, "test": 1}, lengths={"train": LENGTHS}, labels={},
)  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking_sync, "INTERVAL_S", 0.05)


class Study:
    """A study with runs in a project. The runs have the files that workers write, but no training took place."""

    def __init__(self, layout: ProjectLayout) -> None:
        self.layout = layout
        self.trials: list[Trial] = []
        self.runs: dict[int, RunDirectory] = {}
        CARD.save(layout.dataset_card)

    def report(self) -> SweepReport:
        return SweepReport(
            study="sweep", storage="sqlite",
            objectives=(SweepObjective(metric="validation_loss", direction="minimize"),),
            axes=(), sampler="random", pruner="asha", versions={}, data_digest=CARD.digest, base_digest="b" * 64,
            planned_trials=20, trials=tuple(self.trials),
        )  # fmt: skip

    def begin(self, continues: int | None = None) -> int:
        """Begin the next trial, as a worker does."""
        number = len(self.trials)
        seed = number if continues is None else continues
        train = SETTINGS.train.model_copy(update={"seed": seed})
        run = RunDirectory.open(self.layout.runs, RunSpec(train=train, data_digest=CARD.digest, base_digest="b" * 64))
        self.runs[number] = run
        self.trials.append(
            Trial(
                number=number,
                values={"train.rank": 8},
                run_id=run.spec.run_id,
                state="running",
                started=100.0 + number,
                continues=continues,
            )
        )
        return number

    def train(self, number: int, first: int, last: int) -> None:
        """Append the events of an attempt with these steps."""
        journal = self.runs[number].journal
        journal.attempt += 1
        journal.append("attempt_started", pid=1, code_version="1")
        journal.append("worker_ready", start_step=first - 1, planned_steps=100)
        for step in range(first, last + 1):
            journal.append(
                "step", step=step, loss=1 / step, learning_rate=1e-3, grad_norm=0.5, trained_tokens=5, input_tokens=10,
                step_s=0.1,
            )  # fmt: skip

    def end(self, number: int, state: Any, sealed: bool = True) -> None:
        """Write the end of a trial, as a worker does."""
        run = self.runs[number]
        if state == "complete" or (state == "failed" and sealed):
            run.journal.append("finished", step=100, reason="completed", adapter_digest="a")
            with files.sealed_directory(run.paths.result, RESULT) as scratch:
                files.write_json(scratch / "train.json", {"steps": 1})
        else:
            run.journal.append("interrupted", step=100)
        run.close()
        objectives = (1.0 + number,) if state == "complete" else ()
        told = {"state": state, "objectives": objectives, "ended": 200.0 + number, "reason": "as it is"}
        self.trials[number] = self.trials[number].model_copy(update=told)


@pytest.fixture
def study(tracked_project: ProjectLayout) -> Study:
    return Study(tracked_project)


def draw(journal: Path, image: Path, train: Train) -> None:
    """Write a file that replaces a plot."""
    image.write_bytes(journal.name.encode())


def started(
    study: Study,
    wrap: Callable[[RunCallback], RunCallback] = lambda one: one,
    prelude: Callable[[], None] = lambda: None,
) -> SweepTrackingSync:
    """Start a sync as a new process does."""
    tracking = MlflowTracker(study.layout, NAME)

    def callback(run_id: str, trial: Trial) -> RunCallback:
        return wrap(tracking.create_callback(RunPaths(study.layout.runs / run_id), SETTINGS, draw, reconcile=False))

    made = SweepTrackingSync(
        study.layout.runs, study.report, callback, MlflowSweepTracker(tracking, lambda _: {}), prelude
    )
    made.start()
    return made


def stored(study: Study, number: int) -> Any:
    found = MlflowTracker(study.layout, NAME).find(study.trials[number].run_id or "")
    assert found is not None
    return found


def shown(study: Study, number: int) -> tuple[str, str | None]:
    """Return the run status and the trial state in MLflow, or ("", None) if MLflow has no such run."""
    found = MlflowTracker(study.layout, NAME).find(study.trials[number].run_id or "")
    return ("", None) if found is None else (found.info.status, found.data.tags.get("ratchet.trial_state"))


def steps(study: Study, number: int) -> list[int]:
    """Read the steps of the loss from MLflow's table without MLflow."""
    with closing(sqlite3.connect(study.layout.mlflow_database)) as connection:
        wanted = "select step from metrics where key = 'train/loss' and run_uuid = ? order by step"
        return [step for (step,) in connection.execute(wanted, (stored(study, number).info.run_id,))]


def found(layout: ProjectLayout) -> Study:
    """Return a complete study in the form in which another process finds it."""
    study = Study(layout)
    for number in range(3):
        study.begin()
        study.runs[number].close()
        told = {"state": "complete", "objectives": (1.0,), "ended": 200.0 + number}
        study.trials[number] = study.trials[number].model_copy(update=told)
    return study
