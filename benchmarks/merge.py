"""Compares the merge shard by shard with peft's merge_and_unload: memory, time and result, on the same model.

    pip install -c constraints.txt -e .
    python benchmarks/merge.py [--quick] [--json FILE]

Both sides write the same model in float32 from the same base and adapter, in files of the same size, each time in a new
process (merge_cell.py) with one thread, in turns. `original`: the adapter is added to the base's own weights; peft
loads, merges, saves. `dequantized`: the adapter is added to weights that were quantised to 4 bits and dequantised; peft
loads in 4 bits, dequantises, merges, saves.

Memory is resident memory (VmHWM) above the memory of the same process after all imports: libraries take half a gigabyte
on both sides. The total is reported, too. It includes pages of mapped files, so the sampled peak of the process's own
memory (RssAnon) has a target as well. For both sides, time begins after the imports and ends when all files are on disk
(fsync). Ratios are medians over pairs.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from report import finish
from report_rows import Row, at_most, middle, ratio, told

MIB = 2**20
CELL_S = 900
WAYS = ("original", "dequantized")
SHAPES: dict[bool, dict[str, Any]] = {
    True: {"layers": 6, "shard_bytes": 16_000_000, "pairs": 2},
    False: {"layers": 16, "shard_bytes": 32_000_000, "pairs": 5},
}
"""Sizes by `quick`: about 200 MB in 14 files, and 480 MB in 16."""
LARGEST_DIFFERENCE = 1e-6
"""Limit for the difference of any weight: both sides sum the same float32 numbers."""


def cell(**given: Any) -> dict[str, Any]:
    """Return the results of merge_cell.py. End the benchmark if it fails."""
    os.sync()  # write pending data of the previous cell, so that this cell does not pay for it
    script = Path(__file__).with_name("merge_cell.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(given)], capture_output=True, text=True, env=environment,
        timeout=CELL_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{given}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def pairs(work: Path, way: str, count: int, shard_bytes: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield pairs of merges, one of each side. The order alternates. The results of the last pair remain on disk."""
    for number in range(count):
        order = ("ours", "peft") if number % 2 else ("peft", "ours")
        found = {}
        for who in order:
            target = work / f"{way}-{who}"
            shutil.rmtree(target, ignore_errors=True)
            found[who] = cell(do="merge", work=str(work), who=who, way=way, shard_bytes=shard_bytes, to=target.name)
        yield found
        line = ", ".join(
            f"{who} {one['above_bytes'] / MIB:.0f} MiB {one['seconds']:.2f} s" for who, one in sorted(found.items())
        )
        print(f"{way:12} {line}", flush=True)


def judged(way: str, found: list[dict[str, dict[str, Any]]], difference: float) -> Iterator[Row]:
    """Yield the rows of one way to merge."""

    def of(who: str, key: str) -> list[float]:
        return [one[who][key] for one in found]

    def compared(key: str) -> tuple[float, float]:
        return ratio(of("ours", key), of("peft", key))

    for name, key, target in (
        ("peak memory above imports", "above_bytes", 0.35),
        ("the same without mapped files", "own_bytes", 0.35),
        ("time", "seconds", 1.0),
    ):
        value, spread = compared(key)
        yield at_most(f"{way}: {name}, ours / peft", value, target, spread)
    yield told(f"{way}: peak memory with libraries, ours / peft", *compared("peak_bytes"))
    yield at_most(f"{way}: largest difference of a weight", difference, LARGEST_DIFFERENCE)
    for who in ("ours", "peft"):
        yield told(f"{way}: {who}, MiB above imports", statistics.median(of(who, "above_bytes")) / MIB)
        yield told(f"{way}: {who}, seconds", *middle(of(who, "seconds")))


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer pairs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    shape = SHAPES[given.quick]
    with tempfile.TemporaryDirectory(prefix="ratchet-merge-") as folder:
        work = Path(folder)
        made = cell(do="make", work=str(work), layers=shape["layers"], shard_bytes=shape["shard_bytes"])
        rows = [told("model, MB", made["bytes"] / 1e6), told("its files", made["files"])]
        for way in WAYS:
            found = list(pairs(work, way, shape["pairs"], shape["shard_bytes"]))
            compared = cell(do="compare", work=str(work), names=[f"{way}-ours", f"{way}-peft"])
            rows += judged(way, found, compared["difference"])
    return finish(rows, given.json)


if __name__ == "__main__":
    sys.exit(main())
