"""Proves that the memory forecast of gradient compression is exact to the byte for one to three ranks."""

from pathlib import Path
from typing import Any

import pytest

from rank_memory_cases import (
    NAMES,
    WAYS,
    expected,
    held,  # noqa: F401 (a fixture)
    held_by,
)
from ratchet.storage.records.training import MemoryForecast

PACKAGES = ("models",)


def communication(found: MemoryForecast, phase: Any) -> int:
    return found.phase_memory(phase).parts.get("communication", 0)


@pytest.mark.parametrize("number", range(len(WAYS)), ids=NAMES)
def test_what_is_held_is_what_was_forecast(held: tuple[int, list[Any]], number: int) -> None:
    world, ranks = held
    found = expected(WAYS[number], world)
    assert found.ranks == world
    for begun, between, _ in (one[number] for one in ranks):
        assert communication(found, "first_step") >= begun
        assert communication(found, "evaluation") == between >= begun > 0


def test_a_rank_that_is_alone_keeps_its_buffer_where_it_compresses(tmp_path: Path) -> None:
    (found,) = held_by(1, tmp_path)
    for way, (_, between, _) in zip(WAYS, found, strict=True):
        foreseen = communication(expected(way, 1), "evaluation")
        assert foreseen == (0 if way["method"] == "none" else between)
