"""Words at the edge of a terminal, of texts that come in pieces."""

import random

import pytest
from rich.cells import cell_len

from ratchet.terminal.flow import Flow, wrapped

WORDS = (
    "a",
    "the",
    "word",
    "extraordinarily",
    "1,234,567.89",
    "größer",
    "한국어",
    "👍",
    "✔\ufe0f",
    "n\u0303andu",
    "x-y",
)


def flowed(text: str, width: int, seed: int = 0) -> str:
    """The text as it is written when it comes in pieces of one to seven letters."""
    draw, flow, found, at = random.Random(seed), Flow(lambda: width), "", 0
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
    """How many lines it takes."""
    count = column = 0
    for word in line.split(" "):
        cells = cell_len(word)
        if not count or column + 1 + cells > width:
            count, column = count + 1, cells
        else:
            column += 1 + cells
    return count


def test_a_word_that_is_whole_or_begins_a_line_is_not_waited_for() -> None:
    flow = Flow(lambda: 12)
    pieces = ["Be", "gin", " a", " lon", "g", "w", "ord", "\n", "en", "d"]
    assert [flow.feed(piece) for piece in pieces] == ["Be", "gin", "", " a", "", "\nlongw", "ord", "\n", "en", "d"]
    assert flow.close() == ""


def test_a_word_longer_than_a_line_is_the_terminals() -> None:
    assert flowed(f"see {'x' * 25} for it", 10) == f"see\n{'x' * 25} for\nit"


def test_a_terminal_that_is_resized() -> None:
    width = 30
    flow = Flow(lambda: width)
    found = flow.feed("one two three four five six ")
    width = 12
    found += flow.feed("seven eight nine ten ")
    width = 20
    found += flow.feed("eleven twelve thirteen ") + flow.close()
    assert found == "one two three four five six\nseven eight\nnine ten eleven\ntwelve thirteen"


def test_where_the_column_is_not_known_the_next_word_begins_a_line() -> None:
    width = 30
    flow = Flow(lambda: width)
    found = flow.feed("x" * 25)
    width = 10
    found += flow.feed("xx yy ") + flow.feed("zz ")
    assert found == f"{'x' * 27}\nyy zz"


@pytest.mark.parametrize("fence", ["```", "~~~~", "  ```"])
def test_code_stays_as_it_is(fence: str) -> None:
    code = f"{fence}python\nfor number in range(10):\n\tprint('a long line of code', number)   \n\n``\n{fence}\n"
    assert flowed(code, 12) == code
    assert flowed(f"{code}words after it flow", 12) == f"{code}words after\nit flow"
    assert flowed(f"```no code``` is `it` {'word ' * 3}", 14) == "```no code```\nis `it` word\nword word"


def test_scripts_without_blanks_are_broken_between_letters() -> None:
    text = "- 这是一个很长的列表项。然后「还有」"
    assert flowed(text, 12) == "- 这是一个很\n长的列表项。\n然后「还有」"
    assert flowed(text, 10) == "- 这是一个\n很长的列表\n项。然后\n「还有」"
    assert flowed("서울은 대한민국의 수도", 10) == "서울은\n대한민국의\n수도"


def test_what_stands_in_and_blanks_at_an_edge() -> None:
    assert flowed("    four in, then words", 14) == "    four in,\nthen words"
    assert flowed("word     \nnext", 6) == "word\nnext"
    assert flowed("a\tb\tc d", 18) == "a\tb\tc\nd"
    assert flowed("any text, with a long line \n\n", 0) == "any text, with a long line \n\n"


def test_whole_lines_go_on_as_far_in_as_they_began() -> None:
    text = "run\n  alert: \x1b[33mmemory of 1,234 bytes\x1b[0m is not enough"
    assert wrapped(text, 22) == "run\n  alert: \x1b[33mmemory of\n  1,234 bytes\x1b[0m is not\n  enough"
    assert wrapped(text, 0) == text
