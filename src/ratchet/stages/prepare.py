"""Source files → checked, deduplicated, split, templated, tokenised data, with a card that accounts for every row."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from ratchet.config.data import Prepare
from ratchet.config.schema import Settings
from ratchet.console import progress_bars
from ratchet.data import dataset_card, sources, token_files
from ratchet.data.conversation import Conversation, MalformedRecord, SourceRow, extract_text
from ratchet.data.ingest import RowIngestion
from ratchet.data.leakage import BenchmarkIndex
from ratchet.data.selection import RowSelection, select_rows
from ratchet.data.sources import SourceReader
from ratchet.data.splits import SPLITS, TEST, TRAIN
from ratchet.data.token_files import SCHEMA, SplitFingerprints, SplitWriters
from ratchet.errors import DataError
from ratchet.evaluation import harness
from ratchet.models import base_model
from ratchet.reports import data_card_page
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.data import DatasetCard

LABEL_LIMIT = 500
"""More different responses than this are free text, not labels."""


def prepare(layout: ProjectLayout, settings: Settings) -> str:
    """Run the stage.

    Raises:
        DataError: a source or template that cannot be used, more rows lost than the limits allow, an empty split, a
            field to keep that no record has.
        SettingsError: a task to check for leaks is not defined.
        BaseModelError: the pinned base model is not there any more.
    """
    base = BaseCard.load(layout.base_card)
    path = base_model.locate(layout, base)
    tokenizer = base_model.load_tokenizer(path, layout.own_template, base.added_tokens, base.remote_code)
    found = SourceReader(layout.root, settings.prepare)
    taught = [one is not None for one in found.taught]
    benchmarks = _load_benchmarks(layout, settings)
    with files.sealed_directory(layout.data, "data") as scratch:
        aside = scratch / ".aside"
        aside.mkdir()
        with closing(RowIngestion(settings.prepare, tokenizer, benchmarks, aside, taught)) as intake:
            with progress_bars.create_bar("prepare", "rows read") as bar:
                intake.read(_count_rows(found.rows(), bar))
            with progress_bars.create_bar("prepare", "rows compared") as bar:
                chosen = select_rows(intake, settings.prepare, lambda rows: bar.update(rows - bar.n))
            _check_splits(settings.prepare, intake, chosen)
            written = _write_splits(intake, chosen, scratch)
        shutil.rmtree(aside)
        card = dataset_card.build_card(intake, chosen, settings.prepare, found)
        template = digests.hash_bytes(str(tokenizer.chat_template).encode())
        card = card.model_copy(
            update={
                "digest": written.content,
                "fields_digest": written.fields,
                "base_digest": base.digest,
                "template": template,
            }
        )
        card.save(scratch / layout.dataset_card.name)
        data_card_page.write_dataset_page(card, scratch / layout.dataset_page.name)
    return describe(card)


def _load_benchmarks(layout: ProjectLayout, settings: Settings) -> BenchmarkIndex | None:
    """The evaluation sets that the project names, but for tasks over its own test rows, which are apart anyway."""
    leakage = settings.prepare.leakage
    named = (*leakage.tasks, *(t for t in settings.evaluate.harness.tasks if t not in leakage.tasks))
    with token_files.use_fresh_cache():
        documents = harness.read_documents(named, layout.root, layout.tasks, besides=layout.data)
    documents |= sources.read_evaluation_sets(layout.root, leakage.files) if leakage.files else {}
    return BenchmarkIndex(documents, leakage.ngram_words) if documents else None


def _count_rows(rows: Iterator[SourceRow | MalformedRecord], bar: Any) -> Iterator[SourceRow | MalformedRecord]:
    for count, row in enumerate(rows, start=1):
        if count % 512 == 0:
            bar.update(512)
        yield row


def _check_splits(settings: Prepare, intake: RowIngestion, chosen: RowSelection) -> None:
    """What must be true before anything is written."""
    intake.fields.check()
    ledger = intake.ledger
    ledger.check(settings.limits, truncated=int(np.count_nonzero(np.array(intake.taken.cut)[chosen.kept])))
    if settings.leakage.action == "fail" and (hits := {n: leak for n, leak in chosen.leaks.items() if leak.rows}):
        shown = "\n".join(
            f"  {name}: {leak.rows} rows\n      " + "\n      ".join(leak.examples) for name, leak in hits.items()
        )
        raise DataError(
            "prepare.leakage: rows overlap with evaluation sets; remove them, or set prepare.leakage.action: drop\n"
            + shown
        )
    sizes = {name: int(chosen.copies[chosen.split == code].sum()) for code, name in enumerate(SPLITS)}
    if empty := [name for name, size in sizes.items() if not size]:
        counts = ", ".join(f"{size} {name}" for name, size in sizes.items())
        reasons = "".join(f"; dropped {d.count}: {r} ({d.examples[0]})" for r, d in ledger.dropped.items())
        raise DataError(
            f"prepare.split: {ledger.rows_in} rows give {counts} rows, and {empty[0]} needs at least one{reasons}: "
            "add rows, raise its fraction, or mend what was dropped"
        )
    if settings.task == "labels" and len(intake.label_names) > LABEL_LIMIT:
        raise DataError(
            f"prepare.task: labels, but {len(intake.label_names)} different responses (more than {LABEL_LIMIT}); "
            "set prepare.task: text, or check prepare.columns.response"
        )


def _write_splits(intake: RowIngestion, chosen: RowSelection, folder: Path) -> SplitFingerprints:
    """Write the splits and the test rows as documents; returns the fingerprints of what was written."""
    writers = SplitWriters(folder)
    split_of_row = np.where(chosen.kept, chosen.split, -1)
    with (
        (folder / "test.jsonl").open("w", encoding="utf-8") as documents,
        progress_bars.create_bar("prepare", "rows written") as bar,
    ):
        for table in intake.spool.tables():
            rows = table.column("row").to_numpy()
            for code, name in enumerate(SPLITS):
                places = np.flatnonzero(split_of_row[rows] == code)
                if code == TRAIN:
                    places = np.repeat(places, chosen.copies[rows[places]])
                part = table.take(places).select(SCHEMA.names)
                writers.write(name, part)
                if code == TEST:
                    documents.writelines(_format_documents(part))
            bar.update(len(rows))
    return writers.close()


def _format_documents(part: Any) -> Iterator[str]:
    """Test rows as plain documents (JSON lines), for harness tasks of the project."""
    for key, text in zip(part.column("id").to_pylist(), part.column("conversation").to_pylist(), strict=True):
        conversation = Conversation.from_json(text)
        row = {"id": key, "system": conversation.system, "prompt": extract_text(conversation.question.messages[-1])}
        row |= {"response": conversation.response, "turns": len(conversation.messages)}
        yield base.to_json_line(row)


def describe(card: DatasetCard) -> str:
    """The card in a few lines, for the terminal."""
    lines = [
        f"{card.rows_in:,} rows in, {card.rows_out:,} out: " + ", ".join(f"{n:,} {s}" for s, n in card.splits.items())
    ]
    lines += [
        f"  {name}: {one.rows:,} rows, read as {one.shape}" + (f", weight {one.weight:g}" if one.weight != 1 else "")
        for name, one in card.source_cards.items()
    ]
    lines += [
        f"  dropped {d.count:,}: {_plain_reason(r)} ({'; '.join(d.examples[:2])})" for r, d in card.dropped.items()
    ]
    if near := card.near_duplicates:
        lines.append(
            f"  {near.clusters:,} clusters of near-duplicates at Jaccard {near.threshold:g}"
            + (f"; {near.across_splits:,} of their rows would have leaked between splits" if near.across_splits else "")
        )
    lines += [
        f"  {name}: {leak.rows:,} rows overlap with it" + (f" ({leak.examples[0]})" if leak.examples else "")
        for name, leak in card.leaks.items()
    ]
    lines += [f"  cut in {name}: {cut.rows:,} rows, {cut.tokens:,} tokens" for name, cut in card.truncated.items()]
    for one in card.source_cards.values():
        if one.taught:
            lines.append(f"  by {', '.join(one.taught.teachers)}: {one.taught.training_rows:,} training rows")
    if card.taught_rows:
        lines.append(f"  taught: {card.taught_rows / card.splits['train']:.1%} of the training rows")
    if even := card.balanced:
        least, most = min(even.before.values()), max(even.before.values())
        sizes = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        now = sorted({*even.after.values()})
        lines.append(
            f"  balanced by {even.by}: {len(even.before):,} categories of {sizes} training rows, now of "
            + (f"{now[0]:,}" if len(now) == 1 else f"{now[0]:,} to {now[-1]:,}")
        )
    train = card.lengths["train"]
    how = "to balance" if card.balanced else "by weight"
    repeated = f", {card.repeated:,} rows of it again {how}" if card.repeated else ""
    lines.append(
        f"  training tokens {train.total:,} ({train.trained:,} learned){repeated}; "
        f"a row has {train.median} in the median, {train.greatest} at most"
        + (f"; {len(card.labels)} labels" if card.labels else "")
    )
    return "\n".join([*lines, *(f"  note: {note}" for note in card.notes)])


def _plain_reason(reason: str) -> str:
    return reason.replace("_", " ")
