"""Tests values of rows in temporary files: they are read back as they were added, and memory does not hold them."""

import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.data.row_table import RowTable, TextSpool, find_shared

DTYPE = np.dtype([("wide", "u8"), ("narrow", "i2"), ("flag", "?"), ("position", "f8")])
ROWS = 200_000
"""Some 4 MB of values: more than stay in memory."""


def test_values_are_read_back_and_are_not_in_memory(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    expected = np.zeros(ROWS, dtype=DTYPE)
    expected["wide"] = draw.integers(0, 2**64, ROWS, dtype=np.uint64)
    expected["narrow"], expected["flag"] = draw.integers(-9, 9, ROWS), draw.random(ROWS) < 0.3
    expected["position"] = draw.random(ROWS)
    tracemalloc.start()
    with closing(RowTable(tmp_path, DTYPE)) as table:
        for start in range(0, ROWS, 3000):
            block = expected[start : start + 3000]
            for row in block[:5]:  # single rows and blocks in turns
                table.add(**{name: row[name] for name in DTYPE.names})
            table.extend(block[5:])
        table.add(wide=2**64 - 1, narrow=-1, flag=True, position=0.5)
        assert tracemalloc.get_traced_memory()[1] < ROWS * DTYPE.itemsize / 2
        tracemalloc.stop()
        assert len(table) == ROWS + 1
        for name in DTYPE.names:
            assert np.array_equal(table.column(name)[:-1], expected[name])
        assert table.column("wide")[-1] == 2**64 - 1
        mask = np.append(expected["flag"], True)
        assert np.array_equal(table.column("narrow", mask)[:-1], expected["narrow"][expected["flag"]])
        seen = 0
        for rows, (positions, wide) in table.blocks("position", "wide"):
            assert rows.start == seen and len(positions) == len(wide) == rows.stop - rows.start
            seen = rows.stop
        assert seen == ROWS + 1
    assert not list(tmp_path.iterdir())


def test_texts_are_read_in_any_order_between_additions(tmp_path: Path) -> None:
    with closing(TextSpool(tmp_path)) as texts:
        texts.add(["", "ä", "two\nlines"])
        assert [texts[2], texts[0], texts[1]] == ["two\nlines", "", "ä"]
        texts.add(["more"])
        assert [texts[3], texts[1]] == ["more", "ä"]


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_shared_values_equal_those_of_a_naive_search(found: list[tuple[int, bool]]) -> None:
    values, mask = np.array([v for v, _ in found], np.uint64), np.array([m for _, m in found], np.bool_)
    wanted = [row for row, (value, is_in) in enumerate(found) if is_in and found.count((value, True)) > 1]
    rows, numbers = find_shared(values, mask)
    assert rows.tolist() == wanted
    ordered = sorted({found[row][0] for row in wanted})
    assert numbers.tolist() == [ordered.index(found[row][0]) for row in wanted]
