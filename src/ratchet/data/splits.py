"""Which split a row belongs to.

By default this is a function of the row's own prompt (or its group) and the seed alone: adding or removing rows never
moves another row. Stratified and by time it is a rank among the other rows, so that the fractions hold exactly or the
newest rows come last; rows at a border may then move when rows are added. Rows with the same prompt stay together, so
that a test row cannot also be a training row; with groups it is the groups that stay together.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ratchet.config.data import Prepare, SplitSettings
from ratchet.data.conversation import SourceRow
from ratchet.errors import DataError
from ratchet.storage import digests

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
TRAIN, VALIDATION, TEST = range(3)
_FREE = -1

_BLANK_LINES = 32
"""After so many of them the original prompt is looked for behind a system message."""

LENGTH = "length"
"""Value of prepare.split.stratify that means the length of the conversation's text, in powers of two of characters."""

SMALLEST_STRATUM = 3
"""Prompts of a stratum below which it cannot be in all three splits; it is all learned from, and noted."""


def normalize_text(text: str) -> str:
    """Text without the differences that make no other request: case and white space."""
    return " ".join(text.casefold().split())


def hash_position(key: str, seed: int) -> float:
    """Where a key falls in [0, 1): its seeded SHA-256 read as a number."""
    return int(digests.hash_bytes(f"{seed}\0{key}".encode())[:16], 16) / 16.0**16


def split_fractions(settings: Prepare) -> dict[SplitName, float]:
    """Share of each split among the rows that no source assigns; a split with a source of its own takes none."""
    own = {source.split for source in settings.sources}
    split = settings.split
    test = 0.0 if "test" in own else split.test
    validation = 0.0 if "validation" in own else split.validation
    return {"train": 1 - test - validation, "validation": validation, "test": test}


class SplitAssigner:
    """Splits of many rows: first each is shown (`add`), then `assign` answers for all. A few dozen bytes a row."""

    def __init__(self, settings: Prepare, taught: Sequence[bool] = ()) -> None:
        """
        Args:
            settings: of stage prepare.
            taught: of each source, whether it is answers of a teacher; none is when this is empty.
        """
        self.settings = settings.split
        self.fractions = split_fractions(settings)
        self._taught = _TeacherRows(taught)
        self.strata: list[str] = []
        """Names of the strata, by code; in order of first appearance."""
        self._own = [SPLITS.index(source.split) if source.split else _FREE for source in settings.sources]
        if self.settings.stratify or self.settings.time:  # a rank among the rows: theirs alone
            self._own = [TRAIN if self._taught.is_taught(n) else own for n, own in enumerate(self._own)]
        self._positions, self._times = array("d"), array("d")
        self._forced, self._codes = array("b"), array("l")
        self._code_of: dict[str, int] = {}
        self._kinds: set[str] = set()

    def __len__(self) -> int:
        return len(self._positions)

    def fault(self, row: SourceRow) -> str | None:
        """What keeps a row from being divided (a missing or unusable field), or None."""
        for knob in ("group", "stratify", "time"):
            name = getattr(self.settings, knob)
            if name is None or (knob == "stratify" and name == LENGTH):
                continue
            if knob != "group" and self._taught.is_taught(row.source):
                continue
            if row.fields.get(name) is None:
                return f"no field {name!r} (prepare.split.{knob})"
            if isinstance(row.fields[name], (list, Mapping)):
                return f"field {name!r} (prepare.split.{knob}) holds a {type(row.fields[name]).__name__}"
            if knob == "time" and _parse_time(row.fields[name]) is None:
                return f"field {name!r} (prepare.split.time) is no date and no number: {str(row.fields[name])[:40]!r}"
        return None

    def add(self, row: SourceRow) -> int:
        """Take a row that has no fault; returns its index into what `assign` returns."""
        split, key = self.settings, normalize_text(row.conversation.prompt)
        if split.group is not None:
            key = f"group\0{row.fields[split.group]}"
        self._positions.append(hash_position(key, split.seed))
        self._forced.append(self._own[row.source])
        self._taught.add(row)
        stratum = ""
        if split.stratify == LENGTH:
            bits = len(row.conversation.text).bit_length()
            stratum = f"{2 ** max(0, bits - 1)}-{2**bits - 1} characters"
        elif split.stratify is not None:
            value = row.fields.get(split.stratify)
            stratum = "taught" if value is None else str(value)
        code = self._code_of.setdefault(stratum, len(self._code_of))
        if code == len(self.strata):
            self.strata.append(stratum)
        self._codes.append(code)
        if split.time:
            value = row.fields.get(split.time)
            self._times.append(_parse_time(value) or 0.0)
            if not self._taught.is_taught(row.source):
                self._kinds.add("numbers" if _finite_number(value) is not None else "dates")
        return len(self._positions) - 1

    def is_taught(self, source: int) -> bool:
        """Whether the rows of a source are answers of a teacher."""
        return self._taught.is_taught(source)

    def stratum_codes(self) -> NDArray[np.int64]:
        """Index into `strata` of each row."""
        return np.array(self._codes, dtype=np.int64)

    def positions(self) -> NDArray[np.float64]:
        """Where each row's prompt (or group) falls in [0, 1): rows that belong together have the same."""
        return np.array(self._positions)

    def assign(self) -> NDArray[np.int8]:
        """Split of each row, as index into SPLITS.

        Rows by a teacher change that of no other row. Where other rows of the same prompt are no training rows, theirs
        is that split, too.

        Raises:
            DataError: the time of some rows is a date, of others a number.
        """
        if len(self._kinds) > 1:
            raise DataError(
                f"prepare.split.time: field {self.settings.time!r} holds dates in some rows and numbers in others "
                "(20240131 is a number); write them all in one way"
            )
        positions, forced = np.array(self._positions), np.array(self._forced, dtype=np.int8)
        free = forced == _FREE
        found = forced.copy()
        if self.settings.stratify:
            found[free] = self._stratified(positions[free], self.stratum_codes()[free])
        elif self.settings.time:
            found[free] = self._by_time(positions[free], np.array(self._times)[free])
        else:
            found[free] = _split_positions(positions[free], self.fractions["test"], self.fractions["validation"])
        self._taught.follow(found)
        return found

    def _stratified(self, positions: NDArray[Any], codes: NDArray[Any]) -> NDArray[np.int8]:
        """The lowest positions of each stratum are test, the next validation: as by hash, but exact in number."""
        prompts, row_to_prompt = np.unique(positions, return_inverse=True)
        names = np.argsort(np.argsort(np.array(self.strata)))  # of a prompt in two strata, the first by name counts
        stratum = np.full(len(prompts), len(self.strata))
        np.minimum.at(stratum, row_to_prompt, names[codes])
        split = np.full(len(prompts), TRAIN, dtype=np.int8)
        by_stratum = np.argsort(stratum, kind="stable")  # prompts are in the order of their positions
        borders = np.flatnonzero(np.diff(stratum[by_stratum])) + 1
        for members in np.split(by_stratum, borders):
            self._cut(split, members)
        return split[row_to_prompt]

    def _by_time(self, positions: NDArray[Any], times: NDArray[Any]) -> NDArray[np.int8]:
        """The newest prompts are test, those before validation; of a repeated prompt the latest counts."""
        prompts, row_to_prompt = np.unique(positions, return_inverse=True)
        latest = np.full(len(prompts), -math.inf)
        np.maximum.at(latest, row_to_prompt, times)
        split = np.full(len(prompts), TRAIN, dtype=np.int8)
        self._cut(split, np.lexsort((prompts, -latest)))
        return split[row_to_prompt]

    def _cut(self, split: NDArray[np.int8], members: NDArray[Any]) -> None:
        """Give the first members to test, the next to validation: rounded, but one at least where three or more are."""
        wanted = [self.fractions["test"], self.fractions["validation"]]
        if len(members) < SMALLEST_STRATUM:
            return
        test, validation = (max(1, round(len(members) * share)) if share else 0 for share in wanted)
        test = min(test, len(members) - validation - 1)  # one is left to learn from
        split[members[:test]] = TEST
        split[members[test : test + validation]] = VALIDATION


class _TeacherRows:
    """Which rows are answers of a teacher, and what the other rows of their prompts are for."""

    def __init__(self, sources: Sequence[bool]) -> None:
        self._sources = sources if any(sources) else ()
        self._rows = 0
        self._places = array("q"), array("q")
        self._keys = array("Q"), array("Q")
        """Of other rows' prompts, and of what prompts of taught rows may be among them."""

    def is_taught(self, source: int) -> bool:
        """Whether the rows of a source are answers of a teacher."""
        return bool(self._sources) and self._sources[source]

    def add(self, row: SourceRow) -> None:
        """Take the next row."""
        if not self._sources:
            return
        taught, prompt = self.is_taught(row.source), row.conversation.prompt
        prompts = [prompt]
        while taught and len(prompts) <= _BLANK_LINES and "\n\n" in prompts[-1]:
            prompts.append(prompts[-1].partition("\n\n")[2])  # a system message may have been merged into the prompt
        for one in prompts:
            self._places[taught].append(self._rows)
            self._keys[taught].append(int(digests.hash_bytes(normalize_text(one).encode())[:16], 16))
        self._rows += 1

    def follow(self, found: NDArray[np.int8]) -> None:
        """Give taught rows the split of the other rows of their prompt: of several the one that is judged by most."""
        if not self._sources:
            return
        places, taught = (np.array(one, dtype=np.int64) for one in self._places)
        keys, own = (np.array(one, dtype=np.uint64) for one in self._keys)
        held = found[places] != TRAIN
        known, first = np.unique(keys[held], return_inverse=True)
        codes = np.zeros(len(known) + 1, dtype=np.int8)  # the last one: of prompts that no other row has
        np.maximum.at(codes, first, found[places[held]])
        at = np.searchsorted(known, own)
        same = np.append(known, np.uint64(0))[at] == own
        np.maximum.at(found, taught, np.where(same & (at < len(known)), codes[at], TRAIN).astype(np.int8))


def _parse_time(value: Any) -> float | None:
    """Seconds since 1970, or the number itself; None for what is neither a date (ISO 8601) nor a number."""
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
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def assign_split(prompt: str, split: SplitSettings) -> SplitName:
    """The split of a row with this prompt where nothing but its content counts."""
    where = np.array([hash_position(normalize_text(prompt), split.seed)])
    return SPLITS[int(_split_positions(where, split.test, split.validation)[0])]


def _split_positions(positions: NDArray[np.float64], test: float, validation: float) -> NDArray[np.int8]:
    """The splits of positions in [0, 1): the lowest are test, the next validation."""
    drawn = np.where(positions < test, TEST, np.where(positions < test + validation, VALIDATION, TRAIN))
    return drawn.astype(np.int8)
