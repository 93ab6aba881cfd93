"""Real training processes, killed by real signals: the same command again ends with the same bytes."""

import os
import random
import signal
import time

import tiny_project
from ratchet.faults.attack import worker_of
from ratchet.layout import Layout
from resume_cases import (
    KILLS,
    PATIENCE_S,
    Bytes,
    events,
    prepared,  # noqa: F401 (a fixture)
    project,  # noqa: F401 (a fixture)
    random_points,  # noqa: F401 (a fixture)
    reference,  # noqa: F401 (a fixture)
    steps_after,
    wait_for,
)
from tiny_project import outcome
from tiny_project import start_training as start


def test_workers_killed_at_random_points_change_nothing(
    project: Layout, reference: Bytes, random_points: random.Random
) -> None:
    process = start(project)
    killed = 0
    while killed < KILLS:
        done = sum(e.kind == "step" for e in events(project))
        if not wait_for(project, process, steps_after(done + random_points.randrange(3))):
            break
        time.sleep(random_points.uniform(0, 0.05))
        pid = worker_of(process.pid, project.root)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            killed += 1
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output
    assert killed == KILLS
    assert outcome(project) == reference
    assert sum(e.kind == "died" for e in events(project)) == KILLS


def test_sigterm_seals_a_checkpoint_and_says_repeat(project: Layout, reference: Bytes) -> None:
    process = start(project)
    assert wait_for(project, process, steps_after(3))
    while process.poll() is None:  # one who does not stop asking, down to the last moment of the process
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, output
    last = [e for e in events(project) if e.kind in ("step", "stopped", "checkpoint")]
    stopped = next(e.data["step"] for e in last if e.kind == "stopped")
    assert max(e.data["step"] for e in last if e.kind == "step") == stopped
    assert max(e.data["step"] for e in last if e.kind == "checkpoint") == stopped
    again = tiny_project.ratchet(project, "train")
    assert again.returncode == 0, again.stderr
    assert outcome(project) == reference
