"""Measures the time to the first step for benchmarks/waiting.py, and compares it with the first version of Ratchet.

The first version comes out of git (`git archive`), runs on the libraries that are installed now, and prepares a project
of its own from the same rows: the same settings as far as it knew them. Times are those of the journal.
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
"""The supervisor's own start; the worker's imports, checks, forecast; the model; the first step."""


@dataclass(frozen=True)
class Version:
    """A version of this project, and a project that its stages base and prepare have run in."""

    source: Path
    layout: ProjectLayout

    def run(self, *words: str) -> None:
        """Run one command. Raises CalledProcessError if it fails."""
        subprocess.run(self.command(*words), env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def command(self, *words: str) -> list[str]:
        """The command line of a verb."""
        return [sys.executable, "-m", "ratchet", "--project", str(self.layout.root), *words]

    @property
    def environment(self) -> dict[str, str]:
        """In which `ratchet` is this version."""
        return os.environ | {"PYTHONPATH": str(self.source)}


def rows_of_start(scratch: Path, rounds: int) -> list[Row]:
    """Seconds to the first step, each version's, and their ratio; nothing judged when git has no first version."""
    ours = Version(ROOT / "src", build(scratch / "ours"))
    first = first_version(scratch, ours.layout)
    if first is None:
        print(f"skipped: the first version (git has no commit {FIRST_VERSION} here)")
    versions = [ours] if first is None else [first, ours]
    for version in versions:  # byte code, page cache, MLflow's database
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
    """The first version and its project; None when git, or the commit, is not there."""
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
    """Its own settings, with our values for those that it knew, and that still mean the same."""
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
    """Seconds from the command to events of a new run's journal, and the processor time of both processes by then."""
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
    """Processes that the main thread of a process has started, and that live."""
    return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text("utf-8").split()]
