"""Logs of a run: JSON lines in files of bounded size, and the capture of everything a worker prints.

A line is {"t": RFC 3339 in UTC, "level", "source", "pid", "text", ...}, with secrets redacted (redaction.py). Each log
has one process that writes it. Logging never stops a run: records that a full disk rejects are lost and counted, and no
call waits while another thread waits for the disk.

worker.log is the standard output and error of a worker. Python's prints, `logging`, warnings and exceptions pass
through `OutputCapture`, which redacts them and copies them to the worker's log. C code and a crashing interpreter write
to worker.log directly.
"""

import contextlib
import io
import json
import logging
import math
import os
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from errno import ENOSPC
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from ratchet.config.machine import Machine
from ratchet.config.units import format_count
from ratchet.redaction import redact
from ratchet.storage import files

Level = Literal["debug", "info", "warning", "error"]
LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

MAX_RECORD_BYTES = 1 << 16
"""Maximum size of a record in bytes; less if machine.log_max_bytes is smaller."""
MAX_WAITING = 2_000
"""Maximum number of records kept in memory while the disk is slow; further records are lost."""
MAX_ITEMS = 32
"""Maximum number of items of a list in a record."""
CHECK_EVERY_S = 0.25
BLOCK_BYTES = 1 << 20
MAX_LINE = 1 << 16
"""Maximum number of characters that are buffered while a printed line has no end."""
OVERSIZE_FACTOR = 2
"""Python's output is dropped while worker.log is larger than this many times machine.log_max_bytes. The supervisor
truncates the file when it exceeds machine.log_max_bytes, but checks its size only every CHECK_EVERY_S."""


class JsonLog:
    """A log of this process, NAME.jsonl; older files are NAME.1.jsonl, NAME.2.jsonl, ... Any thread and any signal
    handler may write to it. `complain` gets a message when records are lost for the first time."""

    def __init__(
        self, path: Path, machine: Machine, context: Callable[[], Mapping[str, Any]], complain: Callable[[str], None]
    ) -> None:
        self.path = path
        self._min_level = LEVELS[machine.log_level]
        self._limit_bytes, self._files = machine.log_max_bytes, machine.log_files
        self._context, self._complain = context, complain
        self._waiting: deque[bytes] = deque()
        self._mutex = threading.Lock()
        self._fd, self._is_closed = -1, False
        self._lost, self._cause, self._has_complained = 0, "", False

    def write(self, level: Level, source: str, text: str, **fields: Any) -> None:
        """Write a record if its level is enabled. Never raises. Waits for the disk only if no other thread does."""
        if LEVELS[level] < self._min_level or self._is_closed:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._lost, self._cause = self._lost + 1, "the disk was too slow"
            return
        self._waiting.append(self._encode(level, source, text, fields))
        while self._waiting and self._mutex.acquire(blocking=False):  # if locked, the other thread writes this record
            try:
                while self._waiting:
                    self._write_line(self._waiting.popleft())
            finally:
                self._mutex.release()

    def close(self) -> None:
        """Close the log; later records are dropped."""
        self._is_closed = True
        if self._mutex.acquire(timeout=1.0):  # a thread that waits for a hanging disk may hold the mutex
            try:
                self._close_file()
            finally:
                self._mutex.release()

    def _encode(self, level: Level, source: str, text: str, fields: Mapping[str, Any]) -> bytes:
        """Encode a record within the size limit: cut the text, and if that is not enough, omit the fields."""
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        context = {name: make_loggable(fields.get(name, value)) for name, value in self._context().items()}
        head = {"t": now, "level": level, "source": redact(source)[:200], **context, "pid": os.getpid()}
        extra = {name: make_loggable(value) for name, value in fields.items() if value is not None and name not in head}
        text = redact(str(text))  # a damaged journal may contain anything
        line = _encode_record({**head, "text": text, **extra})
        limit = min(self._limit_bytes, MAX_RECORD_BYTES)
        if len(line) <= limit:
            return line
        if len(_encode_record({**head, "text": "", "cut_bytes": 0, **extra})) > limit // 2:
            extra = {"omitted_fields": sorted(extra)[:MAX_ITEMS]}
        size, cut = _count_bytes(text), text[:limit]
        while True:
            line = _encode_record({**head, "text": cut, "cut_bytes": size - _count_bytes(cut), **extra})
            if len(line) <= limit or not cut:
                return line
            cut = cut[: len(cut) * 3 // 4]

    def _write_line(self, line: bytes) -> None:
        try:
            size = self._open_file()
            if self._lost:
                text = f"{format_count(self._lost, 'record')} lost here: {self._cause}"
                size = self._append(self._encode("warning", "ratchet.log", text, {"lost": self._lost}), size)
                self._lost = 0
            self._append(line, size)
        except OSError as error:
            self._close_file()
            self._lost, self._cause = self._lost + 1, error.strerror or str(error)
            if not self._has_complained:
                self._has_complained = True
                self._complain(f"{self.path} cannot be written ({self._cause}); training continues, its log has a gap")

    def _open_file(self) -> int:
        """Open the file if it is closed or was removed. Return its size."""
        if self._fd >= 0:
            status = os.fstat(self._fd)
            if status.st_nlink:
                return status.st_size
            self._close_file()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":  # a crash or a full disk has cut off the last line
            size += os.write(self._fd, b"\n")
        for old in self.path.parent.glob(f"{self.path.stem}.*{self.path.suffix}"):  # machine.log_files was higher
            number = old.name[len(self.path.stem) + 1 : -len(self.path.suffix)]
            if number.isdecimal() and int(number) >= self._files:
                old.unlink(missing_ok=True)
        return size

    def _append(self, line: bytes, size: int) -> int:
        """Write a line, to the next file if the current one is full. Return the size of the file."""
        if size and size + len(line) > self._limit_bytes:
            self._rotate()
            size = 0
        written = os.write(self._fd, line)
        if written < len(line):
            os.ftruncate(self._fd, size)  # no other process writes this file
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        return size + written

    def _rotate(self) -> None:
        """Start the next file. The oldest file is overwritten first, so there are never too many files."""
        if self._files == 1:
            os.ftruncate(self._fd, 0)
        else:
            for number in range(self._files - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    self._numbered(number - 1).replace(self._numbered(number))
            self._close_file()
            self._open_file()

    def _numbered(self, number: int) -> Path:
        return self.path.with_suffix(f".{number}{self.path.suffix}") if number else self.path

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class LoggingBridge(logging.Handler):
    """Handler that writes records of Python's `logging` to a log, and warnings and errors also to worker.log."""

    def __init__(self, log: JsonLog, output: "WorkerLogStream | None" = None) -> None:
        super().__init__()
        self._log, self._output = log, output

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record. `reason` and `event` from `extra` become fields, as does the traceback of an exception."""
        try:
            text = record.getMessage()
        except Exception as error:  # the arguments do not fit the format: log the format
            text = f"{record.msg} ({type(error).__name__}: {error})"
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else None
        level = level_name(record.levelno)
        fields = {name: getattr(record, name, None) for name in ("reason", "event")}
        self._log.write(level, record.name, text, traceback=trace, **fields)
        if self._output is not None and record.levelno >= logging.WARNING:
            self._output.write(
                redact("\n".join(filter(None, (f"{level}: {record.name}: {text}", trace))).rstrip()) + "\n"
            )


def make_warning_hook(log: JsonLog, write: Callable[[str], object] | None = None) -> Callable[..., None]:
    """Return a function for `warnings.showwarning` that logs a warning and writes it (None: to standard error), with
    secrets redacted."""

    def show_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        log.write("warning", "warnings", str(message), reason=category.__name__, where=f"{filename}:{lineno}")
        with contextlib.suppress(OSError):
            output = file.write if file else write or sys.stderr.write
            output(redact(warnings.formatwarning(message, category, filename, lineno, line)))

    return show_warning


def level_name(number: int) -> Level:
    """Return the name of a level number of `logging`."""
    return next((name for name in reversed(LEVELS) if number >= LEVELS[name]), "debug")


def make_loggable(value: Any) -> Any:
    """Convert a value to JSON for a record, with secrets redacted and lists of bounded length."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): make_loggable(item) for name, item in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, list | tuple):
        return [make_loggable(item) for item in value[:MAX_ITEMS]]
    return redact(str(value))


def _encode_record(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


def _count_bytes(text: str) -> int:
    return len(text.encode(errors="backslashreplace"))


current: JsonLog | None = None
"""Log of the run that this process supervises; None if it supervises no run."""


def print_message(text: str) -> None:
    """Print a message on standard error and log it. Never raises, because the terminal may have failed."""
    text = redact(text)
    with contextlib.suppress(OSError, ValueError):
        print(f"ratchet: {text}", file=sys.stderr, flush=True)
    if current is not None:
        current.write("warning", "ratchet", text)


class LogTrimmer(threading.Thread):
    """Thread that limits the size of worker.log while workers append to it. If the disk hangs, only this thread is
    blocked.

    Workers and their C code have the file open, so it is copied and truncated instead of renamed.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        super().__init__(name="trimmer", daemon=True)
        self._path, self._limit_bytes = path, limit_bytes
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(CHECK_EVERY_S):
            trim_file(self._path, self._limit_bytes)

    def end(self) -> None:
        """Trim the file a last time and end the thread."""
        self._ended.set()
        self.join(1.0)
        if not self.is_alive():
            trim_file(self._path, self._limit_bytes)


def trim_file(path: Path, limit_bytes: int) -> bool:
    """Truncate the file if it is too large, and return whether it was truncated. Never raises: after an error of the
    disk, the file is unchanged.

    Lines that are written between the copy and the truncation are lost. Without space for a copy, all lines are lost,
    because the size limit has priority.
    """
    try:
        size = path.stat().st_size
        if size <= limit_bytes:
            return False
        with contextlib.suppress(OSError):
            _keep_end(path, limit_bytes)
        os.truncate(path, 0)  # writers with O_APPEND continue at 0
    except OSError:
        return False
    return True


def _keep_end(path: Path, limit_bytes: int) -> None:
    """Copy the last bytes to PATH.1, starting with a complete line."""
    target, partial = path.with_name(f"{path.name}.1"), path.with_name(f"{files.PARTIAL}{path.name}")
    try:
        with path.open("rb") as source, partial.open("wb") as copy:
            source.seek(-limit_bytes, os.SEEK_END)
            remaining = limit_bytes - len(source.readline(limit_bytes))
            while remaining > 0 and (block := source.read(min(BLOCK_BYTES, remaining))):
                copy.write(block)
                remaining -= len(block)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


class WorkerLogStream:
    """Stream that writes to worker.log, by descriptor 1 or 2 of the process. Errors of the disk are ignored."""

    def __init__(self, fd: int, limit_bytes: int) -> None:
        self._fd, self._limit_bytes = fd, limit_bytes
        self._dropped = 0

    def write(self, text: str) -> None:
        """Write complete lines that are already redacted."""
        with contextlib.suppress(OSError):
            if os.fstat(self._fd).st_size > OVERSIZE_FACTOR * self._limit_bytes:
                self._dropped += text.count("\n")
                return
            if self._dropped:
                notice = f"ratchet: {self._dropped} lines dropped here: too many at once; logs/ may have them\n"
                self._dropped, text = 0, notice + text
            os.write(self._fd, text[: self._limit_bytes].encode(errors="backslashreplace"))


class _CapturedStream(io.RawIOBase):
    """Bytes below sys.stdout or sys.stderr. A printed text with a line end becomes a record, so that no secret is ever
    split into two parts.

    If a line is overwritten (`\\r`, progress bars), its last version is logged.
    """

    def __init__(self, output: WorkerLogStream, log: JsonLog, level: Level, original: TextIO) -> None:
        self._output, self._log, self._level, self._original = output, log, level, original
        self.name = original.name
        self._text = ""
        self._mutex = threading.RLock()  # a signal handler may print

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._original.fileno()

    def write(self, data: Any, /) -> int:
        content = bytes(data)
        with self._mutex:
            text = self._text + content.decode(errors="backslashreplace")
            if "\r" in text:
                text = "\n".join(line.rpartition("\r")[2] for line in text.replace("\r\n", "\n").split("\n"))
            is_complete = text.endswith("\n") or len(text) > MAX_LINE
            self._text = "" if is_complete else text
            if is_complete:
                self._pass_on(text)
        return len(content)

    def end(self) -> None:
        """Write the incomplete line."""
        with self._mutex:
            line, self._text = self._text, ""
            if line:
                self._pass_on(f"{line}\n")

    def _pass_on(self, text: str) -> None:
        text = redact(text)
        self._output.write(text)
        if text.strip():
            self._log.write(self._level, "stdout" if self._level == "info" else "stderr", text.rstrip())


def capture_output(
    folder: Path, machine: Machine, attempt: int, rank: int | None, name: str = "worker"
) -> "OutputCapture":
    """Capture the output of this process until it ends."""
    context: dict[str, int] = {"attempt": attempt} if rank is None else {"attempt": attempt, "rank": rank}
    path = folder / (f"{name}.jsonl" if rank is None else f"{name}-{rank}.jsonl")
    output = WorkerLogStream(2, machine.log_max_bytes)
    log = JsonLog(path, machine, lambda: context, lambda text: output.write(f"ratchet: {text}\n"))
    return OutputCapture(log, output, machine)


def _replace_log_streams(replaced: Sequence[TextIO | None], stream: TextIO) -> None:
    """Let the handlers of all loggers write to `stream` instead of the replaced streams."""
    for logger in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
        for output in getattr(logger, "handlers", ()):  # a placeholder has none
            if isinstance(output, logging.StreamHandler) and any(output.stream is one for one in replaced):
                output.setStream(stream)


class OutputCapture:
    """Hooks that capture the output of this process. They are installed on construction."""

    def __init__(self, log: JsonLog, output: WorkerLogStream, machine: Machine) -> None:
        self._log, self._output = log, output
        self._streams = (
            _CapturedStream(output, log, "info", sys.stdout),
            _CapturedStream(output, log, "warning", sys.stderr),
        )
        originals = (sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(stream, "utf-8", "backslashreplace", newline="", write_through=True)
            for stream in self._streams
        )
        # Libraries that were imported before have handlers with the original streams.
        for replaced, stream in zip(originals, (sys.stdout, sys.stderr), strict=True):
            _replace_log_streams(replaced, stream)
        root = logging.getLogger()
        root.setLevel(machine.log_level.upper())
        root.addHandler(LoggingBridge(log, output))
        warnings.showwarning = make_warning_hook(log, output.write)
        sys.excepthook = self._log_exception
        threading.excepthook = self._log_thread_exception
        sys.unraisablehook = lambda details: self._log_exception(
            details.exc_type, details.exc_value, details.exc_traceback, "ignored by Python"
        )

    def end(self) -> None:
        """Write incomplete lines before the process ends."""
        for stream in self._streams:
            stream.end()

    def _log_exception(
        self,
        kind: type[BaseException],
        error: BaseException | None,
        trace: TracebackType | None,
        where: str = "uncaught",
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        self._output.write(redact(text))
        self._log.write("error", "python", f"{where}: {kind.__name__}: {error}", reason=where, traceback=text)

    def _log_thread_exception(self, details: Any) -> None:
        if details.exc_type is not SystemExit:
            name = details.thread.name if details.thread else "a thread"
            self._log_exception(details.exc_type, details.exc_value, details.exc_traceback, f"uncaught in {name}")
