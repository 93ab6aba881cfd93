"""Proves the README's sentence "every trial is accounted for" on Ray: a node disappears, and another node takes over
its trial."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import postgres
import tiny_project
import tiny_sweep
from ratchet.config.machine import RaySettings
from ratchet.config.sweep import PrunerSettings
from ratchet.errors import EXIT_INPUT, EXIT_INTERRUPTED
from ratchet.runs.journal import JournalReader
from ratchet.storage.digests import code_version
from ratchet.storage.layout import ProjectLayout
from ratchet.tuning.ray_cluster import RayWorkerActor

pytest.importorskip("ray", reason="Ray is not installed (pip install -c constraints.txt -e '.[ray]')")

PACKAGES = ("tuning", "stages")
RAY = Path(sys.executable).parent / "ray"
MEMORY = f"--object-store-memory={80 * 2**20}"
"""The size can be small: Ratchet sends only settings and final messages through Ray's object store."""
TRIALS = 5


class Nodes:
    """A cluster: a head node without workers, and nodes that join and disappear."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # socket paths must be short
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._processes: list[subprocess.Popen[bytes]] = []
        port = self.address.rpartition(":")[2]
        self.start("--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false", f"--temp-dir={self.folder}")

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a node and wait until it has joined. Return its top-level process."""
        log = self.folder / f"node-{len(self._processes)}"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [RAY, "start", "--block", "--node-ip-address=127.0.0.1", "--disable-usage-stats", MEMORY, *arguments],
                stdout=stream, stderr=stream, stdin=subprocess.DEVNULL, start_new_session=True,
                env=tiny_project.environment() | {"RAY_DISABLE_IMPORT_WARNING": "1"},
            )  # fmt: skip
        self._processes.append(process)
        deadline_s = time.monotonic() + tiny_sweep.DEADLINE_S
        while "Ray runtime started" not in log.read_text(errors="replace"):
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text(errors="replace")
            time.sleep(0.1)
        return process

    def join(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a node for one worker."""
        return self.start(f"--address={self.address}", "--num-cpus=1", *arguments)

    def close(self) -> None:
        """Kill all nodes."""
        for process in reversed(self._processes):
            vanish(process)
        shutil.rmtree(self.folder, ignore_errors=True)


def below(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def vanish(node: subprocess.Popen[bytes]) -> None:
    """Simulate a power failure of a node: kill all of its processes at once, without notice."""
    for pid in below(node.pid) if node.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    with postgres.serve() as running:
        yield running


def project(
    root: Path, database: str, mlflow: Path, ray: RaySettings, concurrent_trials: int = 1, epochs: float = 3.0
) -> ProjectLayout:
    """Create a project without pruning. Its trainings are long enough for a node to disappear during a training."""
    chosen = tiny_sweep.settings(trials=TRIALS, pruner=PrunerSettings(kind="none"), concurrent_trials=concurrent_trials)
    machine = chosen.machine.model_copy(update={"study_storage": database, "ray": ray})
    train = chosen.train.model_copy(update={"epochs": epochs})
    layout = tiny_project.prepared(root, chosen.model_copy(update={"machine": machine, "train": train}))
    shutil.copyfile(mlflow, layout.mlflow_database)
    return layout


def trained_by(node: subprocess.Popen[bytes], layout: ProjectLayout) -> list[Path]:
    """Return the runs that processes of this node currently train."""
    here = set(below(node.pid))
    return [run for run in layout.runs.glob("*") if here & set(tiny_sweep.processes_of(str(run)))]


def is_in_the_midst(node: subprocess.Popen[bytes], layout: ProjectLayout) -> bool:
    """Return whether the node trains a run that has begun to learn and is far from its end."""
    journals = [run / "journal.jsonl" for run in trained_by(node, layout)]
    steps = [path.read_text(encoding="utf-8").count('"event":"step"') for path in journals if path.exists()]
    return any(2 <= count <= 10 for count in steps)


def test_a_node_vanishes_in_mid_trial_and_another_takes_the_trial_up(
    nodes: Nodes, server: postgres.Server, tmp_path: Path, mlflow_template: Path
) -> None:
    layout = project(tmp_path / "project", server.database(), mlflow_template, RaySettings(address=nodes.address))
    first, second = nodes.join(), nodes.join()
    sweep = tiny_sweep.begin(layout, "--engine", "ray", "--workers", "2")
    tiny_sweep.until(lambda: all(trained_by(node, layout) for node in (first, second)), sweep)
    tiny_sweep.until(lambda: is_in_the_midst(first, layout), sweep)
    vanish(first)
    third = nodes.join()  # simulates an autoscaler
    tiny_sweep.until(lambda: bool(trained_by(third, layout)), sweep)
    output, _ = sweep.communicate(timeout=tiny_sweep.DEADLINE_S)
    assert sweep.returncode == 0, output
    assert "starting another one" in output
    assert "was lost" in output
    found = tiny_sweep.report(layout)
    assert [trial.state for trial in found.trials] == ["complete"] * TRIALS
    assert max(len(trial.executions) for trial in found.trials) > 1, "nobody took up what the lost node had"
    assert not tiny_sweep.processes_of(str(layout.root))
    vanish(second)
    vanish(third)


def test_a_group_of_trials_vanishes_with_its_node_and_continues_on_another(
    nodes: Nodes, server: postgres.Server, tmp_path: Path, mlflow_template: Path
) -> None:
    ray = RaySettings(address=nodes.address)
    layout = project(tmp_path / "project", server.database(), mlflow_template, ray, concurrent_trials=2, epochs=6.0)
    node = nodes.join()
    sweep = tiny_sweep.begin(layout, "--engine", "ray")
    for loss in range(1, 4):
        tiny_sweep.until(lambda loss=loss: tiny_sweep.steps_done(layout.runs) > 40 * loss, sweep)  # type: ignore[misc]
        vanish(node)
        node = nodes.join()
    output, _ = sweep.communicate(timeout=tiny_sweep.DEADLINE_S)
    assert sweep.returncode == 0, output
    assert output.count("was lost") >= 3
    found = tiny_sweep.report(layout)
    assert [trial.state for trial in found.trials] == ["complete"] * TRIALS
    assert sum(len(trial.executions) - 1 for trial in found.trials) >= 3, "nobody took up what the lost nodes had"
    for trial in found.trials:
        events = list(JournalReader(layout.runs / str(trial.run_id) / "journal.jsonl").read())
        sealed = 0
        for event in events:  # no attempt begins before the last checkpoint that was reported
            if event.kind == "checkpoint_saved":
                sealed = event.data["step"]
            elif event.kind == "worker_ready":
                assert event.data["start_step"] >= sealed
    assert not tiny_sweep.processes_of(str(layout.root))
    vanish(node)


def test_a_sweep_that_is_stopped_leaves_no_worker_behind_and_goes_on_when_repeated(
    nodes: Nodes, server: postgres.Server, tmp_path: Path, mlflow_template: Path
) -> None:
    chosen = RaySettings(address=nodes.address, resources={"spot": 1})
    layout = project(tmp_path / "project", server.database(), mlflow_template, chosen)
    sweep = tiny_sweep.begin(layout, "--engine", "ray")
    assert sweep.stdout is not None
    assert any("no node of the cluster has 1 CPU, 1 spot now" in line for line in sweep.stdout)
    node = nodes.join('--resources={"spot": 1}')
    tiny_sweep.until(lambda: tiny_sweep.steps_done(layout.runs) > 2, sweep)
    assert trained_by(node, layout)
    sweep.terminate()
    output, _ = sweep.communicate(timeout=tiny_sweep.DEADLINE_S)
    assert sweep.returncode == EXIT_INTERRUPTED, output
    assert not tiny_sweep.processes_of(str(layout.root))
    again = tiny_project.ratchet(layout, "sweep", "--engine", "ray", "--workers", "1")
    assert again.returncode == 0, again.stdout + again.stderr
    assert [trial.state for trial in tiny_sweep.report(layout).trials] == ["complete"] * TRIALS
    vanish(node)


def test_no_database_and_no_cluster_are_refused_before_anything_is_done(tmp_path: Path) -> None:
    layout = tiny_project.write(tmp_path / "project", tiny_sweep.settings())
    refused = tiny_project.ratchet(layout, "sweep", "--engine", "ray")
    assert refused.returncode == EXIT_INPUT
    assert "set machine.study_storage" in refused.stderr
    chosen = tiny_sweep.settings()
    machine = {"study_storage": "postgresql://nobody@127.0.0.1:9/none", "ray": RaySettings(address="127.0.0.1:9")}
    tiny_project.save(layout, chosen.model_copy(update={"machine": chosen.machine.model_copy(update=machine)}))
    refused = tiny_project.ratchet(layout, "sweep", "--engine", "ray")
    assert refused.returncode == EXIT_INPUT
    assert "machine.ray.address: 127.0.0.1:9" in refused.stderr
    assert "ray start --head" in refused.stderr


def test_a_node_without_the_project_or_with_another_ratchet_says_so(tmp_path: Path) -> None:
    code, said = RayWorkerActor(str(tmp_path / "nowhere"), "", code_version(), 1).run_worker()
    assert code == EXIT_INPUT
    assert f"no project in {tmp_path / 'nowhere'}" in said
    code, said = RayWorkerActor(str(tmp_path), "", "0.0.1+00000000", 1).run_worker()
    assert code == EXIT_INPUT
    assert "install the same version on every node" in said
