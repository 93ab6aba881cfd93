"""Measures the time to the first step for benchmarks/waiting.py. Times are those of the journal.

benchmarks/train.py compares this time with TRL's.
"""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from report_rows import Row, middle, told
from small_project import build
from waiting_overhead import PATIENCE_S, cpu_s, events_of

from ratchet.storage.layout import ProjectLayout

BREAKDOWN = ("attempt_started", "memory_forecast", "worker_ready", "step")
"""Events that end the parts of a start: the supervisor's own start; the worker's imports, checks and forecast; loading
of the model; the first step."""


def rows_of_start(scratch: Path, rounds: int) -> list[Row]:
    """Measure the seconds to the parts of a start."""
    layout = build(scratch / "start")
    started(layout)  # a warm-up: byte code, page cache, MLflow's database
    found = [started(layout) for _ in range(rounds)]
    return [told(f"start: {name} after, s", *middle([one[name] for one in found])) for name in found[0]]


def started(layout: ProjectLayout) -> dict[str, float]:
    """Return the seconds from the command to events of a new run's journal, and the CPU time of both processes up to
    the first step."""
    shutil.rmtree(layout.runs, ignore_errors=True)
    began_s = time.time()
    process = subprocess.Popen(
        [sys.executable, "-m", "ratchet", "--project", str(layout.root), "train"], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while process.poll() is None and time.time() - began_s < PATIENCE_S:
            first = {event.kind: event.t - began_s for event in reversed(events_of(layout))}
            if "step" in first:
                used_s = sum(map(cpu_s, (process.pid, *children(process.pid))))
                return {name: first[name] for name in BREAKDOWN if name in first} | {"CPU": used_s}
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    raise SystemExit(f"{layout.root}: no first step; see worker.log in {layout.runs}")


def children(process: int) -> list[int]:
    """Return the running child processes that the main thread of a process has started."""
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text("utf-8").split()]
