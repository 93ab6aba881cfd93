"""Tests a study's identity: equal after a round trip through JSON, changed only by settings that determine trials."""

import json
from typing import Any

import pytest

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.runs.directory import RECIPE_VERSION
from ratchet.storage.digests import hash_json
from ratchet.tuning.search_space import SearchSpace, apply_values
from ratchet.tuning.study import compute_identity, list_differences

DATA, OTHER, ON = "d" * 64, "e" * 64, "b" * 64


def of(text: str = "{}", data: str = DATA) -> dict[str, Any]:
    return compute_identity(params_file.parse(text), data, ON)


SPACE = """
train: {TRAIN}
sweep:
  space:
    train.rank: {low: 4, high: HIGH, log: true}
    train.alpha: {tie: 2 * rank}
    train.adapter: {choices: [lora, adalora]}
    train.adalora.target_rank: {choices: [2, 3], when: {adapter: adalora}}
"""


def searched(train: str = "epochs: 3", high: int = 64) -> str:
    return SPACE.replace("TRAIN", train).replace("HIGH", str(high))


def test_it_comes_back_from_json_as_it_was() -> None:
    found = of(searched("learning_rate: 1.1e-5, dropout: 0.30000000000000004"))
    assert json.loads(json.dumps(found)) == found
    assert list_differences(json.loads(json.dumps(found)), found) == []


def test_defaults_and_the_same_values_in_a_file_are_one_identity_to_the_byte() -> None:
    settings = Settings()
    written = params_file.parse(params_file.dump(settings))
    assert hash_json(compute_identity(settings, DATA, ON)) == hash_json(compute_identity(written, DATA, ON))


def test_the_identity_has_these_parts() -> None:
    found = of(searched())
    assert list(found) == [
        "format", "space", "objectives", "sampler", "pruner", "train", "data", "base", "recipe", "rows",
    ]  # fmt: skip
    assert found["objectives"] == [["validation_loss", "minimize"]]
    assert (found["data"], found["base"], found["recipe"]) == (DATA, ON, RECIPE_VERSION)
    assert not {"rank", "alpha", "adapter"} & set(found["train"])
    assert "target_rank" not in found["train"]["adalora"]
    assert found["train"]["adalora"]["every_steps"] == 10


@pytest.mark.parametrize(
    "changes",
    [
        {"sweep.trials": 99},
        {"sweep.max_hours": 1.5},
        {"sweep.max_tokens": 10_000},
        {"sweep.max_repeated_failures": 9},
        {"sweep.name": "other"},
        {"sweep.finalists.seeds": 7},
        {"machine.micro_batch_size": 1},
        {"machine.lease_timeout_s": 7.0},
        {"evaluate.max_new_tokens": 3},
        {"train.rank": 5, "train.alpha": 10.0, "train.adapter": "adalora"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_outside_the_identity_may_change(changes: dict[str, Any]) -> None:
    settings = params_file.parse(searched("adalora: {target_rank: 2}"))
    assert compute_identity(params_file.apply_changes(settings, changes), DATA, ON) == compute_identity(
        settings, DATA, ON
    )


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"train.epochs": 4.0}, ["train.epochs: 3 -> 4"]),
        ({"train.double_quantization": False}, ["train.double_quantization: true -> false"]),
        ({"train.rank_pattern": {"q_proj": 8}}, ["train.rank_pattern.q_proj: (none) -> 8"]),
        ({"train.target_modules": ("q_proj",)}, ['train.target_modules: all -> ["q_proj"]']),
        ({"train.adalora.target_rank": 3}, ["space.train.adalora.target_rank.otherwise: 8 -> 3"]),
        ({"sweep.generation_rows": 64}, ["rows: 0 -> 64"]),
        ({"sweep.sampler.seed": 1}, ["sampler.seed: 0 -> 1"]),
        ({"sweep.pruner.kind": "none"}, ["pruner.kind: asha -> none"]),
        (
            {"sweep.objectives": ({"metric": "accuracy"},)},
            [
                "max_new_tokens: (none) -> 16",
                'objectives: [["validation_loss", "minimize"]] -> [["accuracy", "maximize"]]',
            ],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_differences_are_reported_line_by_line(changes: dict[str, Any], lines: list[str]) -> None:
    settings = params_file.parse(searched())
    old, new = (
        compute_identity(settings, DATA, ON),
        compute_identity(params_file.apply_changes(settings, changes), DATA, ON),
    )
    assert list_differences(old, new) == lines


def test_edits_of_the_space() -> None:
    old = of(searched())
    assert list_differences(old, of(searched(high=128))) == ["space.train.rank.high: 64 -> 128"]
    fewer = searched().replace("    train.alpha: {tie: 2 * rank}\n", "")
    assert list_differences(old, of(fewer)) == [
        "space.train.alpha.tie: 2 * train.rank -> (none)",
        "train.alpha: (none) -> 32",
    ]
    lines = list_differences(old, of(searched().replace("{choices: [2, 3], when", "{low: 2, high: 3, when")))
    assert lines == [
        "space.train.adalora.target_rank.choices: [2, 3] -> (none)",
        "space.train.adalora.target_rank.high: (none) -> 3",
        "space.train.adalora.target_rank.log: (none) -> false",
        "space.train.adalora.target_rank.low: (none) -> 2",
        "space.train.adalora.target_rank.step: (none) -> null",
    ]


def test_digests_are_shortened_and_another_format_is_a_difference() -> None:
    old = of()
    assert list_differences(old, of(data=OTHER)) == [f"data: {'d' * 12} -> {'e' * 12}"]
    assert list_differences(old | {"format": 0}, old) == ["format: 0 -> 1"]
    assert list_differences(old, {key: value for key, value in old.items() if key != "rows"}) == ["rows: 0 -> (none)"]
    assert list_differences({"train": {"x": True}}, {"train": {"x": 1}}) == ["train.x: true -> 1"]
    assert list_differences({"train": {"x": {}}}, {"train": {}}) == ["train.x: {} -> (none)"]


def test_adopting_values_that_every_trial_has_leaves_the_study_as_it_is() -> None:
    settings = params_file.parse(searched())
    values = SearchSpace.from_settings(settings).grid(3)[0]
    assert "train.adalora.target_rank" not in values
    assert compute_identity(apply_values(settings, values), DATA, ON) == compute_identity(settings, DATA, ON)
