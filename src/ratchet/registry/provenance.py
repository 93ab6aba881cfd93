"""Collects the provenance of a model from the dataset card and the journal of its run (`ModelProvenance`)."""

import hashlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from ratchet.errors import DamagedFileError, DataError
from ratchet.redaction import redact
from ratchet.registry.ledger import ACTOR_TAG
from ratchet.registry.lineage import mask_secrets
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.status import replay_events
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.provenance import DataProvenance, ModelProvenance, TrainingProvenance

PROVENANCE = "provenance.json"
TAGS = (ACTOR_TAG, "git.revision", "git.branch", "git.dirty", "dvc.lock")
"""Tags of an MLflow run with the actor and the project's checkout (`digests.revision_tags`)."""


def build_provenance(layout: ProjectLayout, bundle: ModelBundle, tags: Mapping[str, str]) -> dict[str, bytes]:
    """Build provenance.json, by its name in the promoted model's folder; empty if neither run nor data are here.

    Args:
        layout: the project.
        bundle: the exported model.
        tags: tags of the MLflow run of the model.
    """
    training = read_training(RunPaths(layout.runs / bundle.run_id), tags)
    record = ModelProvenance(data=read_data(layout, bundle.data_digest), training=training)
    if record == ModelProvenance():
        return {}
    return {PROVENANCE: files.json_bytes(record.model_dump(mode="json"))}


def read_data(layout: ProjectLayout, data_digest: str) -> DataProvenance | None:
    """Read the facts of the prepared data; None if it is not here, is damaged, or is another dataset."""
    try:
        card = DatasetCard.load(layout.dataset_card)
    except (DataError, DamagedFileError):
        return None
    if card.digest != data_digest:
        return None
    return DataProvenance(
        digest=card.digest,
        sources={mask_secrets(name): content for name, content in card.sources.items()},
        rows_in=card.rows_in,
        rows_out=card.rows_out,
        dropped={mask_secrets(reason): rows.count for reason, rows in card.dropped.items()},
        leaks={mask_secrets(name): leak.rows for name, leak in card.leaks.items()},
        across_splits=card.near_duplicates.across_splits if card.near_duplicates is not None else None,
    )


def read_training(run: RunPaths, tags: Mapping[str, str]) -> TrainingProvenance | None:
    """Read the facts of a finished training from its journal; None if there is no event `finished`."""
    events: list[JournalEvent] = []
    end, count = 0, 0
    reader = JournalReader(run.journal)
    for event in reader.read():
        events.append(event)
        if event.kind == "finished":
            end, count = reader.offset, len(events)
    if not count:
        return None
    events = events[:count]
    progress, last = replay_events(events), events[-1]
    starts = [event for event in events if event.kind == "attempt_started"]
    ready = [event.data for event in events if event.kind == "worker_ready"]
    hosts = [host for data in ready for host in data.get("hosts") or ()]
    devices = [f"{data.get('device', '?')}, {data.get('compute_dtype', '?')}" for data in ready]
    return TrainingProvenance(
        run_id=run.root.name,
        journal=hash_start(run.journal, end),
        journal_bytes=end,
        started=_format_time((starts or events)[0]),
        finished=_format_time(last),
        reason=str(last.data.get("reason", "")),
        steps=progress.step,
        attempts=progress.attempts,
        attempt_ends=tuple(redact(text) for text in progress.attempt_ends),
        repeated_steps=progress.lost_steps,
        skipped_steps={step: redact(text) for step, text in progress.skipped_steps.items()},
        code_versions=_unique(str(event.data.get("code_version", "")) for event in starts),
        hosts=_unique(map(str, hosts)),
        devices=_unique(devices),
        adapter_digest=str(last.data.get("adapter_digest", "")),
        tags={name: tags[name] for name in TAGS if name in tags},
    )


def hash_start(path: Path, count: int) -> str:
    """Return the SHA-256 of the first `count` bytes of a file. Raises OSError if the file cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(min(count, digests.BLOCK_BYTES)):
            digest.update(block)
            count -= len(block)
    return digest.hexdigest()


def _unique(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _format_time(event: JournalEvent) -> str:
    return datetime.fromtimestamp(event.t, UTC).isoformat(timespec="seconds")
