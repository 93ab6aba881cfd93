"""Runs one training for benchmarks/callbacks.py, with all callbacks or with none.

    python benchmarks/callbacks_cell.py PROJECT     trains a project as `ratchet train` does, without callbacks

The training with callbacks is the command `ratchet train`: its console on a pseudo-terminal, MLflow in SQLite,
Prometheus metrics fetched once a second and written as a file, webhooks to a local server. At the end the cell checks
that every receiver has its data, because a callback that sends nothing costs nothing.
"""

import fcntl
import os
import pty
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from waiting_overhead import cpu_s

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.models.lazy_imports import set_library_defaults
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.stages.project import Project
from ratchet.stages.train import train
from ratchet.storage.layout import ProjectLayout

ROWS, COLUMNS = 36, 120
FETCH_EVERY_S = 1.0
LOOK_S = 0.05
PATIENCE_S = 600.0
LAST_BYTES = 2000
OMP = "OMP_NUM_THREADS"


@dataclass
class Told:
    """Data that arrived at the receivers of the callbacks."""

    drawn_bytes: int = 0
    drawn: bytes = b""
    """The last LAST_BYTES of the drawn bytes."""
    fetched: int = 0
    """Number of HTTP responses with metrics of a step."""
    messages: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class Training:
    """Result of a training."""

    step_s: list[float]
    """Seconds of each step, in order, measured by the worker."""
    whole_s: float
    """Seconds from the end of the first step to the end of the last."""
    begun_s: float
    """CPU seconds of the supervisor until half of the steps were done: imports and the start of callbacks."""
    supervisor_s: float
    """CPU seconds of the supervisor per step after that."""
    adapter: str
    """Digest of the adapter."""
    untold: list[str]
    """Receivers that lack data."""


@dataclass(frozen=True)
class Turns:
    """Blocks of steps in which the supervisor with its callbacks is stopped (SIGSTOP): every other block, from step
    `first`."""

    first: int
    block: int
    odd: bool
    """True: stop in the first, third, ... block. False: in the second, fourth, ..."""

    def held(self, step: int) -> bool:
        """Return whether the step after this many steps is unmonitored."""
        return step >= self.first and ((step - self.first) // self.block % 2 == 0) == self.odd


def trained(layout: ProjectLayout, threads: int, watched: bool, turns: Turns | None = None) -> Training:
    """Train a fresh project with this many threads (0: the number that `machine.threads: 0` selects). Raises SystemExit
    if the training fails."""
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR", OMP)}
    environment |= {"TERM": "xterm-256color"} | ({OMP: str(threads)} if threads else {})
    told = Told()
    with receiver(told) as address:
        command = [sys.executable, __file__, str(layout.root)]
        if watched:
            environment["RATCHET_WEBHOOK_URL"] = address
            command = [sys.executable, "-m", "ratchet", "--project", str(layout.root), "train"]
        with terminal(told) as end:
            process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=environment)
            try:
                readings = list(watch(process, layout, told, turns))
            finally:  # the process may be stopped (SIGSTOP); the worker ends with it
                process.kill()
                process.wait()
    events = [event for path in journals(layout) for event in JournalReader(path).read()]
    finished = [event for event in events if event.kind == "finished"]
    if process.returncode or not finished:
        said = told.drawn.decode(errors="replace")
        raise SystemExit(f"{layout.root}: exit code {process.returncode}\n{said}")
    steps = [event for event in events if event.kind == "step"]
    half = len(steps) // 2
    begun_s = at(readings, steps[half].t)
    return Training(
        step_s=[float(event.data["step_s"]) for event in steps],
        whole_s=steps[-1].t - steps[0].t,
        begun_s=begun_s,
        supervisor_s=(at(readings, steps[-1].t) - begun_s) / (len(steps) - 1 - half),
        adapter=str(finished[0].data["adapter_digest"]),
        untold=missed(layout, told, events) if watched else [],
    )


def watch(
    process: "subprocess.Popen[bytes]", layout: ProjectLayout, told: Told, turns: Turns | None
) -> Iterator[tuple[float, float]]:
    """Yield Unix time and the supervisor's CPU seconds every second until the process ends. Also fetch the metrics, and
    stop and resume the process according to `turns`."""
    port = params_file.load(layout.params).machine.metrics_port
    began_s, next_s, step = time.monotonic(), 0.0, 0
    held, over = False, False
    reader: JournalReader | None = None
    while process.poll() is None:
        if time.monotonic() - began_s > PATIENCE_S:
            process.kill()
        if turns:
            reader = reader or next(map(JournalReader, journals(layout)), None)
            found = list(reader.read()) if reader else []
            step += sum(event.kind == "step" for event in found)
            over = over or any(event.kind == "finished" for event in found)
            if held != (turns.held(step) and not over):
                held = not held
                process.send_signal(signal.SIGSTOP if held else signal.SIGCONT)
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + FETCH_EVERY_S
            with suppress(FileNotFoundError, ProcessLookupError):
                yield time.time(), cpu_s(process.pid)
            if port and not held:
                told.fetched += fetched(port)
        time.sleep(LOOK_S)


def fetched(port: int) -> bool:
    """Return whether the port has metrics of a step. The port opens some time after the start and closes at the end."""
    with suppress(urllib.error.URLError, ConnectionError):
        reply = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)
        return b"\nratchet_step{" in reply.read()
    return False


def journals(layout: ProjectLayout) -> Iterator[Path]:
    """Return the journals of a project's runs. A project of this benchmark has at most one run."""
    return layout.runs.glob("*/journal.jsonl")


def at(readings: list[tuple[float, float]], moment: float) -> float:
    """Return the reading at a moment, interpolated linearly between two readings."""
    before = max((one for one in readings if one[0] <= moment), default=readings[0])
    after = min((one for one in readings if one[0] > moment), default=readings[-1])
    if after[0] <= before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (moment - before[0]) / (after[0] - before[0])


def missed(layout: ProjectLayout, told: Told, events: list[JournalEvent]) -> list[str]:
    """Return the receivers that lack data."""
    steps = sum(event.kind == "step" for event in events)
    machine = params_file.load(layout.params).machine
    figures = Path(machine.metrics_file or "").read_text(encoding="utf-8")
    with sqlite3.connect(layout.mlruns / "mlflow.db") as store:
        found = store.execute("select count(distinct step) from metrics where key = 'train/loss'").fetchone()
    reached = {
        "console": told.drawn_bytes >= steps,
        "MLflow": found == (steps,),
        "port": told.fetched > 0,
        "file": f'ratchet_step{{run="{next(journals(layout)).parent.name}"}} {steps}.0' in figures,
        "webhook": any(b'"finished"' in message for message in told.messages),
        "system figures": any(event.kind == "system_metrics" for event in events),
    }
    return [name for name, was in reached.items() if not was]


@contextmanager
def terminal(told: Told) -> Iterator[int]:
    """Yield the slave end of a pseudo-terminal. A thread reads and counts the bytes that a program writes to it, and
    keeps the last LAST_BYTES."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(master, 1 << 16):
                told.drawn_bytes += len(data)
                told.drawn = (told.drawn + data)[-LAST_BYTES:]

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield slave
    finally:
        os.close(slave)
        reader.join(10)
        os.close(master)


@contextmanager
def receiver(told: Told) -> Iterator[str]:
    """Yield the address of a server that accepts every message."""

    class Takes(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.messages.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *about: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Takes)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()


def main(project: Path) -> None:
    """Train the project without callbacks."""
    set_library_defaults()  # as `ratchet train` does: the way threads wait changes step times
    layout = ProjectLayout(project)
    settings: Settings = params_file.load(layout.params)
    train(Project.from_parts(layout, settings), lambda _: [], lambda *_: None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
