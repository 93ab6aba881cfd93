"""Proves that the profile of a training accounts for all of its time and does not change the project."""

import pytest

import tiny_project
from profile_cases import (
    profiled,  # noqa: F401 (a fixture)
    project,  # noqa: F401 (a fixture)
    rest_of,
    sealed,
)
from ratchet.stages import train
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.training import PARTS, TrainingProfile

PACKAGES = ("training",)


def test_all_there_is_was_measured_and_adds_up(project: ProjectLayout, profiled: tuple[str, dict[str, str]]) -> None:
    files.verify_sealed(sealed(project), "profile")
    found = TrainingProfile.load(sealed(project) / "profile.json")
    steps = found.warmup_steps + found.measured_steps + found.traced_steps
    assert 4 <= steps < 20, "as many as are planned, not as many as were asked for"
    assert tuple(part.name for part in found.parts) == PARTS
    assert sum(part.share for part in found.parts) == pytest.approx(1)
    assert {part.name: part.every_steps for part in found.parts if part.every_steps > 1}["evaluation"] == 3
    seconds = {part.name: part.step_s for part in found.parts}
    assert min(seconds.values()) > 0
    assert found.quartiles_s[0] <= found.step_s <= found.quartiles_s[1]
    assert found.synchronised_step_s is None
    assert found.micro_batches == 32 / tiny_project.MACHINE.micro_batch_size
    assert found.trained_tokens < found.input_tokens <= found.padded_tokens
    assert 0 <= found.padding_share < 1
    assert found.limits.datasheet_flops_per_s is None
    assert found.flops_utilization is None
    assert found.peak_bytes > found.saved_activation_bytes > 0


def test_nothing_else_is_touched_and_a_second_profile_replaces_the_first(
    project: ProjectLayout, profiled: tuple[str, dict[str, str]]
) -> None:
    before = profiled[1]
    first = (sealed(project) / "profile.json").read_bytes()
    done = tiny_project.ratchet(project, "train", "--profile", "4")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a profile is not copied to machine.replica") == 1
    second = TrainingProfile.load(sealed(project) / "profile.json")
    assert (second.warmup_steps, second.measured_steps, second.traced_steps) == (1, 2, 1)
    assert (sealed(project) / "profile.json").read_bytes() != first
    assert rest_of(project) == before
    assert list((project.profiles / train.WORK).iterdir()) == []
