"""Compares generation with transformers' text-generation pipeline with a fixed batch: tokens per second, and texts.

    pip install -c constraints.txt -e .
    python benchmarks/generate.py [--quick] [--json FILE]

A Llama of 8 layers with random weights answers passages of the bundled text. Lengths of passages vary widely; a random
fiftieth of the vocabulary ends an answer, so lengths of answers vary widely too. Both sides compute greedily in float32
with one thread on the same loaded model (generate_cell.py), in turns, and the order alternates. The pipeline receives
the texts in their original order, which is its usual use; Ratchet sorts them by itself. The target applies to the
pipeline's best batch size.

Tokens are those of the answers, including end tokens; both sides produce the same number. Also reported: CPU time, the
number of tokens and mean log-probabilities that rounding leaves undecided, and the cost of sampling.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from report import finish
from report_rows import Row, at_least, count, middle, ratio, told

CELL_S = 3600
LEAST_RATIO = 1.5
SHAPES: dict[bool, dict[str, Any]] = {
    True: {"prompts": 96, "tokens": 192, "pairs": 2, "batches": [16]},
    False: {"prompts": 256, "tokens": 192, "pairs": 5, "batches": [8, 16, 32]},
}
"""Sizes by `quick`; `batches` are batch sizes of the pipeline."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def cell(shape: dict[str, Any]) -> dict[str, Any]:
    """Return the results of generate_cell.py. End the benchmark if it fails."""
    line = [sys.executable, str(Path(__file__).with_name("generate_cell.py")), json.dumps(shape)]
    done = subprocess.run(
        line, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT, timeout=CELL_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}: exit code {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows_of(found: dict[str, Any]) -> list[Row]:
    """Return the rows with targets and the rows without."""
    pairs, tokens = found["pairs"], found["tokens"]

    def each(who: str, what: str) -> list[float]:
        return [pair[who][what] for pair in pairs]

    batches = [who for who in pairs[0] if who != "ours"]
    best = min(batches, key=lambda who: middle(each(who, "seconds"))[0])
    rows = [
        at_least("tokens/s, ours / pipeline", *_with_target(*ratio(each(best, "seconds"), each("ours", "seconds")))),
        count("answers with another text", max(pair["changed"][best] for pair in found["texts"])),
        count("answers that another batch changes", found["moved"]),
        told("CPU time, pipeline / ours", *ratio(each(best, "cpu_s"), each("ours", "cpu_s"))),
    ]
    for who in ("ours", *batches):
        name = "ours" if who == "ours" else f"pipeline, batch {who}"
        rows.append(told(f"{name}, tokens/s", *middle([tokens / one for one in each(who, "seconds")])))
    figures = found["figures"]
    rows += [
        told("tokens decided by a plain pass", figures["tokens_rechecked"] / figures["tokens_chosen"]),
        told("mean log-probabilities computed again", figures["means_recomputed"] / figures["answers"]),
        told("drawn: tokens/s of greedy (CPU time)", found["drawn"]),
    ]
    return rows


def _with_target(value: float, spread: float) -> tuple[float, float, float]:
    return value, LEAST_RATIO, spread


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts, shorter answers, one batch size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    return finish(rows_of(cell(SHAPES[given.quick])), given.json)


if __name__ == "__main__":
    sys.exit(main())
