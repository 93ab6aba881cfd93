"""Proves the README's sentence "Monitoring cannot disturb a run" for the console: a killed worker and a resized
terminal leave a readable screen."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

from console_cases import (
    small,  # noqa: F401 (a fixture)
)
from ratchet.runs import directory
from ratchet.runs.fault_injection import injectors
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout
from tmux_screen import Screen, needs_tmux

PACKAGES = ("reports", "console", "runs")


def worker_of(layout: ProjectLayout) -> int | None:
    """Return the process that trains the newest run, or None before the run has ten steps."""
    run = directory.find_newest_run(layout.runs)
    events = list(JournalReader(run.journal).read()) if run else []
    if sum(one.kind == "step" for one in events) < 10:
        return None
    supervisor = [one.data["pid"] for one in events if one.kind == "attempt_started"][-1]
    return injectors.find_worker(supervisor, layout.root)


def command(layout: ProjectLayout) -> str:
    return f"cd '{layout.root}' && '{sys.executable}' -m ratchet train"


@needs_tmux
def test_a_training_whose_worker_is_killed_in_a_real_terminal_that_is_resized(small: ProjectLayout) -> None:
    with Screen(f"seq 100; {command(small)}", 120, 30) as screen:
        screen.until(lambda lines: worker_of(small) is not None)
        worker = worker_of(small)
        assert worker is not None
        os.kill(worker, signal.SIGKILL)
        lines = screen.until(lambda lines: any("attempt 2" in line for line in lines))
        assert not screen.shows_cursor
        assert [line for line in lines if "ratchet: worker killed" in line]
        for width in (60, 100, 40, 80):
            screen.resize(width, 30)
            # The last column is free and the step line is wide, which shows that the console was drawn again for this
            # width.
            lines = screen.until(lambda lines, width=width: widest(lines) < width)
            assert len([line for line in lines if line.startswith("run ")]) == 1
        lines = screen.until(lambda lines: any(line.startswith("[ended") for line in lines))
        assert screen.shows_cursor
    panel = lines[next(place for place, line in enumerate(lines) if line.startswith("run ")) :]
    run = directory.find_newest_run(small.runs)
    assert run is not None
    assert panel[0].startswith(f"run {run.root.name}  finished, attempt 2")
    assert re.match(r"step (\d+) of \1 .* 100 %", panel[1])
    assert [line for line in panel if re.match("(attempts|tries) +2", line)], "the label depends on the last width"
    assert panel[-1] == "[ended 0]"


def widest(lines: list[str]) -> int:
    """Return the width of the progress line."""
    return max((len(line) for line in lines if " of " in line and line.startswith("step ")), default=999)


@needs_tmux
def test_ctrl_c_gives_the_terminal_back(small: ProjectLayout, tmp_path: Path) -> None:
    # A copy, because the other test looks for the newest run. A new seed, because the run may be finished already.
    shutil.copytree(small.root, tmp_path / "project", symlinks=True)
    project = ProjectLayout(tmp_path / "project")
    params = project.params.read_text(encoding="utf-8")
    project.params.write_text(re.sub(r"(?m)^(train:(?:\n .*)*?\n  seed:) 3", r"\1 4", params), encoding="utf-8")
    with Screen(command(project), 100, 30) as screen:
        screen.until(lambda lines: any(line.startswith("step ") and "%" in line for line in lines))
        screen.do("send-keys", "C-c")
        lines = screen.until(lambda lines: any(line.startswith("[ended") for line in lines))
        assert screen.shows_cursor
    assert lines[-1] == "[ended 75]"
    assert any(line.startswith("run ") and "  stopped" in line for line in lines)
