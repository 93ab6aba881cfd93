"""Encodes conversations as token ids with a mask of the trained tokens, and verifies the mask of every row.

The text that the chat template writes is aligned with the template's skeleton (`chat_template`), which gives the
trained spans in characters. The text is tokenized once, and the spans are converted to tokens. No prompt token is
trained on, and no answer token is left out.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ratchet.data.chat_template import (
    ChatTemplate,
    ControlTokens,
    SpanAnchor,
    SpanFinder,
    TemplateRenderError,
    TemplateSkeleton,
    UntrainableTemplateError,
    build_outline,
    select_trained_turns,
    structure_key,
)
from ratchet.data.conversation import (
    IGNORE_INDEX,
    SYSTEM_ROLES,
    Conversation,
    EncodedConversation,
    Message,
    RefusedConversation,
    extract_text,
)
from ratchet.errors import DataError

Turns = Literal["all", "last", "flagged"]

_BATCH_ROWS = 512
_MAX_SKELETONS = 4096
"""Size limit of the skeleton cache, because each conversation with tools may have a skeleton of its own."""
_MAX_PROMPTS_CHECKED = 64
"""Number of rows, for each ending of prompts, whose prompt is also tokenized without the answer and compared."""
_PROMPT_END_CHARACTERS = 60
"""Length of a prompt's ending, in characters."""
_SAMPLE_CONVERSATION = Conversation(
    [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two.", "train": True}]
)


@dataclass
class ConversationDraft:
    """A rendered conversation with its trained spans, while it is encoded."""

    where: str
    conversation: Conversation
    text: str
    skeleton: TemplateSkeleton | None = None
    char_spans: list[tuple[int, int]] = field(default_factory=list)
    """Trained spans in characters of the text; each span ends with its end-of-turn token."""
    ids: list[int] = field(default_factory=list)
    token_spans: list[tuple[int, int]] = field(default_factory=list)
    """Trained spans in tokens: index of the first and of the last token."""
    needs_offsets: bool = True
    """Whether the tokenizer must return the offsets of tokens."""
    encoding: Any = None
    """The tokens with their offsets, while they are needed."""
    shares_token_with_prompt: bool = False
    """Whether a trained token also contains white space of the prompt."""

    def set_spans(self, skeleton: TemplateSkeleton, starts: list[int]) -> "ConversationDraft":
        """Set the spans. `starts` are the positions of the skeleton's literals in the text."""
        self.skeleton, self.needs_offsets = skeleton, not skeleton.anchors_reliable
        for span in skeleton.spans:
            start, end = starts[span.start[0]] + span.start[1], starts[span.end[0]] + span.end[1]
            if span.prompt_prefix and self.text.startswith(span.prompt_prefix, start):
                start += len(span.prompt_prefix)
            self.char_spans.append((start, end))
        return self

    def to_encoded(self) -> EncodedConversation:
        """Return the token ids with labels."""
        labels = [IGNORE_INDEX] * len(self.ids)
        for first, last in self.token_spans:
            labels[first : last + 1] = self.ids[first : last + 1]
        return EncodedConversation(self.ids, labels)


class ConversationEncoder:
    """Encoder of conversations with one tokenizer and its chat template; verifies every mask.

    The trained tokens are those that the model must generate after the generation prompt: the assistant's text,
    reasoning and tool calls, and the token that ends the turn. If the template opens a thinking block for an answer
    (Qwen3's is empty if there is no reasoning), the block is trained on too, because the model must generate it. A part
    that the prompt already contains (DeepSeek-R1's prompt ends with `<think>`) is not trained on.
    """

    end_of_turn: str
    """The control token that ends an answer."""

    def __init__(self, tokenizer: Any, turns: Turns = "all") -> None:
        """Check the template with a sample conversation.

        Raises:
            DataError: the template cannot be used for training.
        """
        self._turns = turns
        self._chat, self._control = ChatTemplate(tokenizer), ControlTokens(tokenizer)
        self._tokens = DraftTokenizer(tokenizer, self._chat, self._control.ids)
        self._skeletons: dict[tuple[str, ...], TemplateSkeleton | None] = {}
        begin_tokens = {tokenizer.bos_token} - {tokenizer.eos_token}
        self._finder = SpanFinder(self._chat, self._control, self._control.names - begin_tokens)
        self.end_of_turn = self._encode_sample()
        self._finder = SpanFinder(self._chat, self._control, {self.end_of_turn, tokenizer.eos_token})
        self._skeletons.clear()

    def _encode_sample(self) -> str:
        try:
            skeleton = self._finder.find(build_outline(_SAMPLE_CONVERSATION), None, [1])
        except UntrainableTemplateError as error:
            raise DataError(f"{error} (found with a sample conversation of user and assistant)") from None
        except TemplateRenderError as error:
            raise DataError(_describe_render_failure(_SAMPLE_CONVERSATION, error)) from None
        [encoded] = self.encode([("sample conversation", _SAMPLE_CONVERSATION)])
        if isinstance(encoded, RefusedConversation):
            raise DataError(
                f"the tokenizer does not decode a sample conversation to its text: {encoded.detail}; use another one"
            )
        return skeleton.spans[0].end_token

    def encode(self, rows: Sequence[tuple[str, Conversation]]) -> list[EncodedConversation | RefusedConversation]:
        """Encode rows, each given as (position in its source, conversation).

        Raises:
            DataError: the template cannot be used for training; the message names the first row that fails.
        """
        self._tokens.reset()
        batches = [rows[start : start + _BATCH_ROWS] for start in range(0, len(rows), _BATCH_ROWS)]
        results: list[EncodedConversation | RefusedConversation] = []
        pending: tuple[list[ConversationDraft | RefusedConversation], Future[None]] | None = None
        with ThreadPoolExecutor(max_workers=1) as pool:  # tokenizing releases the GIL while the next batch is rendered
            for batch in batches:
                drafts = self._create_drafts(batch)
                tokenization = pool.submit(
                    self._tokens.tokenize, [draft for draft in drafts if isinstance(draft, ConversationDraft)]
                )
                if pending:
                    results += self._verify(*pending)
                pending = drafts, tokenization
            if pending:
                results += self._verify(*pending)
        return results

    def find_omissions(self, conversation: Conversation) -> dict[str, bool]:
        """Return, for each kind of content that the conversation has, whether the template omits it.

        Kinds are system messages, tool results and tools.
        """
        [text] = self._chat.render_all([conversation])
        parts = {
            "system messages": [extract_text(m) for m in conversation.messages if m["role"] in SYSTEM_ROLES],
            "tool results": [extract_text(m) for m in conversation.messages if m["role"] == "tool"],
            "tools": [_tool_name(tool) for tool in conversation.tools or []],
        }
        return {
            kind: isinstance(text, str) and any(not _is_text_written(part.strip(), text) for part in texts)
            for kind, texts in parts.items()
            if any(part.strip() for part in texts)
        }

    def _create_drafts(self, rows: Sequence[tuple[str, Conversation]]) -> list[ConversationDraft | RefusedConversation]:
        texts = self._chat.render_all([conversation for _, conversation in rows])
        return [
            self._create_draft(where, conversation, text)
            for (where, conversation), text in zip(rows, texts, strict=True)
        ]

    def _verify(
        self, drafts: list[ConversationDraft | RefusedConversation], tokenization: Future[None]
    ) -> list[EncodedConversation | RefusedConversation]:
        tokenization.result()
        encoded = iter(self._tokens.verify([draft for draft in drafts if isinstance(draft, ConversationDraft)]))
        return [draft if isinstance(draft, RefusedConversation) else next(encoded) for draft in drafts]

    def _create_draft(
        self, where: str, conversation: Conversation, text: str | TemplateRenderError
    ) -> ConversationDraft | RefusedConversation:
        if problem := self._control.find(conversation):
            return RefusedConversation("control_token", problem)
        if isinstance(text, TemplateRenderError) or not _is_unicode(text):
            surrogate = "a text holds half a surrogate pair, which is not a character"
            return RefusedConversation(
                "refused", surrogate if isinstance(text, str) else f"the chat template raises {text}"
            )
        if missing := next((part for part in _user_texts(conversation) if part not in text), None):
            return RefusedConversation(
                "refused", f"the chat template omits or changes a user message: {missing[:60]!r}"
            )
        trained = select_trained_turns(conversation.messages, self._turns)
        draft = ConversationDraft(where, conversation, text)
        if not trained:
            return draft
        key, texts = structure_key(conversation)
        if self._turns == "flagged":
            key = (*key, str(trained))
        skeleton = self._cached_skeleton(key, conversation, trained)
        if skeleton and (starts := skeleton.align(text, texts)):
            return draft.set_spans(skeleton, starts)
        return self._align_individually(draft, trained)

    def _cached_skeleton(
        self, key: tuple[str, ...], conversation: Conversation, trained: list[int]
    ) -> TemplateSkeleton | None:
        """Return the skeleton of a structure; None if the template or the marks do not allow one."""
        if key not in self._skeletons:
            if len(self._skeletons) >= _MAX_SKELETONS:
                self._skeletons.clear()
            try:
                self._skeletons[key] = self._finder.find(build_outline(conversation), conversation.tools, trained)
            except (TemplateRenderError, UntrainableTemplateError):
                self._skeletons[key] = None
        return self._skeletons[key]

    def _align_individually(
        self, draft: ConversationDraft, trained: list[int]
    ) -> ConversationDraft | RefusedConversation:
        """Align a conversation with a skeleton of its own, which contains the texts of turns that are not trained on.

        This is necessary for templates that test texts: Qwen3's tests whether a user message is a tool result.
        """
        conversation = draft.conversation
        outline = build_outline(conversation, frozenset(trained))
        answer = repr(conversation.response[:60])
        try:
            skeleton = self._finder.find(outline, conversation.tools, trained)
        except UntrainableTemplateError as error:
            raise DataError(f"{draft.where}: {error} (last answer: {answer})") from None
        except TemplateRenderError as error:
            raise DataError(
                f"{draft.where}: the chat template raises for some answers only ({error}), so answers cannot be "
                "located; use another template"
            ) from None
        if starts := skeleton.align(draft.text, outline.texts):
            return draft.set_spans(skeleton, starts)
        if any("</think>" in extract_text(conversation.messages[turn]) for turn in trained):
            return RefusedConversation(
                "refused",
                "an answer contains </think> without reasoning before it, and the chat template cuts it there",
            )
        raise DataError(
            f"{draft.where}: the chat template changes an answer (last answer: {answer}); a template that rewrites "
            "answers cannot be trained on"
        )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _describe_render_failure(conversation: Conversation, error: TemplateRenderError) -> str:
    roles = ", ".join(message["role"] for message in conversation.messages)
    return f"the chat template cannot write a conversation of {roles} ({error}); fix chat_template.jinja, or the rows"


def _user_texts(conversation: Conversation) -> Iterator[str]:
    """Yield the texts of user messages as templates write them; content in parts is left out."""
    for message in conversation.messages:
        if message["role"] == "user" and isinstance(message.get("content"), str):
            yield message["content"].strip()


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _is_text_written(part: str, text: str) -> bool:
    """Return whether a rendered text contains a part, as it is or as a JSON string."""
    return part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text


def encode_conversation(
    tokenizer: Any, conversation: Conversation, where: str, turns: Turns = "all"
) -> EncodedConversation:
    """Encode one conversation. Raises DataError like `ConversationEncoder`, and if the conversation is refused."""
    try:
        encoder = ConversationEncoder(tokenizer, turns)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    [encoded] = encoder.encode([(where, conversation)])
    if isinstance(encoded, RefusedConversation):
        raise DataError(f"{where}: {encoded.detail}; fix or remove the row")
    return encoded


def encode_prompt(tokenizer: Any, context: Conversation) -> list[int]:
    """Return the token ids of a prompt for the next assistant turn. Raises DataError if the template raises."""
    tokens = DraftTokenizer(tokenizer, ChatTemplate(tokenizer), frozenset())
    tokens.reset()
    try:
        return tokens.prompt_ids(context)
    except TemplateRenderError as error:
        raise DataError(_describe_render_failure(context, error)) from None


def merge_system_messages(conversation: Conversation) -> Conversation:
    """Move leading system messages into the first user turn, for templates that do not accept system messages."""
    messages = conversation.messages
    leading = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if not leading or first is None:
        return conversation
    system = [text for message in messages[:leading] if (text := extract_text(message))]
    merged = [*messages[leading:first], _prepend_texts(messages[first], system), *messages[first + 1 :]]
    return replace(conversation, messages=merged)


def _prepend_texts(message: Message, texts: list[str]) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*({"type": "text", "text": f"{text}\n\n"} for text in texts), *content]}
    return {**message, "content": "\n\n".join([*texts, *([content] if content else [])])}


def truncate_conversation(encoded: EncodedConversation, max_tokens: int) -> EncodedConversation | None:
    """Truncate a conversation to at most `max_tokens`; return None if no answer fits.

    The result ends with the last answer of which at least one token fits, complete or cut, and with its end-of-turn
    token.
    """
    ids, labels = encoded.input_ids, encoded.labels
    if len(ids) <= max_tokens:
        return encoded
    begins = [
        i for i, label in enumerate(labels) if label != IGNORE_INDEX and (i == 0 or labels[i - 1] == IGNORE_INDEX)
    ]
    for begin in reversed(begins):
        end = next((i for i in range(begin, len(labels)) if labels[i] == IGNORE_INDEX), len(labels))
        if end <= max_tokens:
            return EncodedConversation(ids[:end], labels[:end])
        if begin + 2 <= max_tokens:
            return EncodedConversation(
                [*ids[: max_tokens - 1], ids[end - 1]], [*labels[: max_tokens - 1], labels[end - 1]]
            )
    return None


# ----- Tokens of drafts


class DraftTokenizer:
    """Tokenizer of drafts, which also verifies their masks."""

    def __init__(self, tokenizer: Any, chat: ChatTemplate, control_ids: frozenset[int]) -> None:
        self._tokens = tokenizer.backend_tokenizer
        self._bos = tokenizer.bos_token_id
        self._chat, self._control_ids = chat, control_ids
        self._checked: Counter[str] = Counter()

    def reset(self) -> None:
        """Turn off truncation and padding, which an earlier user of the tokenizer may have enabled."""
        self._tokens.no_truncation()
        self._tokens.no_padding()

    def prompt_ids(self, context: Conversation) -> list[int]:
        """Return the token ids of a prompt for the next assistant turn. Raises TemplateRenderError."""
        text = self._chat.render(context.messages, context.tools, prompt=True)
        return list(self._tokens.encode(text, add_special_tokens=False).ids)

    def tokenize(self, drafts: Sequence[ConversationDraft]) -> None:
        """Set the ids of drafts. Encoding with offsets takes 50 % longer, so offsets are computed only if needed."""
        for offsets in (False, True):
            selected = [draft for draft in drafts if draft.needs_offsets == offsets]
            encode = self._tokens.encode_batch if offsets else self._tokens.encode_batch_fast
            encodings = encode([draft.text for draft in selected], add_special_tokens=False) if selected else []
            for draft, encoding in zip(selected, encodings, strict=True):
                draft.ids, draft.encoding = encoding.ids, encoding if offsets else None

    def verify(self, drafts: Sequence[ConversationDraft]) -> list[EncodedConversation | RefusedConversation]:
        """Locate the trained tokens of tokenized drafts and verify them.

        Raises:
            DataError: prompt and answer share a token, the prompt alone is split into other tokens than the prompt with
                its answer, or the text begins with two BOS tokens.
        """
        failed = self._locate_by_anchors([draft for draft in drafts if draft.encoding is None])
        for draft in failed:
            draft.needs_offsets = True
        self.tokenize(failed)
        refused = self._locate_by_offsets([draft for draft in drafts if draft.encoding is not None])
        results: list[EncodedConversation | RefusedConversation] = []
        for draft in drafts:
            if refusal := refused.get(id(draft)):
                results.append(refusal)
            else:
                self._check_prompt_tokens(draft)
                results.append(draft.to_encoded())
        return results

    def _locate_by_anchors(self, drafts: list[ConversationDraft]) -> list[ConversationDraft]:
        """Locate spans by counting tokens from control tokens, as in the `anchors` of the skeleton.

        Returns the drafts in which this fails. A draft fails if the located tokens do not decode exactly to the
        characters of the spans.
        """
        for draft in drafts:
            draft.token_spans = _follow_anchors(draft.skeleton.anchors or [], draft.ids) if draft.skeleton else []
        failed = []
        for draft, texts in zip(drafts, self._decode(drafts), strict=True):
            is_correct = texts == [draft.text[start:end] for start, end in draft.char_spans]
            if draft.skeleton:
                draft.skeleton.record_anchor_result(is_correct)
            if not is_correct:
                failed.append(draft)
        return failed

    def _locate_by_offsets(self, drafts: list[ConversationDraft]) -> dict[int, RefusedConversation]:
        """Locate spans by the offsets of tokens; return refusals of drafts whose tokens lose text, by `id(draft)`."""
        for draft in drafts:
            if draft.skeleton:
                spans = zip(draft.char_spans, draft.skeleton.spans, strict=True)
                draft.token_spans = [
                    _locate_span_tokens(draft, start, end - len(span.end_token)) for (start, end), span in spans
                ]
            draft.encoding = None
        refused = {}
        for draft, texts in zip(drafts, self._decode(drafts), strict=True):
            for (start, end), decoded in zip(draft.char_spans, texts, strict=True):
                if not self._is_same_text(decoded, draft.text[start:end]):
                    refused[id(draft)] = RefusedConversation(
                        "refused", _describe_difference(draft.text[start:end], decoded)
                    )
            if draft.skeleton and draft.skeleton.anchors is None and id(draft) not in refused:
                draft.skeleton.anchors = self._anchors(draft)
        return refused

    def _anchors(self, draft: ConversationDraft) -> list[SpanAnchor]:
        """Describe the spans of a draft relative to its control tokens."""
        anchors, ids, origin = [], draft.ids, 0
        for first, last in draft.token_spans:
            inside = ids[first:last].count(ids[last])
            control = next((i for i in range(first - 1, origin - 1, -1) if ids[i] in self._control_ids), None)
            if control is None:
                anchors.append(SpanAnchor(None, 0, first - origin, ids[last], inside))
            else:
                occurrence = ids[origin:control].count(ids[control])
                anchors.append(SpanAnchor(ids[control], occurrence, first - control, ids[last], inside))
            origin = last + 1
        return anchors

    def _decode(self, drafts: list[ConversationDraft]) -> list[list[str]]:
        pieces = [draft.ids[first : last + 1] for draft in drafts for first, last in draft.token_spans]
        decoded = iter(self._tokens.decode_batch(pieces, skip_special_tokens=False) if pieces else [])
        return [[next(decoded) for _ in draft.token_spans] for draft in drafts]

    def _is_same_text(self, decoded: str, expected: str) -> bool:
        """Compare texts without outer white space, after the tokenizer's normalizer (for example NFC)."""
        decoded, expected = decoded.strip(), expected.strip()
        if decoded == expected:
            return True
        if self._tokens.normalizer is None:
            return False
        normalized = self._tokens.normalizer.normalize_str(expected)
        if "▁" not in expected:
            normalized = normalized.replace("▁", " ")  # SentencePiece writes a space as ▁
        return bool(normalized.strip() == decoded)

    def _check_prompt_tokens(self, draft: ConversationDraft) -> None:
        """Raise DataError if the prompt of the last answer has other tokens in inference than in training."""
        ids, skeleton = draft.ids, draft.skeleton
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            raise DataError(f"{draft.where}: the chat template writes the BOS token twice; remove one")
        if (
            skeleton is None
            or not skeleton.spans
            or not skeleton.last_turn_trained
            or skeleton.spans[-1].has_thinking_gap
        ):
            return
        literal, offset = skeleton.spans[-1].start
        ending = skeleton.literals[literal][:offset][-_PROMPT_END_CHARACTERS:]
        if self._checked[ending] >= _MAX_PROMPTS_CHECKED and not draft.shares_token_with_prompt:
            return
        self._checked[ending] += 1
        first = draft.token_spans[-1][0]
        prompt = self.prompt_ids(draft.conversation.context)
        if prompt == ids[:first]:
            return
        equal = _find_first_difference(prompt, ids[:first])
        without_answer, with_answer = self._tokens.decode_batch(
            [prompt[equal:], ids[equal:first]], skip_special_tokens=False
        )
        if without_answer.strip() or with_answer.strip():
            raise DataError(
                f"{draft.where}: the tokenizer splits the prompt differently if an answer follows "
                f"({without_answer[:40]!r}, {with_answer[:40]!r}), so the model would be trained on prompts that it "
                "never gets; change the chat template so that prompts end with a control token or a line break"
            )


def _follow_anchors(anchors: list[SpanAnchor], ids: list[int]) -> list[tuple[int, int]]:
    """Return the first and last token of each span; [] if a control token is missing."""
    token_spans = []
    position = 0
    try:
        for anchor in anchors:
            if anchor.token is not None:
                position = _find_nth(ids, anchor.token, anchor.occurrence, position)
            first = position + anchor.distance
            last = _find_nth(ids, anchor.end_token, anchor.end_tokens_inside, first)
            token_spans.append((first, last))
            position = last + 1
    except ValueError:
        return []
    return token_spans


def _find_nth(ids: list[int], token: int, occurrence: int, start: int) -> int:
    """Return the position of an occurrence (from 0) of a token, from `start` on. Raises ValueError if there is none."""
    position = ids.index(token, start)
    for _ in range(occurrence):
        position = ids.index(token, position + 1)
    return position


def _locate_span_tokens(draft: ConversationDraft, start: int, last_start: int) -> tuple[int, int]:
    """Return the indices of the first and the last token of a span.

    The span begins at character `start`; its last token begins at character `last_start`.
    """
    encoding = draft.encoding
    position = start
    while (first := encoding.char_to_token(position)) is None and position < last_start:
        position += 1  # white space that belongs to no token's offsets
    last = encoding.char_to_token(last_start)
    if first is None or last is None:
        raise DataError(f"{draft.where}: the tokenizer has no token for the end of a turn; use another tokenizer")
    while first > 0 and (previous := encoding.token_to_chars(first - 1)) is not None and previous[0] >= start:
        first -= 1
    shared = draft.text[encoding.token_to_chars(first)[0] : start]
    if shared.strip():
        raise DataError(
            f"{draft.where}: one token holds the end of the prompt and the beginning of the answer ({shared[-20:]!r} "
            f"and {draft.text[start : start + 20]!r}); change the chat template so that a space or a line break is "
            "between them"
        )
    draft.shares_token_with_prompt |= bool(shared)
    return first, last


def _find_first_difference(first: Sequence[Any], second: Sequence[Any]) -> int:
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _describe_difference(expected: str, decoded: str) -> str:
    """Describe the first difference between a text and the decoded text of its tokens."""
    expected, decoded = expected.strip(), decoded.strip()
    position = _find_first_difference(expected, decoded)
    shown = slice(max(0, position - 10), position + 30)
    return f"the tokenizer loses characters: {expected[shown]!r} becomes {decoded[shown]!r}"
