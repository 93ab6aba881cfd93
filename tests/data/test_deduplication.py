"""Tests near-duplicates: precision, recall, independence of row order, and linear time."""

import random
import string
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ratchet.config.prepare import DeduplicationSettings
from ratchet.data.deduplication import (
    MinHashSignatures,
    RowCluster,
    choose_banding,
    cluster_duplicates,
    exact_key,
    shingle_text,
    split_words,
)

PROPERTY = settings(max_examples=60, deadline=None, derandomize=True)
VOCABULARY = ["".join(random.Random(i).choices(string.ascii_lowercase, k=6)) for i in range(4000)]


def similarity(one: str, other: str, width: int = 3) -> float:
    """Compute the Jaccard similarity of word shingles with a simple independent implementation."""

    def runs(text: str) -> set[tuple[str, ...]]:
        found = split_words(text) or [text]
        return {tuple(found[i : i + width]) for i in range(max(1, len(found) - width + 1))}

    return len(runs(one) & runs(other)) / len(runs(one) | runs(other))


def found(
    texts: Sequence[str],
    *,
    rank: Sequence[int] | None = None,
    text_of: Callable[[int], str] | None = None,
    **chosen: object,
) -> list[RowCluster]:
    duplicates = DeduplicationSettings.model_validate(chosen)
    ranks = np.array(range(len(texts)) if rank is None else rank, dtype=np.int64)
    keys = MinHashSignatures(duplicates).band_keys(texts)
    return clusters(keys, ranks, text_of or texts.__getitem__, duplicates)


def clusters(
    keys: NDArray[np.uint64],
    ranks: NDArray[np.int64],
    text_of: Callable[[int], str],
    duplicates: DeduplicationSettings,
    progress: Callable[[int], None] = lambda rows: None,
) -> list[RowCluster]:
    """Find clusters among all rows, with keys of [rows, bands], and the rank of each row."""
    everything = np.ones(len(keys), dtype=np.bool_)
    return cluster_duplicates(
        keys.T, everything, lambda rows: rows[np.argsort(ranks[rows])], text_of, duplicates, progress
    )


def dropped(result: list[RowCluster]) -> dict[int, int]:
    """Map each dropped row to the row that is kept in its place."""
    return {row: cluster.kept for cluster in result for row in cluster.dropped}


def prose(seed: object, count: int = 120) -> list[str]:
    return random.Random(str(seed)).choices(VOCABULARY, k=count)


def spoilt(text: list[str], changes: int, seed: int) -> list[str]:
    """Return a copy with `changes` evenly spread words replaced; each replacement changes three shingles of width 3."""
    copy = list(text)
    step = len(copy) // changes
    for place in range(changes):
        copy[place * step + step // 2] = f"changed{seed}x{place}"
    return copy


# ------------------------------------------------------------------------------------------------------ words and keys


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't — STOP, 3.14 (now)!", ["don", "t", "stop", "3", "14", "now"]),
        ("snake_case x²", ["snake", "case", "x2"]),
        ("STRASSE Straße ﬁne \uff21\uff22\uff23", ["strasse", "strasse", "fine", "abc"]),
        ("cafe\u0301 café co\u00adop", ["café", "café", "coop"]),
        ("我爱 NLP模型", ["我", "爱", "nlp", "模", "型"]),
        ("カタカナ ｶﾞ ひらー 한국어", ["カ", "タ", "カ", "ナ", "ガ", "ひ", "ら", "ー", "한", "국", "어"]),
        ("हिन्दी में की कि", ["हिन्दी", "में", "की", "कि"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("🙂 ❤️ ... !?", []),
        ("", []),
    ],
)
def test_words_are_split_as_expected(text: str, expected: list[str]) -> None:
    assert split_words(text) == expected


@PROPERTY
@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_text_is_split_like_other_text(text: str) -> None:
    assert split_words(text) == split_words(f"{text} é")[:-1]


@PROPERTY
@given(st.text())
def test_words_are_normalized_and_splitting_is_idempotent(text: str) -> None:
    assert split_words(" ".join(split_words(text))) == split_words(text)
    assert all(word == word.casefold() and not any(letter.isspace() for letter in word) for word in split_words(text))


@PROPERTY
@given(st.lists(st.text(st.characters(exclude_categories=["Z", "Cc", "Cs"]), min_size=1), min_size=1), st.data())
def test_exact_keys_ignore_case_and_the_amount_of_white_space(parts: list[str], data: st.DataObject) -> None:
    spaces = st.text(" \t\n\r\u00a0\u3000", min_size=1, max_size=3)
    other = "".join(part.casefold() + data.draw(spaces) for part in parts)
    assert exact_key(data.draw(spaces) + other) == exact_key(" ".join(parts))
    assert len(exact_key(other)) == 16
    assert exact_key(" ".join(parts) + "?") != exact_key(other)


@pytest.mark.parametrize(
    ("one", "other"), [("now here", "nowhere"), ("1 2", "12"), ("x²", "x2"), ("a.", "a"), ("", "-")]
)
def test_exact_keys_differ_for_different_texts(one: str, other: str) -> None:
    assert exact_key(one) != exact_key(other)


def test_lone_surrogates_are_accepted() -> None:
    assert split_words("a \ud800 b") == ["a", "b"]
    assert exact_key("\ud800") != exact_key("\ud801")
    assert dropped(found(["\ud800", "\ud800", "\ud801"])) == {1: 0}


# ---------------------------------------------------------------------------------------------------------- signatures


def test_keys_are_the_same_in_every_process_and_batch() -> None:
    texts = [" ".join(prose(row, 700)) for row in range(120)] + ["", "hi", "🙂"]
    together = MinHashSignatures(DeduplicationSettings()).band_keys(texts)
    assert together.shape == (123, MinHashSignatures(DeduplicationSettings()).bands)
    alone = MinHashSignatures(DeduplicationSettings())
    assert all(np.array_equal(alone.band_keys([text])[0], keys) for text, keys in zip(texts, together, strict=True))
    code = (
        "from ratchet.config.prepare import DeduplicationSettings as Duplicates\n"
        "from ratchet.data.deduplication import MinHashSignatures as Signatures\n"
        "print(*Signatures(Duplicates()).band_keys(['It was the best of "
        "times, it was the worst of times.', 'ok'])[:, 0])"
    )
    done = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert done[0] == done[1]
    assert len(set(done[0].split())) == 2


def test_an_empty_batch_gives_no_keys() -> None:
    assert MinHashSignatures(DeduplicationSettings()).band_keys([]).shape == (
        0,
        MinHashSignatures(DeduplicationSettings()).bands,
    )
    assert found([]) == []


@pytest.mark.parametrize("changes", [1, 4, 12])
def test_band_keys_agree_with_the_minhash_probability(changes: int) -> None:
    """Two bands of r rows agree with probability s^r, so the estimate of the library has no bias."""
    # Two rows per band give many bands to count.
    chosen = DeduplicationSettings(jaccard_threshold=0.3)
    bands, rows = choose_banding(0.3, 128)
    texts = [prose(("bias", pair)) for pair in range(150)]
    one = MinHashSignatures(chosen).band_keys([" ".join(text) for text in texts])
    other = MinHashSignatures(chosen).band_keys([" ".join(spoilt(text, changes, 0)) for text in texts])
    true = similarity(" ".join(texts[0]), " ".join(spoilt(texts[0], changes, 0)))
    expected = true**rows
    agreed = float((one == other).mean())
    deviation = (expected * (1 - expected) / (bands * len(texts))) ** 0.5
    assert agreed == pytest.approx(expected, abs=5 * deviation + 0.005)


@pytest.mark.parametrize(
    ("near", "permutations"), [(0.3, 128), (0.5, 64), (0.8, 128), (0.9, 128), (0.95, 1024), (0.8, 16)]
)
def test_banding_finds_most_pairs_at_the_threshold_and_nearly_all_above(near: float, permutations: int) -> None:
    bands, rows = choose_banding(near, permutations)
    assert bands * rows <= permutations
    assert 1 - (1 - near**rows) ** bands > 0.8
    above = (1 + 2 * near) / 3
    assert 1 - (1 - above**rows) ** bands > 0.94
    assert choose_banding(0.8, 128) == (16, 8)  # as the description of the setting states


# ------------------------------------------------------------------------------------------------------------ clusters


def test_planted_near_duplicates_are_found_and_unrelated_texts_are_not() -> None:
    originals = [prose(row) for row in range(400)]
    copies = [spoilt(text, 2, row) for row, text in enumerate(originals)]
    texts = [" ".join(text) for text in (*originals, *copies)]
    assert 0.89 < similarity(texts[0], texts[400]) < 0.91
    result = dropped(found(texts))
    assert len(result) >= 0.95 * 400
    assert all(row == kept + 400 for row, kept in result.items())


small = st.lists(st.sampled_from(["a", "b", "c", "d", "é", "字"]), max_size=9).map(" ".join)


@PROPERTY
@given(st.lists(small, max_size=40), st.sampled_from([0.3, 0.5, 0.8, 1.0]), st.randoms())
def test_the_order_of_the_rows_does_not_matter(texts: list[str], near: float, chance: random.Random) -> None:
    rank = chance.sample(range(1000), len(texts))
    result = found(texts, rank=rank, jaccard_threshold=near)
    places = chance.sample(range(len(texts)), len(texts))
    again = found([texts[i] for i in places], rank=[rank[i] for i in places], jaccard_threshold=near)
    assert [(places[c.kept], [places[row] for row in c.dropped]) for c in again] == [
        (c.kept, list(c.dropped)) for c in result
    ]


@PROPERTY
@given(st.lists(small, max_size=40), st.sampled_from([0.3, 0.5, 0.8, 1.0]), st.randoms())
def test_dropped_rows_are_similar_to_a_better_row_and_kept_candidates_are_not(
    texts: list[str], near: float, chance: random.Random
) -> None:
    rank = chance.sample(range(1000), len(texts))
    gone = dropped(found(texts, rank=rank, jaccard_threshold=near))
    for row, kept in gone.items():
        assert kept not in gone
        assert rank[kept] < rank[row]
        assert similarity(texts[row], texts[kept]) >= near
    left = [row for row in range(len(texts)) if row not in gone]
    keys = MinHashSignatures(DeduplicationSettings(jaccard_threshold=near)).band_keys([texts[row] for row in left])
    for i, one in enumerate(left):
        for j, other in enumerate(left[:i]):
            assert not (keys[i] == keys[j]).any() or similarity(texts[one], texts[other]) < near


@pytest.mark.parametrize(("near", "gone"), [(0.9, {1: 0}), (0.91, {})])
def test_similarity_equal_to_the_threshold_counts(near: float, gone: dict[int, int]) -> None:
    texts = ["a b c d e f g h i j k", "a b c d e f g h i j k l"]
    assert similarity(*texts) == 0.9
    keys, ranks = np.zeros((2, 1), np.uint64), np.arange(2)
    assert dropped(clusters(keys, ranks, texts.__getitem__, DeduplicationSettings(jaccard_threshold=near))) == gone


def test_threshold_one_requires_equal_words() -> None:
    text = " ".join(prose("one"))
    texts = [text, text.upper() + "!", f"{text} more", text.replace(" ", "\n")]
    assert found(texts, jaccard_threshold=1.0) == [RowCluster(0, (1, 3))]


def test_without_a_threshold_nothing_is_compared() -> None:
    told: list[int] = []
    assert (
        clusters(
            np.zeros((3, 1), np.uint64), np.arange(3), str, DeduplicationSettings(jaccard_threshold=None), told.append
        )
        == []
    )
    assert told == [3]
    with pytest.raises(ValueError, match=r"jaccard_threshold is null"):
        MinHashSignatures(DeduplicationSettings(jaccard_threshold=None))


def test_short_texts_are_compared_whole() -> None:
    texts = ["Yes.", "yes", "No.", "yes no", "Yes, no!", "", " ", "🙂", "🙁", "🙂 ", "yes no yes"]
    assert found(texts) == [RowCluster(0, (1,)), RowCluster(3, (4,)), RowCluster(5, (6,)), RowCluster(7, (9,))]


@pytest.mark.parametrize(
    ("keys", "kept"), [([[1, 2, 3], [9, 5, 6], [1, 5, 6]], 1), ([[9, 2, 3], [1, 8, 4], [1, 2, 5]], 0)]
)
def test_candidates_with_most_shared_keys_then_best_rank_come_first(keys: list[list[int]], kept: int) -> None:
    found = clusters(np.array(keys, np.uint64), np.arange(3), lambda row: "same", DeduplicationSettings())
    assert found == [RowCluster(kept, (2,))]


def test_many_texts_without_words_do_not_share_a_bucket() -> None:
    emoji = [chr(0x1F300 + row) for row in range(200)]
    assert dropped(found([*emoji, *emoji])) == {row + 200: row for row in range(200)}


class Counted:
    """Returns texts by row and counts the requests."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.calls = 0

    def __call__(self, row: int) -> str:
        self.calls += 1
        return self.texts[row]


def test_only_candidates_are_read() -> None:
    texts = [" ".join(prose(row)) for row in range(300)]
    texts += [texts[5], texts[7]]
    read = Counted(texts)
    assert dropped(found(texts, text_of=read)) == {300: 5, 301: 7}
    assert read.calls == 4


def test_many_equal_rows_take_linear_time() -> None:
    texts = ["the very same thing, over and over"] * 20_000
    read = Counted(texts)
    told: list[int] = []
    keys = np.zeros((len(texts), 16), np.uint64)
    result = clusters(keys, np.arange(len(texts))[::-1], read, DeduplicationSettings(), told.append)
    assert result == [RowCluster(19_999, tuple(reversed(range(19_999))))]
    assert read.calls == len(texts)
    assert told == sorted(told)
    assert told[-1] == len(texts)
    assert len(told) > 10


class Comparing(frozenset[str]):
    """A set of shingles that counts comparisons."""

    comparisons = 0

    def __and__(self, other: object) -> frozenset[str]:  # type: ignore[override]
        Comparing.comparisons += 1
        return super().__and__(other)  # type: ignore[operator]


def test_many_rows_with_the_same_boilerplate_take_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows share keys and are just below the threshold.

    The number of comparisons per row has a bound that does not depend on the number of rows.
    """
    boilerplate = " ".join(prose("boilerplate", 60))
    texts = [f"{boilerplate} {' '.join(prose(row, 12))}" for row in range(2000)]
    texts.append(f"{texts[1900]} indeed")
    assert 0.6 < similarity(texts[0], texts[1]) < 0.75
    monkeypatch.setattr(
        "ratchet.data.deduplication.shingle_text", lambda text, width: Comparing(shingle_text(text, width))
    )
    assert dropped(found(texts)) == {2000: 1900}
    assert Comparing.comparisons < 300 * len(texts)
