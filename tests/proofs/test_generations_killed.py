"""Proves rows R1 and R14 for generation: a killed or hung generation gives the same bytes as an undisturbed one."""

from pathlib import Path

import pytest

import generations
from generate_cases import (
    COUNT,
    layout,  # noqa: F401 (a fixture)
    model,  # noqa: F401 (a fixture)
    prompts,  # noqa: F401 (a fixture)
)
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("inference", "stages")
ROOT = Path(__file__).parents[2]


def test_killed_at_random_it_gives_what_it_would_have_given(
    layout: ProjectLayout, prompts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import generate_kills

    slow = [{"kind": "slow", "seconds": 0.02, "step": 0}]
    whole = generate_kills.Trial(layout, prompts, tmp_path / "whole", str(model))
    broken = generate_kills.Trial(layout, prompts, tmp_path / "broken", str(model), slow)
    assert whole.finish() == 0
    assert generate_kills.campaign(broken, 3, COUNT, seed=2) == 3
    assert broken.output.read_bytes() == whole.output.read_bytes()
    assert generate_kills.places(broken.output) == [(f"q{number}", 0) for number in range(COUNT)]
    assert broken.computed_again == 0


def test_a_worker_that_hangs_is_found_and_its_answers_are_kept(
    layout: ProjectLayout, prompts: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import generate_kills

    settings = generations.with_generate(temperature=0.8)
    machine = settings.machine.model_copy(update={"stall_timeout_s": 1.0})
    generations.project_settings(layout, settings.model_copy(update={"machine": machine}))
    hang = [{"kind": "hang", "step": COUNT // 2, "mark": str(tmp_path / "hung")}]
    trial = generate_kills.Trial(layout, prompts, tmp_path / "trial", str(model), hang)
    assert trial.finish() == 0
    assert (tmp_path / "hung").exists()
    assert [ready["start_step"] for ready in trial.readies()] == [0, COUNT // 2]
    assert len(generate_kills.places(trial.output)) == COUNT
