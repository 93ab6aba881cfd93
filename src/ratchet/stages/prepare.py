"""Stage prepare: check, deduplicate, split, template and tokenize the source files.

A card accounts for every row.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from ratchet.config.prepare import Prepare
from ratchet.config.settings import Settings
from ratchet.data import canaries, dataset_card, sources, token_files
from ratchet.data.conversation import Conversation, MalformedRecord, SourceRow, extract_text
from ratchet.data.ingest import RowIngestion
from ratchet.data.leakage import BenchmarkIndex
from ratchet.data.selection import RowSelection, select_rows
from ratchet.data.semantic_duplicates import SETTING, Embedder
from ratchet.data.sources import SourceReader
from ratchet.data.splits import SPLITS, TEST, TRAIN
from ratchet.data.token_files import PreparedRow, SplitFingerprints, SplitWriters
from ratchet.errors import DataError
from ratchet.evaluation import harness
from ratchet.models import base_model, cpu_products
from ratchet.reports import data_card_page, dvc_files
from ratchet.stages.project import Project
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.progress import report_progress
from ratchet.storage.records import base
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard

LABEL_LIMIT = 500
"""Maximum number of labels. With more different responses the stage fails, because they are probably free text."""


def prepare(project: Project) -> DatasetCard:
    """Run the stage.

    Raises:
        DataError: a source or template cannot be used, more rows are lost than the limits allow, a split is empty, no
            record has a field of prepare.extra_fields, or canaries have more tokens than prepare.max_tokens.
        SettingsError: a task to check for leaks is not defined.
        BaseModelError: the pinned base model is missing.
        LockHeldError: another process runs this stage.
    """
    layout, settings = project.layout, project.settings
    with project.lock("prepare"):
        base = BaseCard.load(layout.base_card)
        tokenizer = base_model.load_project_tokenizer(layout, base)
        reader = SourceReader(layout.root, settings.prepare, layout.streamed_shards)
        reader.remove_other_shards()
        planted = canaries.create_canaries(settings.prepare.canaries, settings.prepare.split.seed)
        planted_rows = canaries.encode_canaries(planted, tokenizer, settings.prepare.max_tokens)
        benchmarks = _load_benchmarks(layout, settings)
        embedder = _load_embedder(layout, settings)
        with files.sealed_directory(layout.data, "data") as scratch:
            temporary = scratch / ".aside"
            temporary.mkdir()
            with closing(
                RowIngestion(settings.prepare, tokenizer, benchmarks, temporary, reader.teacher_sources)
            ) as ingestion:
                ingestion.ingest(_count_rows(reader.rows()))
                selection = select_rows(ingestion, settings.prepare, embedder)
                _check_splits(settings.prepare, ingestion, selection)
                fingerprints = _write_splits(ingestion, selection, scratch, planted_rows)
                card = dataset_card.build_card(ingestion, selection, settings.prepare, reader)
            shutil.rmtree(temporary)
            if planted:
                card = canaries.add_to_card(card, planted, planted_rows)
            template = digests.hash_bytes(str(tokenizer.chat_template).encode())
            digest, fields_digest = fingerprints.content, fingerprints.fields
            notes = (*card.notes, *_note_long_rows(card, base_model.locate(layout, base)))
            identity = {"digest": digest, "fields_digest": fields_digest, "base_digest": base.digest}
            card = card.model_copy(update=identity | {"template": template, "notes": notes})
            card.save(scratch / layout.dataset_card.name)
            dropped_rows = sum(drop.count for drop in card.dropped.values())
            figures = {"training_rows": card.splits["train"], "dropped_rows": dropped_rows}
            dvc_files.write_metrics(scratch, figures)
            data_card_page.write_dataset_page(card, scratch / layout.dataset_page.name)
        if layout.streamed_shards.exists():
            shutil.rmtree(layout.streamed_shards)
        return card


def _note_long_rows(card: DatasetCard, path: Path) -> Iterator[str]:
    """Yield a note if a row is longer than the context length in the config.json of the base at `path`."""
    limit = base_model.find_context_length(base_model.read_config(path))
    longest = max(lengths.greatest for lengths in card.lengths.values())
    if limit is not None and longest > limit:
        yield (
            f"the longest row has {longest:,} tokens, but the base was trained on at most {limit:,} (config.json); set "
            f"prepare.max_tokens: {limit}, which drops or truncates longer rows (prepare.too_long)"
        )


def _load_benchmarks(layout: ProjectLayout, settings: Settings) -> BenchmarkIndex | None:
    """Load the evaluation sets that the settings name, except tasks over the project's own test rows."""
    leakage = settings.prepare.leakage
    evaluated = tuple(task for task in settings.evaluate.harness.tasks if task not in leakage.tasks)
    documents: dict[str, list[str]] = {}
    with token_files.use_fresh_cache():
        for setting, names in (("prepare.leakage.tasks", leakage.tasks), ("evaluate.harness.tasks", evaluated)):
            documents |= harness.read_documents(setting, names, layout.root, layout.tasks, excluded_folder=layout.data)
    documents |= sources.read_evaluation_sets(layout.root, leakage.files) if leakage.files else {}
    return BenchmarkIndex(documents, leakage.ngram_words) if documents else None


def _load_embedder(layout: ProjectLayout, settings: Settings) -> Embedder | None:
    if (name := settings.prepare.semantic_duplicates.model) is None:
        return None
    cpu_products.use_onednn()  # so that embeddings are the same before and after a model was loaded in this process
    return Embedder(sources.require_watched_path(layout.root, name, ("data/raw",), SETTING), name)


def _count_rows(rows: Iterator[SourceRow | MalformedRecord]) -> Iterator[SourceRow | MalformedRecord]:
    count = 0
    for count, row in enumerate(rows, start=1):
        if count % 512 == 0:
            report_progress("rows read", count)
        yield row
    report_progress("rows read", count, count)


def _check_splits(settings: Prepare, ingestion: RowIngestion, selection: RowSelection) -> None:
    """Raise DataError if the rows cannot be used, before anything is written."""
    ingestion.split_assigner.check()
    ingestion.passthrough.check()
    ingestion.quality.check()
    ledger = ingestion.ledger
    ledger.check(
        settings.drop_limits,
        truncated=int(np.count_nonzero(ingestion.accepted.values.column("truncated_tokens", selection.kept))),
    )
    if settings.leakage.action == "fail" and (hits := {n: leak for n, leak in selection.leaks.items() if leak.rows}):
        details = "\n".join(
            f"  {name}: {leak.rows} rows\n      " + "\n      ".join(leak.examples) for name, leak in hits.items()
        )
        raise DataError(
            "prepare.leakage: rows overlap with evaluation sets; remove them, or set prepare.leakage.action: drop\n"
            + details
        )
    sizes = {name: int(selection.copies[selection.split == code].sum()) for code, name in enumerate(SPLITS)}
    if empty := [name for name, size in sizes.items() if not size]:
        counts = ", ".join(f"{size} {name}" for name, size in sizes.items())
        reasons = "".join(f"; dropped {d.count}: {r} ({d.examples[0]})" for r, d in ledger.dropped.items())
        remedies = ["add rows"] if empty[0] == "train" else ["add rows", f"raise prepare.split.{empty[0]}"]
        if "too_long" in ledger.dropped:
            remedies.append("raise prepare.max_tokens or change prepare.too_long")
        raise DataError(
            f"prepare.split: {ledger.rows_in} rows give {counts} rows, and {empty[0]} needs at least one{reasons}: "
            f"{', '.join(remedies)}, or fix the dropped rows"
        )
    if settings.task == "labels" and len(ingestion.label_names) > LABEL_LIMIT:
        raise DataError(
            f"prepare.task: labels, but {len(ingestion.label_names)} different responses (more than {LABEL_LIMIT}); "
            "set prepare.task: text, or check prepare.columns.response"
        )


def _write_splits(
    ingestion: RowIngestion, selection: RowSelection, folder: Path, planted: Sequence[PreparedRow]
) -> SplitFingerprints:
    """Write the splits, planted training rows last, and the test rows as documents. Returns their fingerprints."""
    writers = SplitWriters(folder, ingestion.row_spool.schema)
    split_of_row = np.where(selection.kept, selection.split, -1)
    written = 0
    with (folder / "test.jsonl").open("w", encoding="utf-8") as documents:
        for table, is_end in ingestion.row_spool.tables():
            rows = table.column("row").to_numpy()
            for code, name in enumerate(SPLITS):
                indices = np.flatnonzero(split_of_row[rows] == code)
                if code == TRAIN:
                    indices = np.repeat(indices, selection.copies[rows[indices]])
                part = table.take(indices).select(writers.schema.names)
                writers.write(name, part, is_end=is_end)
                if code == TEST:
                    documents.writelines(_format_documents(part))
            written += len(rows)
            report_progress("rows written", written, len(split_of_row))
            del table, part  # before the next table is read
    if planted:
        writers.write_rows("train", planted)
    return writers.close()


def _format_documents(part: Any) -> Iterator[str]:
    """Yield test rows as plain documents (JSON lines), for harness tasks of the project."""
    for row_id, text in zip(part.column("id").to_pylist(), part.column("conversation").to_pylist(), strict=True):
        conversation = Conversation.from_json(text)
        if conversation.is_desirable is False:
            continue
        row = {"id": row_id, "system": conversation.system, "prompt": extract_text(conversation.context.messages[-1])}
        row |= {"response": conversation.response, "turns": len(conversation.messages)}
        yield base.to_json_line(row)
