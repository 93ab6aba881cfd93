"""Proves that the peak memory of a sum over ranks matches the forecast."""

import math
from typing import Any

import pytest

from rank_memory_cases import (
    CONFIG,
    NAMES,
    WAYS,
    WORK,
    expected,
    held,  # noqa: F401 (a fixture)
    shapes,
    train,
)
from ratchet.config.machine import Machine
from ratchet.models import model_spec
from ratchet.models.memory import forecast

PACKAGES = ("models",)


@pytest.mark.parametrize("number", range(len(WAYS)), ids=NAMES)
def test_the_most_in_a_sum_is_what_was_forecast(held: tuple[int, list[Any]], number: int) -> None:
    """Gloo may free the memory of sent data slightly later. Neither value includes the work space of LAPACK and
    gloo."""
    world, ranks = held
    need = forecast.MemoryForecastBuilder(
        model_spec.from_config(CONFIG), train(WAYS[number]), Machine(), WORK.on_ranks(world, world, 16)
    )
    for begun, between, most in (one[number] for one in ranks):
        assert 0.98 * need.communication.peak_bytes <= most <= need.communication.peak_bytes + begun
        assert most > between


def test_snapshots_hold_what_every_rank_has_left_unsent() -> None:
    plain, fed_back = (expected(way, 3).phase_memory("evaluation").parts["snapshots"] for way in (WAYS[0], WAYS[3]))
    numbers = sum(map(math.prod, shapes()))
    # int8 keeps an error for every number, and for the sums of a rank's own third (in whole blocks).
    assert fed_back - plain == pytest.approx(3 * 4 * numbers * (1 + 1 / 3), rel=0.05)
