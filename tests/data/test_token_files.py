"""Tests token files: reading without `datasets` gives the same rows as reading with it."""

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ratchet.data import token_files
from ratchet.data.conversation import IGNORE_INDEX, Conversation, EncodedConversation
from ratchet.data.splits import SPLITS
from ratchet.errors import DamagedFileError, DataError
from ratchet.storage import files

COUNT = 2500
"""Rows: three batches of the file."""


def sample(number: int) -> token_files.PreparedRow:
    ids = list(range(number % 7 + 1))
    said = Conversation([{"role": "user", "content": f"{number}"}, {"role": "assistant", "content": "yes"}])
    return token_files.PreparedRow.from_conversation(
        said, EncodedConversation(ids, [IGNORE_INDEX if token % 2 else token for token in ids])
    )


def write_rows(folder: Path, count: int) -> pa.Table:
    """Write training rows; return them in the order of the file."""
    spool, writers = token_files.PreparedRowSpool(folder / "spool"), token_files.SplitWriters(folder)
    spool.add([sample(number) for number in range(count)], 0)
    tables = []
    for table, is_end in spool.tables():
        tables.append(table.drop(["row"]))
        writers.write("train", tables[-1], is_end=is_end)
    writers.close()
    assert not list((folder / "spool").iterdir())
    return pa.concat_tables(tables)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_rows(tmp_path, COUNT)
    return tmp_path


def test_rows_and_lengths_equal_those_of_datasets(data: Path) -> None:
    library, rows = token_files.open_split(data, "train"), token_files.load_rows(data, "train")
    assert len(library) == len(rows) == COUNT
    assert [rows.input_ids[a:b].tolist() for a, b in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)] == list(
        library["input_ids"]
    )
    assert rows.labels.tolist() == [label for labels in library["labels"] for label in labels]
    assert token_files.read_lengths(data, "train").tolist() == rows.lengths.tolist()
    assert token_files.read_lengths(data, "train").dtype == np.int64


@pytest.mark.parametrize(("share", "said"), [(0.0, "damaged"), (0.01, "damaged"), (0.5, "damaged"), (None, "missing")])
def test_a_damaged_or_missing_file_is_named(data: Path, share: float | None, said: str) -> None:
    path = data / "train.arrow"
    content = path.read_bytes()
    path.unlink()
    if share is not None:
        path.write_bytes(content[: int(share * len(content))])
    for read in (token_files.load_rows, token_files.read_lengths):
        with pytest.raises(DamagedFileError, match=rf"^{re.escape(str(path))}: {said}.*; run `dvc repro -f prepare`$"):
            read(data, "train")


def test_buckets_that_do_not_fit_in_memory_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("whole", "divided", "at_a_batch"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(token_files, "BUCKETS", 1)
    rows = write_rows(tmp_path / "whole", COUNT)
    monkeypatch.setattr(token_files, "BUCKET_BYTES", 30_000)
    assert write_rows(tmp_path / "divided", COUNT).column("id").num_chunks > 10
    writers = token_files.SplitWriters(tmp_path / "at_a_batch")
    for start in range(0, COUNT, token_files.BATCH_ROWS):
        part = rows.take(np.arange(start, min(start + token_files.BATCH_ROWS, COUNT)))
        writers.write("train", part, is_end=start + len(part) == COUNT)
    writers.close()
    whole, *others = ((tmp_path / name / "train.arrow").read_bytes() for name in ("whole", "divided", "at_a_batch"))
    assert others == [whole, whole]


def test_a_split_without_rows_has_none(data: Path) -> None:
    for split in SPLITS:
        if split != "train":
            assert len(token_files.load_rows(data, split)) == len(token_files.read_lengths(data, split)) == 0


def test_rows_stay_when_their_file_is_replaced(data: Path) -> None:
    rows = token_files.load_rows(data, "train")
    before = rows.input_ids.tolist()
    (data / "other").write_bytes(bytes((data / "train.arrow").stat().st_size))
    (data / "other").replace(data / "train.arrow")
    assert rows.input_ids.tolist() == before


def test_data_of_an_earlier_version_is_refused(data: Path) -> None:
    old = pa.table({"id": ["a"], "input_ids": [[1]], "labels": [[1]]})
    with pa.ipc.new_stream(str(data / "train.arrow"), old.schema) as stream:
        stream.write_table(old)
    for read in (token_files.open_split, token_files.load_rows, token_files.read_lengths):
        with pytest.raises(DataError, match=r"earlier version .no conversation.; run `dvc repro -f prepare`"):
            read(data, "train")


def test_cache_files_of_datasets_are_found_and_removable(data: Path) -> None:
    files.seal_directory(data, "data")
    rows = token_files.open_split(data, "train")
    for add in (1, 2):
        rows.map(lambda row, add=add: {"length": len(row["input_ids"]) + add})
    caches = sorted(data.glob("cache-*.arrow"))
    assert len(caches) == 2
    said = (
        rf"{re.escape(str(caches[0]))} and 1 more: not in the manifest \(a cache file of `datasets.map`\); remove it,"
    )
    with pytest.raises(DamagedFileError, match=said):
        files.verify_sealed(data, "data")
    for cache in caches:
        cache.unlink()
    files.verify_sealed(data, "data")
