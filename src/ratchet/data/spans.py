"""Where a chat template puts what the assistant has to say: from the end of the prompt to the end-of-turn token.

The span of a turn is what the model must write after the generation prompt: white space, a thinking block that the
template opens for it, reasoning, answer or tool call, and the token that ends the turn. Any template will do, with or without
`{% generation %}` marks: the marks are not needed, for the spans are read off the skeleton.
"""

import re
from collections.abc import Sequence
from typing import Any

from ratchet.data.chat import ChatTemplate, ControlTokens, UnwritableError, any_of
from ratchet.data.conversation import Message, text_of
from ratchet.data.skeleton import REASONING, Outline, Skeleton, Span

_THINKING = r"(?:[<\[][^<>\[\]\s]*think[^<>\[\]\s]*[>\]]\s*|<\|channel\|>\w+<\|message\|>\s*)"
"""<think> (DeepSeek, Qwen), [THINK] (Mistral), <|START_THINKING|> (Cohere), <|channel|>final<|message|> (OpenAI)."""
_GAP = re.compile(rf"\s*{_THINKING}*", re.IGNORECASE)
_GIVEN = re.compile(rf"\s*{_THINKING}+", re.IGNORECASE)
_AFTER_THINKING = re.compile(rf".*{_THINKING}$", re.IGNORECASE | re.DOTALL)

_OTHER_ENDS = ("<|eom_id|>", "<|call|>", "<|end|>")
"""Ends of turns that do not end the conversation: Llama 3.1 after a tool call, OpenAI's models and Phi."""


class UntrainableError(Exception):
    """The template cannot be learned from as it stands; the text says why, beginning with "the chat template"."""


class SpanFinder:
    """Finds what is learned in a skeleton."""

    def __init__(self, chat: ChatTemplate, control: ControlTokens, bos: str | None, ends: Sequence[str] = ()) -> None:
        """`ends` are the tokens that may end a turn; none: any control token but the one that begins the text."""
        self._chat = chat
        self._ends = sorted((control.names & {*ends, *_OTHER_ENDS}) if ends else control.names - {bos})
        self._end = re.compile(any_of(self._ends))
        self._end_soon = re.compile(rf"\s*({any_of(self._ends)})")

    def find(self, outline: Outline, tools: list[Any] | None, learned: Sequence[int]) -> Skeleton:
        """The skeleton of an outline with its spans.

        Raises:
            UnwritableError: the template refuses the marks.
            UntrainableError: it cannot be told what a learned turn is, or the template does not write it.
        """
        skeleton = Skeleton.of(self._chat.write(outline.messages, tools))
        if any(slot >= len(outline.slots) for slot in skeleton.order):
            raise UntrainableError("the chat template writes a text that looks like one of our own marks")
        search = _Search(self, skeleton, outline, tools)
        skeleton.spans = [span for turn in learned if (span := search.span(turn))]
        return skeleton

    def end_after(self, text: str, start: int, stop: int) -> tuple[int, str] | None:
        """End and name of the first token before `stop` that may end a turn."""
        found = self._end.search(text, start, stop)
        return (found.end(), found[0]) if found else None

    def end_at(self, text: str, start: int) -> tuple[int, str] | None:
        """The same where nothing but white space may come before it."""
        found = self._end_soon.match(text, start)
        return (found.end(), found[1]) if found else None

    def prompt(self, messages: Sequence[Message], tools: list[Any] | None) -> Skeleton:
        """Skeleton of the text after which the assistant speaks. Raises UntrainableError."""
        try:
            return Skeleton.of(self._chat.write(messages, tools, prompt=True))
        except UnwritableError as error:
            raise UntrainableError(f"the chat template cannot write the prompt of an answer ({error})") from None


class _Search:
    """The search in one skeleton."""

    def __init__(self, finder: SpanFinder, skeleton: Skeleton, outline: Outline, tools: list[Any] | None) -> None:
        self._finder, self._skeleton, self._outline, self._tools = finder, skeleton, outline, tools

    def span(self, turn: int) -> Span | None:
        """What is learned of a turn; None where the assistant says nothing there."""
        message = self._outline.messages[turn]
        places = self._places(turn)
        if not places and not message.get("tool_calls"):
            return None
        text, starts, literals = self._skeleton.text, self._skeleton.starts, self._skeleton.literals
        if places:
            first, last = places[0], places[-1]
            begin, after = starts[first] + len(literals[first]), starts[last + 1]
        else:
            begin = after = None
        begin, given, thinking = self._begin(turn, begin)
        following = last + 1 if places else self._skeleton.place(begin)[0]
        stop = starts[following] + len(literals[following])
        if message.get("tool_calls"):
            end = self._finder.end_after(text, begin if after is None else after, stop)
        else:
            end = self._finder.end_at(text, after or begin)
        if end is None or end[0] > stop:
            raise UntrainableError(self._no_end(after or begin, stop))
        return Span(turn, self._skeleton.place(begin), self._skeleton.place(end[0]), end[1], given, thinking)

    def _no_end(self, after: int, stop: int) -> str:
        written = self._skeleton.text[after:stop][:40]
        return (
            f"the chat template writes {written!r} after an answer instead of a control token that ends the turn, so a model "
            "trained with it would never learn to stop; write {{ eos_token }} right after the answer"
        )

    def _places(self, turn: int) -> list[int]:
        """Which of the skeleton's slots are the turn's, all of them, once and side by side. Raises UntrainableError."""
        slots = self._outline.slots
        places = [i for i, slot in enumerate(self._skeleton.order) if slots[slot].turn == turn]
        wanted = [i for i, slot in enumerate(slots) if slot.turn == turn]
        written = [self._skeleton.order[i] for i in places]
        if missing := [slots[i] for i in wanted if i not in written]:
            raise UntrainableError(_lost_reasoning() if missing[0].kind == "reasoning" else _lost_answer())
        if sorted(written) != wanted or places != list(range(places[0], places[0] + len(places)) if places else ()):
            raise UntrainableError("the chat template writes an answer in several places, so it cannot be told apart")
        return places

    def _begin(self, turn: int, begin: int | None) -> tuple[int, str, bool]:
        """Where the model begins to speak, what the prompt says more than the text, and whether thinking sets them apart."""
        if turn == 0:
            if begin is None:
                raise UntrainableError("the chat template gives no prompt to a conversation that begins with a tool call")
            return begin, "", False
        prompt = self._finder.prompt(self._outline.messages[:turn], self._tools)
        from_here, header = self._before(turn, prompt, begin)
        tail = prompt.literals[-1]
        if header.startswith(tail) and (begin is None or _GAP.fullmatch(header, len(tail))):
            gap = header[len(tail) :] if begin is not None else ""
            return from_here + len(tail), "", bool(gap.strip())
        given = tail.removeprefix(header) if begin is not None else ""
        if begin is not None and tail.startswith(header):
            if _GIVEN.fullmatch(given):
                return begin, given, True
            if given.isspace() and _AFTER_THINKING.match(header):
                return begin, given, True
        if begin is None and (opened := re.search(rf"{_THINKING}+$", tail, re.IGNORECASE)):
            if header.startswith(tail[: opened.start()]):
                return from_here + opened.start(), "", True
        raise UntrainableError(
            f"the chat template ends the prompt with {tail[-60:]!r} (add_generation_prompt) where the text has "
            f"{header[-60:]!r} before the answer, so a model would be asked otherwise than it was trained; make them equal"
        )

    def _before(self, turn: int, prompt: Skeleton, begin: int | None) -> tuple[int, str]:
        """Where the words before a turn begin, and these words; checks that the prompt is what the text begins with."""
        skeleton = self._skeleton
        limit = len(skeleton.text) if begin is None else begin
        last = prompt.order[-1] if prompt.order else None
        from_here = 0
        for slot, start in zip(skeleton.order, skeleton.starts[1:], strict=True):
            if slot == last and start <= limit:
                from_here = start
        literal = skeleton.place(from_here)[0]
        stop = skeleton.starts[literal] + len(skeleton.literals[literal])
        unlike = last is not None and from_here == 0
        is_last = turn == len(self._outline.messages) - 1
        if is_last and skeleton.text[:from_here] != prompt.text[: prompt.starts[-1]]:
            unlike = True
        if unlike or (begin is not None and stop != begin):
            raise UntrainableError(
                "the chat template writes the prompt differently once the answer follows, so the model would be trained on "
                "prompts that it never gets; use a template that only appends"
            )
        return from_here, skeleton.text[from_here:stop]


def _lost_reasoning() -> str:
    return (
        "the chat template leaves the reasoning of an answer out, so training would teach the model not to reason; set "
        f"prepare.turns: last if it keeps the last one, or use a template that writes {' or '.join(REASONING[:2])}"
    )


def _lost_answer() -> str:
    return "the chat template leaves an answer out, or rewrites it; a template that rewrites answers cannot be trained on"


def learned_turns(messages: Sequence[Message], turns: str) -> list[int]:
    """Indices of the assistant's messages that are learned from (see prepare.turns)."""
    spoken = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if turns == "last":
        return spoken[-1:]
    if turns == "flagged":
        return [t for t in spoken if messages[t].get("train") is True or messages[t].get("weight") == 1]
    return spoken


def preview(message: Message) -> str:
    """The beginning of an answer, for error messages."""
    return repr(text_of(message)[:60])
