"""A run is a directory: spec.json, journal.jsonl, checkpoints/, result/.

Who wants to train opens the run (taking its lock); starting and resuming are the same thing.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet import digest, files
from ratchet.config import Machine, Train
from ratchet.errors import DamagedError, DataError
from ratchet.records import Record, TrainReport
from ratchet.run.journal import Journal

RECIPE_VERSION = 1
"""Raised when a change of code changes what the same settings learn; part of every RunId."""

LOCK_WAIT_S = 5.0
"""A worker whose supervisor was killed is killed with it, but takes a moment to be gone."""

CHECKPOINT = "checkpoint"
RESULT = "result"


class RunSpec(Record):
    """Everything that decides what a run learns; its digest is the RunId."""

    recipe_version: int = RECIPE_VERSION
    train: Train
    data_digest: str
    base_digest: str

    @property
    def run_id(self) -> str:
        """Identity by content: same inputs, same run, whoever starts it."""
        return digest.of_json(self.model_dump(mode="json"))[: digest.SHORT]

    def require(self, report: TrainReport) -> None:
        """Raise DataError unless the report is of this very run: settings, data or base may have changed since."""
        if report.run_id != self.run_id:
            raise DataError(
                f"run {report.run_id} was trained, but params.yaml, data and base now mean run {self.run_id}: "
                "run `dvc repro`"
            )


class Launch(Record):
    """How and where this attempt runs; rewritten at every start, so that a project may move between attempts."""

    machine: Machine
    base_path: str
    data_path: str
    base_files: dict[str, str]
    """SHA-256 by name of the files of the base model; the worker checks them."""


@dataclass(frozen=True)
class RunPaths:
    """The names inside a run directory."""

    root: Path

    @property
    def spec(self) -> Path:
        return self.root / "spec.json"

    @property
    def launch(self) -> Path:
        return self.root / "launch.json"

    @property
    def journal(self) -> Path:
        return self.root / "journal.jsonl"

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

    def lock(self) -> files.Lock:
        """The lock that a writer of this run holds."""
        return files.Lock(self.root / "lock", f"run {self.root.name}")

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after `step` optimizer steps lies."""
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_steps(self) -> list[int]:
        """Steps that have a checkpoint directory, ascending; whether it is valid is for `files.verify` to say."""
        if not self.checkpoints.is_dir():
            return []
        names = (p.name for p in self.checkpoints.iterdir() if p.name.startswith("step-"))
        return sorted(int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdigit())

    def is_finished(self) -> bool:
        """Whether a sealed, undamaged result is there."""
        try:
            files.verify(self.result, RESULT)
        except DamagedError:
            return False
        return True


class Run:
    """A run that this process may write to: it holds the lock."""

    def __init__(self, paths: RunPaths, spec: RunSpec, lock: files.Lock, journal: Journal) -> None:
        self.paths = paths
        self.spec = spec
        self.lock = lock
        self.journal = journal

    @classmethod
    def open(cls, runs: Path, spec: RunSpec) -> "Run":
        """Take the run of this spec, making its directory at the first time.

        Raises:
            BusyError: another process is training it; nothing was changed.
            DamagedError: the directory holds another run's spec.
        """
        paths = RunPaths(runs / spec.run_id)
        lock = paths.lock()
        lock.acquire(wait_s=LOCK_WAIT_S)
        try:
            for folder in (paths.root, paths.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
                files.remove_partials(folder)
            if paths.spec.exists():
                found = RunSpec.load(paths.spec)
                if found != spec:
                    raise DamagedError(
                        f"{paths.spec}: differs in {', '.join(_differing(found, spec))}; move the directory away"
                    )
            else:
                spec.save(paths.spec)
            return cls(paths, spec, lock, Journal(paths.journal, attempt=0))
        except BaseException:
            lock.release()
            raise

    def close(self) -> None:
        self.journal.close()
        self.lock.release()


def _differing(a: RunSpec, b: RunSpec) -> list[str]:
    x, y = _flat(a.model_dump(mode="json")), _flat(b.model_dump(mode="json"))
    return sorted(key for key in x.keys() | y.keys() if x.get(key) != y.get(key))


def _flat(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def newest(runs: Path) -> RunPaths | None:
    """The run whose journal was written last, for `ratchet status`."""
    found = [p.parent for p in runs.glob("*/journal.jsonl")]
    return RunPaths(max(found, key=lambda p: (p / "journal.jsonl").stat().st_mtime_ns)) if found else None


def named(runs: Path, prefix: str) -> RunPaths:
    """The one run whose id begins with `prefix`. Raises DataError when there is none, or more than one."""
    found = sorted(p.parent.name for p in runs.glob("*/journal.jsonl"))
    matching = [name for name in found if name.startswith(prefix)]
    if len(matching) != 1:
        state = "no run" if not matching else f"{len(matching)} runs"
        raise DataError(f"{prefix}: {state} of that name in {runs}; there are: {', '.join(found) or 'none'}")
    return RunPaths(runs / matching[0])
