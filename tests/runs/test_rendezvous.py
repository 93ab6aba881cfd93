"""Differences between two machines are described with names that the user knows."""

from typing import Any

import pytest

from ratchet.config.train import Train
from ratchet.runs.directory import RECIPE_VERSION, RunSpec
from ratchet.runs.rendezvous import describe_difference


def rank_properties(spec: dict[str, Any] | None = None, **others: str) -> dict[str, Any]:
    """Return the properties that a rank compares with those of the other ranks."""
    run = RunSpec(train=Train(rank=4), data_digest="d" * 64, base_digest="b" * 64)
    own = {"torch": "2.13.0", "compute_dtype": "float32", "micro_batch_size": "8"}
    return {"run": run.model_copy(update=spec or {}).model_dump(mode="json"), "environment": own | others}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (rank_properties({"data_digest": "e" * 64}), "prepared data (digest): dddddddddddd and eeeeeeeeeeee"),
        (rank_properties({"base_digest": "e" * 64}), "base model (digest): bbbbbbbbbbbb and eeeeeeeeeeee"),
        (rank_properties({"train": Train(rank=8)}), "train.rank: 4 and 8"),
        (
            rank_properties({"recipe_version": 99}),
            f"training recipe of this version of Ratchet: {RECIPE_VERSION} and 99",
        ),
        (rank_properties(torch="2.12.1"), "version of torch: 2.13.0 and 2.12.1"),
        (rank_properties(micro_batch_size="4"), "machine.micro_batch_size: 8 and 4"),
        (rank_properties(micro_batch_tokens="512"), "machine.micro_batch_tokens: nothing and 512"),
        (rank_properties(compute_dtype="bfloat16"), "compute dtype: float32 and bfloat16"),
    ],
)
def test_a_difference_is_named_as_its_user_knows_it(other: dict[str, Any], words: str) -> None:
    assert describe_difference(rank_properties(), other) == words


def test_all_differences_are_named_and_equal_ranks_have_none() -> None:
    assert describe_difference(rank_properties(), rank_properties()) == ""
    found = describe_difference(rank_properties(), rank_properties({"train": Train(rank=8, seed=9)}, torch="2.12.1"))
    assert found.count("; ") == 2
    assert all(name in found for name in ("train.rank", "train.seed", "version of torch"))
