"""What every kind of run has: a spec whose digest is its id, and a start that says how and where its worker runs.

A training is one kind (RunSpec and TrainingLaunchSpec), a generation another (inference/spec.py). Supervisor,
journal, lock and recovery know no more of a run than stands here.
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
from typing import Any, ClassVar

from ratchet.config import train as config_train
from ratchet.config.schema import Machine
from ratchet.config.train import Train
from ratchet.errors import DamagedFileError, DataError, StorageError
from ratchet.runs.journal import Journal, read_last_event
from ratchet.storage import digests, files
from ratchet.storage.layout import RUNS_VARIABLE
from ratchet.storage.locks import FileLock
from ratchet.storage.records.base import BaseCard, Record, TrainReport, find_differing_keys, flatten


class BaseRunSpec(Record):
    """Everything that decides what comes of a run."""

    folders: ClassVar[tuple[str, ...]] = ("checkpoints",)
    """Made in the run directory before any worker starts."""

    @property
    def run_id(self) -> str:
        """Identity by content: same inputs, same run, whoever starts it."""
        return compute_run_id(self.model_dump(mode="json"))


def spec_identity(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What of a spec, as JSON, decides: of a training without a teacher nothing that is said of teachers."""
    found, train = dict(spec), spec.get("train")
    if isinstance(train, dict):
        found["train"] = config_train.train_identity(train)
    if found.get("teaching") is None:
        found.pop("teaching", None)
    return found


def compute_run_id(spec: Mapping[str, Any]) -> str:
    """The id of the run of a spec, given as JSON, also of one that a newer version may have written."""
    return digests.hash_json(spec_identity(spec))[: digests.SHORT]


class LaunchSpec(Record):
    """How and where this attempt runs; rewritten at every start, so that a project may move between attempts."""

    worker: ClassVar[str | None] = None
    """Module that is started as the worker; None: that of a training (run/attempt.py)."""

    machine: Machine

    @property
    def retries(self) -> int | None:
        """Attempts after one that died without progress; None: none, whatever the settings say."""
        return self.machine.retries

    counted_in: ClassVar[Mapping[str, str]] = {}
    """`unit` of the run's work, where that is not steps; stands in its journal's `stopped`."""

    def kept_step(self, root: Path, told: int) -> int:
        """How much of the work in a run directory is safe, where the journal has told of so much."""
        return told

    def kept(self, step: int) -> str:
        """What of the run's work is safe after `step` of it, in words."""
        return f"a checkpoint of step {step} is sealed" if step else "it was before any checkpoint"


# A run is a directory: format.json, spec.json, journal.jsonl, checkpoints/, result/.
#
# Who wants to train opens the run (taking its lock); starting and resuming are the same thing.

FORMAT = 2
"""Of a run directory. 1 (no format.json) had checkpoints without identity; those are passed over, the rest goes on."""

RECIPE_VERSION = 1
"""Raised when a change of code changes what the same settings learn; part of every RunId."""

LOCK_WAIT_S = 5.0
"""A worker whose supervisor was killed is killed with it, but takes a moment to be gone."""

NAMED = 6
"""Ids that a message lists, of the many that a sweep leaves."""

CHECKPOINT = "checkpoint"
RESULT = "result"


class RunSpec(BaseRunSpec):
    """Everything that decides what a run learns; its digest is the RunId."""

    recipe_version: int = RECIPE_VERSION
    train: Train
    data_digest: str
    base_digest: str
    teaching: str | None = None
    """Where there is a teacher: digest of its probabilities (records_distill.Teaching), or of its files if it is asked
    during training."""

    def require(self, report: TrainReport) -> None:
        """Raise DataError unless the report is of this very run: settings, data or base may have changed since."""
        if report.run_id != self.run_id:
            raise DataError(
                f"run {report.run_id} was trained, but params.yaml, data and base now mean run {self.run_id}: "
                "run `dvc repro`"
            )


class TrainingLaunchSpec(LaunchSpec):
    """How and where an attempt of a training runs."""

    base_path: str
    data_path: str
    teaching_path: str | None = None
    """Of what the teacher has said, if one was asked before training."""
    teacher_path: str | None = None
    """Of the teacher itself, if it is asked during training."""
    teacher_files: dict[str, str] | None = None
    """SHA-256 of its files, which the worker checks."""
    base: BaseCard
    """The worker checks its files."""
    profile_steps: int | None = None
    """Measure so many steps instead of training; the result is then a profile (training/profile.py)."""

    @property
    def retries(self) -> int | None:
        """Attempts after one that died without progress; None of a profile: a second would be measured with it."""
        return self.machine.retries if self.profile_steps is None else None


@dataclass(frozen=True)
class RunPaths:
    """The names inside a run directory."""

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
        """How much memory the run was said to need (MemoryForecast), on the machine of its first attempt."""
        return self.root / "forecast.json"

    @property
    def page(self) -> Path:
        """What a finished run did, for people."""
        return self.root / "report.html"

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

    @property
    def mirror(self) -> Path:
        """What of the run lies in its mirror, and under which token (run/mirrored.py)."""
        return self.root / "mirror.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def result(self) -> Path:
        """Sealed when training is over: train.json, adapter/, checkpoints/best and checkpoints/last."""
        return self.root / "result"

    @property
    def worker_log(self) -> Path:
        """What the workers printed."""
        return self.root / "worker.log"

    @property
    def logs(self) -> Path:
        """What supervisor and workers have said, as JSON lines (docs/logs.md)."""
        return self.root / "logs"

    @property
    def stacks(self) -> Path:
        """What the threads of a worker were doing when it was found without a sign of life."""
        return self.root / "stacks.txt"

    def lock(self) -> FileLock:
        """The lock that a writer of this run holds."""
        return FileLock(self.root / "lock", f"run {self.root.name}")

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after `step` optimizer steps lies."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint directory, ascending; `files.verify_sealed` says whether one is valid."""
        if not self.checkpoints.is_dir():
            return []
        numbers = (re.fullmatch(r"step-([0-9]{8,})", p.name) for p in self.checkpoints.iterdir())
        return sorted(int(number[1]) for number in numbers if number)

    def require_known_format(self) -> None:
        """Raise DamagedFileError if a newer version of Ratchet wrote this directory, or format.json is unreadable."""
        try:
            found = json.loads(self.format.read_bytes())["format"]
        except FileNotFoundError:
            return  # format 1
        except (ValueError, KeyError, TypeError):
            raise DamagedFileError(
                f"{self.format}: unreadable; if this version wrote the run, remove the file and repeat, "
                f"else `ratchet reset {self.root.name}`"
            ) from None
        if not isinstance(found, int) or found > FORMAT:
            raise DamagedFileError(
                f"{self.root}: written by a newer version of ratchet (format {found}, this one knows {FORMAT}): "
                f"use that version, or `ratchet reset {self.root.name}`"
            )

    def is_finished(self) -> bool:
        """Whether a sealed, undamaged result is there."""
        try:
            files.verify_sealed(self.result, RESULT)
        except DamagedFileError:
            return False
        return True


class Run:
    """A run that this process may write to: it holds the lock."""

    def __init__(self, paths: RunPaths, spec: BaseRunSpec, lock: FileLock, journal: Journal) -> None:
        self.paths = paths
        self.spec = spec
        self.lock = lock
        self.journal = journal

    @classmethod
    def open(cls, runs: Path, spec: BaseRunSpec) -> "Run":
        """Take the run of this spec, making its directory at the first time.

        Raises:
            LockHeldError: another process is training it; nothing was changed.
            DamagedFileError: the directory holds another run's spec, or is of a newer version.
            StorageError: it cannot be written; a directory that was not there is not there.
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
                    # While it is locked: who waits for the lock finds the directory gone, and starts anew.
                    shutil.rmtree(paths.root, ignore_errors=True)
                lock.release()
                raise

    def close(self) -> None:
        self.journal.close()
        self.lock.release()


def _acquire_lock(paths: RunPaths) -> FileLock:
    """The lock of a directory that is still in its place: while we waited, it may have been removed."""
    while True:
        try:
            lock = paths.lock().acquire(wait_s=LOCK_WAIT_S)
        except OSError:
            with suppress(OSError):
                paths.root.rmdir()  # if it was made for the lock, it is empty
            raise
        if is_lock_current(lock):
            return lock
        lock.release()


def is_lock_current(lock: FileLock) -> bool:
    """Whether the lock that was taken is of the file that now bears its name."""
    try:
        return os.path.samestat(lock.path.stat(), os.fstat(lock.fd))
    except FileNotFoundError:
        return False


def _prepare_directory(paths: RunPaths, spec: BaseRunSpec) -> Journal:
    """Make or complete a run directory that we hold the lock of."""
    for folder in (paths.root, *(paths.root / name for name in spec.folders)):
        files.make_directory(folder)
        files.remove_partials(folder)
    if paths.spec.exists():
        _require_same(paths.spec, spec)
    else:
        spec.save(paths.spec)
    if not paths.format.exists():
        files.write_json(paths.format, {"format": FORMAT})
    journal = Journal(paths.journal, attempt=0)
    for folder in (paths.root, paths.root.parent):  # the lock has made them; now their names are to last
        files.fsync_directory(folder)
    return journal


def _require_same(path: Path, spec: BaseRunSpec) -> None:
    """Raise DamagedFileError unless the file holds this spec."""
    try:
        found = type(spec).load(path)
    except DamagedFileError as error:
        reset = f"`ratchet reset {path.parent.name}`"
        if unknown := _unknown_keys(path, spec):
            raise DamagedFileError(
                f"{path}: settings that this version does not know: {', '.join(unknown)}; most likely a newer version "
                f"of ratchet wrote the run: use that version, or {reset}"
            ) from None
        text = str(error).removesuffix("; make it again")
        raise DamagedFileError(f"{text}; remove this file and repeat (it is written anew), or {reset}") from None
    if found.run_id != spec.run_id:  # settings that nobody reads may differ
        names = find_differing_keys(found.model_dump(mode="json"), spec.model_dump(mode="json"))
        raise DamagedFileError(f"{path}: differs in {', '.join(names)}; move the directory away")


def _unknown_keys(path: Path, spec: BaseRunSpec) -> list[str]:
    try:
        raw = json.loads(path.read_bytes())
    except ValueError:
        return []
    return sorted(flatten(raw).keys() - flatten(spec.model_dump(mode="json")).keys()) if isinstance(raw, dict) else []


_ADVICE = {
    errno.EROFS: "mount it writable",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user the right to write there"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space (`ratchet reset RUN` removes an old run)"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST), "move the file away that is in the place of a directory"),
}


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the place (`path` if the error does not) and says what to do."""
    try:
        yield
    except OSError as error:
        what = error.strerror or str(error)
        advice = _ADVICE.get(error.errno or 0, "look at the disk")
        raise StorageError(
            f"{error.filename or path}: {what}; {advice}, or keep runs elsewhere with {RUNS_VARIABLE}=DIR"
        ) from error


def list_runs(*places: Path) -> list[RunPaths]:
    """Every run directory in these folders, by name; those that are being removed are none."""
    folders = (p for runs in places for p in sorted(runs.iterdir() if runs.is_dir() else ()))
    whole = (RunPaths(p) for p in folders if not p.name.startswith(files.PARTIAL))
    return [run for run in whole if run.journal.is_file() or run.spec.is_file()]


def find_newest_run(*places: Path) -> RunPaths | None:
    """The run that somebody trains, else the one whose journal was written last, by its own last line: for people.

    Times of files say nothing: copying a project changes them.
    """

    def rank(run: RunPaths) -> tuple[bool, float, str]:
        last = read_last_event(run.journal)
        return run.lock().held_elsewhere(), last.t if last else -math.inf, run.root.name

    return max(list_runs(*places), key=rank, default=None)


def find_run(runs: Path | Sequence[Path], prefix: str) -> RunPaths:
    """The one run, in this folder or these, whose id begins with `prefix`. Raises as `match_prefix` does."""
    places = [runs] if isinstance(runs, Path) else list(runs)
    found = list_runs(*places)
    names = [run.root.name for run in found]
    return found[names.index(match_prefix(names, prefix, " and ".join(map(str, places))))]


def match_prefix(names: Sequence[str], prefix: str, where: str) -> str:
    """The one run's id that begins with `prefix`. Raises DataError, with a few ids, when there is none, or more than
    one."""
    matching = [name for name in names if name.startswith(prefix)]
    if len(matching) == 1:
        return matching[0]
    state, there = (f"{len(matching)} runs", matching) if matching else ("no run", names)
    listed = (", ".join(there[:NAMED]) or "none") + (f" and {len(there) - NAMED} more" if len(there) > NAMED else "")
    todo = "; write more of the id" if matching else ""
    raise DataError(f"{prefix}: {state} of that name in {where}; there are: {listed}{todo}")
