"""The accounts of a preparation: every row that came in is either kept, or dropped for one counted reason."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from ratchet.config.data import DropLimitSettings
from ratchet.errors import DataError
from ratchet.storage.records.data import DroppedRows

EXAMPLES = 5
"""Places that are named for each reason."""

LONGEST_DETAIL = 160
"""Characters of one example."""

SAMPLED_OUT = "sampled_out"
"""Reason of rows that a source's weight below 1 leaves out: wished for, so there is no limit to it."""

BALANCED_OUT = "balanced_out"
"""Reason of training rows that their category has too many of (prepare.balance): wished for, too."""

HELD_OUT = "taught_held_out"
"""Reason of rows by a teacher whose prompt is a validation or test prompt: what a model says is no truth there."""

TRUNCATED = "truncated"


class RowLedger:
    """Counts by reason, and the first few places of each."""

    def __init__(self) -> None:
        self.rows_in = 0
        self._counts: Counter[str] = Counter()
        self._examples: defaultdict[str, list[str]] = defaultdict(list)

    def drop(self, reason: str, where: str, detail: str = "") -> None:
        """Book a row that is left out."""
        self._counts[reason] += 1
        if len(self._examples[reason]) < EXAMPLES:
            text = f"{where}: {detail}" if detail else where
            self._examples[reason].append(text if len(text) <= LONGEST_DETAIL else text[: LONGEST_DETAIL - 3] + "...")

    @property
    def dropped(self) -> dict[str, DroppedRows]:
        """Every reason with its count and examples."""
        return {
            reason: DroppedRows(count=count, examples=tuple(self._examples[reason]))
            for reason, count in sorted(self._counts.items())
        }

    @property
    def rows_out(self) -> int:
        """Rows that are not dropped."""
        return self.rows_in - self._counts.total()

    def check(self, limits: DropLimitSettings, truncated: int) -> None:
        """Compare every reason's share of all rows with its limit.

        Raises:
            DataError: more was lost than the settings allow; with a table of what and where.
        """
        counts = {**self._counts, TRUNCATED: truncated}
        over = {
            reason: (counts[reason], limit)
            for reason, limit in limits.model_dump().items()
            if limit is not None and counts.get(reason, 0) > limit * self.rows_in
        }
        if over:
            raise DataError(self._over(over))

    def _over(self, over: Mapping[str, tuple[int, float]]) -> str:
        table = [("reason", "rows", "share", "limit")]
        for reason, (count, limit) in over.items():
            table.append((reason, f"{count:,}", f"{count / self.rows_in:.2%}", f"{limit:.2%}"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for row in table:
            lines.append("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
            lines += [f"      {place}" for place in self._examples.get(row[0], [])]
        alike = (
            "\n  (rows that share a long instruction look alike: raise prepare.duplicates.near, or set it to null)"
            if "near_duplicate" in over
            else ""
        )
        names = ", ".join(f"prepare.limits.{reason}" for reason in over)
        return (
            f"prepare: of {self.rows_in:,} rows more are lost than the limits allow; mend the rows, or raise {names}:\n"
            + "\n".join(lines)
            + alike
        )
