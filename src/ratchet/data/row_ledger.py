"""Counts every row of stage prepare: each row is either kept, or dropped for one reason."""

from collections import Counter, defaultdict
from collections.abc import Mapping

from ratchet.config.prepare import DropLimitSettings
from ratchet.errors import DataError
from ratchet.storage.records.data import DroppedRows

EXAMPLES = 5
"""Number of example positions for each reason."""

MAX_DETAIL_CHARACTERS = 160
"""Length limit of one example."""

SAMPLED_OUT = "sampled_out"
"""Reason for rows that a source weight below 1 removes. It is intended, so it has no limit."""

BALANCED_OUT = "balanced_out"
"""Reason for surplus training rows of a category (prepare.balance). It is intended too."""

HELD_OUT = "teacher_held_out"
"""Reason for teacher answers to a validation or test prompt: they are not ground truth, and training on them leaks."""

TRUNCATED = "truncated"


class RowLedger:
    """Counts dropped rows by reason, with the positions of the first few."""

    def __init__(self) -> None:
        self.rows_in = 0
        self._counts: Counter[str] = Counter()
        self._examples: defaultdict[str, list[str]] = defaultdict(list)

    def drop(self, reason: str, where: str, detail: str = "") -> None:
        """Record a dropped row.

        Args:
            reason: the reason to count it under.
            where: its position in the source.
            detail: more about it, for the examples.
        """
        self._counts[reason] += 1
        if len(self._examples[reason]) < EXAMPLES:
            text = f"{where}: {detail}" if detail else where
            too_long = len(text) > MAX_DETAIL_CHARACTERS
            self._examples[reason].append(text[: MAX_DETAIL_CHARACTERS - 3] + "..." if too_long else text)

    @property
    def dropped(self) -> dict[str, DroppedRows]:
        """Count and examples for every reason."""
        return {
            reason: DroppedRows(count=count, examples=tuple(self._examples[reason]))
            for reason, count in sorted(self._counts.items())
        }

    @property
    def rows_out(self) -> int:
        """Number of rows that were not dropped."""
        return self.rows_in - self._counts.total()

    def check(self, limits: DropLimitSettings, truncated: int) -> None:
        """Compare the share of each reason with its limit.

        Args:
            limits: prepare.limits.
            truncated: number of truncated rows, which have a limit although they are not dropped.

        Raises:
            DataError: more rows were lost than the limits allow; the message has a table with examples.
        """
        counts = {**self._counts, TRUNCATED: truncated}
        exceeded = {
            reason: (counts[reason], limit)
            for reason, limit in limits.model_dump().items()
            if limit is not None and counts.get(reason, 0) > limit * self.rows_in
        }
        if exceeded:
            raise DataError(self._describe_exceeded(exceeded))

    def _describe_exceeded(self, exceeded: Mapping[str, tuple[int, float]]) -> str:
        table = [("reason", "rows", "share", "limit")]
        for reason, (count, limit) in exceeded.items():
            table.append((reason, f"{count:,}", f"{count / self.rows_in:.2%}", f"{limit:.2%}"))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = []
        for row in table:
            lines.append("  " + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
            lines += [f"      {example}" for example in self._examples.get(row[0], [])]
        if "near_duplicate" in exceeded:
            lines.append(
                "  (rows that share a long instruction are similar: raise prepare.deduplication.jaccard_threshold, or "
                "set it to null)"
            )
        names = ", ".join(f"prepare.limits.{reason}" for reason in exceeded)
        return (
            f"prepare: more of the {self.rows_in:,} rows were lost than the limits allow; fix the rows, or raise "
            f"{names}:\n" + "\n".join(lines)
        )
