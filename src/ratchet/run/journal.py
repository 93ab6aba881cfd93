"""The run's journal: one JSON object a line, appended by supervisor and worker, replayed by everybody else.

Events, each with `t` (Unix time, for people only; no decision uses it) and `attempt`:

    attempt     pid, code_version, threads?        supervisor, before it starts a worker
    ready       start_step, planned_steps, trainable_parameters, total_parameters, device, compute_dtype, threads
    step        step, loss, learning_rate, grad_norm, trained_tokens, input_tokens, step_s
    validation  step, loss, tokens, seconds, improved
    checkpoint  step, digest, size_bytes, seconds, best
    notice      text: a fall-back, a damaged checkpoint, a changed code version, a lost observer
    failure     class, text: what the worker knows about its own end
    died        exit_code, signal, class, decision, text    supervisor, after a worker ended without a result
    finished    step, reason (completed | early_stopped), adapter_digest
    stopped     step: asked to stop, checkpoint sealed

`step` counts completed optimizer steps, from 1. After a crash, steps beyond the checkpoint are done and written again
with equal numbers; readers keep the first (`Replay`).
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet import digest


@dataclass(frozen=True)
class Event:
    """One line of the journal."""

    kind: str
    t: float
    attempt: int
    data: dict[str, Any]

    def line(self) -> bytes:
        """The line as it stands in the file. Raises ValueError for a value that JSON cannot hold, such as NaN."""
        return (
            digest.canonical_json({"event": self.kind, "t": self.t, "attempt": self.attempt, **self.data}) + "\n"
        ).encode()


class Journal:
    """Append to a journal. Each event is one `write` on an O_APPEND descriptor, so writers do not mix lines."""

    def __init__(self, path: Path, attempt: int) -> None:
        self.path = path
        self.attempt = attempt
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a machine that died tore the last line: close it, readers skip and count it

    def append(self, kind: str, **data: Any) -> Event:
        """Write one event; it survives the death of the process (not of the machine: `sync` does that)."""
        event = Event(kind, round(time.time(), 3), self.attempt, data)
        os.write(self._fd, event.line())
        return event

    def sync(self) -> None:
        """Make everything written so far survive the death of the machine."""
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class Reader:
    """Follow a journal from a byte offset; a line that is not finished yet is left for the next call."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset
        self.damaged_lines = 0

    def read(self) -> Iterator[Event]:
        """Events that have become complete since the last call, in order. Damaged lines are counted and skipped."""
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            return
        with stream:
            stream.seek(self.offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                if event := _parse(line):
                    yield event
                elif line.strip():
                    self.damaged_lines += 1


def _parse(line: bytes) -> Event | None:
    try:
        raw = json.loads(line)
        return Event(str(raw.pop("event")), float(raw.pop("t")), int(raw.pop("attempt")), raw)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


class Replay:
    """Lets each step and each validation through once: a resumed run does some again, with equal numbers."""

    def __init__(self, after_step: int = 0, after_validation: int = 0) -> None:
        self._last = {"step": after_step, "validation": after_validation}

    def new(self, event: Event) -> bool:
        """Whether the event tells something that was not told before."""
        if event.kind not in self._last:
            return True
        if event.data["step"] <= self._last[event.kind]:
            return False
        self._last[event.kind] = event.data["step"]
        return True
