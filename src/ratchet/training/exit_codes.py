"""Turns the exception that ends a worker into an exit code, a journal event and a log record.

The module imports torch only for exceptions that _FAILURE_CLASSES does not list, because a worker that calls a server
needs no torch.
"""

import logging

from ratchet.errors import (
    EXIT_BUG,
    EXIT_INPUT,
    EXIT_INTERRUPTED,
    EXIT_PEERS,
    DivergenceError,
    EndpointError,
    InputError,
    InsufficientMemoryError,
    InterruptedRunError,
    MemoryExhaustedError,
    NonFiniteStateError,
    PeersLostError,
    RatchetError,
    StorageError,
)
from ratchet.redaction import redact
from ratchet.runs.journal import Journal
from ratchet.runs.restart_policy import FailureClass

MAX_TEXT_LENGTH = 2000

_FAILURE_CLASSES: tuple[tuple[type[RatchetError], FailureClass], ...] = (
    (StorageError, "storage"),  # the worker has already waited; another attempt would not help
    (InsufficientMemoryError, "too_large"),
    (EndpointError, "endpoint"),
    (InputError, "data"),
    (DivergenceError, "diverged"),
    (MemoryExhaustedError, "out_of_memory"),
    (NonFiniteStateError, "hardware"),
    (PeersLostError, "peers"),
)
"""Failure class by type of exception. The first match counts, so a subclass is listed before its base class."""


def report_worker_end(error: BaseException, journal: Journal, memory_advice: str) -> int:
    """Report why a worker ends; return its exit code. `memory_advice` is for memory that ran out outside of a step."""
    if isinstance(error, InterruptedRunError):
        return EXIT_INTERRUPTED
    failure = _classify_error(error)
    text = str(error) if isinstance(error, RatchetError) else f"{type(error).__name__}: {error}"
    if failure == "out_of_memory" and not isinstance(error, RatchetError):
        text += f"\n{memory_advice}"
    sizes = {}
    if isinstance(error, InsufficientMemoryError):
        sizes = {"needed_bytes": error.needed_bytes, "available_bytes": error.available_bytes}
    text = redact(text)
    journal.append("worker_error", failure_class=failure, text=text[:MAX_TEXT_LENGTH], **sizes)
    logging.getLogger(__name__).error("%s", text, exc_info=error, extra={"reason": failure, "event": "worker_error"})
    if isinstance(error, PeersLostError):
        return EXIT_PEERS
    return EXIT_INPUT if isinstance(error, InputError) else EXIT_BUG


def _classify_error(error: BaseException) -> FailureClass:
    for error_type, failure in _FAILURE_CLASSES:
        if isinstance(error, error_type):
            return failure
    from ratchet.models import oom

    if oom.is_out_of_memory(error):
        return "out_of_memory"
    if oom.is_device_lost(error):
        # These two fail again on the same GPU: an index outside of a table, and a build of torch for other GPUs.
        is_lasting = any(text in str(error) for text in ("device-side assert", "no kernel image"))
        return "bug" if is_lasting else "hardware"
    return "storage" if isinstance(error, OSError) else "bug"
