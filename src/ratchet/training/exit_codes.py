"""Where an exception of a worker becomes an exit code, a line in the journal, and a record in the log.

Imports torch only for failures that are none of ours: a worker that asks a server has no use for it.
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

LONGEST_TEXT = 2000
"""Characters, in the journal."""

_OURS: tuple[tuple[type[RatchetError], FailureClass], ...] = (
    (StorageError, "storage"),  # it was waited for: no attempt of now would fare better
    (InsufficientMemoryError, "too_large"),
    (EndpointError, "endpoint"),
    (InputError, "data"),
    (DivergenceError, "diverged"),
    (MemoryExhaustedError, "out_of_memory"),
    (NonFiniteStateError, "hardware"),
    (PeersLostError, "peers"),
)
"""The first that fits counts."""


def report_worker_end(error: BaseException, journal: Journal, advice: str) -> int:
    """Tell why a worker ends; returns its exit code.

    Args:
        error: that ended it.
        journal: of the run.
        advice: what to do when memory ran out where nothing could be made smaller.
    """
    if isinstance(error, InterruptedRunError):
        return EXIT_INTERRUPTED
    failure = _classify_error(error)
    text = str(error) if isinstance(error, RatchetError) else f"{type(error).__name__}: {error}"
    if failure == "out_of_memory" and not isinstance(error, RatchetError):
        text += f"\n{advice}"
    needs = {}
    if isinstance(error, InsufficientMemoryError):
        needs = {"needed_bytes": error.needed_bytes, "available_bytes": error.available_bytes}
    text = redact(text)
    journal.append("failure", **{"class": failure}, text=text[:LONGEST_TEXT], **needs)
    logging.getLogger(__name__).error("%s", text, exc_info=error, extra={"reason": failure, "event": "failure"})
    if isinstance(error, PeersLostError):
        return EXIT_PEERS
    return EXIT_INPUT if isinstance(error, InputError) else EXIT_BUG


def _classify_error(error: BaseException) -> FailureClass:
    for kind, failure in _OURS:
        if isinstance(error, kind):
            return failure
    import torch

    from ratchet.models import oom

    if oom.is_out_of_memory(error):
        return "out_of_memory"
    if isinstance(error, torch.AcceleratorError):
        return "hardware"
    return "storage" if isinstance(error, OSError) else "bug"
