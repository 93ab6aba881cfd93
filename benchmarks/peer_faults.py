"""Injects the faults of benchmarks/chaos.py into Hugging Face Trainer: one function for each row of the table."""

import contextlib
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peer import Bench, Row, checkpoints, last_line, lend_a_hand, log, result
from peer_trainer import NAN_STEP, OOM_MICRO_BATCH, Options

from ratchet.storage.layout import ProjectLayout

DECISIVE = (
    "adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json",
    "adapter_config.json",
)  # fmt: skip
"""Files of a checkpoint that a resumed training depends on."""
QUICK_DAMAGES = (
    ("adapter_model.safetensors", "cut"), ("optimizer.pt", "missing"), ("rng_state.pth", "missing"),
    ("trainer_state.json", "empty"),
)  # fmt: skip
PAUSE_S = 0.12
"""Pause in seconds in every micro-batch of the SIGTERM row. Trainer waits 3 s after the signal before it acts on it
(kill_wait); without the pause, the small training would end before that."""


@dataclass(frozen=True)
class Amounts:
    """Amount of each fault."""

    runs: int
    kills_per_run: int
    flips_per_file: int
    terms: int
    quick: bool


FULL = Amounts(runs=6, kills_per_run=5, flips_per_file=5, terms=8, quick=False)
QUICK = Amounts(runs=1, kills_per_run=5, flips_per_file=1, terms=2, quick=True)


def rows(
    project: ProjectLayout, folder: Path, amounts: Amounts, seed: int, steps: int, say: Callable[[str], None]
) -> list[Row]:
    """Measure all rows. Every schedule is drawn from `seed` and the name of the row."""
    bench = Bench(project, folder, steps, save_every=2, say=say)
    found: list[Row] = []
    for measure in (kills, flips, damages, terms, nan, memory, by_length, full_disk, sizes):
        row = measure(bench, amounts, random.Random(f"{seed} {measure.__name__}"))
        counts = f"{row.trials} trials, {row.exact} exact, {row.unaided} without a hand, {row.silent} silently wrong"
        say(f"  peer {row.row:4} {row.fault:38} {counts}")
        for note, times in Counter(row.notes).items():
            say(f"         {times} x {note}" if times > 1 else f"         {note}")
        found.append(row)
    return found


def kills(bench: Bench, amounts: Amounts, draw: random.Random) -> Row:
    """Send SIGKILL at times that are uniform over the training without starts; then run the same command again."""
    row = Row("R1", "SIGKILL, a checkpoint every 2 steps")
    metrics = wrong = 0
    for _ in range(amounts.runs):
        options = bench.new()
        times = sorted(draw.uniform(0, bench.training_s) for _ in range(amounts.kills_per_run))
        refused = [_strike(bench, options, b - a, row) for a, b in zip([0.0, *times], times, strict=False)]
        delivered = sum(killed for killed, _ in refused)
        refused.append((False, bench.to_the_end(options)))
        row.trials += delivered
        row.unaided += delivered - sum(bool(texts) for _, texts in refused)
        row.notes += [f"refused: {text}" for _, texts in refused for text in texts]
        found = result(options)
        metrics += all(found.get(key) == bench.reference[key] for key in ("losses", "train_loss"))
        wrong += not bench.judge(options, row, trials=delivered)
    row.notes.append(f"runs that ended otherwise than the uninterrupted one: {wrong} of {amounts.runs}")
    row.notes.append(f"logged losses and train_loss as uninterrupted: {metrics} of {amounts.runs} runs")
    return row


def _strike(bench: Bench, options: Options, wait_s: float, row: Row) -> tuple[bool, list[str]]:
    """Start, and kill after `wait_s` of training. Return whether the process was killed, and messages of refused
    starts."""
    refusals: list[str] = []
    while True:
        started = time.monotonic()
        process = bench.begin(options)
        if process is not None:
            row.slowest_s = max(row.slowest_s, time.monotonic() - started)
            process.join(wait_s)
            process.kill()
            process.join()
            return process.exitcode < 0, refusals
        refusals.append(last_line(options))
        lend_a_hand(options)


def _stopped_at(bench: Bench, step: int, **changes: Any) -> Options:
    """Return a run that was killed as soon as its checkpoint of `step` was complete. Later checkpoints are deleted."""
    options = bench.new(**changes)
    process = bench.begin(options)
    bench.wait(options, process, "saved", step=step)
    if process is not None:
        process.kill()
        process.join()
    for path in checkpoints(options):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    return options


def _middle(bench: Bench) -> int:
    """Return a step with a checkpoint, halfway through the training."""
    return bench.steps // 4 * 2


def _copied(bench: Bench, options: Options) -> Options:
    """Copy the run to a new folder."""
    copy = bench.new()
    shutil.copytree(options.out, copy.out, dirs_exist_ok=True)
    return copy


def _resume_damaged(bench: Bench, stopped: Options, row: Row, name: str, damage: Callable[[Path], str]) -> None:
    """Damage one file of the newest checkpoint, start again, and count the result."""
    options = _copied(bench, stopped)
    newest = checkpoints(options)[-1]
    what = damage(newest / name)
    started = time.monotonic()
    process = bench.begin(options)
    row.trials += 1
    if process is None:
        row.notes.append(f"{name} {what}: refused: {last_line(options)[:90]}")
        lend_a_hand(options)
        bench.to_the_end(options)
        bench.judge(options, row)
        return
    row.slowest_s = max(row.slowest_s, time.monotonic() - started)
    begun = [e["step"] for e in log(options) if e["event"] == "begin"][-1]
    code = bench.join(options, process)
    row.unaided += code == 0
    if code:
        row.notes.append(f"{name} {what}: died on the way: {last_line(options)[:90]}")
        lend_a_hand(options)
        bench.to_the_end(options)
    if not bench.judge(options, row):
        row.notes.append(f"{name} {what}: resumed from step {begun}, result differs")


def flips(bench: Bench, amounts: Amounts, draw: random.Random) -> Row:
    """Flip one bit of one file of the newest checkpoint."""
    row = Row("R4", "one bit flipped, newest checkpoint")
    stopped = _stopped_at(bench, _middle(bench))
    names = DECISIVE[:2] if amounts.quick else DECISIVE
    for name in names:
        for _ in range(amounts.flips_per_file):

            def flip(path: Path) -> str:
                content = bytearray(path.read_bytes())
                place = draw.randrange(8 * len(content))
                content[place // 8] ^= 1 << place % 8
                path.write_bytes(content)
                return f"bit {place}"

            _resume_damaged(bench, stopped, row, name, flip)
    return row


def _cut(path: Path) -> str:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return "cut in half"


def _empty(path: Path) -> str:
    path.write_bytes(b"")
    return "empty"


def _missing(path: Path) -> str:
    path.unlink()
    return "missing"


DAMAGES: dict[str, Callable[[Path], str]] = {"cut": _cut, "empty": _empty, "missing": _missing}


def damages(bench: Bench, amounts: Amounts, draw: random.Random) -> Row:
    """Truncate, empty or remove each file of the newest checkpoint. An older checkpoint is intact."""
    row = Row("R5", "file cut, empty or missing")
    stopped = _stopped_at(bench, _middle(bench))
    every = [(name, damage) for name in DECISIVE for damage in DAMAGES]
    for name, damage in QUICK_DAMAGES if amounts.quick else every:
        _resume_damaged(bench, stopped, row, name, DAMAGES[damage])
    return row


def terms(bench: Bench, amounts: Amounts, draw: random.Random) -> Row:
    """Send SIGTERM with `enable_jit_checkpoint`; then run the same command again."""
    row = Row("R7", "SIGTERM (enable_jit_checkpoint)")
    for _ in range(amounts.terms):
        options = bench.new(jit=True, pause_s=PAUSE_S)
        process = bench.begin(options)
        if process is None:
            raise SystemExit(f"the peer does not start: {last_line(options)}")
        # after at most half the time, because Trainer waits 3 s before it acts
        process.join(draw.uniform(0, bench.steps * PAUSE_S))
        sent = time.monotonic()
        process.terminate()
        bench.join(options, process)
        row.slowest_s = max(row.slowest_s, time.monotonic() - sent)
        row.trials += 1
        if result(options):
            row.notes.append("was at its end before it looked for the signal")
        resumed = replace(options, pause_s=0.0)
        refusals = [] if result(options) else bench.to_the_end(resumed)
        row.unaided += not refusals
        row.notes += [f"refused: {text}" for text in refusals]
        bench.judge(resumed, row)
    return row


def nan(bench: Bench, amounts: Amounts, draw: random.Random) -> Row:
    """Make the loss of one micro-batch NaN, once."""
    row = Row("R8", "one NaN loss", trials=1)
    options = bench.new()
    code = bench.join(options, bench.start(options, **{NAN_STEP: str(draw.randrange(3, bench.steps - 2))}))
    found = result(options)
    row.unaided += code == 0
    row.notes.append(
        f"exit code {code}, weights {'finite' if found.get('finite') else 'not finite'}, "
        f"train_loss told: {found.get('train_loss')}"
    )
    bench.judge(options, row)
    return row


def memory(bench: Bench, amounts: Amounts, draw: random.Random) -> Row:
    """Raise an out-of-memory error in one micro-batch after half of the steps, with and without
    `auto_find_batch_size`."""
    row = Row("R9", "out of memory once")
    for finds in (True, False):
        options = bench.new(find_batch_size=finds)
        code = bench.join(options, bench.start(options, **{OOM_MICRO_BATCH: str(bench.steps + 1)}))
        row.trials += 1
        begins = [e for e in log(options) if e["event"] == "begin"]
        text = "; ".join(f"from step {e['step']} of {e['planned']}, {e['batch_rows']} rows a step" for e in begins)
        row.notes.append(f"{'auto_find_batch_size' if finds else 'default'}: exit code {code}; {text}")
        row.unaided += code == 0
        if code:
            bench.to_the_end(options)  # the fault is not injected again
        bench.judge(options, row)
    return row


def by_length(bench: Bench, amounts: Amounts, draw: random.Random) -> Row:
    """Kill a run with `group_by_length` in its first or its second epoch, and resume it."""
    row = Row("R11", "group_by_length, resumed")
    reference, _ = bench.undisturbed(by_length=True)
    for step in (_middle(bench) - 2, bench.steps - 4):
        options = _stopped_at(bench, step, by_length=True)
        row.trials += 1
        row.unaided += not bench.to_the_end(options)
        exact = bench.judge(options, row, reference)
        row.notes.append(f"resumed at step {step}: {'exact' if exact else 'not exact'}")
    return row


def full_disk(bench: Bench, amounts: Amounts, draw: random.Random) -> Row:
    """Fill a file system with the third checkpoint; then enlarge the file system and repeat the command."""
    row = Row("R6", "disk full, then room again")
    room = bench.folder / "small-disk"
    size_kb = _size_kb(_stopped_at(bench, 2).out) * 5 // 2
    with _small_disk(room, size_kb) as mounted:
        if not mounted:
            row.notes.append("skipped: a small tmpfs cannot be mounted here (needs root)")
            return row
        options = replace(bench.new(), out=room / "run")
        options.out.mkdir()
        code = bench.join(options, bench.start(options))
        steps = [e["step"] for e in log(options) if e["event"] == "step"]
        row.trials += 1
        row.notes.append(f"exit code {code} after step {max(steps, default=0)} of {bench.steps}: {last_line(options)}")
        subprocess.run(["mount", "-o", f"remount,size={20 * size_kb}k", str(room)], check=True)
        refusals = bench.to_the_end(options) if code else []
        row.notes += [f"with room again, refused: {text}" for text in refusals]
        row.unaided += code == 0
        bench.judge(options, row)
    return row


def sizes(bench: Bench, amounts: Amounts, draw: random.Random) -> Row:
    """Measure the bytes of a checkpoint, and its share of weights and optimizer state."""
    row = Row("R21", "bytes a save")
    stopped = _stopped_at(bench, 2)
    bytes_of = {path.name: path.stat().st_size for path in checkpoints(stopped)[-1].iterdir()}
    state = bytes_of["adapter_model.safetensors"] + bytes_of["optimizer.pt"]
    row.notes.append(f"{sum(bytes_of.values()):,} bytes in {len(bytes_of)} files, {state:,} of weights and optimizer")
    return row


def _size_kb(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024


@contextlib.contextmanager
def _small_disk(folder: Path, size_kb: int) -> Iterator[bool]:
    """Mount a tmpfs of this size. Yield whether it could be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_kb}k", "tmpfs", str(folder)]
    mounted = (
        shutil.which("mount") is not None and subprocess.run(command, check=False, capture_output=True).returncode == 0
    )
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)
