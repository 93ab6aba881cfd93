"""Reports of sweeps of all kinds, for the tests of their charts."""

import math
from collections.abc import Callable
from typing import Any

import sweep_example as example
from ratchet.reports.sweep_charts import STATES
from ratchet.storage.records.sweep import ParameterAxis, SweepReport, TrainingCost, Trial, TrialExecution

FORTY = example.report(40)


def each(made: SweepReport, change: Callable[[Trial], dict[str, Any]]) -> SweepReport:
    """Return the sweep with changes in each trial."""
    return made.model_copy(update={"trials": tuple(one.model_copy(update=change(one)) for one in made.trials)})


def valued(made: SweepReport, parameter: str, of: Callable[[Trial], Any]) -> SweepReport:
    return each(made, lambda one: {"values": {**one.values, parameter: of(one)}})


def shifted(take: TrialExecution, seconds: float) -> TrialExecution:
    return take.model_copy(update={"started": take.started + seconds, "last_seen": take.last_seen + seconds})


def thirty_knobs() -> SweepReport:
    axes = tuple(
        ParameterAxis(name=f"train.a_long_section.number_{k}_of_them", kind="float", low=0, high=1) for k in range(30)
    )
    made = FORTY.model_copy(update={"axes": axes, "importances": {one.name: 1 / 30 for one in axes}})
    return each(
        made, lambda one: {"values": {axis.name: (7 * one.number + 3 * k) % 10 / 10 for k, axis in enumerate(axes)}}
    )


def hostile() -> SweepReport:
    knobs = (*FORTY.axes, ParameterAxis(name="_x$", kind="choice", choices=(example.HOSTILE, "日本語")))
    made = FORTY.model_copy(update={"axes": knobs, "importances": {"_x$": 1.0, example.HOSTILE: 0.0}})
    made = valued(valued(made, "_x$", lambda _: example.HOSTILE), "train.target_modules", lambda _: example.HOSTILE)
    return each(
        made,
        lambda one: {"executions": tuple(t.model_copy(update={"worker": example.HOSTILE}) for t in one.executions)},
    )


REPORTS: dict[str, Callable[[], SweepReport]] = {
    "nothing": lambda: example.report(0),
    "one": lambda: example.report(1),
    "two": lambda: example.report(2),
    "usual": lambda: FORTY,
    "not over": lambda: example.report(24, final_round=False),
    **{
        f"only {state}": lambda state=state: example.alone(state, 12)  # type: ignore[misc]
        for state in STATES
    },
    "one running": lambda: example.alone("running"),
    "one failed": lambda: example.alone("failed"),
    "one knob": lambda: example.narrowed(FORTY, ["train.rank"]),
    "a choice": lambda: example.narrowed(FORTY, ["train.target_modules"]),
    "no knob": lambda: example.narrowed(FORTY, []),
    "thirty knobs": thirty_knobs,
    "equal objectives": lambda: example.constant(FORTY, "objective"),
    "equal values": lambda: example.constant(FORTY, "values"),
    "knobs on a line": lambda: valued(FORTY, "train.rank", lambda _: 16),
    "two objectives": lambda: example.report(40, metrics=("validation_loss", "memory_bytes"), final_round=False),
    "four objectives": lambda: example.report(
        40, metrics=("accuracy", "memory_bytes", "train_seconds", "adapter_bytes")
    ),
    "maximised": lambda: example.report(24, metrics=("accuracy",), final_round=False),
    "no numbers": lambda: each(
        FORTY,
        lambda one: {"objectives": (math.nan,) * len(one.objectives), "curve": dict.fromkeys(one.curve, math.nan)},
    ),
    "some infinite": lambda: each(FORTY, lambda one: {"objectives": (math.inf,)} if one.number == 0 else {}),
    "huge": lambda: each(FORTY, lambda one: {"objectives": tuple(1e30 * value for value in one.objectives)}),
    "negative": lambda: each(FORTY, lambda one: {"objectives": tuple(-value for value in one.objectives)}),
    "outside of the space": lambda: valued(
        valued(FORTY, "train.rank", lambda one: one.values["train.rank"] * 100), "train.learning_rate", lambda _: 0
    ),
    "odd choices": lambda: valued(FORTY, "train.target_modules", lambda one: None if one.number % 2 else True),
    "no cost, no worker": lambda: each(FORTY, lambda _: {"cost": TrainingCost(), "executions": ()}),
    "no time": lambda: each(
        FORTY,
        lambda one: {
            "executions": tuple(t.model_copy(update={"started": 5.0, "last_seen": 5.0}) for t in one.executions)
        },
    ),
    "a pause": lambda: each(
        FORTY, lambda one: {"executions": tuple(shifted(t, 3e5 if one.number > 20 else 0) for t in one.executions)}
    ),
    "texts of others": hostile,
    "read back": lambda: SweepReport.model_validate_json(FORTY.model_dump_json()),
    "a thousand": lambda: example.report(1000, workers=8),
}
