"""Measures `ratchet compare` with a journal of ten million events.

    pip install -c constraints.txt -e .
    python benchmarks/compare.py [--quick] [--json FILE]

The benchmark first writes the ten million events, which need 2.5 GB of disk. Targets: at most 10 s on two processors,
including imports and the page; at most 600 MB of memory; the page shows the exact value of the only spike among the
losses. `--quick`: one million events.
"""

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import finish

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.journal import JournalEvent
from ratchet.storage.layout import ProjectLayout

MOST_S, MOST_MB = 10.0, 600.0
SPIKE = 777.0
MOST_EVENTS, CHUNK, SHORT = 10_000_000, 20_000, 1_000


def main() -> int:
    """Run the benchmark. The exit code is 0 if all targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the events")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args()
    most = MOST_EVENTS // 10 if options.quick else MOST_EVENTS
    with tempfile.TemporaryDirectory(prefix="ratchet-compare-") as folder:
        layout = ProjectLayout(Path(folder).resolve())
        layout.params.write_text(params_file.dump(Settings()), encoding="utf-8")
        (layout.root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
        runs = [write(layout, seed, events) for seed, events in enumerate((most, SHORT))]
        page = layout.root / "page.html"
        command = [
            sys.executable,
            "-m",
            "ratchet",
            "--project",
            str(layout.root),
            "compare",
            *runs,
            "--output",
            str(page),
        ]
        begun = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        took_s = time.perf_counter() - begun
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = f": {SPIKE:g} " in page.read_text(encoding="utf-8")
        size = page.stat().st_size
    name = f"compare, {most:,} events"
    processor_s, memory_mb = used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3
    rows = [
        {"name": f"{name}, s", "value": took_s, "target": f"<= {MOST_S:g}", "ok": took_s <= MOST_S},
        {"name": f"{name}, s of processors", "value": processor_s, "target": f"<= {2 * MOST_S:g}",
         "ok": processor_s <= 2 * MOST_S},
        {"name": f"{name}, MB of memory", "value": memory_mb, "target": f"<= {MOST_MB:g}", "ok": memory_mb <= MOST_MB},
        {"name": "page, MB", "value": size / 1e6, "target": "<= 3", "ok": size <= 3e6},
        {"name": "spikes found", "value": float(found), "target": "1", "ok": found},
    ]  # fmt: skip
    return finish(rows, options.json)


def write(layout: ProjectLayout, seed: int, events: int) -> str:
    """Write a run with this many steps in its journal, and return its id."""
    spec = RunSpec(train=Train(seed=seed), data_digest="d" * 64, base_digest="b" * 64)
    paths = RunPaths(layout.runs / spec.run_id)
    paths.root.mkdir(parents=True)
    spec.save(paths.spec)
    draw = random.Random(seed)
    with paths.journal.open("wb") as stream:
        stream.write(JournalEvent("attempt_started", 1.0, 1, {"pid": 1, "code_version": "x"}).line())
        for first in range(1, events + 1, CHUNK):
            numbers = range(first, min(first + CHUNK, events + 1))
            stream.write("".join(line(step, events, draw) for step in numbers).encode())
            stream.write(JournalEvent("validation", 1.0, 1, {"step": numbers[-1], "loss": 1.0, "seconds": 1.0}).line())
    return spec.run_id


def line(step: int, events: int, draw: random.Random) -> str:
    """Return a step event in the format of a worker."""
    loss = SPIKE if events > SHORT and step == events * 2 // 3 else 1.0 + 2.0 * step**-0.2 + 0.1 * draw.random()
    return (
        f'{{"attempt":1,"batch":"{draw.getrandbits(48):012x}","event":"step","grad_norm":{draw.random()!r},'
        f'"input_tokens":{500 + step % 37},"learning_rate":{2e-4 * (1 - step / events / 2)!r},"loss":{loss!r},'
        f'"step":{step},"step_s":0.0125,"t":{1.7e9 + step / 80:.3f},"trained_tokens":{90 + step % 11}}}\n'
    )


if __name__ == "__main__":
    raise SystemExit(main())
