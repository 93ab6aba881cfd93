"""Tests ledger and shards: after any crash every answer is present once and in order."""

import errno
import os
import random
from pathlib import Path

import pytest

from ratchet.data.conversation import replace_surrogates
from ratchet.errors import DamagedFileError
from ratchet.inference.output import AnswerLedger
from ratchet.inference.spec import ANSWERS, GenerationAnswer, GenerationPaths
from ratchet.storage import files

TOTAL = 25


def answer(place: int, said: str = "") -> GenerationAnswer:
    return GenerationAnswer(place, said or f'said {place}\u2028 key="token"', "stop", 3, 4, -0.5)


@pytest.fixture
def paths(tmp_path: Path) -> GenerationPaths:
    return GenerationPaths(tmp_path)


def opened(
    paths: GenerationPaths, told: list[str] | None = None, attempt: int = 1, add: range = range(0)
) -> AnswerLedger:
    ledger = AnswerLedger(paths, attempt, TOTAL, (told if told is not None else []).append)
    for place in add:
        ledger.add(answer(place))
    return ledger


def test_answers_in_any_order_come_back_in_order_after_kills(paths: GenerationPaths) -> None:
    order = list(range(TOTAL))
    draw = random.Random(2)
    draw.shuffle(order)
    ledger = opened(paths)
    for number, place in enumerate(order):
        ledger.add(answer(place))
        if draw.random() < 0.3:
            ledger.seal(7)
        if draw.random() < 0.3:  # as after a kill, the ledger is not closed
            ledger = opened(paths, attempt=number + 2)
            assert ledger.count == number + 1
            assert all(ledger.has(one) for one in order[: number + 1])
            assert not any(ledger.has(one) for one in order[number + 1 :])
    ledger.seal(7)
    assert list(ledger.read_all()) == [answer(place) for place in range(TOTAL)]
    ledger.remove()
    assert list(paths.shards.iterdir()) == []
    assert not paths.ledger.exists()


def test_the_first_of_two_answers_counts(paths: GenerationPaths) -> None:
    ledger = opened(paths)
    ledger.add(answer(0, "first"))
    ledger.add(answer(0, "second"))
    paths.ledger.write_bytes(paths.ledger.read_bytes() * 2)
    assert opened(paths).count == 1
    assert paths.ledger.read_bytes().count(b"\n") == 1


def test_answers_that_look_like_secrets_are_kept_as_they_are(paths: GenerationPaths) -> None:
    texts = ["postgres://admin:hunter2@db.example/x", "export API_KEY=abcdef0123456789", "password: swordfish"]
    ledger = opened(paths)
    for place, text in enumerate(texts):
        ledger.add(answer(place, text))
    ledger.close()
    opened(paths, attempt=2).close()  # writes the ledger again
    ledger = opened(paths, attempt=3, add=range(len(texts), TOTAL))
    ledger.seal(TOTAL)
    assert [found.text for found in ledger.read_all()][: len(texts)] == texts


def test_a_damaged_line_is_reported_and_its_answer_is_missing(paths: GenerationPaths) -> None:
    opened(paths, add=range(3)).close()
    whole = paths.ledger.read_bytes()
    paths.ledger.write_bytes(whole[:-20] + b"\n")
    told: list[str] = []
    ledger = opened(paths, told)
    assert [ledger.has(place) for place in range(4)] == [True, True, False, False]
    assert "1 damaged line(s)" in told[0]


def test_shards_are_sealed_in_order_and_their_lines_dropped_at_the_next_start(paths: GenerationPaths) -> None:
    ledger = opened(paths, add=range(1, 12))
    assert ledger.seal(10) == 0
    ledger.add(answer(0))
    assert ledger.seal(10) == 10
    assert [p.name for p in paths.shards.iterdir()] == ["shard-000000000"]
    assert paths.ledger.read_bytes().count(b"\n") == 12
    ledger = opened(paths)
    assert paths.ledger.read_bytes().count(b"\n") == 2
    assert ledger.count == 12


def test_shards_of_another_size_continue_where_the_first_ended(paths: GenerationPaths) -> None:
    opened(paths, add=range(13)).seal(5)
    opened(paths, add=range(13, TOTAL)).close()
    ledger = opened(paths)
    assert ledger.seal(9) == TOTAL - 10
    assert [one.index for one in ledger.read_all()] == list(range(TOTAL))


@pytest.mark.parametrize("harm", ["a byte", "the manifest"])
def test_a_damaged_shard_is_answered_again(harm: str, paths: GenerationPaths) -> None:
    opened(paths, add=range(TOTAL)).seal(10)
    opened(paths).close()  # opening drops the lines that could restore the shard
    if harm == "a byte":
        path = paths.shard(10) / ANSWERS
        path.write_bytes(path.read_bytes().replace(b"said 12", b"said 99"))
    else:
        (paths.shard(10) / files.MANIFEST).unlink()
    told: list[str] = []
    ledger = opened(paths, told)
    assert "a shard is damaged" in told[0]
    assert [place for place in range(TOTAL) if not ledger.has(place)] == list(range(10, 20))
    for place in range(10, 20):
        ledger.add(answer(place))
    assert ledger.seal(4) == 10
    assert [one.index for one in ledger.read_all()] == list(range(TOTAL))


def test_a_full_disk_loses_nothing(paths: GenerationPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = opened(paths)
    real = os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "write", full)
    for place in range(TOTAL):
        ledger.add(answer(place))
    with pytest.raises(OSError, match="no space"):
        ledger.sync()
    monkeypatch.setattr(os, "write", real)
    ledger.sync()
    assert opened(paths).count == TOTAL


def test_a_failed_seal_is_retried(paths: GenerationPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = opened(paths, add=range(TOTAL))

    def full(operation: files.Operation, path: Path) -> None:
        if operation == "rename" and path.name.startswith("shard-"):
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(files, "before", full)
    with pytest.raises(OSError, match="no space"):
        ledger.seal(10)
    monkeypatch.undo()
    assert ledger.count == TOTAL
    assert ledger.seal(10) == TOTAL


def test_missing_answers_at_the_end_are_an_error(paths: GenerationPaths) -> None:
    ledger = opened(paths, add=range(1))
    ledger.seal(1)
    with pytest.raises(DamagedFileError, match="1 of 25 answers"):
        list(ledger.read_all())


def test_lone_surrogates_are_replaced() -> None:
    assert replace_surrogates("a\ud83d") == "a\N{REPLACEMENT CHARACTER}"
    assert replace_surrogates("a\ud83d\ude00 ä") == "a\N{GRINNING FACE} ä"
