"""Tests that columns of a journal equal its lines, for any lines and any block size."""

from pathlib import Path

import numpy as np
import pytest

import trained_runs
from ratchet.reports import run_history
from ratchet.reports.run_history import KINDS, JournalBlock
from ratchet.runs.journal import JournalReader
from trained_runs import Training

LINES = b"".join(event.line() for event in trained_runs.events(Training(steps=120, restarts=((47, 40), (90, 80)))))
DAMAGE = {
    "none": LINES,
    "a blank line": LINES.replace(b"\n", b"\n\n", 1),
    "a torn line": LINES[:5000] + b"\n" + LINES[5000:],
    "another writer's line glued to a torn one": LINES.replace(b'}\n{"attempt":1', b'{"attempt":1', 7),
    "bytes that are no text": LINES.replace(b'"step"', b"\xff\xfe\x00", 2),
    "a number that is none": LINES.replace(b'"loss":', b'"loss":"high","x":', 3),
    "a step without a loss": LINES.replace(b'"loss":', b'"lost":', 3),
    "a list in the place of an event": LINES + b"[1, 2]\n",
    "a deep object": LINES + b'{"attempt":1,"event":"note","t":1.0,"x":' + b'{"a":' * 300 + b"1" + b"}" * 300 + b"}\n",
    "half a line at the end": LINES + b'{"attempt":1,"event":"st',
    "nothing": b"",
}


def joined(path: Path, size_bytes: int) -> JournalBlock:
    """Join all blocks into one; events of other kinds get the number of steps before them in the whole file."""
    found = list(run_history.read_blocks(path, size_bytes))
    others, steps = [], 0
    for block in found:
        others += [(event, steps + count) for event, count in block.others]
        steps += len(block.columns["step"]["step"])
    whole = {
        kind: {name: np.concatenate([np.zeros(0), *(block.columns[kind][name] for block in found)]) for name in names}
        for kind, names in KINDS.items()
    }
    return JournalBlock(
        whole,
        others,
        sum(block.lines for block in found),
        sum(block.damaged for block in found),
        sum(block.single_lines for block in found),
    )


@pytest.mark.parametrize("size_bytes", [1 << 24, 4096, 300], ids=["one block", "many", "smaller than a line"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_columns_hold_what_the_reader_reads(tmp_path: Path, damage: str, size_bytes: int) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(DAMAGE[damage])
    reader, steps, others = JournalReader(path), [], []
    kept: dict[str, list[float]] = {kind: [] for kind in KINDS}
    broken = 0
    for event in reader.read():
        if event.kind not in KINDS:
            others.append((event, len(steps)))
            continue
        needed = [event.data.get(name) for name in ("step", "loss") if name in KINDS[event.kind]]
        if not all(isinstance(value, int | float) for value in needed):
            broken += 1
            continue
        kept[event.kind].append(event.data["step"])
        if event.kind == "step":
            steps.append(event.data)
    found = joined(path, size_bytes)
    for name in KINDS["step"]:
        assert found.columns["step"][name].tolist() == [data[name] for data in steps]
    assert {kind: found.columns[kind]["step"].tolist() for kind in KINDS} == kept
    assert found.others == others
    assert found.damaged == reader.damaged_lines + broken


def test_a_journal_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    assert list(run_history.read_blocks(tmp_path / "journal.jsonl")) == []


def test_nearly_all_lines_of_a_long_journal_are_read_together(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    training = Training(steps=3000, restarts=((2000, 1990),))
    path.write_bytes(b"".join(event.line() for event in trained_runs.events(training)))
    found = joined(path, 1 << 16)
    assert found.lines == len(path.read_bytes().splitlines())
    assert found.single_lines == found.lines - len(found.columns["step"]["step"])


def test_another_layout_from_another_program_is_noticed(tmp_path: Path) -> None:
    """The lines have the same number of keys, but one key differs; its value must not be read as the old key's."""
    path = tmp_path / "journal.jsonl"
    other = LINES.replace(b'"grad_norm":', b'"gradient":')
    path.write_bytes(LINES + other)
    found = joined(path, 1 << 24)
    count = len(found.columns["step"]["step"]) // 2
    assert np.isfinite(found.columns["step"]["grad_norm"]).tolist() == [True] * count + [False] * count
