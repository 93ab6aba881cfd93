"""Proves rows R25 and R27 for ranks on several machines: one machine uploads, another takes over, and a new machine
resumes exactly."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from ports import free_port
from rank_projects import (
    PATIENCE_S,
    SLOW,
    batches,
    events,
    project,
    report,
    settings,
    start,
    wait_until,
    world,
)
from ratchet.config.settings import Settings
from ratchet.runs.directory import find_newest_run
from ratchet.runs.journal import JournalReader
from ratchet.runs.replication import manifests
from ratchet.runs.replication.lease import read_lease
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, TransferLimits
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("training", "runs")


@pytest.fixture(scope="module")
def clone(prepared: Path, mlflow_template: Path) -> Path:
    """Return a project without a training."""
    shutil.copyfile(mlflow_template, ProjectLayout(prepared).mlflow_database)
    return prepared


def replicated(root: Path, **machine: Any) -> Settings:
    known = {"nodes": "2", "rendezvous": f"127.0.0.1:{free_port()}", "grace_period_s": 10, "rendezvous_timeout_s": 200}
    quick = {
        "replica": str(root / "replica"),
        "lease_timeout_s": 10,
        "replica_interval_s": 0.2,
        "replica_timeout_s": 60,
    }
    return settings(**known | quick | machine)


def copied(layout: ProjectLayout) -> list[int]:
    """Return the steps that this machine has uploaded."""
    return [event.data["step"] for event in events(layout, "replicated")]


def replica_of(root: Path, layout: ProjectLayout) -> tuple[ReplicaStore, RunObjectNames]:
    run = find_newest_run(layout.runs)
    assert run is not None
    return ReplicaStore(str(root / "replica"), TransferLimits(retry_timeout_s=5), lambda: False), RunObjectNames(
        run.root.name
    )


def told_steps(root: Path, layout: ProjectLayout) -> list[int]:
    """Return the steps in the journal of the replica."""
    path = root / "journal of the replica"
    path.write_bytes(manifests.recover_journal(*replica_of(root, layout)).content)
    return [event.data["step"] for event in JournalReader(path).read() if event.kind == "step"]


def finish(*processes: "subprocess.Popen[str]") -> str:
    """Wait until all processes end successfully and return their output. If one fails, the others are killed."""
    said = ""
    try:
        for process in processes:
            output, complained = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, complained
            said += output + complained
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return said


def fetched(clone: Path, root: Path) -> ProjectLayout:
    """Restore the finished run on a later machine and return its project."""
    layout = project(clone, root / "later", replicated(root, nodes="1", rendezvous=None))
    assert "was restored from its replica" in finish(start(layout))
    run = find_newest_run(layout.runs)
    assert run is not None
    assert not run.worker_log.exists(), "nothing was trained there"
    return layout


@pytest.fixture(scope="module")
def undisturbed(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ProjectLayout, ProjectLayout]:
    """Train on two machines with one rank each. Return the directory of the replica and both projects."""
    root = tmp_path_factory.mktemp("undisturbed")
    chosen = replicated(root)
    first, second = (project(clone, root / name, chosen) for name in ("first", "second"))
    finish(*[start(layout) for layout in (first, second)])
    return root, first, second


def test_one_of_the_machines_copies_and_all_are_done_when_the_result_is_there(
    clone: Path, undisturbed: tuple[Path, ProjectLayout, ProjectLayout]
) -> None:
    root, first, second = undisturbed
    assert report(first).adapter_digest == report(second).adapter_digest
    assert [bool(copied(layout)) for layout in (first, second)].count(True) == 1
    store, names = replica_of(root, first)
    assert len(store.list(names.folder("result"))) == 1
    assert set(told_steps(root, first)) == set(batches(first))
    assert tiny_project.outcome(fetched(clone, root)) == tiny_project.outcome(first if copied(first) else second)


def test_when_the_one_that_copies_vanishes_another_one_does(
    clone: Path, tmp_path: Path, started: list["subprocess.Popen[str]"]
) -> None:
    chosen = replicated(tmp_path, nodes="1:2")
    machines = [project(clone, tmp_path / name, chosen) for name in ("first", "second")]
    started += [start(layout, [SLOW]) for layout in machines]
    wait_until(lambda: [world(layout) for layout in machines] == [2, 2], *started)
    wait_until(lambda: any(copied(layout) for layout in machines), *started)
    holder = 0 if copied(machines[0]) else 1
    heir = machines[1 - holder]
    assert not copied(heir)
    started[holder].kill()
    started[holder].communicate()
    shutil.rmtree(machines[holder].root)
    finish(started[1 - holder])
    assert copied(heir)
    steps = told_steps(tmp_path, heir)
    assert set(steps) == set(range(1, max(steps) + 1)), "whoever did them"
    claim = read_lease(*replica_of(tmp_path, heir))
    assert claim is not None and (claim.state, claim.holders) == ("released", 2)
    later = fetched(clone, tmp_path)
    assert tiny_project.outcome(later) == tiny_project.outcome(heir)
    assert {event.data["step"] for event in events(later, "step")} == set(steps)


def test_when_all_are_lost_a_new_machine_goes_on_exactly(
    clone: Path,
    tmp_path: Path,
    undisturbed: tuple[Path, ProjectLayout, ProjectLayout],
    started: list["subprocess.Popen[str]"],
) -> None:
    chosen = replicated(tmp_path)
    machines = [project(clone, tmp_path / name, chosen) for name in ("first", "second")]
    started += [start(layout, [SLOW]) for layout in machines]
    wait_until(lambda: any(copied(layout) for layout in machines), *started)
    for process, layout in zip(started, machines, strict=True):
        process.kill()
        process.communicate()
        shutil.rmtree(layout.root)
    # One machine runs as many ranks as before, so that sums are rounded in the same way.
    new = project(clone, tmp_path / "new", replicated(tmp_path, nodes="1:2", gpus=2))
    said = finish(start(new))
    assert "restored from the replica: the checkpoint of step" in said
    assert events(new, "worker_ready")[-1].data["start_step"] > 0
    assert report(new).adapter_digest == report(undisturbed[1]).adapter_digest
    assert batches(new) == batches(undisturbed[1])
