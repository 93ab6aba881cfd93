"""Fields of the records that stay with their row (prepare.keep): nobody learns from them, results are given by them.

They are no part of a row's identity: two records that say the same are one row, whatever else they hold.
"""

import difflib
import json
import math
from collections.abc import Sequence
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from ratchet.data.conversation import SourceRow
from ratchet.data.readers import type_name
from ratchet.data.schema_detection import find_text_flaw
from ratchet.errors import DataError

NAMES_SHOWN = 20
_NAMES_KNOWN = 1000
"""Of fields; records may have keys without end."""


class PassthroughFields:
    """Takes the fields out of rows, and counts where they are missing."""

    def __init__(self, names: Sequence[str], group: str | None) -> None:
        """
        Args:
            names: prepare.keep.
            group: prepare.split.group, which is kept apart from the others.
        """
        self.missing = dict.fromkeys(names, 0)
        """Rows without a value, by field."""
        self._group = group
        self._rows = 0
        self._found: dict[str, None] = {}

    def fault(self, row: SourceRow) -> str | None:
        """What keeps a field of a row from being kept, or None."""
        for name in self.missing:
            value = row.fields.get(name)
            if format_field_value(value) is None:
                return f"field {name!r} (prepare.keep) is {type_name(value)}, expected text, a number or true/false"
            if isinstance(value, str) and (problem := find_text_flaw(value)):
                return f"field {name!r} (prepare.keep) {problem}"
        return None

    def of(self, row: SourceRow) -> str:
        """The fields of a row that has no fault, as JSON: an object of strings; what is missing is empty."""
        if not self.missing:
            return "{}"
        self._rows += 1
        if len(self._found) < _NAMES_KNOWN:
            self._found.update(dict.fromkeys(map(str, row.fields)))
        values = {name: format_field_value(row.fields.get(name)) or "" for name in self.missing}
        for name, value in values.items():
            self.missing[name] += not value
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))

    def group_of(self, row: SourceRow) -> str | None:
        """Value of the field that is divided by, as the divider reads it."""
        return None if self._group is None else str(row.fields[self._group])

    def check(self) -> None:
        """After all rows: raises DataError for a field that none of them has, with the names nearest to it."""
        for name, missing in self.missing.items():
            if name in self._found or not self._rows or missing < self._rows:
                continue
            near = difflib.get_close_matches(name, self._found, n=3)
            shown = ", ".join(list(self._found)[:NAMES_SHOWN]) + (" ..." if len(self._found) > NAMES_SHOWN else "")
            meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise DataError(f"params.yaml: prepare.keep: no record has a field {name!r}{meant} (found: {shown})")

    def notes(self) -> list[str]:
        """What a reader of the card should know."""
        return [
            f"field {name!r} (prepare.keep) has no value in {missing:,} of {self._rows:,} rows"
            for name, missing in self.missing.items()
            if missing
        ]


def format_field_value(value: Any) -> str | None:
    """A value as text: as it is, numbers and truth as in JSON, dates as in ISO 8601; None for one that has parts."""
    match value:
        case str():
            return value
        case float() if not math.isfinite(value):
            return ""  # how tables say that there is none
        case bool() | int() | float():
            return json.dumps(value)
        case datetime():
            return value.isoformat()
        case date() | time() | Decimal():
            return str(value)  # of dates and times, ISO 8601
    return "" if value is None else None
