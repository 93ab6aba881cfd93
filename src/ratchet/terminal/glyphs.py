"""Pictures made of letters: curves, bars; in ASCII where the terminal's encoding has no better."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Glyphs:
    """The letters that pictures are made of."""

    levels: str
    """From the lowest to the highest."""
    full: str
    parts: str
    """Of a bar's last cell, from nearly empty to nearly full."""
    rest: str
    mark: str
    cut: str
    """Stands for what was cut off."""


UNICODE = Glyphs("▁▂▃▄▅▆▇█", "█", "▏▎▍▌▋▊▉", "·", "┃", "…")
ASCII = Glyphs("_.,-~=+*#", "#", "", ".", "|", "~")


def glyphs(encoding: str) -> Glyphs:
    """The best that this encoding can write."""
    try:
        "".join((UNICODE.levels, UNICODE.full, UNICODE.parts, UNICODE.rest, UNICODE.mark, UNICODE.cut)).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return UNICODE


def sparkline(
    points: Sequence[tuple[int, float]], span: tuple[int, int], scale: tuple[float, float], width: int, letters: Glyphs
) -> str:
    """A curve in one line: a letter for the mean of the points below it, none where there are none.

    Args:
        points: step and value, ascending.
        span: first and last step of the line.
        scale: values of the lowest and of the highest letter.
        width: letters.
        letters: to draw with.
    """
    first, last = span
    cells: list[list[float]] = [[] for _ in range(width)]
    for step, value in points:
        place = (step - first) * width // max(1, last - first + 1)
        if 0 <= place < width:
            cells[place].append(value)
    return "".join(_level(sum(cell) / len(cell), scale, letters) if cell else " " for cell in cells)


def _level(value: float, scale: tuple[float, float], letters: Glyphs) -> str:
    low, high = scale
    share = (value - low) / (high - low) if high > low else 0.0
    return letters.levels[min(len(letters.levels) - 1, max(0, int(share * len(letters.levels))))]


def scale_of(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest of what is drawn; the highest twentieth is cut off, so that one spike flattens no curve."""
    ordered = sorted(values)
    return ordered[0], ordered[max(0, math.ceil(0.95 * len(ordered)) - 1)]


def bar(share: float, width: int, letters: Glyphs, mark: float | None = None) -> str:
    """A part of a whole of 1, and perhaps a mark at another part. More than the whole fills it."""
    share = min(1.0, max(0.0, share))
    filled = int(share * width)
    cells = [letters.full] * filled + [letters.rest] * (width - filled)
    eighth = int((share * width - filled) * (len(letters.parts) + 1))
    if filled < width and eighth > 0:
        cells[filled] = letters.parts[eighth - 1]
    if mark is not None and 0.0 <= mark <= 1.0:
        cells[min(width - 1, int(mark * width))] = letters.mark
    return "".join(cells)
