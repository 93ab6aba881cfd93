"""Text that arrives in pieces is wrapped at words."""

import random

import pytest
from rich.cells import cell_len

from ratchet.console.stream_printer import StreamingTextWrapper

WORDS = ["a", "the", "word", "extraordinarily", "1,234,567.89", "größer", "한국어", "👍", "✔️", "ñandu", "x-y"]


def flowed(text: str, width: int, seed: int = 0) -> str:
    """Return the wrapped text when it arrives in pieces of one to seven letters."""
    draw, flow, found, at = random.Random(seed), StreamingTextWrapper(lambda: width), "", 0
    while at < len(text):
        size = draw.randint(1, 7)
        found += flow.feed(text[at : at + size])
        at += size
    return found + flow.close()


@pytest.mark.parametrize("seed", range(30))
def test_no_word_crosses_the_edge_however_the_text_comes(seed: int) -> None:
    draw = random.Random(seed)
    width = draw.randint(16, 60)
    text = "\n".join(" ".join(draw.choices(WORDS, k=draw.randint(0, 60))) for _ in range(4))
    found = flowed(text, width, seed)
    assert found.replace("\n", " ") == text.replace("\n", " ")
    lines = found.split("\n")
    assert max(map(cell_len, lines)) <= width
    assert len(lines) == sum(_lines_of(line, width) for line in text.split("\n"))
    assert flowed(text, width, seed + 1) == found


def _lines_of(line: str, width: int) -> int:
    """Return the number of terminal lines that the line takes."""
    count = column = 0
    for word in line.split(" "):
        cells = cell_len(word)
        if not count or column + 1 + cells > width:
            count, column = count + 1, cells
        else:
            column += 1 + cells
    return count


def test_a_word_that_is_whole_or_begins_a_line_is_not_waited_for() -> None:
    flow = StreamingTextWrapper(lambda: 12)
    pieces = ["Be", "gin", " a", " lon", "g", "w", "ord", "\n", "en", "d"]
    assert [flow.feed(piece) for piece in pieces] == ["Be", "gin", "", " a", "", "\nlongw", "ord", "\n", "en", "d"]
    assert flow.close() == ""


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [
        (f"see {'x' * 25} for it", 10, f"see\n{'x' * 25} for\nit"),
        ("    four in, then words", 14, "    four in,\nthen words"),
        ("word     \nnext", 6, "word\nnext"),
        ("a\tb\tc d", 18, "a\tb\tc\nd"),
        ("any text, with a long line \n\n", 0, "any text, with a long line \n\n"),
        ("- 这是一个很长的列表项。然后「还有」", 12, "- 这是一个很长的列表项。然后「还有」"),
        ("서울은 대한민국의 수도", 10, "서울은\n대한민국의\n수도"),
        (f"```no code``` is `it` {'word ' * 3}", 14, "```no code```\nis `it` word\nword word"),
    ],
    ids=[
        "word longer than a line", "indented", "blanks at the edge", "tabs", "no width", "Chinese",
        "Korean", "backticks that are no fence",
    ],
)  # fmt: skip
def test_lines_of_a_text(text: str, width: int, expected: str) -> None:
    assert flowed(text, width) == expected


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (
            [(30, "one two three four five six "), (12, "seven eight nine ten "), (20, "eleven twelve thirteen ")],
            "one two three four five six\nseven eight\nnine ten eleven\ntwelve thirteen",
        ),
        ([(30, "x" * 25), (10, "xx yy "), (10, "zz ")], f"{'x' * 27}\nyy zz"),
    ],
    ids=["between words", "within a word"],
)
def test_terminal_that_is_resized(pieces: list[tuple[int, str]], expected: str) -> None:
    width = 0
    flow = StreamingTextWrapper(lambda: width)
    found = ""
    for width, text in pieces:  # noqa: B007 (the wrapper reads it)
        found += flow.feed(text)
    assert found + flow.close() == expected


@pytest.mark.parametrize("fence", ["```", "~~~~", "  ```"])
def test_code_stays_as_it_is(fence: str) -> None:
    code = f"{fence}python\nfor number in range(10):\n\tprint('a long line of code', number)   \n\n``\n{fence}\n"
    assert flowed(code, 12) == code
    assert flowed(f"{code}words after it flow", 12) == f"{code}words after\nit flow"
