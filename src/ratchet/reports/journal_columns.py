"""Reads a journal block by block: steps, validations and checkpoints as arrays, all other events as objects.

A journal may have millions of lines. Nearly all are steps written by one program with the same layout, so Arrow parses
them as a table, two blocks in parallel. Other lines, and blocks with unexpected content, are parsed line by line with
the same result.
"""

import json
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv

from ratchet.runs.journal import JournalEvent, parse_line

BLOCK_BYTES = 1 << 23
"""Bytes that each reader parses at a time. Peak memory is a small multiple of it."""
READERS = 2
"""Number of parser threads. Arrow releases the GIL."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "loss", "learning_rate", "grad_norm", "trained_tokens", "input_tokens", "step_s"),
    "validation": ("step", "loss", "seconds"),
    "checkpoint_saved": ("step", "seconds", "blocked_s"),
}
"""Event kinds that are read as columns. The first column and a loss must be finite; otherwise the event is damaged."""

Numbers = NDArray[np.float64]
Columns = Mapping[str, Numbers]

_MARKS = bytes.maketrans(b",{}", b":::")
"""Structural characters. Between them, a line of flat JSON is an alternation of keys and values, separated by
colons."""
_STEP, _OTHER = b'"event":"step"', re.compile(rb'"event":(?!"step")')
"""Where another event has as many keys as a step, one extra colon distinguishes them."""


@dataclass(frozen=True)
class JournalBlock:
    """A block of journal lines."""

    columns: Mapping[str, Columns]
    """Columns by event kind, in journal order. NaN marks a missing value."""
    others: Sequence[tuple[JournalEvent, int]]
    """All other events, each with the number of steps before it in the block."""
    lines: int
    damaged: int
    """Number of lines that are not valid events, or lack fields of their kind."""
    single_lines: int
    """Number of lines parsed one by one, which takes five times as long."""


def read_blocks(path: Path, size_bytes: int = BLOCK_BYTES) -> Iterator[JournalBlock]:
    """Yield the complete lines of a journal in blocks, in order. A missing journal yields none."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        return
    waiting: deque[Future[JournalBlock]] = deque()
    with stream, ThreadPoolExecutor(READERS) as readers:
        for text in _read_complete_lines(stream, size_bytes):
            waiting.append(readers.submit(_parse_block, text))
            if len(waiting) > READERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _read_complete_lines(stream: BinaryIO, size_bytes: int) -> Iterator[bytes]:
    """Yield complete lines. An unfinished last line is omitted."""
    rest = b""
    while data := stream.read(size_bytes):
        end = data.rfind(b"\n") + 1
        if end:
            yield rest + data[:end]
            rest = data[end:]
        else:
            rest += data


def _parse_block(text: bytes) -> JournalBlock:
    ends = np.flatnonzero(np.frombuffer(text, dtype=np.uint8) == ord("\n"))
    alike = _parse_uniform_steps(text, len(ends))
    if alike is None:
        return _build_block(_JournalLineParser().read(text.split(b"\n")[:-1]))
    steps, rows, keys = alike

    def line(row: int) -> bytes:
        return text[ends[row - 1] + 1 if row else 0 : ends[row] + 1]

    others = np.delete(np.arange(len(ends)), rows)
    before = np.searchsorted(rows, others).tolist()
    parser = _JournalLineParser()
    for row, count in zip(others.tolist(), before, strict=True):
        parser.add(line(row), count)
    # Lines have one layout as long as one program writes them. The next program begins with its own event.
    begins = {
        count
        for event, count in parser.others
        if event.kind in ("attempt_started", "worker_ready") and count < len(rows)
    }
    if parser.columns["step"]["step"] or any(_line_keys(line(int(rows[count]))) != keys for count in begins):
        return _build_block(_JournalLineParser().read(text.split(b"\n")[:-1]))
    return _build_block(parser, steps)


def _parse_uniform_steps(text: bytes, lines: int) -> tuple[Columns, NDArray[np.int64], Sequence[str]] | None:
    """Parse steps with the layout of the first one as CSV: columns, line numbers, and keys.

    Returns None if the first line has another layout, or the block has values that do not fit. Arrow reads CSV twice as
    fast as JSON: 0.7 s of CPU time for a million steps.
    """
    if not _is_text(text):  # Arrow reports deviating rows as text
        return None
    place = text.find(_STEP)
    first = text[text.rfind(b"\n", 0, place) + 1 : text.find(b"\n", place) + 1] if place >= 0 else b""
    keys = _line_keys(first)
    if keys is None or first.translate(_MARKS).count(b":") != 2 * len(keys) + 1:
        return None
    if not {"event", *KINDS["step"]} <= set(keys):
        return None
    columns = {name: f"{2 * keys.index(name) + 2}" for name in ("event", *KINDS["step"])}
    parsed = _parse_table(text, columns, len(keys)) or _parse_table(_OTHER.sub(b'"event"::', text), columns, len(keys))
    if parsed is None:
        return None
    table, odd = parsed
    rows = np.delete(np.arange(table.num_rows + len(odd)), odd)
    if len(rows) + len(odd) != lines:
        return None
    is_step = pc.fill_null(pc.equal(table[columns["event"]], b'"step"'), False).to_numpy()
    return (
        {name: table[columns[name]].to_numpy()[is_step] for name in KINDS["step"]},
        rows[is_step],
        keys,
    )


def _parse_table(text: bytes, columns: Mapping[str, str], keys: int) -> tuple[pa.Table, list[int]] | None:
    """Parse lines with a fixed number of keys as a table. Also return the numbers of the other lines.

    Returns None if a value is not a number.

    Args:
        text: Bytes of the block.
        columns: Column name of each required key.
        keys: Number of keys of a line.
    """
    odd: list[int] = []

    def skip(row: csv.InvalidRow) -> str:
        odd.append(row.number - 1)
        return "skip"

    names = [f"{number}" for number in range(2 * keys + 2)]
    types = {column: pa.binary() if name == "event" else pa.float64() for name, column in columns.items()}
    parsing = csv.ParseOptions(
        delimiter=":", quote_char=False, double_quote=False, invalid_row_handler=skip, ignore_empty_lines=False
    )
    try:
        table = csv.read_csv(
            pa.BufferReader(text.translate(_MARKS)),
            csv.ReadOptions(column_names=names, block_size=len(text), use_threads=False),
            parsing,
            csv.ConvertOptions(column_types=types, include_columns=list(types), check_utf8=False),
        )
    except pa.ArrowException:
        return None
    return table, odd


def _is_text(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _line_keys(line: bytes) -> Sequence[str] | None:
    """Return the keys of a line that is a flat object, in order."""
    try:
        document = json.loads(line)
    except ValueError:
        return None
    return tuple(document) if isinstance(document, dict) else None


class _JournalLineParser:
    """Parses lines one by one."""

    def __init__(self) -> None:
        self.columns: dict[str, dict[str, list[float]]] = {
            kind: {name: [] for name in names} for kind, names in KINDS.items()
        }
        self.others: list[tuple[JournalEvent, int]] = []
        self.lines = self.damaged = 0

    def read(self, lines: Sequence[bytes]) -> "_JournalLineParser":
        """Parse all lines of a block."""
        for line in lines:
            self.add(line + b"\n", len(self.columns["step"]["step"]))
        return self

    def add(self, line: bytes, steps_before: int) -> None:
        """Parse one line."""
        self.lines += 1
        event, is_damaged = parse_line(line)
        self.damaged += is_damaged
        if event is None:
            return
        if event.kind not in self.columns:
            self.others.append((event, steps_before))
            return
        for name, values in self.columns[event.kind].items():
            values.append(_parse_number(event.data.get(name)))


def _parse_number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _build_block(parser: _JournalLineParser, steps: Columns | None = None) -> JournalBlock:
    """Build the block, without events that lack required fields."""
    columns: dict[str, Columns] = {
        kind: {name: np.asarray(values, dtype=np.float64) for name, values in by_name.items()}
        for kind, by_name in parser.columns.items()
    }
    if steps is not None:
        columns["step"] = steps
    others, lines, damaged = parser.others, parser.lines, parser.damaged
    lines += len(steps["step"]) if steps is not None else 0
    columns_by_kind: dict[str, Columns] = {}
    for kind, by_name in columns.items():
        sound = np.isfinite(by_name["step"]) & (by_name["step"] >= 0)
        if "loss" in by_name:
            sound &= np.isfinite(by_name["loss"])
        damaged += int((~sound).sum())
        if kind == "step" and not sound.all():
            kept = np.cumsum(sound)
            others = [(event, int(kept[count - 1]) if count else 0) for event, count in others]
        columns_by_kind[kind] = {name: values[sound] for name, values in by_name.items()}
    return JournalBlock(columns_by_kind, others, lines, damaged, parser.lines)
