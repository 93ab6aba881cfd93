"""Compressed gradients between ranks: bounded errors, equal sums on all ranks, no loss, and exact resume."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from gloo_ranks import add_up, on_ranks, parameters, wire_of
from ratchet.models.gradient_compression import build_buckets

COMPRESSED: list[dict[str, Any]] = [
    {"method": "bf16"}, {"method": "fp16"}, {"method": "int8"},
    {"method": "powersgd", "rank": 2}, {"method": "powersgd", "rank": 3},
]  # fmt: skip
REMEMBERING = COMPRESSED[2:]


def name_of(settings: dict[str, Any]) -> str:
    return "-".join(map(str, settings.values()))


def largest_of_buckets(steps: Tensor) -> Tensor:
    return torch.cat([part.max().expand(part.shape[1]) for part in steps.split(sizes_of_buckets(), dim=1)])


def sizes_of_buckets() -> list[int]:
    return [len(bucket.flat) for bucket in build_buckets([parameter for _, parameter in parameters()], 2000)]


def many_steps(rank: int, ways: list[dict[str, Any]]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return for each compression method the total of twelve sums, and the values that this rank has not sent."""
    found = []
    for settings in ways:
        given = parameters()
        wire = wire_of(given, **settings)
        sums = [add_up(wire, rank, step, given) for step in range(12)]
        found.append((torch.stack(sums).double().sum(0), wire.state()))
    return found


@pytest.fixture(scope="module")
def twelve_steps(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """Return a function that runs `many_steps` on each rank of a group of the given size."""
    return cache(lambda world: on_ranks(world, tmp_path_factory.mktemp("steps"), many_steps, REMEMBERING))


def left_over(states: list[dict[str, Tensor]]) -> Tensor:
    """Return the sum of the values that all ranks have not sent, in the order of the parameters."""
    parts = []
    for number, size in enumerate(sizes_of_buckets()):
        part = torch.stack([state[f"error.{number}"].double() for state in states]).sum(0)
        if f"owned.{number}" in states[0]:
            part += torch.cat([state[f"owned.{number}"].double() for state in states])[:size]
        parts.append(part)
    return torch.cat(parts)
