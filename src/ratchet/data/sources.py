"""Reads the rows of prepare.sources (files, datasets of the Hugging Face hub, teacher answers) and evaluation sets.

A hub dataset is downloaded once, at a pinned commit, into the cache of `datasets`. Later runs read the memory-mapped
cache and need no network (without a network, HF_HUB_OFFLINE=1 avoids half a minute of connection attempts). With
`streaming`, each preparation reads the rows over the network. It keeps the shards that it has read until it is
complete, so that after a kill the next one reads only the others. In two cases `datasets` (5.2.0, `load.py`) silently
returns other rows than the pinned ones: the working directory has a folder with the dataset's name, or the hub cannot
be reached and the cache contains another commit. Both are errors here.
"""

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa

from ratchet.config.prepare import ColumnSettings, Prepare, SourceSettings
from ratchet.data import readers, schema_detection
from ratchet.data.conversation import MalformedRecord, SourceRow, join_leaf_texts
from ratchet.data.readers import Fields, Record, strip_struct_nulls
from ratchet.data.schema_detection import RecordReader, find_text_flaw
from ratchet.errors import DamagedFileError, DataError
from ratchet.storage import digests, files, output_card
from ratchet.storage.output_card import CARD_ENDING, card_path
from ratchet.storage.records.data import PROVENANCE, SelectionCard, TeacherProvenance

_SOURCE_FOLDERS = ("data/raw", "data/distilled")
"""Folders that DVC tracks; data/distilled has the output of the optional stage `select`."""
_EVALUATION_FOLDERS = ("data/raw", "data/tasks")
_GLOB_CHARACTERS = "*?["
_MAX_FILES_SHOWN = 20
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REASON_CHARACTERS = 300
_SHARD = "streamed shard"
_BATCH_ROWS = 1000


class SourceReader:
    """Reader of the rows of prepare.sources, in order."""

    files: list[dict[str, Path]]
    """For each source: the path of each file by its name relative to the project, sorted; {} for a hub dataset."""
    teacher_cards: list[SelectionCard | None]
    """For each source: the selection card if its rows are teacher answers, otherwise None."""
    schema_descriptions: list[str]
    """For each source: the detected schema in words; "" until the first records of the source are read."""

    def __init__(self, root: Path, settings: Prepare, shards: Path | None = None) -> None:
        """Find the files without reading them.

        `shards` is the folder in which complete shards of streamed datasets stay until the caller removes it; None: no
        shard is kept.

        Raises DataError if a file is missing, has an unsupported format, belongs to two sources, or is outside the
        folders that DVC tracks, and DamagedFileError if a file of `ratchet select` changed since it was written.
        """
        self._settings, self._shards = settings, shards
        self.files = [
            _find_files(root, source.files, _SOURCE_FOLDERS, "prepare.sources") if source.files else {}
            for source in settings.sources
        ]
        self.schema_descriptions = [""] * len(settings.sources)
        seen: dict[str, int] = {}
        for number, names in enumerate(self.files):
            for name in names:
                if name in seen:
                    raise DataError(
                        f"params.yaml: prepare.sources: {name} belongs to both {settings.sources[seen[name]].label} "
                        f"and {settings.sources[number].label}; name it once, with a weight if it should count more"
                    )
                seen[name] = number
        self.teacher_cards = [find_teacher_card(*pair) for pair in zip(settings.sources, self.files, strict=True)]

    @property
    def teacher_sources(self) -> list[bool]:
        """For each source: whether its rows are answers of a teacher, which are only trained on.

        If all sources are pairs of `ratchet select` and prepare.task is preferences, their rows are also held out:
        there is nothing else that could show what the model prefers.
        """
        has_only_pairs = self._settings.task == "preferences" and all(map(_has_pairs, self.teacher_cards))
        return [card is not None and not has_only_pairs for card in self.teacher_cards]

    def rows(self) -> Iterator[SourceRow | MalformedRecord]:
        """Yield all rows of all sources, with labels stripped of white space. You can call this method more than once.

        Raises DataError if a file cannot be read, a source has no rows, or the schema of its records is not recognized.
        """
        for number, source in enumerate(self._settings.sources):
            rows = self._source_rows(number, source)
            yield from map(_strip_label, rows) if self._settings.task == "labels" else rows

    def remove_other_shards(self) -> None:
        """Remove shards of earlier settings, which no source uses any more."""
        wanted = {_shard_folder(source) for source in self._settings.sources if source.streaming}
        for folder in self._shards.iterdir() if self._shards and self._shards.is_dir() else ():
            if folder.name not in wanted:
                shutil.rmtree(folder)

    def _source_rows(self, number: int, source: SourceSettings) -> Iterator[SourceRow | MalformedRecord]:
        files = self.files[number].items()
        records = (
            read_hub_records(source, self._shards)
            if source.dataset
            else chain.from_iterable(readers.read_records(path, name) for name, path in files)
        )
        reader: RecordReader | None = None
        has_records = False
        while reader is None and (head := list(islice(records, schema_detection.SAMPLE_RECORDS))):
            has_records = True
            if fields := [record[1] for record in head if not isinstance(record, MalformedRecord)]:
                reader = self._detect_reader(number, source, fields)
            yield from self._convert_records(head, reader, number)
        if reader is None:
            self.schema_descriptions[number] = "nothing: no record could be read"
        if not has_records:
            raise DataError(f"{source.label}: no rows; add rows, or remove the source from prepare.sources")
        yield from self._convert_records(records, reader, number)

    def _detect_reader(self, number: int, source: SourceSettings, fields: Sequence[Fields]) -> RecordReader:
        schema = source.record_schema if source.record_schema != "auto" else self._settings.record_schema
        columns = source.columns or self._settings.columns
        setting = f"prepare.sources[{number}]" if source.columns else "prepare"
        if self.teacher_cards[number] is None:
            require_teacher_card(source, fields)
        elif source.record_schema == "auto" and source.columns is None:
            schema, columns = "messages", ColumnSettings(messages="messages")
            if _has_pairs(self.teacher_cards[number]):
                schema, columns = "preferences", ColumnSettings(prompt="prompt", response="chosen", rejected="rejected")
        reads_labels = self._settings.task == "preferences"
        reader = schema_detection.detect_schema(fields, schema, columns, source.label, setting, reads_labels)
        self.schema_descriptions[number] = reader.description
        return reader

    def _convert_records(
        self, records: Iterable[Record], reader: RecordReader | None, number: int
    ) -> Iterator[SourceRow | MalformedRecord]:
        split = self._settings.split
        split_fields = [name for name in (split.group, split.time, *(split.stratify or ())) if name]
        for record in records:
            if isinstance(record, MalformedRecord):
                yield replace(record, source=number)
            elif reader:
                where, fields = record
                texts = ((name, value) for name in split_fields if isinstance(value := fields.get(name), str))
                flaws = (f"field {name!r} {problem}" for name, text in texts if (problem := find_text_flaw(text)))
                if flaw := next(flaws, None):
                    yield MalformedRecord(where, flaw, number)
                else:
                    yield from reader.rows(where, fields, number)


def _has_pairs(card: SelectionCard | None) -> bool:
    return card is not None and card.pairs is not None


def _strip_label(row: SourceRow | MalformedRecord) -> SourceRow | MalformedRecord:
    if isinstance(row, MalformedRecord) or row.conversation.response == row.conversation.response.strip():
        return row
    *before, answer = row.conversation.messages
    answer = {**answer, "content": row.conversation.response.strip()}
    return replace(row, conversation=replace(row.conversation, messages=[*before, answer]))


def read_evaluation_sets(root: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Read files or globs below data/raw or data/tasks: for each file, the texts of each record joined by line breaks.

    Raises DataError if a file or a record cannot be read. No record is skipped, because it could leak undetected.
    """
    texts: dict[str, list[str]] = {}
    for pattern in names:
        for name, path in _find_files(root, pattern, _EVALUATION_FOLDERS, "prepare.leakage.files").items():
            texts[name] = []
            for record in readers.read_records(path, name):
                if isinstance(record, MalformedRecord):
                    raise DataError(f"{record.where}: {record.detail}; fix or remove the record")
                text = join_leaf_texts(record[1])
                if problem := find_text_flaw(text):
                    raise DataError(f"{record[0]}: a text {problem}; fix or remove the record")
                texts[name].append(text)
            if not texts[name]:
                raise DataError(f"{name}: no records; add records, or remove the file from prepare.leakage.files")
    return texts


# ----- Files


def require_watched_path(root: Path, name: str, folders: Sequence[str], setting: str) -> Path:
    """Resolve a path below one of the folders that DVC tracks for a stage. Raises DataError for any other path."""
    path = (root / name).absolute()
    # Links are not resolved: data/raw may hold a link to a large file elsewhere.
    if ".." in Path(name).parts or not any(path.is_relative_to((root / folder).absolute()) for folder in folders):
        raise DataError(
            f"params.yaml: {setting}: {name} is not below {' or '.join(folders)}, so DVC would not detect changes; "
            "move it there, or add a link to it there"
        )
    return path


def _find_files(root: Path, pattern: str, folders: Sequence[str], setting: str) -> dict[str, Path]:
    """Return the files that match a name or glob: their paths by name relative to the project, sorted."""
    path = require_watched_path(root, pattern, folders, setting)
    relative = path.relative_to(root.absolute()).as_posix()
    try:
        names = [relative] if path.is_file() else _glob_files(root, relative)
        if not names:
            raise DataError(_describe_missing(root, path, pattern))
    except (OSError, ValueError) as error:
        raise DataError(f"params.yaml: {setting}: {pattern}: cannot search for files ({error})") from None
    for name in names:
        readers.check_ending(name)
    return {name: root / name for name in names}


def _glob_files(root: Path, pattern: str) -> list[str]:
    if not any(character in pattern for character in _GLOB_CHARACTERS):
        return []
    names = []
    for path in root.glob(pattern):
        described_file = path.with_name(path.name.removesuffix(CARD_ENDING))
        is_card = described_file != path and described_file.is_file()
        if path.is_file() and not path.name.startswith(".") and not is_card:
            names.append(path.relative_to(root).as_posix())
    return sorted(names)


def _describe_missing(root: Path, path: Path, pattern: str) -> str:
    if path.is_dir():
        return f"{pattern}: found a folder, expected files; write for example {pattern}/*.jsonl"
    if path.is_symlink() or path.with_name(path.name + ".dvc").is_file():
        return f"{pattern}: the content is not in the workspace; fetch it with dvc pull"
    folders = pattern.split("/")[:-1]
    is_plain = len(folders) > 1 and folders[0] == "data" and re.fullmatch(r"[\w.-]+", folders[1])
    name = "/".join(folders[:2]) if is_plain else "data/raw"
    folder = root / name
    files = (file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
    names = sorted(file.relative_to(root).as_posix() for file in files) if folder.is_dir() else []
    shown = ", ".join(names[:_MAX_FILES_SHOWN]) + (" ..." if len(names) > _MAX_FILES_SHOWN else "")
    return f"{pattern}: no such file; {name} holds {shown or 'no files'}"


# ----- Datasets of the hub


def read_hub_records(source: SourceSettings, shards: Path | None = None) -> Iterator[Record]:
    """Yield every record of `source.dataset` in order, with the names of class labels.

    For `shards` see `SourceReader`. Raises DataError if the dataset cannot be loaded at this commit.
    """
    split = _load_split(source)
    features = (split.features or {}).items()
    classes = {name: feature for name, feature in features if isinstance(feature, datasets.ClassLabel)}
    for index, row in enumerate(_stream_rows(source, split, shards) if source.streaming else split):
        fields = {name: strip_struct_nulls(value) for name, value in row.items()}
        for name, class_label in classes.items():
            # Rows without a label have null or, by a convention of `datasets`, -1.
            value = fields[name]
            fields[name] = None if value is None or value < 0 else str(class_label.int2str(value))
        yield f"{source.dataset}[{source.dataset_split}]#{index}", fields


def _stream_rows(source: SourceSettings, split: Any, shards: Path | None) -> Iterator[Fields]:
    """Yield the rows of a split that is read over the network, and keep complete shards if there is a folder for them.

    A shard of `datasets` is one data file. Without known types of its columns (JSON arrays) no shard is kept.
    """
    if shards is None or split.features is None:
        yield from _iterate_stream(source, split, "row")
        return
    folder = shards / _shard_folder(source)
    for index in range(split.num_shards):
        kept = folder / f"{index:05}"
        tables = _read_shard(kept) if _has_shard(kept) else _fetch_shard(source, split, index, kept)
        for table in tables:
            columns = split.features.decode_batch(table.to_pydict())
            yield from (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _shard_folder(source: SourceSettings) -> str:
    identity = [source.dataset, source.subset, source.revision, source.dataset_split, datasets.__version__]
    return digests.hash_json(identity)[: digests.SHORT]


def _has_shard(kept: Path) -> bool:
    """Return whether a complete shard is there; a damaged one is removed, because it can be read again."""
    try:
        files.verify_sealed(kept, _SHARD)
    except DamagedFileError:
        if kept.exists():
            shutil.rmtree(kept)
        return False
    return True


def _read_shard(kept: Path) -> Iterator[Any]:
    with pa.OSFile(str(kept / "rows.arrow")) as stream, pa.ipc.open_stream(stream) as batches:
        yield from batches


def _fetch_shard(source: SourceSettings, split: Any, index: int, kept: Path) -> Iterator[Any]:
    """Yield the tables of a shard; after the last one the shard is sealed as `kept`."""
    shard = split.shard(split.num_shards, index).with_format("arrow").iter(_BATCH_ROWS)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        files.sealed_directory(kept, _SHARD) as scratch,
        pa.ipc.new_stream(str(scratch / "rows.arrow"), split.features.arrow_schema, options=options) as writer,
    ):
        for table in _iterate_stream(source, shard, f"shard {index + 1} of {split.num_shards}, batch"):
            writer.write_table(table)
            yield table


def _iterate_stream(source: SourceSettings, stream: Iterable[Any], unit: str) -> Iterator[Any]:
    """Yield what is read over the network. `datasets` repeats a read that fails up to 20 times."""
    items, index = iter(stream), 0
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        except Exception as error:  # from httpx, huggingface_hub, datasets, pyarrow
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_CHARACTERS]
            raise DataError(
                f"{source.label}: {unit} {index:,} cannot be read from the hub ({reason}); run the command again, or "
                "set streaming: false, which keeps each downloaded file"
            ) from error
        yield item
        index += 1


def _load_split(source: SourceSettings) -> Any:
    """Load the split from the cache, or download it first; if it is streamed, only open it."""
    if not _COMMIT.fullmatch(source.revision or ""):
        raise DataError(
            f"{source.label}: revision: found {source.revision}; expected the 40 hexadecimal digits of a commit (see "
            "the History on the hub's Files page), so that every run reads the same rows"
        )
    if Path(str(source.dataset)).exists():
        raise DataError(
            f"{source.label}: a local folder {source.dataset} exists and would be read instead of the hub dataset; "
            "move it, or put its files below data/raw and name them as a source"
        )
    progress_bars_disabled = datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()  # a download may take minutes
    try:
        builder = datasets.load_dataset_builder(source.dataset, source.subset, revision=source.revision)
        if builder.hash == source.revision:
            if source.streaming:
                return builder.as_streaming_dataset(split=source.dataset_split)
            builder.download_and_prepare()
            return builder.as_dataset(split=source.dataset_split)
    except Exception as error:  # from httpx, huggingface_hub, datasets, pyarrow or the file system
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_CHARACTERS]
        raise DataError(
            f"{source.label}: cannot be loaded from the hub ({reason}); check its name, revision, subset and split in "
            "prepare.sources, and the network"
        ) from error
    finally:
        if progress_bars_disabled:
            datasets.disable_progress_bars()
    raise DataError(
        f"{source.label}: the hub did not return this commit, and the cache holds commit {builder.hash}; check the "
        "revision in prepare.sources, and the network"
    )


# ----- Sources that contain answers of a teacher: `ratchet select` writes a card next to such a file


def find_teacher_card(source: SourceSettings, files: Mapping[str, Path]) -> SelectionCard | None:
    """Return the selection card of a source that contains teacher answers; None for other sources.

    Raises DataError if the source mixes teacher answers with other files, or assigns them to validation or test, and
    DamagedFileError if the file does not match its card, or the card is not one of `ratchet select`.
    """
    names = [name for name, path in files.items() if card_path(path).is_file()]
    if not names:
        return None
    if len(files) > 1:
        raise DataError(
            f"params.yaml: prepare.sources: {source.label}: {names[0]} contains answers of a teacher (it has a card) "
            f"and must be a source of its own; exclude it from the pattern and add a source {{files: {names[0]}}}"
        )
    if source.split in ("validation", "test"):
        raise DataError(
            f"params.yaml: prepare.sources: {source.label}: split: found {source.split}, but the rows are answers of a "
            "teacher, which cannot serve as ground truth; set split: train, or remove it"
        )
    name, path = names[0], files[names[0]]
    card = output_card.read_card(path, SelectionCard)
    if card is None:
        raise DamagedFileError(
            f"{name}: {card_path(path).name} is not a card of `ratchet select`; run `ratchet select` on outputs of "
            "`ratchet generate` first; if the file has another origin, move the card away"
        )
    if digests.hash_file(path) != card.output:
        raise DamagedFileError(
            f"{name}: the file changed since `ratchet select` wrote it; remove it and run `ratchet select` again; to "
            "get other rows, change section select (select.reward runs your own program to score answers)"
        )
    return card


def require_teacher_card(source: SourceSettings, records: Sequence[Fields]) -> None:
    """Raise DataError if records are marked as teacher answers but their file has no selection card."""
    origins = (record.get(PROVENANCE) for record in records)
    if any(isinstance(origin, dict) and origin.keys() & {"generation", "chosen"} for origin in origins):
        name = card_path(Path(source.files or source.label)).name
        raise DataError(
            f"{source.label}: the rows were written by `ratchet select` ({PROVENANCE}), but their card is missing; "
            f"put {name} next to the file, and give the file its original name"
        )


def describe_teacher_data(card: SelectionCard, training_rows: int) -> TeacherProvenance:
    """Summarize a selection card for the dataset card."""
    teachers = zip(card.model_names, card.spec.teachers, strict=True)
    return TeacherProvenance(
        teachers=tuple(
            f"{name} ({teacher.kind} {teacher.model_digest[: digests.SHORT]})" for name, teacher in teachers
        ),
        generations=tuple(teacher.generation for teacher in card.spec.teachers),
        answers=card.answers,
        rows=card.rows,
        filters=tuple((report.name, report.dropped) for report in card.filters if report.dropped),
        training_rows=training_rows,
    )
