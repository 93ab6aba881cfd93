"""The run's journal: one JSON object a line, appended by supervisor and worker, replayed by everybody else.

Events, each with `t` (Unix time, for people only; no decision uses it) and `attempt`:

    refused     text: why this machine may not train the run now, by what keeps its mirror; no attempt was begun
    attempt     pid, code_version, threads?        supervisor, before it starts a worker
    ready       start_step, planned_steps, trainable_parameters, total_parameters, device, compute_dtype, threads,
                ranks, hosts: of each rank, leads: whether rank 0 of them all is on this machine, machines: those that
                keep a mirror, by their names in its claims, flops_per_token: operations that a token of input takes,
                peak_flops_s: what all devices can do by their data sheets; both null where it is not known
    step        step, loss, learning_rate, grad_norm, trained_tokens, input_tokens, step_s,
                batch: first 12 hex digits of digest.of_json(row indices of the step, in order)
    ranks       step, steps (since the last such event), seconds (of them), busy_s (by rank, of those: in micro-batches
                of its own); every few seconds, where there are several
    skipped     step, action (skip | roll_back), reason (text), rows (ids of the batch), rate_scale, to_step (roll_back:
                the step whose weights go on, else null); stands in the place of `step`: nothing was learned
    repeated    step, reason: the step is computed once more
    spike       step, grad_norm, median, deviations, rows: reported only, the `step` event follows
    budget      step, phase (train | validation), action (shrink | grow), failed_tokens,
                budget {tokens, failed_tokens, good_steps, wait_steps, grown}: holds from this step on (validation: from
                the validation after this step on), and a resumed worker takes it again (`read_decisions`)
    scale       step, loss_scale: its gradient overflowed in float16 and is computed again with a smaller loss scale
    forecast    forecast (MemoryForecast), available_bytes: what the training will need, before anything is loaded
    memory      phase, peak_bytes, allocated_bytes (tensors on a GPU), host_bytes, device, device_bytes (of all there
                is): the most that a phase held; a phase that comes again is told again when it held more
    answered    step (answers that are kept), tokens, seconds (both since the last such event), rows, budget_tokens,
                available_bytes, chosen, doubted (see model/decoding.py; null where nothing tells): of a generation
    shard       step, answers (sealed with it), seconds: of a generation
    decoding    about (way | bound), ...: how a model in memory decodes rows together (model/decoding.py)
    validation  step, loss, tokens, seconds, improved
    checkpoint  step, best, size_bytes, bytes_written, bytes_linked, block_s (training stood still), seconds (of all)
    mirror      step, what (checkpoint | result), bytes_sent, bytes_skipped (the mirror had them), seconds, bytes_s: all
                of it is in the mirror (supervisor)
    system      sample (1, 2, ... over all attempts), cpu_percent (of all CPUs), memory_bytes, memory_percent,
                disk_used_percent (of the run directory's disk), network_received_bytes, network_sent_bytes (since the
                machine has started), worker_cpu_percent (100: one CPU), worker_memory_bytes (of the worker and its
                children), gpus [{index, utilization_percent, memory_bytes, memory_total_bytes, power_w,
                temperature_c}]: what is used; null: not known. Supervisor, every machine.system_every_s
    alert       text: what a person should see now: storage that fails, a stalled worker, a late save, a spot notice
    notice      text: a fall-back, a damaged checkpoint, a changed code version, a lost observer
    failure     class, text: what the worker knows about its own end; of class too_large also needed_bytes (with one
                row at a time) and available_bytes
    died        exit_code, class, decision, text   supervisor, after a worker ended without a result
    finished    step, reason (completed | early_stopped), adapter_digest
    stopped     step: asked to stop, checkpoint sealed
    ended_early text: why a sweep has asked it to                     supervisor

`step` counts optimizer steps, those that were left out included, from 1. After a crash, steps beyond the checkpoint are
done and written again with equal numbers; readers keep the first (`ReplayFilter`).
"""

import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from errno import EIO
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json

from ratchet.redaction import redact
from ratchet.runs.log import print_message
from ratchet.storage import digests

TAIL_BYTES = 1 << 16
_SALVAGE_TRIES = 16
TEXTS = {"text", "reason"}
"""What of an event may repeat the words of an exception: secrets are taken out."""


class JournalEvent(NamedTuple):
    """One line of the journal. A tuple, for it is made in a third of the time that a frozen dataclass takes."""

    kind: str
    t: float
    attempt: int
    data: dict[str, Any]

    def line(self) -> bytes:
        """The line as it stands in the file. Raises ValueError for a value that JSON cannot hold, such as NaN."""
        return (
            digests.canonical_json({"event": self.kind, "t": self.t, "attempt": self.attempt, **self.data}) + "\n"
        ).encode()


class Journal:
    """Append to a journal, from any thread. Each event is one `write` on an O_APPEND descriptor: writers mix no lines.

    A disk that takes nothing (full, broken, read-only) stops nobody: lines wait in memory, and are written in their
    order before later ones. `sync` says when something still waits.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self.path = path
        self.attempt = attempt
        self._mutex = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._fd, self._torn = self._open()

    def _open(self) -> tuple[int, bool]:
        """The file, and whether its last line is torn: by a machine that died, or a full disk. Such a line is closed
        before the next one; readers count it."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(fd).st_size
        return fd, bool(size) and os.pread(fd, 1, size - 1) != b"\n"

    def append(self, kind: str, **data: Any) -> JournalEvent:
        """Tell one event; once written it survives the death of the process (not of the machine: `sync` does that).

        Raises ValueError for values that JSON cannot hold, and nothing else.
        """
        for name in TEXTS & data.keys():
            if isinstance(data[name], str):
                data[name] = redact(data[name])
        event = JournalEvent(kind, round(time.time(), 3), self.attempt, data)
        line = event.line()
        with self._mutex:
            self._waiting.append(line)
            self._write()
        return event

    def sync(self) -> None:
        """Make everything told so far survive the death of the machine. Raises OSError if some of it is not written."""
        with self._mutex:
            if error := self._write():
                raise error
            os.fsync(self._fd)

    def reopen(self) -> None:
        """Go on in the file that has the journal's name now: another one was put in its place."""
        with self._mutex:
            os.close(self._fd)
            self._fd, self._torn = self._open()

    def close(self) -> None:
        """Try once more to write what waits, and say so if that is lost."""
        with self._mutex:
            if error := self._write():
                print_message(f"{len(self._waiting)} lines of {self.path} are lost: {error}")
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> OSError | None:
        """Write what waits. A line that was cut off stays in the file as damage, and is written again as a whole:
        somebody else may have appended in between."""
        while self._waiting:
            line = b"\n" + self._waiting[0] if self._torn else self._waiting[0]
            try:
                written = os.write(self._fd, line)
            except OSError as error:
                return OSError(error.errno, error.strerror, str(self.path))
            if written == len(line):
                self._waiting.popleft()
                self._torn = False
            else:
                self._torn = line[:written] != b"\n" if written else self._torn
                return OSError(EIO, f"only {written} of {len(line)} bytes were written", str(self.path))
        return None


class JournalReader:
    """Follow a journal from a byte offset; a line that is not finished yet is left for the next call."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.damaged_lines = 0

    def read(self) -> Iterator[JournalEvent]:
        """Events that have become complete since the last call, in order. Damaged lines are counted and skipped."""
        try:
            if self.path.stat().st_size == self.offset:  # asked many times a second: mostly there is nothing
                return
            stream = self.path.open("rb")
        except FileNotFoundError:
            return
        with stream:
            stream.seek(self.offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                event, is_damaged = parse_line(line)
                self.damaged_lines += is_damaged
                if event is not None:
                    yield event


def read_last_event(path: Path) -> JournalEvent | None:
    """The last whole event of a journal, read from its end; None when there is none."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return None
    length = TAIL_BYTES
    with path.open("rb") as stream:
        while True:
            stream.seek(max(0, size - length))
            for line in reversed(stream.read(length).splitlines()):
                if event := _parse_event(line):
                    return event
            if length >= size:
                return None
            length *= 4


def parse_line(line: bytes) -> tuple[JournalEvent | None, bool]:
    """The event of a whole line, and whether the line is damaged: then it is the whole event at its end, if any."""
    event = _parse_event(line)
    if event is not None or not line.strip():
        return event, False
    return _salvage(line), True


def _parse_event(line: bytes) -> JournalEvent | None:
    """The event of a line, None when it is none. Read by pydantic's parser, five times as fast as `json`: 100,000
    lines are read while somebody waits."""
    try:
        try:
            raw = from_json(line)
        except ValueError:  # it refuses a little more than `json` does: halves of surrogate pairs, 200 brackets deep
            raw = json.loads(line)
        t = float(raw.pop("t"))
        return JournalEvent(str(raw.pop("event")), t, int(raw.pop("attempt")), raw) if math.isfinite(t) else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _salvage(line: bytes) -> JournalEvent | None:
    """The whole event at the end of a damaged line: another writer's, glued to one that was cut off."""
    start = 0
    for _ in range(_SALVAGE_TRIES):
        start = line.find(b'{"', start + 1)
        if start < 0:
            return None
        if event := _parse_event(line[start:]):
            return event
    return None


class ReplayFilter:
    """Lets each step and each validation through once: a resumed run does some again, with equal numbers.

    A step is told by `step`, or by `skipped` when it was left out.
    """

    def __init__(self, after_step: int = 0, after_validation: int = 0) -> None:
        self._last = {"step": after_step, "validation": after_validation}

    def new(self, event: JournalEvent) -> bool:
        """Whether the event tells something that was not told before. A step without a number tells nothing."""
        kind = "step" if event.kind == "skipped" else event.kind
        last = self._last.get(kind)
        if last is None:
            return True
        step = event.data.get("step")
        if not isinstance(step, int) or step <= last:
            return False
        self._last[kind] = step
        return True


@dataclass(frozen=True)
class RunDecisions:
    """What a run has decided on its way, and a resumed worker must decide again, or it would learn something else.

    The data of the events that told it.
    """

    budgets: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """By (phase, step): the last `budget` event, for it holds what all of that step came to."""
    skipped: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By step: the `skipped` event that stands in the place of the step."""


def read_decisions(path: Path, after_step: int) -> RunDecisions:
    """Decisions about everything that follows the checkpoint of `after_step`.

    Args:
        path: a journal; one that is not there has decided nothing. Damaged lines are passed over.
        after_step: a budget of training and a skipped step count when they are of a later step; a budget of
            validation also when it is of this very step, for its validation may come after the checkpoint.
    """
    found = RunDecisions()
    for event in JournalReader(path).read():
        step = event.data.get("step")
        if not isinstance(step, int):
            continue
        if event.kind == "skipped" and step > after_step:
            found.skipped[step] = event.data
        elif event.kind == "budget" and _is_budget(event) and step >= after_step:
            phase = str(event.data["phase"])
            if phase == "validation" or step > after_step:
                found.budgets[phase, step] = event.data
    return found


def _is_budget(event: JournalEvent) -> bool:
    return event.data.get("phase") in ("train", "validation") and isinstance(event.data.get("budget"), dict)
