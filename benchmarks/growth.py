"""Measures growth with steps, rows and rank: tokens per second, memory, journal, checkpoints, start-up.

    pip install -c constraints.txt -e .
    python benchmarks/growth.py [--quick] [--json FILE] [--picture STEM]

All cells use the worker's own loop (growth_cell.py) on a random Llama of two thin layers. Each cell is a process with
one thread. **Steps**: one training of 2,000 steps (full: 10,000), with validations and checkpoints, is sampled while it
runs. Memory is resident memory of the process. Its slope, by least squares over all samples after the first quarter, is
reported relative to the median resident memory. Speed is the median over windows of 50 steps of the last third,
compared with those of the second third, because the first third includes warm-up. **Rows**: sealed splits of 1,000,
10,000 and 100,000 generated rows (full: also a million). Measured are the times for verifying digests, for opening, and
for ordering rows and building the first batch, and then tokens per second; sizes take turns. **Ranks**: bytes of a
checkpoint by trainable parameters; weight and two moments in float32 are 12 bytes. --picture draws STEM.svg.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import growth_picture
from growth_picture import Growth, windows
from report import finish
from report_rows import Row, at_least, at_most, middle, ratio, told

CELL_S = 1800
RANKS = (4, 8, 16, 32, 64)
SHAPES: dict[bool, dict[str, Any]] = {
    True: {"steps": 2000, "rows": (1_000, 10_000, 100_000), "turns": 3, "short": 150},
    False: {"steps": 10_000, "rows": (1_000, 10_000, 100_000, 1_000_000), "turns": 5, "short": 400},
}
"""Sizes by `quick`; `short`: steps of each training by rows."""
BATCHINGS = ("shuffled", "by_length", "packed")
STATE_BYTES = 12
"""Bytes per trainable parameter: its weight and AdamW's two moments, in float32."""
FLAT = 0.95
"""Tokens per second over steps or rows may fall to this share: the noise of a machine is of this size."""
GROWS_BY_1000_STEPS = 0.01
"""Allowed growth per 1,000 steps, as a share of resident memory."""
JOURNAL_BYTES = 400
"""Allowed bytes of the journal per step, including validations and checkpoints, which occur once in a hundred steps."""
REST_BYTES = 64 * 1024
"""Allowed bytes of a checkpoint of this model without tensors: counters, validation losses, and gradient norms by
module for at most 50 steps."""
ROW_US = 20.0
"""Allowed µs of start-up per row: for its digest, its lengths, and its place in the order or in a pack."""


def cell(**given: Any) -> dict[str, Any]:
    """Return the results of growth_cell.py. End the benchmark if it fails."""
    script = Path(__file__).with_name("growth_cell.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(given)], capture_output=True, text=True, env=environment,
        timeout=CELL_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{given}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(work: Path, shape: dict[str, Any]) -> Growth:
    """Run all cells."""
    steps = cell(do="steps", folder=str(work / "steps"), steps=shape["steps"], every=100)
    print(f"{shape['steps']:,} steps: {sum(steps['step_s']):.1f} s", flush=True)
    ranks = cell(do="ranks", folder=str(work / "ranks"), ranks=RANKS)["ranks"]
    rows: dict[int, list[dict[str, Any]]] = {count: [] for count in shape["rows"]}
    cell(do="make", folder=str(work), counts=list(rows))
    for turn in range(shape["turns"]):
        for count, found in rows.items():
            run, data = work / f"run-{count}-{turn}", work / f"data-{count}"
            found.append(cell(do="rows", folder=str(run), data=str(data), steps=shape["short"]))
            line = ", ".join(f"{name} {value:,.4g}" for name, value in found[-1].items())
            print(f"{count:9,} rows: {line}", flush=True)
    return Growth(steps, ranks, rows)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line through these points."""
    return statistics.linear_regression(x, y).slope


def of_steps(steps: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of one long training."""
    speed = windows(steps)
    third = len(speed) // 3
    value, spread = ratio(speed[-third:], speed[third : 2 * third])
    yield at_least("tokens/s, last third of the steps / second third", value, FLAT, spread)
    yield told("tokens/s", *middle(speed[third:]))
    samples = steps["samples"]
    warm = [one for one in samples if one["step"] > samples[-1]["step"] / 4]
    places = [one["step"] for one in warm]
    grown = slope(places, [one["resident_bytes"] for one in warm])
    held = statistics.median(one["resident_bytes"] for one in warm)
    name = f"resident memory: growth by 1,000 steps / what is held, over {places[-1]:,} steps"
    yield at_most(name, 1000 * grown / held, GROWS_BY_1000_STEPS)
    yield told("resident memory: growth, bytes a step", grown)
    yield told("resident memory: peak, MB", steps["peak_bytes"] / 1e6)
    journal = [one["journal_bytes"] for one in warm]
    half = len(warm) // 2
    yield at_most("journal, bytes a step", slope(places, journal), JOURNAL_BYTES)
    second, first = slope(places[half:], journal[half:]), slope(places[:half], journal[:half])
    yield at_most("journal: bytes a step, later half / earlier", second / first, 1 / FLAT)
    rest = [one["checkpoint_bytes"] - one["tensor_bytes"] for one in warm]
    yield at_most("checkpoint without tensors, bytes at the end", rest[-1], REST_BYTES)


def of_ranks(ranks: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Yield the rows about checkpoints."""
    parameters, sizes = [one["parameters"] for one in ranks], [one["bytes"] for one in ranks]
    line = statistics.linear_regression(parameters, sizes)
    off = max(abs(line.slope * x + line.intercept - y) / y for x, y in zip(parameters, sizes, strict=True))
    yield at_most("checkpoint, bytes a trainable parameter", line.slope, STATE_BYTES * 1.01)
    yield at_most("checkpoint, bytes besides", line.intercept, REST_BYTES)
    yield at_most(f"checkpoint: farthest from that line, ranks {RANKS[0]} to {RANKS[-1]}", off, 0.02)


def of_rows(rows: dict[int, list[dict[str, Any]]]) -> Iterator[Row]:
    """Yield the rows about data."""
    few, many = min(rows), max(rows)

    def all_of(name: str, count: int) -> list[float]:
        return [one[name] for one in rows[count]]

    speed = ratio(all_of("tokens_per_s", many), all_of("tokens_per_s", few))
    yield at_least(f"tokens/s, {many:,} rows / {few:,}", speed[0], FLAT, speed[1])
    for batching in BATCHINGS:
        times = {
            count: [one["verify_s"] + one["open_s"] + one[f"{batching}_s"] for one in found]
            for count, found in rows.items()
        }
        added = [1e6 * (b - a) / (many - few) for a, b in zip(times[few], times[many], strict=True)]
        yield told(f"{batching}: ready after, {many:,} rows, s", *middle(times[many]))
        value, spread = middle(added)
        yield at_most(f"{batching}: start-up, µs a row", value, ROW_US, spread)
    held = zip(all_of("resident_bytes", few), all_of("resident_bytes", many), strict=True)
    yield told("resident memory of data, bytes a row", *middle([(b - a) / (many - few) for a, b in held]))


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="2,000 steps, 100,000 rows: minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--picture", type=Path, metavar="STEM", help="draw STEM.svg")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-growth-") as folder:
        found = measure(Path(folder), SHAPES[given.quick])
    if given.picture:
        growth_picture.draw(found, given.picture)
    return finish([*of_steps(found.steps), *of_ranks(found.ranks), *of_rows(found.rows)], given.json)


if __name__ == "__main__":
    sys.exit(main())
