"""The log of whoever supervises a run: what its journal tells, in words, and what libraries say beside it."""

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
from ratchet.config.schema import Machine
from ratchet.errors import InterruptedRunError, RatchetError
from ratchet.redaction import redact
from ratchet.runs import log
from ratchet.runs.callbacks import Status
from ratchet.runs.directory import Run
from ratchet.runs.journal import JournalEvent
from ratchet.runs.log import JsonLog, Level, LogTrimmer
from ratchet.runs.status import describe_stop

Words = tuple[Level, str]


def _format_died(data: Mapping[str, Any]) -> Words:
    again = data["decision"] == "Retry"
    then = "it is started again" if again else "it is not started again"
    return "warning" if again else "error", f"the worker ended: {data['text']}; {then}"


def _format_ready(data: Mapping[str, Any]) -> Words:
    ranks = f", {data['ranks']} ranks" if data.get("ranks", 1) > 1 else ""
    place = f"on {data.get('device', '?')}{ranks}"
    return "info", f"ready at step {data['start_step']} of {data['planned_steps']}, {place}"


def _format_validation(data: Mapping[str, Any]) -> Words:
    better = ", the best so far" if data.get("improved") else ""
    return "info", f"validation loss {data['loss']:.4f} at step {data['step']}{better}"


def _format_checkpoint(data: Mapping[str, Any]) -> Words:
    return "debug", f"checkpoint of step {data['step']} sealed in {data['seconds']:.3g} s"


def _format_skipped(data: Mapping[str, Any]) -> Words:
    back = f"; back to the weights of step {data['to_step']}" if data.get("to_step") is not None else ""
    return "warning", f"step {data['step']} is left out: {data['reason']}{back}"


def _format_budget(data: Mapping[str, Any]) -> Words:
    tokens = data["budget"]["tokens"]
    size = "as large as they were asked for" if tokens is None else f"of {tokens:,} tokens at most"
    shrunk = data["action"] == "shrink"
    return "warning" if shrunk else "info", f"micro-batches of {data['phase']} {size}, from step {data['step']} on"


def _format_memory(data: Mapping[str, Any]) -> Words:
    return "debug", f"phase {data['phase']} has held {units.format_bytes(data['peak_bytes'])}"


def _format_mirror(data: Mapping[str, Any]) -> Words:
    return "debug", f"the {data['what']} of step {data['step']} is in the mirror"


def _format_spike(data: Mapping[str, Any]) -> Words:
    return "warning", f"step {data['step']} has an unusually large gradient: {data['grad_norm']:.4g}"


def _format_finished(data: Mapping[str, Any]) -> Words:
    return "info", f"finished at step {data['step']} ({str(data['reason']).replace('_', ' ')})"


_WORDS: dict[str, Callable[[Mapping[str, Any]], Words]] = {
    "refused": lambda data: ("error", f"refused: {data['text']}"),
    "attempt": lambda data: ("info", f"a worker is started, code version {data['code_version']}"),
    "ready": _format_ready,
    "forecast": lambda data: ("info", f"{units.format_bytes(data['available_bytes'])} of memory at hand"),
    "memory": _format_memory,
    "validation": _format_validation,
    "checkpoint": _format_checkpoint,
    "mirror": _format_mirror,
    "skipped": _format_skipped,
    "repeated": lambda data: ("warning", f"step {data['step']} is computed once more: {data['reason']}"),
    "spike": _format_spike,
    "budget": _format_budget,
    "scale": lambda data: ("debug", f"step {data['step']} is computed again with loss scale {data['loss_scale']:g}"),
    "alert": lambda data: ("warning", data["text"]),
    "notice": lambda data: ("info", data["text"]),
    "failure": lambda data: ("error", data["text"]),
    "died": _format_died,
    "stopped": lambda data: ("info", describe_stop(data)),
    "ended_early": lambda data: ("info", f"asked to end early: {data['text']}"),
    "finished": _format_finished,
}
"""Level and text, by kind. Steps and samples are figures, and stand in the journal."""


class JournalLogCallback:
    """An observer of the journal: what it tells from now on goes to the log. What was before was logged then.

    Args:
        log: is written to.
        journal: as it is now.
    """

    name = "log"

    def __init__(self, log: JsonLog, journal: Path) -> None:
        self._log, self._journal = log, journal
        self._began_t = round(time.time(), 3)
        self._began_file, self._began_size = self._file()

    @property
    def offset(self) -> int:
        """Where the journal ended when this began; 0 if it is another file now, come from a mirror."""
        file, _ = self._file()
        return self._began_size if file == self._began_file else 0

    def _file(self) -> tuple[int, int]:
        try:
            found = self._journal.stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_size

    def see(self, events: Sequence[JournalEvent]) -> None:
        """Take the next events; one that lacks what its kind has is logged as it is."""
        for event in events:
            words = _WORDS.get(event.kind)
            if words is None or event.t < self._began_t:
                continue
            try:
                level, text = words(event.data)
            except (KeyError, TypeError, ValueError, AttributeError):
                level, text = "warning", f"damaged event {event.kind}"
            about = {name: value for name, value in event.data.items() if name not in ("text", "forecast")}
            if "class" in about:
                about.setdefault("reason", about["class"])
            self._log.write(level, "journal", text, **{"event": event.kind, "attempt": event.attempt} | about)

    def finish(self, status: Status) -> None:
        """All there is was told."""


@contextmanager
def log_supervision(run: Run, machine: Machine) -> Iterator[JournalLogCallback]:
    """A log of this process, while it supervises the run; and its worker's output stays bounded.

    What Python's `logging` and `warnings` tell meanwhile goes there too, and nowhere with secrets. An exception that
    ends the supervision is logged, and goes on.

    Args:
        run: opened.
        machine: settings of the log.
    """
    own = JsonLog(
        run.paths.logs / "supervisor.jsonl", machine, lambda: {"attempt": run.journal.attempt}, log.print_message
    )
    trimmer = LogTrimmer(run.paths.worker_log, machine.log_bytes)
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
    """`logging` and `warnings` of this process are heard for this long, and say no secrets to anybody.

    Records are taken where they are made: MLflow's go to standard error past the root logger.
    """
    make, show = logging.getLogRecordFactory(), warnings.showwarning

    def made(*about: Any, **more: Any) -> logging.LogRecord:
        record = make(*about, **more)
        with suppress(Exception):  # arguments that do not fit the format: whoever handles it will say so
            record.msg, record.args = redact(record.getMessage()), None
            if record.exc_info:
                record.exc_text = redact("".join(traceback.format_exception(*record.exc_info)).rstrip())
            own.write(log.level_name(record.levelno), record.name, record.msg, traceback=record.exc_text)
        return record

    def shown(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        own.write("warning", "warnings", str(message), reason=category.__name__, where=f"{filename}:{lineno}")
        with suppress(OSError):
            (file or sys.stderr).write(redact(warnings.formatwarning(message, category, filename, lineno, line)))

    logging.setLogRecordFactory(made)
    warnings.showwarning = shown
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
        warnings.showwarning = show
