"""`ratchet chat`: a conversation with a model in the terminal. torch is loaded only when the model is.

Reasoning is not stored, since chat templates omit the reasoning of earlier turns.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from ratchet.config.settings import Settings
from ratchet.console.stream_printer import PartialAnswer, StreamPrinter
from ratchet.data.conversation import Conversation, Message
from ratchet.data.tokenization import merge_system_messages
from ratchet.errors import EXIT_INTERRUPTED, DataError, InterruptedRunError, RatchetError, SettingsError
from ratchet.inference import model_reference
from ratchet.inference.backend import AnswerEnd, GenerationBackend, GenerationRequest
from ratchet.inference.backend_factory import open_backend
from ratchet.inference.prompts import Prompt
from ratchet.inference.spec import replace_surrogates, split_reasoning
from ratchet.runs.signals import list_stop_signals
from ratchet.stages.generate import ENDS, create_notice_callbacks
from ratchet.stages.project import Project
from ratchet.storage import digests, files


class ChatSession:
    """A chat: user messages with their answers.

    Args:
        settings: generate.system_prompt, generate.reasoning_tags and prepare.system are read.
    """

    def __init__(self, settings: Settings) -> None:
        self.system = settings.generate.system_prompt
        """System message for the next request, or None."""
        self._tags = settings.generate.reasoning_tags
        self._merge_system = settings.prepare.system == "merge"
        self._turns: list[tuple[str, str]] = []
        self._message, self._is_answered, self._sample = "", False, 0
        self._saved: set[Path] = set()

    def ask(self, text: str) -> GenerationRequest:
        """Return the request for an answer to a new user message."""
        self._message, self._is_answered, self._sample = replace_surrogates(text), False, 0
        return self._question()

    def regenerate(self) -> GenerationRequest | None:
        """Remove the last answer and return a request for another one; None if there is no message."""
        if not self._message:
            return None
        if self._is_answered:
            self._turns.pop()
        self._is_answered = False
        self._sample += 1
        return self._question()

    def add_answer(self, text: str) -> None:
        """Add the answer to the last message; reasoning with a missing begin tag is removed."""
        self._turns.append((self._message, split_reasoning(text, self._tags).answer))
        self._is_answered = True

    def reset(self) -> None:
        """Remove all turns. The system message stays."""
        self._turns, self._message, self._is_answered = [], "", False

    def __len__(self) -> int:
        return len(self._turns)

    def _question(self) -> GenerationRequest:
        conversation = Conversation([*self._messages(), {"role": "user", "content": self._message}])
        if self._merge_system:
            conversation = merge_system_messages(conversation)
        digest = digests.hash_json([conversation.messages, conversation.tools])
        number = len(self._turns) + 1
        return GenerationRequest(number, self._sample, Prompt(f"{number}", digest, conversation))

    def _messages(self) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        roles = ("user", "assistant")
        return [*system, *({"role": r, "content": t} for turn in self._turns for r, t in zip(roles, turn, strict=True))]

    def save(self, path: Path) -> None:
        """Write the chat as one record of messages, which `ratchet prepare` can read.

        Raises:
            SettingsError: the chat is empty, the name does not end in .jsonl, or another file has this name.
            OSError: the file cannot be written; no partial file is left behind.
        """
        target = path.expanduser().absolute()
        if not self._turns:
            raise SettingsError("the chat is empty; there is nothing to save")
        if target.suffix != ".jsonl":
            raise SettingsError(f"{path}: found ending {target.suffix!r}; expected .jsonl")
        if target not in self._saved and target.exists():
            raise SettingsError(f"{path}: the file exists already; name another file")
        record = json.dumps({"messages": self._messages()}, ensure_ascii=False, allow_nan=False)
        files.write_atomic(target, f"{record}\n")
        self._saved.add(target)


PROMPT, MORE = "> ", ". "
FENCE = '"""'
"""Starts and ends a question of several lines."""
HELP = """/reset        start a new conversation; the system message stays
/system TEXT  set the system message; without TEXT: show it
/retry        remove the last answer and ask again
/save FILE    write the conversation as messages, JSONL
/help         show this list
/quit         end (also Ctrl-D)
A line that ends with a backslash continues on the next one, as does everything between two \"""
//TEXT asks a TEXT that begins with a slash. Ctrl-C stops an answer."""


def chat(project: Project, model: str = "adapter", streams: tuple[TextIO, TextIO] | None = None) -> None:
    """Read questions and show each answer while it is generated, until the input ends.

    Args:
        project: the project; section generate of its settings says how answers are sampled.
        model: as of `ratchet generate --model`.
        streams: input and output; None: standard input and output. Where one of them is not a terminal, each line is a
            question, only answers are written, and an error ends the chat.

    Raises:
        InputError: the model cannot be used; without a terminal also: a question cannot be asked.
        RatchetError: the model does not answer; only without a terminal.
    """
    layout, settings = project.layout, project.settings
    input_stream, out = streams or (sys.stdin, sys.stdout)
    live = input_stream.isatty() and out.isatty()
    reference = model_reference.resolve_model(model, layout, settings)
    page = StreamPrinter(out, reasons=live)
    aside = page if live else StreamPrinter(sys.stderr)
    if live:
        page.note(f"{model}: loading; /help lists the commands, Ctrl-D ends")
    start = reference.start.model_copy(update={"generate": settings.generate.model_copy(update={"labels": ()})})
    backend = open_backend(reference.model.kind, start, create_notice_callbacks(aside))
    try:
        with _allow_interrupts(live):
            _ChatLoop(backend, ChatSession(settings), page, live=live).run(ChatInput(input_stream, live=live))
    finally:
        backend.close()


@contextmanager
def _allow_interrupts(live: bool) -> Iterator[None]:
    """In a terminal, Ctrl-C stops an answer each time, where other commands ignore all signals after the first."""

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
    """Reads questions and commands. The history (arrow keys) is kept until the process ends and written nowhere."""

    def __init__(self, lines: TextIO, *, live: bool) -> None:
        self._lines, self._live = lines, live
        if live:
            import readline

            readline.set_auto_history(True)

    def next(self) -> str | None:
        """The next question or command, of one line or several; None at the end of the input. Raises
        KeyboardInterrupt."""
        line = self._line(PROMPT)
        if line is None:
            return None
        if line.startswith(FENCE):
            return self._fenced(line.removeprefix(FENCE))
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._line(MORE)
        return "\n".join([*lines, *([] if line is None else [line])])

    def _fenced(self, line: str | None) -> str:
        lines = []
        while line is not None:
            if line.endswith(FENCE):
                lines.append(line.removesuffix(FENCE))
                break
            lines.append(line)
            line = self._line(MORE)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        if self._live and self._lines is sys.stdin:
            try:
                return input(prompt)
            except EOFError:
                return None
        line = self._lines.readline()
        return line.rstrip("\r\n") if line else None


class _ChatLoop:
    """Conversations with one model."""

    def __init__(self, backend: GenerationBackend, session: ChatSession, page: StreamPrinter, *, live: bool) -> None:
        self._backend, self._session, self._page, self._live = backend, session, page, live
        self._commands: dict[str, Callable[[str], None]] = {
            "/reset": self._reset, "/system": self._system, "/retry": self._retry, "/save": self._save,
            "/help": lambda rest: self._say(HELP),
        }  # fmt: skip

    def run(self, reader: ChatInput) -> None:
        """Answer until /quit or the end of the input."""
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
            self._ask(self._session.ask(text[1:]))
        elif text.startswith("/"):
            word, _, rest = text.strip().partition(" ")
            if word not in self._commands:
                self._fail(
                    SettingsError(
                        f"{word}: unknown command; /help lists the commands, //TEXT "
                        f"asks a question that begins with a slash"
                    )
                )
            else:
                self._commands[word](rest.strip())
        elif text.strip():
            self._ask(self._session.ask(text))

    def _ask(self, question: GenerationRequest) -> None:
        partial = PartialAnswer()
        try:
            self._page.answer(self._backend.stream(question, True), partial)
        except KeyboardInterrupt:
            if not self._live:
                raise
            self._keep(partial)
            self._page.note("(stopped; the partial answer stays, /retry asks again)" if partial.answer else "(stopped)")
        except InterruptedRunError:
            raise
        except RatchetError as error:
            self._keep(partial)
            self._fail(error)
        else:
            self._ended(partial)

    def _keep(self, partial: PartialAnswer) -> None:
        """Keep a question in the conversation if it has an answer."""
        if partial.answer:
            self._session.add_answer(partial.answer)

    def _ended(self, partial: PartialAnswer) -> None:
        ended = partial.end
        if ended is None:
            self._keep(partial)
            return
        if ended.finish == "context" and not ended.tokens:
            have = "" if ended.prompt_tokens is None else f" has {ended.prompt_tokens:,} tokens, which"
            most = "the model's context" if ended.context_tokens is None else f"a context of {ended.context_tokens:,}"
            self._fail(
                DataError(
                    f"the conversation with this question{have} does not fit {most}: it was not asked, and nothing was "
                    "truncated; /reset starts a new conversation, /save FILE writes this one"
                )
            )
            return
        self._session.add_answer(partial.answer)
        if self._live:
            self._page.note(_format_figures(ended, partial.seconds))
            self._page.gap()

    def _reset(self, rest: str) -> None:
        self._session.reset()
        self._say("new conversation")

    def _system(self, rest: str) -> None:
        if rest:
            self._session.system = rest
            self._say("system message set; it applies from the next question")
        else:
            self._say("no system message" if self._session.system is None else self._session.system)

    def _retry(self, rest: str) -> None:
        question = self._session.regenerate()
        if question is None:
            self._fail(SettingsError("/retry: no question was asked yet"))
        else:
            self._ask(question)

    def _save(self, rest: str) -> None:
        try:
            if not rest:
                raise SettingsError("/save: name a file that ends in .jsonl")
            self._session.save(Path(rest))
        except SettingsError as error:
            self._fail(error)
        except OSError as error:
            self._fail(SettingsError(f"{rest}: {error.strerror}; nothing was written"))
        else:
            self._say(f"{rest}: written, {len(self._session):,} question{'s' * (len(self._session) != 1)} with answers")

    def _say(self, text: str) -> None:
        if self._live:
            self._page.note(text)

    def _fail(self, error: RatchetError) -> None:
        """Show the error; without a terminal, raise it."""
        if not self._live:
            raise error
        self._page.note(f"! {error}")


def _format_figures(ended: AnswerEnd, seconds: float) -> str:
    """Tokens, speed and context of an answer; `seconds` begin at its first token."""
    parts = []
    if ended.tokens is not None:
        parts.append(f"{ended.tokens:,} tokens")
        if ended.tokens > 1 and seconds > 0:
            parts.append(f"{(ended.tokens - 1) / seconds:,.1f} tokens/s")
        if ended.prompt_tokens is not None:
            used = f"context {ended.prompt_tokens + ended.tokens:,}"
            parts.append(used if ended.context_tokens is None else f"{used} of {ended.context_tokens:,}")
    if ended.finish != "stop":
        parts.append(ENDS.get(ended.finish, ended.finish))
    return ", ".join(parts) or "ended"
