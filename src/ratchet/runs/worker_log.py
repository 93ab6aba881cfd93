"""What a training process says, in its log and in worker.log: prints, `logging`, warnings, exceptions.

worker.log is what the process has as standard output and error: Python's part of it comes through here, without
secrets; what C code and a dying interpreter say, directly.
"""

import contextlib
import io
import logging
import os
import sys
import threading
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ratchet.config.schema import Machine
from ratchet.redaction import redacted
from ratchet.runs.log import FromLogging, Level, Log, level_of

LONGEST_LINE = 1 << 16
"""Characters that are kept while the end of a line has not come."""
ROOM = 2
"""worker.log may grow to so many times machine.log_bytes before Python's part of it is left out: the supervisor cuts it
at once that (run/log_output.py), but asks four times a second only."""


class Output:
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


class Printed(io.TextIOBase):
    """In the place of sys.stdout or sys.stderr: what is printed, a record for each piece that ends with its line.

    Of a line that is written over (`\\r`, progress bars) the last form counts.
    """

    def __init__(self, output: Output, log: Log, level: Level, original: TextIO) -> None:
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
        return _Bytes(self)

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
        text = redacted(text)
        self._output.write(text)
        if text.strip():
            self._log.write(self._level, "stdout" if self._level == "info" else "stderr", text.rstrip())


class _Bytes(io.RawIOBase):
    def __init__(self, printed: Printed) -> None:
        self._printed = printed

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        taken = bytes(data)
        self._printed.write(taken.decode(errors="backslashreplace"))
        return len(taken)


class _Echo(logging.Handler):
    """Python's own way with warnings and errors that nobody handles: a line on standard error."""

    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Write it into worker.log, with its traceback."""
        with contextlib.suppress(Exception):  # of arguments that do not fit; the log tells of them
            self._output.write(redacted(f"{level_of(record.levelno)}: {record.name}: {self.format(record)}\n"))


def capture(folder: Path, machine: Machine, attempt: int, rank: int | None, name: str = "worker") -> "Capture":
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
    output = Output(2, machine.log_bytes)
    log = Log(path, machine, lambda: about, lambda text: output.write(f"ratchet: {text}\n"))
    return Capture(log, output, machine)


class Capture:
    """The hooks of a process. Installed when it is made."""

    def __init__(self, log: Log, output: Output, machine: Machine) -> None:
        self._log, self._output = log, output
        self._printed = (Printed(output, log, "info", sys.stdout), Printed(output, log, "warning", sys.stderr))
        sys.stdout, sys.stderr = self._printed
        root = logging.getLogger()
        root.setLevel(machine.log_level.upper())
        root.addHandler(FromLogging(log))
        root.addHandler(_Echo(output))
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
        self._output.write(redacted(text))
        self._log.write("warning", "warnings", str(message), reason=category.__name__, where=f"{filename}:{lineno}")

    def _raised(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, where: str = "uncaught"
    ) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        self._output.write(redacted(text))
        self._log.write("error", "python", f"{where}: {kind.__name__}: {error}", reason=where, traceback=text)

    def _raised_in_thread(self, about: Any) -> None:
        if about.exc_type is not SystemExit:
            name = about.thread.name if about.thread else "a thread"
            self._raised(about.exc_type, about.exc_value, about.exc_traceback, f"uncaught in {name}")

    def _raised_nowhere(self, about: Any) -> None:
        self._raised(about.exc_type, about.exc_value, about.exc_traceback, "ignored by Python")
