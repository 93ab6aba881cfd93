"""Proves row R2: a save that is killed before or after any write, fsync or rename leaves the old or the new
checkpoint."""

import signal
from pathlib import Path

import pytest

from crash_points_cases import (
    SCENARIOS,
    as_made,  # noqa: F401 (a fixture)
    choose_disk,
    killed,
    operations,
    prepared,
    quick_disk,  # noqa: F401 (a fixture)
    recover,
)
from ratchet.models import safetensors_format

PACKAGES = ("storage", "training", "runs")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_save_killed_at_any_point_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, as_made: dict[int, dict[str, str]]
) -> None:
    choose_disk(monkeypatch, name)
    if name == "save, link and rotate":
        monkeypatch.setattr(safetensors_format, "CHUNK_BYTES", 1500)  # several writes per file
    scenario, runs = SCENARIOS[name], tmp_path / "runs"
    paths = prepared(runs, scenario)
    points = len(operations(lambda: scenario.work(paths)))
    assert points > 15
    problems: list[str] = []
    for point in range(1, points + 2):
        paths = prepared(runs, scenario)
        end = killed(lambda: scenario.work(paths), point)  # noqa: B023 (called at once)
        assert end == (-signal.SIGKILL if point <= points else 0)
        problems += [f"point {point}: {text}" for text in recover(runs, scenario, as_made)]
    assert problems == []
