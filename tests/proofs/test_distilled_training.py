"""Proves that a project with a teacher runs from the teacher's answers to a trained student."""

import tiny_project
from distillation_cases import (
    prepared,  # noqa: F401 (a fixture)
    project,  # noqa: F401 (a fixture)
    with_teacher,
)
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("training", "stages")


def test_a_project_with_a_teacher_trains(project: ProjectLayout) -> None:
    with_teacher(project)
    refused = tiny_project.ratchet(project, "train")
    assert (refused.returncode, "run `ratchet distill`" in refused.stderr) == (2, True)
    assert tiny_project.ratchet(project, "distill").returncode == 0
    done = tiny_project.ratchet(project, "train")
    assert done.returncode == 0, done.stderr
    assert "24 steps" in done.stdout
