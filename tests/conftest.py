"""What many tests need: a project directory, and a migrated MLflow database to copy into it."""

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet import config, files, params
from ratchet.layout import RUNS_VARIABLE, Layout

# Before torch: one thread a process, for two test processes share two cores, and none that spins while it waits.
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
os.environ["TQDM_DISABLE"] = "1"  # as the command line does, before tqdm is imported


@pytest.fixture(autouse=True)
def sound_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test puts in the place of `files.before` ends with it: the seam is one for the whole process."""
    monkeypatch.setattr(files, "before", files.before)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """An empty project with default settings; nothing in it comes from the environment."""
    monkeypatch.delenv(RUNS_VARIABLE, raising=False)
    layout = Layout(tmp_path / "my project")  # a space, as in many a home directory
    layout.experiments.mkdir(parents=True)
    layout.params.write_text(params.dump(config.Settings()), encoding="utf-8")
    (layout.root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    return layout


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's database as it is when new. Migrating one takes about 6 s, copying it nothing."""
    from mlflow import MlflowClient

    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{database}")
    return database


@pytest.fixture
def tracked_project(project: Layout, mlflow_template: Path) -> Layout:
    """A project whose MLflow database exists and is empty."""
    project.mlruns.mkdir()
    shutil.copyfile(mlflow_template, project.mlflow_database)
    return project


@pytest.fixture(scope="session")
def processes() -> Any:
    """Makes processes that may be killed, from a server that has MLflow imported: tenths of a second each, not four."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mlflow.store.tracking.sqlalchemy_store", "ratchet.services.tracking"])
    return context


@pytest.fixture
def calm() -> Iterator[None]:
    """The command line, called in this process, takes signals for itself: they are given back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    hook = sys.excepthook
    yield
    sys.excepthook = hook
    for number, handler in before.items():
        signal.signal(number, handler)
