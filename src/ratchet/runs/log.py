"""A log: JSON lines in files of bounded size, written by one process; and what this process says to people.

A line is {"t": RFC 3339 in UTC, "level", "source", "pid", "text", ...}, without secrets (redaction.py). Logging hurts
nobody: a disk that takes nothing loses records, which are counted, and a call returns while another thread still waits
for the disk.
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

from ratchet.config.schema import Machine
from ratchet.redaction import redact
from ratchet.storage import files

Level = Literal["debug", "info", "warning", "error"]
LEVELS: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

LONGEST_BYTES = 1 << 16
"""Of a record, where files are larger."""
MOST_WAITING = 2_000
"""Records in memory while the disk lets somebody wait; what comes then is lost."""
MOST_ITEMS = 32
"""Of a list in a record."""


class JsonLog:
    """One log of this process; for any thread, and for signal handlers.

    Args:
        path: NAME.jsonl; older files are NAME.1.jsonl, NAME.2.jsonl, ...
        machine: says which levels, how many bytes a file, how many files.
        about: what every record tells beside its own, such as the attempt; asked for each.
        complain: told once, when records are lost.
    """

    def __init__(
        self, path: Path, machine: Machine, about: Callable[[], Mapping[str, Any]], complain: Callable[[str], None]
    ) -> None:
        self.path = path
        self._least = LEVELS[machine.log_level]
        self._limit_bytes, self._files = machine.log_bytes, machine.log_files
        self._about, self._complain = about, complain
        self._waiting: deque[bytes] = deque()
        self._mutex = threading.Lock()
        self._fd, self._torn, self._closed = -1, False, False
        self._lost, self._cause, self._told = 0, "", False

    def write(self, level: Level, source: str, text: str, **fields: Any) -> None:
        """Write a record, if its level is wanted. Never raises; waits for the disk only when no other thread does.

        Args:
            level: how grave it is.
            source: who says it.
            text: what.
            fields: what more there is to tell, such as `reason`; None is left out.
        """
        if LEVELS[level] < self._least or self._closed:
            return
        if len(self._waiting) >= MOST_WAITING:
            self._lost, self._cause = self._lost + 1, "the disk was too slow"
            return
        self._waiting.append(self._line(level, source, text, fields))
        while self._waiting and self._mutex.acquire(blocking=False):  # else whoever has it writes ours too
            try:
                while self._waiting:
                    self._put(self._waiting.popleft())
            finally:
                self._mutex.release()

    def close(self) -> None:
        """Write no more."""
        self._closed = True
        if self._mutex.acquire(timeout=1.0):  # a disk that hangs keeps it
            try:
                self._shut()
            finally:
                self._mutex.release()

    def _line(self, level: Level, source: str, text: str, fields: Mapping[str, Any]) -> bytes:
        """At most as long as it may be: the text is cut, and if that does not do, the fields go."""
        now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        about = {name: make_loggable(fields.get(name, value)) for name, value in self._about().items()}
        head = {"t": now, "level": level, "source": redact(source)[:200], **about, "pid": os.getpid()}
        more = {name: make_loggable(value) for name, value in fields.items() if value is not None and name not in head}
        text = redact(str(text))  # a damaged journal may tell anything
        line = _encode_record({**head, "text": text, **more})
        limit = min(self._limit_bytes, LONGEST_BYTES)
        if len(line) <= limit:
            return line
        if len(_encode_record({**head, "text": "", "cut_bytes": 0, **more})) > limit // 2:
            more = {"fields_left_out": sorted(more)[:MOST_ITEMS]}
        whole = text.encode(errors="backslashreplace")
        room = limit - len(_encode_record({**head, "text": "", "cut_bytes": len(whole), **more}))
        shown = whole[: max(0, room)].decode(errors="ignore")
        while shown and len(json.dumps(shown, ensure_ascii=False).encode(errors="backslashreplace")) - 2 > room:
            shown = shown[: len(shown) * 3 // 4]
        return _encode_record({**head, "text": shown, "cut_bytes": len(whole) - len(shown.encode()), **more})

    def _put(self, line: bytes) -> None:
        try:
            size = self._ready()
            if self._lost:
                told = f"{self._lost} record{'s' * (self._lost != 1)} lost here: {self._cause}"
                size = self._append(self._line("warning", "ratchet.log", told, {"lost": self._lost}), size)
                self._lost = 0
            self._append(line, size)
        except OSError as error:
            self._lost, self._cause = self._lost + 1, error.strerror or str(error)
            if not self._told:
                self._told = True
                self._complain(f"{self.path} cannot be written ({self._cause}); training goes on, its log has a gap")

    def _ready(self) -> int:
        """Open the file, if it is not, or if it was removed; returns its size."""
        if self._fd >= 0:
            found = os.fstat(self._fd)
            if found.st_nlink:
                return found.st_size
            self._shut()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        self._torn = bool(size) and os.pread(self._fd, 1, size - 1) != b"\n"
        for old in self.path.parent.glob(f"{self.path.stem}.*{self.path.suffix}"):  # of a time when more were kept
            number = old.name[len(self.path.stem) + 1 : -len(self.path.suffix)]
            if number.isdecimal() and int(number) >= self._files:
                old.unlink(missing_ok=True)
        return size

    def _append(self, line: bytes, size: int) -> int:
        """Write a line, in the next file if this one is full; returns the size."""
        line = b"\n" + line if self._torn else line
        if size + len(line) > self._limit_bytes and size:
            self._turn()
            size, line = 0, line.lstrip(b"\n")
        written = os.write(self._fd, line)
        if written < len(line):
            self._torn = True
            os.ftruncate(self._fd, size)  # nobody else writes here
            self._torn = False
            raise OSError(ENOSPC, os.strerror(ENOSPC))
        self._torn = False
        return size + written

    def _turn(self) -> None:
        """Begin the next file. The oldest goes first, so there are never more than there may be."""
        if self._files == 1:
            os.ftruncate(self._fd, 0)
        else:
            for number in range(self._files - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    self._piece(number - 1).replace(self._piece(number))
            self._shut()
            self._ready()
        self._torn = False

    def _piece(self, number: int) -> Path:
        return self.path.with_suffix(f".{number}{self.path.suffix}") if number else self.path

    def _shut(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class LoggingBridge(logging.Handler):
    """Takes to a log what is told to Python's `logging`."""

    def __init__(self, log: JsonLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Write it. `reason` and `event`, given by `extra`, become fields; an exception, its traceback."""
        try:
            text = record.getMessage()
        except Exception as error:  # the caller's arguments do not fit its format: no reason to fail, or to say nothing
            text = f"{record.msg} ({type(error).__name__}: {error})"
        trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else None
        about = {name: getattr(record, name, None) for name in ("reason", "event")}
        self._log.write(level_name(record.levelno), record.name, text, traceback=trace, **about)


def level_name(number: int) -> Level:
    """The level, by the number that `logging` gives it."""
    return next((name for name in reversed(LEVELS) if number >= LEVELS[name]), "debug")


def make_loggable(value: Any) -> Any:
    """A value as it may stand in a record: JSON, without secrets, and of bounded length where it is a list."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): make_loggable(one) for name, one in list(value.items())[:MOST_ITEMS]}
    if isinstance(value, list | tuple):
        return [make_loggable(one) for one in value[:MOST_ITEMS]]
    return redact(str(value))


def _encode_record(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode(errors="backslashreplace")


current: JsonLog | None = None
"""The log of the run that this process supervises now."""


def print_message(text: str) -> None:
    """Tell people, on standard error; and the log. Never raises: the terminal may be what is broken."""
    text = redact(text)
    with contextlib.suppress(OSError, ValueError):
        print(f"ratchet: {text}", file=sys.stderr, flush=True)
    if current is not None:
        current.write("warning", "ratchet", text)


# worker.log stays bounded: its workers have it open, C code among them, so it is copied and cut, not renamed.

ASK_EVERY_S = 0.25
BLOCK_BYTES = 1 << 20


class LogTrimmer(threading.Thread):
    """Keeps a file below a size while others append to it; a thread of its own, for its disk may hang.

    Args:
        path: the file; writers have it open with O_APPEND. It need not be there.
        limit_bytes: it is cut when it is larger. The end of what was there becomes PATH.1.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        super().__init__(name="trimmer", daemon=True)
        self._path, self._limit_bytes = path, limit_bytes
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(ASK_EVERY_S):
            trim_file(self._path, self._limit_bytes)

    def end(self) -> None:
        """Cut it for the last time."""
        self._over.set()
        self.join(1.0)
        if not self.is_alive():
            trim_file(self._path, self._limit_bytes)


def trim_file(path: Path, limit_bytes: int) -> bool:
    """Cut the file if it is larger; returns whether it was. Never raises: a disk that does not let us loses nothing.

    Lines that are written between the copy and the cut are lost, and where there is no room for a copy, all are: being
    bounded goes first.
    """
    try:
        size = path.stat().st_size
        if size <= limit_bytes:
            return False
        with contextlib.suppress(OSError):
            _keep_end(path, limit_bytes)
        os.truncate(path, 0)  # the next write of whoever appends begins at 0
    except OSError:
        return False
    return True


def _keep_end(path: Path, limit_bytes: int) -> None:
    """Copy the last bytes, from the beginning of a line on, beside the file."""
    target, aside = path.with_name(f"{path.name}.1"), path.with_name(f"{files.PARTIAL}{path.name}")
    try:
        with path.open("rb") as source, aside.open("wb") as copy:
            source.seek(-limit_bytes, os.SEEK_END)
            left = limit_bytes - len(source.readline(limit_bytes))
            while left > 0 and (block := source.read(min(BLOCK_BYTES, left))):
                copy.write(block)
                left -= len(block)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


# What a training process says, in its log and in worker.log: prints, `logging`, warnings, exceptions.
#
# worker.log is what the process has as standard output and error: Python's part of it comes through here, without
# secrets; what C code and a dying interpreter say, directly.

LONGEST_LINE = 1 << 16
"""Characters that are kept while the end of a line has not come."""
ROOM = 2
"""worker.log may grow to so many times machine.log_bytes before Python's part of it is left out: the supervisor cuts it
at once that (run/log_output.py), but asks four times a second only."""


class WorkerLogStream:
    """worker.log, as the process has it: as descriptor 1 or 2. A disk that takes nothing is nobody's trouble."""

    def __init__(self, fd: int, limit_bytes: int) -> None:
        self._fd, self._limit_bytes = fd, limit_bytes
        self._left_out = 0

    def write(self, text: str) -> None:
        """Write whole lines, without secrets."""
        with contextlib.suppress(OSError):
            if os.fstat(self._fd).st_size > ROOM * self._limit_bytes:
                self._left_out += text.count("\n")
                return
            if self._left_out:
                told = f"ratchet: {self._left_out} lines left out here: too many at once; logs/ may have them\n"
                self._left_out, text = 0, told + text
            os.write(self._fd, text[: self._limit_bytes].encode(errors="backslashreplace"))


class LoggedTextStream(io.TextIOBase):
    """In the place of sys.stdout or sys.stderr: what is printed, a record for each piece that ends with its line.

    Of a line that is written over (`\\r`, progress bars) the last form counts.
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
        """For those who write bytes."""
        return _LoggedByteStream(self)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._original.fileno()

    def write(self, text: str) -> int:
        """Take text; it goes on when its line is at its end: a secret must not come in two parts."""
        with self._mutex:
            whole = self._text + text
            if "\r" in whole:
                whole = "\n".join(line.rpartition("\r")[2] for line in whole.replace("\r\n", "\n").split("\n"))
            if whole.endswith("\n") or len(whole) > LONGEST_LINE:
                self._text = ""
                self._tell(whole)
            else:
                self._text = whole
        return len(text)

    def reconfigure(self, **about: object) -> None:
        """It is as it is: some libraries ask for UTF-8, or for lines."""

    def flush(self) -> None:
        """Nothing waits but a line that has no end yet."""

    def end(self) -> None:
        """Let that go on as well."""
        with self._mutex:
            rest, self._text = self._text, ""
            if rest:
                self._tell(f"{rest}\n")

    def _tell(self, text: str) -> None:
        text = redact(text)
        self._output.write(text)
        if text.strip():
            self._log.write(self._level, "stdout" if self._level == "info" else "stderr", text.rstrip())


class _LoggedByteStream(io.RawIOBase):
    def __init__(self, printed: LoggedTextStream) -> None:
        self._printed = printed

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        taken = bytes(data)
        self._printed.write(taken.decode(errors="backslashreplace"))
        return len(taken)


class _StderrEcho(logging.Handler):
    """Python's own way with warnings and errors that nobody handles: a line on standard error."""

    def __init__(self, output: WorkerLogStream) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Write it into worker.log, with its traceback."""
        with contextlib.suppress(Exception):  # of arguments that do not fit; the log tells of them
            self._output.write(redact(f"{level_name(record.levelno)}: {record.name}: {self.format(record)}\n"))


def capture_output(
    folder: Path, machine: Machine, attempt: int, rank: int | None, name: str = "worker"
) -> "OutputCapture":
    """Take over what this process says, for good.

    Args:
        folder: of the run's logs.
        machine: settings of the log.
        attempt: which it is.
        rank: of several; None: it is alone.
        name: of the log; the rank is added.
    """
    about: dict[str, int] = {"attempt": attempt} if rank is None else {"attempt": attempt, "rank": rank}
    path = folder / (f"{name}.jsonl" if rank is None else f"{name}-{rank}.jsonl")
    output = WorkerLogStream(2, machine.log_bytes)
    log = JsonLog(path, machine, lambda: about, lambda text: output.write(f"ratchet: {text}\n"))
    return OutputCapture(log, output, machine)


class OutputCapture:
    """The hooks of a process. Installed when it is made."""

    def __init__(self, log: JsonLog, output: WorkerLogStream, machine: Machine) -> None:
        self._log, self._output = log, output
        self._printed = (
            LoggedTextStream(output, log, "info", sys.stdout),
            LoggedTextStream(output, log, "warning", sys.stderr),
        )
        sys.stdout, sys.stderr = self._printed
        root = logging.getLogger()
        root.setLevel(machine.log_level.upper())
        root.addHandler(LoggingBridge(log))
        root.addHandler(_StderrEcho(output))
        warnings.showwarning = self._warned
        sys.excepthook = self._raised
        threading.excepthook = self._raised_in_thread
        sys.unraisablehook = self._raised_nowhere

    def end(self) -> None:
        """What has no end of line yet, goes on; the process may end."""
        for printed in self._printed:
            printed.end()

    def _warned(
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

    def _raised(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, where: str = "uncaught"
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        self._output.write(redact(text))
        self._log.write("error", "python", f"{where}: {kind.__name__}: {error}", reason=where, traceback=text)

    def _raised_in_thread(self, about: Any) -> None:
        if about.exc_type is not SystemExit:
            name = about.thread.name if about.thread else "a thread"
            self._raised(about.exc_type, about.exc_value, about.exc_traceback, f"uncaught in {name}")

    def _raised_nowhere(self, about: Any) -> None:
        self._raised(about.exc_type, about.exc_value, about.exc_traceback, "ignored by Python")
