"""Tests that proposals are a function of the history: they learn, avoid infeasible values, and never repeat."""

import math
import random
from functools import partial
from statistics import fmean
from typing import Any

import optuna
import pytest

from ratchet.config.sweep import SamplerSettings, SweepParameter
from ratchet.storage.records.sweep import SweepObjective, Trial
from ratchet.tuning.samplers import derive_seed, describe, library_versions, propose
from ratchet.tuning.search_space import SearchSpace, draw_value
from study_histories import (
    CONDITIONAL,
    DROPOUT,
    LOSS,
    RANK,
    RATE,
    TARGETS,
    drawn,
    eventful,
    is_in_space,
    searched,
    space_of,
    trial,
    tried,
)

KINDS = ("tpe", "gp", "cmaes", "random")
EVERYTHING = (RANK, RATE, DROPOUT, TARGETS, CONDITIONAL)
NEVER = lambda values: False  # noqa: E731


def proposed(space: SearchSpace, kind: str, history: list[Trial], seed: int = 0, **more: Any) -> dict[str, Any] | None:
    return propose(
        space, SamplerSettings(kind=kind, seed=seed, n_startup_trials=4), LOSS, history, len(history), NEVER, **more
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_proposal_is_a_function_of_the_history_in_any_order_and_of_seed_and_number(kind: str) -> None:
    space = space_of(*EVERYTHING)
    history = eventful(space)
    first = proposed(space, kind, history)
    assert first == proposed(space, kind, history[::-1])
    assert first != proposed(space, kind, history, seed=1)
    sampler = SamplerSettings(kind=kind, n_startup_trials=4)
    assert first != propose(space, sampler, LOSS, history, len(history) + 1, NEVER)


def test_seeds_of_neighbouring_trials_and_attempts_differ_and_fit_into_31_bits() -> None:
    seeds = {derive_seed(seed, number, attempt) for seed in range(5) for number in range(50) for attempt in range(4)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
@pytest.mark.parametrize("kind", ["tpe", "gp", "cmaes"])
def test_directions_are_followed(kind: str, direction: str) -> None:
    """The history has trials at low and at high rates; the next trials are near the better ones."""
    space = space_of(RATE, DROPOUT)
    objectives = (SweepObjective(metric="accuracy", direction=direction),)
    source = random.Random(3)
    history = []
    for number in range(24):
        values = space.draw(partial(draw_value, source=source))
        history.append(trial(number, values, objectives=(math.log(values["train.learning_rate"]),)))
    sampler = SamplerSettings(kind=kind, n_startup_trials=4)
    following = [propose(space, sampler, objectives, history, 24 + more, NEVER) for more in range(4)]
    middle = math.log(1e-3)
    above = fmean(math.log(values["train.learning_rate"]) for values in following if values) - middle
    assert (above > 0.3) if direction == "maximize" else (above < -0.3)


def test_cma_es_moves_away_from_what_is_infeasible() -> None:
    space = space_of(RATE, DROPOUT)

    def outcome(number: int, values: dict[str, Any]) -> Trial:
        if values["train.dropout"] > 0.15:
            return trial(number, values, "infeasible", constraints={"memory": 10 * values["train.dropout"]})
        return trial(number, values, objectives=(1.0,))

    studies = [searched(space, SamplerSettings(kind="cmaes", seed=seed), 36, outcome) for seed in range(4)]
    early = fmean(one.state == "infeasible" for study in studies for one in study[:6])
    late = fmean(one.state == "infeasible" for study in studies for one in study[-12:])
    assert late < 0.6 * early


def test_running_trials_are_kept_away_from() -> None:
    """Eight workers ask without new results: with running trials known, proposals spread; without, they cluster."""
    space = space_of(RATE, DROPOUT)
    finished = [trial(number, drawn(space, number)) for number in range(20)]

    def spread(told: bool) -> float:
        history = list(finished)
        for number in range(20, 28):
            seen = history if told else finished
            values = propose(space, SamplerSettings(kind="gp"), LOSS, seen, number, NEVER)
            assert values is not None
            history.append(trial(number, values, "running"))
        rates = [math.log(one.values["train.learning_rate"]) for one in history[20:]]
        return max(rates) - min(rates)

    assert spread(True) > 3 * spread(False)


def test_a_finite_space_too_large_to_be_listed_is_used_up_too() -> None:
    space = space_of(
        {
            "train.warmup_ratio": SweepParameter(low=0.0, high=0.999, step=0.001),
            "train.batch_size": SweepParameter(low=1, high=5),
        }
    )
    assert len(list(space.iterate_points())) == 5000
    left = {"train.warmup_ratio": 0.321, "train.batch_size": 4}
    sampler = SamplerSettings(kind="random")
    assert propose(space, sampler, LOSS, [], 7, lambda values: values != left) == left
    assert propose(space, sampler, LOSS, [], 7, lambda values: True) is None


def test_a_grid_starts_with_its_own_first_point_continues_where_it_was_and_ends() -> None:
    space = space_of(RATE, TARGETS)
    points = space.grid(4)
    grid = SamplerSettings(kind="grid")
    history = searched(space, grid, 20)
    assert [one.values for one in history] == points
    assert propose(space, grid, LOSS, [], 0, partial(tried, history[:4])) == points[4]
    assert propose(space, grid, LOSS, [], 0, NEVER, points[4]) == points[0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_trial_has_the_projects_own_values_where_the_space_has_them(kind: str) -> None:
    space = space_of(*EVERYTHING)
    current = {
        "train.rank": 16, "train.alpha": 32, "train.learning_rate": 3e-4, "train.dropout": 0.05,
        "train.target_modules": ("q_proj", "v_proj"), "train.adapter": "lora", "train.adalora.target_rank": 8,
    }  # fmt: skip
    expected = {key: value for key, value in current.items() if "adalora." not in key}
    first = propose(space, SamplerSettings(kind=kind), LOSS, [], 0, NEVER, current)
    assert first == expected
    outside = [
        {**current, "train.rank": 128},
        {**current, "train.alpha": 16},  # does not equal the tie
        {**current, "train.adapter": "adalora"},  # the target rank applies now, and 8 is not one of its values
        {key: value for key, value in current.items() if key != "train.dropout"},
    ]
    for other in outside:
        assert propose(space, SamplerSettings(kind=kind), LOSS, [], 0, NEVER, other) != expected
    assert propose(space, SamplerSettings(kind=kind), LOSS, [], 1, NEVER, current) != expected
    assert (
        propose(space, SamplerSettings(kind=kind), LOSS, [], 0, lambda values: values == expected, current) != expected
    )


def test_the_estimator_learns_a_knob_that_only_some_trials_have() -> None:
    """Only adalora with target rank 4 gives good results, so late proposals must have these values."""
    space = space_of(CONDITIONAL, RATE)

    def outcome(number: int, values: dict[str, Any]) -> Trial:
        return trial(number, values, objectives=(abs(values.get("train.adalora.target_rank", -3) - 4.0),))

    studies = [searched(space, SamplerSettings(kind="tpe", seed=seed), 36, outcome) for seed in range(4)]
    assert fmean(one.objectives[0] == 0 for study in studies for one in study[-10:]) > 0.5


@pytest.mark.parametrize("kind", ["tpe", "gp", "random"])
def test_several_objectives(kind: str) -> None:
    space = space_of(RATE, DROPOUT)
    objectives = (
        SweepObjective(metric="accuracy", direction="maximize"),
        SweepObjective(metric="memory_bytes", direction="minimize"),
    )
    history = [trial(n, drawn(space, n), objectives=(n / 20, 1e9 + n)) for n in range(14)]
    history.append(trial(14, drawn(space, 14), "infeasible", constraints={"memory": 0.1}))
    history.append(trial(15, drawn(space, 15), "running"))
    history.append(trial(16, drawn(space, 16), "pruned", curve={10: 2.0}))
    first = propose(space, SamplerSettings(kind=kind), objectives, history, 17, NEVER)
    assert first is not None
    assert is_in_space(space, first)
    assert first == propose(space, SamplerSettings(kind=kind), objectives, history, 17, NEVER)


@pytest.mark.parametrize("kind", ["tpe", "gp", "cmaes"])
def test_a_study_without_a_feasible_trial_moves_elsewhere(kind: str) -> None:
    space = space_of(RATE, DROPOUT)
    history = [
        trial(n, values, "infeasible", constraints={"memory": values["train.dropout"]})
        for n in range(12)
        for values in (drawn(space, n),)
    ]
    found = [
        propose(space, SamplerSettings(kind=kind, n_startup_trials=4), LOSS, history, 12 + more, NEVER)
        for more in range(5)
    ]
    dropouts = [values["train.dropout"] for values in found if values]
    assert fmean(dropouts) < fmean(one.values["train.dropout"] for one in history)
    equal = [one.model_copy(update={"constraints": {}}) for one in history]
    values = propose(space, SamplerSettings(kind=kind, n_startup_trials=4), LOSS, equal, 12, NEVER)
    assert values is not None
    assert is_in_space(space, values)


def test_a_process_that_knows_no_figure_but_what_is_feasible() -> None:
    """The objective is accuracy, but all feasible trials were pruned, so no trial has a value.

    The sampler still proposes feasible values.
    """
    space = space_of(RATE, DROPOUT)
    history = []
    for number in range(16):
        values = drawn(space, number)
        fits = values["train.dropout"] < 0.15
        more: dict[str, Any] = {"curve": {100: 2.0}} if fits else {"constraints": {"memory": 0.2}}
        history.append(trial(number, values, "pruned" if fits else "infeasible", **more))
    objectives = (SweepObjective(metric="accuracy", direction="maximize"),)
    found = [propose(space, SamplerSettings(kind="gp"), objectives, history, 16 + more, NEVER) for more in range(6)]
    assert sum(values is not None and values["train.dropout"] < 0.15 for values in found) >= 5


def test_descriptions_name_method_version_and_seed() -> None:
    space = space_of(RANK, RATE, TARGETS)
    found = library_versions()
    assert found["optuna"] == optuna.__version__
    assert (
        describe(SamplerSettings(kind="tpe", seed=7), space)
        == f"TPE (optuna {found['optuna']}), seed 7, 8 random trials first"
    )
    assert describe(SamplerSettings(kind="gp"), space).startswith("Gaussian process (optuna ")
    assert describe(SamplerSettings(kind="cmaes"), space) == (
        f"CMA-ES over train.rank, train.learning_rate (cmaes {found['cmaes']}), generations of 6, seed 0"
    )
    assert describe(SamplerSettings(kind="random", seed=2), space) == "random, seed 2"
    assert describe(SamplerSettings(kind="grid"), space) == "grid of 48 points, in order"
