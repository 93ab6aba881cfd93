"""Small search spaces, and studies whose trials are computed without training."""

import math
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ratchet.config.settings import Settings
from ratchet.config.sweep import SamplerSettings, Sweep, SweepParameter
from ratchet.storage.records.sweep import SweepObjective, Trial
from ratchet.tuning.samplers import propose
from ratchet.tuning.search_space import SearchSpace, draw_value, to_tuples

LOSS = (SweepObjective(metric="validation_loss", direction="minimize"),)

RANK = {"train.rank": SweepParameter(low=4, high=64, log=True), "train.alpha": SweepParameter(tie="2 * train.rank")}
RATE = {"train.learning_rate": SweepParameter(low=1e-4, high=1e-2, log=True)}
DROPOUT = {"train.dropout": SweepParameter(low=0.0, high=0.3)}
TARGETS = {"train.target_modules": SweepParameter(choices=("all", ("q_proj", "v_proj"), ("q_proj",)))}
CONDITIONAL = {
    "train.adapter": SweepParameter(choices=("lora", "adalora")),
    "train.adalora.target_rank": SweepParameter(low=2, high=4, when={"train.adapter": "adalora"}),
}
FINITE = {
    "train.rank": SweepParameter(low=4, high=16, step=4),
    "train.batch_size": SweepParameter(low=16, high=32, step=8),
    "train.schedule": SweepParameter(choices=("cosine", "linear")),
}
"""A space of 24 points; two of its hyperparameters are numeric."""


def space_of(*parameters: Mapping[str, SweepParameter]) -> SearchSpace:
    """Return a search space of these hyperparameters."""
    return SearchSpace.from_settings(
        Settings(sweep=Sweep(space={name: parameter for part in parameters for name, parameter in part.items()}))
    )


def drawn(space: SearchSpace, seed: int) -> dict[str, Any]:
    """Draw values from the space."""
    return space.draw(partial(draw_value, source=random.Random(seed)))


def loss(values: Mapping[str, Any]) -> float:
    """Return a loss with its minimum 0 at learning rate 2e-3, rank 20 and dropout 0.1. A missing value counts as
    optimal."""
    rate = math.log(values.get("train.learning_rate", 2e-3) / 2e-3)
    rank = math.log2(values.get("train.rank", 20) / 20)
    return rate**2 + rank**2 / 2 + 10 * (values.get("train.dropout", 0.1) - 0.1) ** 2


def trial(number: int, values: Mapping[str, Any], state: str = "complete", **fields: Any) -> Trial:
    """Return a trial. The objective of a complete trial is `loss`."""
    if state == "complete":
        fields.setdefault("objectives", (loss(values),))
    return Trial(number=number, values=dict(values), run_id=f"run{number}", state=state, **fields)


def tried(history: Iterable[Trial], values: Mapping[str, Any]) -> bool:
    """Return whether a trial of the history has these values."""
    return any(one.values == values for one in history)


def searched(
    space: SearchSpace, sampler: SamplerSettings, trials: int, outcome: Callable[[int, dict[str, Any]], Trial] = trial
) -> list[Trial]:
    """Run a study with one worker, which repeatedly proposes values and computes the outcome."""
    history: list[Trial] = []
    for number in range(trials):
        values = propose(space, sampler, LOSS, history, number, partial(tried, history))
        if values is None:
            break
        history.append(outcome(number, values))
    return history


def eventful(space: SearchSpace, trials: int = 16) -> list[Trial]:
    """Return a history with trials in each state: pruned, continued, infeasible, failed, running."""
    history = [trial(number, drawn(space, number)) for number in range(trials)]
    changes: dict[int, dict[str, Any]] = {
        2: {"state": "infeasible", "constraints": {"memory": 0.4}},
        3: {"state": "pruned", "curve": {100: 3.0}},
        5: {"state": "pruned", "curve": {100: 2.5, 300: math.nan}},
        6: {"state": "infeasible", "constraints": {"diverged": 1.0}},
        7: {"state": "failed"},
        8: {"continues": 3, "values": history[3].values, "curve": {100: 3.0, 300: 2.0, 900: 1.5}},
        14: {"state": "running", "continues": 5, "values": history[5].values},
        15: {"state": "running"},
    }
    return [
        one.model_copy(update={"objectives": () if "state" in change else one.objectives, **change})
        for one in history
        for change in (changes.get(one.number, {}),)
    ]


def is_in_space(space: SearchSpace, values: Mapping[str, Any]) -> bool:
    """Return whether a trial of the space can have exactly these values."""
    plain = {key: to_tuples(value) for key, value in values.items()}
    try:
        return space.draw(lambda dimension: plain[dimension.name]) == plain
    except (KeyError, ValueError):
        return False
