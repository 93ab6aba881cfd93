"""Compares ways to search on recorded learning curves: quality of the result, and trained tokens.

    python benchmarks/sweep_curves.py [--quick] [--json FILE]

benchmarks/curves/TASK.jsonl has complete trainings over 5 ranks and 9 learning rates (curves_record.py wrote it), with
20 validation losses each. Between them, logarithms of losses are interpolated linearly in the logarithms of rank,
learning rate and progress, so a search may try any values. With noise, all losses of a training are multiplied by one
factor, as another seed would do. The searches decide with the functions that `ratchet sweep` calls, one trial at a
time. The result of a search is its best complete training; it is compared with the best cell of a grid of 4 ranks and 6
learning rates on the same curves. Tokens are counted as shares of complete trainings; the grid costs 24.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from report import finish
from report_rows import Row, at_most, told
from scipy.interpolate import RegularGridInterpolator

from ratchet.config.settings import Settings
from ratchet.config.sweep import PrunerSettings, SamplerSettings, Sweep, SweepParameter
from ratchet.storage.records.sweep import SweepObjective, Trial
from ratchet.tuning import pruners, samplers
from ratchet.tuning.freeze_thaw import Continuation, FreezeThawSearch, NewTrial, has_reached_rung
from ratchet.tuning.search_space import SearchSpace

CURVES = Path(__file__).with_name("curves")
LONGEST = 10_000
"""Rows of a complete training."""
VALIDATIONS = 41
"""Validations of a complete training, as benchmarks/sweep.py has with the bundled requests and banking77."""
FIRST_VALIDATION = 1
"""Index of the first validation of a training; no losses are recorded earlier."""
GRID_RANKS, GRID_RATES = 4, 6
TRIALS, TOP_K = 20, 3
CURRENT = {"train.rank": 16, "train.alpha": 32.0, "train.learning_rate": 2e-4}
"""Values of params.yaml, with which a search begins."""
OBJECTIVES = (SweepObjective(metric="validation_loss", direction="minimize"),)
SPACE = {
    "train.rank": SweepParameter(low=4, high=64, log=True),
    "train.alpha": SweepParameter(tie="2 * train.rank"),
    "train.learning_rate": SweepParameter(low=1e-4, high=1e-2, log=True),
}


class CurveSurface:
    """Losses of trainings with any rank and learning rate."""

    def __init__(self, task: str) -> None:
        lines = [json.loads(line) for line in (CURVES / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]
        ranks, rates = sorted({line["rank"] for line in lines}), sorted({line["learning_rate"] for line in lines})
        shares = np.arange(1, VALIDATIONS + 1) / VALIDATIONS
        losses = np.full((len(ranks), len(rates), VALIDATIONS), np.nan)
        for line in lines:
            logs = np.interp(np.log(shares), np.log(line["shares"]), np.log(line["losses"]))
            losses[ranks.index(line["rank"]), rates.index(line["learning_rate"])] = logs
        self._logs = RegularGridInterpolator((np.log(ranks), np.log(rates)), losses)
        self._rank_ends, self._rate_ends = (ranks[0], ranks[-1]), (rates[0], rates[-1])

    def curve(self, rank: float, rate: float) -> np.ndarray[Any, Any]:
        """Return the losses at `VALIDATIONS` equal distances."""
        return np.exp(self._logs([[math.log(rank), math.log(rate)]])[0])

    def grid_best(self) -> float:
        """Return the lowest loss of the grid's cells."""
        ranks = np.geomspace(*self._rank_ends, GRID_RANKS)
        rates = np.geomspace(*self._rate_ends, GRID_RATES)
        return min(float(self.curve(rank, rate).min()) for rank in ranks for rate in rates)


@dataclass(frozen=True)
class Policy:
    """A sampler and a pruner."""

    name: str
    sampler: SamplerSettings
    pruner: PrunerSettings


class Outcome(NamedTuple):
    """Result of a search."""

    distance: float
    """Best value / grid's best value - 1."""
    cost: float
    """Trained share of the grid."""
    complete: int
    seconds: float
    """Seconds of decisions."""


class Search:
    """A search on the curves of a task, which decides as the scheduler of a sweep does."""

    def __init__(self, task: str, policy: Policy, seed: int, noise: float) -> None:
        self._surface, self._pruner, self._noise = CurveSurface(task), policy.pruner, noise
        self._sampler = policy.sampler.model_copy(update={"seed": seed})
        self._space = SearchSpace.from_settings(Settings(sweep=Sweep(space=SPACE)))
        self._rng = np.random.default_rng([seed, 7])
        self._factors: dict[str, float] = {}
        self._history: list[Trial] = []

    def run(self) -> Outcome:
        """Search until the budget is used up."""
        started = time.perf_counter()
        while (step := self._next()) is not None:
            if isinstance(step, NewTrial):
                self._train(step.values, None)
            else:
                self._train(self._history[step.number].values, step.number)
        seconds = time.perf_counter() - started
        ended = [trial for trial in self._history if trial.state == "complete"]
        best = min(ended, key=lambda trial: trial.objectives[0])
        value = best.objectives[0] / self._factors[str(best.run_id)]  # without its luck
        trained_rows = {trial.run_id: max(trial.curve) for trial in self._history}  # a continuation repeats none
        cost = sum(trained_rows.values()) / LONGEST / (GRID_RANKS * GRID_RATES)
        return Outcome(value / self._surface.grid_best() - 1, cost, len(ended), seconds)

    def _next(self) -> NewTrial | Continuation | None:
        if not self._history:
            return NewTrial(CURRENT)
        if self._pruner.kind == "freeze_thaw":
            return self._freeze_thaw().choose()
        if (earlier := pruners.find_promotable(self._pruner, self._history, LONGEST)) is not None:
            return Continuation(earlier)
        if self._may_begin and (values := samplers.propose(
            self._space, self._sampler, OBJECTIVES, self._history, len(self._history), self._is_tried, CURRENT
        )):  # fmt: skip
            return NewTrial(values)
        earlier = pruners.find_most_promising(self._history) if self._missing > 0 else None
        return None if earlier is None else Continuation(earlier)

    def _train(self, values: dict[str, Any], continues: int | None) -> None:
        """Train a trial until it is pruned or complete."""
        key = _key(values)
        promoted = pruners.find_promotable(self._pruner, self._history, LONGEST)
        is_last_resort = continues is not None and self._pruner.kind != "freeze_thaw" and continues != promoted
        self._factors.setdefault(key, math.exp(self._noise * self._rng.normal()))
        losses = self._surface.curve(values["train.rank"], values["train.learning_rate"]) * self._factors[key]
        done = max((max(trial.curve) for trial in self._history if trial.run_id == key), default=0)
        trial = Trial(number=len(self._history), values=values, run_id=key, state="running", continues=continues)
        self._history.append(trial)
        for index in range(max(FIRST_VALIDATION, round(done / LONGEST * VALIDATIONS)), VALIDATIONS):
            rows = round((index + 1) / VALIDATIONS * LONGEST)
            trial = trial.model_copy(update={"curve": trial.curve | {rows: float(losses[index])}})
            self._history[-1] = trial
            if index + 1 < VALIDATIONS and not is_last_resort and self._is_pruned(trial):
                self._history[-1] = trial.model_copy(update={"state": "pruned"})
                return
        self._history[-1] = trial.model_copy(update={"state": "complete", "objectives": (float(losses.min()),)})

    def _is_pruned(self, trial: Trial) -> bool:
        if self._pruner.kind != "freeze_thaw":
            return pruners.decide_pruning(self._pruner, self._history, trial, LONGEST) is not None
        reached = has_reached_rung(self._pruner.min_resource_fraction, self._history, trial, LONGEST)
        return reached and self._freeze_thaw(trial.number).reason_to_pause() is not None

    def _freeze_thaw(self, trial_at_rung: int | None = None) -> FreezeThawSearch:
        return FreezeThawSearch(
            self._space, self._sampler, self._history, LONGEST, self._is_tried, self._may_begin,
            missing_trainings=self._missing, trial_at_rung=trial_at_rung,
        )  # fmt: skip

    @property
    def _may_begin(self) -> bool:
        return sum(trial.continues is None for trial in self._history) < TRIALS

    @property
    def _missing(self) -> int:
        return TOP_K - sum(trial.state == "complete" for trial in self._history)

    def _is_tried(self, values: Mapping[str, Any]) -> bool:
        return _key(values) in self._factors


def _key(values: Mapping[str, Any]) -> str:
    return json.dumps(dict(values), sort_keys=True)


def search(task: str, policy: Policy, seed: int, noise: float) -> Outcome:
    """Search once."""
    return Search(task, policy, seed, noise).run()


ASHA = PrunerSettings(kind="asha", min_resource_fraction=0.05, reduction_factor=3)
HYPERBAND = PrunerSettings(kind="hyperband", min_resource_fraction=0.05, reduction_factor=3)
FREEZE_THAW = PrunerSettings(kind="freeze_thaw")
POLICIES = (
    Policy("TPE, ASHA", SamplerSettings(kind="tpe"), ASHA),
    Policy("GP, ASHA", SamplerSettings(kind="gp"), ASHA),
    Policy("GP, Hyperband", SamplerSettings(kind="gp"), HYPERBAND),
    Policy("freeze-thaw", SamplerSettings(kind="gp"), FREEZE_THAW),
)


def measure(tasks: Sequence[str], quick: bool, noise: float, workers: int) -> Iterator[Row]:
    """Yield the rows of all tasks. A quick run has few seeds, whose median is uncertain, so its target is wider; and it
    has only freeze-thaw."""
    seeds, widest = (4, 0.01) if quick else (20, 0.005)
    policies = [policy for policy in POLICIES if policy.pruner == FREEZE_THAW or not quick]
    with ProcessPoolExecutor(workers) as pool:
        jobs = {
            (task, policy.name): [pool.submit(search, task, policy, seed, noise) for seed in range(seeds)]
            for task in tasks
            for policy in policies
        }
        for (task, name), futures in jobs.items():
            found = [future.result() for future in futures]
            distances = [outcome.distance for outcome in found]
            costs = [outcome.cost for outcome in found]
            complete = statistics.median(outcome.complete for outcome in found)
            seconds = statistics.median(outcome.seconds for outcome in found)
            print(f"{task:10} {name:15} most tokens / grid {max(costs):.3f}, {complete} complete trainings, "
                  f"{seconds:.1f} s of decisions", flush=True)  # fmt: skip
            for figure, value, target in (
                ("distance from the grid, median", statistics.median(distances), widest),
                ("distance from the grid, worst", max(distances), 0.02),
                ("tokens / grid, median", statistics.median(costs), 0.33),
            ):
                row = f"{task}, {name}: {figure}"
                yield at_most(row, value, target) if name == "freeze-thaw" else told(row, value)


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="4 seeds instead of 20, and only freeze-thaw")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--noise", type=float, default=0.002, help="standard deviation of the logarithm of losses")
    parser.add_argument("--tasks", nargs="*", help="recorded tasks (default: all)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    given = parser.parse_args()
    tasks = given.tasks or sorted(path.stem for path in CURVES.glob("*.jsonl"))
    rows = list(measure(tasks, given.quick, given.noise, given.workers))
    return finish(rows, given.json)


if __name__ == "__main__":
    sys.exit(main())
