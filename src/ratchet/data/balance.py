"""Balances the training rows: the same number of rows for each category (prepare.balance).

Within a category the rows with the smallest hash of seed and id are taken. So the choice depends neither on the order
of the rows nor on other categories, and adding a row replaces at most one other row.
"""

import difflib
from array import array
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ratchet.config.prepare import BalanceSettings
from ratchet.data.conversation import SourceRow
from ratchet.data.passthrough_columns import NAMES_SHOWN, format_field_value
from ratchet.data.readers import type_name
from ratchet.data.schema_detection import find_text_flaw
from ratchet.errors import DataError
from ratchet.storage import digests
from ratchet.storage.records.data import BalanceReport

LABEL = "label"
"""Value of prepare.balance.by that selects the response if prepare.task is labels."""

MAX_CATEGORIES = 1000
"""A field with more different values is not treated as a category."""

_MAX_KNOWN_NAMES = 1000
"""Limit of field names in memory; a file may have any number of different keys."""


class CategoryBalancer:
    """Collects the category of each row, then computes how often each training row is used.

    Args:
        settings: prepare.balance.
        has_labels: whether prepare.task is labels.
    """

    def __init__(self, settings: BalanceSettings, has_labels: bool) -> None:
        self._settings = settings
        self._by = settings.by
        self._by_label = has_labels and settings.by == LABEL
        self._codes = array("i")
        self._code_of: dict[str, int] = {}
        self._known_names: dict[str, None] = {}
        self._field_seen = False

    def find_problem(self, row: SourceRow) -> str | None:
        """Return the reason why a row has no category, or None."""
        if self._by is None or self._by_label:
            return None
        if len(self._known_names) < _MAX_KNOWN_NAMES:
            self._known_names.update(dict.fromkeys(map(str, row.fields)))
        value = row.fields.get(self._by)
        self._field_seen |= self._by in row.fields
        text = format_field_value(value)
        if text is None:
            return f"field {self._by!r} (prepare.balance.by) is {type_name(value)}, expected text, number or true/false"
        if not text:
            return f"no field {self._by!r} (prepare.balance.by)"
        problem = find_text_flaw(text)
        return f"field {self._by!r} (prepare.balance.by) {problem}" if problem else None

    def add(self, row: SourceRow) -> None:
        """Add the next row, which must be valid (see `find_problem`)."""
        if self._by is None:
            return
        name = row.conversation.response if self._by_label else format_field_value(row.fields.get(self._by)) or ""
        self._codes.append(self._code_of.setdefault(name, len(self._code_of)))

    def _check(self) -> None:
        """Raise DataError if no row has the field, or if it has too many different values."""
        names = self._known_names
        if not self._by_label and not self._field_seen and names:
            matches = difflib.get_close_matches(str(self._by), names, n=3)
            shown = ", ".join(list(names)[:NAMES_SHOWN]) + (" ..." if len(names) > NAMES_SHOWN else "")
            suggestion = f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""
            if self._by == LABEL:
                suggestion = f"{suggestion or ';'} {LABEL} selects the response only if prepare.task is labels"
            raise DataError(
                f"params.yaml: prepare.balance.by: no record has a field {self._by!r}{suggestion} (found: {shown})"
            )
        if len(self._code_of) > MAX_CATEGORIES:
            raise DataError(
                f"params.yaml: prepare.balance.by: {self._by!r} has {len(self._code_of):,} different values; expected "
                f"at most {MAX_CATEGORIES:,} categories; name another field"
            )

    def count_copies(
        self, train: NDArray[np.bool_], ids: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int32], BalanceReport | None]:
        """Compute how often each row is used; ones and no report if balancing is off.

        Args:
            train: mask of the training rows among all accepted rows.
            ids: ids of all accepted rows.

        Raises:
            DataError: no row has the field, or it has too many values; or a category has too few rows and
                prepare.balance.on_shortage is `refuse`.
        """
        times = np.ones(len(train), dtype=np.int32)
        if self._by is None:
            return times, None
        self._check()
        rows = np.flatnonzero(train)
        if not len(rows):
            return times, None
        codes = np.array(self._codes, dtype=np.int64)[rows]
        counts = np.bincount(codes, minlength=len(self._code_of))
        names = sorted((name, code) for name, code in self._code_of.items() if counts[code])
        before = {name: int(counts[code]) for name, code in names}
        wanted = min(before.values()) if self._settings.rows == "smallest" else self._settings.rows
        self._require_rows(before, wanted)
        keys = np.array([_sampling_key(row_id, self._settings.seed) for row_id in ids[rows].tolist()], dtype=np.uint64)
        order = np.lexsort((keys, codes))
        ends = np.cumsum(counts)
        for _, code in names:
            members = rows[order[ends[code] - counts[code] : ends[code]]]
            times[members] = self._repetitions(len(members), wanted)
        sums = np.bincount(codes, weights=times[rows], minlength=len(counts))
        after = {name: int(sums[code]) for name, code in names}
        return times, BalanceReport(
            by=self._by, rows=wanted, on_shortage=self._settings.on_shortage, before=before, after=after
        )

    def _repetitions(self, count: int, wanted: int) -> NDArray[np.int32]:
        """Return how often each of a category's rows is used, in the order of their keys."""
        if count >= wanted or self._settings.on_shortage == "repeat":
            return (wanted // count + (np.arange(count) < wanted % count)).astype(np.int32)
        return np.ones(count, dtype=np.int32)

    def _require_rows(self, before: Mapping[str, int], wanted: int) -> None:
        if self._settings.on_shortage == "refuse" and (few := {n: c for n, c in before.items() if c < wanted}):
            shown = ", ".join(f"{name} ({count:,})" for name, count in list(few.items())[:NAMES_SHOWN])
            raise DataError(
                f"params.yaml: prepare.balance.rows: {wanted:,}, but {len(few):,} categories have fewer training rows: "
                f"{shown}; lower it, add rows, or set prepare.balance.on_shortage to take or repeat"
            )


def describe_balance(report: BalanceReport) -> Iterator[str]:
    """Yield notes for the dataset card: a field with mostly unique values, or a row number that no category reaches."""
    single = sum(count == 1 for count in report.before.values())
    if 2 * single > len(report.before) > 1:
        yield (
            f"{single:,} of {len(report.before):,} categories of {report.by!r} (prepare.balance.by) have only one "
            "training row: the field has mostly unique values, so it is probably not a category"
        )
    if report.before == report.after and any(count < report.rows for count in report.before.values()):
        yield (
            f"balancing has no effect: no category has more than {report.rows:,} training rows (prepare.balance.rows), "
            f"the largest has {max(report.before.values()):,}; set a smaller number or smallest, or set "
            "prepare.balance.on_shortage to repeat"
        )


def _sampling_key(row_id: int, seed: int) -> int:
    return int(digests.hash_bytes(f"{seed}\0{row_id:016x}".encode())[:16], 16)
