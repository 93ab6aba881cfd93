"""Proves the README's sentence "a worse model never ships" for deployments: a deployment that is killed at any point
and repeated always ends in the same state."""

import os
import shutil
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from promoted_models import SETTINGS, promote_fake_model
from ratchet.registry.deployment.release import DeploymentDirectory, read_recorded_deployments
from ratchet.stages.deploy import DeployOptions, check_release, deploy
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("registry", "stages")
QUIET = DeployOptions(smoke_test=False)


def first(layout: ProjectLayout, served: Path) -> None:
    deploy(Project.from_parts(layout, SETTINGS), served, QUIET)


def back(layout: ProjectLayout, served: Path) -> None:
    deploy(Project.from_parts(layout, SETTINGS), served, DeployOptions(rollback=True))


def old_one(layout: ProjectLayout, served: Path) -> None:
    deploy(Project.from_parts(layout, SETTINGS), served, DeployOptions(version=1, smoke_test=False))


def nothing(layout: ProjectLayout, served: Path) -> None:
    promote_fake_model(layout, "a")


def one(layout: ProjectLayout, served: Path) -> None:
    nothing(layout, served)
    first(layout, served)
    promote_fake_model(layout, "b")


def four(layout: ProjectLayout, served: Path) -> None:
    for model in "abcd":
        promote_fake_model(layout, model)
        first(layout, served)


Work = Callable[[ProjectLayout, Path], None]
SCENARIOS: dict[str, tuple[Work, Work, list[str], str, str]] = {
    "the first": (nothing, first, ["", "1"], "1", "1"),
    "the second": (one, first, ["1", "2"], "12", "12"),
    "a rollback": (four, back, ["4", "3"], "234", "12343"),
    "an old version again, one is pruned": (four, old_one, ["4", "1"], "134", "12341"),
}
"""Each scenario has the preparation, the work, the versions that may be current after a kill, the releases on the disk
at the end, and the lines of the history at the end."""


def killed_at(point: int, work: Callable[[], None]) -> bool:
    """Do the work in a process that is killed before the operation with this number. Return whether the process was
    killed."""
    child = os.fork()
    if child == 0:
        seen = count()

        def before(operation: str, path: Path) -> None:
            if next(seen) == point:
                os.kill(os.getpid(), signal.SIGKILL)

        files.before = before
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def version(layout: ProjectLayout, served: Path, link: str = "current") -> str:
    """Return the version that a server would load. Check that the release is complete and signed."""
    return str(check_release(layout, served / link).version) if (served / link).exists() else ""


@pytest.mark.parametrize(
    ("name", "exchange"), [*((name, True) for name in SCENARIOS), ("the second", False), ("a rollback", False)]
)
def test_killed_anywhere(
    project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(files, "exchange_names", lambda a, b: False)
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # a killed process loses no data that the kernel has received
    monkeypatch.setenv("RATCHET_ACTOR", "ada")
    prepare, work, states, kept, history = SCENARIOS[name]
    template, served = tmp_path / "template", tmp_path / "served"
    prepare(project, template)
    found = set()
    for point in count():
        shutil.rmtree(served, ignore_errors=True)
        if template.exists():
            shutil.copytree(template, served, symlinks=True)
        project.deployments.unlink(missing_ok=True)
        died = killed_at(point, lambda: work(project, served))
        now = version(project, served)
        assert now in states, f"point {point}"
        found.add(now)
        if not died:
            break
        work(project, served)  # the repeated command does not undo a completed rollback
        assert version(project, served) == states[1], f"point {point}"
        assert read_recorded_deployments(project)[-1].deployment.version == int(states[1]), f"point {point}"
        if states[0]:
            assert version(project, served, "previous") == states[0]
        names = sorted(p.name for p in (served / "releases").iterdir())
        assert "".join(n.split("-")[0] for n in names) == kept
        assert {p.name for p in served.iterdir()} <= {
            ".deploy.lock", "deployment.json", "deployments.jsonl", "releases", "current", "previous",
        }  # fmt: skip
        assert "".join(str(entry.version) for entry in DeploymentDirectory(served).read_history()) == history
    assert found == set(states)
    assert point > 5
