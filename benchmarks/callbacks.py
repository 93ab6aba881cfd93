"""Measures the cost of monitoring a training: the time of its steps with all callbacks, and with none.

    pip install -c constraints.txt -e .
    python benchmarks/callbacks.py [--quick] [--json FILE]

The same training is repeated with steps of 0.3 s. Step i computes the same numbers each time, so times are compared
step by step. A monitored training is `ratchet train` with a console on a pseudo-terminal, MLflow, Prometheus metrics
that are fetched every second and written as a file, webhooks, logs, and system metrics (callbacks_cell.py).

*In turns*: callbacks are stopped (SIGSTOP) for 8 steps and resumed for 8, in which they also catch up. One of two such
trainings is monitored while the other is not, so a difference in speed of the two processes, which can be several per
cent, cancels. Target: monitored steps take at most 1 % longer, and the 95 % interval (bootstrap of blocks) is at most
that wide on each side. A wider interval means that the machine was too busy. *Whole trainings*, monitored and
unmonitored in turns, are reported without a target, because they include start-up and differences between processes.

A training uses one thread of two processors, as on a GPU machine where callbacks have processors to themselves. With a
thread for each processor, callbacks slow training down; the full mode reports this without a target.
"""

import argparse
import shutil
import socket
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from callbacks_cell import Training, Turns, trained
from report import finish
from report_rows import Row, at_most, count, middle, ratio, told
from small_project import SETTINGS, build, linked

from ratchet.config.base import Base, TinyModelSettings
from ratchet.config.settings import Settings
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.experiments import MlflowStore

MOST = 1.01
WARM_STEPS = 3
"""Number of steps left out at the start of each process: they allocate memory that later steps reuse."""
FIRST, BLOCK = 14, 8
"""FIRST: steps before the first turn, in which callbacks import their packages. BLOCK: steps of a turn; the first step
of each turn is left out."""
DRAWS = 2000
SYSTEM_EVERY_S = 5.0
"""Interval of the system metrics in seconds. It is a sixth of the default, because these trainings are short."""
SHAPE = TinyModelSettings(
    vocab_size=600, hidden_size=256, intermediate_size=512, layers=3, heads=4, sequence_length=48, batch_size=8,
    steps=2,
)  # fmt: skip
ROWS_OF_STEP = 24


@dataclass(frozen=True)
class Plan:
    """Number of measurements of a mode."""

    epochs: int
    crossings: int
    """Number of pairs of trainings that are monitored in turns."""
    pairs: int
    pairs_of_all: int
    """Number of pairs with a thread for each processor."""


FULL, QUICK = Plan(epochs=12, crossings=5, pairs=5, pairs_of_all=3), Plan(8, 1, 1, 0)


def main() -> int:
    """Run the benchmark. The exit code is 0 if all targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="two trainings in turns and a pair of whole ones, two minutes"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-callbacks-") as folder:
        rows = measured(Path(folder).resolve(), QUICK if options.quick else FULL)
    return finish(rows, options.json)


def measured(scratch: Path, plan: Plan) -> list[Row]:
    """Measure, and return all rows."""
    update = {"epochs": plan.epochs, "batch_size": ROWS_OF_STEP, "validate_every_steps": 10}
    settings = SETTINGS.model_copy(
        update={
            "base": Base(tiny=SHAPE),
            "train": SETTINGS.train.model_copy(update=update),
            "machine": SETTINGS.machine.model_copy(update={"checkpoint_every": 10}),
        }
    )
    bench = Bench(build(scratch / "project", settings=settings), scratch, settings)
    with MlflowStore(bench.project).connected():  # creating MLflow's database takes 6 s, once per project
        pass
    crossed = [bench.crossing(number) for number in range(plan.crossings)]
    single = [bench.pair(number, threads=1) for number in range(plan.pairs)]
    every = [bench.pair(number, threads=2) for number in range(plan.pairs_of_all)]
    untold = {name for pair in (*crossed, *single, *every) for training in pair for name in training.untold}
    if untold:
        print(f"not told: {', '.join(sorted(untold))}")
    digests = {training.adapter for pair in (*crossed, *single) for training in pair}
    bare, watched = [one for one, _ in single], [one for _, one in single]
    value, half = compared(crossed)
    busy = [
        told("a thread for each processor: step time, monitored / unmonitored", *steps_of(every)),
        told("a thread for each processor: first to last step, monitored / unmonitored", *whole(every)),
    ] if every else []  # fmt: skip
    return [
        told("steps of unmonitored trainings, s", *middle([step_s for one in bare for step_s in one.step_s])),
        at_most("in turns: step time, monitored / unmonitored", value, MOST),
        at_most("in turns: half of its 95 % interval", half, MOST - 1.0),
        told("whole trainings: step time, monitored / unmonitored", *steps_of(single)),
        told("whole trainings: first to last step, monitored / unmonitored", *whole(single)),
        *busy,
        told("supervisor without callbacks: CPU s for 1,000 steps", *middle([1e3 * one.supervisor_s for one in bare])),
        told("supervisor with callbacks: CPU s for 1,000 steps", *middle([1e3 * one.supervisor_s for one in watched])),
        told("supervisor without callbacks: CPU s to begin with", *middle([one.begun_s for one in bare])),
        told("supervisor with callbacks: CPU s to begin with", *middle([one.begun_s for one in watched])),
        count("callbacks that lack events", len(untold)),
        count("trainings with another adapter than the first", len(digests) - 1),
    ]


@dataclass(frozen=True)
class Bench:
    """Trains copies of one project repeatedly."""

    project: ProjectLayout
    scratch: Path
    settings: Settings

    def crossing(self, number: int) -> tuple[Training, Training]:
        """Run two trainings; each is monitored in the blocks in which the other is not."""
        found = tuple(
            self._trained(f"turns-{number}-{odd}", 1, True, Turns(FIRST, BLOCK, odd)) for odd in (False, True)
        )
        print(f"  in turns, {number + 1}: {compared([found])[0]:.4f}", flush=True)
        return found

    def pair(self, number: int, threads: int) -> tuple[Training, Training]:
        """Run an unmonitored and a monitored training. The order alternates because machines warm up."""
        order = (False, True) if number % 2 == 0 else (True, False)
        both = {watched: self._trained(f"{threads}-{number}-{watched}", threads, watched) for watched in order}
        found = both[False], both[True]
        print(f"  whole trainings, {threads} thread(s), {number + 1}: {steps_of([found])[0]:.4f}", flush=True)
        return found

    def _trained(self, name: str, threads: int, watched: bool, turns: Turns | None = None) -> Training:
        settings = of(self.settings, self.scratch / f"{name}.prom", threads, watched)
        layout = linked(self.project, self.scratch / name, settings)
        shutil.copyfile(self.project.mlruns / "mlflow.db", layout.mlruns / "mlflow.db")
        return trained(layout, threads, watched, turns)


def of(settings: Settings, file: Path, threads: int, watched: bool) -> Settings:
    """Return the settings of one training. Only section `machine` changes, so that the training learns the same."""
    update: dict[str, object] = {"threads": threads, "system_metrics_interval_s": SYSTEM_EVERY_S if watched else 0.0}
    if watched:
        update |= {"metrics_port": free_port(), "metrics_file": str(file), "metrics_scrape_wait_s": 2.0}
    return settings.model_copy(update={"machine": settings.machine.model_copy(update=update)})


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def compared(crossed: Sequence[tuple[Training, Training]]) -> tuple[float, float]:
    """Return the median ratio of watched to unwatched step times, and half the width of its 95 % interval."""
    kinds: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for even, odd in crossed:
        logs = np.log(np.divide(even.step_s, odd.step_s))
        for first in range(FIRST, len(logs), BLOCK):
            block = logs[first + 1 : first + BLOCK]
            if len(block):
                kinds[(first - FIRST) // BLOCK % 2 == 0].append(block)
    draw = np.random.default_rng(0)
    again = [_effect({kind: [found[at] for at in draw.integers(len(found), size=len(found))]
                      for kind, found in kinds.items()}) for _ in range(DRAWS)]  # fmt: skip
    low, high = np.exp(np.quantile(again, (0.025, 0.975)))
    return float(np.exp(_effect(kinds))), float(high - low) / 2


def _effect(kinds: dict[bool, list[np.ndarray]]) -> float:
    """Return the logarithm of the ratio of step times. A difference that is the same in blocks of both kinds comes from
    the processes, and cancels."""
    watched, held = (np.median(np.concatenate(kinds[kind])) for kind in (True, False))
    return float(watched - held) / 2


def steps_of(found: Sequence[tuple[Training, Training]]) -> tuple[float, float]:
    """Compare step times of complete trainings: the median over pairs of the median ratio of a pair's steps."""
    return middle([statistics.median(np.divide(watched.step_s, bare.step_s)[WARM_STEPS:]) for bare, watched in found])


def whole(found: Sequence[tuple[Training, Training]]) -> tuple[float, float]:
    """Compare the time between the first and the last step, including validations and checkpoints."""
    return ratio([watched.whole_s for _, watched in found], [bare.whole_s for bare, _ in found])


if __name__ == "__main__":
    raise SystemExit(main())
