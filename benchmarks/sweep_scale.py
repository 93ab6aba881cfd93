"""Measures a study on Postgres with many trials and workers: time of a proposal, of a full read, and of a heartbeat.

    python benchmarks/sweep_scale.py [--quick] [--json FILE]

Proposals are made one at a time (under the study's lock), so their duration limits the number of workers of a study:
with trainings of an hour and proposals of a second, 3,600 workers. Trials are computed, not trained; each has a curve
of ten losses. A new process has an empty cache: its first read fetches all trials, later reads fetch new trials. The
rows have no targets (docs/evidence_scale.md). Postgres is that of the tests: a separate cluster on loopback.
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
from ratchet.tuning.study import TrialStore, compute_identity

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import postgres
import study_histories

SIZES, QUICK_SIZES = (100, 300, 1000), (30, 100)
TIMES = 5
SETTINGS = Settings(sweep=Sweep(trials=10_000, sampler=SamplerSettings(n_startup_trials=20)))
KINDS = ("random", "tpe", "gp")
LARGEST_GP = 300
"""With more trials than this, a proposal of a Gaussian process takes minutes."""


def fill(store: TrialStore, space: SearchSpace, count: int, worker: SweepWorker) -> None:
    """Add complete trials until the study has `count` trials."""
    for number in range(len(store.trials()), count):
        values = study_histories.drawn(space, number)
        here = store.begin(values, space.to_params(values), f"{number:016x}", worker)
        loss = study_histories.loss(values)
        curve = {rows: loss + 10 / rows for rows in range(100, 1100, 100)}
        done = Trial(
            number=here, values=values, run_id=f"{number:016x}", state="complete", objectives=(loss,), curve=curve,
            cost=TrainingCost(),
        )  # fmt: skip
        store.finish(here, done, worker)


def seconds(act: Callable[[], object]) -> tuple[float, float]:
    """Return median and spread of the seconds of several calls."""
    taken = []
    for _ in range(TIMES):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return middle(taken)


@contextmanager
def opened(url: str) -> Iterator[tuple[TrialStore, SearchSpace]]:
    """Open the study as a new process does, with an empty cache."""
    space = SearchSpace.from_settings(SETTINGS)
    storage = open_storage(ProjectLayout(Path.cwd()), url)
    try:
        yield TrialStore.open(storage, "scale", compute_identity(SETTINGS, "d" * 64, "b" * 64), space), space
    finally:
        storage.close()


def measured(url: str, count: int) -> Iterator[Row]:
    """Yield the rows of a study with this many trials."""
    worker = SweepWorker.current()
    with opened(url) as (store, space):
        fill(store, space, count, worker)
    with opened(url) as (store, space):
        began = time.perf_counter()
        history = store.trials()
        yield told(f"{count} trials: first look at all, s", time.perf_counter() - began)
        yield told(f"{count} trials: a later look, s", *seconds(store.trials))
        values = study_histories.drawn(space, -1)
        running = store.begin(values, space.to_params(values), "f" * 16, worker)
        yield told(f"{count} trials: a heartbeat, s", *seconds(lambda: store.renew(running, worker)))
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
    """Run the benchmark, and return its exit code."""
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
