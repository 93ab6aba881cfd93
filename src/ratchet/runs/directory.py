"""Run directories: specs, launch settings, paths, and opening a run under its lock.

A run directory contains format.json, spec.json, launch.json, journal.jsonl, checkpoints/, result/, logs/, loggers/,
worker.log and, after stage train, trained_rows.bin. The digest of the spec is the id of the run; the launch settings
define how and where its worker runs. Trainings (RunSpec, TrainingLaunchSpec) and generations (inference/spec.py) are
runs. The supervisor, the journal, the lock and the restart policy use only the base classes here. Starting and resuming
a run are the same operation.
"""

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from ratchet.config import train as config_train
from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.errors import DamagedFileError, DataError, StorageError
from ratchet.runs.journal import Journal, read_last_event
from ratchet.storage import digests, files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import RUNS_VARIABLE
from ratchet.storage.records.base import BaseCard, Record, find_differing_keys, flatten
from ratchet.storage.records.training import TrainReport

FORMAT = 2
"""Format of a run directory. A directory of format 1 has no format.json; its checkpoints have no identity.json and are
ignored."""

RECIPE_VERSION = 2
"""Increased when a code change alters what the same settings learn; part of every RunId."""

LOCK_WAIT_S = 5.0
"""Time to wait for the lock. The kernel kills the worker of a killed supervisor, but the worker needs a moment to
end."""

MAX_LISTED = 6  # ids in an error message

CHECKPOINT = "checkpoint"
RESULT = "result"


class BaseRunSpec(Record):
    """Everything that determines the result of a run."""

    subdirectories: ClassVar[tuple[str, ...]] = ("checkpoints",)
    """Folders that are created in the run directory before a worker starts."""

    @property
    def run_id(self) -> str:
        """Digest of the spec: equal inputs give the same id, on any machine and for any user."""
        return compute_run_id(self.model_dump(mode="json"))


def spec_identity(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a spec (as JSON) that determines its identity. Settings of an absent teacher are omitted."""
    identity, train = dict(spec), spec.get("train")
    if isinstance(train, dict):
        identity["train"] = config_train.train_identity(train)
    if identity.get("distillation_digest") is None:
        identity.pop("distillation_digest", None)
    if identity.get("is_grouped") is None:
        identity.pop("is_grouped", None)
    return identity


def compute_run_id(spec: Mapping[str, Any]) -> str:
    """Return the run id of a spec (as JSON). A newer version of Ratchet may have written the spec."""
    return digests.hash_json(spec_identity(spec))[: digests.SHORT]


class LaunchSpec(Record):
    """Settings of an attempt: how and where it runs. launch.json is rewritten at every start, so a project may move
    between two starts."""

    worker: ClassVar[str | None] = None
    """Module that is started as the worker; None: the worker of a training (runs/supervisor.py)."""

    machine: Machine

    @property
    def max_restarts(self) -> int | None:
        """Maximum number of restarts without progress; None: never restart, whatever the settings say.
        `restart_policy.decide` does not count failures of class `peers`."""
        return self.machine.max_restarts

    work_unit: ClassVar[Mapping[str, str]] = {}
    """The key `unit` names the unit in which the work is counted; empty if it is counted in steps. The journal event
    `interrupted` contains this key."""

    def saved_step(self, root: Path, reported: int) -> int:
        """Return how much work in a run directory is durable. `reported` is the amount according to the journal."""
        return reported

    def describe_saved(self, step: int) -> str:
        """Describe what is saved after `step` units of work."""
        return f"a checkpoint of step {step} is saved" if step else "no checkpoint was saved yet"


class RunSpec(BaseRunSpec):
    """Everything that determines what a run learns; its digest is the RunId."""

    recipe_version: int = RECIPE_VERSION
    train: Train
    data_digest: str
    base_digest: str
    distillation_digest: str | None = None
    """Digest of the teacher outputs (DistillationCard), or of the teacher's files if the teacher runs during
    training."""
    is_grouped: Literal[True] | None = None
    """Whether a training group computes this run together with others (training/group.py), which rounds differently.
    None: it does not."""

    def require(self, report: TrainReport) -> None:
        """Raise DataError if the report is of another run, because settings, data or base have changed since."""
        if report.run_id != self.run_id:
            raise DataError(
                f"run {report.run_id} was trained, but params.yaml, data and base now define run {self.run_id}: "
                "run `dvc repro`"
            )


class TrainingLaunchSpec(LaunchSpec):
    """Settings of an attempt of a training: how and where it runs."""

    base_path: str
    data_path: str
    distillation_path: str | None = None
    teacher_path: str | None = None
    teacher_files: dict[str, str] | None = None
    start_path: str | None = None
    """Directory of the weights from which the training starts."""
    base: BaseCard
    """Card of the base model; the worker verifies the files that it lists."""
    profile_steps: int | None = None
    """Profile this many steps instead of training; the result is then a profile (training/profiler.py)."""

    @property
    def max_restarts(self) -> int | None:
        """See `LaunchSpec.max_restarts`. None for a profile, because a restart would be measured, too."""
        return self.machine.max_restarts if self.profile_steps is None else None


@dataclass(frozen=True)
class RunPaths:
    """Paths inside a run directory."""

    root: Path

    @property
    def format(self) -> Path:
        return self.root / "format.json"

    @property
    def spec(self) -> Path:
        return self.root / "spec.json"

    @property
    def launch(self) -> Path:
        return self.root / "launch.json"

    @property
    def forecast(self) -> Path:
        """MemoryForecast of the run, made on the machine of its first attempt."""
        return self.root / "forecast.json"

    @property
    def trained_rows(self) -> Path:
        """Hashes of the prompts on which the run was trained (`training/trained_rows.py`)."""
        return self.root / "trained_rows.bin"

    @property
    def page(self) -> Path:
        """HTML report of a finished run."""
        return self.root / "report.html"

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def replication_state(self) -> Path:
        """Record of how much of the run is in its replica (ReplicationState)."""
        return self.root / "replication.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def result(self) -> Path:
        """Sealed at the end of training: train.json, adapter/, checkpoints/best and checkpoints/last."""
        return self.root / "result"

    @property
    def worker_log(self) -> Path:
        """Standard output and error of the workers."""
        return self.root / "worker.log"

    @property
    def logs(self) -> Path:
        """Logs of supervisor and workers, as JSON lines."""
        return self.root / "logs"

    @property
    def loggers(self) -> Path:
        """Output of the loggers (machine.loggers), a folder for each; written again from the journal at every start."""
        return self.root / "loggers"

    @property
    def stacks(self) -> Path:
        """Stacks of the threads of a worker that stalled."""
        return self.root / "stacks.txt"

    def lock(self) -> FileLock:
        """Return the lock that a process must hold to write this run."""
        return FileLock(self.root / "lock", f"run {self.root.name}")

    def checkpoint(self, step: int) -> Path:
        """Return the directory of the checkpoint after `step` optimizer steps."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_steps(self) -> list[int]:
        """Return the steps that have a checkpoint directory, ascending. `files.verify_sealed` checks a directory."""
        if not self.checkpoints.is_dir():
            return []
        matches = (re.fullmatch(r"step-([0-9]{8,})", path.name) for path in self.checkpoints.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def require_known_format(self) -> None:
        """Raise DamagedFileError if a newer version of ratchet wrote this directory, or format.json is unreadable."""
        try:
            number = json.loads(self.format.read_bytes())["format"]
        except FileNotFoundError:
            return  # format 1
        except (ValueError, KeyError, TypeError):
            raise DamagedFileError(
                f"{self.format}: unreadable; if this version of ratchet wrote the run, remove the file and run the "
                f"command again, otherwise run `ratchet reset {self.root.name}`"
            ) from None
        if not isinstance(number, int) or number > FORMAT:
            raise DamagedFileError(
                f"{self.root}: written by a newer version of ratchet (format {number}; this version reads up to "
                f"{FORMAT}); use that version, or run `ratchet reset {self.root.name}`"
            )

    def is_finished(self) -> bool:
        """Return whether there is a sealed, undamaged result."""
        try:
            files.verify_sealed(self.result, RESULT)
        except DamagedFileError:
            return False
        return True


@dataclass(frozen=True)
class RunDirectory:
    """Run directory that this process may write, because it holds the lock."""

    paths: RunPaths
    spec: BaseRunSpec
    lock: FileLock
    journal: Journal

    @classmethod
    def open(cls, runs: Path, spec: BaseRunSpec) -> "RunDirectory":
        """Lock the directory of the run of this spec, and create it if it does not exist.

        Raises:
            LockHeldError: another process holds the lock of the run; nothing was changed.
            DamagedFileError: the directory has another run's spec, or was written by a newer version.
            StorageError: the directory cannot be written. A directory that was created is removed.
        """
        paths = RunPaths(runs / spec.run_id)
        with storage_errors(paths.root):
            paths.require_known_format()
            lock = _acquire_lock(paths)
            is_new = not paths.spec.exists() and not paths.journal.exists()
            try:
                return cls(paths, spec, lock, _prepare_directory(paths, spec))
            except BaseException as error:
                if is_new and isinstance(error, OSError):
                    # Removed under the lock: a process that waits for the lock notices this and creates the directory.
                    shutil.rmtree(paths.root, ignore_errors=True)
                lock.release()
                raise

    def close(self) -> None:
        """Close the journal and release the lock."""
        self.journal.close()
        self.lock.release()


def _acquire_lock(paths: RunPaths) -> FileLock:
    """Lock a run directory. Retry if another process removed the directory while this process waited for the lock."""
    while True:
        try:
            lock = paths.lock().acquire(wait_s=LOCK_WAIT_S)
        except OSError:
            with suppress(OSError):
                paths.root.rmdir()  # it is empty if it was created only for the lock
            raise
        if is_lock_current(lock):
            return lock
        lock.release()


def is_lock_current(lock: FileLock) -> bool:
    """Return whether the held lock still locks the file at its path. The file may have been replaced or removed."""
    try:
        return os.path.samestat(lock.path.stat(), os.fstat(lock.fd))
    except FileNotFoundError:
        return False


def _prepare_directory(paths: RunPaths, spec: BaseRunSpec) -> Journal:
    """Create or complete a run directory whose lock is held."""
    for folder in (paths.root, *(paths.root / name for name in spec.subdirectories)):
        files.make_directory(folder)
        files.remove_partials(folder)
    if paths.spec.exists():
        _require_same(paths.spec, spec)
    else:
        spec.save(paths.spec)
    if not paths.format.exists():
        files.write_json(paths.format, {"format": FORMAT})
    journal = Journal(paths.journal, attempt=0)
    for folder in (paths.root, paths.root.parent):  # acquiring the lock has created names that are not durable yet
        files.fsync_directory(folder)
    return journal


def _require_same(path: Path, spec: BaseRunSpec) -> None:
    """Raise DamagedFileError unless the file contains this spec."""
    try:
        recorded = type(spec).load(path)
    except DamagedFileError as error:
        reset = f"`ratchet reset {path.parent.name}`"
        raw: Any = None
        with suppress(ValueError):
            raw = json.loads(path.read_bytes())
        known = flatten(spec.model_dump(mode="json"))
        if isinstance(raw, dict) and (unknown := sorted(flatten(raw).keys() - known.keys())):
            raise DamagedFileError(
                f"{path}: unknown settings: {', '.join(unknown)}; a newer version of ratchet probably wrote the run: "
                f"use that version, or run {reset}"
            ) from None
        text = str(error).removesuffix("; create it again")
        raise DamagedFileError(
            f"{text}; remove this file and run the command again (it is rewritten), or run {reset}"
        ) from None
    if recorded.run_id != spec.run_id:  # settings that do not affect the result may differ
        names = find_differing_keys(recorded.model_dump(mode="json"), spec.model_dump(mode="json"))
        raise DamagedFileError(f"{path}: differs in {', '.join(names)}; move the directory away")


_ADVICE = {
    errno.EROFS: "mount it writable",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user the right to write there"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space (`ratchet reset RUN` removes an old run)"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "move the file away that is in the place of a directory"),
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert an OSError into a StorageError that names the remedy and the file (or `path` if the error has none)."""
    try:
        yield
    except OSError as error:
        problem = error.strerror or str(error)
        advice = _ADVICE.get(error.errno or 0, "check the disk")
        raise StorageError(
            f"{error.filename or path}: {problem}; {advice}, or set {RUNS_VARIABLE}=DIR to keep runs elsewhere"
        ) from error


def list_runs(*folders: Path) -> list[RunPaths]:
    """Return all runs in these folders, by name; directories that are being removed are omitted."""
    directories = (path for folder in folders for path in sorted(folder.iterdir() if folder.is_dir() else ()))
    candidates = (RunPaths(path) for path in directories if not path.name.startswith(files.PARTIAL))
    return [run for run in candidates if run.journal.is_file() or run.spec.is_file()]


def find_newest_run(*folders: Path) -> RunPaths | None:
    """Return the run in training, otherwise the run with the most recent last journal event."""
    return max(list_runs(*folders), key=recency, default=None)


def recency(run: RunPaths) -> tuple[bool, float, str]:
    """Return the sort key for ordering runs from the oldest to the newest: runs in training are last, the others are
    ordered by their last journal event.

    File times are not used, because copying a project changes them.
    """
    last = read_last_event(run.journal)
    return run.lock().is_held(), last.t if last else -math.inf, run.root.name


def find_run(runs: Path | Sequence[Path], prefix: str) -> RunPaths:
    """Return the only run in these folders whose id begins with `prefix`. Raises the errors of `match_prefix`."""
    folders = [runs] if isinstance(runs, Path) else list(runs)
    candidates = list_runs(*folders)
    names = [run.root.name for run in candidates]
    return candidates[names.index(match_prefix(names, prefix, " and ".join(map(str, folders))))]


def match_prefix(names: Sequence[str], prefix: str, where: str) -> str:
    """Return the only id that begins with `prefix`. Raises DataError, with a list of ids, if none or several do."""
    matching = [name for name in names if name.startswith(prefix)]
    if len(matching) == 1:
        return matching[0]
    state, listed = (f"matches {len(matching)} runs", matching) if matching else ("matches no run", names)
    rest = f" and {len(listed) - MAX_LISTED} more" if len(listed) > MAX_LISTED else ""
    remedy = "; give more of the id" if matching else ""
    raise DataError(f"{prefix}: {state} in {where}; found: {', '.join(listed[:MAX_LISTED]) or 'none'}{rest}{remedy}")
