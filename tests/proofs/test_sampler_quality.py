"""Proves that samplers learn from trials, including infeasible ones, and propose the same values in each process."""

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from ratchet.config.sweep import SamplerSettings
from ratchet.storage.records.sweep import Trial
from ratchet.tuning.samplers import propose
from study_histories import (
    CONDITIONAL,
    DROPOUT,
    FINITE,
    LOSS,
    RANK,
    RATE,
    TARGETS,
    eventful,
    is_in_space,
    searched,
    space_of,
    trial,
)

PACKAGES = ("tuning",)
KINDS = ("tpe", "gp", "cmaes", "random")
EVERYTHING = (RANK, RATE, DROPOUT, TARGETS, CONDITIONAL)
NEVER = lambda values: False  # noqa: E731
PROPOSING = """
import json, sys
sys.path.insert(0, {tests!r})
from study_histories import CONDITIONAL, DROPOUT, LOSS, RANK, RATE, TARGETS, eventful, space_of
from ratchet.config.sweep import SamplerSettings
from ratchet.tuning.samplers import propose
space = space_of(RANK, RATE, DROPOUT, TARGETS, CONDITIONAL)
history = eventful(space)
found = [propose(space, SamplerSettings(kind=kind, n_startup_trials=4), LOSS, history, 16 + more, lambda values: False)
         for kind in ("tpe", "gp", "cmaes", "random") for more in (0, 1)]
print(json.dumps(found))
"""


def test_processes_agree_whatever_their_hashes_and_say_nothing_on_stderr() -> None:
    found = []
    for hashes in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROPOSING.format(tests=str(Path(__file__).parents[1] / "support"))],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
    assert len({json.dumps(values, sort_keys=True) for values in found[0]}) == 8


@pytest.mark.parametrize(("kind", "trials", "seeds"), [("tpe", 36, 6), ("cmaes", 36, 6), ("gp", 20, 2)])
def test_late_proposals_are_much_better_than_random_ones(kind: str, trials: int, seeds: int) -> None:
    space = space_of(RANK, RATE, DROPOUT)

    def late(which: str) -> float:
        studies = [searched(space, SamplerSettings(kind=which, seed=seed), trials) for seed in range(seeds)]
        return fmean(one.objectives[0] for study in studies for one in study[-8:])

    assert late(kind) < late("random") / 2


@pytest.mark.parametrize(("kind", "seeds"), [("tpe", 5), ("gp", 2)])
def test_infeasible_regions_are_avoided_and_would_not_be_if_those_trials_were_dropped(kind: str, seeds: int) -> None:
    """The objective improves toward the region where memory runs out. Only the violated constraint shows that the
    region is infeasible."""
    space = space_of(RATE, DROPOUT)

    def outcome(number: int, values: dict[str, Any], infeasible: str) -> Trial:
        rate = math.log(values["train.learning_rate"] / 1e-4) / math.log(100)
        if rate > 0.5:
            return trial(number, values, infeasible, constraints={"memory": rate - 0.5})
        return trial(number, values, objectives=((rate - 0.8) ** 2,))

    def share(infeasible: str) -> float:
        told = partial(outcome, infeasible=infeasible)
        studies = [searched(space, SamplerSettings(kind=kind, seed=seed), 26, told) for seed in range(seeds)]
        return fmean(one.state != "complete" for study in studies for one in study[10:])

    dropped = share("failed")
    assert share("infeasible") < 0.6 * dropped


@pytest.mark.parametrize("kind", [*KINDS, "grid"])
def test_a_finite_space_is_used_up_without_a_duplicate(kind: str) -> None:
    space = space_of(FINITE)

    def outcome(number: int, values: dict[str, Any]) -> Trial:
        return trial(number, values, objectives=(abs(values["train.rank"] - 8) + values["train.batch_size"] / 100,))

    found = [one.values for one in searched(space, SamplerSettings(kind=kind, n_startup_trials=4), 40, outcome)]
    assert len(found) == len(list(space.iterate_points())) == 24
    assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, space.grid(4)))


@pytest.mark.parametrize("kind", KINDS)
def test_conditional_knobs_lists_and_ties(kind: str) -> None:
    space = space_of(*EVERYTHING)
    history = eventful(space, 40)
    seen = [
        propose(space, SamplerSettings(kind=kind, n_startup_trials=4), LOSS, history, 40 + more, NEVER)
        for more in range(8)
    ]
    for values in seen:
        assert values is not None
        assert ("train.adalora.target_rank" in values) == (values["train.adapter"] == "adalora")
        assert values["train.target_modules"] in ("all", ("q_proj", "v_proj"), ("q_proj",))
        assert values["train.alpha"] == 2 * values["train.rank"]
        assert is_in_space(space, values)
