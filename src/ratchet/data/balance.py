"""As many training rows of each category: hard-balanced sampling (prepare.balance).

Of a category those rows are taken whose id, hashed with the seed, is least. So the choice depends neither on the order
of the rows nor on other categories, and a row that is added takes the place of at most one other.
"""

import difflib
from array import array
from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ratchet.config.data import BalanceSettings
from ratchet.data.conversation import SourceRow
from ratchet.data.passthrough_columns import NAMES_SHOWN, format_field_value
from ratchet.data.readers import type_name
from ratchet.data.schema_detection import find_text_flaw
from ratchet.errors import DataError
from ratchet.storage import digests
from ratchet.storage.records.data import BalanceReport

LABEL = "label"
"""Value of prepare.balance.by that means the response, where prepare.task is labels."""

MOST = 1000
"""Categories; a field with more values is no category."""

_NAMES_KNOWN = 1000
"""Of fields; records may have keys without end."""


class CategoryBalancer:
    """The category of each row.

    Args:
        settings: prepare.balance.
        labels: whether prepare.task is labels.
    """

    def __init__(self, settings: BalanceSettings, labels: bool) -> None:
        self._settings = settings
        self._by = settings.by
        self._of_label = labels and settings.by == LABEL
        self._codes = array("i")
        self._code_of: dict[str, int] = {}
        self._fields: dict[str, None] = {}
        self._found = False

    def fault(self, row: SourceRow) -> str | None:
        """What keeps a row from having a category, or None."""
        if self._by is None or self._of_label:
            return None
        if len(self._fields) < _NAMES_KNOWN:
            self._fields.update(dict.fromkeys(map(str, row.fields)))
        value = row.fields.get(self._by)
        self._found |= self._by in row.fields
        text = format_field_value(value)
        if text is None:
            return f"field {self._by!r} (prepare.balance.by) is {type_name(value)}, expected text, a number or truth"
        if not text:
            return f"no field {self._by!r} (prepare.balance.by)"
        problem = find_text_flaw(text)
        return f"field {self._by!r} (prepare.balance.by) {problem}" if problem else None

    def add(self, row: SourceRow) -> None:
        """Take the next row, which has no fault."""
        if self._by is None:
            return
        name = row.conversation.response if self._of_label else format_field_value(row.fields.get(self._by)) or ""
        self._codes.append(self._code_of.setdefault(name, len(self._code_of)))

    def _check(self) -> None:
        """Raise DataError for a field that no row has, or whose values are no categories."""
        if not self._of_label and not self._found and self._fields:
            near = difflib.get_close_matches(str(self._by), self._fields, n=3)
            shown = ", ".join(list(self._fields)[:NAMES_SHOWN]) + (" ..." if len(self._fields) > NAMES_SHOWN else "")
            meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            if self._by == LABEL:
                meant = f"{meant or ';'} the response is meant by {LABEL} where prepare.task is labels, and it is text"
            raise DataError(
                f"params.yaml: prepare.balance.by: no record has a field {self._by!r}{meant} (found: {shown})"
            )
        if len(self._code_of) > MOST:
            raise DataError(
                f"params.yaml: prepare.balance.by: {self._by!r} has {len(self._code_of):,} different values, and no "
                f"more than {MOST:,} are categories; name another field"
            )

    def copies(
        self, train: NDArray[np.bool_], ids: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int32], BalanceReport | None]:
        """How often each training row comes, and the accounts; ones and None where balance is off.

        Args:
            train: which of the rows that were taken are training rows.
            ids: of all of them.

        Raises:
            DataError: no row has the field, or its values are no categories; or a category has fewer rows than wanted,
                and prepare.balance.fewer is `refuse`.
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
        self._require(before, wanted)
        keys = np.array([_sampling_key(one, self._settings.seed) for one in ids[rows].tolist()], dtype=np.uint64)
        order = np.lexsort((keys, codes))
        ends = np.cumsum(counts)
        for _, code in names:
            members = rows[order[ends[code] - counts[code] : ends[code]]]
            times[members] = self._times(len(members), wanted)
        sums = np.bincount(codes, weights=times[rows], minlength=len(counts))
        after = {name: int(sums[code]) for name, code in names}
        return times, BalanceReport(by=self._by, rows=wanted, fewer=self._settings.fewer, before=before, after=after)

    def _times(self, count: int, wanted: int) -> NDArray[np.int32]:
        """How often each of a category's rows comes, in the order of their keys."""
        places = np.arange(count)
        if count >= wanted or self._settings.fewer == "repeat":
            return (wanted // count + (places < wanted % count)).astype(np.int32)
        return np.ones(count, dtype=np.int32)

    def _require(self, before: Mapping[str, int], wanted: int) -> None:
        if self._settings.fewer == "refuse" and (few := {n: c for n, c in before.items() if c < wanted}):
            shown = ", ".join(f"{name} ({count:,})" for name, count in list(few.items())[:NAMES_SHOWN])
            raise DataError(
                f"params.yaml: prepare.balance.rows: {wanted:,}, but {len(few):,} categories have fewer training rows: "
                f"{shown}; lower it, add rows, or set prepare.balance.fewer to take or repeat"
            )


def describe_balance(done: BalanceReport) -> Iterator[str]:
    """What a reader of the accounts should know: categories that are none, and a number that no category reaches."""
    single = sum(count == 1 for count in done.before.values())
    if 2 * single > len(done.before) > 1:
        yield (
            f"{single:,} of {len(done.before):,} categories of {done.by!r} (prepare.balance.by) have one training row "
            "only: a field with a value for almost each row is no category"
        )
    if done.before == done.after and any(count < done.rows for count in done.before.values()):
        yield (
            f"nothing is balanced: no category has more than {done.rows:,} training rows (prepare.balance.rows), the "
            f"largest has {max(done.before.values()):,}; set a smaller number or smallest, or prepare.balance.fewer "
            "to repeat"
        )


def _sampling_key(row_id: int, seed: int) -> int:
    return int(digests.hash_bytes(f"{seed}\0{row_id:016x}".encode())[:16], 16)
