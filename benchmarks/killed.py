"""Kills the workers of real trainings, and checks the ledger of samples, the series of metrics, and the cost of a kill.

`python benchmarks/killed.py PROJECT` trains the project as `ratchet train` does, without MLflow.
"""

import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from small_project import linked, rows_of

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import EXIT_BUG, EXIT_INPUT, EXIT_OK, RatchetError
from ratchet.runs.fault_injection.injection import VARIABLE, InjectedFault
from ratchet.runs.fault_injection.injectors import find_worker
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.stages.project import Project
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout

PATIENCE_S = 300.0
POLL_S = 0.003
INTERVAL_STEPS = 4
"""Optimizer steps between two checkpoints of these trainings."""
MOST_STEPS_BETWEEN = 6
"""A worker is killed after 1 to this many new steps."""
STALL_S, SLOW_S = 5.0, 0.3
"""Limits of row R15: a step takes less than STALL_S; a save of about 25 operations of SLOW_S takes longer."""
RECOVERY_P50_S, RECOVERY_P95_S = 3.0, 6.0
"""Targets of row R22 from a kill to the first new step, in seconds."""
DETECTION_S = 3.4
"""Target of row R22 in seconds. torchrun needed 3.36 s to the first step of a trivial script's next worker (own
measurement)."""


@dataclass
class Deaths:
    """Cost of each kill."""

    lost_steps: list[int] = field(default_factory=list)
    """Steps that had been logged and were computed again."""
    to_attempt_s: list[float] = field(default_factory=list)
    """Seconds from the kill until the supervisor starts the next worker."""
    to_ready_s: list[float] = field(default_factory=list)
    """Seconds from there until model, data and checkpoint are loaded, imports included."""
    to_step_s: list[float] = field(default_factory=list)
    """Seconds from the kill until the first step that had not been logged before."""
    save_steps: int = 0
    """Largest number of steps that were computed during one save."""


class Follower:
    """Reads a run's journal as it grows."""

    def __init__(self, layout: ProjectLayout) -> None:
        self._layout = layout
        self._reader: JournalReader | None = None
        self.events: list[JournalEvent] = []

    def look(self) -> list[JournalEvent]:
        """Return new events, and append them to `events`."""
        if self._reader is None:
            found = list(self._layout.runs.glob("*/journal.jsonl"))
            if not found:
                return []
            self._reader = JournalReader(found[0])
        new = list(self._reader.read())
        self.events += new
        return new

    @property
    def step(self) -> int:
        """The last step that any attempt has logged."""
        return max((e.data["step"] for e in self.events if e.kind == "step"), default=0)

    def until(self, process: subprocess.Popen[str], there: Callable[[JournalEvent], bool]) -> JournalEvent | None:
        """Wait for the first new event that meets the condition. Return None if the command ends first."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            ended = process.poll() is not None
            for event in self.look():
                if there(event):
                    return event
            if ended:
                return None
            time.sleep(POLL_S)
        process.kill()
        raise SystemExit(f"nothing in the journal for {PATIENCE_S:g} s")


def start(layout: ProjectLayout, *faults: InjectedFault) -> subprocess.Popen[str]:
    """Start the command with these faults in its workers."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RATCHET_")}
    if faults:
        environment[VARIABLE] = json.dumps([fault.model_dump() for fault in faults])
    return subprocess.Popen(
        [sys.executable, __file__, str(layout.root)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def with_steps(settings: Settings, kills: int, rows: int) -> Settings:
    """Return the settings of a training that is long enough for this many kills, and whose restart limit allows
    them."""
    steps = math.ceil(kills * (MOST_STEPS_BETWEEN + 1) / 2 * 1.2) + MOST_STEPS_BETWEEN
    epochs = max(2, math.ceil(steps * settings.train.batch_size / rows))
    train = settings.train.model_copy(update={"epochs": epochs, "validate_every_steps": 8})
    machine = settings.machine.model_copy(
        update={"checkpoint_every": INTERVAL_STEPS, "max_restarts": kills, "restart_delay_s": 0.0}
    )
    return settings.model_copy(update={"train": train, "machine": machine})


def _reached(step: int, event: JournalEvent) -> bool:
    return bool(event.kind == "step" and event.data["step"] >= step)


def run_killed(layout: ProjectLayout, kills: int, draw: random.Random) -> tuple[Follower, Deaths]:
    """Train to the end and kill the worker this many times. Return the journal and the costs."""
    follower, deaths = Follower(layout), Deaths()
    process = start(layout)
    for _ in range(kills):
        goal = follower.step + draw.randint(1, MOST_STEPS_BETWEEN)
        if not follower.until(process, partial(_reached, goal)):
            break
        time.sleep(draw.uniform(0, 0.1))
        worker = find_worker(process.pid, layout.root)
        if worker is None:
            break
        killed = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        if not _follow_recovery(follower, process, killed, deaths):
            break
    output, _ = process.communicate(timeout=PATIENCE_S)
    follower.look()
    if process.returncode != 0:
        raise SystemExit(f"a killed training did not end by itself (exit code {process.returncode}): {output[-2000:]}")
    deaths.save_steps = steps_in_a_save(follower.events)
    return follower, deaths


def _follow_recovery(follower: Follower, process: subprocess.Popen[str], killed: float, deaths: Deaths) -> bool:
    """Record the recovery of a run. Return False if the run had ended."""
    if follower.until(process, lambda e: e.kind == "attempt_started") is None:
        return False
    begun = time.monotonic()
    told = follower.step
    ready = follower.until(process, lambda e: e.kind == "worker_ready")
    loaded = time.monotonic()
    if ready is None or follower.until(process, lambda e: e.kind == "step" and e.data["step"] > told) is None:
        return False
    deaths.lost_steps.append(told - ready.data["start_step"])
    deaths.to_attempt_s.append(begun - killed)
    deaths.to_ready_s.append(loaded - begun)
    deaths.to_step_s.append(time.monotonic() - killed)
    return True


def steps_in_a_save(events: Sequence[JournalEvent]) -> int:
    """Return the largest number of steps between a checkpoint's step and the event that reports its completion."""
    last, most = 0, 0
    for event in events:
        if event.kind == "step":
            last = event.data["step"]
        elif event.kind == "checkpoint_saved":
            most = max(most, last - event.data["step"])
    return most


def second_writer(layout: ProjectLayout) -> list[Any]:
    """R25: start the same command while the first one runs (in a step that hangs), and again after both processes were
    killed."""
    from report_rows import count

    follower, process = Follower(layout), start(layout, InjectedFault(kind="hang", step=3))
    follower.until(process, lambda e: e.kind == "step" and e.data["step"] == 2)
    code, output = ended(start(layout))
    let_in = code != EXIT_INPUT or "in use by process" not in output
    process.kill()
    process.communicate()
    code, output = ended(start(layout))
    return [
        count("R25 second writers admitted while the first runs", int(let_in)),
        count("R25 trainings locked out by a dead one's lock", int(code != EXIT_OK)),
    ]


def crash_loop(layout: ProjectLayout, retries: int) -> list[Any]:
    """R16: a worker dies in the same step each time. The command must give up by itself and report the reason."""
    from report_rows import count

    follower = Follower(layout)
    code, output = ended(start(layout, InjectedFault(kind="die", step=3, times=0)))
    follower.look()
    starts = sum(event.kind == "attempt_started" for event in follower.events)
    right = code == EXIT_BUG and starts == retries + 1 and "gave up after" in output
    return [count(f"R16 crash loop not ended after {retries} restarts, with the reason", int(not right))]


def slow_disk(layout: ProjectLayout) -> list[Any]:
    """R15: a save of about 25 operations takes longer than the time after which a worker counts as stalled."""
    from report_rows import count

    follower = Follower(layout)
    code, output = ended(start(layout, InjectedFault(kind="slow_disk", step=1, times=0, seconds=SLOW_S)))
    follower.look()
    deaths = sum(event.kind == "worker_exited" for event in follower.events)
    if code != EXIT_OK:
        print(output[-2000:])
    return [count("R15 slow saves mistaken for a stall", deaths + (code != EXIT_OK))]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a command. Return its exit code and its output."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output


def ledger(layout: ProjectLayout, settings: Settings, events: Sequence[JournalEvent]) -> tuple[int, int, int]:
    """Return three counts: steps whose rows differ from the plan, repeated steps whose logged rows differ, and rows
    that did not occur exactly once in a complete epoch."""

    from ratchet.data.batches import BatchPlan

    plan = BatchPlan(rows_of(layout, "train").lengths, settings.train)
    told: dict[int, str] = {}
    contradictions = 0
    for event in events:
        if event.kind == "step":
            contradictions += told.setdefault(event.data["step"], event.data["batch"]) != event.data["batch"]
    batches = [plan.batch(step) for step in range(plan.steps)]
    wrong = sum(told.get(n + 1) != digests.hash_json(batch)[: digests.SHORT] for n, batch in enumerate(batches))
    stream = [row for batch in batches for sequence in batch for row in sequence]
    size = len(plan.lengths)
    epochs = [Counter(stream[k : k + size]) for k in range(0, len(stream) - size + 1, size)]
    uneven = sum(abs(epoch[row] - 1) for epoch in epochs for row in range(size))
    return wrong, contradictions, uneven


def rows(
    project: ProjectLayout, folder: Path, kills: int, seed: int, say: Callable[[str], None]
) -> tuple[list[Any], Deaths]:
    """Measure rows R10, R12, R15, R16, R22, R24 and R25. Also return the costs from which row R23 is computed."""
    from report_rows import at_most, count, told

    from ratchet.runs.fault_injection.outcome import TrainingFingerprint, find_differences

    settings = with_steps(params_file.load(project.params), kills, len(rows_of(project, "train")))
    whole, struck = (linked(project, folder / name, settings) for name in ("whole", "struck"))
    process = start(whole)
    output, _ = process.communicate(timeout=PATIENCE_S)
    if process.returncode != 0:
        raise SystemExit(f"the uninterrupted training failed: {output[-2000:]}")
    follower, deaths = run_killed(struck, kills, random.Random(f"{seed} killed"))
    struck_times = len(deaths.lost_steps)
    say(f"  {struck_times} kills in one training of {follower.step} steps: steps lost {deaths.lost_steps}")
    wrong, contradictions, uneven = ledger(struck, settings, follower.events)
    differing = find_differences(TrainingFingerprint.from_project(whole), TrainingFingerprint.from_project(struck))
    for text in differing:
        say(f"  NOT EXACT: {text}")
    for path in ("whole", "struck"):
        shutil.rmtree(folder / path)
    p50, p95 = (percentile(deaths.to_step_s, share) for share in (50, 95))
    found = [
        count(f"R10 steps of other rows than planned, {struck_times} kills", wrong),
        count("R10 repeated steps with other values", contradictions),
        count("R10 rows not exactly once in an epoch", uneven),
        count("R12 differences of results and metric series", len(differing)),
        at_most("R22 kill to next worker, p95 (s)", percentile(deaths.to_attempt_s, 95), DETECTION_S),
        at_most("R22 kill to first new step, p50 (s)", p50, RECOVERY_P50_S),
        at_most("R22 kill to first new step, p95 (s)", p95, RECOVERY_P95_S),
        told("R22 of which imports and loading, p50 (s)", statistics.median(deaths.to_ready_s)),
        at_most(
            f"R24 most steps lost in a kill (interval {INTERVAL_STEPS}, {deaths.save_steps} in a save)",
            max(deaths.lost_steps), INTERVAL_STEPS + deaths.save_steps,
        ),
        told("R24 mean steps lost per kill", statistics.mean(deaths.lost_steps)),
    ]  # fmt: skip
    return [*found, *watched(project, folder)], deaths


def watched(project: ProjectLayout, folder: Path) -> list[Any]:
    """Measure rows R15, R16 and R25."""
    settings = params_file.load(project.params)
    machine = settings.machine.model_copy(
        update={
            "checkpoint_every": INTERVAL_STEPS,
            "max_restarts": 2,
            "restart_delay_s": 0.0,
            "stall_timeout_s": STALL_S,
        }
    )
    settings = settings.model_copy(update={"machine": machine})
    found = second_writer(linked(project, folder / "second", settings))
    found += crash_loop(linked(project, folder / "loop", settings), machine.max_restarts)
    found += slow_disk(linked(project, folder / "slow", settings))
    for name in ("second", "loop", "slow"):
        shutil.rmtree(folder / name)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this percentage of values does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


def main(root: Path) -> int:
    from ratchet.stages.train import train

    layout = ProjectLayout(root)
    try:
        print(train(Project.from_parts(layout, params_file.load(layout.params)), lambda _: [], lambda *_: None))
    except RatchetError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
