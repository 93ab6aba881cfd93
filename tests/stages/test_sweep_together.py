"""Tests of sweeps that train several trials together."""

import pytest

from ratchet.storage.layout import ProjectLayout
from sweep_cases import (
    project,  # noqa: F401 (a fixture)
    template,  # noqa: F401 (a fixture)
)
from together_cases import check_sweep_with_kill


@pytest.mark.long
def test_trials_together_survive_a_kill_and_the_winner_is_trained_alone(project: ProjectLayout) -> None:
    check_sweep_with_kill(project, "group", trials=2, count=2, finalists=1)
