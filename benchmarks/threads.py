"""Compares numbers and wait policies of the CPU threads of a training.

    pip install -c constraints.txt -e .
    python benchmarks/threads.py [--quick] [--json FILE]

Needs exactly two processors. The benchmark repeats a training without callbacks, once with a narrow model like that of
the quick start, and once with a model that is four times as wide. Each uses one thread, two threads that sleep while
they wait (OMP_WAIT_POLICY=PASSIVE, Ratchet's default), or two threads that spin (libgomp's default). The narrow model
is also trained while another process keeps one of the processors busy. Targets:

* for either model, the number of threads that `machine.threads: 0` selects is at most 5 % slower than the other number;
* next to a busy process, two sleeping threads are at most as slow as two spinning threads.

With `--quick`, only the trainings of these targets run, each once and for fewer steps.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from callbacks import ROWS_OF_STEP, SHAPE, of
from callbacks_cell import trained
from report import finish
from report_rows import Row, at_most, ratio, told
from small_project import SETTINGS, build, linked

from ratchet.config.base import Base, TinyModelSettings
from ratchet.config.settings import Settings
from ratchet.storage.layout import ProjectLayout

THREADS = 2
OURS = 0
"""The number of threads that `machine.threads: 0` selects."""
MOST = 1.05
WARM_STEPS = 2
WIDE = SHAPE.model_copy(update={"hidden_size": 1024, "intermediate_size": 2048, "layers": 2})


@dataclass(frozen=True)
class Bench:
    """Trains one model repeatedly."""

    name: str
    settings: Settings
    project: ProjectLayout
    scratch: Path

    @classmethod
    def of(cls, name: str, shape: TinyModelSettings, scratch: Path, epochs: float) -> "Bench":
        """Create a prepared project with a base of this shape."""
        update = {"epochs": epochs, "batch_size": ROWS_OF_STEP, "validate_every_steps": 100}
        train = SETTINGS.train.model_copy(update=update)
        settings = SETTINGS.model_copy(update={"base": Base(tiny=shape), "train": train})
        return cls(name, settings, build(scratch / name, settings=settings), scratch)

    def step_s(self, number: int, threads: int, waiting: str = "PASSIVE", busy: int = 0) -> float:
        """Return the median seconds of a step of one training."""
        name = f"{self.name}-{number}-{threads}-{waiting}-{busy}"
        layout = linked(self.project, self.scratch / name, of(self.settings, self.scratch / "none", threads, False))
        with policy(waiting), neighbours(busy):
            steps = sorted(trained(layout, threads, watched=False).step_s[WARM_STEPS:])
        found = steps[len(steps) // 2]
        print(f"  {name}: {found:.3f} s a step", flush=True)
        return found


@contextmanager
def policy(waiting: str) -> Iterator[None]:
    """Set the wait policy of OpenMP's threads. `SPIN` is libgomp's default."""
    before = os.environ.pop("OMP_WAIT_POLICY", None)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE" if waiting == "PASSIVE" else "ACTIVE"
    if waiting != "PASSIVE":  # libgomp's spin count without a policy; ACTIVE alone spins for longer
        os.environ["GOMP_SPINCOUNT"] = "300000"
    try:
        yield
    finally:
        os.environ.pop("GOMP_SPINCOUNT", None)
        os.environ.pop("OMP_WAIT_POLICY")
        if before is not None:
            os.environ["OMP_WAIT_POLICY"] = before


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run this many processes that compute in an endless loop."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    """Run the benchmark. The exit code is 0 if all targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only what has a target, each once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) != THREADS:
        parser.error(f"for {THREADS} processors; here are {len(os.sched_getaffinity(0))} (taskset -c 0,1 takes two)")
    with tempfile.TemporaryDirectory(prefix="ratchet-threads-") as folder:
        rows = measured(Path(folder).resolve(), options.quick)
    return finish(rows, options.json)


TARGETS = (
    ("narrow", OURS, "PASSIVE", 0), ("narrow", 2, "PASSIVE", 0),
    ("wide", 1, "PASSIVE", 0), ("wide", OURS, "PASSIVE", 0),
    ("narrow", 2, "PASSIVE", 1), ("narrow", 2, "SPIN", 1),
)  # fmt: skip
"""Trainings that the targets compare: model, number of threads, how they wait, and number of busy processes."""
OTHERS = (("narrow", 2, "SPIN", 0), ("wide", 2, "SPIN", 0), ("narrow", OURS, "PASSIVE", 1))


def measured(scratch: Path, quick: bool) -> list[Row]:
    """Measure all kinds of training in turns, and return all rows."""
    epochs, rounds, kinds = (0.25, 1, TARGETS) if quick else (1, 3, TARGETS + OTHERS)
    benches = {name: Bench.of(name, shape, scratch, epochs) for name, shape in (("narrow", SHAPE), ("wide", WIDE))}
    found: dict[tuple[str, int, str, int], list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in kinds:
            found[kind].append(benches[kind[0]].step_s(number, *kind[1:]))
    ours, two, one, wide_ours, sleeping, spinning = (found[kind] for kind in TARGETS)
    rows = [
        at_most(f"width {SHAPE.hidden_size}: as many threads as ours / two", ratio(ours, two)[0], MOST),
        at_most(f"width {WIDE.hidden_size}: as many threads as ours / one", ratio(wide_ours, one)[0], MOST),
        at_most("with a busy process, two threads: sleeping / spinning", ratio(sleeping, spinning)[0], 1.0),
    ]
    if not quick:
        spin, wide_spin, beside = (found[kind] for kind in OTHERS)
        rows += [
            told(f"width {SHAPE.hidden_size}: as many threads as ours / two that spin", *ratio(ours, spin)),
            told(f"width {WIDE.hidden_size}: as many threads as ours / two that spin", *ratio(wide_ours, wide_spin)),
            told("with a busy process: as many threads as ours / two that sleep", *ratio(beside, sleeping)),
        ]
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
