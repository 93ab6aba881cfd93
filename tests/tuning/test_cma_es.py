"""Tests CMA-ES rebuilt from the history, and the scales on which it searches."""

import json
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.config.sweep import SamplerSettings
from ratchet.tuning import samplers
from ratchet.tuning.samplers import describe, propose
from ratchet.tuning.search_space import SearchDimension, from_unit, snap_value, to_unit
from study_histories import CONDITIONAL, DROPOUT, FINITE, LOSS, RATE, TARGETS, drawn, searched, space_of, trial


def test_generations_count_by_number_and_wait_for_those_that_run() -> None:
    space = space_of(RATE, DROPOUT)
    size = samplers.population_size(2)
    finished = searched(space, SamplerSettings(kind="cmaes"), 2 * size)
    first = samplers.draw_cma_point(space, LOSS, finished[:1], 5)
    after_one = samplers.draw_cma_point(space, LOSS, finished[:size], 5)
    assert first != after_one
    running = [one if one.number != 2 else trial(2, one.values, "running") for one in finished]
    assert samplers.draw_cma_point(space, LOSS, running, 5) == first
    later = [one if one.number != size + 2 else trial(size + 2, one.values, "running") for one in finished]
    assert samplers.draw_cma_point(space, LOSS, later, 5) == after_one
    assert samplers.draw_cma_point(space, LOSS, finished, 5) not in (first, after_one)
    # A failed trial does not count for a generation; the next trial takes its place.
    lost = [one if one.number != 2 else trial(2, one.values, "failed") for one in finished[: size + 1]]
    assert samplers.draw_cma_point(space, LOSS, lost, 5) != first


def test_the_first_generation_surrounds_the_first_trial() -> None:
    space = space_of(RATE, DROPOUT)
    middle = propose(space, SamplerSettings(kind="cmaes"), LOSS, [], 0, lambda values: False)
    assert middle == {"train.learning_rate": pytest.approx(1e-3), "train.dropout": pytest.approx(0.15)}
    low = trial(0, {"train.learning_rate": 1.2e-4, "train.dropout": 0.01})
    high = trial(0, {"train.learning_rate": 8e-3, "train.dropout": 0.28})
    around = {
        start.values["train.dropout"]: fmean(
            samplers.draw_cma_point(space, LOSS, [start], seed)["train.dropout"] for seed in range(60)
        )
        for start in (low, high)
    }
    assert around[0.01] < 0.13
    assert around[0.28] > 0.17


def test_one_numeric_knob_is_searched_at_random_and_that_is_said() -> None:
    space = space_of(RATE, TARGETS)
    assert "CMA-ES needs two" in describe(SamplerSettings(kind="cmaes"), space)
    history = [trial(n, drawn(space, n)) for n in range(12)]
    found = [
        propose(space, SamplerSettings(kind=kind), LOSS, history, 12, lambda values: False)
        for kind in ("cmaes", "random")
    ]
    assert found[0] == found[1]


# Scales


@st.composite
def ranges(draw: st.DrawFn) -> SearchDimension:
    """Draw ranges of integers and floats, with and without steps and logarithms."""
    kind = draw(st.sampled_from(["int", "float"]))
    low = draw(st.integers(1, 50))
    if draw(st.booleans()):
        scale = 1 if kind == "int" else 0.1
        step, count = draw(st.integers(1, 7)), draw(st.integers(0, 9))
        high = round((low + step * count) * scale, 9)
        return SearchDimension("k", kind, round(low * scale, 9), high, step=round(step * scale, 9))
    if kind == "int":
        return SearchDimension("k", "int", low, low + draw(st.integers(0, 90)), log=draw(st.booleans()))
    return SearchDimension("k", "float", low / 1e4, low / 1e4 * draw(st.floats(1, 1e4)), log=draw(st.booleans()))


@settings(deadline=None, derandomize=True)
@given(ranges(), st.floats(0, 1))
def test_positions_become_values_of_the_range_and_find_back(dimension: SearchDimension, position: float) -> None:
    value = from_unit(dimension, position)
    assert snap_value(dimension, value) == value
    back = to_unit(dimension, value)
    assert -1e-9 <= back <= 1 + 1e-9
    again = from_unit(dimension, back)
    assert again == (value if dimension.points else pytest.approx(value))


def test_whole_numbers_get_equal_shares_ends_included() -> None:
    dimension = SearchDimension("k", "int", 1, 4)
    counts = [sum(from_unit(dimension, (index + 0.5) / 400) == value for index in range(400)) for value in range(1, 5)]
    assert counts == [100] * 4


def test_every_point_of_a_finite_space_comes_once_conditions_respected() -> None:
    space = space_of(FINITE, CONDITIONAL)
    points = list(space.iterate_points())
    assert len(points) == 24 * (1 + 3)
    assert [json.dumps(one) for one in points] == [json.dumps(one) for one in space.grid(4)]
