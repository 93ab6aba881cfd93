"""Compares the cost of an equal result with `ratchet sweep`, a full grid, and Optuna's own loop around HF Trainer.

    pip install -c constraints.txt -e .
    python benchmarks/sweep.py [--quick] [--task TASK] [--data DIR] [--seeds N] [--equal-tokens]
                               [--without-peer] [--turns FILE] [--json FILE]

All three use the same rows, the same small base, one worker and one thread. The rows are the bundled requests, or those
of another task of curves_record.py. They minimise validation loss over rank and learning rate, with alpha = 2 x rank. A
sweep begins with the settings of `ratchet init` for a real base (rank 16, learning rate 2e-4), which are a bad guess
here. Base, data and MLflow's database are created once and shared by all.

- The **grid**: every cell is trained to its end, as a supervised run without MLflow. The target is its best value plus
  one standard deviation of that cell's value over seeds, because a smaller difference is noise.
- A **sweep**: `ratchet sweep` in a project of its own, with the default sampler and pruner, and without finalists (the
  grid has none). Tokens and times are read from the journals of its runs.
- **Optuna + Trainer** (sweep_cell.py): create_study's own sampler and pruner (TPE, median), as many trials as a sweep.
  Each trial is HF Trainer with peft on the same base and rows, and all trials run in one process. With
  `--equal-tokens`, it ends after the trial in which it has trained as many tokens as the sweep. This saves more than
  half of the time of this benchmark. `--without-peer` leaves it out.

The grid is divided into as many pieces as there are seeds of the samplers, and grid, sweep and peer take turns. Cost is
counted in trained answer tokens, until the end of the first training whose best validation loss is at most the target.
The target is unknown during a search, so figures of complete sweeps are reported as well, and the cost of a grid in
random order. Time begins with the command (Optuna: with its imports) and ends with that training.

All turns of a task take hours. With `--turns FILE`, each finished turn is kept there, and the same command continues
after the last one.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from curves_record import BASE, TASKS, Task, copy_rows
from report import finish
from report_rows import Row, at_least, at_most, count, told
from small_project import linked, run_first_stages, train_supervised
from sweep_account import Search, Take, keep_turn, read_turns, takes

from ratchet.config.machine import Machine
from ratchet.config.prepare import Prepare
from ratchet.config.settings import Settings
from ratchet.config.sweep import FinalistSettings, PrunerSettings, SamplerSettings, Sweep, SweepParameter
from ratchet.config.train import Train
from ratchet.runs.fork_server import ForkServer
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.sweep import SweepReport
from ratchet.storage.records.training import TrainReport
from ratchet.tracking.mlflow.experiments import MlflowStore

STUDY = "benchmark"
STRICT = 0.005
"""Distance of a second target from the grid's best value. It is reported without a limit, because seeds alone change
the value by more."""
FIRST_RUNG = PrunerSettings().min_resource_fraction
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


@dataclass(frozen=True)
class Shape:
    """Size of the grid and of its trainings."""

    ranks: tuple[int, ...]
    rates: tuple[float, ...]
    samplers: tuple[int, ...]
    """Seeds of the samplers; figures are medians over them."""
    seeds: tuple[int, ...]
    """Seeds with which the grid's best cell is trained again."""
    epochs: float
    trials: int
    batch_rows: int = 32

    @property
    def cells(self) -> list[tuple[int, float]]:
        """Pairs of rank and learning rate, in the order of two nested loops."""
        return [(rank, rate) for rank in self.ranks for rate in self.rates]


SHAPES = {
    True: Shape((4, 32), (2e-4, 1e-3, 5e-3), (0,), (1,), epochs=0.4, trials=12),
    False: Shape(
        (4, 10, 25, 64), (1e-4, 2.5e-4, 6.3e-4, 1.6e-3, 4e-3, 1e-2), tuple(range(10)), (1, 2, 3), 1, trials=20
    ),
}
"""Shapes by `quick`. A quick grid has too few cells for a target of tokens: a third of it are two trainings."""

VALIDATIONS_PER_RUNG = 2
"""Validations before the first rung, and at the same distance from then on. Steps are rounded down, so the next one
reaches the rung."""


def settings_of(shape: Shape, steps: int, prepare: Prepare) -> Settings:
    """Return the initial settings of a sweep whose trainings have this many steps."""
    alpha = SweepParameter(tie="2 * train.rank")
    rank = SweepParameter(low=min(shape.ranks), high=max(shape.ranks), log=True)
    rate = SweepParameter(low=min(shape.rates), high=max(shape.rates), log=True)
    return Settings(
        base=BASE,
        prepare=prepare,
        train=Train(
            rank=16, alpha=32, learning_rate=2e-4, epochs=shape.epochs, batch_size=shape.batch_rows,
            validate_every_steps=max(1, int(FIRST_RUNG * steps / VALIDATIONS_PER_RUNG)),
        ),
        sweep=Sweep(
            name=STUDY, trials=shape.trials, finalists=FinalistSettings(top_k=0),
            space={"train.rank": rank, "train.alpha": alpha, "train.learning_rate": rate},
        ),
        machine=Machine(device="cpu", threads=1, micro_batch_size=shape.batch_rows),
    )  # fmt: skip


def build(folder: Path, shape: Shape, task: Task, data: Path) -> tuple[ProjectLayout, Settings]:
    """Create a project with base, data and MLflow's database. Return it and its settings."""
    prepare = copy_rows(folder, task, data)
    layout, settings = ProjectLayout(folder), settings_of(shape, 1, prepare)
    for place in (layout.experiments, layout.mlruns):
        place.mkdir(parents=True)
    run_first_stages(layout, settings)
    with MlflowStore(layout).connected():
        pass
    steps = shape.epochs * DatasetCard.load(layout.dataset_card).splits["train"] / shape.batch_rows
    return layout, settings_of(shape, math.ceil(steps), prepare)


def project(made: ProjectLayout, folder: Path, settings: Settings) -> ProjectLayout:
    """Create a project without runs, because a project trains equal values only once."""
    shutil.copytree(made.mlruns, folder / made.mlruns.name)
    return linked(made, folder, settings)


def train(layout: ProjectLayout, settings: Settings, server: ForkServer) -> Take:
    """Train one supervised run, and return its cost by the clock of this process."""
    begun = time.time()
    found = takes(train_supervised(layout, settings, server).journal)
    last = found[-1]
    return Take(begun, time.time(), sum(take.tokens for take in found), last.value, last.finished)


def cell(
    layout: ProjectLayout, settings: Settings, server: ForkServer, point: tuple[int, float], seed: int = 0
) -> Take:
    """Train one cell of the grid."""
    rank, rate = point
    changes = {"rank": rank, "alpha": 2.0 * rank, "learning_rate": rate, "seed": seed}
    take = train(layout, settings.model_copy(update={"train": settings.train.model_copy(update=changes)}), server)
    print(f"grid   rank {rank:2} rate {rate:.1e} seed {seed}: {take.value:.4f}, {take.tokens:,} tokens, "
          f"{take.ended - take.begun:.1f} s", flush=True)  # fmt: skip
    return take


def sweep(layout: ProjectLayout) -> tuple[Search, SweepReport]:
    """Run `ratchet sweep` to its end. Return its trainings and its report."""
    begun = time.time()
    _run([sys.executable, "-m", "ratchet", "--project", str(layout.root), "sweep", "--workers", "1"])
    done = [take for journal in layout.runs.glob("*/journal.jsonl") for take in takes(journal)]
    report = SweepReport.load(layout.sweep(STUDY) / "report.json")
    return Search(begun, sorted(done, key=lambda take: take.begun)), report


def peer(layout: ProjectLayout, seed: int, steps: int, tokens: int | None) -> Search:
    """Run Optuna's loop around Trainer in a new process. It ends early if it has trained `tokens` tokens."""
    begun, script = time.time(), Path(__file__).with_name("sweep_cell.py")
    limit = [] if tokens is None else [str(tokens)]
    told = _run([sys.executable, str(script), str(layout.root), str(seed), str(steps), *limit])
    return Search(begun, [Take(**one) for one in json.loads(told.splitlines()[-1])])


def _run(command: list[str]) -> str:
    """Return the output of a command. End the benchmark if it fails."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "RATCHET_", "DVC_"))}
    done = subprocess.run(command, capture_output=True, text=True, env=clean | ENVIRONMENT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:4])} ...: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def identities(layout: ProjectLayout) -> list[tuple[int, int]]:
    """Return the identities of the outputs of stages base and prepare. A stage that runs again replaces them."""
    return [(found.st_ino, found.st_mtime_ns) for found in (place.stat() for place in (layout.base, layout.data))]


@dataclass
class Found:
    """All measurements."""

    grid: dict[tuple[int, float], Take] = field(default_factory=dict)
    """Trainings by rank and learning rate."""
    again: list[Take] = field(default_factory=list)
    """Trainings of the grid's best cell with other seeds."""
    sweeps: list[Search] = field(default_factory=list)
    reports: list[SweepReport] = field(default_factory=list)
    peers: list[Search] = field(default_factory=list)
    made_again: int = 0
    """Number of sweeps that replaced base or data."""

    @property
    def noise(self) -> float:
        """Standard deviation over seeds of the grid's best cell, divided by the mean."""
        values = [self.grid[self.best].value, *(one.value for one in self.again)]
        return statistics.stdev(values) / statistics.mean(values)

    @property
    def best(self) -> tuple[int, float]:
        """The cell with the lowest validation loss."""
        return min(self.grid, key=lambda one: self.grid[one].value)


def measure(work: Path, shape: Shape, given: argparse.Namespace, server: ForkServer) -> Found:
    """Run grid, sweeps and peers in turns. `server` starts the trainings of the grid, without imports for each."""
    found, done = Found(), read_turns(given.turns)
    if any(("peer" in turn) == given.without_peer for turn in done):
        raise SystemExit(f"{given.turns}: found turns with another choice of --without-peer; name another file")
    for turn in done:
        add(found, turn)
    made, settings = build(work / "made", shape, TASKS[given.task], given.data)
    grid, turns = project(made, work / "grid", settings), len(shape.samplers)
    for number, seed in list(enumerate(shape.samplers))[len(done) :]:
        cells = [(*one, asdict(cell(grid, settings, server, one))) for one in shape.cells[number::turns]]
        chosen = settings.sweep.model_copy(update={"sampler": SamplerSettings(seed=seed)})
        layout = project(made, work / f"sweep-{seed}", settings.model_copy(update={"sweep": chosen}))
        before = identities(layout)
        searched, report = sweep(layout)
        made_again = identities(layout) != before
        searches = {"sweep": searched}
        if not given.without_peer:
            limit = searched.tokens if given.equal_tokens else None
            searches["peer"] = peer(layout, seed, planned_steps(grid), limit)
        for who, one in searches.items():
            print(f"{who:5} seed {seed}: {one.best:.4f}, {one.tokens:,} tokens, {one.seconds:.1f} s", flush=True)
        shutil.rmtree(layout.root)
        measured = {
            "grid": cells, "report": report.model_dump(mode="json"), "made_again": made_again,
            **{who: asdict(one) for who, one in searches.items()},
        }  # fmt: skip
        add(found, measured)
        keep_turn(given.turns, measured)
    found.again = [cell(grid, settings, server, found.best, seed) for seed in shape.seeds]
    return found


def add(found: Found, turn: dict[str, Any]) -> None:
    """Add a turn, as a line of the file of turns has it."""
    found.grid |= {(rank, rate): Take(**take) for rank, rate, take in turn["grid"]}
    found.reports.append(SweepReport.model_validate(turn["report"]))
    found.made_again += turn["made_again"]
    found.sweeps.append(Search.from_json(turn["sweep"]))
    if "peer" in turn:
        found.peers.append(Search.from_json(turn["peer"]))


def planned_steps(grid: ProjectLayout) -> int:
    """Return the number of optimizer steps of a complete training."""
    run = next(grid.runs.iterdir())
    return TrainReport.load(run / "result" / "train.json").planned_steps


def judged(found: Found, quick: bool, equal_tokens: bool) -> Iterator[Row]:
    """Yield the rows. A quick run has no targets for the cost."""
    cells = list(found.grid.values())
    tokens, seconds = sum(one.tokens for one in cells), sum(one.ended - one.begun for one in cells)
    lowest = found.grid[found.best].value
    target = lowest * (1 + found.noise)
    ours = [search.until(target) for search in found.sweeps]
    half = (len(cells) + 1) / (1 + sum(one.value <= target for one in cells)) * tokens / len(cells)
    pauses = [pause for search in found.sweeps for pause in search.pauses()]

    missed = sum(math.isinf(one.tokens) for one in ours)
    ratio = _middle(tokens / one.tokens for one in ours)
    name = "tokens, full grid / sweep until the grid's value"
    yield told(name, ratio) if quick else at_least(name, ratio, 3)
    name = "sweeps that did not reach it"
    yield told(name, missed) if quick else count(name, missed)
    yield told("tokens, full grid / whole sweep", _middle(tokens / one.tokens for one in found.sweeps))
    yield told("tokens, grid in random order until its value / sweep", _middle(half / one.tokens for one in ours))
    yield told("time, full grid / sweep until the grid's value", _middle(seconds / one.seconds for one in ours))
    yield told("time, full grid / whole sweep", _middle(seconds / one.seconds for one in found.sweeps))
    yield at_most("s from a training's end to the next first step, median", _middle(pauses), 2.0)
    yield told("s from a training's end to the next first step, longest", max(pauses))
    yield told("trainings per hour, sweep", _middle(3600 * len(one.takes) / one.seconds for one in found.sweeps))
    yield count("sweeps that created base or data again", found.made_again)
    yield from _quality(found, lowest, tokens, quick)
    yield from _values(found, lowest)
    if found.peers:
        yield from _against_peer(found, target, equal_tokens)


def _quality(found: Found, lowest: float, grid_tokens: int, quick: bool) -> Iterator[Row]:
    """Yield rows for the best values and their cost."""
    distances = [search.best / lowest - 1 for search in found.sweeps]
    yield at_most("sweep's best value / grid's - 1, worst", max(distances), 0.01 if quick else 0.02)
    share = _middle(search.tokens / grid_tokens for search in found.sweeps)
    if quick:
        yield told("tokens, sweep / grid", share)
    else:
        yield at_most("sweep's best value / grid's - 1, median", _middle(distances), 0.005)
        yield at_most("tokens, sweep / grid", share, 0.33)


def _values(found: Found, lowest: float) -> Iterator[Row]:
    """Yield rows for the best values and the states of the trials."""
    rank, rate = found.best
    yield told("grid: lowest validation loss", lowest)
    yield told("grid: its rank", rank)
    yield told("grid: its learning rate", rate)
    yield told("grid: trainings", len(found.grid))
    yield told("best cell with other seeds: standard deviation / mean", found.noise)
    close = [search.until(lowest * (1 + STRICT)) for search in found.sweeps]
    yield told("sweeps that did not come within half a per cent of it", sum(math.isinf(one.tokens) for one in close))
    cells = list(found.grid.values())
    yield told(
        "tokens, full grid / sweep until within half a per cent",
        _middle(sum(one.tokens for one in cells) / one.tokens for one in close),
    )
    yield told("sweep: lowest validation loss, median", _middle(one.best for one in found.sweeps))
    for state in ("complete", "pruned", "infeasible", "failed"):
        numbers = [sum(trial.state == state for trial in report.trials) for report in found.reports]
        yield told(f"sweep: trials {state}, median", _middle(numbers))


def _against_peer(found: Found, target: float, equal_tokens: bool) -> Iterator[Row]:
    """Yield rows for the peer. With `equal_tokens`, it ended early, so it has no figures as a whole."""
    pairs = list(zip(found.sweeps, found.peers, strict=True))
    worse = sum(ours.best > theirs.best_within(ours.tokens) for ours, theirs in pairs)
    yield at_most("sweeps with a worse value than Optuna + Trainer for the same tokens", worse, len(found.sweeps) // 10)
    if not equal_tokens:
        yield told("tokens, Optuna + Trainer / sweep, whole", _middle(_ratios("tokens", found.peers, found.sweeps)))
        yield told("time, Optuna + Trainer / sweep, whole", _middle(_ratios("seconds", found.peers, found.sweeps)))
    reached = [(theirs.until(target), ours.until(target)) for ours, theirs in pairs]
    missed = sum(math.isinf(theirs.tokens) for theirs, _ in reached)
    yield told("Optuna + Trainer that did not reach the grid's value", missed)
    both = [pair for pair in reached if not math.isinf(pair[0].tokens + pair[1].tokens)]
    if both:
        yield told("tokens until it, Optuna + Trainer / sweep", _middle(a.tokens / b.tokens for a, b in both))
        yield told("time until it, Optuna + Trainer / sweep", _middle(a.seconds / b.seconds for a, b in both))
    yield told("trainings per hour, Optuna + Trainer",
               _middle(3600 * len(one.takes) / one.seconds for one in found.peers))  # fmt: skip
    yield told("Optuna + Trainer: lowest validation loss, median", _middle(one.best for one in found.peers))
    yield told(
        "Optuna + Trainer: trials complete, median", _middle(sum(t.finished for t in p.takes) for p in found.peers)
    )


def _ratios(name: str, above: Sequence[Search], below: Sequence[Search]) -> list[float]:
    return [getattr(a, name) / getattr(b, name) for a, b in zip(above, below, strict=True)]


def _middle(values: Iterable[float]) -> float:
    return statistics.median(list(values))


def make_parser(doc: str | None, quick: str, seeds: int) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark of sweeps.

    Args:
        doc: docstring of the benchmark; its first line is shown.
        quick: what a quick run has.
        seeds: default number of seeds.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--task", choices=TASKS, default="support", help="rows (default: the bundled requests)")
    parser.add_argument("--data", type=Path, default=Path(), metavar="DIR", help="folder with the task's file")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"seeds of the samplers (default: {seeds}; quick: 1)")
    parser.add_argument("--turns", type=Path, metavar="FILE", help="keep finished turns there, and continue after them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    return parser


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    seeds = len(SHAPES[False].samplers)
    parser = make_parser(__doc__, "a smaller grid, shorter trainings, one sampler seed", seeds)
    parser.add_argument("--equal-tokens", action="store_true", help="end Optuna's loop after the tokens of the sweep")
    parser.add_argument("--without-peer", action="store_true", help="leave out Optuna's loop")
    given = parser.parse_args()
    shape = SHAPES[given.quick]
    if given.seeds is not None:
        shape = replace(shape, samplers=tuple(range(given.seeds)))
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="ratchet-sweep-") as folder, ForkServer() as server:
        found = measure(Path(folder), shape, given, server)
    return finish(list(judged(found, given.quick, given.equal_tokens)), given.json)


if __name__ == "__main__":
    sys.exit(main())
