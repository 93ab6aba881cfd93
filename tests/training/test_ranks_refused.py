"""Invalid options of several ranks are refused with one message and exit code 2."""

from pathlib import Path

import tiny_project
from rank_projects import project, settings


def test_options_that_cannot_be_are_refused(prepared: Path, tmp_path: Path) -> None:
    layout = project(prepared, tmp_path / "project", settings())
    done = tiny_project.ratchet(layout, "train", "--nodes", "3:2", "--rendezvous", "somewhere")
    assert done.returncode == 2
    assert "--nodes (machine.nodes): found '3:2'; expected a number of machines" in done.stderr
    assert "--rendezvous (machine.rendezvous): found 'somewhere'; expected HOST:PORT" in done.stderr
    assert not layout.runs.exists()
