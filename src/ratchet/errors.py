"""All exceptions of Ratchet, and the exit code of a command that fails with each of them.

    RatchetError                       1   a bug, or a failure that needs investigation
    ├── InputError                     2   settings, data or state that the user can fix
    │   ├── SettingsError                  params.yaml or a command-line option
    │   │   └── InsufficientMemoryError    the memory forecast says that the training does not fit
    │   ├── MissingLibraryError            an optional library is not installed; the message names the extra
    │   ├── ProjectError                   no project in the directory
    │   ├── DataError                      a source file, a row, a split
    │   ├── BaseModelError                 the base model or its tokenizer
    │   ├── HubError                       the Hugging Face hub cannot be reached or refuses
    │   ├── DamagedFileError               a sealed file whose bytes differ from its manifest
    │   ├── LockHeldError                  another process holds the lock
    │   │   └── LeaseHeldError        75   another machine trains the run; repeat later
    │   ├── StorageError                   a directory that cannot be written: read-only, full, no permission
    │   ├── QuotaError                     the tenant's quota has no room
    │   └── ChampionError                  champion file and registry disagree, or the champion is missing
    ├── GateError                      3   no verdict PROMOTE for this model, or it was rolled back; nothing changed
    ├── RunFailedError                 1   training gave up; the message has the cause and the number of attempts
    ├── DivergenceError                1   too many bad steps; the message has the diagnosis
    ├── NonFiniteStateError            1   weights in memory are not finite; training resumes from the last checkpoint
    ├── MemoryExhaustedError           1   not even one row fits into memory; the message has settings that fit
    ├── TrackingError                  1   MLflow's database or artifacts cannot be read or written
    │   ├── TrackingServerError        2   an MLflow server cannot be reached, or refuses the request
    │   │   └── PermissionRefusedError     the user's role does not allow the request
    │   └── TrackingSchemaError        2   the database belongs to another MLflow version; the message has the command
    ├── tuning.leases.TrialLeaseLostError  1   another worker has taken over the trial; internal to sweep workers
    ├── PeersLostError                 1   other ranks are lost or did not join; the state is saved
    ├── ReplicaError                  75   the replica cannot be reached within the time allowed
    ├── EndpointError                 75   a model server does not answer within the time allowed
    ├── UnsuitableMachineError        69   the machine lacks what `ratchet doctor --require` asks for; try another one
    └── InterruptedRunError           75   stopped on request; saved work is kept; run the command again

A message says what failed, where (setting or file:line), what was found, and what to do.
"""

from typing import ClassVar

EXIT_OK = 0
"""Done. `ratchet gate` also exits with 0 for HOLD, REJECT and INVALID, so that DVC keeps the verdict."""
EXIT_BUG = 1
"""A bug of Ratchet, or a failure that needs investigation, such as a training that gave up."""
EXIT_INPUT = 2
"""Settings, data or environment: the message says what was found and what to do."""
EXIT_GATE = 3
"""The gate did not decide PROMOTE: from `ratchet promote`, `ratchet push`, `ratchet gate --check`; or `ratchet gate
--aa` found too much noise."""
EXIT_UNFIT = 69  # EX_UNAVAILABLE of sysexits.h
"""The machine does not meet `ratchet doctor --require`; nothing was started."""
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: try again
"""Interrupted, or a service did not answer in time. Work is saved: run the same command again."""
EXIT_PEERS = 76  # EX_PROTOCOL of sysexits.h
"""From a rank to its supervisor only: other ranks are lost. No command ends with it."""

DOCUMENTATION = "Ratchet's documentation"
"""How messages name the documentation, before a page: a project has no docs/. Once the site has an address, put it here
(https://..., without a slash at the end); messages then link to its pages."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its class if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class RatchetError(Exception):
    """Base class of all errors of Ratchet; `exit_code` is the exit code of the command."""

    exit_code: ClassVar[int] = EXIT_BUG
    advice: ClassVar[str] = ""
    """Text that is appended to the message when a command fails with this error."""


class InputError(RatchetError):
    """Settings, data or state are not usable; the message says how to fix the problem."""

    exit_code = EXIT_INPUT


class SettingsError(InputError):
    """params.yaml or a command-line option is wrong."""


class InsufficientMemoryError(SettingsError):
    """The forecast says that even one row at a time needs more memory than is available."""

    def __init__(self, text: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(text)
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes


class MissingLibraryError(InputError):
    """A library that the command needs is not installed; the message has the command that installs it."""


class ProjectError(InputError):
    """There is no project in the directory, or its path cannot be used."""


class DataError(InputError):
    """A source file, a row or a split is wrong."""


class BaseModelError(InputError):
    """The base model or its tokenizer is missing, incomplete or differs from the pinned base model."""


class HubError(InputError):
    """The Hugging Face hub cannot be reached, refuses a request, or a transfer was interrupted."""


class DamagedFileError(InputError):
    """The content of a sealed file or directory differs from its manifest."""


class LockHeldError(InputError):
    """Another process holds the lock."""


class LeaseHeldError(LockHeldError):
    """Another machine holds the lease of a replicated run. Repeat the command once that machine finishes or is lost."""

    exit_code = EXIT_INTERRUPTED


class StorageError(InputError):
    """A directory cannot be written: read-only, full, or no permission."""


class QuotaError(InputError):
    """The tenant's quota has no room for a new run or model; nothing was created."""


class ChampionError(InputError):
    """Champion file, ledger and model registry disagree, or the champion's files are missing."""


class GateError(RatchetError):
    """The verdict is missing, out of date or not PROMOTE, or the model was rolled back before."""

    exit_code = EXIT_GATE


class RunFailedError(RatchetError):
    """Training ended without a result."""


class DivergenceError(RatchetError):
    """There were more bad steps than `train.guards` allows; the weights are those of the last good step."""


class NonFiniteStateError(RatchetError):
    """Weights or optimizer states in memory are NaN or infinite. Such values are never saved."""


class MemoryExhaustedError(RatchetError):
    """One row alone does not fit into memory."""


class TrackingError(RatchetError):
    """MLflow's database or artifacts cannot be read or written. Training continues without them."""


class TrackingServerError(TrackingError):
    """An MLflow server cannot be reached, or refuses the request; the message has its address and the reason."""

    exit_code = EXIT_INPUT


class PermissionRefusedError(TrackingServerError):
    """An MLflow server refuses a request to this user; the message has the role that the request needs."""


class TrackingSchemaError(TrackingError):
    """Another version of MLflow wrote the database: migrate it, or install that version."""

    exit_code = EXIT_INPUT


class PeersLostError(RatchetError):
    """Other ranks are lost, did not join, or are about to leave; the remaining ranks restart together."""


class ReplicaError(RatchetError):
    """The replica cannot be reached within the timeout; a later attempt may succeed."""

    exit_code = EXIT_INTERRUPTED


class EndpointError(RatchetError):
    """A model server gave no usable answer in all attempts. Finished answers are kept for the next run."""

    exit_code = EXIT_INTERRUPTED
    advice = "; run the command again"


class UnsuitableMachineError(RatchetError):
    """The machine does not meet the requirements; nothing was started. `report` is the MachineCheckReport."""

    exit_code = EXIT_UNFIT

    def __init__(self, text: str, report: object = None) -> None:
        super().__init__(text)
        self.report = report


class InterruptedRunError(RatchetError):
    """A run, sweep, generation or profile stopped on request; run the command again to resume."""

    exit_code = EXIT_INTERRUPTED
