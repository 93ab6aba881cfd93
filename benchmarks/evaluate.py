"""Compares evaluation with the `lm_eval` command: requests per second and scores, on the same model and tasks.

    pip install -c constraints.txt -e .
    python benchmarks/evaluate.py [--quick] [--json FILE]

A Llama of 17 million random parameters evaluates three tasks over the bundled text: `passages` (a long passage, four
short endings), `shots` (the same with short passages, after five examples which, as in MMLU, are the same for all
documents) and `endings` (one ending each, so requests have no common prefix). Both sides compute in float32, with one
thread and the same batch size, each time in a new process (evaluate_cell.py). They take turns, and the order
alternates.

The timed part is the harness's function `evaluate`: building requests, computing, scoring. Both sides call it. The time
of Ratchet includes writing results to disk, and a test of what the model's cache supports. CPU time is reported as
well, because other processes affect it less. The time of the whole command is reported too: a process from start to
end, including imports, loading and the command's index of 14,000 tasks.

Labels: scores all 20 labels as answers to a prompt (models/scoring.py), and compares this with computing prompt and
label again for each pair.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evaluate_cell import CHOICES, command
from report import finish
from report_rows import Row, at_least, at_most, count, middle, ratio, told

CELL_S = 1800
BATCH_ROWS = 8
TASKS = {"passages": CHOICES, "shots": CHOICES, "endings": 1}
"""Number of requests per document."""
LEAST_RATIO = 1.5
ALONE = "endings"
"""Task whose requests have no common prefix; its speed is reported without a target."""
SHAPES: dict[bool, dict[str, int]] = {
    True: {"documents": 9, "pairs": 2, "commands": 1, "prompts": 8},
    False: {"documents": 40, "pairs": 5, "commands": 3, "prompts": 24},
}
"""Sizes by `quick`."""
LARGEST_DIFFERENCE_NATS = 1e-4
"""Limit for the difference of any continuation's log-likelihood: both sides sum the same float32 numbers."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

Pair = dict[str, dict[str, Any]]


def cell(work: Path, **given: Any) -> dict[str, Any]:
    """Return the results of evaluate_cell.py. End the benchmark if it fails."""
    text = json.dumps({**given, "work": str(work)})
    return dict(json.loads(process(work, [str(Path(__file__).with_name("evaluate_cell.py")), text]).splitlines()[-1]))


def process(work: Path, line: list[str]) -> str:
    """Run a new Python process in the folder that contains the tasks' relative paths. Return its output."""
    done = subprocess.run(
        [sys.executable, *line], capture_output=True, text=True, cwd=work, env=os.environ | ENVIRONMENT,
        timeout=CELL_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def pairs(work: Path, number: int) -> Iterator[Pair]:
    """Yield pairs of evaluations of all tasks, one of each side. The order alternates."""
    for i in range(number):
        order = ("ours", "theirs") if i % 2 else ("theirs", "ours")
        found = {
            who: cell(work, do=who, tasks=list(TASKS), batch_rows=BATCH_ROWS, out=f"{who}-{i}") for who in order
        }  # fmt: skip
        yield found
        line = ", ".join(
            f"{task} {found['ours'][task]['seconds']:.2f} s, lm_eval {found['theirs'][task]['seconds']:.2f} s"
            for task in TASKS
        )
        print(line, flush=True)


def commands(work: Path, number: int) -> Iterator[tuple[float, float]]:
    """Yield the seconds of whole processes of Ratchet and lm_eval. Each process evaluates all tasks."""
    for i in range(number):
        start = time.perf_counter()
        cell(work, do="ours", tasks=list(TASKS), batch_rows=BATCH_ROWS, out=f"whole-{i}")
        between = time.perf_counter()
        process(work, ["-m", "lm_eval", *command(work, list(TASKS), BATCH_ROWS, f"whole-{i}")])
        yield between - start, time.perf_counter() - between


def judged(task: str, found: list[Pair], requests: int) -> Iterator[Row]:
    """Yield the rows of one task."""

    def each(who: str, what: str) -> list[float]:
        return [pair[who][task][what] for pair in found]

    quicker, spread = ratio(each("theirs", "seconds"), each("ours", "seconds"))
    name = f"{task}: requests/s, ours / lm_eval"
    yield told(name, quicker, spread) if task == ALONE else at_least(name, quicker, LEAST_RATIO, spread)
    yield told(f"{task}: CPU time, lm_eval / ours", *ratio(each("theirs", "cpu_s"), each("ours", "cpu_s")))
    for who, name in (("ours", "ours"), ("theirs", "lm_eval")):
        yield told(f"{task}: {name}, requests/s", *middle([requests / one for one in each(who, "seconds")]))
    largest, changed = 0.0, 0
    for pair in found:
        ours, theirs = (pair[who][task]["documents"] for who in ("ours", "theirs"))
        changed += len(ours.keys() ^ theirs.keys())
        for name in ours.keys() & theirs.keys():
            largest = max(largest, *(abs(a - b) for a, b in zip(ours[name][0], theirs[name][0], strict=True)))
            changed += ours[name][1] != theirs[name][1]
    yield at_most(f"{task}: largest difference of a log-likelihood, nats", largest, LARGEST_DIFFERENCE_NATS)
    yield count(f"{task}: documents with another accuracy", changed)


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer documents and pairs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    shape = SHAPES[given.quick]
    with tempfile.TemporaryDirectory(prefix="ratchet-evaluate-") as folder:
        work = Path(folder)
        made = cell(work, do="make", documents=shape["documents"], layers=8)
        rows = [told("model, million parameters", made["parameters"] / 1e6)]
        found = list(pairs(work, shape["pairs"]))
        for task, requests in TASKS.items():
            rows += judged(task, found, requests * shape["documents"])
        ours, theirs = zip(*commands(work, shape["commands"]), strict=True)
        rows += [
            told("whole command, lm_eval / ours, time", *ratio(theirs, ours)),
            told("whole command: ours, seconds", *middle(ours)),
            told("whole command: lm_eval, seconds", *middle(theirs)),
        ]
        one = [cell(work, do="labels", prompts=shape["prompts"], batch_rows=BATCH_ROWS) for _ in range(shape["pairs"])]
        anew, shared = [x["anew_s"] for x in one], [x["shared_s"] for x in one]
        rows.append(told("labels: prompt computed once / for each label, labels/s", *ratio(anew, shared)))
    return finish(rows, given.json)


if __name__ == "__main__":
    sys.exit(main())
