"""Proves row R18 for compressed gradients: the applied and the unsent values together equal the sum of all
gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from compression_cases import (
    REMEMBERING,
    largest_of_buckets,
    left_over,
    name_of,
    twelve_steps,  # noqa: F401 (a fixture)
)
from gloo_ranks import exact

PACKAGES = ("models",)


@pytest.mark.parametrize("number", range(len(REMEMBERING)), ids=[name_of(way) for way in REMEMBERING])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_was_applied_and_what_is_left_are_all_gradients(
    twelve_steps: Callable[[int], list[Any]], number: int, world: int
) -> None:
    ranks = [found[number] for found in twelve_steps(world)]
    everything = torch.stack([exact(world, step) for step in range(12)]).sum(0)
    left = left_over([state for _, state in ranks])
    scale = largest_of_buckets(torch.stack([everything.abs(), left.abs()]))
    assert ((ranks[0][0] + left - everything).abs() <= 1e-5 * scale).all()
    assert (ranks[0][0] - everything).abs().max() > 1e-3  # some values are unsent
