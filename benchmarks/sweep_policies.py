"""Compares samplers and pruners of `ratchet sweep` on real trainings: best values, and trained tokens.

    pip install -c constraints.txt -e .
    python benchmarks/sweep_policies.py [--quick] [--task TASK] [--data DIR] [--seeds N] [--turns FILE] [--json FILE]

Rows, base, space, budget and start are those of benchmarks/sweep.py, and the samplers and pruners are those of
benchmarks/sweep_curves.py. Trainings are shorter (EPOCHS), because there are four sweeps for each seed. Every policy
runs `ratchet sweep` once for each seed, in a project of its own, one after the other. All trainings have the same seed
and the same order of the rows, so the policies minimise one function.

The targets are for freeze-thaw, the default: its median of the best values is at most the lowest of the other policies'
medians, and its worst value at most the lowest of their worst values.

All sweeps of a task take two hours. With `--turns FILE`, the sweeps of each finished seed are kept there, and the same
command continues after the last one.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from curves_record import TASKS
from report import finish
from report_rows import Row, at_most, told
from sweep import ENVIRONMENT, SHAPES, build, make_parser, project, sweep
from sweep_account import Search, keep_turn, read_turns
from sweep_curves import FREEZE_THAW, POLICIES

Searches = Mapping[str, Sequence[Search]]
"""The sweeps of each policy, by seed."""

EPOCHS = 0.4
SEEDS = 20
DEFAULT = next(policy.name for policy in POLICIES if policy.pruner == FREEZE_THAW)


def measure(work: Path, given: argparse.Namespace) -> Searches:
    """Run a sweep with each policy and each seed, and print one line for each."""
    seeds = given.seeds or (1 if given.quick else SEEDS)
    shape = replace(SHAPES[given.quick], epochs=EPOCHS, samplers=tuple(range(seeds)))
    turns = [{name: Search.from_json(one) for name, one in turn.items()} for turn in read_turns(given.turns)]
    made, settings = build(work / "made", shape, TASKS[given.task], given.data)
    for seed in shape.samplers[len(turns) :]:
        turn = {}
        for policy in POLICIES:
            sampler = policy.sampler.model_copy(update={"seed": seed})
            chosen = settings.sweep.model_copy(update={"sampler": sampler, "pruner": policy.pruner})
            layout = project(made, work / "sweep", settings.model_copy(update={"sweep": chosen}))
            turn[policy.name], _ = sweep(layout)
            shutil.rmtree(layout.root)
            one = turn[policy.name]
            print(f"{policy.name:15} seed {seed:2}: {one.best:.4f}, {one.tokens:,} tokens, {len(one.takes)} trainings, "
                  f"{one.seconds:.1f} s", flush=True)  # fmt: skip
        turns.append(turn)
        keep_turn(given.turns, {name: asdict(one) for name, one in turn.items()})
    return {policy.name: [turn[policy.name] for turn in turns] for policy in POLICIES}


def judged(found: Searches, quick: bool) -> Iterator[Row]:
    """Yield the rows: values and cost of each policy, and the default against each of the others. One seed of a quick
    run has no targets."""
    others = [name for name in found if name != DEFAULT]
    for figure, of in (("median", statistics.median), ("worst", max)):
        values = {name: of([search.best for search in searches]) for name, searches in found.items()}
        for name in others:
            yield told(f"{name}: best validation loss, {figure}", values[name])
        row, lowest = f"{DEFAULT}: best validation loss, {figure}", min(values[name] for name in others)
        yield told(row, values[DEFAULT]) if quick else at_most(row, values[DEFAULT], lowest)
    for name, searches in found.items():
        yield told(f"{name}: tokens, median", statistics.median(search.tokens for search in searches))
        yield told(f"{name}: complete trainings, median",
                   statistics.median(sum(take.finished for take in search.takes) for search in searches))  # fmt: skip
    for name in others:
        pairs = list(zip(found[DEFAULT], found[name], strict=True))
        yield told(f"seeds with a worse value than {name}", sum(ours.best > theirs.best for ours, theirs in pairs))
        yield told(
            f"seeds with a worse value than {name} for at most as many tokens",
            sum(ours.best_within(min(ours.tokens, theirs.tokens)) > theirs.best for ours, theirs in pairs),
        )


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    given = make_parser(__doc__, "fewer trials, one seed", SEEDS).parse_args()
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="ratchet-policies-") as folder:
        return finish(list(judged(measure(Path(folder), given), given.quick)), given.json)


if __name__ == "__main__":
    sys.exit(main())
