"""Passthrough fields (prepare.extra_fields): record fields that stay with their row and are never trained on.

They are not part of a row's identity: two records with the same conversation are duplicates whatever their fields are.
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
_MAX_KNOWN_NAMES = 1000
"""Limit of field names in memory; a file may have any number of different keys."""


class PassthroughFields:
    """Extracts the fields of rows and counts missing values."""

    def __init__(self, names: Sequence[str], group: str | None) -> None:
        """
        Args:
            names: prepare.extra_fields.
            group: prepare.split.group, which is stored separately.
        """
        self.missing = dict.fromkeys(names, 0)
        """Number of rows without a value, by field."""
        self._group = group
        self._rows = 0
        self._known_names: dict[str, None] = {}

    def find_problem(self, row: SourceRow) -> str | None:
        """Return the reason why a field of a row cannot be stored, or None."""
        for name in self.missing:
            value = row.fields.get(name)
            if format_field_value(value) is None:
                expected = "expected text, a number or true/false"
                return f"field {name!r} (prepare.extra_fields) is {type_name(value)}, {expected}"
            if isinstance(value, str) and (problem := find_text_flaw(value)):
                return f"field {name!r} (prepare.extra_fields) {problem}"
        return None

    def take(self, row: SourceRow) -> str:
        """Return the fields of a valid row as a JSON object of strings; a missing value is an empty string."""
        if not self.missing:
            return "{}"
        self._rows += 1
        if len(self._known_names) < _MAX_KNOWN_NAMES:
            self._known_names.update(dict.fromkeys(map(str, row.fields)))
        values = {name: format_field_value(row.fields.get(name)) or "" for name in self.missing}
        for name, value in values.items():
            self.missing[name] += not value
        return json.dumps(values, ensure_ascii=False, separators=(",", ":"))

    def group_of(self, row: SourceRow) -> str | None:
        """Return the value of the field prepare.split.group as the split assigner reads it."""
        return None if self._group is None else str(row.fields[self._group])

    def check(self) -> None:
        """Raise DataError if no row has one of the fields; call it after all rows."""
        names = self._known_names
        for name, missing in self.missing.items():
            if name in names or not self._rows or missing < self._rows:
                continue
            matches = difflib.get_close_matches(name, names, n=3)
            shown = ", ".join(list(names)[:NAMES_SHOWN]) + (" ..." if len(names) > NAMES_SHOWN else "")
            suggestion = f"; did you mean {' or '.join(map(repr, matches))}?" if matches else ""
            raise DataError(
                f"params.yaml: prepare.extra_fields: no record has a field {name!r}{suggestion} (found: {shown})"
            )

    def notes(self) -> list[str]:
        """Return notes about missing values for the dataset card."""
        return [
            f"field {name!r} (prepare.extra_fields) has no value in {missing:,} of {self._rows:,} rows"
            for name, missing in self.missing.items()
            if missing
        ]


def format_field_value(value: Any) -> str | None:
    """Format a value as text: numbers and booleans as in JSON, dates as in ISO 8601; None for a list or an object."""
    match value:
        case str():
            return value
        case float() if not math.isfinite(value):
            return ""  # tables use NaN for a missing value
        case bool() | int() | float():
            return json.dumps(value)
        case datetime():
            return value.isoformat()
        case date() | time() | Decimal():
            return str(value)  # ISO 8601 for dates and times
    return "" if value is None else None
