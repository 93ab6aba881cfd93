"""Runs all benchmarks one after the other, each in its own process, and writes their tables to docs/evidence_speed.md.

    make bench                      installs the peers first
    python benchmarks/everything.py [--only NAME ...] [--full] [--document FILE] [--json FOLDER]

All quick modes together take about half an hour on two idle cores. The planned time of each benchmark is printed, and a
benchmark that takes three times as long is killed. After a failure or a missed target all others still run. The exit
code is 0 only if every row of every benchmark is ok, no ratio of ours to a peer is worse than in the landed document by
more than 5 % plus the spread of both measurements (regions.regressions), and all quick modes took at most half an hour;
it is 2, before anything runs, if the document lacks a region. A benchmark reports peers that are not installed.

The landed document is the one in git's HEAD; outside git, the one on disk. Full modes are not compared with quick ones.

In the document only regions between `<!-- measured: NAME -->` and `<!-- end -->` are written, each as soon as its
benchmark has ended.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import regions
import surroundings
from regions import Outcome, Shown

from ratchet.storage import files

HERE = Path(__file__).parent
ROOT = HERE.parent
DOCUMENT = ROOT / "docs" / "evidence_speed.md"
SUMMARY = "summary"
"""Region with machine, versions and all benchmarks."""
PATIENCE = 3.0
"""A quick mode is killed after this multiple of its planned time."""
MINUTES = 30.0
SKIPPED = "skipped: "
"""Prefix of a line in which a benchmark reports a part that it left out, and the reason."""


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: one file of this folder."""

    name: str
    planned_s: float
    """Planned seconds of the quick mode on two idle cores."""
    shown: Shown = "all"
    arguments: tuple[str, ...] = ()
    is_quick: bool = True
    """Whether it is part of the quick modes' half hour; otherwise, only --full and --only run it."""

    def command(self, full: bool) -> list[str]:
        """Return the command line for the project's root, without the option for the JSON file."""
        quick = () if full else ("--quick",)
        return ["python", f"benchmarks/{self.name}.py", *quick, *self.arguments]


BENCHMARKS = (
    Benchmark("train", 310),
    Benchmark("evaluate", 190),
    Benchmark("waiting", 150),
    Benchmark("growth", 150, arguments=("--picture", "docs/growth"), is_quick=False),
    Benchmark("memory", 125, is_quick=False),
    Benchmark("merge", 85),
    Benchmark("cpu_kernels", 25),
    Benchmark("four_bits", 60, is_quick=False),
    Benchmark("prepare", 160),
    Benchmark("sweep", 260, arguments=("--equal-tokens",)),
    Benchmark("sweep_curves", 60),
    Benchmark("together", 130, is_quick=False),
    Benchmark("preference", 130),
    Benchmark("generate", 100),
    Benchmark("threads", 100),
    Benchmark("distill", 200, shown="missed"),
    Benchmark("callbacks", 150, is_quick=False),
    Benchmark("compare", 12),
    # The parts `peer` and `inside` take as long again; only the full mode runs them.
    # Without a peer: their promises are also proved by tests/proofs.
    Benchmark("chaos", 140, shown="missed", arguments=("--only", "damage", "killed", "campaign"), is_quick=False),
    Benchmark("formats", 95, shown="missed", is_quick=False),
    Benchmark("gate_power", 45, shown="missed", is_quick=False),
    Benchmark("judge_power", 40, shown="missed", is_quick=False),
    Benchmark("monitor_power", 200, shown="missed", is_quick=False),
    Benchmark("baseline", 2),
)


def measure(benchmark: Benchmark, full: bool, target: Path) -> Outcome:
    """Run one benchmark. Return its rows, or the reason for their absence."""
    command, begun, started = benchmark.command(full), datetime.now(UTC), time.monotonic()
    planned_s = None if full else benchmark.planned_s
    lines, code = run([sys.executable, *command[1:], "--json", str(target)], planned_s and PATIENCE * planned_s)
    took_s = time.monotonic() - started
    found, failure = read(target, code, lines)
    skipped = [line.removeprefix(SKIPPED) for line in lines if line.startswith(SKIPPED)]
    return Outcome(
        benchmark.name, " ".join(command), begun, took_s, planned_s, found.get("rows", ()),
        found.get("surroundings", {}), skipped, failure,
    )  # fmt: skip


def run(command: Sequence[str], limit_s: float | None) -> tuple[list[str], int | None]:
    """Run a command, print its output at once, and return output and exit code. The code is None after `limit_s`."""
    late, lines = threading.Event(), []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    ) as process:  # fmt: skip

        def end() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        clock = threading.Timer(limit_s or threading.TIMEOUT_MAX, end)
        clock.daemon = True
        clock.start()
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip("\n"))
                print(f"    {lines[-1]}", flush=True)
            process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            clock.cancel()
    return lines, None if late.is_set() else process.returncode


def read(target: Path, code: int | None, lines: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return the benchmark's JSON, and a failure: a timeout, or an exit code that no row explains."""
    if code is None:
        return {}, f"ended after {PATIENCE:g} times the planned time"
    try:
        found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the file is missing or incomplete
        last = next((line for line in reversed(lines) if line.strip()), "nothing was printed")
        text = last.strip().replace(f"{ROOT}/", "").replace(sys.executable, "python")
        return {}, f"exit code {code}: {text}"
    explained = code == 0 or any(not row["ok"] for row in found["rows"])
    return found, "" if explained else f"exit code {code} though all rows are ok"


def chosen(only: Sequence[str], full: bool) -> list[Benchmark]:
    """Return the benchmarks with these names. Without names, return those of the quick modes, or with `full` all."""
    return [one for one in BENCHMARKS if (one.name in only if only else full or one.is_quick)]


def missing_regions(text: str, benchmarks: Sequence[Benchmark]) -> list[str]:
    """Return the names of regions that the document does not have exactly once."""
    there = regions.names(text)
    return [name for name in (SUMMARY, *(one.name for one in benchmarks)) if there.count(name) != 1]


def put(document: Path, name: str, content: str) -> None:
    """Write one region. The text is read again, because a person may be editing it."""
    files.write_atomic(document, regions.filled(document.read_text(encoding="utf-8"), name, content))


def landed(document: Path) -> str:
    """Return the document of git's last commit, so that a second run does not compare itself with the first; without
    git, the document on disk."""
    command = ["git", "-C", str(document.parent), "show", f"HEAD:./{document.name}"]
    try:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return document.read_text(encoding="utf-8")
    return done.stdout.decode()


def told(outcome: Outcome) -> str:
    """Return a progress line."""
    planned = f" of {outcome.planned_s:,.0f} planned" if outcome.planned_s else ""
    state = outcome.failure or (f"{len(outcome.missed)} not ok" if outcome.missed else "ok")
    return f"{outcome.name}: {outcome.took_s:,.0f} s{planned}; {state}"


def main() -> int:
    """Run the benchmarks. The exit code is 1 if a benchmark failed, a target was missed, a ratio is worse than in the
    landed document, or the total time is too long; it is 2 if the document lacks a region."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[one.name for one in BENCHMARKS], default=(), metavar="NAME")
    parser.add_argument("--full", action="store_true", help="full modes: hours")
    parser.add_argument("--document", type=Path, default=DOCUMENT, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="keep each benchmark's JSON there")
    given = parser.parse_args()
    benchmarks = chosen(given.only, given.full)
    if lacking := missing_regions(given.document.read_text(encoding="utf-8"), benchmarks):
        print(f"{given.document}: one region each is needed for {', '.join(lacking)}; see regions.py", file=sys.stderr)
        return 2
    outcomes, worse, reference = [], [], "" if given.full else landed(given.document)
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as scratch:
        folder = (given.json or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for one in benchmarks:
            planned = "" if given.full else f", {one.planned_s:,.0f} s planned"
            print(f"{' '.join(one.command(given.full))}{planned}", flush=True)
            target = folder / f"{one.name}.json"
            target.unlink(missing_ok=True)
            outcomes.append(measure(one, given.full, target))
            worse += regions.regressions(reference, outcomes[-1])
            put(given.document, one.name, regions.written(outcomes[-1], one.shown))
            print(told(outcomes[-1]), flush=True)
    if not given.only:
        put(given.document, SUMMARY, regions.summary(outcomes, surroundings.since_start()))
    return ended(outcomes, worse, judge_time=not given.full)


def ended(outcomes: Sequence[Outcome], worse: Sequence[str], judge_time: bool) -> int:
    """Print a summary. Return 0 if all benchmarks are ok, no ratio is worse than the landed one and, with `judge_time`,
    the benchmarks took at most MINUTES in total."""
    minutes = sum(one.took_s for one in outcomes) / 60
    lines = [*map(told, outcomes), *(f"worse than landed: {line}" for line in worse)]
    print("\n".join(["", *lines, f"all: {minutes:.1f} min, at most {MINUTES:g} planned"]))
    late = judge_time and minutes > MINUTES
    return 0 if all(one.ok for one in outcomes) and not worse and not late else 1


if __name__ == "__main__":
    sys.exit(main())
