"""Disagreements between machines: one message with problem, place and remedy, and an exit code."""

from rank_projects import PATIENCE_S, events, start
from ratchet.storage.layout import ProjectLayout


def ended(layout: ProjectLayout) -> tuple[int, str]:
    """Exit code and words of a training that cannot begin."""
    process = start(layout)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert not layout.train.exists()
    assert not events(layout, "step")
    return process.returncode, said
