"""Measures a study on Postgres with many trials and workers: time of a proposal, of a full read, and of a heartbeat.

    python benchmarks/sweep_scale.py [--quick] [--json FILE]

Proposals are made one at a time (under the study's lock), so what one takes bounds how many workers a study can feed:
trainings of an hour, proposals of a second: 3,600. Trials are computed, not trained; each has a curve of ten losses. A
new process has read nothing yet: its first look reads all trials, later ones what is new. The rows have no
targets (docs/scale.md). Postgres is that of the tests: a separate cluster on loopback.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import report
from report_rows import Row, middle, told

from ratchet.config.settings import Settings
from ratchet.config.sweep import SamplerSettings, Sweep
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.sweep import TrainingCost, Trial
from ratchet.tuning import final_round, samplers
from ratchet.tuning.leases import SweepWorker
from ratchet.tuning.search_space import SearchSpace
from ratchet.tuning.storage import open_storage
from ratchet.tuning.study import TrialStore, compute_identity, select_searched

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import postgres
import study_histories

SIZES, QUICK_SIZES = (100, 300, 1000), (30, 100)
TIMES = 5
SETTINGS = Settings(sweep=Sweep(trials=10_000, sampler=SamplerSettings(n_startup_trials=20)))
KINDS = ("random", "tpe", "gp")
LARGEST_GP = 300
"""Trials beyond which a proposal of a Gaussian process takes minutes."""


def fill(store: TrialStore, space: SearchSpace, count: int, worker: SweepWorker) -> None:
    """Add trials that are complete, until there are so many."""
    for number in range(len(store.trials()), count):
        values = study_histories.drawn(space, number)
        here = store.begin(values, select_searched(space, values), f"{number:016x}", worker)
        loss = study_histories.loss(values)
        curve = {rows: loss + 10 / rows for rows in range(100, 1100, 100)}
        done = Trial(
            number=here, values=values, run_id=f"{number:016x}", state="complete", objectives=(loss,), curve=curve,
            cost=TrainingCost(),
        )  # fmt: skip
        store.finish(here, done, worker)


def seconds(act: Callable[[], object]) -> tuple[float, float]:
    """Median and spread of several times."""
    taken = []
    for _ in range(TIMES):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return middle(taken)


@contextmanager
def opened(url: str) -> Iterator[tuple[TrialStore, SearchSpace]]:
    """The study, as a process opens it that has read nothing yet."""
    space = SearchSpace.from_settings(SETTINGS)
    storage = open_storage(ProjectLayout(Path.cwd()), url)
    try:
        yield TrialStore.open(storage, "scale", compute_identity(SETTINGS, "d" * 64, "b" * 64), space), space
    finally:
        storage.close()


def measured(url: str, count: int) -> Iterator[Row]:
    """Rows of a study with so many trials."""
    worker = SweepWorker.current()
    with opened(url) as (store, space):
        fill(store, space, count, worker)
    with opened(url) as (store, space):
        began = time.perf_counter()
        history = store.trials()
        yield told(f"{count} trials: first look at all, s", time.perf_counter() - began)
        yield told(f"{count} trials: a later look, s", *seconds(store.trials))
        values = study_histories.drawn(space, -1)
        running = store.begin(values, select_searched(space, values), "f" * 16, worker)
        yield told(f"{count} trials: a sign of life, s", *seconds(lambda: store.renew(running, worker)))
        store.finish(running, history[0].model_copy(update={"number": running}), worker)
        objectives = final_round.sweep_objectives(SETTINGS.sweep)
        for kind in KINDS:
            if kind == "gp" and count > LARGEST_GP:
                continue
            sampler = SETTINGS.sweep.sampler.model_copy(update={"kind": kind})
            yield told(
                f"{count} trials: a proposal of `{kind}`, s",
                *seconds(lambda s=sampler: samplers.propose(space, s, objectives, history, count, lambda _: False)),
            )


def main() -> int:
    """Returns the exit code."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--quick", action="store_true")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[Row] = []
    with postgres.serve() as server:
        url = server.database()
        for count in QUICK_SIZES if options.quick else SIZES:
            rows += measured(url, count)
    return report.finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
