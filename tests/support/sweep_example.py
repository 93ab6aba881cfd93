"""Reports like those of real sweeps: all trial states, continuations, refusals, retries, conditional hyperparameters.

The objective is invented (a valley in rank and learning rate), but the sequence of events is realistic: workers run
trials one after another, one worker dies, ASHA-like rungs prune, a pruned trial is continued, finalists are trained
again.
"""

import hashlib
import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.config.sweep import DIRECTIONS
from ratchet.storage.records.sweep import (
    Finalist,
    FinalistComparison,
    FinalRound,
    ParameterAxis,
    SweepObjective,
    SweepReport,
    TrainingCost,
    Trial,
    TrialExecution,
    TrialState,
)

HOSTILE = '<script>alert("1")</script><img src=x onerror=alert(1)> $x_1$ & \' \x00\x1b[31m \u202e\ud800 </svg></style>'
"""An untrusted text that tries to inject HTML, scripts and control characters."""

BEGUN = 1_760_000_000.0
STEPS, BATCH_ROWS, TOKENS_A_STEP = 180, 32, 1_150
RUNGS = (20, 60)
LEASE_S = 60.0

AXES = (
    ParameterAxis(name="train.rank", kind="int", low=4, high=64, log=True),
    ParameterAxis(name="train.alpha", kind="tie", tie="2 * train.rank"),
    ParameterAxis(name="train.learning_rate", kind="float", low=1e-4, high=1e-2, log=True),
    ParameterAxis(name="train.dropout", kind="float", low=0.0, high=0.2),
    ParameterAxis(
        name="train.target_modules",
        kind="choice",
        choices=("all", ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")),
    ),
    ParameterAxis(name="train.adapter", kind="choice", choices=("lora", "dora", "adalora")),
    ParameterAxis(name="train.adalora.target_rank", kind="int", low=4, high=16, conditional=True),
)


@dataclass
class Room:
    """State that the simulated workers share."""

    random_: random.Random
    metrics: tuple[str, ...]
    trials: list[Trial] = field(default_factory=list)
    rungs: dict[int, list[float]] = field(default_factory=dict)
    promoted: set[int] = field(default_factory=set)


def report(
    count: int = 40,
    workers: int = 3,
    seed: int = 5,
    metrics: Sequence[str] = ("validation_loss",),
    final_round: bool = True,
) -> SweepReport:
    """Return a sweep of `count` trials. Without a final round, the last few trials are still running."""
    room = Room(random.Random(seed), tuple(metrics))
    # A worker that dies returns with another process id. The next free worker takes over its trial.
    free = [(BEGUN + 2.0 * lane, f"node{1 + lane % 2}/{4700 + lane}") for lane in range(workers)]
    heapq.heapify(free)
    while len(room.trials) < count:
        at, worker = heapq.heappop(free)
        trial = _trial(room, len(room.trials), at, worker)
        if not final_round and count - len(room.trials) <= min(workers, 2):
            trial = _running(trial)
        if trial.state in ("complete", "pruned") and trial.number % 9 in (4, 6) and workers > 1:
            trial = _taken_over(trial, free)
        room.trials.append(trial)
        end = trial.executions[-1].last_seen
        heapq.heappush(free, (end + 1.5, trial.executions[-1].worker))
    return _report(room, count, final_round)


def _values(random_: random.Random) -> dict[str, Any]:
    rank = round(math.exp(random_.uniform(math.log(4), math.log(64))))
    values: dict[str, Any] = {
        "train.rank": rank,
        "train.alpha": 2.0 * rank,
        "train.learning_rate": math.exp(random_.uniform(math.log(1e-4), math.log(1e-2))),
        "train.dropout": random_.choice((0.0, 0.05, 0.1, 0.15, 0.2)),
        "train.target_modules": random_.choice(AXES[4].choices),
        "train.adapter": random_.choice(AXES[5].choices),
    }
    if values["train.adapter"] == "adalora":
        values["train.adalora.target_rank"] = random_.randint(4, 16)
    return values


def _loss(values: dict[str, Any], steps: int, noise: float) -> float:
    """Return the loss of a run after `steps` steps: a valley around rank 24 and a learning rate of 1e-3."""
    rate = math.log10(values["train.learning_rate"]) + 3
    rank = math.log2(values["train.rank"] / 24)
    end = 1.18 + 0.45 * rate**2 + 0.02 * rank**2 + 0.8 * abs(values["train.dropout"] - 0.05)
    end += 0.12 * (values["train.target_modules"] == ("q_proj", "v_proj"))
    found: float = end + (3.4 - end) * math.exp(-steps / (18 + 25 * max(0.0, -rate))) + noise
    return found


def _trial(room: Room, number: int, at: float, worker: str) -> Trial:
    random_ = room.random_
    pruned = [one for one in room.trials if one.state == "pruned" and one.number not in room.promoted]
    if number % 11 == 10 and pruned:
        old = min(pruned, key=lambda one: (min(one.curve.values()), one.number))
        room.promoted.add(old.number)
        return _trained(room, number, (at, worker), old.values, old)
    if number % 13 == 12:
        values = next(one for one in room.trials if one.state == "complete").values
        values = {**values, "train.rank": 64, "train.alpha": 128.0}
        return Trial(
            number=number, values=values, run_id=None, state="infeasible", cause="data", constraints={"settings": 1.0},
            reason="train.rank: no layer is as wide as 64", started=at, ended=at + 0.2,
            executions=(TrialExecution(worker=worker, started=at, last_seen=at + 0.2),),
        )  # fmt: skip
    values = _values(random_)
    if number % 10 == 7:
        return _infeasible(number, (at, worker), values)
    if number % 17 == 9:
        return _failed(number, (at, worker), values)
    return _trained(room, number, (at, worker), values, None)


def _trained(
    room: Room, number: int, place: tuple[float, str], values: dict[str, Any], continues: Trial | None
) -> Trial:
    """Return a trained trial. It reaches at least the next rung."""
    at, worker = place
    random_ = room.random_
    noise = random_.uniform(-0.02, 0.02)
    done = 0 if continues is None else continues.cost.steps
    ends, state = STEPS, "complete"
    for rung in RUNGS if len(room.metrics) == 1 else ():
        if rung <= done:
            continue
        known = room.rungs.setdefault(rung, [])
        loss = _loss(values, rung, noise)
        known.append(loss)
        if continues is None and sorted(known).index(loss) >= max(2, math.ceil(len(known) / 3)):
            ends, state = rung, "pruned"
            break
    curve = {step * BATCH_ROWS: _loss(values, step, noise) for step in range(10, ends + 1, 10)}
    seconds = (ends - done) * (0.9 + values["train.rank"] / 90)
    cost = TrainingCost(
        trained_tokens=ends * TOKENS_A_STEP, planned_tokens=STEPS * TOKENS_A_STEP, steps=ends, planned_steps=STEPS,
        train_seconds=seconds * ends / (ends - done), memory_bytes=(600 + 6 * values["train.rank"]) << 20,
        adapter_bytes=values["train.rank"] * 70_000 if state == "complete" else 0,
        trainable_parameters=values["train.rank"] * 17_500, attempts=1 + (continues is not None),
    )  # fmt: skip
    reason = f"rung of {ends * BATCH_ROWS:,} rows: loss {curve[ends * BATCH_ROWS]:.3f}, not among the best third"
    return Trial(
        number=number,
        values=values,
        run_id=_digest(values)[:12],
        state=state,
        objectives=tuple(_objective(metric, values, curve, cost) for metric in room.metrics)
        if state == "complete" else (),
        curve=curve,
        reason=reason if state == "pruned" else "",
        continues=None if continues is None else continues.number,
        adapter_digest=_digest([values, "adapter"]) if state == "complete" else None,
        checkpoints={ends: _digest([values, ends])},
        cost=cost,
        executions=(TrialExecution(worker=worker, started=at, last_seen=at + seconds),),
        started=at,
        ended=at + seconds,
    )  # fmt: skip


def _objective(metric: str, values: dict[str, Any], curve: dict[int, float], cost: TrainingCost) -> float:
    if metric == "validation_loss":
        return min(curve.values())
    if metric == "train_seconds":
        return cost.train_seconds
    if metric in ("memory_bytes", "adapter_bytes"):
        return float(getattr(cost, metric))
    return round(1.15 - 0.4 * min(curve.values()), 3)


def _infeasible(number: int, place: tuple[float, str], values: dict[str, Any]) -> Trial:
    """Return an infeasible trial. The forecast refuses every second one; the others run out of memory in their first
    steps."""
    at, worker = place
    refused = number % 20 == 7
    values = {**values, "train.rank": 64, "train.alpha": 128.0}
    return Trial(
        number=number, values=values, run_id=_digest([values, number])[:12], state="infeasible",
        constraints={"memory": 0.31 if refused else 1.0}, cause="out_of_memory",
        reason="memory forecast: 31.4 GiB are needed, 24.0 GiB are at hand" if refused else "out of memory at step 3",
        cost=TrainingCost(planned_tokens=0 if refused else STEPS * TOKENS_A_STEP,
                  trained_tokens=0 if refused else 2 * TOKENS_A_STEP, steps=0 if refused else 2,
                  planned_steps=STEPS, train_seconds=0 if refused else 3.0, attempts=0 if refused else 2),
        executions=(TrialExecution(worker=worker, started=at, last_seen=at + (2 if refused else 9)),), started=at,
        ended=at + (2 if refused else 9),
    )  # fmt: skip


def _failed(number: int, place: tuple[float, str], values: dict[str, Any]) -> Trial:
    at, worker = place
    return Trial(
        number=number, values=values, run_id=_digest([values, number])[:12], state="failed", cause="bug",
        reason="ValueError: the tokenizer has no end of turn", curve={320: 3.1, 640: 2.9},
        cost=TrainingCost(trained_tokens=25 * TOKENS_A_STEP, planned_tokens=STEPS * TOKENS_A_STEP, steps=25,
                  planned_steps=STEPS, train_seconds=26.0, attempts=3),
        executions=(TrialExecution(worker=worker, started=at, last_seen=at + 40),), started=at, ended=at + 40,
    )  # fmt: skip


def _running(trial: Trial) -> Trial:
    """Return the trial in the state before its end."""
    last = max(trial.curve, default=0)
    half = {rows: loss for rows, loss in trial.curve.items() if rows <= last / 2}
    cost = trial.cost.model_copy(update={"adapter_bytes": 0, "trained_tokens": trial.cost.trained_tokens // 2})
    return trial.model_copy(
        update={"state": "running", "objectives": (), "ended": None, "adapter_digest": None, "curve": half,
                "cost": cost, "reason": "", "cause": "", "constraints": {}}
    )  # fmt: skip


def _taken_over(trial: Trial, free: list[tuple[float, str]]) -> Trial:
    """Return a trial whose worker died after 60 % of the time. After the lease expires, the next free worker takes over
    the trial; the dead worker returns later."""
    (first,) = trial.executions
    died = first.started + 0.6 * (first.last_seen - first.started)
    at, worker = heapq.heappop(free)
    host, process = first.worker.split("/")
    heapq.heappush(free, (died + 20, f"{host}/{int(process) + 100}"))
    again = max(at, died + LEASE_S)
    takes = (
        TrialExecution(worker=first.worker, started=first.started, last_seen=died),
        TrialExecution(worker=worker, started=again, last_seen=again + 0.4 * (first.last_seen - first.started)),
    )
    cost = trial.cost.model_copy(update={"attempts": 2})
    return trial.model_copy(update={"executions": takes, "ended": takes[-1].last_seen, "cost": cost})


def _report(room: Room, count: int, finals: bool) -> SweepReport:
    objectives = tuple(SweepObjective(metric=name, direction=DIRECTIONS[name]) for name in room.metrics)
    complete = [one for one in room.trials if one.state == "complete"]
    best = _front(complete, objectives)
    found = _finals(complete, objectives[0]) if finals and len(complete) > 2 else None
    shares = {"train.learning_rate": 0.71, "train.target_modules": 0.12, "train.rank": 0.09, "train.dropout": 0.06,
              "train.adapter": 0.02}  # fmt: skip
    return SweepReport(
        study="sweep",
        storage="sqlite",
        objectives=objectives,
        axes=AXES,
        sampler="tpe, seed 0, 8 random trials first",
        pruner="asha, first rung at 0.11 of the longest training, one in 3 goes on" if len(objectives) == 1 else "none",
        versions={"optuna": "5.0.0", "cmaes": "0.12.0"},
        data_digest=_digest("data"),
        base_digest=_digest("base"),
        planned_trials=count,
        trials=tuple(room.trials),
        importances=shares if len(complete) > 3 else {},
        best=best,
        final_round=found,
        winner=found.winner if found else None,
    )


def _front(complete: Sequence[Trial], objectives: Sequence[SweepObjective]) -> tuple[int, ...]:
    signs = [1 if one.direction == "minimize" else -1 for one in objectives]

    def place(trial: Trial) -> list[float]:
        return [sign * value for sign, value in zip(signs, trial.objectives, strict=True)]

    if len(objectives) == 1:
        return tuple(one.number for one in sorted(complete, key=lambda one: (place(one), one.number))[:1])
    return tuple(
        one.number
        for one in complete
        if not any(
            place(other) != place(one) and all(a <= b for a, b in zip(place(other), place(one), strict=True))
            for other in complete
        )
    )


def _finals(complete: Sequence[Trial], objective: SweepObjective) -> FinalRound:
    sign = 1 if objective.direction == "minimize" else -1
    ordered = sorted(complete, key=lambda one: sign * one.objectives[0])[:3]
    finalists = []
    for place, one in enumerate(ordered):
        means = tuple(one.objectives[0] + sign * shift for shift in (0.0, 0.004, 0.011)[: 3 - (place == 2)])
        finalists.append(
            Finalist(number=one.number, values=one.values, means=means,
                     run_ids=tuple(f"{one.run_id}{k or ''}" for k in range(len(means))),
                     mean=sum(means) / len(means), cost=one.cost,
                     dropped="worse than the leader at p < 0.01 (Wilcoxon)" if place == 2 else "")
        )  # fmt: skip
    comparisons = tuple(
        FinalistComparison(other=one.number, difference=abs(one.mean - finalists[0].mean), low=low, p=p,
                           seed_error=0.004, row_error=0.006, better=low > 0,
                           method="paired by row, seeds as a random effect")
        for one, low, p in zip(finalists[1:], (-0.003, 0.021), (0.081, 0.0004), strict=False)
    )  # fmt: skip
    winner = finalists[0].number if len(finalists) < 2 else finalists[1].number
    reason = f"trials {finalists[0].number} and {winner} do not differ significantly; {winner} is the cheaper one"
    return FinalRound(metric=objective.metric, direction=objective.direction, rows=512, finalists=tuple(finalists),
                  comparisons=comparisons, winner=winner, reason=reason)  # fmt: skip


def alone(state: TrialState, count: int = 1) -> SweepReport:
    """Return a sweep that has only trials of one state."""
    made = report(60, final_round=False)
    one = next(trial for trial in made.trials if trial.state == state)
    trials = tuple(one.model_copy(update={"number": number, "continues": None}) for number in range(count))
    best: tuple[int, ...] = (0,) if state == "complete" and count else ()
    return made.model_copy(update={"trials": trials, "importances": {}, "best": best})


def narrowed(made: SweepReport, knobs: Sequence[str]) -> SweepReport:
    """Return the same sweep with only these hyperparameters."""
    trials = tuple(
        one.model_copy(
            update={"values": {parameter: value for parameter, value in one.values.items() if parameter in knobs}}
        )
        for one in made.trials
    )
    axes = tuple(one for one in made.axes if one.name in knobs)
    shares = {parameter: share for parameter, share in made.importances.items() if parameter in knobs}
    return made.model_copy(update={"trials": trials, "axes": axes, "importances": shares})


def constant(made: SweepReport, what: Literal["objective", "values"]) -> SweepReport:
    """Return the same sweep with a constant objective or constant values."""
    if what == "objective":
        changes: list[dict[str, Any]] = [
            {"objectives": tuple(1.5 for _ in one.objectives), "curve": dict.fromkeys(one.curve, 1.5)}
            for one in made.trials
        ]
    else:
        changes = [{"values": made.trials[0].values} for _ in made.trials]
    trials = (one.model_copy(update=change) for one, change in zip(made.trials, changes, strict=True))
    return made.model_copy(update={"trials": tuple(trials)})


def _digest(what: Any) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()
