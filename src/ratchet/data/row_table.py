"""Values and texts of rows in temporary files, so that memory hardly grows with the number of rows."""

import io
import struct
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

BLOCK_ROWS = 2048
"""Number of rows that are written at once, and are read at once by `RowTable.blocks`."""
_IN_MEMORY_BYTES = 2**20
"""Size of a file up to which it stays in memory, because most data sets are small."""


class RowTable:
    """Numbers by row in a temporary file, column by column within blocks of rows.

    A column is in memory only while it is used. The folder is for the file; None is the system's temporary folder.
    """

    def __init__(self, folder: Path | None, dtype: np.dtype[Any]) -> None:
        self._folder = folder
        self._file: IO[bytes] = io.BytesIO()
        self.dtype, self.names = dtype, dtype.names or ()
        self._pending: list[tuple[Any, ...]] = []
        self._ends = array("q", [0])
        """Number of rows up to the end of each block in the file."""

    def __len__(self) -> int:
        return self._ends[-1] + len(self._pending)

    def add(self, **values: Any) -> None:
        """Append a row, given by the values of all columns."""
        self._pending.append(tuple(map(values.__getitem__, self.names)))
        if len(self._pending) == BLOCK_ROWS:
            self._write_pending()

    def extend(self, rows: NDArray[Any]) -> None:
        """Append rows, [rows] of the table's type."""
        self._write_pending()
        end = self._file.seek(0, 2)
        if isinstance(self._file, io.BytesIO) and end > _IN_MEMORY_BYTES:
            content = self._file.getbuffer()
            self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (closed by `close`)
            self._file.write(content)
        for name in self.names:
            self._file.write(rows[name].tobytes())
        self._ends.append(self._ends[-1] + len(rows))

    def _write_pending(self) -> None:
        if self._pending:
            rows, self._pending = np.array(self._pending, dtype=self.dtype), []
            self.extend(rows)

    def blocks(self, *names: str) -> Iterator[tuple[slice, list[NDArray[Any]]]]:
        """Yield the values of some columns for some consecutive rows at a time, in order."""
        self._write_pending()
        columns = [(self.dtype[name], self.dtype.fields[name][1]) for name in names]  # type: ignore[index]
        for start, end in pairwise(self._ends):
            values = []
            for dtype, offset in columns:  # the columns before this one have `offset` bytes for each row
                self._file.seek(start * self.dtype.itemsize + (end - start) * offset)
                values.append(np.frombuffer(self._file.read((end - start) * dtype.itemsize), dtype=dtype))
            yield slice(start, end), values

    def column(self, name: str, mask: NDArray[np.bool_] | None = None) -> NDArray[Any]:
        """Return the values of a column, of all rows or of those in the mask."""
        values = np.empty(len(self) if mask is None else np.count_nonzero(mask), dtype=self.dtype[name])
        filled = 0
        for rows, (block,) in self.blocks(name):
            part = block if mask is None else block[mask[rows]]
            values[filled : filled + len(part)] = part
            filled += len(part)
        return values

    def close(self) -> None:
        """Delete the temporary file."""
        self._file.close()


class TextSpool:
    """Texts by row in temporary files. Only the few texts that are compared or shown are read back."""

    def __init__(self, folder: Path) -> None:
        self._texts = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by `close`)
        self._ends = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by `close`)
        self._end = 0
        self._ends.write(_END.pack(0))
        self._pending: list[bytes] = []

    def add(self, texts: Iterable[str]) -> None:
        """Append the texts of the next rows."""
        self._pending += map(str.encode, texts)
        if len(self._pending) >= BLOCK_ROWS:
            self._write_pending()

    def _write_pending(self) -> None:
        if not self._pending:
            return
        self._texts.write(b"".join(self._pending))
        ends = [*accumulate(map(len, self._pending), initial=self._end)]
        self._ends.write(struct.pack(f"<{len(self._pending)}q", *ends[1:]))
        self._end, self._pending = ends[-1], []

    def close(self) -> None:
        """Delete the temporary files."""
        self._texts.close()
        self._ends.close()

    def __getitem__(self, row: int) -> str:
        self._write_pending()
        self._ends.seek(row * _END.size)
        (start,), (end,) = _END.iter_unpack(self._ends.read(2 * _END.size))
        self._ends.seek(0, 2)
        self._texts.seek(start)
        text = self._texts.read(end - start).decode()
        self._texts.seek(0, 2)
        return text


_END = struct.Struct("<q")


# ----- Large arrays in little memory


def sort_unique(values: NDArray[Any]) -> NDArray[Any]:
    """Sort an array in place; return its distinct values, ascending."""
    values.sort()
    return values[np.concatenate([[True], values[1:] != values[:-1]])] if len(values) else values


def find_sorted(ordered: NDArray[Any], values: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the position of each value in a sorted array, and whether it is there."""
    if not len(ordered):
        return np.zeros(len(values), dtype=np.int64), np.zeros(len(values), dtype=np.bool_)
    positions = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return positions, ordered[positions] == values


def find_shared(values: NDArray[Any], mask: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Find the rows in a mask whose value another row in the mask has.

    Returns these rows, ascending, and the number of their value, by which equal values have equal numbers. Besides the
    values this needs 9 bytes for each row in the mask, and 12 for each row found.
    """
    ordered = values[mask]
    ordered.sort()
    shared = sort_unique(ordered[1:][ordered[1:] == ordered[:-1]])
    del ordered
    found = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32))]
    for start in range(0, len(values) if len(shared) else 0, BLOCK_ROWS):
        numbers, is_shared = find_sorted(shared, values[start : start + BLOCK_ROWS])
        is_shared &= mask[start : start + BLOCK_ROWS]
        found.append((start + np.flatnonzero(is_shared), numbers[is_shared].astype(np.int32)))
    rows, codes = zip(*found, strict=True)
    return np.concatenate(rows), np.concatenate(codes)
