"""Answers as they are given, in files and on terminals of all widths."""

import io
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from ratchet.generating.aloud import Heard, Page, printable
from ratchet.generating.speakers import Ended, Speech, Spoken
from tmux_screen import Screen, needs_tmux


def speech(pieces: Iterable[str], reasoning: Iterable[str] = ()) -> Speech:
    for piece in reasoning:
        yield Spoken(True, piece)
    for piece in pieces:
        yield Spoken(False, piece)
    yield Ended("stop", 1, 1, None)


@pytest.mark.parametrize("pieces", [
    ("```py\n", "\n", "\tx = 1  ", "\n", "\n", "```", "\n", "word " * 100, "end  "),
    ("Para", "graph", "\n", "\n", "next"), (" blank first",), ("\n\nlate", " start"),
])  # fmt: skip
def test_what_is_no_terminal_gets_the_answer_as_it_is(pieces: tuple[str, ...]) -> None:
    out = io.StringIO()
    Page(out, reasons=False).answer(speech(pieces, ["Let me see"]), heard := Heard())
    assert out.getvalue() == f"{''.join(pieces)}\n".removeprefix("\n\n")
    assert heard.answer == "".join(pieces).strip()


def test_reasoning_is_set_apart_by_words() -> None:
    out = io.StringIO()
    page = Page(out)
    page.answer(speech(["\n\n", "It ", "is."], ["\nHm", ", so"]), Heard())
    page.note("a note")
    assert out.getvalue() == "(reasoning) Hm, so\n(answer) It is.\na note\n"


def test_blanks_of_other_scripts_are_letters_and_controls_are_not() -> None:
    assert printable("Bon\u202f: 漢\u3000字, a\xa0b, \u200d\t\n") == "Bon\u202f: 漢\u3000字, a\xa0b, \u200d\t\n"
    assert printable("\x1b[2J\r\x07\u202e\u2028") == "\ufffd[2J" + "\ufffd" * 4


CODE = "x = 1; " * 10 + "end"
SPEAKS = (
    f"CODE = {CODE!r}"
    + """
import os, sys, time
from ratchet.generating.aloud import Heard, Page
from ratchet.generating.speakers import Ended, Spoken

def pieces(begin, end):
    for number in range(begin, end):
        yield from (Spoken(False, text) for text in (f" extraordin", f"arily{number}", " größe", "r", " 단어", "단어"))

def wait_for(columns):
    while os.get_terminal_size().columns != columns:
        time.sleep(0.02)

def speech():
    yield from pieces(100, 130)
    for columns in (61, 33):
        yield Spoken(False, "\\n\\nresized\\n\\n")
        wait_for(columns)
        yield from pieces(columns * 10, columns * 10 + 30)
    yield Spoken(False, "\\n```\\n" + CODE + "\\n```\\n")
    yield Ended("stop", 1, 1, None)

page = Page(sys.stdout)
page.head("prompt with a name that is long")
page.answer(speech(), Heard())
page.note("(a note that is longer than the narrow screen)")
"""
)


@needs_tmux
def test_on_a_terminal_words_are_whole_whatever_becomes_of_its_width(tmp_path: Path) -> None:
    (tmp_path / "speak.py").write_text(SPEAKS, encoding="utf-8")
    with Screen(f"'{sys.executable}' '{tmp_path}/speak.py'", 43, 40) as screen:
        first = screen.until(lambda lines: lines[-1:] == ["resized"])
        screen.resize(61, 40)
        second = screen.until(lambda lines: lines[-1:] == ["resized"] and "arily639" in " ".join(lines))
        screen.resize(33, 40)
        screen.until(lambda lines: "[ended 0]" in lines)
        last = screen.lines(all_of_it=True)
    for lines, begin in ((first, 100), (second, 610), (last, 330)):
        shown = " ".join(lines).split()
        words = [word for n in range(begin, begin + 30) for word in (f"extraordinarily{n}", "größer", "단어단어")]
        start = shown.index(words[0])
        assert shown[start : start + len(words)] == words
    assert "prompt with a name that is long" in first
    begin, end = (at for at, line in enumerate(last) if line == "```")
    assert "".join(last[begin + 1 : end]) == CODE
    assert last[end + 1 :] == ["(a note that is longer than the", "narrow screen)", "[ended 0]"]
