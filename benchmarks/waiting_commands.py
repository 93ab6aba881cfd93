"""Measures short commands for benchmarks/waiting.py: `--help`, `status`, `dvc repro` without work."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from report_rows import Row, at_most, middle, told
from ruamel.yaml import YAML
from small_project import SETTINGS, build

from ratchet.config import params_file
from ratchet.runs.journal import Journal
from ratchet.storage.layout import ProjectLayout

RATCHET = [sys.executable, "-m", "ratchet"]
DVC = [sys.executable, "-m", "dvc"]
LONG_JOURNAL = 100_000
STAGE_COUNT = 7
"""Number of stages in the dvc.yaml of a project, including `distill`."""
TOLD = ("promotions", "verify", "keys", "doctor")
"""Commands whose time is reported without a target."""
ROOT = Path(__file__).parents[1]


def rows_of_commands(scratch: Path, rounds: int) -> list[Row]:
    """Measure the seconds of each command, with a new process each time."""
    layout = trained(scratch / "finished")
    at = ["--project", str(layout.root)]
    rows = [told("python -c pass, s", *middle(times([sys.executable, "-c", "pass"], rounds)))]
    rows.append(at_most("ratchet --help, s", *judged([*RATCHET, "--help"], 0.3, rounds)))
    rows.append(at_most("ratchet status of a finished run, s", *judged([*RATCHET, *at, "status"], 0.5, rounds)))
    for verb in TOLD:
        rows.append(told(f"ratchet {verb}, s", *middle(times([*RATCHET, *at, verb], rounds))))
    longest = lengthened(layout)
    name = f"ratchet status, {longest:,} events, s"
    rows.append(at_most(name, *judged([*RATCHET, *at, "status"], 0.5, rounds)))
    return rows + rows_of_repro(scratch, rounds)


def judged(command: Sequence[str], target: float, rounds: int) -> tuple[float, float, float]:
    """Return median, target and spread: the figures of a row with an upper limit."""
    median, spread = middle(times(command, rounds))
    return median, target, spread


def times(command: Sequence[str], rounds: int, folder: Path | None = None) -> list[float]:
    """Return wall-clock seconds of each run. The first run, which fills caches, is left out."""
    found = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        found.append(time.perf_counter() - began_s)
    return found[1:]


def trained(folder: Path) -> ProjectLayout:
    """Create a project with a finished run."""
    layout = build(folder)
    short = SETTINGS.model_copy(update={"train": SETTINGS.train.model_copy(update={"epochs": 1})})
    layout.params.write_text(params_file.dump(short), encoding="utf-8")
    subprocess.run([*RATCHET, "--project", str(folder), "train"], check=True, stdout=subprocess.DEVNULL)
    return layout


def lengthened(layout: ProjectLayout) -> int:
    """Append steps to the journal of a project's only run, up to LONG_JOURNAL events. Return the number of its
    events."""
    path = next(layout.runs.glob("*/journal.jsonl"))
    lines = path.read_text(encoding="utf-8").splitlines()
    steps = [line for line in lines if json.loads(line)["event"] == "step"]
    journal = Journal(path, json.loads(steps[-1])["attempt"])
    for number in range(LONG_JOURNAL - len(lines)):
        event = json.loads(steps[number % len(steps)]) | {"step": len(steps) + number + 1}
        journal.append("step", **{key: value for key, value in event.items() if key not in ("event", "t", "attempt")})
    journal.close()
    return len(path.read_text(encoding="utf-8").splitlines())


def rows_of_repro(scratch: Path, rounds: int) -> list[Row]:
    """Measure `dvc repro` without work: Ratchet's pipeline, and a pipeline of as many stages with only a file each."""
    ours, empty = pipeline(scratch / "ours-repro", real=True), pipeline(scratch / "empty-repro", real=False)
    mine, floor = [], []
    for _ in range(rounds):
        mine += times([*DVC, "repro"], 1, ours)
        floor += times([*DVC, "repro"], 1, empty)
    share, spread = middle([1 - below / above for above, below in zip(mine, floor, strict=True)])
    return [
        told("dvc repro with nothing to do, s", *middle(mine)),
        told("the same, seven empty stages, s", *middle(floor)),
        at_most("our share of dvc repro with nothing to do", max(share, 0.0), 0.5),
        told("its interquartile range", spread * abs(share)),
    ]


def pipeline(folder: Path, real: bool) -> Path:
    """Create a project whose stages DVC considers done: its lock file describes the existing files."""
    folder.mkdir()
    environment = os.environ | {"DVC_NO_ANALYTICS": "1"}
    subprocess.run([*DVC, "init", "-q", "--no-scm"], cwd=folder, env=environment, check=True)
    if real:
        shutil.copytree(ROOT / "data", folder / "data")
        for name in ("dvc.yaml", "params.yaml"):
            shutil.copyfile(ROOT / name, folder / name)
        for stage in YAML(typ="safe").load(folder / "dvc.yaml")["stages"].values():
            for listed in (*stage["outs"], *stage.get("metrics", ()), *stage.get("plots", ())):
                out = folder / (next(iter(listed)) if isinstance(listed, dict) else listed)
                inside = out if out.suffix else out / "out.txt"
                inside.parent.mkdir(parents=True, exist_ok=True)
                inside.write_text(f"{out}", encoding="utf-8")
        for name in ("champion.json", "judgements.jsonl"):
            shutil.copyfile(ROOT / "experiments" / name, folder / "experiments" / name)
    else:
        text = "stages:\n"
        for number in range(STAGE_COUNT):
            (folder / f"{number}.txt").write_text(str(number), encoding="utf-8")
            needs = f"    deps: [{number - 1}.txt]\n" if number else ""
            text += f"  s{number}:\n    cmd: 'true'\n{needs}    outs: [{number}.txt]\n"
        (folder / "dvc.yaml").write_text(text, encoding="utf-8")
    subprocess.run([*DVC, "commit", "-q", "-f"], cwd=folder, env=environment, check=True)
    return folder
