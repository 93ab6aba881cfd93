"""`ratchet reset RUN`: removes a run directory, or a run from a replica, after the caller has confirmed the removal."""

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ratchet.config.machine import Machine
from ratchet.errors import LockHeldError, RatchetError, SettingsError
from ratchet.runs import directory, status
from ratchet.runs.directory import RunPaths
from ratchet.runs.log import print_message
from ratchet.runs.progress_view import is_generation
from ratchet.runs.replication import remote_status
from ratchet.runs.replication.lease import ReplicaLease
from ratchet.runs.replication.store import RunObjectNames
from ratchet.stages.status import ReplicaRunStatus, build_replica_status
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import read_champion
from ratchet.storage.records.training import TrainReport


class ResetTarget(Record):
    """The run that would be removed."""

    run_id: str
    kind: Literal["training", "generation"]
    step: int
    """Number of completed optimizer steps; for a generation, number of completed answers."""
    planned_steps: int | None
    size_bytes: int
    has_result: bool
    is_train_output: bool
    """Whether the present output of stage train comes from this run."""
    champion: Literal["current", "earlier"] | None
    """Whether the present champion, or an earlier champion, comes from this run; None if neither does."""


class ResetResult(Record):
    """Result of `reset`."""

    target: ResetTarget
    was_removed: bool


class ReplicaResetResult(Record):
    """Result of `reset_replica`."""

    target: ReplicaRunStatus
    was_removed: bool


def reset(
    layout: ProjectLayout, run: str | None, confirm: Callable[[ResetTarget], bool] = lambda target: True
) -> ResetResult:
    """Remove a run directory. Files that stages or `ratchet generate` made from it stay.

    Args:
        layout: the project.
        run: run id, or its first characters; None and an empty text are refused.
        confirm: called with the run before it is removed, while the run is locked; False keeps it.

    Raises:
        DataError: no run has this id, or several do.
        LockHeldError: the run is in use.
        SettingsError: no run was named.
        StorageError: the directory cannot be removed.
    """
    if not run:  # an empty text would be the beginning of each id
        raise SettingsError("which run? Give its id or the first characters; `ratchet status` shows the latest")
    for folder in (layout.runs, layout.generations):
        for path in folder.glob(f"{files.PARTIAL}*-doomed-*"):  # left by a killed `reset` with this process id
            if not Path("/proc", path.name.rsplit("-", 1)[1]).exists():
                shutil.rmtree(path, ignore_errors=True)
    paths = directory.find_run((layout.runs, layout.generations), run)
    with directory.storage_errors(paths.root), paths.lock().acquire() as lock:
        if not directory.is_lock_current(lock):
            raise LockHeldError(f"run {paths.root.name}: another process removed it just now")
        target = describe_target(layout, paths)
        was_confirmed = confirm(target)
        if was_confirmed:
            files.remove_sealed(paths.root.resolve())
            if paths.root.is_symlink():  # a run directory on another disk
                paths.root.unlink()
            files.fsync_directory(paths.root.parent)
    return ResetResult(target=target, was_removed=was_confirmed)


def reset_replica(
    machine: Machine,
    replica: str | bool,
    run: str | None,
    confirm: Callable[[ReplicaRunStatus], bool] = lambda target: True,
) -> ReplicaResetResult:
    """Remove a run from a replica. Run directories on machines stay.

    The lease of the run is acquired first, so that no machine trains the run meanwhile. If a machine that no longer
    exists holds the lease, the function waits until the lease has expired.

    Args:
        machine: settings of the project, or the defaults.
        replica: value of `--replica`: a URL, the first characters of a run id, or True for machine.replica.
        run: the first characters of a run id.
        confirm: called with the run before it is removed; False keeps it.

    Raises:
        DataError: no run has this id, or several do.
        LeaseHeldError: a machine trains the run.
        SettingsError: no replica or no run is named.
        ReplicaError: the replica cannot be reached.
    """
    store, prefix = remote_status.resolve_replica(machine, replica, run)
    if not prefix:
        raise SettingsError(
            "reset --replica: which run? Give its id or the first characters; `ratchet status --replica` lists them"
        )
    remote_run = remote_status.read_remote_run(store, remote_status.find_remote_run(store, prefix))
    target = build_replica_status(remote_run, remote_status.describe_remote_run(remote_run))
    if not confirm(target):
        return ReplicaResetResult(target=target, was_removed=False)
    names = RunObjectNames(remote_run.run_id)
    lease = ReplicaLease(store, names, f"reset-{secrets.token_hex(4)}", machine.lease_timeout_s)
    lease.acquire(lambda: False, print_message)
    try:
        objects = store.list(names.root)
        # Checkpoints are removed before their files (objects), so that a reader never finds an incomplete checkpoint.
        for kind in ("result", "checkpoints", "journal"):
            store.remove([name for name in objects if name.startswith(f"{names.folder(kind)}/")])
        store.remove([name for name in objects if name != names.lease])
        lease.remove()
    finally:
        lease.release()
    return ReplicaResetResult(target=target, was_removed=True)


def describe_target(layout: ProjectLayout, paths: RunPaths) -> ResetTarget:
    """Describe a run before it is removed."""
    progress, run_id = status.read_progress(paths), paths.root.name
    try:
        is_train_output = TrainReport.load(layout.train_report).run_id == run_id
    except RatchetError:  # no report, or a damaged one
        is_train_output = False
    stats = (path.lstat() for path in paths.root.rglob("*"))  # a file with several names counts once
    size_bytes = sum({stat.st_ino: stat.st_blocks * 512 for stat in stats}.values())
    champions = read_champion(layout.champion)
    champion: Literal["current", "earlier"] | None = None
    if champions.champion is not None and champions.champion.run_id == run_id:
        champion = "current"
    elif any(previous.run_id == run_id for previous in champions.previous):
        champion = "earlier"
    return ResetTarget(
        run_id=run_id, kind="generation" if is_generation(paths) else "training", step=progress.step,
        planned_steps=progress.planned_steps or None, size_bytes=size_bytes,
        has_result=(paths.result / files.MANIFEST).is_file(), is_train_output=is_train_output, champion=champion,
    )  # fmt: skip
