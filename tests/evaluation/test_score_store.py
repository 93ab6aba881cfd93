"""Tests that stored values are read back exactly, or not at all."""

import errno
import json
import math
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import StorageError
from ratchet.evaluation.scorer import ScoreStore
from ratchet.storage import files

VALUES: list[Any] = [
    0.1 + 0.2,
    5e-324,
    -0.0,
    1.7976931348623157e308,
    math.pi,
    [1, 2.0, None, True, "NaN", "Infinity"],
    {"answers": ["é", "\ud800 half a pair", 'quo"te\n', "\u2028"], "deep": {"n": [[0.1]]}},
    float("inf"),
    {"a": [float("-inf")]},
    [math.nan, "nan", "NaN"],
]


def never() -> Any:
    raise AssertionError("it is stored already")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kept" / "scores.jsonl"


def filled(path: Path, count: int = 3) -> ScoreStore:
    store = ScoreStore(path)
    for number in range(count):
        store.get_or_compute(f"key {number}", lambda number=number: {"value": number / 7})  # type: ignore[misc]
    return store


def test_values_come_back_to_the_last_bit_from_this_store_and_the_next(path: Path) -> None:
    store = ScoreStore(path)
    assert not path.exists()
    for number, value in enumerate(VALUES):
        assert repr(store.get_or_compute(str(number), lambda value=value: value)) == repr(value)  # type: ignore[misc]
    for again in (store, ScoreStore(path)):
        assert [repr(again.get_or_compute(str(number), never)) for number in range(len(VALUES))] == list(
            map(repr, VALUES)
        )
    assert all(json.loads(line)["key"] == str(number) for number, line in enumerate(path.read_text().splitlines()))


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
def test_the_first_value_is_as_json_gives_it_back(path: Path, kept: bool) -> None:
    found = ScoreStore(path if kept else None).get_or_compute("k", lambda: {"pair": (1, 2.5), 3: "x"})
    assert found == {"pair": [1, 2.5], "3": "x"}
    assert path.exists() == kept


def test_without_a_file_every_value_is_made_again() -> None:
    store, made = ScoreStore(None), iter(range(2))
    assert [store.get_or_compute("k", lambda: next(made)) for _ in range(2)] == [0, 1]


def exhausted() -> Any:
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda: {1, 2}, TypeError, "not JSON serializable"),
        (lambda: {"\0float": "nan"}, ValueError, "the reserved key"),
        (exhausted, MemoryError, "no room"),
    ],
    ids=["no JSON", "reserved key", "failure"],
)
def test_a_value_that_cannot_be_computed_or_written_is_not_stored(
    path: Path, make: Callable[[], Any], kind: type[Exception], says: str
) -> None:
    store = filled(path, 1)
    before = path.read_bytes()
    with pytest.raises(kind, match=says):
        store.get_or_compute("k", make)
    assert path.read_bytes() == before
    assert store.get_or_compute("k", lambda: 1) == 1


def test_a_line_that_was_cut_off_anywhere_costs_itself_alone(path: Path) -> None:
    filled(path)
    whole = path.read_bytes()
    begins = whole[:-1].rindex(b"\n") + 1
    for cut in range(begins, len(whole)):
        path.write_bytes(whole[:cut])
        store, made = ScoreStore(path), []
        assert store.get_or_compute("key 0", never) == {"value": 0.0}
        assert store.get_or_compute("key 1", never) == {"value": 1 / 7}
        again = store.get_or_compute("key 2", lambda: made.append(1) or {"value": 2 / 7})  # type: ignore[func-returns-value]  # noqa: B023
        assert again == {"value": 2 / 7}
        assert len(made) == (cut < len(whole) - 1)  # a line that lacks only its line feed is complete
        assert store.get_or_compute("key 3", lambda: 3) == 3
        last = ScoreStore(path)
        assert [last.get_or_compute(f"key {k}", never) for k in range(4)] == [{"value": k / 7} for k in range(3)] + [3]


@pytest.mark.parametrize("where", ["key", "value", "digest", "line feed", "not text", "zeros"])
def test_damage_costs_its_line_and_no_other(path: Path, where: str) -> None:
    filled(path)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = {
        "key": lines[1].replace(b"key 1", b"key 7"),
        "value": lines[1].replace(b"0.14", b"0.15"),
        "digest": lines[1].replace(b'{"sha256":"', b'{"sha256":"0', 1),
        "line feed": lines[1][:30] + b"\n" + lines[1][30:],
        "not text": b"\xff\xfe" + lines[1],
        "zeros": bytes(len(lines[1]) - 1) + b"\n",
    }[where]
    path.write_bytes(b"".join(lines))
    store = ScoreStore(path)
    assert store.get_or_compute("key 0", never) == {"value": 0.0}
    assert store.get_or_compute("key 2", never) == {"value": 2 / 7}
    assert store.get_or_compute("key 1", lambda: "again") == "again"
    assert ScoreStore(path).get_or_compute("key 1", never) == "again"


def test_damage_since_it_was_read_is_noticed(path: Path) -> None:
    store = filled(path, 1)
    path.write_bytes(path.read_bytes().replace(b"0.0", b"9.0"))
    assert store.get_or_compute("key 0", lambda: "again") == "again"
    path.unlink()
    assert store.get_or_compute("key 0", lambda: "once more") == "once more"
    assert ScoreStore(path).get_or_compute("key 0", never) == "once more"


def test_two_stores_of_one_file_damage_nothing(path: Path) -> None:
    one, other = filled(path), ScoreStore(path)
    for number in range(3, 9):
        (one, other)[number % 2].get_or_compute(f"key {number}", lambda: number)  # noqa: B023
    # A store does not see the values that another one wrote later.
    assert one.get_or_compute("key 3", lambda: "its own") == "its own"
    last = ScoreStore(path)
    assert [last.get_or_compute(f"key {number}", never) for number in range(3, 9)] == list(range(3, 9))


def test_a_full_disk_is_an_error_with_the_path_and_damages_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(path)
    before = path.read_bytes()
    for broken in ("write", "fsync"):

        def full(operation: str, where: Path, broken: str = broken) -> None:
            if operation == broken and where == path:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patched:
            patched.setattr(files, "before", full)
            with pytest.raises(OSError, match="No space left on device") as told:
                store.get_or_compute(broken, lambda: "x" * 50)
        assert (told.value.errno, told.value.filename) == (errno.ENOSPC, str(path))
        assert path.read_bytes()[: len(before)] == before
    assert store.get_or_compute("key 1", never) == {"value": 1 / 7}
    assert store.get_or_compute("write", lambda: "now") == "now"
    assert ScoreStore(path).get_or_compute("write", never) == "now"


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_the_disk_took_a_part_of_is_closed_and_written_again(path: Path) -> None:
    store = filled(path)
    size = path.stat().st_size
    with files_of_at_most(size + 20), pytest.raises(OSError, match="File too large"):
        store.get_or_compute("long", lambda: "x" * 500)
    assert path.stat().st_size == size + 20
    assert store.get_or_compute("long", lambda: "y" * 500) == "y" * 500
    assert store.get_or_compute("long", never) == "y" * 500
    last = ScoreStore(path)
    assert [last.get_or_compute(f"key {k}", never) for k in range(3)] == [{"value": k / 7} for k in range(3)]
    assert last.get_or_compute("long", never) == "y" * 500


def test_a_directory_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="found a directory, expected a file for scores; remove it"):
        ScoreStore(tmp_path)
