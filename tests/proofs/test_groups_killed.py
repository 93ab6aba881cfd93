"""Proves docs/sweeps.md, "Trials together": a group that was killed ends with the same bytes as one that was never
killed, and a killed worker takes only its own trial along."""

import shutil
from pathlib import Path

import group_cases
import tiny_project
from group_cases import trains
from ratchet.storage.layout import ProjectLayout
from sweep_cases import (
    project,  # noqa: F401 (a fixture)
    template,  # noqa: F401 (a fixture)
)
from together_cases import check_sweep_with_kill

PACKAGES = ("training", "tuning")


def test_a_group_that_is_killed_again_and_again_ends_with_the_same_bytes(tmp_path: Path) -> None:
    prepared = tiny_project.prepared(tmp_path / "prepared")

    def copy(name: str) -> ProjectLayout:
        shutil.copytree(prepared.root, tmp_path / name)
        return ProjectLayout(tmp_path / name)

    settings = trains(
        rank=[4, 16, 8, 8], learning_rate=[0.01, 0.003, 0.005, 0.01], adapter=["lora", "adalora", "dora", "lora"],
        dropout=[0.1, 0.0, 0.0, 0.2], epochs=[2, 2, 2, 1], seed=[1, 2, 3, 4],
    )  # fmt: skip
    group_cases.check_kills(copy, settings, tmp_path, kills=3)


def test_a_worker_that_is_killed_takes_only_its_own_trial_along(project: ProjectLayout) -> None:
    check_sweep_with_kill(project, "worker", trials=4, count=3, finalists=2)


def test_a_group_of_a_sweep_that_is_killed_loses_no_trial(project: ProjectLayout) -> None:
    check_sweep_with_kill(project, "group", trials=4, count=3, finalists=2)
