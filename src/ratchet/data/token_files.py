"""Stores prepared rows as Arrow files: a spool during preparation, then one memory-mapped file per split.

Rows go through the spool because their order and split are known only after all rows have been read, and all rows may
not fit in memory. The spool is divided into buckets by the first digits of the row id, so that sorting one bucket at a
time sorts all rows.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ratchet.config.train import Objective
from ratchet.data.batches import TokenRows
from ratchet.data.conversation import Conversation, EncodedConversation, read_prompt
from ratchet.data.splits import SPLITS, SplitName
from ratchet.errors import DamagedFileError, DataError, first_line
from ratchet.storage import digests

if TYPE_CHECKING:
    import datasets

ID_DIGITS = 16
BUCKETS = 64
"""Number of buckets of a spool. A million rows of 250 tokens need 3 GB, which is 50 MB per bucket."""
BUCKET_BYTES = 8 * 2**20
"""Size of a bucket above which it is divided into smaller ones; sorting and writing one need some 80 MiB of memory."""
BATCH_ROWS = 1024
"""Number of rows in a batch of a split's file; the last batch of a bucket has fewer."""
_LISTS, _FIELDS = ("input_ids", "labels"), ("group", "fields")
_REJECTED_LISTS = ("rejected_input_ids", "rejected_labels")
SCHEMA = pa.schema(
    [("id", pa.string()), ("conversation", pa.string())]
    + [(name, pa.list_(pa.int32())) for name in _LISTS]
    + [(name, pa.string()) for name in _FIELDS]
)
PAIR_SCHEMA = pa.schema([*SCHEMA, *(pa.field(name, pa.list_(pa.int32())) for name in _REJECTED_LISTS)])
"""Schema of rows with a rejected answer, whose tokens are a second conversation with the same prompt."""
_LABEL = "is_desirable"
LABELLED_SCHEMA = pa.schema([*SCHEMA, pa.field(_LABEL, pa.bool_())])
"""Schema of rows whose answer is labelled desirable or undesirable."""


@dataclass(frozen=True)
class PreparedRow:
    """A row ready for training."""

    id: str
    """Digest of the conversation, by which scores of two models are paired."""
    text: str
    """The conversation as JSON."""
    encoded: EncodedConversation
    group: str | None = None
    """Group (prepare.split.group); rows of one group are not independent samples."""
    fields: str = "{}"
    """Passthrough fields of the row: a JSON object of strings."""
    rejected: EncodedConversation | None = None
    """The conversation with the rejected answer."""
    is_desirable: bool | None = None
    """Label of the answer."""

    @property
    def schema(self) -> pa.Schema:
        """Schema of a split of such rows."""
        if self.rejected is not None:
            return PAIR_SCHEMA
        return SCHEMA if self.is_desirable is None else LABELLED_SCHEMA

    @classmethod
    def from_conversation(
        cls, conversation: Conversation, encoded: EncodedConversation, group: str | None = None, fields: str = "{}",
        rejected: EncodedConversation | None = None,
    ) -> Self:  # fmt: skip
        """Create a row whose id is the digest of the conversation."""
        text = conversation.to_json()
        key = digests.hash_bytes(text.encode())[:ID_DIGITS]
        return cls(key, text, encoded, group, fields, rejected, conversation.is_desirable)


def _list_array(rows: Sequence[Sequence[int]]) -> pa.Array:
    lengths = np.fromiter(map(len, rows), dtype=np.int32, count=len(rows))
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int32, count=int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _columns_of(samples: Sequence[PreparedRow]) -> list[pa.Array]:
    """Return the columns of SCHEMA."""
    return [
        pa.array([s.id for s in samples]),
        pa.array([s.text for s in samples]),
        _list_array([s.encoded.input_ids for s in samples]),
        _list_array([s.encoded.labels for s in samples]),
        pa.array([s.group for s in samples], pa.string()),
        pa.array([s.fields for s in samples]),
    ]


class PreparedRowSpool:
    """Temporary storage of prepared rows: written once, then read sorted by id."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.schema = SCHEMA
        """Schema of the rows, which is that of the first row."""
        self._paths = [folder / f"{bucket:02}.arrow" for bucket in range(BUCKETS)]
        self._writers: list[Any] = []

    def add(self, samples: Sequence[PreparedRow], first_row: int) -> None:
        """Append one or more rows with consecutive indices from `first_row`."""
        if not self._writers:
            self.schema = samples[0].schema
            with_index = pa.schema([pa.field("row", pa.int64()), *self.schema])
            self._writers = [pa.ipc.new_stream(str(path), with_index) for path in self._paths]
        indices = pa.array(np.arange(first_row, first_row + len(samples), dtype=np.int64))
        columns = [indices, *_columns_of(samples)]
        if rejected := [s.rejected for s in samples if s.rejected is not None]:
            columns += [_list_array([one.input_ids for one in rejected]), _list_array([one.labels for one in rejected])]
        if self.schema is LABELLED_SCHEMA:
            columns.append(pa.array([s.is_desirable for s in samples]))
        batch = pa.record_batch(columns, schema=pa.schema([pa.field("row", pa.int64()), *self.schema]))
        bucket = np.array([int(s.id[:2], 16) * BUCKETS // 256 for s in samples])
        for number in np.unique(bucket):
            self._writers[number].write_batch(batch.take(pa.array(np.flatnonzero(bucket == number))))

    def close(self) -> None:
        """Finish writing."""
        for writer in self._writers:
            writer.close()

    def tables(self) -> Iterator[tuple[pa.Table, bool]]:
        """Yield all rows sorted by id, in tables that fit in memory; column `row` has the row indices.

        Each table comes with whether it is the last one of its bucket.
        """
        self.close()
        for bucket, path in enumerate(self._paths[: len(self._writers)]):
            parts = self._divide(bucket, path)
            for part in parts:
                with pa.OSFile(str(part)) as stream:  # read, not mapped: mapped pages would count as memory in use
                    table = pa.ipc.open_stream(stream).read_all()
                part.unlink()
                table = table.sort_by([("id", "ascending"), ("row", "ascending")])
                yield table, part is parts[-1]
                del table  # before the next one is read

    def _divide(self, bucket: int, path: Path) -> list[Path]:
        """Divide the file of a bucket by id into files of about `BUCKET_BYTES`; return their paths, by ascending id."""
        count = -(-path.stat().st_size // BUCKET_BYTES)
        if count == 1:
            return [path]
        parts = [path.with_name(f"{path.stem}-{number:04}.arrow") for number in range(count)]
        with pa.OSFile(str(path)) as stream, pa.ipc.open_stream(stream) as batches, ExitStack() as files:
            writers = [files.enter_context(pa.ipc.new_stream(str(part), batches.schema)) for part in parts]
            while some := list(islice(batches, BUCKETS)):
                batch = pa.Table.from_batches(some).combine_chunks().to_batches()[0]
                ids = np.array([int(row_id[:8], 16) for row_id in batch.column("id").to_pylist()])
                part_of_row = (ids * BUCKETS - (bucket << 32)) * count >> 32
                for number in np.unique(part_of_row):
                    writers[number].write_batch(batch.take(pa.array(np.flatnonzero(part_of_row == number))))
        path.unlink()
        return parts


class SplitFingerprints(NamedTuple):
    """Digests of all splits."""

    content: str
    """Digest of ids, token ids and labels, which determine the training."""
    fields: str
    """Digest of groups and fields, which only affect how results are grouped."""


class SplitHashes:
    """Digests of rows of all splits that are added in batches."""

    def __init__(self, schema: pa.Schema) -> None:
        self._lists = tuple(name for name in (*_LISTS, *_REJECTED_LISTS) if name in schema.names)
        self._states = {name: {key: hashlib.sha256() for key in ("id", "lengths", *self._lists)} for name in SPLITS}
        self._fields = hashlib.sha256()

    def add(self, split: SplitName, batch: Any) -> None:
        """Add a record batch."""
        state = self._states[split]
        state["id"].update("".join(batch.column("id").to_pylist()).encode())
        for name in self._lists:
            state[name].update(batch.column(name).flatten().to_numpy().astype("<i4").tobytes())
        for values in zip(*(batch.column(name).to_pylist() for name in _FIELDS), strict=True):
            self._fields.update(digests.canonical_json([split, *values]).encode())
        for name in self._lists[::2]:
            state["lengths"].update(np.diff(batch.column(name).offsets.to_numpy()).astype("<i8").tobytes())

    def compute(self) -> SplitFingerprints:
        """Compute the fingerprints of the rows so far."""
        states = {name: {key: s.hexdigest() for key, s in state.items()} for name, state in self._states.items()}
        return SplitFingerprints(digests.hash_json(states), self._fields.hexdigest())


def fingerprint_splits(data: Path) -> SplitFingerprints:
    """Compute the fingerprints of prepared rows from their files. Raises DamagedFileError for an unreadable file."""
    hashes: SplitHashes | None = None
    for split in SPLITS:
        path = data / f"{split}.arrow"
        try:
            with pa.OSFile(str(path)) as stream, pa.ipc.open_stream(stream) as batches:
                hashes = hashes or SplitHashes(batches.schema)
                for batch in batches:
                    hashes.add(split, batch)
        except (OSError, KeyError, pa.ArrowException) as error:
            raise DamagedFileError(f"{path}: cannot be read ({first_line(error)}); run `dvc repro prepare`") from None
    return (hashes or SplitHashes(SCHEMA)).compute()


class SplitWriters:
    """Writer of the files of all splits, which also computes their fingerprints."""

    def __init__(self, folder: Path, schema: pa.Schema = SCHEMA) -> None:
        self.schema = schema
        self._hashes = SplitHashes(schema)
        self._writers = {name: pa.ipc.new_stream(str(folder / f"{name}.arrow"), self.schema) for name in SPLITS}
        self._rests = dict.fromkeys(SPLITS, self.schema.empty_table())

    def write(self, split: SplitName, table: pa.Table, *, is_end: bool = True) -> None:
        """Append rows of `schema`; `is_end` ends a batch.

        Otherwise the last rows wait for the next ones: those of an incomplete batch, and of the batch before it. Arrow
        pads a batch with up to 64 bytes of what follows it, and equal rows must give equal bytes.
        """
        if len(self._rests[split]):
            table = pa.concat_tables([self._rests[split], table]).combine_chunks()
        complete = len(table) if is_end else max(0, len(table) // BATCH_ROWS - 1) * BATCH_ROWS
        self._rests[split] = table.slice(complete)
        for batch in table.slice(0, complete).to_batches(max_chunksize=BATCH_ROWS):
            self._writers[split].write_batch(batch)
            self._hashes.add(split, batch)

    def write_rows(self, split: SplitName, samples: Sequence[PreparedRow]) -> None:
        """Append rows without rejected answers."""
        self.write(split, pa.Table.from_arrays(_columns_of(samples), schema=self.schema))

    def close(self) -> SplitFingerprints:
        """Finish the files and return their fingerprints."""
        for writer in self._writers.values():
            writer.close()
        return self._hashes.compute()


def open_split(data: Path, split: SplitName) -> "datasets.Dataset":
    """Open a split as a dataset with the columns of SCHEMA; `conversation` and `fields` are JSON.

    Rows whose answer is labelled undesirable are left out, because no answer is compared with theirs. Raises DataError
    if an earlier version of Ratchet prepared the split, and a column is missing, or if no row is left.
    """
    dataset: datasets.Dataset = _import_datasets().Dataset.from_file(str(data / f"{split}.arrow"))
    _require_columns(data, dataset.column_names)
    if _LABEL in dataset.column_names:
        dataset = dataset.select(np.flatnonzero(dataset[_LABEL][:]))
        if not len(dataset):
            raise DataError(f"{data}: no answer of split {split} is labelled true; add rows, or set prepare.split.seed")
    return dataset


def load_rows(data: Path, split: SplitName, objective: Objective = "sft") -> TokenRows:
    """Load the tokens of a split for training.

    - `sft`: the rows; of pairs the chosen answers, and of labelled rows the desirable ones.
    - `kto`: labelled rows with their labels. Of pairs, chosen and rejected answers take turns, as desirable and
      undesirable ones.
    - Others: chosen and rejected answers of the pairs in turns.

    Raises DataError like `open_split`, or if the objective needs other rows.
    """
    table = _map_table(data, split)
    _require_preferences(data, table.schema.names, objective)
    rows = TokenRows.from_arrow(table)
    if (labels := _read_labels(table)) is not None:
        return replace(rows, is_desirable=labels) if objective == "kto" else rows.select(np.flatnonzero(labels))
    if objective == "sft":
        return rows
    rejected = table.select(_REJECTED_LISTS).rename_columns(list(_LISTS))
    pairs = rows.interleave(TokenRows.from_arrow(rejected))
    return replace(pairs, is_desirable=np.arange(len(pairs)) % 2 == 0) if objective == "kto" else pairs


def read_lengths(data: Path, split: SplitName, objective: Objective = "sft") -> NDArray[np.int64]:
    """Return the number of tokens of each row of `load_rows`, without loading the rows. Raises the same errors."""
    table = _map_table(data, split)
    _require_preferences(data, table.schema.names, objective)
    lengths = _count_tokens(table.column("input_ids"))
    if (labels := _read_labels(table)) is not None:
        return lengths if objective == "kto" else lengths[labels]
    if objective == "sft":
        return lengths
    return np.stack([lengths, _count_tokens(table.column("rejected_input_ids"))], axis=1).ravel()


def _read_labels(table: Any) -> NDArray[np.bool_] | None:
    """Return whether the answer of each row of a split is desirable; None for rows without this label."""
    if _LABEL not in table.column_names:
        return None
    return np.array(table.column(_LABEL).to_pylist(), dtype=np.bool_)


def _count_tokens(column: Any) -> NDArray[np.int64]:
    # Arrow's own `to_numpy` imports pandas.
    offsets = (np.from_dlpack(chunk.offsets) for chunk in column.chunks)
    return np.concatenate([np.empty(0, np.int64), *map(np.diff, offsets)]).astype(np.int64)


def _require_preferences(data: Path, names: Sequence[str], objective: Objective) -> None:
    """Raise DataError if an objective needs rows with other columns."""
    if objective == "sft" or _REJECTED_LISTS[0] in names or (objective == "kto" and _LABEL in names):
        return
    if _LABEL in names:
        raise DataError(
            f"{data}: train.objective: {objective} compares a chosen and a rejected answer, but these rows have one "
            "answer with a label; set train.objective: kto"
        )
    needed = "a chosen and a rejected answer" if objective != "kto" else "answers that are labelled true or false"
    raise DataError(
        f"{data}: train.objective: {objective} compares {needed}, but these rows have only one answer; set "
        "prepare.task: preferences and run `dvc repro`, or set train.objective: sft"
    )


def read_prompts(data: Path, split: SplitName) -> Iterator[str]:
    """Iterate over the prompts of all rows of a split (`Conversation.prompt`). Raises the errors of `load_rows`."""
    for batch in _map_table(data, split).select(["conversation"]).to_batches():
        yield from map(read_prompt, batch.column(0).to_pylist())


def _map_table(data: Path, split: SplitName) -> pa.Table:
    path = data / f"{split}.arrow"
    try:
        with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as stream:
            _require_columns(data, stream.schema.names)
            return stream.read_all()
    except FileNotFoundError:
        raise DamagedFileError(f"{path}: missing; run `dvc repro -f prepare`") from None
    except (OSError, pa.ArrowInvalid) as error:
        raise DamagedFileError(f"{path}: damaged ({first_line(error)}); run `dvc repro -f prepare`") from error


def _require_columns(data: Path, names: Sequence[str]) -> None:
    if missing := [name for name in SCHEMA.names if name not in names]:
        raise DataError(f"{data}: prepared by an earlier version (no {missing[0]}); run `dvc repro -f prepare`")


def _import_datasets() -> Any:
    """Import `datasets` lazily, because the import takes a third of a second, and training does not need it."""
    import datasets

    datasets.disable_progress_bars()
    return datasets


@contextmanager
def use_fresh_cache() -> Iterator[None]:
    """Give `datasets` an empty cache.

    The keys of its usual cache are file names and times, so that cache may return outdated rows.
    """
    settings = _import_datasets().config
    previous = settings.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory(prefix="ratchet-datasets-") as folder:
        settings.HF_DATASETS_CACHE = Path(folder)
        try:
            yield
        finally:
            settings.HF_DATASETS_CACHE = previous
