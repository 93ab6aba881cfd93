"""Logs of a run: JSON lines in files of bounded size, and the capture of everything a worker prints.

A line is {"t": RFC 3339 in UTC, "level", "source", "pid", "text", ...}, with secrets redacted (redaction.py). One
process writes a log. Logging never stops a run: records that a full disk rejects are lost and counted, and no call
waits while another thread waits for the disk.
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
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from errno import ENOSPC
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TextIO

from ratchet.config.machine import Machine
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
"""Largest record, where files may be larger."""
MAX_WAITING = 2_000
"""Records kept in memory while the disk is slow; further ones are lost."""
MAX_ITEMS = 32
"""Items of a list in a record."""


class JsonLog:
    """A log of this process, for any thread and for signal handlers.

    Args:
        path: NAME.jsonl; older files are NAME.1.jsonl, NAME.2.jsonl, ...
        machine: settings for the level, the size of a file, and the number of files.
        context: returns fields that every record has, such as the attempt.
        complain: called once if records are lost.
    """

    def __init__(
        self, path: Path, machine: Machine, context: Callable[[], Mapping[str, Any]], complain: Callable[[str], None]
    ) -> None:
        self.path = path
        self._min_level = LEVELS[machine.log_level]
        self._limit_bytes, self._files = machine.log_max_bytes, machine.log_files
        self._context, self._complain = context, complain
        self._waiting: deque[bytes] = deque()
        self._mutex = threading.Lock()
        self._fd, self._is_torn, self._is_closed = -1, False, False
        self._lost, self._cause, self._has_complained = 0, "", False

    def write(self, level: Level, source: str, text: str, **fields: Any) -> None:
        """Write a record if its level is enabled. Never raises; waits for the disk only if no other thread does.

        Args:
            level: severity.
            source: component that reports it.
            text: message.
            fields: further fields, such as `reason`; None values are omitted.
        """
        if LEVELS[level] < self._min_level or self._is_closed:
            return
        if len(self._waiting) >= MAX_WAITING:
            self._lost, self._cause = self._lost + 1, "the disk was too slow"
            return
        self._waiting.append(self._encode(level, source, text, fields))
        while self._waiting and self._mutex.acquire(blocking=False):  # otherwise the holder writes this record too
            try:
                while self._waiting:
                    self._write_line(self._waiting.popleft())
            finally:
                self._mutex.release()

    def close(self) -> None:
        """Close the log; later records are dropped."""
        self._is_closed = True
        if self._mutex.acquire(timeout=1.0):  # a hanging disk may hold it
            try:
                self._close_file()
            finally:
                self._mutex.release()

    def _encode(self, level: Level, source: str, text: str, fields: Mapping[str, Any]) -> bytes:
        """Encode a record within the size limit: the text is cut, and if that is not enough, the fields are omitted."""
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        context = {name: make_loggable(fields.get(name, value)) for name, value in self._context().items()}
        head = {"t": now, "level": level, "source": redact(source)[:200], **context, "pid": os.getpid()}
        more = {name: make_loggable(value) for name, value in fields.items() if value is not None and name not in head}
        text = redact(str(text))  # a damaged journal may contain anything
        line = _encode_record({**head, "text": text, **more})
        limit = min(self._limit_bytes, MAX_RECORD_BYTES)
        if len(line) <= limit:
            return line
        if len(_encode_record({**head, "text": "", "cut_bytes": 0, **more})) > limit // 2:
            more = {"omitted_fields": sorted(more)[:MAX_ITEMS]}
        whole = text.encode(errors="backslashreplace")
        room = limit - len(_encode_record({**head, "text": "", "cut_bytes": len(whole), **more}))
        shown = whole[: max(0, room)].decode(errors="ignore")
        while shown and len(json.dumps(shown, ensure_ascii=False).encode(errors="backslashreplace")) - 2 > room:
            shown = shown[: len(shown) * 3 // 4]
        return _encode_record({**head, "text": shown, "cut_bytes": len(whole) - len(shown.encode()), **more})

    def _write_line(self, line: bytes) -> None:
        try:
            size = self._open_file()
            if self._lost:
                text = f"{self._lost} record{'s' * (self._lost != 1)} lost here: {self._cause}"
                size = self._append(self._encode("warning", "ratchet.log", text, {"lost": self._lost}), size)
                self._lost = 0
            self._append(line, size)
        except OSError as error:
            self._lost, self._cause = self._lost + 1, error.strerror or str(error)
            if not self._has_complained:
                self._has_complained = True
                self._complain(f"{self.path} cannot be written ({self._cause}); training continues, its log has a gap")

    def _open_file(self) -> int:
        """Open the file if it is closed or was removed; return its size."""
        if self._fd >= 0:
            found = os.fstat(self._fd)
            if found.st_nlink:
                return found.st_size
            self._close_file()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        self._is_torn = bool(size) and os.pread(self._fd, 1, size - 1) != b"\n"
        for old in self.path.parent.glob(f"{self.path.stem}.*{self.path.suffix}"):  # from when more files were kept
            number = old.name[len(self.path.stem) + 1 : -len(self.path.suffix)]
            if number.isdecimal() and int(number) >= self._files:
                old.unlink(missing_ok=True)
        return size

    def _append(self, line: bytes, size: int) -> int:
        """Write a line, in the next file if this one is full; return the size."""
        line = b"\n" + line if self._is_torn else line
        if size + len(line) > self._limit_bytes and size:
            self._rotate()
            size, line = 0, line.lstrip(b"\n")
        written = os.write(self._fd, line)
        if written < len(line):
            self._is_torn = True
            os.ftruncate(self._fd, size)  # no other process writes this file
            self._is_torn = False
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        self._is_torn = False
        return size + written

    def _rotate(self) -> None:
        """Start the next file. The oldest is overwritten first, so there are never too many."""
        if self._files == 1:
            os.ftruncate(self._fd, 0)
        else:
            for number in range(self._files - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    self._numbered(number - 1).replace(self._numbered(number))
            self._close_file()
            self._open_file()
        self._is_torn = False

    def _numbered(self, number: int) -> Path:
        return self.path.with_suffix(f".{number}{self.path.suffix}") if number else self.path

    def _close_file(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class LoggingBridge(logging.Handler):
    """Writes records of Python's `logging` to a log."""

    def __init__(self, log: JsonLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record. `reason` and `event` from `extra` become fields, as does the traceback of an exception."""
        try:
            text = record.getMessage()
        except Exception as error:  # arguments that do not fit the format; log the format itself
            text = f"{record.msg} ({type(error).__name__}: {error})"
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else None
        fields = {name: getattr(record, name, None) for name in ("reason", "event")}
        self._log.write(level_name(record.levelno), record.name, text, traceback=trace, **fields)


def level_name(number: int) -> Level:
    """Name of a level number of `logging`."""
    return next((name for name in reversed(LEVELS) if number >= LEVELS[name]), "debug")


def make_loggable(value: Any) -> Any:
    """Convert a value for a record: JSON, without secrets, with lists of bounded length."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): make_loggable(one) for name, one in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, list | tuple):
        return [make_loggable(one) for one in value[:MAX_ITEMS]]
    return redact(str(value))


def _encode_record(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


current: JsonLog | None = None
"""Log of the run that this process supervises, if it does."""


def print_message(text: str) -> None:
    """Print a message on standard error and log it. Never raises, because the terminal may be what failed."""
    text = redact(text)
    with contextlib.suppress(OSError, ValueError):
        print(f"ratchet: {text}", file=sys.stderr, flush=True)
    if current is not None:
        current.write("warning", "ratchet", text)


CHECK_EVERY_S = 0.25
BLOCK_BYTES = 1 << 20


class LogTrimmer(threading.Thread):
    """Keeps a file below a size while others append to it, in a thread of its own, because the disk may hang.

    The file is worker.log. Workers, C code among them, have it open, so it is copied and truncated instead of renamed.

    Args:
        path: the file, opened by its writers with O_APPEND. It may not exist.
        limit_bytes: it is truncated when it is larger. The end of its content becomes PATH.1.
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
    """Truncate the file if it is too large; return whether it was. Never raises: if the disk refuses, nothing is lost.

    Lines that are written between the copy and the truncation are lost; without space for a copy, all lines are. The
    bound has priority.
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
    """Copy the last bytes, starting with a complete line, to PATH.1."""
    target, partial = path.with_name(f"{path.name}.1"), path.with_name(f"{files.PARTIAL}{path.name}")
    try:
        with path.open("rb") as source, partial.open("wb") as copy:
            source.seek(-limit_bytes, os.SEEK_END)
            left = limit_bytes - len(source.readline(limit_bytes))
            while left > 0 and (block := source.read(min(BLOCK_BYTES, left))):
                copy.write(block)
                left -= len(block)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


# Output of a worker: prints, `logging`, warnings and exceptions go to its log and to worker.log.
#
# worker.log is the process's standard output and error. Python's part of it passes through here and is redacted; output
# of C code and of a crashing interpreter is written directly.

MAX_LINE = 1 << 16
"""Characters that are kept while a line has no end."""
OVERSIZE_FACTOR = 2
"""Python's output is dropped while worker.log is larger than this many times machine.log_max_bytes. The supervisor
truncates it at once that size, but checks only four times a second."""


class WorkerLogStream:
    """worker.log as descriptor 1 or 2 of the process. Errors of the disk are ignored."""

    def __init__(self, fd: int, limit_bytes: int) -> None:
        self._fd, self._limit_bytes = fd, limit_bytes
        self._dropped = 0

    def write(self, text: str) -> None:
        """Write whole lines that are already redacted."""
        with contextlib.suppress(OSError):
            if os.fstat(self._fd).st_size > OVERSIZE_FACTOR * self._limit_bytes:
                self._dropped += text.count("\n")
                return
            if self._dropped:
                notice = f"ratchet: {self._dropped} lines dropped here: too many at once; logs/ may have them\n"
                self._dropped, text = 0, notice + text
            os.write(self._fd, text[: self._limit_bytes].encode(errors="backslashreplace"))


class LoggedTextStream(io.TextIOBase):
    """Replaces sys.stdout or sys.stderr: writes a record for each printed piece that ends with a line end.

    Of a line that is overwritten (`\\r`, progress bars), the last version is logged.
    """

    def __init__(self, output: WorkerLogStream, log: JsonLog, level: Level, original: TextIO) -> None:
        self._output, self._log, self._level, self._original = output, log, level, original
        self._text = ""
        self._mutex = threading.RLock()  # a signal handler may print

    encoding = "utf-8"
    errors = "backslashreplace"

    @property
    def name(self) -> str:
        return self._original.name

    @property
    def buffer(self) -> io.RawIOBase:
        """For code that writes bytes."""
        return _LoggedByteStream(self)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._original.fileno()

    def write(self, text: str) -> int:
        """Take text; it is passed on when its line is complete, so that a secret never comes in two parts."""
        with self._mutex:
            whole = self._text + text
            if "\r" in whole:
                whole = "\n".join(line.rpartition("\r")[2] for line in whole.replace("\r\n", "\n").split("\n"))
            if whole.endswith("\n") or len(whole) > MAX_LINE:
                self._text = ""
                self._write(whole)
            else:
                self._text = whole
        return len(text)

    def reconfigure(self, **options: object) -> None:
        """Ignored: some libraries request UTF-8 or line buffering."""

    def flush(self) -> None:
        """Nothing to flush: only an incomplete line is buffered."""

    def end(self) -> None:
        """Write the incomplete line."""
        with self._mutex:
            rest, self._text = self._text, ""
            if rest:
                self._write(f"{rest}\n")

    def _write(self, text: str) -> None:
        text = redact(text)
        self._output.write(text)
        if text.strip():
            self._log.write(self._level, "stdout" if self._level == "info" else "stderr", text.rstrip())


class _LoggedByteStream(io.RawIOBase):
    def __init__(self, stream: LoggedTextStream) -> None:
        self._stream = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        content = bytes(data)
        self._stream.write(content.decode(errors="backslashreplace"))
        return len(content)


class _StderrEcho(logging.Handler):
    """Prints warnings and errors of `logging` on standard error, as Python does without handlers."""

    def __init__(self, output: WorkerLogStream) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record to worker.log, with its traceback."""
        with contextlib.suppress(Exception):  # arguments that do not fit the format; the log reports them
            self._output.write(redact(f"{level_name(record.levelno)}: {record.name}: {self.format(record)}\n"))


def capture_output(
    folder: Path, machine: Machine, attempt: int, rank: int | None, name: str = "worker"
) -> "OutputCapture":
    """Capture the output of this process until it ends.

    Args:
        folder: of the run's logs.
        machine: settings of the log.
        attempt: number of the attempt.
        rank: of this process; None if it is the only one.
        name: of the log; the rank is appended.
    """
    context: dict[str, int] = {"attempt": attempt} if rank is None else {"attempt": attempt, "rank": rank}
    path = folder / (f"{name}.jsonl" if rank is None else f"{name}-{rank}.jsonl")
    output = WorkerLogStream(2, machine.log_max_bytes)
    log = JsonLog(path, machine, lambda: context, lambda text: output.write(f"ratchet: {text}\n"))
    return OutputCapture(log, output, machine)


class OutputCapture:
    """The hooks of a process, installed on construction."""

    def __init__(self, log: JsonLog, output: WorkerLogStream, machine: Machine) -> None:
        self._log, self._output = log, output
        self._streams = (
            LoggedTextStream(output, log, "info", sys.stdout),
            LoggedTextStream(output, log, "warning", sys.stderr),
        )
        sys.stdout, sys.stderr = self._streams
        root = logging.getLogger()
        root.setLevel(machine.log_level.upper())
        root.addHandler(LoggingBridge(log))
        root.addHandler(_StderrEcho(output))
        warnings.showwarning = self._log_warning
        sys.excepthook = self._log_exception
        threading.excepthook = self._log_thread_exception
        sys.unraisablehook = self._log_unraisable

    def end(self) -> None:
        """Write incomplete lines before the process ends."""
        for stream in self._streams:
            stream.end()

    def _log_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        text = warnings.formatwarning(message, category, filename, lineno, line)
        if file is not None:
            file.write(text)
            return
        self._output.write(redact(text))
        self._log.write("warning", "warnings", str(message), reason=category.__name__, where=f"{filename}:{lineno}")

    def _log_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, where: str = "uncaught"
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        self._output.write(redact(text))
        self._log.write("error", "python", f"{where}: {kind.__name__}: {error}", reason=where, traceback=text)

    def _log_thread_exception(self, details: Any) -> None:
        if details.exc_type is not SystemExit:
            name = details.thread.name if details.thread else "a thread"
            self._log_exception(details.exc_type, details.exc_value, details.exc_traceback, f"uncaught in {name}")

    def _log_unraisable(self, details: Any) -> None:
        self._log_exception(details.exc_type, details.exc_value, details.exc_traceback, "ignored by Python")
