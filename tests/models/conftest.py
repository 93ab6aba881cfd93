"""Tiny base models on disk, each written once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory as a user has one; tests copy it and leave it as it is."""
    import tiny_project
    from ratchet.stages import base

    layout = tiny_project.write(tmp_path_factory.mktemp("built") / "project")
    base.base(Project.from_parts(layout, tiny_project.SETTINGS))
    return layout.tiny_model


@pytest.fixture(scope="session")
def saved_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a family's tiny model, for tests that leave it as it is."""
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
