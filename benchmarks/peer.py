"""Starts, observes and judges attempts of the peer (peer_trainer.py). The faults are in peer_faults.py.

Every attempt is a process of its own, forked from a server that has imported the libraries: a start takes one second
instead of twelve. A manual fix is counted when a restart is refused and the newest checkpoint is deleted, as a user
would have to do.
"""

import json
import multiprocessing
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import peer_trainer
from peer_trainer import LOG, RESULT, Options

from ratchet.storage.layout import ProjectLayout

PATIENCE_S = 180.0
STARTS = 30
"""Limit for consecutive failed starts of one run; the run is given up after more."""
OUTPUT = "output.txt"


@dataclass
class Row:
    """One row of the table."""

    row: str
    fault: str
    trials: int = 0
    exact: int = 0
    """Trials that ended with the weights, optimizer state and number of steps of the uninterrupted run."""
    unaided: int = 0
    """Trials that ended without a manual fix."""
    silent: int = 0
    """Trials that reported success with a wrong result."""
    slowest_s: float = 0.0
    """Longest time in seconds from the repeated command until training resumes (SIGTERM: from the signal to the end of
    the process)."""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return asdict(self)


def _attempt(options: Options, environment: Mapping[str, str]) -> None:
    """Train in a forked process. Output goes to a file; an exception ends the process with exit code 1."""
    os.environ.update(environment)
    with (options.out / OUTPUT).open("ab") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        peer_trainer.train(options)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class Bench:
    """Runs attempts of the peer on one project.

    Args:
        project: project in which stages base and prepare have run.
        folder: folder for the checkpoints of all trials.
        steps: optimizer steps of a training.
        save_every: optimizer steps between two checkpoints.
        say: receives progress messages.
    """

    def __init__(
        self, project: ProjectLayout, folder: Path, steps: int, save_every: int, say: Callable[[str], None]
    ) -> None:
        # The server does not have this process's sys.path; it finds the modules to preload through PYTHONPATH.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        os.environ["HF_HUB_OFFLINE"] = "1"
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["peer_trainer", "bitsandbytes"])
        self._options = Options(project.root, folder, steps, save_every)
        self._number = 0
        self.steps = steps
        self.folder = folder
        self.say = say
        self.reference, self.training_s = self.undisturbed()
        say(f"  the peer's uninterrupted run: {steps} steps in {self.training_s:.1f} s")

    def new(self, **changes: Any) -> Options:
        """Return options with a new, empty folder."""
        self._number += 1
        out = self.folder / f"{self._number:03}"
        out.mkdir(parents=True)
        return replace(self._options, **({"out": out} | changes))

    def undisturbed(self, **changes: Any) -> tuple[dict[str, Any], float]:
        """Train without faults. Return the result and the seconds."""
        options = self.new(**changes)
        process = self.begin(options)
        begun = time.monotonic()
        if process is None or self.join(options, process) != 0:
            raise SystemExit(f"the peer does not even train undisturbed: {last_line(options)}")
        found = result(options)
        shutil.rmtree(options.out)
        return found, time.monotonic() - begun

    def start(self, options: Options, **environment: str) -> Any:
        """Start a process that trains or resumes."""
        process = self._processes.Process(target=_attempt, args=(options, environment))
        process.start()
        return process

    def join(self, options: Options, process: Any) -> int:
        """Wait for the end of a process. Return its exit code."""
        process.join(PATIENCE_S)
        if process.is_alive():
            process.kill()
            raise SystemExit(f"the peer did not end within {PATIENCE_S:g} s: {last_line(options)}")
        return int(process.exitcode)

    def wait(self, options: Options, process: Any, event: str, step: int = 0, nth: int = 1) -> bool:
        """Wait until the log has an event (of at least this step) for the n-th time. Return False if the process ends
        first."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            ended = not process.is_alive()
            if sum(e["event"] == event and e.get("step", 0) >= step for e in log(options)) >= nth:
                return True
            if ended:
                return False
            time.sleep(0.002)
        process.kill()
        raise SystemExit(f"the peer told no {event!r} within {PATIENCE_S:g} s: {last_line(options)}")

    def begin(self, options: Options, **environment: str) -> Any | None:
        """Start a process and wait until it trains. Return None if the start was refused."""
        before = sum(e["event"] == "begin" for e in log(options))
        process = self.start(options, **environment)
        return process if self.wait(options, process, "begin", nth=before + 1) else None

    def to_the_end(self, options: Options) -> list[str]:
        """Start until the run ends, and delete the newest checkpoint after each refused start. Return the last output
        line of each refused start."""
        refusals: list[str] = []
        while self.join(options, self.start(options)) != 0:
            refusals.append(last_line(options))
            if len(refusals) > STARTS or not lend_a_hand(options):
                break
        return refusals

    def judge(self, options: Options, row: Row, reference: Mapping[str, Any] | None = None, trials: int = 1) -> bool:
        """Compare an ended run with the reference, count the result, and delete the run's folder."""
        found = result(options)
        exact = same(found, reference or self.reference)
        row.exact += trials * exact
        row.silent += trials * (bool(found) and not exact)
        if found and found["step"] != (reference or self.reference)["step"]:
            row.notes.append(f"ended after step {found['step']} of {self.steps}")
        shutil.rmtree(options.out)
        return exact


def result(options: Options) -> dict[str, Any]:
    """Return the final record of the script. It is empty if the script did not finish."""
    path = options.out / RESULT
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether weights, optimizer state and number of steps are equal."""
    return bool(a) and all(a[key] == b[key] for key in ("weights", "optimizer", "step"))


def log(options: Options) -> list[dict[str, Any]]:
    """Return the records that the script has logged, without an incomplete last line."""
    path = options.out / LOG
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")]


def last_line(options: Options) -> str:
    """Return the last line that a process printed, without directories of paths."""
    path = options.out / OUTPUT
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines() if path.exists() else []
    return re.sub(r"/\S*/", "", lines[-1])[:160] if lines else "nothing was printed"


def checkpoints(options: Options) -> list[Path]:
    """Return the checkpoints, sorted by step."""
    return sorted(options.out.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def lend_a_hand(options: Options) -> bool:
    """Delete the newest checkpoint, from which a restart was refused. Return False if there is none."""
    found = checkpoints(options)
    if found:
        shutil.rmtree(found[-1])
    return bool(found)
