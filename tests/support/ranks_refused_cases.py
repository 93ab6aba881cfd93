"""Disagreements between machines: one message with problem, location and fix, and an exit code."""

from rank_projects import PATIENCE_S, events, start
from ratchet.storage.layout import ProjectLayout


def ended(layout: ProjectLayout) -> tuple[int, str]:
    """Start a training that cannot begin. Return its exit code and its error output."""
    process = start(layout)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert not layout.train.exists()
    assert not events(layout, "step")
    return process.returncode, said
