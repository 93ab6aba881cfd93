"""Tests benchmark leakage: shared n-grams are found in any context, without false matches."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.data.deduplication import split_words
from ratchet.data.leakage import BenchmarkIndex, LeakageMatch

PROPERTY = settings(max_examples=100, deadline=None, derandomize=True)
QUESTION = (
    "A train leaves the old station at nine o'clock and rides 120 kilometres to the sea; when does it arrive there?"
)
SHORT = "How many legs do three spiders and a beetle have?"


def plain(names: dict[str, Sequence[str]], text: str, ngram_words: int) -> list[str]:
    """Return the benchmarks that match, computed from the definition alone."""
    found = split_words(text)
    lines = [split_words(line) for line in text.splitlines()]

    def matches(document: list[str]) -> bool:
        length = min(ngram_words, len(document))
        if len(document) < min(ngram_words, 8):
            return bool(document) and (document == found or (len(document) > 1 and document in lines))
        runs = [document[i : i + length] for i in range(len(document) - length + 1)]
        return any(found[i : i + length] in runs for i in range(len(found) - length + 1))

    return [name for name, documents in names.items() if any(matches(split_words(document)) for document in documents)]


def one(text: str, *documents: str, ngram_words: int = 13) -> list[str]:
    """Return the words that a text shares with a benchmark of these documents."""
    return [match.words for match in BenchmarkIndex({"bench": documents}, ngram_words).matches(text)]


def test_thirteen_shared_words_match_and_twelve_do_not() -> None:
    asked = split_words(QUESTION)
    for start in range(len(asked) - 12):
        run = asked[start : start + 13]
        assert one(f"Well: {' '.join(run)} or so", QUESTION) == [" ".join(run)]
        assert one(f"Well: {' '.join(run[1:])} or so", QUESTION) == []
        assert one(f"Well: {' '.join([*run[:6], 'not', *run[6:]])} or so", QUESTION) == []


def test_case_punctuation_and_line_breaks_are_ignored() -> None:
    text = QUESTION.upper().replace(" ", " -- ").replace("KILOMETRES", "**Kilo\u00admetres**\n\n")
    assert one(f"Tell me\n{text}\nAt noon", QUESTION) == [" ".join(split_words(QUESTION)[:13])]


def test_documents_of_at_least_eight_words_are_one_ngram() -> None:
    assert len(split_words(SHORT)) == 10
    assert one(f"Question: {SHORT} Answer: 30", SHORT) == [" ".join(split_words(SHORT))]
    assert one("How many legs do three spiders and a beetle own?", SHORT) == []
    for count, expected in ((8, ["how many legs do three spiders and a"]), (7, [])):
        document = " ".join(split_words(SHORT)[:count])
        assert one(f"Question: {document} Answer: 30", document) == expected
    other = SHORT.replace("beetle have", "wasp have")
    assert one(f"{SHORT.removesuffix('?')} together {other}", SHORT, other) == [" ".join(split_words(SHORT))]


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("What is the capital of France?\nParis", ["what is the capital of france"]),
        ("System\nwhat is the CAPITAL of France\r\nParis", ["what is the capital of france"]),
        ("What is the capital\nof France", ["what is the capital of france"]),
        ("Tell me, what is the capital of France?\nParis", []),
        ("What is the capital of France? Paris", []),
        ("Is it?\nYes.", []),  # a document of one word must equal the whole row
        ("Yes.", ["yes"]),
    ],
)
def test_documents_too_short_for_an_ngram_match_whole_lines(text: str, shared: list[str]) -> None:
    assert one(text, "What is the capital of France?", "yes") == shared


def test_documents_without_words_match_nothing() -> None:
    assert BenchmarkIndex({}, 13).matches(QUESTION) == BenchmarkIndex({"bench": []}, 13).matches(QUESTION) == []
    checked = BenchmarkIndex({"bench": ["", "?!", "🙂"]}, 13)
    assert (checked.documents, checked.unchecked) == ({"bench": 3}, {"bench": 3})
    assert checked.matches("") == checked.matches("?!") == checked.matches("🙂\n\n") == []


def test_each_benchmark_is_reported_once_with_its_first_words() -> None:
    asked = split_words(QUESTION)
    checked = BenchmarkIndex(
        {"b": [QUESTION, f"Again: {QUESTION}"], "a": [QUESTION], "none": [], "other": [SHORT], "tiny": ["It is late"]},
        13,
    )
    assert checked.documents == {"b": 2, "a": 1, "none": 0, "other": 1, "tiny": 1}
    assert checked.unchecked == {"b": 0, "a": 0, "none": 0, "other": 0, "tiny": 1}
    found = checked.matches(f"{QUESTION} And again: {QUESTION}\nIt is late")
    assert found == [
        LeakageMatch("b", " ".join(asked[:13])),
        LeakageMatch("a", " ".join(asked[:13])),
        LeakageMatch("tiny", "it is late"),
    ]
    assert checked.matches(f"{SHORT}") == [LeakageMatch("other", " ".join(split_words(SHORT)))]


def test_texts_without_spaces_match_by_character() -> None:
    text = "人类的悲欢并不相通我只觉得他们吵闹"
    assert one(f"他说:「{text[:6]},{text[6:13]}」", text) == [" ".join(text[:13])]
    assert one(text[:12], text) == []


def test_hash_collisions_are_not_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.data.leakage._draw_numbers", lambda count: np.zeros(count, dtype=np.uint64))
    text = " ".join(reversed(split_words(f"{QUESTION} {SHORT}")))
    assert one(text, QUESTION, SHORT) == []
    assert one(f"{SHORT} Well.", SHORT) == [" ".join(split_words(SHORT))]


def test_texts_much_longer_than_any_document_are_searched_to_the_end() -> None:
    chance = random.Random(0)
    noise = " ".join(chance.choices(split_words(QUESTION) + split_words(SHORT), k=60_000))
    assert one(noise, QUESTION) == []
    assert one(f"{noise} {QUESTION}", QUESTION) == [" ".join(split_words(QUESTION)[:13])]


text_lines = st.lists(st.lists(st.sampled_from("abAB"), max_size=12).map(" ".join), max_size=4).map("\n".join)


@PROPERTY
@given(st.lists(st.lists(text_lines, max_size=4), max_size=3), st.lists(text_lines, max_size=6), st.integers(5, 14))
def test_matches_equal_those_of_a_naive_search(documents: list[list[str]], texts: list[str], ngram_words: int) -> None:
    names: dict[str, Sequence[str]] = {f"bench{number}": texts for number, texts in enumerate(documents)}
    checked = BenchmarkIndex(names, ngram_words)
    for text in [*texts, *(f"b\n{document} a" for of_one in documents for document in of_one)]:
        matches = checked.matches(text)
        assert [match.benchmark for match in matches] == plain(names, text, ngram_words)
        for match in matches:
            assert f" {match.words} " in f" {' '.join(split_words(text))} "
            assert any(
                f" {match.words} " in f" {' '.join(split_words(document))} " for document in names[match.benchmark]
            )
