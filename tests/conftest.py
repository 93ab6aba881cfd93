"""Fixtures that several test packages and the proofs share.

Expensive objects (a prepared project, a migrated MLflow database, a server, a browser) are created once per test
process, and only when a test requests them: the fixtures import the modules of tests/support when they run.
"""

import gc
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

# This must run before torch is imported. Each process uses one thread, because two test processes share two cores; the
# thread does not spin while it waits.
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
for _name in [name for name in os.environ if name.startswith("MLFLOW_")]:  # an address of the developer's server
    del os.environ[_name]
os.environ["TQDM_DISABLE"] = "1"  # the command line also sets this before it imports tqdm


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collection. Imported objects are not garbage; `gc.freeze` excludes them from
    later collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


COVERAGE_EXIT_S = 120
"""Seconds that a test process may take to write its coverage data at its end. After xdist's 10 s it is killed, and the
data is lost."""


def pytest_configure() -> None:
    """Let test processes of `make coverage` write their data."""
    if "COVERAGE_RUN" in os.environ:
        from xdist.workermanage import NodeManager

        NodeManager.EXIT_TIMEOUT = COVERAGE_EXIT_S


LONGEST_FILES = (
    "test_ranks.py", "test_sweep.py", "test_shared_registry.py", "test_team.py", "test_push.py", "test_trial_store.py",
    "test_promote.py", "test_trainer.py", "test_curves_browser.py", "test_audit.py", "test_adapter.py",
    "test_python_api.py", "test_monitor.py", "test_chat.py", "test_examples.py", "test_scheduler.py",
    "test_validation_scoring.py", "test_sweep_tracking.py", "test_merge_check.py", "test_reference.py",
    "test_prepare.py", "test_tracking.py", "test_onnx_export.py", "test_fault_recovery.py", "test_merger.py",
    "test_gradient_reducer.py", "test_merge_features.py", "test_decoding.py", "test_supervisor.py", "test_resume.py",
    "test_simulated_gpu.py", "test_smoke_test.py",
)  # fmt: skip
"""They begin first, so that no test process still works on one when the others have nothing left (`make test`)."""


@pytest.hookimpl(trylast=True)  # after pytest-randomly has shuffled the files
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first."""
    order = {name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(autouse=True)
def sound_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore `files.before` after each test. The hook is global to the process, so a test may replace it only for
    itself."""
    monkeypatch.setattr(files, "before", files.before)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProjectLayout:
    """Create an empty project with default settings. The environment does not affect the project."""
    monkeypatch.delenv(RUNS_VARIABLE, raising=False)
    layout = ProjectLayout(tmp_path / "my project")  # the space checks that paths with spaces work
    layout.experiments.mkdir(parents=True)
    layout.params.write_text(params_file.dump(Settings()), encoding="utf-8")
    (layout.root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    return layout


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an empty MLflow database at the current schema version. A migration takes about 6 s; a copy takes almost
    no time."""
    from mlflow import MlflowClient

    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{database}")
    return database


@pytest.fixture
def tracked_project(project: ProjectLayout, mlflow_template: Path) -> ProjectLayout:
    """Create a project with an empty MLflow database."""
    project.mlruns.mkdir()
    shutil.copyfile(mlflow_template, project.mlflow_database)
    return project


@pytest.fixture(scope="session")
def processes() -> Any:
    """Return a multiprocessing context for processes that a test may kill. Its fork server has imported MLflow, so a
    process starts in tenths of a second instead of 4 s."""
    from fork_server import fork_server_context

    return fork_server_context()


@pytest.fixture
def calm() -> Iterator[None]:
    """Restore the signal handlers and the exception hook that the command line replaces when a test calls it in this
    process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    hook = sys.excepthook
    yield
    sys.excepthook = hook
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny project with completed stages base and prepare. Tests copy the project and do not change it."""
    import tiny_project

    return tiny_project.prepared(tmp_path_factory.mktemp("prepared") / "project").root


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    """Return a list for processes. After the test, the fixture kills the processes that still run."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        if process.stdout and not process.stdout.closed:
            process.communicate()


@pytest.fixture(scope="session")
def s3() -> Iterator[Any]:
    """Start an S3 server on loopback."""
    import s3_server

    with s3_server.serve() as server:
        yield server


@pytest.fixture
def s3_environment(s3: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the environment variables of this process so that clients find the S3 server."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a server that speaks the Hugging Face hub's interface. It is the hub of this process, with a new cache and
    a valid token."""
    from huggingface_hub import constants

    import hub_server

    with hub_server.serve() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name, value in server.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def proxy(s3_environment: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a proxy between this process and the S3 server. The proxy forwards requests without faults until a test
    injects faults."""
    import faulty_proxy

    with faulty_proxy.before(s3_environment.port) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        yield between


@pytest.fixture
def replica(s3: Any, proxy: Any, tmp_path: Path) -> Any:
    """Create a bucket that is reached through the proxy."""
    from behind_proxy import Replica

    return Replica(s3, proxy, tmp_path)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """Start a PostgreSQL server for the tests of this process."""
    import postgres

    with postgres.serve() as running:
        yield running


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start a headless Chromium. If Chromium is not installed, the test is skipped; in CI, the test fails."""
    from chromium import NAMES, VARIABLE, browser, find

    program = find()
    if program is None:
        reason = f"no Chromium here (none of {', '.join(NAMES)}, and {VARIABLE} is not set): see .ci/browser"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with browser(program, tmp_path_factory.mktemp("chromium")) as found:
        yield found
