"""Real training processes are killed by real signals. Repeating the command gives the same bytes."""

import random
import signal
import time

import pytest

import tiny_project
from ratchet.storage.layout import ProjectLayout
from resume_cases import (
    PATIENCE_S,
    Bytes,
    events,
    prepared,  # noqa: F401 (a fixture)
    project,  # noqa: F401 (a fixture)
    random_points,  # noqa: F401 (a fixture)
    reference,  # noqa: F401 (a fixture)
    steps_after,
    train_with_kills,
    wait_for,
)
from tiny_project import outcome
from tiny_project import start_training as start


@pytest.mark.long
def test_sigterm_seals_a_checkpoint_and_says_repeat(project: ProjectLayout, reference: Bytes) -> None:
    process = start(project)
    assert wait_for(project, process, steps_after(3))
    while process.poll() is None:  # a sender that repeats the signal until the process ends
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, output
    last = [e for e in events(project) if e.kind in ("step", "interrupted", "checkpoint_saved")]
    stopped = next(e.data["step"] for e in last if e.kind == "interrupted")
    assert max(e.data["step"] for e in last if e.kind == "step") == stopped
    assert max(e.data["step"] for e in last if e.kind == "checkpoint_saved") == stopped
    again = tiny_project.ratchet(project, "train")
    assert again.returncode == 0, again.stderr
    assert outcome(project) == reference


def test_a_worker_killed_at_a_random_point_changes_nothing(
    project: ProjectLayout, reference: Bytes, random_points: random.Random
) -> None:
    train_with_kills(project, 1, random_points)
    assert outcome(project) == reference
