"""A tokenizer's chat template as a function from messages to text, and the control tokens that no message may hold."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.data.conversation import Conversation, Message

OURS = ("train", "weight")
"""Fields of a message that are for us (is this turn learned from?) and not for the template."""


class TemplateRenderError(Exception):
    """The template raised for these messages; the text is its own reason, on one line."""


class ChatTemplate:
    """Writes conversations as the tokenizer's template does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def write(self, messages: Sequence[Message], tools: list[Any] | None, prompt: bool = False) -> str:
        """The text; with `prompt`, up to where the assistant begins to speak. Raises TemplateRenderError."""
        try:
            return str(self._apply([_without_training_flags(message) for message in messages], tools, prompt))
        except Exception as error:  # a template is a program: it raises what it likes
            reason = " ".join(str(error).split())
            raise TemplateRenderError(
                f"{type(error).__name__}: {reason}" if reason else type(error).__name__
            ) from error

    def write_all(self, conversations: Sequence[Conversation]) -> list[str | TemplateRenderError]:
        """The text of each, or why there is none. One call where none has tools, which is a fifth faster."""
        if not conversations or any(conversation.tools for conversation in conversations):
            return [self._write_or_why(conversation) for conversation in conversations]
        try:
            return list(
                self._apply([[_without_training_flags(m) for m in c.messages] for c in conversations], None, False)
            )
        except Exception:  # one of them is to blame: one by one it shows which, and why
            return [self._write_or_why(conversation) for conversation in conversations]

    def _write_or_why(self, conversation: Conversation) -> str | TemplateRenderError:
        try:
            return self.write(conversation.messages, conversation.tools)
        except TemplateRenderError as error:
            return error

    def _apply(self, messages: list[Any], tools: list[Any] | None, prompt: bool) -> Any:
        return self._tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt
        )


def _without_training_flags(message: Message) -> Message:
    if OURS[0] in message or OURS[1] in message:
        return {key: value for key, value in message.items() if key not in OURS}
    return message


class ControlTokens:
    """The tokens that structure a conversation. As text inside a message they would end or begin turns."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        special = {str(token.content) for token in added.values() if token.special}
        self.names = frozenset(special | {str(name) for name in tokenizer.all_special_tokens} - {""})
        self.ids = frozenset(int(tokenizer.convert_tokens_to_ids(name)) for name in self.names)
        self.pattern = re.compile(alternation_pattern(self.names))

    def find(self, conversation: Conversation) -> str | None:
        """Which control token a conversation contains as text, and in which role; None where there is none."""
        for message in conversation.messages:
            text = message.get("content")
            if len(message) > 2 or not isinstance(text, str):
                text = json.dumps(message, ensure_ascii=False)
            if found := self.pattern.search(text):
                return f"{found[0]} in a message of role {message['role']}"
        if conversation.tools and (found := self.pattern.search(json.dumps(conversation.tools, ensure_ascii=False))):
            return f"{found[0]} in the tools"
        return None


def alternation_pattern(names: Iterable[str]) -> str:
    """A regular expression that finds any of the names, the longest first.

    It is written as a prefix tree: Gemma's tokenizer has thousands of control tokens that begin alike, and a plain list
    of alternatives is tried one by one at every `<` of a text.
    """
    ordered = sorted(set(names))
    if not ordered:
        return r"(?!)"
    return _prefix_tree_pattern(ordered)


def _prefix_tree_pattern(names: list[str]) -> str:
    """The expression for sorted, different names."""
    shared = longest_shared_prefix(names[0], names[-1])
    rest = [name[len(shared) :] for name in names]
    ends_here = rest[0] == ""
    groups: dict[str, list[str]] = {}
    for name in rest[ends_here:]:
        groups.setdefault(name[0], []).append(name)
    if not groups:
        return re.escape(shared)
    branches = "|".join(_prefix_tree_pattern(group) for group in groups.values())
    return f"{re.escape(shared)}(?:{branches}){'?' if ends_here else ''}"


def longest_shared_prefix(first: str, last: str) -> str:
    """What two texts begin with, and so every text that is sorted between them."""
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


# What a chat template writes around the messages: its output with every message's text replaced by a mark.
#
# Conversations of the same structure (roles, fields that are there, tools) get the same text around their messages, so
# a
# template is taken apart once for each structure. Walking along that skeleton, every character of a conversation's
# text
# is known to be the template's or to be some message's; a template that treats a text in another way does not match,
# and
# is found out.

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields of a message that hold its reasoning, in the order in which transformers looks for them."""

_MARK = re.compile(r"slot7c1e(\d+)end")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class TextSlot:
    """A place for one text of a conversation."""

    turn: int
    kind: Literal["content", "reasoning"]


@dataclass(frozen=True)
class ConversationOutline:
    """A conversation taken apart: its structure, and the texts that fill it."""

    messages: list[Message]
    """The messages with marks instead of texts."""
    slots: list[TextSlot]
    texts: list[str]


class _TextMarker:
    """Puts marks in place of texts, and keeps the texts. Blank texts stay: templates ask whether there is any text."""

    def __init__(self) -> None:
        self.slots: list[TextSlot] = []
        self.texts: list[str] = []

    def mark(self, slot: TextSlot, text: str) -> str:
        if not text or text.isspace():
            return text
        self.slots.append(slot)
        self.texts.append(text)
        return f"slot7c1e{len(self.slots) - 1}end"

    def message(self, turn: int, message: Message) -> Message:
        marked = {key: value for key, value in message.items() if key not in OURS}
        thoughts = next((message[key] for key in REASONING if message.get(key) is not None), None)
        if isinstance(thoughts, str):
            mark = self.mark(TextSlot(turn, "reasoning"), thoughts)
            marked |= {key: mark for key in REASONING if message.get(key) is not None}
        content = message.get("content")
        if isinstance(content, list):
            marked["content"] = [self._part(turn, part) for part in content]
        elif isinstance(content, str):
            marked["content"] = self._content(turn, content, message["role"])
        return marked

    def _part(self, turn: int, part: Any) -> Any:
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return {**part, "text": self.mark(TextSlot(turn, "content"), part["text"])}
        return part

    def _content(self, turn: int, content: str, role: str) -> str:
        """Reasoning inside an answer is a text of its own: templates for reasoning models cut it off there."""
        head, closing, answer = content.partition("</think>")
        if role != "assistant" or not closing or closing in answer or "<think>" in answer:
            return self.mark(TextSlot(turn, "content"), content)
        before, opening, thoughts = head.rpartition("<think>")
        if before.strip():
            return self.mark(TextSlot(turn, "content"), content)
        marked = self.mark(TextSlot(turn, "reasoning"), thoughts)
        return before + opening + marked + closing + self.mark(TextSlot(turn, "content"), answer)


def build_outline(conversation: Conversation, only: frozenset[int] | None = None) -> ConversationOutline:
    """Take a conversation apart; with `only`, the texts of other turns stay part of the structure."""
    marker = _TextMarker()
    messages = [
        marker.message(turn, message) if only is None or turn in only else message
        for turn, message in enumerate(conversation.messages)
    ]
    return ConversationOutline(messages, marker.slots, marker.texts)


def structure_key(conversation: Conversation) -> tuple[tuple[str, ...], list[str]]:
    """What decides the skeleton of a conversation, and the texts in the order of `build_outline`; made to be fast."""
    key: list[str] = []
    texts: list[str] = []
    for turn, message in enumerate(conversation.messages):
        content = message.get("content")
        plain = isinstance(content, str) and content != "" and not content.isspace() and len(message) == 2
        if plain and not (message["role"] == "assistant" and "</think>" in str(content)):
            key.append(message["role"])
            texts.append(str(content))
        else:
            marker = _TextMarker()
            key.append(json.dumps(marker.message(turn, message), ensure_ascii=False))
            texts += marker.texts
    key.append(json.dumps(conversation.tools) if conversation.tools else "")
    return tuple(key), texts


@dataclass(frozen=True)
class LearnedSpan:
    """What is learned of one turn, between the template's words. Places are (literal, characters into it)."""

    start: tuple[int, int]
    end: tuple[int, int]
    ender: str
    """The control token that ends the turn, the last thing in the span."""
    given: str = ""
    """What the prompt already says before the answer (`<think>`): not learned where the text begins with it too."""
    thinking: bool = False
    """The prompt and what precedes the answer in training differ by a thinking block."""


@dataclass(frozen=True)
class SpanAnchor:
    """How to find a span among the tokens of a conversation, counted from the end of the span before it."""

    token: int | None
    """A control token before it; None: there is none."""
    skipped: int
    """Tokens like it that come first."""
    distance: int
    """Tokens from there to the span."""
    end: int
    """The token that ends it."""
    ends_inside: int
    """Tokens like that inside it."""


@dataclass
class TemplateSkeleton:
    """The template's words around the texts of one structure."""

    text: str
    literals: list[str]
    order: list[int]
    """The slot between each literal and the next: templates may move, repeat and leave out texts."""
    starts: list[int]
    """Where each literal begins in `text`."""
    spans: list[LearnedSpan] = field(default_factory=list)
    """What is learned, in order."""
    anchors: list[SpanAnchor] | None = None
    """How to find the spans among the tokens; None until a first row was measured."""
    ends_learned: bool = False
    """The last message is learned from."""
    right: int = 0
    wrong: int = 0
    """Rows in which the anchors held, and in which they did not."""

    @classmethod
    def of(cls, text: str) -> "TemplateSkeleton":
        """Take apart what the template wrote for an outline."""
        pieces = _MARK.split(text)
        starts = [0, *(match.end() for match in _MARK.finditer(text))]
        return cls(text, pieces[::2], [int(slot) for slot in pieces[1::2]], starts)

    @property
    def guessable(self) -> bool:
        """Whether counting tokens from the anchors is worth a try."""
        return self.anchors is not None and self.wrong <= 16 + self.right // 4

    def guessed(self, right: bool) -> None:
        """Keep count of how often the anchors hold."""
        self.right += right
        self.wrong += not right

    def align(self, text: str, texts: list[str]) -> list[int] | None:
        """Where each literal begins in the text of a conversation; None where it is not skeleton and texts alone.

        A text may have lost white space at either end, and nothing else.
        """
        at = len(self.literals[0])
        if not text.startswith(self.literals[0]):
            return None
        starts = [0]
        for slot, literal in zip(self.order, self.literals[1:], strict=True):
            filling = texts[slot]
            if text.startswith(filling, at) and text.startswith(literal, at + len(filling)):
                at += len(filling)
            elif (at := _find_trimmed_end(text, at, filling, literal)) < 0:
                return None
            starts.append(at)
            at += len(literal)
        return starts if at == len(text) else None


def _find_trimmed_end(text: str, at: int, filling: str, literal: str) -> int:
    """Where a filling that may have lost white space ends so that the literal follows; -1 where it is not there."""
    bare = filling.strip()
    lead = filling[: filling.index(bare)]
    trail = filling[len(lead) + len(bare) :]
    space = _SPACE.match(text, at)
    begin = space.end() if space else at
    if not lead.endswith(text[at:begin]) or not text.startswith(bare, begin):
        return -1
    end = begin + len(bare)
    kept = 0
    while kept < len(trail) and text[end + kept : end + kept + 1] == trail[kept]:
        kept += 1
    return next((end + k for k in range(kept, -1, -1) if text.startswith(literal, end + k)), -1)


# Where a chat template puts what the assistant has to say: from the end of the prompt to the end-of-turn token.
#
# The span of a turn is what the model must write after the generation prompt: white space, a thinking block that the
# template opens for it, reasoning, answer or tool call, and the token that ends the turn. Any template will do, with
# or
# without `{% generation %}` marks: the marks are not needed, for the spans are read off the skeleton.

_THINKING = r"(?:[<\[][^<>\[\]\s]*think[^<>\[\]\s]*[>\]]\s*|<\|channel\|?>\w+(?:<\|message\|>|\n)|<channel\|>)"
"""<think> (DeepSeek, Qwen), [THINK] (Mistral), <|START_THINKING|> (Cohere), channels (OpenAI's models, Gemma 4)."""
_GAP = re.compile(rf"\s*{_THINKING}*", re.IGNORECASE)
_GIVEN = re.compile(rf"\s*{_THINKING}+", re.IGNORECASE)
_THINKING_LAST = re.compile(rf"{_THINKING}+$", re.IGNORECASE)

_OTHER_ENDS = ("<|eom_id|>", "<|call|>", "<|end|>", "<|observation|>", "<|tool_response>")
"""What else ends a turn: Llama 3.1's tool calls, OpenAI's models, Phi; GLM and Gemma 4 stop where a tool answers."""


class UntrainableTemplateError(Exception):
    """The template cannot be learned from as it stands; the text says why, beginning with "the chat template"."""


class SpanFinder:
    """Finds what is learned in a skeleton."""

    def __init__(self, chat: ChatTemplate, control: ControlTokens, ends: Iterable[str]) -> None:
        """`ends`: control tokens that may end a turn."""
        self._chat = chat
        end = alternation_pattern(control.names & {*ends, *_OTHER_ENDS})
        self._end, self._end_soon = re.compile(f"({end})"), re.compile(rf"\s*({end})")

    def find(self, outline: ConversationOutline, tools: list[Any] | None, learned: Sequence[int]) -> TemplateSkeleton:
        """The skeleton of an outline with its spans.

        Raises:
            TemplateRenderError: the template refuses the marks.
            UntrainableTemplateError: it cannot be told what a learned turn is, or the template does not write it.
        """
        skeleton = TemplateSkeleton.of(self._chat.write(outline.messages, tools))
        if any(slot >= len(outline.slots) for slot in skeleton.order):
            raise UntrainableTemplateError("the chat template writes a text that looks like one of our own marks")
        for turn in learned:
            places = _locate_turn_texts(skeleton, outline, turn)
            if places or outline.messages[turn].get("tool_calls"):
                skeleton.spans.append(self._span(skeleton, outline, tools, turn))
                skeleton.ends_learned = turn == len(outline.messages) - 1
        return skeleton

    def _span(
        self, skeleton: TemplateSkeleton, outline: ConversationOutline, tools: list[Any] | None, turn: int
    ) -> LearnedSpan:
        places = _locate_turn_texts(skeleton, outline, turn)
        if turn > 0:
            prompt = self._prompt(outline.messages[:turn], tools)
            literal = places[0] if places else _literal_after_prompt(skeleton, prompt)
            _check_prompt(skeleton, prompt, literal, whole=turn == len(outline.messages) - 1)
            offset, given, thinking = _split_generation_header(
                skeleton.literals[literal], prompt.literals[-1], bool(places)
            )
        elif places:
            literal, given, thinking = places[0], "", False
            offset = len(skeleton.literals[literal])
        else:
            raise UntrainableTemplateError(
                "the chat template gives no prompt to a conversation that begins with a tool call"
            )
        last, begin = (places[-1] + 1, 0) if places else (literal, offset)
        ending = self._end if outline.messages[turn].get("tool_calls") else self._end_soon
        tail = skeleton.literals[last]
        found = ending.search(tail, begin) if ending is self._end else ending.match(tail, begin)
        if not found:
            raise UntrainableTemplateError(_describe_missing_end(tail[begin : begin + 40]))
        written = skeleton.literals[literal][offset:] + tail[: found.end()] if places else tail[begin : found.end()]
        if any(name not in written for name in _called_function_names(outline.messages[turn])):
            raise UntrainableTemplateError(_LOST_CALL)
        return LearnedSpan((literal, offset), (last, found.end()), found[1], given, thinking)

    def _prompt(self, messages: Sequence[Message], tools: list[Any] | None) -> TemplateSkeleton:
        """Skeleton of the text after which the assistant speaks."""
        try:
            return TemplateSkeleton.of(self._chat.write(messages, tools, prompt=True))
        except TemplateRenderError as error:
            raise UntrainableTemplateError(
                f"the chat template cannot write the prompt of an answer ({error})"
            ) from None


def _locate_turn_texts(skeleton: TemplateSkeleton, outline: ConversationOutline, turn: int) -> list[int]:
    """Where in the skeleton the turn's texts are: each once, side by side. Raises UntrainableTemplateError."""
    wanted = [i for i, slot in enumerate(outline.slots) if slot.turn == turn]
    places = [place for place, slot in enumerate(skeleton.order) if slot in wanted]
    written = [skeleton.order[place] for place in places]
    if missing := [outline.slots[i] for i in wanted if i not in written]:
        if missing[0].kind == "content":
            raise UntrainableTemplateError(_LOST_ANSWER)
        earlier = turn < len(outline.messages) - 1
        raise UntrainableTemplateError(_LOST_EARLIER_REASONING if earlier else _LOST_REASONING)
    if places and (sorted(written) != wanted or places[-1] - places[0] != len(places) - 1):
        raise UntrainableTemplateError(
            "the chat template writes an answer in several places, so it cannot be told apart"
        )
    return places


def _literal_after_prompt(skeleton: TemplateSkeleton, prompt: TemplateSkeleton) -> int:
    """The literal that follows what the prompt says last."""
    if not prompt.order:
        return 0
    return max((i + 1 for i, slot in enumerate(skeleton.order) if slot == prompt.order[-1]), default=0)


def _check_prompt(skeleton: TemplateSkeleton, prompt: TemplateSkeleton, literal: int, whole: bool) -> None:
    """Check that the literal follows the prompt's last text; with `whole`, all before it must be equal.

    Raises:
        UntrainableTemplateError: it does not.

    Earlier turns are not held to that: Mistral's template, for one, moves the system message to the last user turn.
    """
    follows = skeleton.order[:literal][-1:] == prompt.order[-1:]
    if not follows or (whole and skeleton.text[: skeleton.starts[literal]] != prompt.text[: prompt.starts[-1]]):
        raise UntrainableTemplateError(
            "the chat template writes the prompt differently once the answer follows, so the model would be trained on "
            "prompts that it never gets; use a template that only appends"
        )


def _split_generation_header(header: str, prompt: str, text_follows: bool) -> tuple[int, str, bool]:
    """How much of the template's words before an answer is the prompt's, and what the prompt says beyond them.

    Args:
        header: what the template writes between the text before and the answer; for a tool call, the call too.
        prompt: what it writes after the same text with add_generation_prompt.
        text_follows: the header ends where a text of the answer begins.

    Returns:
        Characters of the header, the further words of the prompt, and whether a thinking block sets the two apart.

    Raises:
        UntrainableTemplateError: they differ in more than white space or the beginning of a thinking block.
    """
    if not text_follows:
        if header.startswith(prompt):
            return len(prompt), "", False
    elif header.startswith(prompt) and _GAP.fullmatch(header, len(prompt)):
        return len(prompt), "", bool(header[len(prompt) :].strip())
    elif prompt.startswith(header):
        given = prompt[len(header) :]
        if _GIVEN.fullmatch(given) or (given.isspace() and _THINKING_LAST.search(header)):
            return len(header), given, True
    opened = len(_THINKING_LAST.sub("", prompt))
    shared = longest_shared_prefix(header, prompt)
    if len(shared) >= opened and (_GAP.fullmatch(header, opened) or not text_follows):
        both = _GAP.match(shared, opened)  # the prompt opens a thinking block, and the text has an empty one, or none
        return both.end() if both else opened, "", True
    raise UntrainableTemplateError(
        f"the chat template ends a prompt with {prompt[-60:]!r} (add_generation_prompt) and in training writes "
        f"{header[-60:]!r} there, so the model would be asked otherwise than it was trained; make them equal"
    )


def _called_function_names(message: Message) -> list[str]:
    """Names of the functions that a message calls."""
    calls = [call.get("function") or call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return [str(call.get("name", "")) for call in calls if isinstance(call, dict)]


def _describe_missing_end(written: str) -> str:
    return (
        f"the chat template writes {written!r} after an answer where a control token must end the turn, or the model "
        "never learns to stop; write {{ eos_token }} right after the answer"
    )


_LOST_REASONING = (
    "the chat template leaves the reasoning of an answer out, so the model would unlearn to reason; use a template "
    "that keeps it, or take it out of the rows"
)
_LOST_EARLIER_REASONING = (
    "the chat template leaves the reasoning of an earlier answer out, so the model would unlearn to reason; set "
    "prepare.turns: last, or use a template that keeps it"
)
_LOST_ANSWER = "the chat template leaves an answer out or rewrites it, so it cannot be learned; use another template"
_LOST_CALL = "the chat template leaves a tool call out; use a template that writes tool calls, or rows without"


def learned_turns(messages: Sequence[Message], turns: str) -> list[int]:
    """Indices of the assistant's messages that are learned from (see prepare.turns).

    A flag that says no (`train: false`, OpenAI's `weight: 0`) holds whatever `turns` is.
    """
    spoken = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if turns == "flagged":
        return [t for t in spoken if messages[t].get("train") is True or messages[t].get("weight") == 1]
    chosen = spoken[-1:] if turns == "last" else spoken
    return [t for t in chosen if messages[t].get("train") is not False and messages[t].get("weight") != 0]
