"""Log of the supervisor: the events of the journal as text, and the messages of its libraries."""

import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from ratchet.config import units
from ratchet.config.machine import Machine
from ratchet.errors import InterruptedRunError, RatchetError
from ratchet.redaction import redact
from ratchet.runs import log
from ratchet.runs.callbacks import Status
from ratchet.runs.directory import RunDirectory
from ratchet.runs.journal import JournalEvent
from ratchet.runs.log import JsonLog, Level, LogTrimmer
from ratchet.runs.status import describe_stop

LogMessage = tuple[Level, str]


def _format_worker_exited(data: Mapping[str, Any]) -> LogMessage:
    is_retried = data["decision"] == "Retry"
    consequence = "restarting" if is_retried else "not restarting"
    return "warning" if is_retried else "error", f"the worker ended: {data['text']}; {consequence}"


def _format_worker_ready(data: Mapping[str, Any]) -> LogMessage:
    ranks = f", {data['ranks']} ranks" if data.get("ranks", 1) > 1 else ""
    place = f"on {data.get('device', '?')}{ranks}"
    return "info", f"ready at step {data['start_step']} of {data['planned_steps']}, {place}"


def _format_validation(data: Mapping[str, Any]) -> LogMessage:
    best = ", the best so far" if data.get("improved") else ""
    return "info", f"validation loss {data['loss']:.4f} at step {data['step']}{best}"


def _format_checkpoint(data: Mapping[str, Any]) -> LogMessage:
    return "debug", f"checkpoint of step {data['step']} saved in {data['seconds']:.3g} s"


def _format_skipped(data: Mapping[str, Any]) -> LogMessage:
    step = data.get("rollback_step")
    rollback = f"; rolled back to the weights of step {step}" if step is not None else ""
    return "warning", f"step {data['step']} is skipped: {data['reason']}{rollback}"


def _format_budget(data: Mapping[str, Any]) -> LogMessage:
    tokens = data["budget"]["tokens"]
    limit = "as large as configured" if tokens is None else f"of at most {tokens:,} tokens"
    is_smaller = data["action"] == "shrink"
    return "warning" if is_smaller else "info", f"micro-batches of {data['phase']} {limit}, from step {data['step']} on"


def _format_memory(data: Mapping[str, Any]) -> LogMessage:
    return "debug", f"phase {data['phase']} used {units.format_bytes(data['peak_bytes'])} at its peak"


def _format_replicated(data: Mapping[str, Any]) -> LogMessage:
    return "debug", f"the {data['artifact']} of step {data['step']} is in the replica"


def _format_spike(data: Mapping[str, Any]) -> LogMessage:
    return "warning", f"step {data['step']} has an unusually large gradient: {data['grad_norm']:.4g}"


def _format_finished(data: Mapping[str, Any]) -> LogMessage:
    return "info", f"finished at step {data['step']} ({str(data['reason']).replace('_', ' ')})"


_FORMATTERS: dict[str, Callable[[Mapping[str, Any]], LogMessage]] = {
    "start_refused": lambda data: ("error", f"start refused: {data['text']}"),
    "attempt_started": lambda data: ("info", f"starting a worker, code version {data['code_version']}"),
    "worker_ready": _format_worker_ready,
    "memory_forecast": lambda data: ("info", f"{units.format_bytes(data['available_bytes'])} of memory available"),
    "memory_peak": _format_memory,
    "validation": _format_validation,
    "checkpoint_saved": _format_checkpoint,
    "replicated": _format_replicated,
    "step_skipped": _format_skipped,
    "step_repeated": lambda data: ("warning", f"step {data['step']} is repeated: {data['reason']}"),
    "gradient_spike": _format_spike,
    "microbatch_budget": _format_budget,
    "loss_scale": lambda data: ("debug", f"step {data['step']} is repeated with loss scale {data['loss_scale']:g}"),
    "alert": lambda data: ("warning", data["text"]),
    "notice": lambda data: ("info", data["text"]),
    "worker_error": lambda data: ("error", data["text"]),
    "worker_exited": _format_worker_exited,
    "interrupted": lambda data: ("info", describe_stop(data)),
    "pruned": lambda data: ("info", f"pruned: {data['text']}"),
    "finished": _format_finished,
}
"""Level and text, by event kind. Steps and samples are not logged: they are in the journal."""


class JournalLogCallback:
    """Writes the events of a journal to the log, from now on; earlier ones were logged when they occurred.

    Args:
        log: destination.
        journal: path of the journal.
    """

    name = "log"

    def __init__(self, log: JsonLog, journal: Path) -> None:
        self._log, self._journal = log, journal
        self._began_t = round(time.time(), 3)
        self._began_file, self._began_size = self._file()

    @property
    def offset(self) -> int:
        """Size of the journal when this began; 0 if the file was since replaced by one from the replica."""
        file, _ = self._file()
        return self._began_size if file == self._began_file else 0

    def _file(self) -> tuple[int, int]:
        try:
            found = self._journal.stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_size

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Write the next events. An event that lacks a key of its kind is logged as damaged."""
        for event in events:
            formatter = _FORMATTERS.get(event.kind)
            if formatter is None or event.t < self._began_t:
                continue
            try:
                level, text = formatter(event.data)
            except (KeyError, TypeError, ValueError, AttributeError):
                level, text = "warning", f"damaged event {event.kind}"
            fields = {name: value for name, value in event.data.items() if name not in ("text", "forecast")}
            if "failure_class" in fields:
                fields.setdefault("reason", fields["failure_class"])
            self._log.write(level, "journal", text, **{"event": event.kind, "attempt": event.attempt} | fields)

    def on_end(self, status: Status) -> None:
        """Nothing is left to write."""


@contextmanager
def log_supervision(run: RunDirectory, machine: Machine) -> Iterator[JournalLogCallback]:
    """Keep a log of this process while it supervises the run, and limit the size of its worker's output.

    The log includes messages of Python's `logging` and `warnings`. Secrets are redacted there and in what those modules
    print. An exception that ends the supervision is logged and raised again.

    Args:
        run: opened.
        machine: settings of the log.
    """
    own = JsonLog(
        run.paths.logs / "supervisor.jsonl", machine, lambda: {"attempt": run.journal.attempt}, log.print_message
    )
    trimmer = LogTrimmer(run.paths.worker_log, machine.log_max_bytes)
    before, log.current = log.current, own
    trimmer.start()
    try:
        with _capture_logging(own):
            yield JournalLogCallback(own, run.paths.journal)
    except BaseException as error:
        _log_end(own, error)
        raise
    finally:
        trimmer.end()
        log.current = before
        own.close()


def _log_end(own: JsonLog, error: BaseException) -> None:
    name = type(error).__name__
    if isinstance(error, InterruptedRunError):
        own.write("info", "ratchet", str(error), reason=name)
    elif isinstance(error, RatchetError):
        own.write("error", "ratchet", str(error), reason=name)
    else:
        trace = "".join(traceback.format_exception(error))
        own.write("error", "ratchet", f"{name}: {error}", reason=name, traceback=trace)


@contextmanager
def _capture_logging(own: JsonLog) -> Iterator[None]:
    """Copy `logging` and `warnings` of this process to the log, and redact secrets everywhere.

    Records are intercepted where they are made, because MLflow's reach standard error past the root logger.
    """
    make, show = logging.getLogRecordFactory(), warnings.showwarning

    def make_record(*args: Any, **fields: Any) -> logging.LogRecord:
        record = make(*args, **fields)
        with suppress(Exception):  # arguments that do not fit the format: the handler reports that
            record.msg, record.args = redact(record.getMessage()), None
            if record.exc_info:
                record.exc_text = redact("".join(traceback.format_exception(*record.exc_info)).rstrip())
            own.write(log.level_name(record.levelno), record.name, record.msg, traceback=record.exc_text)
        return record

    def show_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        own.write("warning", "warnings", str(message), reason=category.__name__, where=f"{filename}:{lineno}")
        with suppress(OSError):
            (file or sys.stderr).write(redact(warnings.formatwarning(message, category, filename, lineno, line)))

    logging.setLogRecordFactory(make_record)
    warnings.showwarning = show_warning

    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        warnings.showwarning = show
