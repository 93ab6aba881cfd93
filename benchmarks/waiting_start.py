"""Measures the time to the first step for benchmarks/waiting.py, and compares it with the first version of Ratchet.

The first version is taken from git (`git archive`). It runs with the libraries that are installed now, and prepares its
own project from the same rows, with the same settings where they exist in it. Times are those of the journal.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report_rows import Row, at_most, middle, ratio, told
from ruamel.yaml import YAML
from small_project import build
from waiting_overhead import PATIENCE_S, cpu_s, events_of

from ratchet.config import params_file
from ratchet.storage.layout import ProjectLayout

FIRST_VERSION = "2705fea"
ROOT = Path(__file__).parents[1]
NO_STAGES = "stages: {}\n"
KNOWN_SECTIONS = ("base", "prepare", "train", "machine")
BREAKDOWN = ("attempt_started", "memory_forecast", "worker_ready", "step")
"""Events that end the parts of a start: the supervisor's own start; the worker's imports, checks and forecast; loading
of the model; the first step."""


@dataclass(frozen=True)
class Version:
    """A version of Ratchet, and a project in which its stages base and prepare have run."""

    source: Path
    layout: ProjectLayout

    def run(self, *words: str) -> None:
        """Run one command. Raises CalledProcessError if it fails."""
        subprocess.run(self.command(*words), env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def command(self, *words: str) -> list[str]:
        """Return the command line of a command of this version."""
        return [sys.executable, "-m", "ratchet", "--project", str(self.layout.root), *words]

    @property
    def environment(self) -> dict[str, str]:
        """Environment in which `ratchet` is this version."""
        return os.environ | {"PYTHONPATH": str(self.source)}


def rows_of_start(scratch: Path, rounds: int) -> list[Row]:
    """Measure the seconds to the first step of each version, and return rows with their ratio. Without the first
    version in git there are no targets."""
    ours = Version(ROOT / "src", build(scratch / "ours"))
    first = first_version(scratch, ours.layout)
    if first is None:
        print(f"skipped: the first version (git has no commit {FIRST_VERSION} here)")
    versions = [ours] if first is None else [first, ours]
    for version in versions:  # a warm-up: byte code, page cache, MLflow's database
        started(version)
    found: dict[Path, list[dict[str, float]]] = {version.source: [] for version in versions}
    for _ in range(rounds):
        for version in versions:
            found[version.source].append(started(version))
    mine = found[ours.source]
    rows = [told(f"start: {name} after, s", *middle([one[name] for one in mine])) for name in mine[0]]
    if first is not None:
        theirs = found[first.source]
        rows += [told(f"first version's start: {name} after, s", *middle([one[name] for one in theirs]))
                 for name in theirs[0]]  # fmt: skip
        for name in ("step", "CPU"):
            value, spread = ratio([one[name] for one in mine], [one[name] for one in theirs])
            what = "seconds to the first step" if name == "step" else "processor time to the first step"
            rows.append(at_most(f"start against the first version: {what}", value, 0.5, spread))
    return rows


def first_version(scratch: Path, ours: ProjectLayout) -> Version | None:
    """Create the first version and its project. Return None if git or the commit is missing."""
    source = scratch / "first"
    source.mkdir()
    try:
        packed = subprocess.run(
            ["git", "-C", str(ROOT), "archive", FIRST_VERSION], check=True, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    subprocess.run(["tar", "-x", "-C", str(source)], input=packed.stdout, check=True)
    layout = ProjectLayout(scratch / "first-project")
    for mine, its in ((ours.raw, layout.raw), (ours.text, layout.text)):
        shutil.copytree(mine, its)
    for folder in (layout.tasks, layout.mlruns, layout.experiments):
        folder.mkdir(parents=True)
    shutil.copyfile(source / "experiments" / "champion.json", layout.champion)
    (layout.root / "dvc.yaml").write_text(NO_STAGES, encoding="utf-8")
    yaml = YAML(typ="safe")
    its_own = yaml.load(source / "params.yaml")
    settings = params_file.load(ours.params).model_dump(mode="json")
    for name in KNOWN_SECTIONS:
        its_own[name] = as_known(its_own[name], settings[name])
    its_own["prepare"]["sources"] = ["data/raw/support.csv"]
    its_own["machine"]["checkpoint_every_steps"] = settings["machine"]["checkpoint_every"]
    yaml.dump(its_own, layout.params)
    version = Version(source / "src", layout)
    for stage in ("base", "prepare"):
        version.run(stage)
    return version


def as_known(its: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return the old version's settings, with current values for settings that it has and that have the same type."""
    found = dict(its)
    for name, value in its.items():
        if name in ("sources", "targets") or name not in ours:
            continue
        if isinstance(value, dict):
            found[name] = as_known(value, ours[name])
        elif kind(ours[name]) is kind(value):
            found[name] = ours[name]
    return found


def kind(value: Any) -> type:
    """Return the kind of a setting. All numbers are of one kind."""
    return float if type(value) is int else type(value)


def started(version: Version) -> dict[str, float]:
    """Return the seconds from the command to events of a new run's journal, and the CPU time of both processes up to
    the first step."""
    shutil.rmtree(version.layout.runs, ignore_errors=True)
    began_s = time.time()
    process = subprocess.Popen(
        version.command("train"), env=version.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None and time.time() - began_s < PATIENCE_S:
            first = {event.kind: event.t - began_s for event in reversed(events_of(version.layout))}
            if "step" in first:
                used_s = sum(map(cpu_s, (process.pid, *children(process.pid))))
                return {name: first[name] for name in BREAKDOWN if name in first} | {"CPU": used_s}
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    raise SystemExit(f"{version.layout.root}: no first step; see worker.log in {version.layout.runs}")


def children(process: int) -> list[int]:
    """Return the running child processes that the main thread of a process has started."""
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text("utf-8").split()]
