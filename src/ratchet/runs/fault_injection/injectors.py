"""Injection of faults into real processes and files. Signals go only to a child of this process and to its worker."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

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
"""Time within which a worker must end after its supervisor was killed."""

POLL_S = 0.005


class TrainCommandProcess:
    """Process of `ratchet train` in a project, started as a user or DVC does. The context leaves no process behind."""

    process: subprocess.Popen[bytes]
    """The supervisor, inside the context."""

    def __init__(self, root: Path, faults: tuple[InjectedFault, ...]) -> None:
        self.root = root.resolve()
        self._environment = _fault_environment(faults)
        self._worker: int | None = None

    def __enter__(self) -> "TrainCommandProcess":
        with (self.root / OUTPUT).open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ratchet", "train"], cwd=self.root, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def worker(self) -> int | None:
        """Return the process id of the current worker, if any."""
        pid = find_worker(self.process.pid, self.root)
        self._worker = pid or self._worker
        return pid

    def signal_worker(self, number: signal.Signals) -> bool:
        """Send a signal to the worker. Return False if there is no worker."""
        pid = self.worker()
        if pid is None:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> bool:
        """Kill the supervisor. Return whether its worker ended within EXIT_TIMEOUT_S; otherwise kill it too."""
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
    """Return this environment without variables that redirect a training. DVC_STAGE is set, so the training ends with
    this process."""
    prefixes, names = ("MLFLOW_", "DVC_"), (VARIABLE, RUNS_VARIABLE)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(prefixes) and k not in names}
    environment["DVC_STAGE"] = "train"
    if faults:
        environment[VARIABLE] = digests.canonical_json([fault.model_dump(mode="json") for fault in faults])
    return environment


def find_worker(supervisor: int, root: Path) -> int | None:
    """Return the process id of the current worker of a supervisor in the project at `root`, if any."""
    return next((pid for pid in _list_descendants(supervisor) if _is_worker(pid, root)), None)


def _list_descendants(process: int) -> Iterator[int]:
    """Yield the ids of a process's children, of their children, and so on."""
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread, or the process, has just ended
            for child in map(int, path.read_text().split()):
                yield child
                yield from _list_descendants(child)


def _is_worker(pid: int, root: Path) -> bool:
    """Return whether the process is a worker of this project; False for a zombie."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return WORKER in line and os.fsencode(root) in line


def damage_run(action: FaultAction, paths: RunPaths, seed: int) -> str:
    """Damage the files of a run that is not in training. Return a description of the damage. Raises RunFailedError if
    there is no checkpoint to damage."""
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
            new_size = chance.randrange(size)
            stream.truncate(new_size)
            return f"{name} cut from {size} to {new_size} bytes"
        offset, bit = chance.randrange(size), chance.randrange(8)
        stream.seek(offset)
        old = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([old ^ 1 << bit]))
    return f"{name}: bit {bit} of byte {offset} flipped"


def _damage_journal(journal: Path, chance: random.Random) -> str:
    """Insert garbage between two lines, and append a part of the last line, as after a crash during a write.

    No complete event is removed, because a sealed checkpoint relies on events that reached the disk before it.
    """
    lines = journal.read_bytes().splitlines(keepends=True)
    garbage = chance.randbytes(chance.randint(1, 300)).replace(b"\n", b"\0") + b"\n"
    half = lines[chance.randrange(len(lines))][: chance.randint(1, 40)]
    index = chance.randrange(1, len(lines))
    lines[index:index] = [garbage, half + b"\n", b"\n"]
    torn = lines[-1][: max(1, len(lines[-1]) // 2)]
    files.write_atomic(journal, b"".join([*lines, torn]))
    return f"{len(garbage)} bytes of garbage at line {index + 1}, {len(torn)} bytes torn at the end"
