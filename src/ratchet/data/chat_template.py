"""Renders conversations with a tokenizer's chat template, and finds the text spans that are trained on."""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ratchet.data.conversation import Conversation, Message

TRAINING_FLAGS = ("train", "weight")
"""Message fields that select the turns to train on; the template does not get them."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Message fields with the reasoning, in the order in which transformers looks for them."""
_MARK = re.compile(r"slot7c1e(\d+)end")

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
            return str(self._apply(_remove_training_flags(messages), tools, prompt))
        except Exception as error:  # a template is a program, which may raise any exception
            reason = " ".join(str(error).split())
            raise TemplateRenderError(
                f"{type(error).__name__}: {reason}" if reason else type(error).__name__
            ) from error

    def render_all(self, conversations: Sequence[Conversation]) -> list[str | TemplateRenderError]:
        """Render each conversation; the result is its text, or the error of the template."""
        if conversations and not any(conversation.tools for conversation in conversations):
            with suppress(Exception):  # a single call is 20 % faster; below, the conversation that fails is found
                return list(self._apply([_remove_training_flags(c.messages) for c in conversations], None, False))
        results: list[str | TemplateRenderError] = []
        for conversation in conversations:
            try:
                results.append(self.render(conversation.messages, conversation.tools))
            except TemplateRenderError as error:
                results.append(error)
        return results

    def _apply(self, messages: list[Any], tools: list[Any] | None, prompt: bool) -> Any:
        return self._tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt
        )


def _remove_training_flags(messages: Sequence[Message]) -> list[Message]:
    return [
        {key: value for key, value in message.items() if key not in TRAINING_FLAGS}
        if "train" in message or "weight" in message
        else message
        for message in messages
    ]


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
    shared = ordered[0][: count_equal(ordered[0], ordered[-1])]
    groups: dict[str, list[str]] = {}
    for name in ordered:
        groups.setdefault(name[len(shared) : len(shared) + 1], []).append(name[len(shared) :])
    ends_here = groups.pop("", None)
    if not groups:
        return re.escape(shared)
    branches = "|".join(map(alternation_pattern, groups.values()))
    return f"{re.escape(shared)}(?:{branches}){'?' if ends_here else ''}"


def count_equal(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the longest common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


# ----- Template skeletons
#
# A skeleton is the template's output with a mark in place of every message text. Conversations of the same structure
# (roles, present fields, tools) have the same skeleton, so the template is analysed once per structure. An alignment of
# a conversation's text with the skeleton assigns every character to the template or to a message. If the template
# changes a message text, the alignment fails.


class TextSlot(NamedTuple):
    """The position of one text in a conversation."""

    turn: int
    is_reasoning: bool


@dataclass(frozen=True)
class ConversationOutline:
    """A conversation split into its structure and its texts."""

    messages: list[Message]
    """The messages with marks in place of texts."""
    slots: list[TextSlot]
    texts: list[str]


def _mark_texts(turn: int, message: Message, slots: list[TextSlot], texts: list[str]) -> Message:
    """Replace the texts of a message by marks, and append the texts to the lists.

    Blank texts stay, because templates test for empty texts. Reasoning in an answer gets its own mark, because
    templates may remove it.
    """

    def mark(text: str, is_reasoning: bool = False) -> str:
        if not text or text.isspace():
            return text
        slots.append(TextSlot(turn, is_reasoning))
        texts.append(text)
        return f"slot7c1e{len(slots) - 1}end"

    marked = {key: value for key, value in message.items() if key not in TRAINING_FLAGS}
    reasoning_keys = [key for key in REASONING_KEYS if message.get(key) is not None]
    if reasoning_keys and isinstance(message[reasoning_keys[0]], str):
        marked |= dict.fromkeys(reasoning_keys, mark(message[reasoning_keys[0]], is_reasoning=True))
    content = message.get("content")
    if isinstance(content, list):
        marked["content"] = [
            {**part, "text": mark(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    elif isinstance(content, str):
        opening, thoughts, closing, answer = split_reasoning(message)
        marked["content"] = opening + mark(thoughts, is_reasoning=True) + closing + mark(answer)
    return marked


def split_reasoning(message: Message) -> tuple[str, str, str, str]:
    """Split the text of a message into `<think>`, the reasoning, `</think>` and the answer. Without reasoning, all of
    the text is the answer."""
    content = str(message["content"])
    head, closing, answer = content.partition("</think>")
    before, opening, thoughts = head.rpartition("<think>")
    has_reasoning = closing and "</think>" not in answer and "<think>" not in answer and not before.strip()
    if message["role"] != "assistant" or not has_reasoning:
        return "", "", "", content
    return before + opening, thoughts, closing, answer


def build_outline(conversation: Conversation, only: Sequence[int] | None = None) -> ConversationOutline:
    """Split a conversation into structure and texts. With `only`, texts of all other turns stay in the structure."""
    slots: list[TextSlot] = []
    texts: list[str] = []
    messages = [
        _mark_texts(turn, message, slots, texts) if only is None or turn in only else message
        for turn, message in enumerate(conversation.messages)
    ]
    return ConversationOutline(messages, slots, texts)


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
            key.append(json.dumps(_mark_texts(turn, message, [], texts), ensure_ascii=False))
    key.append(json.dumps(conversation.tools) if conversation.tools else "")
    return tuple(key), texts


class TrainedSpan(NamedTuple):
    """The trained part of one turn in a skeleton. Positions are (index of the literal, offset in characters in it)."""

    start: tuple[int, int]
    end: tuple[int, int]
    end_token: str
    """The control token that ends the turn; the span ends with it."""
    prompt_prefix: str = ""
    """Text before the answer that the prompt already contains (`<think>`); it is not trained on."""
    has_thinking_gap: bool = False
    """Whether the text before the answer differs between prompt and training by a thinking block."""


class SpanAnchor(NamedTuple):
    """The position of a span among the tokens of a conversation, relative to the end of the previous span."""

    token: int | None
    """The nearest control token before the span; None if there is none."""
    occurrence: int
    """Number of earlier occurrences of `token` to skip."""
    distance: int
    """Number of tokens from `token` to the span, or from the end of the previous span if `token` is None."""
    end_token: int
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
    anchor_hits: int = 0
    """Number of rows in which the anchors were correct."""
    anchor_misses: int = 0

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

    def locate_spans(self, starts: list[int], text: str) -> list[tuple[int, int]]:
        """Return the trained spans in a text, in characters; `starts` is the result of `align`."""
        char_spans = []
        for span in self.spans:
            start, end = starts[span.start[0]] + span.start[1], starts[span.end[0]] + span.end[1]
            is_in_prompt = span.prompt_prefix and text.startswith(span.prompt_prefix, start)
            char_spans.append((start + len(span.prompt_prefix) if is_in_prompt else start, end))
        return char_spans

    def align(self, text: str, texts: list[str]) -> list[int] | None:
        """Return the position of each literal in a conversation's text; None if the text does not fit the skeleton.

        The text fits even if the template removed white space at either end of a message text.
        """
        if not text.startswith(self.literals[0]):
            return None
        starts, position = [0], len(self.literals[0])
        for slot, literal in zip(self.order, self.literals[1:], strict=True):
            end = position + len(texts[slot])
            if not (text.startswith(texts[slot], position) and text.startswith(literal, end)):
                end = _find_trimmed_end(text, position, texts[slot], literal)
                if end < 0:
                    return None
            starts.append(end)
            position = end + len(literal)
        return starts if position == len(text) else None


def _find_trimmed_end(text: str, position: int, message_text: str, literal: str) -> int:
    """Return the end of a message text that the template wrote without some of its outer white space.

    The literal must follow this end. If it follows nowhere, the result is -1.
    """
    bare = message_text.strip()
    lead, _, trail = message_text.partition(bare)
    space = text[position : position + len(lead)]
    begin = position + len(space) - len(space.lstrip())
    if not lead.endswith(text[position:begin]) or not text.startswith(bare, begin):
        return -1
    end = begin + len(bare)
    return next((end + k for k in range(len(trail), -1, -1) if text.startswith(trail[:k] + literal, end)), -1)


# ----- Trained spans
#
# The trained span of a turn is the text that the model must generate after the generation prompt: white space, a
# thinking block that the template opens for it, reasoning, answer or tool calls, and the token that ends the turn.
# Spans are found with the skeleton, so the template needs no `{% generation %}` marks.


class UntrainableTemplateError(Exception):
    """Error for a template that cannot be used for training. The text is the reason and begins "the chat template"."""


class SpanFinder:
    """Finder of the trained spans of a skeleton. `ends` are control tokens that may end a turn."""

    def __init__(self, chat: ChatTemplate, control: ControlTokens, ends: Iterable[str]) -> None:
        self._chat = chat
        end = alternation_pattern(control.names & {*ends, *_OTHER_END_TOKENS})
        self._end, self._end_after_space = re.compile(f"({end})"), re.compile(rf"\s*({end})")

    def find(self, outline: ConversationOutline, tools: list[Any] | None, trained: Sequence[int]) -> TemplateSkeleton:
        """Build the skeleton of an outline with its trained spans.

        Raises TemplateRenderError if the template raises for the marks, and UntrainableTemplateError if a trained turn
        cannot be located or is not written.
        """
        skeleton = TemplateSkeleton.from_text(self._chat.render(outline.messages, tools))
        if any(slot >= len(outline.slots) for slot in skeleton.order):
            raise UntrainableTemplateError("the chat template writes a text that looks like a mark of Ratchet")
        for turn in trained:
            if span := self._find_span(skeleton, outline, tools, turn):
                skeleton.spans.append(span)
                skeleton.last_turn_trained = turn == len(outline.messages) - 1
        return skeleton

    def _find_span(
        self, skeleton: TemplateSkeleton, outline: ConversationOutline, tools: list[Any] | None, turn: int
    ) -> TrainedSpan | None:
        """Return the trained span of a turn; None if the turn has neither texts nor tool calls."""
        text_positions = _locate_turn_texts(skeleton, outline, turn)
        calls = outline.messages[turn].get("tool_calls") or ()
        if turn > 0 and (text_positions or calls):
            prompt = self._render_prompt(outline.messages[:turn], tools)
            # Without texts, the span is in the literal after the last text of the prompt.
            after_prompt = [i + 1 for i, slot in enumerate(skeleton.order) if [slot] == prompt.order[-1:]]
            literal = text_positions[0] if text_positions else max(after_prompt, default=0)
            _check_prompt(skeleton, prompt, literal, is_last=turn == len(outline.messages) - 1)
            offset, prompt_prefix, has_thinking_gap = _split_generation_header(
                skeleton.literals[literal], prompt.literals[-1], bool(text_positions)
            )
        elif text_positions:
            literal, prompt_prefix, has_thinking_gap = text_positions[0], "", False
            offset = len(skeleton.literals[literal])
        elif calls:
            raise UntrainableTemplateError(
                "the chat template writes no prompt before a conversation that begins with a tool call"
            )
        else:
            return None
        last, begin = (text_positions[-1] + 1, 0) if text_positions else (literal, offset)
        tail = skeleton.literals[last]
        end = self._end.search(tail, begin) if calls else self._end_after_space.match(tail, begin)
        if not end:
            raise UntrainableTemplateError(
                f"the chat template writes {tail[begin : begin + 40]!r} after an answer; expected a control token, "
                "without which the model never learns to stop; write {{ eos_token }} right after the answer"
            )
        written = skeleton.literals[literal][offset:] + tail[: end.end()] if text_positions else tail[begin : end.end()]
        functions = [call.get("function") or call for call in calls if isinstance(call, dict)]
        if any(str(function.get("name", "")) not in written for function in functions if isinstance(function, dict)):
            raise UntrainableTemplateError(_LOST_CALL)
        return TrainedSpan((literal, offset), (last, end.end()), end[1], prompt_prefix, has_thinking_gap)

    def _render_prompt(self, messages: Sequence[Message], tools: list[Any] | None) -> TemplateSkeleton:
        """Return the skeleton of the prompt for the next assistant turn."""
        try:
            return TemplateSkeleton.from_text(self._chat.render(messages, tools, prompt=True))
        except TemplateRenderError as error:
            raise UntrainableTemplateError(
                f"the chat template cannot write the prompt of an answer ({error})"
            ) from None


def _check_prompt(skeleton: TemplateSkeleton, prompt: TemplateSkeleton, literal: int, is_last: bool) -> None:
    """Raise UntrainableTemplateError if the literal does not follow the prompt's last text.

    For the last turn, all text before the literal must also be the same in the skeleton and in the prompt. The prompt
    of an earlier turn may differ: Mistral's template, for example, moves the system message to the last user turn.
    """
    follows = skeleton.order[:literal][-1:] == prompt.order[-1:]
    if not follows or (is_last and skeleton.text[: skeleton.starts[literal]] != prompt.text[: prompt.starts[-1]]):
        raise UntrainableTemplateError(
            "the chat template writes the prompt differently if an answer follows, so the model would be trained on "
            "prompts that it never gets; use a template that only appends"
        )


def _locate_turn_texts(skeleton: TemplateSkeleton, outline: ConversationOutline, turn: int) -> list[int]:
    """Return the positions of a turn's texts in the skeleton's `order`, which must be adjacent and without repetition.

    Raises UntrainableTemplateError for other positions, and if a text is missing.
    """
    expected = [i for i, slot in enumerate(outline.slots) if slot.turn == turn]
    text_positions = [position for position, slot in enumerate(skeleton.order) if slot in expected]
    written = [skeleton.order[position] for position in text_positions]
    if missing := [outline.slots[i] for i in expected if i not in written]:
        if not missing[0].is_reasoning:
            raise UntrainableTemplateError(_LOST_ANSWER)
        is_earlier = turn < len(outline.messages) - 1
        raise UntrainableTemplateError(_LOST_EARLIER_REASONING if is_earlier else _LOST_REASONING)
    are_adjacent = not text_positions or text_positions[-1] - text_positions[0] == len(text_positions) - 1
    if text_positions and (sorted(written) != expected or not are_adjacent):
        raise UntrainableTemplateError(
            "the chat template writes an answer in several places, so its position is not unique"
        )
    return text_positions


def _split_generation_header(header: str, prompt: str, text_follows: bool) -> tuple[int, str, bool]:
    """Split the template's text before an answer into prompt and trained part.

    `header` is the text between the previous message text and the answer, with the answer's tool call if no text
    follows; `prompt` is the text after the same message text with add_generation_prompt. The result is the number of
    characters of the header that belong to the prompt, text that only the prompt has, and whether the two differ by a
    thinking block. If they differ in more than that and white space, UntrainableTemplateError is raised.
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
    shared = header[: count_equal(header, prompt)]
    if len(shared) >= opened and (_THINKING_GAP.fullmatch(header, opened) or not text_follows):
        # The prompt opens a thinking block; the training text has an empty block or none.
        gap = _THINKING_GAP.match(shared, opened)
        return gap.end() if gap else opened, "", True
    raise UntrainableTemplateError(
        f"the chat template ends a prompt with {prompt[-60:]!r} (add_generation_prompt) and in training writes "
        f"{header[-60:]!r} there, so prompts would differ from the training data; make the two equal"
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
