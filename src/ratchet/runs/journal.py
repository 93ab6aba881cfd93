"""The journal of a run: one JSON object per line, appended by supervisor and worker, replayed by all readers.

Each line has `event` (the kind), `t` (Unix time; for display, not for decisions), `attempt`, and the keys of its kind.
`step` counts optimizer steps from 1, skipped steps included. After a crash, the steps after the checkpoint are computed
and written again with equal numbers; readers keep the first event of each step (`ReplayFilter`).

The supervisor writes start_refused, attempt_started, worker_exited, pruned, replicated and system_metrics. Both the
supervisor and the worker write alert, notice and interrupted. The worker writes all other events.

Attempts
    start_refused       The run may not start on this machine, for example because another machine holds its lease. No
                        attempt begins. Keys: text.
    attempt_started     A worker is about to start. Keys: pid (of the supervisor), code_version.
    worker_ready        The worker has loaded everything. Keys: start_step, planned_steps, device, compute_dtype,
                        threads, ranks; for a training also trainable_parameters, total_parameters, torch, hosts (by
                        rank), has_rank_zero (whether rank 0 runs on this machine), shares_base, replicators (machines
                        that replicate the run, by their names in its leases), flops_per_token (null if unknown) and
                        peak_flops_per_s (of all devices, from their data sheets; null if unknown).
    worker_error        The worker reports why it ends. Keys: failure_class, text; for class too_large also needed_bytes
                        (for one row per micro-batch) and available_bytes.
    worker_exited       The worker ended without a result. Keys: exit_code, failure_class, text, decision (Retry, GiveUp
                        or Interrupted).
    interrupted         The run was asked to stop and saved its progress. Keys: step, and unit where work is not counted
                        in steps.
    interrupted_by_peer Another rank was asked to stop; this rank saved its progress. Keys: step.
    pruned              A sweep ends the trial early. Keys: text.
    finished            The result is complete. Keys: step, reason (completed | early_stopped), adapter_digest.

Steps
    step                An optimizer step is done. Keys: step, loss, learning_rate, grad_norm, trained_tokens,
                        input_tokens, step_s, batch (first 12 hex digits of the digest of the row indices, in order);
                        of preference tuning also PREFERENCE_STATISTICS (config/train.py), as in `validation`; of
                        labelled answers, those of the labels that the batch has.
    step_skipped        Replaces `step` if nothing was learned. Keys: step, action (skip | roll_back), reason, rows (ids
                        of the batch), learning_rate_scale, rollback_step (the step whose weights are restored; null for
                        skip).
    step_repeated       The step is computed a second time. Keys: step, reason.
    gradient_spike      The gradient norm is unusually large; `step` follows. Keys: step, grad_norm, median, deviations,
                        rows, modules (gradient norms of the modules with the largest).
    loss_scale          A float16 gradient overflowed; the step is computed again. Keys: step, loss_scale.
    microbatch_budget   The limit of a micro-batch changed. It applies from this step on (in phase validation: from the
                        validation after this step on). A resumed worker applies it again (`read_decisions`). Keys:
                        step, phase (train | validation | generate), action (shrink | grow), failed_tokens, budget,
                        is_early (true if memory had not run out yet).
    rank_timings        Written every few seconds if there are several ranks. Keys: step, steps and seconds since the
                        last such event, busy_s (seconds that each rank spent in its own micro-batches).
    validation          A validation is done. Keys: step, loss, tokens, seconds, improved, token_accuracy (if
                        early stopping needs it).
    checkpoint_saved    A checkpoint is sealed. Keys: step, is_best, size_bytes, bytes_written, bytes_linked, blocked_s
                        (time that training waited), seconds (in all).
    replicated          A checkpoint or the result is complete in the replica. Keys: step, artifact (checkpoint |
                        result), bytes_sent, bytes_skipped (already in the replica), seconds, bytes_per_s.

Generation
    generation_progress Answers were generated. Keys: step (answers that are durable), tokens and seconds since the last
                        such event, finish (number of answers by the reason for their end), rows, waiting, held_tokens,
                        budget_tokens, available_bytes, device_bytes, held_bytes, forecast_bytes, tokens_chosen,
                        tokens_rechecked (null if unknown).
    answers_saved       A shard of answers is sealed. Keys: step, answers, seconds.
    decoding            How a model in memory decodes several rows together. Keys: topic (method | bound) and its
                        figures.

Machine
    memory_forecast     Made before anything is loaded. Keys: forecast (MemoryForecast), available_bytes.
    memory_peak         Peak memory of a phase; repeated when the peak rises. Keys: phase, peak_bytes, allocated_bytes
                        (tensors on a GPU), host_bytes, device, device_bytes (its total memory).
    system_metrics      Written every machine.system_metrics_interval_s. Keys: sample (1, 2, ... over all attempts),
                        cpu_percent (of all CPUs), memory_bytes, memory_percent, disk_used_percent (disk of the run
                        directory), network_received_bytes, network_sent_bytes (since boot), worker_cpu_percent (100:
                        one CPU), worker_memory_bytes (worker and children), gpus [{index, utilization_percent,
                        memory_bytes, memory_total_bytes, power_w, temperature_c}]; null if unknown.
    alert               A person should act: failing storage, a stalled worker, a late save, a preemption notice. Keys:
                        text.
    notice              A fallback, a damaged checkpoint, a changed code version, a failing callback. Keys: text.
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
"""Size of the first block that `read_last_event` reads from the end of the file."""
_SALVAGE_TRIES = 16
REDACTED_KEYS = {"text", "reason"}
"""Keys of texts that may quote an exception; secrets in these texts are redacted."""


class JournalEvent(NamedTuple):
    """A line of the journal. The class is a named tuple, because one is built in a third of the time of a frozen
    dataclass."""

    kind: str
    t: float
    attempt: int
    data: dict[str, Any]

    def line(self) -> bytes:
        """Encode the event as a line of the file. Raises ValueError for a value outside JSON, such as NaN."""
        return (
            digests.canonical_json({"event": self.kind, "t": self.t, "attempt": self.attempt, **self.data}) + "\n"
        ).encode()


class Journal:
    """Writer of a journal, for any thread. Each event is one `write` to an O_APPEND descriptor, so lines of several
    processes never mix.

    A disk that accepts no data (full, failing, read-only) does not stop a training: lines wait in memory and are
    written in order before later lines. `sync` raises while lines wait.
    """

    def __init__(self, path: Path, attempt: int, redacts: bool = True) -> None:
        """Open the file. `redacts`: remove secrets from messages; False for data, which must not change."""
        self.path = path
        self.attempt = attempt
        self._redacts = redacts
        self._mutex = threading.Lock()
        self._unwritten: deque[bytes] = deque()
        self._fd, self._is_torn = self._open()

    def _open(self) -> tuple[int, bool]:
        """Open the file. Return the descriptor, and whether the last line was cut off by a crash or a full disk. Such a
        line is terminated before the next line is written, and readers count it as damaged."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(fd).st_size
        return fd, bool(size) and os.pread(fd, 1, size - 1) != b"\n"

    def append(self, kind: str, **data: Any) -> JournalEvent:
        """Append an event. A written event survives the death of the process; after `sync`, it also survives a power
        loss.

        Raises ValueError for a value that JSON cannot represent, and no other error.
        """
        for name in REDACTED_KEYS & data.keys() if self._redacts else ():
            if isinstance(data[name], str):
                data[name] = redact(data[name])
        event = JournalEvent(kind, round(time.time(), 3), self.attempt, data)
        line = event.line()
        with self._mutex:
            self._unwritten.append(line)
            self._write()
        return event

    def sync(self) -> None:
        """Flush all events to the disk. Raises OSError if some of them cannot be written."""
        with self._mutex:
            if error := self._write():
                raise error
            os.fsync(self._fd)

    def reopen(self) -> None:
        """Continue in the file at the journal's path, after the file was replaced."""
        with self._mutex:
            os.close(self._fd)
            self._fd, self._is_torn = self._open()

    def close(self) -> None:
        """Try once more to write the waiting lines, and print a message if they are lost."""
        with self._mutex:
            if error := self._write():
                print_message(f"{len(self._unwritten)} lines of {self.path} are lost: {error}")
            os.close(self._fd)
            self._fd = -1

    def _write(self) -> OSError | None:
        """Write the waiting lines. A line that was cut off stays in the file, as damage, and is written again in full,
        because another process may have appended a line in between. Returns the error, if any."""
        while self._unwritten:
            line = b"\n" + self._unwritten[0] if self._is_torn else self._unwritten[0]
            try:
                written = os.write(self._fd, line)
            except OSError as error:
                return OSError(error.errno, error.strerror, str(self.path))
            if written == len(line):
                self._unwritten.popleft()
                self._is_torn = False
            else:
                self._is_torn = line[:written] != b"\n" if written else self._is_torn
                return OSError(EIO, f"only {written} of {len(line)} bytes were written", str(self.path))
        return None


class JournalReader:
    """Reader that follows a journal from a byte offset. It leaves an unfinished line for the next call."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.damaged_lines = 0

    def read(self) -> Iterator[JournalEvent]:
        """Yield the events that were completed since the last call, in order. Damaged lines are counted and skipped."""
        try:
            if self.path.stat().st_size == self.offset:  # called many times per second, mostly without news
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
    """Return the last intact event of a journal; None if there is none. Reads from the end of the file."""
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
    """Parse a complete line. Return its event (None if it has none), and whether the line is damaged.

    A damaged line may end with an intact event of another writer; that event is returned.
    """
    event = _parse_event(line)
    if event is not None or not line.strip():
        return event, False
    start = 0
    for _ in range(_SALVAGE_TRIES):  # another process wrote its event after a line that was cut off
        start = line.find(b'{"', start + 1)
        if start < 0:
            break
        if event := _parse_event(line[start:]):
            return event, True
    return None, True


def _parse_event(line: bytes) -> JournalEvent | None:
    """Return the event of a line, or None. Uses pydantic's parser, which is four times as fast as `json`, because a
    command may read 100,000 lines while the user waits."""
    try:
        try:
            raw = from_json(line)
        except ValueError:  # `from_json` rejects a little more than `json`: lone surrogates, 200 nested brackets
            raw = json.loads(line)
        t = float(raw.pop("t"))
        return JournalEvent(str(raw.pop("event")), t, int(raw.pop("attempt")), raw) if math.isfinite(t) else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


class ReplayFilter:
    """Filter that passes each step and each validation once, because a resumed run computes some of them again, with
    equal numbers.

    A step is recorded by `step`, or by `step_skipped`.
    """

    def __init__(self) -> None:
        self._last = {"step": 0, "validation": 0}

    def is_new(self, event: JournalEvent) -> bool:
        """Return whether the event is the first of its step or validation. A step or validation without a number is
        never new."""
        kind = "step" if event.kind == "step_skipped" else event.kind
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
    """Decisions that depended on the machine, as event data. A resumed worker repeats them, to learn the same."""

    budgets: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    """Last `microbatch_budget` event by (phase, step). It includes all changes of that step."""
    skipped_steps: dict[int, dict[str, Any]] = field(default_factory=dict)


def read_decisions(path: Path, checkpoint_step: int) -> RunDecisions:
    """Read the decisions about everything that follows a checkpoint.

    Args:
        path: the journal. A missing journal has no decisions; damaged lines are skipped.
        checkpoint_step: step of the checkpoint. Training budgets and skipped steps of later steps count. Validation
            budgets of this step count too, because its validation may follow the checkpoint.
    """
    decisions = RunDecisions()
    for event in JournalReader(path).read():
        step = event.data.get("step")
        if not isinstance(step, int):
            continue
        if event.kind == "step_skipped" and step > checkpoint_step:
            decisions.skipped_steps[step] = event.data
        elif event.kind == "microbatch_budget" and isinstance(event.data.get("budget"), dict):
            phase = event.data.get("phase")
            if (phase == "train" and step > checkpoint_step) or (phase == "validation" and step >= checkpoint_step):
                decisions.budgets[phase, step] = event.data
    return decisions
