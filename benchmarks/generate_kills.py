"""Kills a generation at random moments, and compares its output byte for byte with an undisturbed generation.

    python benchmarks/generate_kills.py [--quick] [--kills 20] [--prompts 2000] [--seed 0] [--json FILE]

The base of a small project (4 bits) answers the bundled requests at temperature 0.8. At each random moment, the
benchmark kills the worker (SIGKILL), kills worker and supervisor, or asks the supervisor to stop (SIGTERM). Some kills
occur during loading. The exit code is 0 only if no answer differs or is missing, and no stored answer was computed
again.
"""

import argparse
import csv
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from small_project import BUNDLED, SETTINGS, build

from ratchet.config.generate import Generate
from ratchet.config.settings import Settings
from ratchet.inference.spec import ANSWERS
from ratchet.runs.journal import JournalReader
from ratchet.storage import digests
from ratchet.storage.layout import RUNS_VARIABLE, ProjectLayout

PATIENCE_S = 600.0
POLL_S = 0.01
LOADING = 0.15
"""Share of kills that come before the worker is ready."""
TOKENS = 12
KINDS = ("worker", "both", "stop")


def settings_of(settings: Settings) -> Settings:
    """Return the settings of the same project with a section `generate`."""
    how = Generate(max_new_tokens=TOKENS, temperature=0.8, shard_rows=100, window_rows=256)
    machine = settings.machine.model_copy(update={"max_restarts": 10, "restart_delay_s": 0.0})
    return settings.model_copy(update={"generate": how, "machine": machine})


@dataclass
class Trial:
    """A generation in its own folder."""

    layout: ProjectLayout
    prompts: Path
    folder: Path
    model: str = "base"
    faults: Sequence[dict[str, Any]] = ()
    kinds: Counter[str] = field(default_factory=Counter)
    computed_again: int = 0
    """Answers that were stored at a kill, and were missing when the next worker was ready."""

    @property
    def output(self) -> Path:
        return self.folder / "answers.jsonl"

    @property
    def root(self) -> Path | None:
        """Directory of the run, if it exists."""
        found = sorted((self.folder / "runs" / ".generations").glob("[0-9a-f]*"))
        return found[0] if found else None

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the command as a process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {RUNS_VARIABLE: str(self.folder / "runs"), "RATCHET_FAULTS": json.dumps(self.faults)}
        command = [sys.executable, "-m", "ratchet", "--project", str(self.layout.root), "generate", str(self.prompts)]
        command += ["--output", str(self.output), "--model", self.model]
        with (self.folder / "said.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def finish(self) -> int:
        """Run the command to its end. Return the exit code."""
        return self.start().wait(PATIENCE_S)

    def readies(self) -> list[dict[str, Any]]:
        """Return the `worker_ready` event of each worker."""
        root = self.root
        return (
            []
            if root is None
            else [e.data for e in JournalReader(root / "journal.jsonl").read() if e.kind == "worker_ready"]
        )

    def kept(self) -> set[int]:
        """Return the positions with a stored answer. Call it while no process writes."""
        root = self.root
        if root is None:
            return set()
        found = {event.data["index"] for event in JournalReader(root / "ledger.jsonl").read()}
        for shard in root.glob(f"shards/shard-*/{ANSWERS}"):
            found |= {json.loads(line)["index"] for line in shard.read_bytes().splitlines()}
        return found

    def is_finished(self) -> bool:
        return self.root is not None and (self.root / "result").is_dir()


def worker_of(supervisor: int) -> int | None:
    """Return the supervisor's child process, if there is one."""
    try:
        children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def lines(trial: Trial) -> int:
    """Return the number of lines of the current ledger."""
    root = trial.root
    path = None if root is None else root / "ledger.jsonl"
    return path.read_bytes().count(b"\n") if path is not None and path.exists() else 0


def break_off(trial: Trial, new_answers: int | None, kind: str) -> bool:
    """Start the generation, and end it after this many new answers (None: while it loads). Return False if it finished
    before.

    Raises:
        RuntimeError: the generation did not get this far in PATIENCE_S.
    """
    ready_before = len(trial.readies())
    process = trial.start()
    deadline_s = time.monotonic() + PATIENCE_S
    base: int | None = None
    while process.poll() is None:
        if time.monotonic() > deadline_s:
            process.kill()
            raise RuntimeError(f"{trial.folder}: did not come so far in {PATIENCE_S:g} s")
        worker = worker_of(process.pid)
        if new_answers is None and worker is not None:
            break
        if base is None and len(trial.readies()) > ready_before:
            base = lines(trial)
        if base is not None and new_answers is not None and lines(trial) - base >= new_answers:
            break
        time.sleep(POLL_S)
    if process.poll() is not None:
        return False
    worker = worker_of(process.pid)
    if kind == "stop":
        process.send_signal(signal.SIGTERM)
    else:
        if worker is not None:
            os.kill(worker, signal.SIGKILL)
        process.kill()
    process.wait(PATIENCE_S)
    while worker is not None and Path(f"/proc/{worker}/stat").exists() and _lives(worker):
        time.sleep(POLL_S)
    return not trial.is_finished()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def alone(trial: Trial, new_answers: int) -> bool:
    """Start the generation, kill only its worker after this many answers, and stop it when the next worker is ready."""
    ready_before = len(trial.readies())
    process = trial.start()
    deadline_s, base, struck = time.monotonic() + PATIENCE_S, 0, False
    while process.poll() is None and time.monotonic() < deadline_s:
        readies = len(trial.readies()) - ready_before
        if readies == 1 and not base:
            base = lines(trial) + 1
        worker = worker_of(process.pid)
        if not struck and readies == 1 and worker is not None and lines(trial) + 1 - base >= new_answers:
            os.kill(worker, signal.SIGKILL)
            struck = True
        if readies >= 2:
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(POLL_S)
    process.wait(PATIENCE_S)
    return not trial.is_finished()


def campaign(trial: Trial, kills: int, prompts: int, seed: int) -> int:
    """Kill the generation this many times (fewer if it finishes before), then let it finish. Return the number of
    kills.

    Raises:
        RuntimeError: the last start failed.
    """
    draw, done = random.Random(seed), 0
    each = max(2, 2 * prompts // (kills + 2))
    marks: list[tuple[int, int]] = []
    for _ in range(kills):
        kind, new, loading = draw.choice(KINDS), draw.randint(1, each), draw.random() < LOADING
        if kind == "worker" and not loading:
            goes_on = alone(trial, new)
        else:
            goes_on = break_off(trial, None if loading else new, kind)
        done += 1
        trial.kinds[f"{kind} while loading" if loading else kind] += 1
        if not goes_on:
            break
        marks.append((len(trial.readies()), len(trial.kept())))
    if (code := trial.finish()) != 0:
        raise RuntimeError(f"{trial.folder}: the last start ended with {code}; see said.log")
    begun = [ready["start_step"] for ready in trial.readies()]
    trial.computed_again = sum(max(0, kept - begun[number]) for number, kept in marks if number < len(begun))
    trial.computed_again += sum(max(0, a - b) for a, b in pairwise(begun))
    return done


def places(output: Path) -> list[tuple[str, int]]:
    """Return id and sample of every record, in order."""
    records = (json.loads(line) for line in output.read_bytes().splitlines())
    return [(record["id"], record["sample"]) for record in records]


def write_prompts(path: Path, count: int) -> None:
    """Write this many of the bundled requests."""
    with (BUNDLED / "raw" / "support.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(islice(csv.DictReader(stream), count))
    if len(rows) < count:
        raise SystemExit(f"--prompts {count}: there are {len(rows)}")
    lines_of = (json.dumps({"id": f"r{n}", "prompt": row["request"]}) + "\n" for n, row in enumerate(rows))
    path.write_text("".join(lines_of), encoding="utf-8")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="4 kills over 300 prompts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kills, count = (4, 300) if options.quick else (options.kills, options.prompts)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        layout = build(folder / "project", settings=settings_of(SETTINGS))
        prompts = folder / "prompts.jsonl"
        write_prompts(prompts, count)
        whole, broken = (Trial(layout, prompts, folder / name) for name in ("whole", "broken"))
        if (code := whole.finish()) != 0:
            raise SystemExit(f"the undisturbed generation ended with {code}: {(whole.folder / 'said.log').read_text()}")
        done = campaign(broken, kills, count, options.seed)
        asked = [(f"r{number}", 0) for number in range(count)]
        found = [
            {"name": "kills", "value": done, "target": kills, "ok": done == kills},
            {"name": "same bytes", **_equal(digests.hash_file(whole.output), digests.hash_file(broken.output))},
            {"name": "answers lost or doubled", **_equal(int(places(broken.output) != asked), 0)},
            {"name": "kept answers computed again", **_equal(broken.computed_again, 0)},
        ]
        kinds = ", ".join(f"{name} {times}" for name, times in sorted(broken.kinds.items()))
        print(f"{count:,} prompts; {len(broken.readies())} workers became ready; killed: {kinds}")
    for row in found:
        print(f"  {row['name']:30} {row['value']!s:20.20} {'ok' if row['ok'] else 'MISSED: ' + str(row['target'])}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in found) else 1


def _equal(value: object, target: object) -> dict[str, Any]:
    return {"value": value, "target": target, "ok": value == target}


if __name__ == "__main__":
    sys.exit(main())
