"""Cases for `ratchet train --profile`: its measurements and their sums, and no other change to the project."""

from pathlib import Path

import pytest

import tiny_project
from ratchet.config.settings import Settings
from ratchet.runs.directory import RunDirectory
from ratchet.stages import train
from ratchet.stages.project import Project
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.training.run_spec import build_run_spec

SETTINGS = tiny_project.SETTINGS.model_copy(
    update={
        "train": tiny_project.TRAIN.model_copy(update={"epochs": 1, "batch_size": 32, "validate_every_steps": 3}),
        "machine": tiny_project.MACHINE.model_copy(update={"replica": "/a/folder/that/is/not/there"}),
    }
)
"""Settings with a missing replica: a profile does not access the replica."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    return tiny_project.prepared(tmp_path_factory.mktemp("profile") / "project", SETTINGS)


@pytest.fixture(scope="module")
def profiled(project: ProjectLayout) -> tuple[str, dict[str, str]]:
    """Profile a training. Return the printed text, and the digests of the rest of the project before the profile."""
    RunDirectory.open(project.runs, build_run_spec(project, SETTINGS)).close()
    before = rest_of(project)
    return train.profile_training(Project.from_parts(project, SETTINGS), 1000), before


def rest_of(project: ProjectLayout) -> dict[str, str]:
    """Return the digest of each file of the project except profiles and lock files, by path."""
    apart = {project.profiles, project.experiments / ".locks"}
    there = (path for path in project.root.rglob("*") if path.is_file() and apart.isdisjoint(path.parents))
    return {str(path): digests.hash_file(path) for path in there}


def sealed(project: ProjectLayout, settings: Settings = SETTINGS) -> Path:
    return project.profiles / build_run_spec(project, settings).run_id
