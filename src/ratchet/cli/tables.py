"""Text tables."""

from collections.abc import Sequence


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line for each row, with left-aligned columns; the first row holds the headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return [line.rstrip() for line in lines]


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """The aligned rows as text, indented by two spaces."""
    return "\n".join(f"  {line}".rstrip() for line in align_rows(rows))
