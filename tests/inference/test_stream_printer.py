"""Tests streamed answers in files and on terminals of all widths."""

import io
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from ratchet.console.stream_printer import PartialAnswer, StreamPrinter, sanitize_text, supports_styles
from ratchet.inference.backend import AnswerChunk, AnswerEnd, AnswerStream
from tmux_screen import Screen, needs_tmux


def speech(pieces: Iterable[str], reasoning: Iterable[str] = ()) -> AnswerStream:
    for piece in reasoning:
        yield AnswerChunk(True, piece)
    for piece in pieces:
        yield AnswerChunk(False, piece)
    yield AnswerEnd("stop", 1, 1, None)


@pytest.mark.parametrize("pieces", [
    ("```py\n", "\n", "\tx = 1  ", "\n", "\n", "```", "\n", "word " * 100, "end  "),
    ("Para", "graph", "\n", "\n", "next"), (" blank first",), ("\n\nlate", " start"),
])  # fmt: skip
def test_a_file_gets_the_answer_unchanged(pieces: tuple[str, ...]) -> None:
    out = io.StringIO()
    StreamPrinter(out, reasons=False).answer(speech(pieces, ["Let me see"]), heard := PartialAnswer())
    assert out.getvalue() == f"{''.join(pieces)}\n".removeprefix("\n\n")
    assert heard.answer == "".join(pieces).strip()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO, *, reasons: bool = True) -> str:
    page = StreamPrinter(out, reasons=reasons)
    page.answer(speech(["\n\nIt\x1b[31m is", " wet."], ["\nHm", "m.\n"]), PartialAnswer())
    page.note("a note")
    return out.getvalue()


def test_reasoning_is_dim_on_a_terminal_and_marked_by_words_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = "\x1b[2mHmm.\n\x1b[0mIt\N{REPLACEMENT CHARACTER}[31m is wet.\n\x1b[2ma note\x1b[0m\n"
    assert shown(Terminal()) == coloured
    plain = "(reasoning) Hmm.\n(answer) It\N{REPLACEMENT CHARACTER}[31m is wet.\na note\n"
    assert shown(io.StringIO()) == plain
    assert shown(io.StringIO(), reasons=False) == plain.partition("(answer) ")[2]
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(Terminal()) == plain
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not supports_styles(Terminal())


def test_colours_are_reset_when_an_answer_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> AnswerStream:
        yield AnswerChunk(True, "Hm")
        raise KeyboardInterrupt

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, heard = Terminal(), PartialAnswer()
    with pytest.raises(KeyboardInterrupt):
        StreamPrinter(out).answer(broken(), heard)
    assert out.getvalue() == "\x1b[2mHm\x1b[0m\n"
    assert heard.end is None


def test_wide_spaces_are_printed_and_control_characters_are_not() -> None:
    assert sanitize_text("Bon\u202f: 漢\u3000字, a\xa0b, \u200d\t\n") == "Bon\u202f: 漢\u3000字, a\xa0b, \u200d\t\n"
    assert sanitize_text("\x1b[2J\r\x07\u202e\u2028") == "\ufffd[2J" + "\ufffd" * 4


CODE = "x = 1; " * 10 + "end"
SPEAKS = (
    f"CODE = {CODE!r}"
    + """
import os, sys, time
from ratchet.console.stream_printer import PartialAnswer
from ratchet.console.stream_printer import StreamPrinter
from ratchet.inference.backend import AnswerEnd
from ratchet.inference.backend import AnswerChunk

def pieces(begin, end):
    for number in range(begin, end):
        texts = (f" extraordin", f"arily{number}", " größe", "r", " 단어", "단어")
        yield from (AnswerChunk(False, text) for text in texts)

def wait_for(columns):
    while os.get_terminal_size().columns != columns:
        time.sleep(0.02)

def speech():
    yield from pieces(100, 130)
    for columns in (61, 33):
        yield AnswerChunk(False, "\\n\\nresized\\n\\n")
        wait_for(columns)
        yield from pieces(columns * 10, columns * 10 + 30)
    yield AnswerChunk(False, "\\n```\\n" + CODE + "\\n```\\n")
    yield AnswerEnd("stop", 1, 1, None)

page = StreamPrinter(sys.stdout)
page.head("prompt with a name that is long")
page.answer(speech(), PartialAnswer())
page.note("(a note that is longer than the narrow screen)")
"""
)


@needs_tmux
def test_words_stay_whole_when_the_terminal_is_resized(tmp_path: Path) -> None:
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
