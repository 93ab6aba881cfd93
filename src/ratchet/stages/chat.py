"""`ratchet chat`: talk to a model in the terminal. Imports no torch: opening the model does."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from ratchet.config.schema import Settings
from ratchet.console.stream_printer import PartialAnswer, StreamPrinter
from ratchet.errors import EXIT_INTERRUPTED, DataError, InterruptedRunError, RatchetError, SettingsError
from ratchet.inference import backend_factory, model_reference
from ratchet.inference.backend import AnswerEnd, GenerationBackend, GenerationRequest
from ratchet.inference.chat_session import ChatSession
from ratchet.runs.signals import list_stop_signals
from ratchet.stages.generate import ENDS, create_notice_callbacks
from ratchet.storage.layout import ProjectLayout

PROMPT, MORE = "> ", ". "
FENCE = '"""'
"""A line that begins with it begins a question of several lines, one that ends with it ends it."""
HELP = """/reset        begin anew; the system message stays
/system TEXT  set the system message; without TEXT: show it
/retry        take the last answer back and ask again
/save FILE    write the conversation as messages, JSONL
/help         this
/quit         end (also Ctrl-D)
A line that ends with a backslash goes on in the next one; so does all between two \"""
//TEXT asks TEXT that begins with a slash. Ctrl-C stops an answer."""


def chat(layout: ProjectLayout, settings: Settings, model: str, streams: tuple[TextIO, TextIO] | None = None) -> None:
    """Read questions, show answers as they are given, until there are no more questions.

    Args:
        layout: the project.
        settings: section generate says how answers are drawn.
        model: as of `ratchet generate --model`.
        streams: questions and answers; None: standard input and output. Where one of them is no terminal, a line is a
            question, only answers are written, and what goes wrong ends it.

    Raises:
        InputError: the model is not usable; or, without a terminal, a question cannot be asked.
        RatchetError: the same, for a model that does not answer.
    """
    lines, out = streams or (sys.stdin, sys.stdout)
    live = lines.isatty() and out.isatty()
    meant = model_reference.resolve_model(model, layout, settings)
    page = StreamPrinter(out, reasons=live)
    aside = page if live else StreamPrinter(sys.stderr)
    if live:
        page.note(f"{model}: loading; /help says what can be done here, Ctrl-D ends")
    start = meant.start.model_copy(update={"generate": settings.generate.model_copy(update={"labels": ()})})
    speaker = backend_factory.open_backend(meant.model.kind, start, create_notice_callbacks(aside))
    try:
        with _allow_interrupts(live):
            _ChatLoop(speaker, ChatSession(settings), page, live=live).run(ChatInput(lines, live=live))
    finally:
        speaker.close()


@contextmanager
def _allow_interrupts(live: bool) -> Iterator[None]:
    """Ctrl-C may come again and again: the command line's way is to be deaf after the first. Other requests end it."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(EXIT_INTERRUPTED)

    before = {number: signal.getsignal(number) for number in list_stop_signals()}
    if live:
        for number in before:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else end)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


class ChatInput:
    """Questions and commands, from whoever types them. What was typed is remembered (arrow keys) for as long as the
    process lives, and written nowhere."""

    def __init__(self, lines: TextIO, *, live: bool) -> None:
        self._lines, self._live = lines, live
        if live:
            import readline

            readline.set_auto_history(True)

    def next(self) -> str | None:
        """The next one, perhaps of several lines; None: there are no more. Raises KeyboardInterrupt at Ctrl-C."""
        line = self._line(PROMPT)
        if line is None:
            return None
        if line.startswith(FENCE):
            return self._fenced(line.removeprefix(FENCE))
        whole = []
        while line is not None and line.endswith("\\"):
            whole.append(line[:-1])
            line = self._line(MORE)
        return "\n".join([*whole, *([] if line is None else [line])])

    def _fenced(self, line: str | None) -> str:
        whole = []
        while line is not None:
            if line.endswith(FENCE):
                whole.append(line.removesuffix(FENCE))
                break
            whole.append(line)
            line = self._line(MORE)
        return "\n".join(whole).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self._live and self._lines is sys.stdin:
            try:
                return input(prompt)
            except EOFError:
                return None
        line = self._lines.readline()
        return line.rstrip("\r\n") if line else None


class _ChatLoop:
    """One conversation after another, with one model."""

    def __init__(self, speaker: GenerationBackend, talk: ChatSession, page: StreamPrinter, *, live: bool) -> None:
        self._speaker, self._talk, self._page, self._live = speaker, talk, page, live
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset, "/system": self._system, "/retry": self._retry, "/save": self._save,
            "/help": lambda rest: self._say(HELP),
        }  # fmt: skip

    def run(self, reader: ChatInput) -> None:
        """Until /quit, or until there is nothing more to read."""
        while True:
            try:
                text = reader.next()
            except KeyboardInterrupt:
                if not self._live:
                    raise
                self._page.note("\n(Ctrl-D ends)")
                continue
            if text is None:
                if self._live:
                    self._page.gap()  # the shell's prompt begins a line
                return
            if text.strip() == "/quit":
                return
            self._take(text)

    def _take(self, text: str) -> None:
        if text.startswith("//"):
            self._ask(self._talk.ask(text[1:]))
        elif text.startswith("/"):
            word, _, rest = text.strip().partition(" ")
            if word not in self._commands:
                self._fail(SettingsError(f"{word}: no such command; /help lists them, //TEXT asks what begins so"))
            else:
                self._commands[word](rest.strip())
        elif text.strip():
            self._ask(self._talk.ask(text))

    def _ask(self, question: GenerationRequest) -> None:
        heard = PartialAnswer()
        try:
            self._page.answer(self._speaker.spoken(question, True), heard)
        except KeyboardInterrupt:
            if not self._live:
                raise
            self._keep(heard)
            self._page.note("(stopped; what was said stays, /retry asks again)" if heard.answer else "(stopped)")
        except InterruptedRunError:
            raise
        except RatchetError as error:
            self._keep(heard)
            self._fail(error)
        else:
            self._ended(heard)

    def _keep(self, heard: PartialAnswer) -> None:
        """A question without any answer is no part of the conversation."""
        if heard.answer:
            self._talk.answered(heard.answer)

    def _ended(self, heard: PartialAnswer) -> None:
        ended = heard.ended
        if ended is None:
            self._keep(heard)
            return
        if ended.finish == "context" and not ended.tokens:
            have = "" if ended.prompt_tokens is None else f" has {ended.prompt_tokens:,} tokens, which"
            most = "the model's context" if ended.context_tokens is None else f"a context of {ended.context_tokens:,}"
            self._fail(
                DataError(
                    f"the conversation with this question{have} does not fit {most}: it was not asked, and nothing was "
                    "left out; /reset begins anew, /save FILE keeps what there is"
                )
            )
            return
        self._talk.answered(heard.answer)
        if self._live:
            self._page.note(_format_figures(ended, heard.seconds))
            self._page.gap()

    def _reset(self, rest: str) -> None:
        self._talk.reset()
        self._say("begun anew")

    def _system(self, rest: str) -> None:
        if rest:
            self._talk.system = rest
            self._say("system message set; it holds from the next question on")
        else:
            self._say("no system message" if self._talk.system is None else self._talk.system)

    def _retry(self, rest: str) -> None:
        question = self._talk.again()
        if question is None:
            self._fail(SettingsError("/retry: nothing was asked yet"))
        else:
            self._ask(question)

    def _save(self, rest: str) -> None:
        try:
            if not rest:
                raise SettingsError("/save: name a file that ends in .jsonl")
            self._talk.save(Path(rest))
        except SettingsError as error:
            self._fail(error)
        except OSError as error:
            self._fail(SettingsError(f"{rest}: {error.strerror}; nothing was written"))
        else:
            self._say(f"{rest}: written, {len(self._talk):,} question{'s' * (len(self._talk) != 1)} with answers")

    def _say(self, text: str) -> None:
        if self._live:
            self._page.note(text)

    def _fail(self, error: RatchetError) -> None:
        """Tell it; without a terminal nobody would read on. Raises the error there."""
        if not self._live:
            raise error
        self._page.note(f"! {error}")


def _format_figures(ended: AnswerEnd, seconds: float) -> str:
    """Of an answer that has ended, in a line; `seconds` are those after its first piece."""
    said = []
    if ended.tokens is not None:
        said.append(f"{ended.tokens:,} tokens")
        if ended.tokens > 1 and seconds > 0:
            said.append(f"{(ended.tokens - 1) / seconds:,.1f} tokens/s")
        if ended.prompt_tokens is not None:
            used = f"context {ended.prompt_tokens + ended.tokens:,}"
            said.append(used if ended.context_tokens is None else f"{used} of {ended.context_tokens:,}")
    if ended.finish != "stop":
        said.append(ENDS.get(ended.finish, ended.finish))
    return ", ".join(said) or "ended"
