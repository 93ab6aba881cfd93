"""Record of the data and the training of a promoted model that survives their removal: provenance.json.

The file is signed with the promoted model, so that an auditor can check facts on a machine without data and runs. It
has counts and digests, but no row of the data.
"""

from ratchet.storage.records.base import Record


class DataProvenance(Record):
    """Facts of the dataset card."""

    digest: str
    """Digest of the dataset."""
    sources: dict[str, str]
    """SHA-256 of each source file, or the revision of a dataset of the Hub."""
    rows_in: int
    rows_out: int
    dropped: dict[str, int]
    """Number of dropped rows by reason."""
    leaks: dict[str, int]
    """Number of rows that share words with an evaluation set, by its name."""
    across_splits: int | None
    """Number of near-duplicates that were dropped because they were in two splits; None: not searched."""


class TrainingProvenance(Record):
    """Facts of the journal of a run, up to the end of the training."""

    run_id: str
    journal: str
    """SHA-256 of the journal up to its last event `finished`."""
    journal_bytes: int
    """Number of bytes that `journal` covers."""
    started: str
    """UTC, ISO 8601."""
    finished: str
    """UTC, ISO 8601."""
    reason: str
    """Reason for the end: completed or early_stopped."""
    steps: int
    attempts: int
    attempt_ends: tuple[str, ...]
    """Causes of the ends of earlier attempts."""
    repeated_steps: int
    """Number of steps that were computed again after interruptions."""
    skipped_steps: dict[int, str]
    """Reason by step."""
    code_versions: tuple[str, ...]
    """Versions of Ratchet of all attempts."""
    hosts: tuple[str, ...]
    """Names of the machines."""
    devices: tuple[str, ...]
    adapter_digest: str
    """Digest of the adapter, as the worker reported it."""
    tags: dict[str, str]
    """Tags of the MLflow run: actor, and commit, branch and changes of the project's checkout; empty: not recorded."""


class ModelProvenance(Record):
    """provenance.json of a promoted model. A part is None if the promoting machine lacked it."""

    data: DataProvenance | None = None
    training: TrainingProvenance | None = None
