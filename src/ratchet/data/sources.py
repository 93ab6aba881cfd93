"""Rows of a dataset of the Hugging Face hub, at a pinned commit.

The first time it is downloaded into the cache of `datasets`; from then on its rows are read there, memory-mapped, and
no network is needed (without one, HF_HUB_OFFLINE=1 spares half a minute of attempts). Two habits of the library (5.2.0,
`load.py`) would give other rows than those pinned, without an error, and are stopped here: a folder of the dataset's
name in the working directory is read in its place, and where the hub cannot be reached, the newest rows in the cache
are taken, of whatever commit.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from ratchet.config.data import ColumnSettings, Prepare, SourceSettings
from ratchet.data import readers, schema_detection
from ratchet.data.conversation import MalformedRecord, SourceRow, join_leaf_texts
from ratchet.data.readers import Fields, Record, strip_struct_nulls
from ratchet.data.schema_detection import RecordReader, find_text_flaw
from ratchet.errors import DamagedFileError, DataError
from ratchet.storage import digests, output_card
from ratchet.storage.output_card import CARD_ENDING, card_path
from ratchet.storage.records.data import PROVENANCE, SelectionCard, TeacherProvenance

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHOWN_CHARACTERS = 300


def read_hub_records(source: SourceSettings) -> Iterator[Record]:
    """Every record of `source.dataset`, in order; values of a class label are given by name.

    Raises:
        DataError: it cannot be had at this commit; the message says why.
    """
    split = _load_split(source)
    classes = {name: kind for name, kind in split.features.items() if isinstance(kind, datasets.ClassLabel)}
    place = f"{source.dataset}[{source.dataset_split}]"
    for index, row in enumerate(split):
        fields = {name: strip_struct_nulls(value) for name, value in row.items()}
        for name, kind in classes.items():
            fields[name] = _class_name(kind, fields[name])
        yield f"{place}#{index}", fields


def _load_split(source: SourceSettings) -> Any:
    """The split, from the cache or downloaded into it."""
    if not _COMMIT.fullmatch(source.revision or ""):
        raise DataError(
            f"{source.label}: revision {source.revision} is no commit; give the 40 digits of one (the hub's page "
            "`Files`, `History`), so that the same rows come again"
        )
    if Path(str(source.dataset)).exists():
        raise DataError(
            f"{source.label}: there is a folder {source.dataset} here, and it would be read in place of the hub's "
            "dataset; move it, or give its files below data/raw as a source"
        )
    silent = datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()  # a download may take minutes
    try:
        builder = datasets.load_dataset_builder(source.dataset, source.subset, revision=source.revision)
        if builder.hash == source.revision:
            builder.download_and_prepare()
            return builder.as_dataset(split=source.dataset_split)
    except (
        Exception
    ) as error:  # of httpx, huggingface_hub, datasets, pyarrow or the file system: all mean the same here
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:_SHOWN_CHARACTERS]
        raise DataError(
            f"{source.label}: cannot be had from the hub ({reason}); check its name, revision, subset and split in "
            "prepare.sources, and the network"
        ) from error
    finally:
        if silent:
            datasets.disable_progress_bars()
    raise DataError(
        f"{source.label}: the hub does not give this commit, and the cache holds {builder.hash}; check the revision in "
        "prepare.sources, and the network"
    )


def _class_name(kind: datasets.ClassLabel, value: int | None) -> str | None:
    """Name of a class; unlabelled rows are null or, by the library's custom, -1."""
    return None if value is None or value < 0 else str(kind.int2str(value))


# Sources that are answers of a teacher: known by the card that `ratchet select` puts beside them.


def find_teacher_card(source: SourceSettings, files: Mapping[str, Path]) -> SelectionCard | None:
    """The card of a source's file, if it is answers of a teacher.

    Args:
        source: of prepare.sources.
        files: its files, by name.

    Raises:
        DataError: it is mixed with other files, or is to be judged by.
        DamagedFileError: the rows are not those that the card speaks of, or it is no such card.
    """
    names = [name for name, path in files.items() if card_path(path).is_file()]
    if not names:
        return None
    if len(files) > 1:
        raise DataError(
            f"params.yaml: prepare.sources: {source.label}: {names[0]} is answers of a teacher, by its card, and of a "
            f"source so is the only file: leave it out of the pattern, and name it by itself, {{files: {names[0]}}}"
        )
    if source.split in ("validation", "test"):
        raise DataError(
            f"params.yaml: prepare.sources: {source.label}: split: {source.split}, but its rows are answers of a "
            "teacher: what a model says is no truth to judge by; take split: train, or none"
        )
    name, path = names[0], files[names[0]]
    card = output_card.read_card(path, SelectionCard)
    if card is None:
        raise DamagedFileError(
            f"{name}: {card_path(path).name} beside it is no card of `ratchet select`; choose answers of `ratchet "
            "generate` with that first, and of other files move such a card away"
        )
    if digests.hash_file(path) != card.output:
        raise DamagedFileError(
            f"{name}: was changed since `ratchet select` wrote it; remove it and run that again, or choose otherwise "
            "with section select (a program of yours can score answers: select.reward)"
        )
    return card


def require_teacher_card(source: SourceSettings, records: Sequence[Fields]) -> None:
    """Raise DataError for records that say they are answers of a teacher, where no card vouches for them."""
    if any(isinstance(one.get(PROVENANCE), dict) and "generation" in one[PROVENANCE] for one in records):
        name = card_path(Path(source.files or source.label)).name
        raise DataError(
            f"{source.label}: its rows were written by `ratchet select` ({PROVENANCE}), but their card is not beside "
            f"them; put {name} there, and the file under the name that it had"
        )


def describe_teacher_data(card: SelectionCard, training_rows: int) -> TeacherProvenance:
    """What the dataset card says of it."""
    teachers = zip(card.model_names, card.spec.teachers, strict=True)
    return TeacherProvenance(
        teachers=tuple(f"{name} ({one.kind} {one.model_digest[: digests.SHORT]})" for name, one in teachers),
        generations=tuple(one.generation for one in card.spec.teachers),
        answers=card.answers,
        rows=card.rows,
        filters=tuple((one.name, one.dropped) for one in card.filters if one.dropped),
        training_rows=training_rows,
    )


# The rows of prepare.sources, in order, each with the place where it stands; and the texts of evaluation sets.

_RAW = ("data/raw", "data/taught")
"""The second is the out of an optional DVC stage `select` (docs/sequence_distillation.md)."""
_EVALUATION = ("data/raw", "data/tasks")
_GLOB = "*?["
_SHOWN_FILES = 20


class SourceReader:
    """The rows of prepare.sources, in order."""

    files: list[dict[str, Path]]
    """Per source: name relative to the project -> path (globs resolved, sorted); {} for a dataset of the hub."""
    taught: list[SelectionCard | None]
    """Per source: the card of its rows, if they are answers of a teacher."""
    shapes: list[str]
    """Per source: what its records were taken for; "" until its first record was read."""

    def __init__(self, root: Path, settings: Prepare) -> None:
        """Find the files; nothing is read yet.

        Raises:
            DataError: a file is missing, of no known format, named twice, or lies where DVC would not see it change.
            DamagedFileError: a file by `ratchet select` is not as that wrote it.
        """
        self._settings = settings
        self.files = [
            _find_files(root, one.files, _RAW, "prepare.sources") if one.files else {} for one in settings.sources
        ]
        self.shapes = [""] * len(settings.sources)
        seen: dict[str, int] = {}
        for number, names in enumerate(self.files):
            for name in names:
                if name in seen:
                    raise DataError(
                        f"params.yaml: prepare.sources: {name} belongs to {settings.sources[seen[name]].label} and to "
                        f"{settings.sources[number].label}; name it once, with a weight if it should count more"
                    )
                seen[name] = number
        self.taught = [find_teacher_card(*one) for one in zip(settings.sources, self.files, strict=True)]

    def rows(self) -> Iterator[SourceRow | MalformedRecord]:
        """All rows of all sources; may be called again. Labels are without white space around them.

        Raises:
            DataError: a file is unusable as a whole, a source has no rows, or its records have no shape that we know.
        """
        for number, source in enumerate(self._settings.sources):
            rows = self._source_rows(number, source)
            yield from map(_add_label_answer, rows) if self._settings.task == "labels" else rows

    def _source_rows(self, number: int, source: SourceSettings) -> Iterator[SourceRow | MalformedRecord]:
        records = self._records(number, source)
        reading: RecordReader | None = None
        begun = False
        while reading is None and (head := list(islice(records, schema_detection.SAMPLE_RECORDS))):
            begun = True
            if fields := [
                record[1] for record in head if not isinstance(record, MalformedRecord)
            ]:  # faults settle nothing
                reading = self._settled(number, source, fields)
            yield from self._rows(head, reading, number)
        if reading is None:
            self.shapes[number] = "nothing: no record could be read"
        if not begun:
            raise DataError(f"{source.label}: no rows; give it some or take it out of prepare.sources")
        yield from self._rows(records, reading, number)

    def _records(self, number: int, source: SourceSettings) -> Iterator[Record]:
        if source.dataset:
            yield from read_hub_records(source)
        for name, path in self.files[number].items():
            yield from readers.read_records(path, name)

    def _settled(self, number: int, source: SourceSettings, fields: Sequence[Fields]) -> RecordReader:
        shape = source.shape if source.shape != "auto" else self._settings.shape
        columns = source.columns or self._settings.columns
        setting = f"prepare.sources[{number}]" if source.columns else "prepare"
        if self.taught[number] is None:
            require_teacher_card(source, fields)
        elif source.shape == "auto" and source.columns is None:
            shape, columns = "messages", ColumnSettings(messages="messages")
        reading = schema_detection.detect_schema(fields, shape, columns, source.label, setting)
        self.shapes[number] = reading.described
        return reading

    def _rows(
        self, records: Iterable[Record], reading: RecordReader | None, number: int
    ) -> Iterator[SourceRow | MalformedRecord]:
        split = self._settings.split
        divided_by = split.group or split.stratify or split.time
        for record in records:
            if isinstance(record, MalformedRecord):
                yield replace(record, source=number)
            elif reading:
                where, fields = record
                value = fields.get(divided_by) if divided_by else None
                if isinstance(value, str) and (problem := find_text_flaw(value)):
                    yield MalformedRecord(where, f"field {divided_by!r} {problem}", number)
                else:
                    yield from reading.rows(where, fields, number)


def _add_label_answer(row: SourceRow | MalformedRecord) -> SourceRow | MalformedRecord:
    if isinstance(row, MalformedRecord) or row.conversation.response == row.conversation.response.strip():
        return row
    *before, answer = row.conversation.messages
    answer = {**answer, "content": row.conversation.response.strip()}
    return replace(row, conversation=replace(row.conversation, messages=[*before, answer]))


def read_evaluation_sets(root: Path, names: Sequence[str]) -> dict[str, list[str]]:
    """Evaluation sets (files or globs below data/raw or data/tasks): the texts of each record, a line each, by file.

    Raises:
        DataError: a file or a record cannot be read; half an evaluation set would let the other half leak.
    """
    found: dict[str, list[str]] = {}
    for pattern in names:
        for name, path in _find_files(root, pattern, _EVALUATION, "prepare.leakage.files").items():
            found[name] = [_join_record_texts(record) for record in readers.read_records(path, name)]
            if not found[name]:
                raise DataError(f"{name}: no records; give it some or take it out of prepare.leakage.files")
    return found


def _join_record_texts(record: Record) -> str:
    """All texts of a record in order, however deep they stand."""
    if isinstance(record, MalformedRecord):
        raise DataError(f"{record.where}: {record.detail}; mend or remove the record")
    where, fields = record
    text = join_leaf_texts(fields)
    if problem := find_text_flaw(text):
        raise DataError(f"{where}: a text {problem}; mend or remove the record")
    return text


def require_watched_path(root: Path, name: str, folders: Sequence[str], setting: str) -> Path:
    """A path below one of the folders that DVC watches for a stage. Raises DataError for any other."""
    path = (root / name).absolute()
    # Compared without following links: data/raw may hold a link to a large file elsewhere.
    if ".." in Path(name).parts or not any(path.is_relative_to((root / one).absolute()) for one in folders):
        raise DataError(
            f"params.yaml: {setting}: {name} is not below {' or '.join(folders)}; DVC would not see it change: "
            "move it there, or put a link to it there"
        )
    return path


def _find_files(root: Path, pattern: str, folders: Sequence[str], setting: str) -> dict[str, Path]:
    """The files that a name or glob means, by their names relative to the project, sorted."""
    path = require_watched_path(root, pattern, folders, setting)
    relative = path.relative_to(root.absolute()).as_posix()
    try:
        names = [relative] if path.is_file() else _glob_files(root, relative)
        if not names:
            raise DataError(_describe_missing(root, path, pattern))
    except (OSError, ValueError) as error:
        raise DataError(f"params.yaml: {setting}: {pattern}: cannot be looked for ({error})") from None
    for name in names:
        readers.check_ending(name)
    return {name: root / name for name in names}


def _glob_files(root: Path, pattern: str) -> list[str]:
    if not any(sign in pattern for sign in _GLOB):
        return []
    files = (path for path in root.glob(pattern) if path.is_file() and not path.name.startswith("."))
    files = (path for path in files if not _is_card(path))
    return sorted(path.relative_to(root).as_posix() for path in files)


def _is_card(path: Path) -> bool:
    """Whether it is the card of a file beside it."""
    of = path.with_name(path.name.removesuffix(CARD_ENDING))
    return of != path and of.is_file()


def _describe_missing(root: Path, path: Path, pattern: str) -> str:
    if path.is_dir():
        return f"{pattern}: is a folder; name its files, for example {pattern}/*.jsonl"
    if path.is_symlink() or path.with_name(path.name + ".dvc").is_file():
        return f"{pattern}: its content is not here; fetch it with dvc pull"
    raw = root / "data" / "raw"
    inside = (one for one in raw.rglob("*") if one.is_file() and not one.name.startswith("."))
    here = sorted(one.relative_to(root).as_posix() for one in inside) if raw.is_dir() else []
    shown = ", ".join(here[:_SHOWN_FILES]) + (" ..." if len(here) > _SHOWN_FILES else "")
    return f"{pattern}: no such file; data/raw holds {shown or 'nothing'}"
