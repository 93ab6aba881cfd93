"""Renders conversations with a tokenizer's chat template, and finds the text spans that are trained on."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ratchet.data.conversation import Conversation, Message

TRAINING_FLAGS = ("train", "weight")
"""Message fields that select the turns to train on; the template does not get them."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Message fields with the reasoning, in the order in which transformers looks for them."""

_MARK = re.compile(r"slot7c1e(\d+)end")
_SPACE = re.compile(r"\s*")

_THINKING = r"(?:[<\[][^<>\[\]\s]*think[^<>\[\]\s]*[>\]]\s*|<\|channel\|?>\w+(?:<\|message\|>|\n)|<channel\|>)"
"""<think> (DeepSeek, Qwen), [THINK] (Mistral), <|START_THINKING|> (Cohere), channels (OpenAI's models, Gemma 4)."""
_THINKING_GAP = re.compile(rf"\s*{_THINKING}*", re.IGNORECASE)
_THINKING_PREFIX = re.compile(rf"\s*{_THINKING}+", re.IGNORECASE)
_THINKING_SUFFIX = re.compile(rf"{_THINKING}+$", re.IGNORECASE)

_OTHER_END_TOKENS = ("<|eom_id|>", "<|call|>", "<|end|>", "<|observation|>", "<|tool_response>")
"""Tokens that end a turn in addition to the tokenizer's own end token: after tool calls of Llama 3.1, in OpenAI's
models and Phi, and before tool results in GLM and Gemma 4."""

_LOST_REASONING = (
    "the chat template omits the reasoning of an answer, so the model would be trained to answer without reasoning; "
    "use a template that keeps it, or remove it from the rows"
)
_LOST_EARLIER_REASONING = (
    "the chat template omits the reasoning of an earlier answer, so the model would be trained to answer without "
    "reasoning; set prepare.turns: last, or use a template that keeps it"
)
_LOST_ANSWER = "the chat template omits or rewrites an answer, so it cannot be trained on; use another template"
_LOST_CALL = "the chat template omits a tool call; use a template that writes tool calls, or rows without tool calls"


class TemplateRenderError(Exception):
    """Error for messages for which the template raised an exception; its text has the exception on one line."""


class ChatTemplate:
    """Chat template of a tokenizer, which renders conversations as text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def render(self, messages: Sequence[Message], tools: list[Any] | None, prompt: bool = False) -> str:
        """Render messages as text, or as a prompt for the next assistant turn. Raises TemplateRenderError."""
        try:
            return str(self._apply([_without_training_flags(message) for message in messages], tools, prompt))
        except Exception as error:  # a template is a program, which may raise any exception
            reason = " ".join(str(error).split())
            raise TemplateRenderError(
                f"{type(error).__name__}: {reason}" if reason else type(error).__name__
            ) from error

    def render_all(self, conversations: Sequence[Conversation]) -> list[str | TemplateRenderError]:
        """Render each conversation; the result is its text, or the error of the template.

        If no conversation has tools, a single call renders all of them, which is 20 % faster.
        """
        if not conversations or any(conversation.tools for conversation in conversations):
            return [self._render_or_error(conversation) for conversation in conversations]
        try:
            return list(
                self._apply([[_without_training_flags(m) for m in c.messages] for c in conversations], None, False)
            )
        except Exception:  # rendering one by one finds the conversation that fails
            return [self._render_or_error(conversation) for conversation in conversations]

    def _render_or_error(self, conversation: Conversation) -> str | TemplateRenderError:
        try:
            return self.render(conversation.messages, conversation.tools)
        except TemplateRenderError as error:
            return error

    def _apply(self, messages: list[Any], tools: list[Any] | None, prompt: bool) -> Any:
        return self._tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt
        )


def _without_training_flags(message: Message) -> Message:
    if TRAINING_FLAGS[0] in message or TRAINING_FLAGS[1] in message:
        return {key: value for key, value in message.items() if key not in TRAINING_FLAGS}
    return message


class ControlTokens:
    """The tokens that structure a conversation. If a message contains one as text, it would begin or end a turn."""

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
        special = {str(token.content) for token in added.values() if token.special}
        self.names = frozenset(special | {str(name) for name in tokenizer.all_special_tokens} - {""})
        self.ids = frozenset(int(tokenizer.convert_tokens_to_ids(name)) for name in self.names)
        self.pattern = re.compile(alternation_pattern(self.names))

    def find(self, conversation: Conversation) -> str | None:
        """Describe the first control token that a conversation contains as text; None if it contains none."""
        for message in conversation.messages:
            text = message.get("content")
            if len(message) > 2 or not isinstance(text, str):
                text = json.dumps(message, ensure_ascii=False)
            if match := self.pattern.search(text):
                return f"{match[0]} in a message of role {message['role']}"
        if conversation.tools and (match := self.pattern.search(json.dumps(conversation.tools, ensure_ascii=False))):
            return f"{match[0]} in the tools"
        return None


def alternation_pattern(names: Iterable[str]) -> str:
    """Build a regular expression that matches any of the names, longest first.

    The expression is a prefix tree, because Gemma's tokenizer has thousands of control tokens with the same beginning.
    With a plain list of alternatives, `re` would try them one by one at every `<` of a text.
    """
    ordered = sorted(set(names))
    if not ordered:
        return r"(?!)"
    return _prefix_tree_pattern(ordered)


def _prefix_tree_pattern(names: list[str]) -> str:
    """Build the expression for sorted, distinct names."""
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
    """Return the longest common prefix of two texts. All texts that are sorted between the two share it."""
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


# ----- Template skeletons
#
# A skeleton is the template's output with a mark in place of every message text. Conversations of the same structure
# (roles, present fields, tools) have the same skeleton, so the template is analysed once per structure. An alignment of
# a conversation's text with the skeleton assigns every character to the template or to a message. If the template
# changes a message text, the alignment fails.


@dataclass(frozen=True)
class TextSlot:
    """The position of one text in a conversation."""

    turn: int
    kind: Literal["content", "reasoning"]


@dataclass(frozen=True)
class ConversationOutline:
    """A conversation split into its structure and its texts."""

    messages: list[Message]
    """The messages with marks in place of texts."""
    slots: list[TextSlot]
    texts: list[str]


class _TextMarker:
    """Replacement of texts by marks; the texts are stored. Blank texts stay, because templates test for empty texts."""

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
        marked = {key: value for key, value in message.items() if key not in TRAINING_FLAGS}
        thoughts = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
        if isinstance(thoughts, str):
            mark = self.mark(TextSlot(turn, "reasoning"), thoughts)
            marked |= {key: mark for key in REASONING_KEYS if message.get(key) is not None}
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
        """Mark a content. Reasoning in an answer gets its own mark, because templates may remove it."""
        head, closing, answer = content.partition("</think>")
        if role != "assistant" or not closing or closing in answer or "<think>" in answer:
            return self.mark(TextSlot(turn, "content"), content)
        before, opening, thoughts = head.rpartition("<think>")
        if before.strip():
            return self.mark(TextSlot(turn, "content"), content)
        marked = self.mark(TextSlot(turn, "reasoning"), thoughts)
        return before + opening + marked + closing + self.mark(TextSlot(turn, "content"), answer)


def build_outline(conversation: Conversation, only: frozenset[int] | None = None) -> ConversationOutline:
    """Split a conversation into structure and texts. With `only`, texts of all other turns stay in the structure."""
    marker = _TextMarker()
    messages = [
        marker.message(turn, message) if only is None or turn in only else message
        for turn, message in enumerate(conversation.messages)
    ]
    return ConversationOutline(messages, marker.slots, marker.texts)


def structure_key(conversation: Conversation) -> tuple[tuple[str, ...], list[str]]:
    """Return the key of a conversation's structure, and its texts in the order of `build_outline`, but faster."""
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
class TrainedSpan:
    """The trained part of one turn in a skeleton. Positions are (index of the literal, offset in characters in it)."""

    start: tuple[int, int]
    end: tuple[int, int]
    end_token: str
    """The control token that ends the turn; the span ends with it."""
    prompt_prefix: str = ""
    """Text before the answer that the prompt already contains (`<think>`); it is not trained on."""
    has_thinking_gap: bool = False
    """Whether the text before the answer differs between prompt and training by a thinking block."""


@dataclass(frozen=True)
class SpanAnchor:
    """The position of a span among the tokens of a conversation, relative to the end of the previous span."""

    token: int | None
    """The nearest control token before the span; None if there is none."""
    occurrence: int
    """Number of earlier occurrences of `token` to skip."""
    distance: int
    """Number of tokens from `token` to the span, or from the end of the previous span if `token` is None."""
    end_token: int
    """The token that ends the span."""
    end_tokens_inside: int
    """Number of occurrences of `end_token` inside the span."""


@dataclass
class TemplateSkeleton:
    """The template's output for one structure: literals around the texts."""

    text: str
    literals: list[str]
    order: list[int]
    """Index of the slot after each literal except the last; templates may reorder, repeat and omit texts."""
    starts: list[int]
    """Position of each literal in `text`."""
    spans: list[TrainedSpan] = field(default_factory=list)
    """The trained spans, in order."""
    anchors: list[SpanAnchor] | None = None
    """Positions of the spans among the tokens; None until the first row is tokenized with offsets."""
    last_turn_trained: bool = False
    """Whether the last message is trained on."""
    anchor_hits: int = 0
    anchor_misses: int = 0
    """`anchor_hits` is the number of rows in which the anchors were correct, `anchor_misses` the number
    of rows in which they were not."""

    @classmethod
    def from_text(cls, text: str) -> "TemplateSkeleton":
        """Split the rendered text of an outline at its marks."""
        pieces = _MARK.split(text)
        starts = [0, *(match.end() for match in _MARK.finditer(text))]
        return cls(text, pieces[::2], [int(slot) for slot in pieces[1::2]], starts)

    @property
    def anchors_reliable(self) -> bool:
        """Whether the anchors exist and are correct often enough to use them."""
        return self.anchors is not None and self.anchor_misses <= 16 + self.anchor_hits // 4

    def record_anchor_result(self, is_correct: bool) -> None:
        """Count how often the anchors are correct."""
        self.anchor_hits += is_correct
        self.anchor_misses += not is_correct

    def align(self, text: str, texts: list[str]) -> list[int] | None:
        """Return the position of each literal in a conversation's text; None if the text does not fit the skeleton.

        The text fits even if the template removed white space at either end of a message text.
        """
        position = len(self.literals[0])
        if not text.startswith(self.literals[0]):
            return None
        starts = [0]
        for slot, literal in zip(self.order, self.literals[1:], strict=True):
            message_text = texts[slot]
            if text.startswith(message_text, position) and text.startswith(literal, position + len(message_text)):
                position += len(message_text)
            elif (position := _find_trimmed_end(text, position, message_text, literal)) < 0:
                return None
            starts.append(position)
            position += len(literal)
        return starts if position == len(text) else None


def _find_trimmed_end(text: str, position: int, message_text: str, literal: str) -> int:
    """Return the end of a message text that the template wrote without some of its outer white space.

    The literal must follow this end. If it follows nowhere, the result is -1.
    """
    bare = message_text.strip()
    lead = message_text[: message_text.index(bare)]
    trail = message_text[len(lead) + len(bare) :]
    space = _SPACE.match(text, position)
    begin = space.end() if space else position
    if not lead.endswith(text[position:begin]) or not text.startswith(bare, begin):
        return -1
    end = begin + len(bare)
    kept = 0
    while kept < len(trail) and text[end + kept : end + kept + 1] == trail[kept]:
        kept += 1
    return next((end + k for k in range(kept, -1, -1) if text.startswith(literal, end + k)), -1)


# ----- Trained spans
#
# The trained span of a turn is the text that the model must generate after the generation prompt: white space, a
# thinking block that the template opens for it, reasoning, answer or tool calls, and the token that ends the turn.
# Spans are found with the skeleton, so the template needs no `{% generation %}` marks.


class UntrainableTemplateError(Exception):
    """Error for a template that cannot be used for training. The text is the reason and begins "the chat template"."""


class SpanFinder:
    """Finder of the trained spans of a skeleton."""

    def __init__(self, chat: ChatTemplate, control: ControlTokens, ends: Iterable[str]) -> None:
        """Compile the patterns of the tokens that end a turn.

        Args:
            chat: the chat template.
            control: the control tokens.
            ends: control tokens that may end a turn.
        """
        self._chat = chat
        end = alternation_pattern(control.names & {*ends, *_OTHER_END_TOKENS})
        self._end, self._end_after_space = re.compile(f"({end})"), re.compile(rf"\s*({end})")

    def find(self, outline: ConversationOutline, tools: list[Any] | None, trained: Sequence[int]) -> TemplateSkeleton:
        """Build the skeleton of an outline with its trained spans.

        Raises:
            TemplateRenderError: the template raises for the marks.
            UntrainableTemplateError: a trained turn cannot be located, or the template does not write it.
        """
        skeleton = TemplateSkeleton.from_text(self._chat.render(outline.messages, tools))
        if any(slot >= len(outline.slots) for slot in skeleton.order):
            raise UntrainableTemplateError("the chat template writes a text that looks like a mark of Ratchet")
        for turn in trained:
            text_positions = _locate_turn_texts(skeleton, outline, turn)
            if text_positions or outline.messages[turn].get("tool_calls"):
                skeleton.spans.append(self._span(skeleton, outline, tools, turn))
                skeleton.last_turn_trained = turn == len(outline.messages) - 1
        return skeleton

    def _span(
        self, skeleton: TemplateSkeleton, outline: ConversationOutline, tools: list[Any] | None, turn: int
    ) -> TrainedSpan:
        text_positions = _locate_turn_texts(skeleton, outline, turn)
        if turn > 0:
            prompt = self._prompt(outline.messages[:turn], tools)
            literal = text_positions[0] if text_positions else _literal_after_prompt(skeleton, prompt)
            _check_prompt(skeleton, prompt, literal, is_last=turn == len(outline.messages) - 1)
            offset, prompt_prefix, has_thinking_gap = _split_generation_header(
                skeleton.literals[literal], prompt.literals[-1], bool(text_positions)
            )
        elif text_positions:
            literal, prompt_prefix, has_thinking_gap = text_positions[0], "", False
            offset = len(skeleton.literals[literal])
        else:
            raise UntrainableTemplateError(
                "the chat template writes no prompt before a conversation that begins with a tool call"
            )
        last, begin = (text_positions[-1] + 1, 0) if text_positions else (literal, offset)
        tail = skeleton.literals[last]
        if outline.messages[turn].get("tool_calls"):
            end = self._end.search(tail, begin)
        else:
            end = self._end_after_space.match(tail, begin)
        if not end:
            raise UntrainableTemplateError(_describe_missing_end(tail[begin : begin + 40]))
        written = skeleton.literals[literal][offset:] + tail[: end.end()] if text_positions else tail[begin : end.end()]
        if any(name not in written for name in _called_function_names(outline.messages[turn])):
            raise UntrainableTemplateError(_LOST_CALL)
        return TrainedSpan((literal, offset), (last, end.end()), end[1], prompt_prefix, has_thinking_gap)

    def _prompt(self, messages: Sequence[Message], tools: list[Any] | None) -> TemplateSkeleton:
        """Return the skeleton of the prompt for the next assistant turn."""
        try:
            return TemplateSkeleton.from_text(self._chat.render(messages, tools, prompt=True))
        except TemplateRenderError as error:
            raise UntrainableTemplateError(
                f"the chat template cannot write the prompt of an answer ({error})"
            ) from None


def _locate_turn_texts(skeleton: TemplateSkeleton, outline: ConversationOutline, turn: int) -> list[int]:
    """Return the positions of a turn's texts in the skeleton's `order`, which must be adjacent and without repetition.

    Raises:
        UntrainableTemplateError: the positions are not adjacent, or a text is repeated or missing.
    """
    expected = [i for i, slot in enumerate(outline.slots) if slot.turn == turn]
    text_positions = [position for position, slot in enumerate(skeleton.order) if slot in expected]
    written = [skeleton.order[position] for position in text_positions]
    if missing := [outline.slots[i] for i in expected if i not in written]:
        if missing[0].kind == "content":
            raise UntrainableTemplateError(_LOST_ANSWER)
        is_earlier = turn < len(outline.messages) - 1
        raise UntrainableTemplateError(_LOST_EARLIER_REASONING if is_earlier else _LOST_REASONING)
    are_adjacent = not text_positions or text_positions[-1] - text_positions[0] == len(text_positions) - 1
    if text_positions and (sorted(written) != expected or not are_adjacent):
        raise UntrainableTemplateError(
            "the chat template writes an answer in several places, so its position is not unique"
        )
    return text_positions


def _literal_after_prompt(skeleton: TemplateSkeleton, prompt: TemplateSkeleton) -> int:
    """Return the index of the literal that follows the last text of the prompt."""
    if not prompt.order:
        return 0
    return max((i + 1 for i, slot in enumerate(skeleton.order) if slot == prompt.order[-1]), default=0)


def _check_prompt(skeleton: TemplateSkeleton, prompt: TemplateSkeleton, literal: int, is_last: bool) -> None:
    """Check that the literal follows the prompt's last text.

    For the last turn, all text before the literal must also be the same in the skeleton and in the prompt. The prompt
    of an earlier turn may differ: Mistral's template, for example, moves the system message to the last user turn.

    Raises:
        UntrainableTemplateError: the prompt is not a prefix.
    """
    follows = skeleton.order[:literal][-1:] == prompt.order[-1:]
    if not follows or (is_last and skeleton.text[: skeleton.starts[literal]] != prompt.text[: prompt.starts[-1]]):
        raise UntrainableTemplateError(
            "the chat template writes the prompt differently if an answer follows, so the model would be trained on "
            "prompts that it never gets; use a template that only appends"
        )


def _split_generation_header(header: str, prompt: str, text_follows: bool) -> tuple[int, str, bool]:
    """Split the template's text before an answer into prompt and trained part.

    Args:
        header: the template's text between the previous message text and the answer; it includes a tool call.
        prompt: the template's text after the same message text with add_generation_prompt.
        text_follows: whether the header ends where a text of the answer begins.

    Returns:
        The number of characters of the header that belong to the prompt, text that only the prompt has, and whether
        header and prompt differ by a thinking block.

    Raises:
        UntrainableTemplateError: header and prompt differ in more than white space or the beginning of a thinking
            block.
    """
    if not text_follows:
        if header.startswith(prompt):
            return len(prompt), "", False
    elif header.startswith(prompt) and _THINKING_GAP.fullmatch(header, len(prompt)):
        return len(prompt), "", bool(header[len(prompt) :].strip())
    elif prompt.startswith(header):
        prompt_prefix = prompt[len(header) :]
        if _THINKING_PREFIX.fullmatch(prompt_prefix) or (prompt_prefix.isspace() and _THINKING_SUFFIX.search(header)):
            return len(header), prompt_prefix, True
    opened = len(_THINKING_SUFFIX.sub("", prompt))
    shared = longest_shared_prefix(header, prompt)
    if len(shared) >= opened and (_THINKING_GAP.fullmatch(header, opened) or not text_follows):
        # The prompt opens a thinking block; the training text has an empty block or none.
        gap = _THINKING_GAP.match(shared, opened)
        return gap.end() if gap else opened, "", True
    raise UntrainableTemplateError(
        f"the chat template ends a prompt with {prompt[-60:]!r} (add_generation_prompt) and in training writes "
        f"{header[-60:]!r} there, so prompts would differ from the training data; make the two equal"
    )


def _called_function_names(message: Message) -> list[str]:
    """Return the names of the functions that a message calls."""
    calls = [call.get("function") or call for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return [str(call.get("name", "")) for call in calls if isinstance(call, dict)]


def _describe_missing_end(written: str) -> str:
    return (
        f"the chat template writes {written!r} after an answer; expected a control token, without which the model "
        "never learns to stop; write {{ eos_token }} right after the answer"
    )


def select_trained_turns(messages: Sequence[Message], turns: str) -> list[int]:
    """Return the indices of the assistant messages that are trained on (see prepare.turns).

    A message with `train: false` or OpenAI's `weight: 0` is never trained on.
    """
    assistant_turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if turns == "flagged":
        return [t for t in assistant_turns if messages[t].get("train") is True or messages[t].get("weight") == 1]
    selected = assistant_turns[-1:] if turns == "last" else assistant_turns
    return [t for t in selected if messages[t].get("train") is not False and messages[t].get("weight") != 0]
