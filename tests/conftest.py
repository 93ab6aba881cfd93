"""Fixtures that tests of several packages and the proofs share.

What takes long to make (a prepared project, a migrated MLflow database, a server, a browser) is made once in each test
process, and only when a test asks for it: the modules of tests/support are imported inside the fixtures.
"""

import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.storage import files
from ratchet.storage.layout import RUNS_VARIABLE, ProjectLayout

# Before torch: one thread a process, for two test processes share two cores, and none that spins while it waits.
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
os.environ["TQDM_DISABLE"] = "1"  # as the command line does, before tqdm is imported


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without searches for garbage: none of what is imported is garbage, and later searches need not see it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def sound_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test puts in the place of `files.before` ends with it: the seam is one for the whole process."""
    monkeypatch.setattr(files, "before", files.before)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProjectLayout:
    """An empty project with default settings; nothing in it comes from the environment."""
    monkeypatch.delenv(RUNS_VARIABLE, raising=False)
    layout = ProjectLayout(tmp_path / "my project")  # a space, as in many a home directory
    layout.experiments.mkdir(parents=True)
    layout.params.write_text(params_file.dump(Settings()), encoding="utf-8")
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
def tracked_project(project: ProjectLayout, mlflow_template: Path) -> ProjectLayout:
    """A project whose MLflow database exists and is empty."""
    project.mlruns.mkdir()
    shutil.copyfile(mlflow_template, project.mlflow_database)
    return project


@pytest.fixture(scope="session")
def processes() -> Any:
    """Makes processes that may be killed, from a server that has MLflow imported: tenths of a second each, not four."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mlflow.store.tracking.sqlalchemy_store", "ratchet.tracking.mlflow.client"])
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


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny project whose stages base and prepare have run; tests copy it and leave it as it is."""
    import tiny_project

    return tiny_project.prepared(tmp_path_factory.mktemp("prepared") / "project").root


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    """A list for processes; those that still run when the test is over are killed."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        if process.stdout and not process.stdout.closed:
            process.communicate()


@pytest.fixture(scope="session")
def s3() -> Iterator[Any]:
    """An S3 server on loopback."""
    import s3_server

    with s3_server.serve() as server:
        yield server


@pytest.fixture
def s3_environment(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """That server, named in the environment of this process."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def proxy(s3_environment: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A network between this process and that server, without faults until a test asks for them."""
    import faulty_proxy

    with faulty_proxy.before(s3_environment.port) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        yield between


@pytest.fixture
def replica(s3: Any, proxy: Any, tmp_path: Path) -> Any:
    """A bucket behind that network."""
    from behind_proxy import Replica

    return Replica(s3, proxy, tmp_path)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """A PostgreSQL server of these tests alone."""
    import postgres

    with postgres.serve() as running:
        yield running


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium. Where there is none the test is skipped, in CI it fails."""
    from chromium import NAMES, VARIABLE, browser, find

    program = find()
    if program is None:
        reason = f"no Chromium here (none of {', '.join(NAMES)}, and {VARIABLE} is not set): see .ci/browser"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with browser(program, tmp_path_factory.mktemp("chromium")) as found:
        yield found
