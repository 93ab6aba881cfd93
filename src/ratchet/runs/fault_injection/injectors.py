"""Injects faults into real processes and files. Only a child of this process, and its worker, receive signals."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from ratchet.errors import RunFailedError
from ratchet.runs.directory import RunPaths
from ratchet.runs.fault_injection.injection import VARIABLE, InjectedFault
from ratchet.runs.fault_injection.plan import FaultAction
from ratchet.storage import digests, files
from ratchet.storage.layout import RUNS_VARIABLE

WORKER = b"ratchet.training.worker_main"
OUTPUT = "chaos.log"
"""Output of the commands of a trial, in its project directory."""

EXIT_TIMEOUT_S = 15.0
"""A worker whose supervisor was killed must be gone within this time."""

POLL_S = 0.005


class TrainCommandProcess:
    """`ratchet train` in a project, started as a person or DVC does. As a context manager it leaves no process."""

    def __init__(self, root: Path, faults: tuple[InjectedFault, ...]) -> None:
        self.root = root.resolve()
        self._environment = _fault_environment(faults)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: BinaryIO | None = None
        self._worker: int | None = None

    def __enter__(self) -> "TrainCommandProcess":
        self._log = (self.root / OUTPUT).open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ratchet", "train"], cwd=self.root, env=self._environment,
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        if self._log is not None:
            self._log.close()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process of the supervisor."""
        if self._process is None:
            raise RuntimeError("the command has not been started")
        return self._process

    def worker(self) -> int | None:
        """Process id of the current worker, if any."""
        found = find_worker(self.process.pid, self.root)
        self._worker = found or self._worker
        return found

    def signal_worker(self, number: signal.Signals) -> bool:
        """Signal the worker; False if there is none."""
        pid = self.worker()
        if pid is None:
            return False
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            # Another process may have taken the number since it was read; the descriptor refers to this one only.
            if not _is_worker(pid, self.root):
                return False
            signal.pidfd_send_signal(handle, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)
        return True

    def kill(self) -> bool:
        """Kill the supervisor. Returns whether its worker ended within EXIT_TIMEOUT_S; if not, it is killed too."""
        self.worker()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self._worker is None:
            return True
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        while _is_worker(self._worker, self.root):
            if time.monotonic() >= deadline:
                os.kill(self._worker, signal.SIGKILL)
                return False
            time.sleep(POLL_S)
        return True


def _fault_environment(faults: tuple[InjectedFault, ...]) -> dict[str, str]:
    """Our environment without what would redirect a training; with DVC_STAGE it is stopped if this process dies."""
    foreign = ("MLFLOW_", "DVC_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(foreign) and k not in (VARIABLE, RUNS_VARIABLE)}
    clean["DVC_STAGE"] = "train"
    if faults:
        clean[VARIABLE] = digests.canonical_json([fault.model_dump(mode="json") for fault in faults])
    return clean


def find_worker(supervisor: int, root: Path) -> int | None:
    """Process id of the current worker of a supervisor for the project in `root`, if any."""
    return next((child for child in _list_children(supervisor) if _is_worker(child, root)), None)


def _is_worker(pid: int, root: Path) -> bool:
    """Whether the process is a worker of this project; False for a zombie."""
    line = _read_command_line(pid)
    return WORKER in line and os.fsencode(root) in line


def _list_children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread, or the process, has just ended
            found += map(int, path.read_text().split())
    return found


def _read_command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def damage_run(action: FaultAction, paths: RunPaths, seed: int) -> str:
    """Damage the files of a run that is not in training. Returns a description.

    Raises:
        RunFailedError: there is no checkpoint to damage.
    """
    chance = random.Random(seed)
    if action == "damage the journal":
        return _damage_journal(paths.journal, chance)
    steps = paths.checkpoint_steps()
    if not steps:
        raise RunFailedError(f"{paths.checkpoints}: no checkpoint to damage")
    newest = paths.checkpoint(steps[-1])
    path = chance.choice(sorted(p for p in newest.rglob("*") if p.is_file()))
    size = path.stat().st_size
    name = f"{path.name} of step {steps[-1]}"
    if action == "remove a file":
        path.unlink()
        return f"{name} removed"
    path.chmod(path.stat().st_mode | 0o200)
    with path.open("r+b") as stream:
        if action == "cut a file":
            left = chance.randrange(size)
            stream.truncate(left)
            return f"{name} cut from {size} to {left} bytes"
        place, bit = chance.randrange(size), chance.randrange(8)
        stream.seek(place)
        old = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([old ^ 1 << bit]))
    return f"{name}: bit {bit} of byte {place} flipped"


def _damage_journal(journal: Path, chance: random.Random) -> str:
    """Insert garbage between two lines, and cut the last line, as a machine does that crashes while it writes.

    No complete event is removed, because a sealed checkpoint relies on events that had reached the disk before it.
    """
    lines = journal.read_bytes().splitlines(keepends=True)
    garbage = chance.randbytes(chance.randint(1, 300)).replace(b"\n", b"\0") + b"\n"
    half = lines[chance.randrange(len(lines))][: chance.randint(1, 40)]
    place = chance.randrange(1, len(lines))
    lines[place:place] = [garbage, half + b"\n", b"\n"]
    torn = lines[-1][: max(1, len(lines[-1]) // 2)]
    files.write_atomic(journal, b"".join([*lines, torn]))
    return f"{len(garbage)} bytes of garbage at line {place + 1}, {len(torn)} bytes torn at the end"
