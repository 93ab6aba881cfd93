"""Tests the separation of reasoning and answer in complete and streamed texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.inference.spec import ReasoningParts, ReasoningSplitter, split_reasoning

MARKS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "opened", "parts"),
    [
        ("It is 4.", False, ReasoningParts(None, "It is 4.")),
        ("<think>2 and 2</think>\n\nIt is 4.", False, ReasoningParts("2 and 2", "It is 4.")),
        ("2 and 2</think>It is 4.", True, ReasoningParts("2 and 2", "It is 4.")),
        ("2 and 2</think>It is 4.", False, ReasoningParts("2 and 2", "It is 4.")),
        ("<think>2 and", False, ReasoningParts("2 and", "")),
        ("2 and", True, ReasoningParts("2 and", "")),
        ("<think></think>4", False, ReasoningParts("", "4")),
        ("<think>a</think>b<think>c</think>d", False, ReasoningParts("ac", "bd")),
        ("a <thin> b < c", False, ReasoningParts(None, "a <thin> b < c")),
        ("<think>a</thi", False, ReasoningParts("a</thi", "")),
        ("", False, ReasoningParts(None, "")),
    ],
    ids=["none", "usual", "opened", "first mark left out", "cut", "opened and cut", "empty", "twice", "like a mark",
         "cut in a mark", "nothing"],
)  # fmt: skip
def test_reasoning_and_answer_are_separated(text: str, opened: bool, parts: ReasoningParts) -> None:
    assert split_reasoning(text, MARKS, opened) == parts


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "a", " ", "<t", "hink>"]), max_size=12),
    st.integers(1, 5),
    st.booleans(),
)
def test_streamed_text_gives_the_same_parts(parts: list[str], length: int, opened: bool) -> None:
    text = "".join(parts)
    whole, pieces = ReasoningSplitter(MARKS, opened), ReasoningSplitter(MARKS, opened)
    at_once = [*whole.feed(text), *whole.close()]
    slowly = [one for i in range(0, len(text), length) for one in pieces.feed(text[i : i + length])]
    slowly += pieces.close()
    for wanted in (True, False):
        assert "".join(t for inside, t in at_once if inside is wanted) == "".join(
            t for inside, t in slowly if inside is wanted
        )
