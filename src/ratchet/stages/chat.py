"""`ratchet chat`: a conversation with a model in the terminal. torch is loaded only together with a model.

A chat does not store reasoning, because chat templates omit the reasoning of earlier turns.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from ratchet.config.settings import Settings
from ratchet.config.units import format_count
from ratchet.console.stream_printer import PartialAnswer, StreamPrinter
from ratchet.data.conversation import Conversation, Message, replace_surrogates
from ratchet.data.tokenization import merge_system_messages
from ratchet.errors import EXIT_INTERRUPTED, DataError, InterruptedRunError, RatchetError, SettingsError
from ratchet.inference.backend import AnswerEnd, BackendCallbacks, GenerationBackend, GenerationRequest
from ratchet.inference.backend_factory import open_backend
from ratchet.inference.prompts import Prompt
from ratchet.inference.spec import split_reasoning
from ratchet.runs.signals import list_stop_signals
from ratchet.stages.generate import ENDS, create_notice_callbacks, resolve_model
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import digests, files

PROMPT, CONTINUATION_PROMPT = "> ", ". "
FENCE = '"""'
"""Text that begins and ends a question of several lines."""
FAILED_ENDS = ("memory", "invalid", "filtered")
"""Ends of an answer that failed. Without text, it is reported as an error and not kept."""
HELP = """/reset        start a new conversation; the system message stays
/system TEXT  set the system message; without TEXT: show it
/retry        remove the last answer and ask again
/save FILE    write the conversation as messages, JSONL
/help         show this list
/quit         end (also Ctrl-D)
To write several lines, end a line with a backslash, or put the lines between two \"""
To ask a text that begins with a slash, write //TEXT. Ctrl-C stops an answer."""


class ChatSession:
    """A chat: user messages with their answers.

    Args:
        settings: generate.system_prompt, generate.reasoning_tags and prepare.system apply.
    """

    def __init__(self, settings: Settings) -> None:
        self.system = settings.generate.system_prompt
        """System message of the next request, or None."""
        self._tags = settings.generate.reasoning_tags
        self._merge_system = settings.prepare.system == "merge"
        self._turns: list[tuple[str, str]] = []
        self._message, self._is_answered, self._sample = "", False, 0
        self._saved: set[Path] = set()

    def ask(self, text: str) -> GenerationRequest:
        """Return the request for an answer to a new user message."""
        self._message, self._is_answered, self._sample = replace_surrogates(text), False, 0
        return self._build_request()

    def regenerate(self) -> GenerationRequest | None:
        """Remove the last answer and return a request for another answer; None if there is no user message."""
        if not self._message:
            return None
        if self._is_answered:
            self._turns.pop()
        self._is_answered = False
        self._sample += 1
        return self._build_request()

    def add_answer(self, text: str) -> None:
        """Add the answer to the last message. Its reasoning is removed, even if the begin tag is missing."""
        self._turns.append((self._message, split_reasoning(text, self._tags).answer))
        self._is_answered = True

    def reset(self) -> None:
        """Remove all turns. The system message stays."""
        self._turns, self._message, self._is_answered = [], "", False

    def __len__(self) -> int:
        return len(self._turns)

    def _build_request(self) -> GenerationRequest:
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


class Chat:
    """A conversation of a program with a model, which is in memory until `close` or the end of a `with` statement."""

    def __init__(
        self, project: Project, model: str = "adapter", on_progress: Callable[[str], None] = ignore_progress
    ) -> None:
        """Load the model; the arguments are those of `ratchet.chat`."""

        def forward_notice(kind: str, data: Mapping[str, Any]) -> None:
            if kind == "notice":
                on_progress(data["text"])

        self._session = ChatSession(project.settings)
        self._is_closed = False
        self._backend = _open_model(project, model, BackendCallbacks(lambda: None, forward_notice, lambda _: None))

    def ask(self, text: str) -> str:
        """Return the answer to a message, without reasoning. The conversation continues with both.

        Raises:
            DataError: the conversation with this message does not fit the model's context; it was not asked.
            SettingsError: the chat is closed, or `text` is not a string.
            RatchetError: the model does not answer, runs out of memory or computes NaN, or the server withholds the
                answer.
        """
        if not isinstance(text, str):
            raise SettingsError(f"Chat.ask: found {text!r}; expected a string")
        if self._is_closed:
            raise SettingsError("Chat.ask: the chat is closed; begin another one with ratchet.chat")
        partial = PartialAnswer()
        with closing(self._backend.stream(self._session.ask(text), True)) as stream:
            for item in stream:
                if isinstance(item, AnswerEnd):
                    partial.end = item
                elif not item.is_reasoning:
                    partial.pieces.append(item.text)
        if partial.end is not None and partial.end.finish == "context" and not partial.end.tokens:
            raise DataError(f"{_describe_overflow(partial.end)}: it was not asked, and nothing was truncated")
        if not partial.answer and partial.end is not None and partial.end.finish in FAILED_ENDS:
            raise RatchetError(f"no answer: {ENDS[partial.end.finish]}")
        self._session.add_answer(partial.answer)
        return partial.answer

    def close(self) -> None:
        """Release the model's memory."""
        self._is_closed = True
        self._backend.close()

    def __enter__(self) -> "Chat":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _open_model(project: Project, model: str, callbacks: BackendCallbacks) -> GenerationBackend:
    reference = resolve_model(project, model)
    generate = project.settings.generate.model_copy(update={"labels": ()})
    return open_backend(reference.model.kind, reference.start.model_copy(update={"generate": generate}), callbacks)


def _describe_overflow(end: AnswerEnd) -> str:
    """Describe a question that does not fit the context."""
    size = "" if end.prompt_tokens is None else f" has {end.prompt_tokens:,} tokens, which"
    limit = "the model's context" if end.context_tokens is None else f"a context of {end.context_tokens:,}"
    return f"the conversation with this question{size} does not fit {limit}"


def chat(project: Project, model: str = "adapter", streams: tuple[TextIO, TextIO] | None = None) -> None:
    """Read questions and show each answer while it is generated, until the input ends.

    Args:
        project: section generate of its settings defines the sampling.
        model: a value of `ratchet generate --model`.
        streams: input and output; None: standard input and output. Unless both are terminals, each line is a question,
            only answers are written, and an error ends the chat.

    Raises:
        InputError: the model cannot be used; without a terminal also: a question is too long.
        RatchetError: the model does not answer; only without a terminal.
    """
    settings = project.settings
    input_stream, out = streams or (sys.stdin, sys.stdout)
    is_live = input_stream.isatty() and out.isatty()
    page = StreamPrinter(out, reasons=is_live)
    notice_page = page if is_live else StreamPrinter(sys.stderr)
    if is_live:
        page.note(f"{model}: loading; /help lists the commands, Ctrl-D ends")
    backend = _open_model(project, model, create_notice_callbacks(notice_page))
    try:
        if is_live:
            import readline  # its history (arrow keys) is kept until the process ends, and in no file

            readline.set_auto_history(True)
        with _allow_interrupts() if is_live else nullcontext():
            _ChatLoop(backend, ChatSession(settings), page, live=is_live).run(input_stream)
    finally:
        backend.close()


@contextmanager
def _allow_interrupts() -> Iterator[None]:
    """Let every Ctrl-C in a terminal stop an answer. Other commands ignore all stop signals after the first."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(EXIT_INTERRUPTED)

    original_actions = {number: signal.getsignal(number) for number in list_stop_signals()}
    for number in original_actions:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else end)
    try:
        yield
    finally:
        for number, action in original_actions.items():
            signal.signal(number, action)


def _read_question(lines: TextIO, is_live: bool) -> str | None:
    """Read the next question or command, of one or several lines; None at the end of the input.

    Raises KeyboardInterrupt.
    """

    def read_line(prompt: str) -> str | None:
        if is_live and lines is sys.stdin:
            try:
                return input(prompt)
            except EOFError:
                return None
        line = lines.readline()
        return line.rstrip("\r\n") if line else None

    line = read_line(PROMPT)
    if line is None:
        return None
    earlier: list[str] = []
    if line.startswith(FENCE):
        line = line.removeprefix(FENCE)
        while line is not None and not line.endswith(FENCE):
            earlier.append(line)
            line = read_line(CONTINUATION_PROMPT)
        return "\n".join([*earlier, (line or "").removesuffix(FENCE)]).strip("\n")
    while line is not None and line.endswith("\\"):
        earlier.append(line[:-1])
        line = read_line(CONTINUATION_PROMPT)
    return "\n".join(earlier if line is None else [*earlier, line])


class _ChatLoop:
    """Takes the user's input in turn: asks the model a question, or runs a command."""

    def __init__(self, backend: GenerationBackend, session: ChatSession, page: StreamPrinter, *, live: bool) -> None:
        self._backend, self._session, self._page, self._live = backend, session, page, live

    def run(self, lines: TextIO) -> None:
        """Answer until /quit or the end of the input."""
        while True:
            try:
                text = _read_question(lines, self._live)
            except KeyboardInterrupt:
                if not self._live:
                    raise
                self._page.note("\n(Ctrl-D ends)")
                continue
            if text is None:
                if self._live:
                    self._page.gap()  # so that the shell's prompt begins on a new line
                return
            if text.strip() == "/quit":
                return
            if any("\udc80" <= character <= "\udcff" for character in text):  # bytes that Python could not decode
                self._fail(DataError("the question is not UTF-8; convert it"))
                continue
            if text.startswith("//"):
                self._ask(self._session.ask(text[1:]))
            elif text.startswith("/"):
                word, _, rest = text.strip().partition(" ")
                self._run_command(word, rest.strip())
            elif text.strip():
                self._ask(self._session.ask(text))

    def _run_command(self, word: str, rest: str) -> None:
        session = self._session
        if word == "/help":
            self._page.note(HELP)
        elif word == "/reset":
            session.reset()
            self._print_note("new conversation")
        elif word == "/system" and rest:
            session.system = rest
            self._print_note("system message set; it applies from the next question")
        elif word == "/system":
            self._print_note("no system message" if session.system is None else session.system)
        elif word == "/retry":
            if (request := session.regenerate()) is None:
                self._fail(SettingsError("/retry: no question was asked yet"))
            else:
                self._ask(request)
        elif word == "/save":
            self._save(rest)
        else:
            advice = "/help lists the commands, //TEXT asks a question that begins with a slash"
            self._fail(SettingsError(f"{word}: unknown command; {advice}"))

    def _ask(self, request: GenerationRequest) -> None:
        partial = PartialAnswer()
        try:
            self._page.answer(self._backend.stream(request, True), partial)
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
            self._finish_answer(partial)

    def _keep(self, partial: PartialAnswer) -> None:
        """Keep the question and the partial answer in the conversation if the answer is not empty."""
        if partial.answer:
            self._session.add_answer(partial.answer)

    def _finish_answer(self, partial: PartialAnswer) -> None:
        end = partial.end
        if end is None:
            self._keep(partial)
        elif end.finish == "context" and not end.tokens:
            text = f"{_describe_overflow(end)}: it was not asked, and nothing was truncated"
            self._fail(DataError(f"{text}; /reset starts a new conversation, /save FILE writes this one"))
        elif end.finish in FAILED_ENDS and not partial.answer:
            self._fail(RatchetError(f"no answer: {ENDS[end.finish]}"))
        else:
            self._session.add_answer(partial.answer)
            if self._live:
                self._page.note(_format_figures(end, partial.seconds))
                self._page.gap()

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
            self._print_note(f"{rest}: written, {format_count(len(self._session), 'question')} with answers")

    def _print_note(self, text: str) -> None:
        if self._live:
            self._page.note(text)

    def _fail(self, error: RatchetError) -> None:
        """Show the error; without a terminal, raise the error."""
        if not self._live:
            raise error
        self._page.note(f"! {error}")


def _format_figures(end: AnswerEnd, seconds: float) -> str:
    """Format tokens, speed and context of an answer; `seconds` is the time since its first token."""
    parts = []
    if end.tokens is not None:
        parts.append(f"{end.tokens:,} tokens")
        if end.tokens > 1 and seconds > 0:
            parts.append(f"{(end.tokens - 1) / seconds:,.1f} tokens/s")
        if end.prompt_tokens is not None:
            used = f"context {end.prompt_tokens + end.tokens:,}"
            parts.append(used if end.context_tokens is None else f"{used} of {end.context_tokens:,}")
    if end.finish != "stop":
        parts.append(ENDS.get(end.finish, end.finish))
    return ", ".join(parts) or "ended"
