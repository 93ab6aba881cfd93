"""Scenarios for crash tests: killed processes, crashed machines, and disk failures at each disk operation."""

import ctypes
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from ratchet.runs.directory import RunDirectory, RunPaths
from ratchet.storage import files
from ratchet.training import checkpoint
from snapshots import SPEC, contents, newest, save


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace fsync by a function that does nothing. A killed process loses no data that the kernel has received, and
    the tests of crashed machines count the announced fsync calls. tests/storage/test_crash_points.py checks that each
    announced call is made."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    yield
    files.before = lambda operation, path: None


def without_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a C library that cannot exchange two names atomically."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())


@dataclass(frozen=True)
class Scenario:
    """Work on the checkpoints of a run, and the steps from which the run may resume if the work is interrupted."""

    prepare: Callable[[RunPaths], None]
    work: Callable[[RunPaths], None]
    old: int
    new: int


def saves(*steps: int) -> Callable[[RunPaths], None]:
    def make(paths: RunPaths) -> None:
        for step in steps:
            save(paths, step)

    return make


def save_and_rotate(paths: RunPaths) -> None:
    save(paths, 8)
    checkpoint.rotate(paths, 2, {2})


def damaged_newest(paths: RunPaths) -> None:
    saves(2, 4)(paths)
    os.truncate(paths.checkpoint(4) / "state.json", 3)


def go_on_from_older(paths: RunPaths) -> None:
    checkpoint.quarantine_newer(paths, paths.checkpoint(2))
    save(paths, 4)


SCENARIOS = {
    "first save": Scenario(lambda paths: None, saves(2), 0, 2),
    "save, link and rotate": Scenario(saves(2, 4, 6), save_and_rotate, 6, 8),
    "save over the same step": Scenario(saves(2, 4), saves(4), 4, 4),
    "set a damaged one aside, save again": Scenario(damaged_newest, go_on_from_older, 2, 4),
    "save over the same step, no exchange": Scenario(saves(2, 4), saves(4), 4, 4),
}


def choose_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if "no exchange" in name:
        without_exchange(monkeypatch)


@pytest.fixture(scope="module")
def as_made(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, str]]:
    """Return the SHA-256 of each file in the checkpoint of each step. The contents are deterministic."""
    paths = RunPaths(tmp_path_factory.mktemp("reference"))
    saves(2, 4, 6, 8, 10)(paths)
    return {step: contents(paths.checkpoint(step)) for step in paths.checkpoint_steps()}


def prepared(root: Path, scenario: Scenario) -> RunPaths:
    """Create a new run that is ready for the work of the scenario."""
    template = root.with_name("template")
    if not template.exists():
        opened = RunDirectory.open(template, SPEC)
        opened.close()
        scenario.prepare(opened.paths)
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root)
    return RunPaths(root / SPEC.run_id)


def operations(work: Callable[[], object]) -> list[tuple[files.Operation, Path]]:
    """Return the disk operations of the work."""
    seen: list[tuple[files.Operation, Path]] = []
    files.before = lambda operation, path: seen.append((operation, path))
    work()
    files.before = lambda operation, path: None
    return seen


def killed(work: Callable[[], object], before: int) -> int:
    """Do the work in a child process that kills itself before the operation with this number (from 1). Return the exit
    code of the child."""
    child = os.fork()
    if child == 0:
        count = [0]

        def kill(operation: files.Operation, path: Path) -> None:
            count[0] += 1
            if count[0] == before:
                os.kill(os.getpid(), signal.SIGKILL)

        files.before = kill
        with suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def recover(runs: Path, scenario: Scenario, as_made: dict[int, dict[str, str]]) -> list[str]:
    """Start the run again and return the problems. The run must resume from exactly the old or the new checkpoint, and
    the next save must succeed."""
    RunDirectory.open(runs, SPEC).close()
    paths = RunPaths(runs / SPEC.run_id)
    problems = [f"left behind: {p.name}" for p in paths.checkpoints.iterdir() if p.name.startswith(".")]
    step, notices = newest(paths)
    if scenario.prepare is not damaged_newest:
        problems += notices  # no checkpoint is damaged, so none may be reported as damaged
    if (step or 0) not in (scenario.old, scenario.new):
        problems.append(f"goes on from {step}")
    elif step and contents(paths.checkpoint(step)) != as_made[step]:
        problems.append(f"step {step} is not as it was made")
    checkpoint.quarantine_newer(paths, paths.checkpoint(step) if step else None)
    save(paths, 10)
    if newest(paths) != (10, []) or contents(paths.checkpoint(10)) != as_made[10]:
        problems.append("the next save is not as it should be")
    return problems
