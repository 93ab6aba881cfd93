"""Fixtures: tiny base models on disk, each written once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ratchet.models.cpu_kernels import library
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model directory as a user has one; tests that change it work on a copy."""
    import tiny_project
    from ratchet.stages import base

    layout = tiny_project.write(tmp_path_factory.mktemp("built") / "project")
    base.base(Project.from_parts(layout, tiny_project.SETTINGS))
    return layout.tiny_model


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch compute what kernels of our own compute on this CPU."""
    monkeypatch.setattr(library, "load_kernels", lambda: library.KernelLibrary(None, "switched off"))


@pytest.fixture(scope="session")
def saved_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the directory of a family's tiny model; tests do not change it."""
    import families

    root = tmp_path_factory.mktemp("families")

    def directory(family: str) -> Path:
        if not (root / family).exists():
            families.make(family).save_pretrained(root / family)
        return root / family

    return directory


@pytest.fixture
def layout(tmp_path: Path) -> ProjectLayout:
    import tiny_project

    return tiny_project.write(tmp_path / "project")
