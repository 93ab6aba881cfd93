"""Every exception of Ratchet, and the exit code each one becomes.

    RatchetError                       1   a bug, or a failure that a person must look at
    ├── InputError                     2   settings, data or state that the user can fix
    │   ├── SettingsError                  params.yaml or a command-line option
    │   │   └── InsufficientMemoryError    the memory forecast says that the training does not fit
    │   ├── DataError                      a source file, a row, a split
    │   ├── BaseModelError                 the base model or its tokenizer
    │   ├── DamagedFileError               a sealed file whose bytes differ from its manifest
    │   ├── LockHeldError                  another process holds the lock
    │   │   └── LeaseHeldError        75   another machine trains the run; repeat later
    │   ├── StorageError                   a disk that cannot be written: read-only, full, not permitted
    │   └── ChampionError                  champion file and registry disagree, or the champion is gone
    ├── GateError                      3   the gate did not pass; nothing was promoted
    ├── RunFailedError                 1   training gave up; the message has the cause and the number of attempts
    ├── DivergenceError                1   too many bad steps; the message is the diagnosis, the weights are finite
    ├── NonFiniteStateError            1   weights in memory are not finite; training resumes from the last checkpoint
    ├── MemoryExhaustedError           1   not even one row fits into memory; the message says what would
    ├── TrackingError                  1   MLflow's database or artifacts cannot be read or written
    │   └── TrackingSchemaError        2   the tables are of another MLflow version; the message has the command
    ├── tuning.leases.TrialLeaseLostError  1   another worker has the trial; never leaves a worker of a sweep
    ├── PeersLostError                 1   other ranks of the training are gone or did not come; the state is saved
    ├── MirrorError                   75   the mirror cannot be reached within the time allowed
    ├── EndpointError                 75   a model server does not answer within the time allowed
    ├── UnsuitableMachineError        69   less than `ratchet doctor --require` asks for; another machine may do
    └── InterruptedRunError           75   stopped on request after a checkpoint was saved; safe to repeat

Messages say what, where (key path or file:line), what was found, and what to do.
"""

from typing import ClassVar

EXIT_OK = 0
EXIT_BUG = 1
EXIT_INPUT = 2
EXIT_GATE = 3
EXIT_PEERS = 76  # EX_PROTOCOL of sysexits.h; from a rank to its supervisor only: other ranks are gone
EXIT_UNFIT = 69  # EX_UNAVAILABLE of sysexits.h: not here
EXIT_INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: try again


def first_line(error: BaseException) -> str:
    """What a library's exception says, without the rest of its story; its class when it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class RatchetError(Exception):
    """Root of the tree; `exit_code` is what the command line returns for it."""

    exit_code: ClassVar[int] = EXIT_BUG
    advice: ClassVar[str] = ""
    """What a command that ends by it says behind the message; a run that does says its own (run/recovery.py)."""


class InputError(RatchetError):
    """Something the user gave is not usable; the message says how to mend it."""

    exit_code = EXIT_INPUT


class SettingsError(InputError):
    """params.yaml or a command-line option is wrong."""


class InsufficientMemoryError(SettingsError):
    """A training that needs more memory than there is, by its forecast, even with one row at a time."""

    def __init__(self, text: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(text)
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes


class DataError(InputError):
    """A source file, a row or a split is wrong."""


class BaseModelError(InputError):
    """The base model or its tokenizer is missing, incomplete or not the pinned one."""


class DamagedFileError(InputError):
    """A sealed file or directory does not hold the bytes that its manifest names."""


class LockHeldError(InputError):
    """Another process holds the lock of what we want to write."""


class LeaseHeldError(LockHeldError):
    """Another machine holds the run in its mirror: it may end, give the run back, or vanish, so repeating helps."""

    exit_code = EXIT_INTERRUPTED


class StorageError(InputError):
    """A directory that we need cannot be written: read-only, full, or not ours."""


class ChampionError(InputError):
    """Champion file and model registry disagree, or the champion's files are gone."""


class GateError(RatchetError):
    """The gate did not say PROMOTE for exactly this model."""

    exit_code = EXIT_GATE


class RunFailedError(RatchetError):
    """Training ended without a result."""


class DivergenceError(RatchetError):
    """More steps went wrong than `train.guards` puts up with; the weights are those of the last good step."""


class NonFiniteStateError(RatchetError):
    """Weights or optimizer states in memory are NaN or infinite; nothing of them is ever sealed."""


class MemoryExhaustedError(RatchetError):
    """One row alone does not fit into memory."""


class TrackingError(RatchetError):
    """MLflow's database or artifacts cannot be read or written; training does not need them."""


class TrackingSchemaError(TrackingError):
    """MLflow's database was written by another version of MLflow; somebody has to migrate it, or to install that."""

    exit_code = EXIT_INPUT


class PeersLostError(RatchetError):
    """Other ranks of a training are gone, did not come, or are about to leave: what is left of them begins again."""


class MirrorError(RatchetError):
    """The mirror cannot be reached, for longer than we are to wait for it; it may be later."""

    exit_code = EXIT_INTERRUPTED


class EndpointError(RatchetError):
    """A server of a model gives no usable answer, however often it is asked; answers so far are kept, so repeat."""

    exit_code = EXIT_INTERRUPTED
    advice = "; repeat"


class UnsuitableMachineError(RatchetError):
    """This machine is not good enough for the work; nothing was begun, and another one may be."""

    exit_code = EXIT_UNFIT


class InterruptedRunError(RatchetError):
    """Training stopped because it was asked to; a checkpoint is sealed."""

    exit_code = EXIT_INTERRUPTED
