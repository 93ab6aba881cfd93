"""Assigns each row to a split: train, validation or test.

By default the split depends only on the row's prompt (or group) and the seed, so a row never moves when other rows are
added or removed. With prepare.split.stratify or prepare.split.time the split depends on the row's rank among all rows:
so the fractions are exact (stratify), or the newest rows are the test rows (time). Rows near a boundary may then move
when rows are added. Rows with the same prompt (or group) stay in one split, so that a test row cannot also be a
training row.
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ratchet.config.prepare import Prepare, SplitSettings
from ratchet.data.conversation import SourceRow
from ratchet.data.row_table import RowTable, find_sorted, sort_unique
from ratchet.data.schema_detection import FieldNames, format_field_value
from ratchet.errors import DataError
from ratchet.storage import digests

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)
_UNASSIGNED = -1

_MAX_BLANK_LINES = 32
"""Maximum number of blank lines before the user's own prompt, if a system message was merged into it."""
LENGTH = "length"
"""Value of prepare.split.stratify that forms the strata by the number of characters of the text, in powers of two."""
SMALLEST_STRATUM = 3
"""Minimum number of prompts in a stratum that is divided among the three splits. All rows of a smaller stratum are
training rows; the dataset card has a note about strata with fewer rows than this."""


def normalize_text(text: str) -> str:
    """Fold case and collapse white space, so that equivalent prompts compare equal."""
    return " ".join(text.casefold().split())


def hash_position(key: str, seed: int) -> float:
    """Map a key to [0, 1) by its seeded SHA-256."""
    return int(digests.hash_bytes(f"{seed}\0{key}".encode())[:16], 16) / 16.0**16


def split_fractions(settings: Prepare) -> dict[SplitName, float]:
    """Return the fraction of each split among rows whose source has no `split`.

    The fraction is 0 for validation or test if a source is assigned to that split.
    """
    assigned = {source.split for source in settings.sources}
    split = settings.split
    test = 0.0 if "test" in assigned else split.test
    validation = 0.0 if "validation" in assigned else split.validation
    return {"train": 1 - test - validation, "validation": validation, "test": test}


class SplitAssigner:
    """Assigner of splits: call `add` for each row, then `assign`, then `close`."""

    def __init__(self, settings: Prepare, teacher_sources: Sequence[bool] = (), folder: Path | None = None) -> None:
        """Start with no rows.

        `teacher_sources` has for each source whether it contains teacher answers; `folder` is for temporary files.
        """
        self.settings = settings.split
        self.fractions = split_fractions(settings)
        self._teacher_rows = _TeacherRows(teacher_sources, folder)
        self.is_from_teacher = self._teacher_rows.is_from_teacher
        self.strata: list[str] = []
        """Names of the strata by code, in order of first appearance."""
        self._source_splits = [
            SPLITS.index(source.split) if source.split else _UNASSIGNED for source in settings.sources
        ]
        if self.settings.stratify or self.settings.time:  # teacher rows must not change the rank of other rows
            self._source_splits = [
                TRAIN if self.is_from_teacher(source) else split for source, split in enumerate(self._source_splits)
            ]
        split = self.settings
        named = [("group", split.group), ("time", split.time), *(("stratify", name) for name in split.stratify or ())]
        self._used = [(setting, name) for setting, name in named if name and (setting, name) != ("stratify", LENGTH)]
        self._unseen, self._fields = self._used, FieldNames()
        self._rows = RowTable(
            folder, np.dtype([("position", "f8"), ("time", "f8"), ("stratum", "i4"), ("fixed_split", "i1")])
        )
        self._code_of: dict[str, int] = {}
        self._time_kinds: set[str] = set()

    def close(self) -> None:
        """Delete the temporary files."""
        self._rows.close()
        self._teacher_rows.close()

    def find_problem(self, row: SourceRow) -> str | None:
        """Return the reason why a row cannot be assigned (a missing or unusable field); None if it can be assigned."""
        if self._unseen:
            self._fields.add(row.fields)
            self._unseen = [(setting, name) for setting, name in self._unseen if name not in row.fields]
        for setting, name in self._used:
            if setting != "group" and self.is_from_teacher(row.source):
                continue
            if row.fields.get(name) is None:
                return f"no field {name!r} (prepare.split.{setting})"
            if isinstance(row.fields[name], (list, Mapping)):
                return f"field {name!r} (prepare.split.{setting}) holds a {type(row.fields[name]).__name__}"
            if setting == "group":
                text = format_field_value(row.fields[name])
                if text is not None and not text.strip():
                    return f"field {name!r} (prepare.split.group) is empty"
            if setting == "time" and _parse_time(row.fields[name]) is None:
                value = str(row.fields[name])[:40]
                return f"field {name!r} (prepare.split.time) is neither a date nor a number: {value!r}"
        return None

    def add(self, row: SourceRow) -> int:
        """Add a valid row (see `find_problem`); return its index into the result of `assign`."""
        split, key = self.settings, normalize_text(row.conversation.prompt)
        if split.group is not None:
            key = f"group\0{row.fields[split.group]}"
        self._teacher_rows.add(row)
        values = [_find_stratum_value(row, name) for name in split.stratify or ()]
        stratum = "".join(values)
        if len(values) > 1:  # quoted, so that two combinations never have the same name
            stratum = ", ".join(f"{name}={value!r}" for name, value in zip(split.stratify or (), values, strict=True))
        code = self._code_of.setdefault(stratum, len(self._code_of))
        if code == len(self.strata):
            self.strata.append(stratum)
        value = row.fields.get(split.time) if split.time else None
        if split.time and not self.is_from_teacher(row.source):
            self._time_kinds.add("numbers" if _finite_number(value) is not None else "dates")
        time = 0.0 if value is None else _parse_time(value) or 0.0
        self._rows.add(
            position=hash_position(key, split.seed), time=time, stratum=code,
            fixed_split=self._source_splits[row.source],
        )  # fmt: skip
        return len(self._rows) - 1

    def check(self) -> None:
        """Raise DataError if no row has one of the fields. Call this method after all rows."""
        if self._unseen and self._fields.names:
            setting, name = self._unseen[0]
            raise DataError(f"params.yaml: prepare.split.{setting}: {self._fields.describe_missing(name)}")

    def stratum_codes(self) -> NDArray[np.int32]:
        """Return the index into `strata` of each row."""
        return self._rows.column("stratum")

    def positions(self) -> NDArray[np.float64]:
        """Return the position in [0, 1) of each row; rows with the same prompt (or group) have the same position."""
        return self._rows.column("position")

    def assign(self) -> NDArray[np.int8]:
        """Return the split of each row, as index into SPLITS.

        Teacher rows never change the split of other rows. If other rows with the same prompt are held out, a teacher
        row gets their split. Raises DataError if the time field holds dates in some rows and numbers in others.
        """
        if len(self._time_kinds) > 1:
            raise DataError(
                f"prepare.split.time: field {self.settings.time!r} holds dates in some rows and numbers in others "
                "(20240131 is a number); use one format for all rows"
            )
        splits: NDArray[np.int8] = self._rows.column("fixed_split")
        unassigned = splits == _UNASSIGNED
        if self.settings.stratify or self.settings.time:
            self._assign_exact_numbers(splits, unassigned)
        else:
            for rows, (positions,) in self._rows.blocks("position"):
                found = _split_positions(positions, self.fractions["test"], self.fractions["validation"])
                splits[rows] = np.where(unassigned[rows], found, splits[rows])
        self._teacher_rows.copy_prompt_splits(splits)
        return splits

    def _assign_exact_numbers(self, splits: NDArray[np.int8], unassigned: NDArray[np.bool_]) -> None:
        """In each stratum, assign the first prompts (newest, then lowest position) to test and the next to validation.

        The numbers are rounded. Each split with a fraction above 0 gets at least one prompt. In a stratum of fewer than
        `SMALLEST_STRATUM` prompts, all stay training rows. Sets the splits of the unassigned rows in place.
        """
        prompts = sort_unique(self._rows.column("position", unassigned))
        # A prompt in two strata counts for the stratum with the first name; its latest row decides its time.
        name_order = np.argsort(np.argsort(np.array(self.strata))).astype(np.int32)
        stratum = np.full(len(prompts), len(self.strata), dtype=np.int32)
        latest = np.full(len(prompts) if self.settings.time else 0, -math.inf)
        for rows, (positions, codes, times) in self._rows.blocks("position", "stratum", "time"):
            prompt = np.searchsorted(prompts, positions[unassigned[rows]])
            np.minimum.at(stratum, prompt, name_order[codes[unassigned[rows]]])
            if self.settings.time:
                np.maximum.at(latest, prompt, times[unassigned[rows]])
        split = np.full(len(prompts), TRAIN, dtype=np.int8)
        # The sort is stable, so prompts of a stratum with equal times stay in the order of their positions.
        order = np.lexsort((-latest, stratum)) if self.settings.time else np.argsort(stratum, kind="stable")
        fractions = self.fractions["test"], self.fractions["validation"]
        for members in np.split(order, np.cumsum(np.bincount(stratum))[:-1]):
            if len(members) >= SMALLEST_STRATUM:
                test, validation = (max(1, round(len(members) * part)) if part else 0 for part in fractions)
                # At least one prompt remains for each other split.
                validation = min(validation, len(members) - 1 - bool(test))
                test = min(test, len(members) - validation - 1)
                split[members[:test]] = TEST
                split[members[test : test + validation]] = VALIDATION
        for rows, (positions,) in self._rows.blocks("position"):
            where = np.flatnonzero(unassigned[rows])
            splits[rows.start + where] = split[np.searchsorted(prompts, positions[where])]


class _TeacherRows:
    """Teacher rows, which get the split of other rows with the same prompt."""

    def __init__(self, sources: Sequence[bool], folder: Path | None) -> None:
        self._sources = sources if any(sources) else ()
        self._row_count = 0
        # Index 0: rows of other sources. Index 1: teacher rows, once for each possible prompt.
        dtype = np.dtype([("prompt", "u8"), ("row", "i8")])
        self._tables = RowTable(folder, dtype), RowTable(folder, dtype)

    def close(self) -> None:
        for table in self._tables:
            table.close()

    def is_from_teacher(self, source: int) -> bool:
        """Return whether a source contains teacher answers."""
        return bool(self._sources) and self._sources[source]

    def add(self, row: SourceRow) -> None:
        if not self._sources:
            return
        from_teacher = self.is_from_teacher(row.source)
        prompts = [row.conversation.prompt]
        while from_teacher and len(prompts) <= _MAX_BLANK_LINES and "\n\n" in prompts[-1]:
            prompts.append(prompts[-1].partition("\n\n")[2])  # a system message may have been merged into the prompt
        for prompt in prompts:
            key = int(digests.hash_bytes(normalize_text(prompt).encode())[:16], 16)
            self._tables[from_teacher].add(prompt=key, row=self._row_count)
        self._row_count += 1

    def copy_prompt_splits(self, splits: NDArray[np.int8]) -> None:
        """Set the splits of teacher rows in place: the held-out split of their prompt, test before validation."""
        for code in (VALIDATION, TEST):
            found = [np.empty(0, dtype=np.uint64)]
            found += [keys[splits[rows] == code] for _, (keys, rows) in self._tables[0].blocks("prompt", "row")]
            prompts = sort_unique(np.concatenate(found))
            for _, (keys, rows) in self._tables[1].blocks("prompt", "row"):
                held_out = rows[find_sorted(prompts, keys)[1]]
                splits[held_out] = np.maximum(splits[held_out], code)


def _find_stratum_value(row: SourceRow, name: str) -> str:
    """Return the value of a row for one field of prepare.split.stratify."""
    if name == LENGTH:
        bits = len(row.conversation.text).bit_length()
        return f"{2 ** max(0, bits - 1)}-{2**bits - 1} characters"
    value = row.fields.get(name)
    return "teacher" if value is None else str(value)


def _parse_time(value: Any) -> float | None:
    """Return seconds since 1970 for a date (ISO 8601), or the number itself; None for any other value."""
    number = _finite_number(value)
    if number is not None or isinstance(value, bool):
        return number
    try:
        moment = value if isinstance(value, datetime) else datetime.fromisoformat(str(value).strip())
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _finite_number(value: Any) -> float | None:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def assign_split(prompt: str, split: SplitSettings) -> SplitName:
    """Return the split of a prompt for settings without groups, strata, times and sources with a split."""
    position = np.array([hash_position(normalize_text(prompt), split.seed)])
    return SPLITS[int(_split_positions(position, split.test, split.validation)[0])]


def _split_positions(positions: NDArray[np.float64], test: float, validation: float) -> NDArray[np.int8]:
    """Return the splits of positions in [0, 1): the lowest are test, the next validation."""
    splits = np.where(positions < test, TEST, np.where(positions < test + validation, VALIDATION, TRAIN))
    return splits.astype(np.int8)
