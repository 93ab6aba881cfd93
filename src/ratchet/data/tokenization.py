"""Encodes conversations as token ids with a mask of the trained tokens, and verifies the mask of every row.

The text that the chat template writes is aligned with the template's skeleton (`chat_template`), which gives the
trained spans in characters. The text is tokenized once, and the spans are converted to tokens. No prompt token is
trained on, and no answer token is left out.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
    count_equal,
    select_trained_turns,
    split_reasoning,
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
    skeleton: TemplateSkeleton
    char_spans: list[tuple[int, int]]
    """Trained spans in characters of the text; each span ends with its end-of-turn token."""
    ids: list[int] = field(default_factory=list)
    token_spans: list[tuple[int, int]] = field(default_factory=list)
    """Trained spans in tokens: index of the first and of the last token."""
    encoding: Any = None
    """The tokens with their offsets, if they are needed."""
    shares_token_with_prompt: bool = False
    """Whether a trained token also contains white space of the prompt."""
    refusal: RefusedConversation | None = None
    """Set if the tokens lose text."""


class ConversationEncoder:
    """Encoder of conversations with one tokenizer and its chat template; verifies every mask.

    The trained tokens are those that the model must generate after the generation prompt: the assistant's text,
    reasoning and tool calls, and the token that ends the turn. If the template opens a thinking block for an answer
    (Qwen3's is empty if there is no reasoning), the block is trained on too, because the model must generate it. A part
    that the prompt already contains (DeepSeek-R1's prompt ends with `<think>`) is not trained on.
    """

    end_of_turn: str
    """The control token that ends an answer."""
    omitted: dict[str, bool]
    """Whether the template omits each kind of content in the rows (system messages, tools, tool results)."""

    def __init__(self, tokenizer: Any, turns: Literal["all", "last", "flagged"] = "all") -> None:
        """Check the template with a sample conversation. Raises DataError if it cannot be used for training."""
        self._tokenizer, self._tokens, self._turns = tokenizer, tokenizer.backend_tokenizer, turns
        self._chat, self._control = ChatTemplate(tokenizer), ControlTokens(tokenizer)
        self._skeletons: dict[tuple[str, ...], TemplateSkeleton | None] = {}
        self._untrained = TemplateSkeleton.from_text("")
        self._prompts_checked: Counter[str] = Counter()
        self.omitted = {}
        begin_tokens = {tokenizer.bos_token} - {tokenizer.eos_token}
        self._finder = SpanFinder(self._chat, self._control, self._control.names - begin_tokens)
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
        self.end_of_turn = skeleton.spans[0].end_token
        self._finder = SpanFinder(self._chat, self._control, {self.end_of_turn, tokenizer.eos_token})
        self._skeletons.clear()

    def encode(self, rows: Sequence[tuple[str, Conversation]]) -> list[EncodedConversation | RefusedConversation]:
        """Encode rows, each given as (position in its source, conversation).

        Raises DataError, which names the first row that fails, if the template cannot be used for training.
        """
        _reset_tokenizer(self._tokenizer)
        batches = [rows[start : start + _BATCH_ROWS] for start in range(0, len(rows), _BATCH_ROWS)]
        results: list[EncodedConversation | RefusedConversation] = []
        pending: tuple[list[ConversationDraft | RefusedConversation], Future[None]] | None = None
        with ThreadPoolExecutor(max_workers=1) as pool:  # tokenizing releases the GIL while the next batch is rendered
            for batch in [*batches, ()]:
                texts = self._chat.render_all([conversation for _, conversation in batch])
                drafts = [self._create_draft(*row, text) for row, text in zip(batch, texts, strict=True)]
                rendered = [draft for draft in drafts if isinstance(draft, ConversationDraft)]
                plain = [draft for draft in rendered if draft.skeleton.anchors_reliable]
                with_offsets = [draft for draft in rendered if not draft.skeleton.anchors_reliable]
                tokenization = pool.submit(self._tokenize, plain, with_offsets)
                if pending:
                    pending[1].result()
                    results += self._verify(pending[0])
                pending = drafts, tokenization
        return results

    def shorten(
        self, where: str, conversation: Conversation, length: int, max_tokens: int, cut: Literal["prompt", "both"]
    ) -> tuple[Conversation, EncodedConversation | RefusedConversation] | None:
        """Cut the texts of a conversation of `length` tokens so that at most `max_tokens` remain, and encode it again.

        `prompt` cuts the messages of the user and of tools in their middle; `both` cuts each of these and the end of
        each answer by the same share. System messages, tool calls and reasoning stay. So the control tokens of the
        template stay too, and the mask is verified as for any other row. None: the remaining parts are too long.
        """
        cut_roles = {"user", "tool", "assistant"} if cut == "both" else {"user", "tool"}
        messages = conversation.messages
        kept, texts = dict[int, str](), dict[int, str]()
        for i, message in enumerate(messages):
            text: Any = extract_text(message)
            if isinstance(message.get("content"), str):
                *reasoning, text = split_reasoning(message)
                kept[i] = "".join(reasoning) + text[: len(text) - len(text.lstrip())] if any(reasoning) else ""
            if message["role"] in cut_roles and text.strip():
                texts[i] = text.strip()
        offsets = {i: self._tokens.encode(text, add_special_tokens=False).offsets for i, text in texts.items()}
        sizes = {i: len(found) for i, found in offsets.items() if found}
        room = sum(sizes.values()) - (length - max_tokens)
        while sizes and room >= len(sizes):
            counts, shortened = _share_tokens(sizes, room, cut), list(messages)
            for i, count in counts.items():
                is_prompt = messages[i]["role"] != "assistant"
                text = kept.get(i, "") + _cut_text(texts[i], offsets[i], count, from_middle=is_prompt)
                if isinstance(messages[i].get("content"), list):
                    text = [{"type": "text", "text": text}]
                shortened[i] = {**messages[i], "content": text}
            result = replace(conversation, messages=shortened)
            [encoded] = self.encode([(where, result)])
            if isinstance(encoded, RefusedConversation) or len(encoded.input_ids) <= max_tokens:
                return result, encoded
            room -= len(encoded.input_ids) - max_tokens  # at a cut, letters may form other tokens
        return None

    def note_omissions(self, conversation: Conversation) -> None:
        """Check, once for each kind of content, whether the template omits it, and note it in `omitted`."""
        roles = {message["role"] for message in conversation.messages}
        kinds = {"system messages": SYSTEM_ROLES, "tool results": ("tool",)}
        parts = {
            kind: [extract_text(message) for message in conversation.messages if message["role"] in kind_roles]
            for kind, kind_roles in kinds.items()
            if kind not in self.omitted and not roles.isdisjoint(kind_roles)
        }
        if conversation.tools and "tools" not in self.omitted:
            parts["tools"] = list(map(_tool_name, conversation.tools))
        if parts:
            [text] = self._chat.render_all([conversation])
            for kind, texts in parts.items():
                self.omitted[kind] = isinstance(text, str) and not all(
                    part.strip() in text or json.dumps(part.strip(), ensure_ascii=False)[1:-1] in text for part in texts
                )

    def _create_draft(
        self, where: str, conversation: Conversation, text: str | TemplateRenderError
    ) -> ConversationDraft | RefusedConversation:
        if problem := self._control.find(conversation):
            return RefusedConversation("control_token", problem)
        if isinstance(text, TemplateRenderError):
            return RefusedConversation("refused", f"the chat template raises {text}")
        try:
            text.encode()
        except UnicodeEncodeError:
            return RefusedConversation("refused", "a text holds half a surrogate pair, which is not a character")
        users = (m.get("content") for m in conversation.messages if m["role"] == "user")
        user_texts = (content.strip() for content in users if isinstance(content, str))
        if missing := next((part for part in user_texts if part not in text), None):
            return RefusedConversation(
                "refused", f"the chat template omits or changes a user message: {missing[:60]!r}"
            )
        trained = select_trained_turns(conversation.messages, self._turns)
        skeleton: TemplateSkeleton | None = self._untrained
        starts: list[int] | None = [0]
        if trained:
            key, texts = structure_key(conversation)
            skeleton = self._find_skeleton((*key, str(trained)), conversation, trained)
            starts = skeleton.align(text, texts) if skeleton else None
        if skeleton is None or starts is None:
            return self._align_individually(where, conversation, text, trained)
        return ConversationDraft(where, conversation, text, skeleton, skeleton.locate_spans(starts, text))

    def _find_skeleton(
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
        self, where: str, conversation: Conversation, text: str, trained: list[int]
    ) -> ConversationDraft | RefusedConversation:
        """Align a conversation with a skeleton of its own, which contains the texts of turns that are not trained on.

        This is necessary for templates that test texts: Qwen3's tests whether a user message is a tool result.
        """
        outline, answer = build_outline(conversation, trained), repr(conversation.response[:60])
        try:
            skeleton = self._finder.find(outline, conversation.tools, trained)
        except UntrainableTemplateError as error:
            raise DataError(f"{where}: {error} (last answer: {answer})") from None
        except TemplateRenderError as error:
            raise DataError(
                f"{where}: the chat template raises for some answers only ({error}), so answers cannot be "
                "located; use another template"
            ) from None
        if starts := skeleton.align(text, outline.texts):
            return ConversationDraft(where, conversation, text, skeleton, skeleton.locate_spans(starts, text))
        if any("</think>" in extract_text(conversation.messages[turn]) for turn in trained):
            return RefusedConversation(
                "refused",
                "an answer contains </think> without reasoning before it, and the chat template cuts it there",
            )
        raise DataError(
            f"{where}: the chat template changes an answer (last answer: {answer}); a template that rewrites "
            "answers cannot be trained on"
        )

    def _tokenize(self, plain: Sequence[ConversationDraft], with_offsets: Sequence[ConversationDraft]) -> None:
        """Set the ids of drafts. Encoding with offsets takes 50 % longer, so offsets are computed only if needed."""
        for drafts, encode in ((plain, self._tokens.encode_batch_fast), (with_offsets, self._tokens.encode_batch)):
            encodings = encode([draft.text for draft in drafts], add_special_tokens=False) if drafts else []
            for draft, encoding in zip(drafts, encodings, strict=True):
                draft.ids, draft.encoding = encoding.ids, encoding if drafts is with_offsets else None

    def _verify(
        self, drafts: Sequence[ConversationDraft | RefusedConversation]
    ) -> list[EncodedConversation | RefusedConversation]:
        """Locate the trained tokens of tokenized drafts and verify them.

        Raises DataError if prompt and answer share a token, the prompt alone is split into other tokens than the prompt
        with its answer, or the text begins with two BOS tokens.
        """
        rendered = [draft for draft in drafts if isinstance(draft, ConversationDraft)]
        self._locate_by_anchors([draft for draft in rendered if draft.encoding is None])
        self._locate_by_offsets([draft for draft in rendered if draft.encoding is not None])
        results: list[EncodedConversation | RefusedConversation] = []
        for draft in drafts:
            if isinstance(draft, RefusedConversation):
                results.append(draft)
            elif draft.refusal:
                results.append(draft.refusal)
            else:
                self._check_prompt_tokens(draft)
                labels = [IGNORE_INDEX] * len(draft.ids)
                for first, last in draft.token_spans:
                    labels[first : last + 1] = draft.ids[first : last + 1]
                results.append(EncodedConversation(draft.ids, labels))
        return results

    def _locate_by_anchors(self, drafts: list[ConversationDraft]) -> None:
        """Locate spans by counting tokens from control tokens, as in the `anchors` of the skeleton.

        If the located tokens do not decode exactly to the characters of the spans, offsets are computed.
        """
        for draft in drafts:
            draft.token_spans = _follow_anchors(draft.skeleton.anchors or [], draft.ids)
        failed = []
        for draft, texts in zip(drafts, self._decode(drafts), strict=True):
            if texts == [draft.text[start:end] for start, end in draft.char_spans]:
                draft.skeleton.anchor_hits += 1
            else:
                draft.skeleton.anchor_misses += 1
                failed.append(draft)
        self._tokenize([], failed)

    def _locate_by_offsets(self, drafts: list[ConversationDraft]) -> None:
        """Locate spans by the offsets of tokens, and refuse drafts if their tokens lose text."""
        for draft in drafts:
            draft.token_spans = [
                _locate_span_tokens(draft, start, end - len(span.end_token))
                for (start, end), span in zip(draft.char_spans, draft.skeleton.spans, strict=True)
            ]
            draft.encoding = None
        for draft, texts in zip(drafts, self._decode(drafts), strict=True):
            for (start, end), decoded in zip(draft.char_spans, texts, strict=True):
                expected = draft.text[start:end]
                if not self._is_same_text(decoded, expected):
                    draft.refusal = RefusedConversation("refused", _describe_difference(expected, decoded))
            if draft.skeleton.anchors is None and not draft.refusal:
                draft.skeleton.anchors = list(_describe_anchors(draft, self._control.ids))

    def _decode(self, drafts: list[ConversationDraft]) -> list[list[str]]:
        pieces = [draft.ids[first : last + 1] for draft in drafts for first, last in draft.token_spans]
        decoded = iter(self._tokens.decode_batch(pieces, skip_special_tokens=False) if pieces else [])
        return [[next(decoded) for _ in draft.token_spans] for draft in drafts]

    def _is_same_text(self, decoded: str, expected: str) -> bool:
        """Compare texts without outer white space, after the tokenizer's normalizer (for example NFC)."""
        decoded, expected = decoded.strip(), expected.strip()
        if decoded == expected or self._tokens.normalizer is None:
            return decoded == expected
        normalized = self._tokens.normalizer.normalize_str(expected)
        if "▁" not in expected:
            normalized = normalized.replace("▁", " ")  # SentencePiece writes a space as ▁
        return bool(normalized.strip() == decoded)

    def _check_prompt_tokens(self, draft: ConversationDraft) -> None:
        """Raise DataError if the prompt of the last answer has other tokens in inference than in training."""
        ids, skeleton, bos = draft.ids, draft.skeleton, self._tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise DataError(f"{draft.where}: the chat template writes the BOS token twice; remove one")
        if not skeleton.spans or not skeleton.last_turn_trained or skeleton.spans[-1].has_thinking_gap:
            return
        literal, offset = skeleton.spans[-1].start
        ending = skeleton.literals[literal][:offset][-_PROMPT_END_CHARACTERS:]
        if self._prompts_checked[ending] >= _MAX_PROMPTS_CHECKED and not draft.shares_token_with_prompt:
            return
        self._prompts_checked[ending] += 1
        first = draft.token_spans[-1][0]
        prompt = _encode_prompt(self._tokenizer, self._chat, draft.conversation.context)
        equal = count_equal(prompt, ids[:first])
        pieces = [prompt[equal:], ids[equal:first]]
        without_answer, with_answer = self._tokens.decode_batch(pieces, skip_special_tokens=False)
        if without_answer.strip() or with_answer.strip():
            raise DataError(
                f"{draft.where}: the tokenizer splits the prompt differently if an answer follows "
                f"({without_answer[:40]!r}, {with_answer[:40]!r}), so the model would be trained on prompts that it "
                "never gets; change the chat template so that prompts end with a control token or a line break"
            )


def encode_conversation(tokenizer: Any, conversation: Conversation, where: str) -> EncodedConversation:
    """Encode one conversation. Raises DataError like `ConversationEncoder`, and if the conversation is refused."""
    try:
        encoder = ConversationEncoder(tokenizer)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    [encoded] = encoder.encode([(where, conversation)])
    if isinstance(encoded, RefusedConversation):
        raise DataError(f"{where}: {encoded.detail}; fix or remove the row")
    return encoded


def encode_prompt(tokenizer: Any, context: Conversation) -> list[int]:
    """Return the token ids of a prompt for the next assistant turn. Raises DataError if the template raises."""
    _reset_tokenizer(tokenizer)
    try:
        return _encode_prompt(tokenizer, ChatTemplate(tokenizer), context)
    except TemplateRenderError as error:
        raise DataError(_describe_render_failure(context, error)) from None


def _encode_prompt(tokenizer: Any, chat: ChatTemplate, context: Conversation) -> list[int]:
    text = chat.render(context.messages, context.tools, prompt=True)
    return list(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def decode_answer(conversation: Conversation, labels: Sequence[int], tokenizer: Any) -> str:
    """Return the last answer of an encoded conversation as a model would write it, without surrounding white space.

    Tool calls are text only as the chat template writes them, so they are decoded from the tokens; otherwise the
    tokenizer is not used.
    """
    if not conversation.calls_tools:
        return conversation.response.strip()
    last = max(i for i, label in enumerate(labels) if label != IGNORE_INDEX)
    first = next((i + 1 for i in range(last, -1, -1) if labels[i] == IGNORE_INDEX), 0)
    text: str = tokenizer.decode(list(labels[first : last + 1]), skip_special_tokens=True)
    return text.strip()


def _reset_tokenizer(tokenizer: Any) -> None:
    """Turn off truncation and padding, which an earlier user of the tokenizer may have enabled."""
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()


def _describe_render_failure(conversation: Conversation, error: TemplateRenderError) -> str:
    roles = ", ".join(message["role"] for message in conversation.messages)
    return f"the chat template cannot write a conversation of {roles} ({error}); fix chat_template.jinja, or the rows"


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def merge_system_messages(conversation: Conversation) -> Conversation:
    """Move leading system messages into the first user turn, for templates that do not accept system messages."""
    messages = conversation.messages
    leading = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM_ROLES), len(messages))
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if not leading or first is None:
        return conversation
    system = [text for message in messages[:leading] if (text := extract_text(message))]
    content = messages[first].get("content")
    merged: Any
    if isinstance(content, list):
        merged = [*({"type": "text", "text": f"{text}\n\n"} for text in system), *content]
    else:
        merged = "\n\n".join([*system, *([content] if content else [])])
    user: Message = {**messages[first], "content": merged}
    return replace(conversation, messages=[*messages[leading:first], user, *messages[first + 1 :]])


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


def _share_tokens(sizes: Mapping[int, int], room: int, cut: Literal["prompt", "both"]) -> dict[int, int]:
    """Return the number of tokens that each text keeps, at least 1 each, if `room` tokens are left for all texts.

    For `both`, each text keeps the same share. For `prompt`, the longest texts are cut to the same length, so that a
    short instruction stays complete next to a long document.
    """
    if cut == "both":
        total = sum(sizes.values())
        return {text: max(1, size * room // total) for text, size in sizes.items()}
    counts, left = {}, room
    for position, text in enumerate(sorted(sizes, key=lambda text: (sizes[text], text))):
        counts[text] = min(sizes[text], max(1, left // (len(sizes) - position)))
        left -= counts[text]
    return counts


def _cut_text(text: str, offsets: Sequence[tuple[int, int]], count: int, from_middle: bool) -> str:
    """Return `count` tokens of a text: the first ones, or the same number from both ends.

    Instructions are usually at the beginning or at the end of a prompt (Bai et al. 2024, LongBench, section 4).
    """
    if count >= len(offsets):
        return text
    tail = count // 2 if from_middle else 0
    end = text[offsets[-tail][0] :] if tail else ""
    return (text[: offsets[count - tail - 1][1]] + end).strip()


# ----- Positions of spans among tokens


def _describe_anchors(draft: ConversationDraft, control_ids: frozenset[int]) -> Iterator[SpanAnchor]:
    """Yield the positions of a draft's spans relative to its control tokens."""
    ids, origin = draft.ids, 0
    for first, last in draft.token_spans:
        control = next((i for i in range(first - 1, origin - 1, -1) if ids[i] in control_ids), None)
        token = None if control is None else ids[control]
        occurrence = 0 if control is None else ids[origin:control].count(ids[control])
        distance = first - (origin if control is None else control)
        yield SpanAnchor(token, occurrence, distance, ids[last], ids[first:last].count(ids[last]))
        origin = last + 1


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
    """Return the first and the last token of the span from character `start`; its last token is at `last_start`."""
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


def _describe_difference(expected: str, decoded: str) -> str:
    """Describe the first difference between a text and the decoded text of its tokens."""
    expected, decoded = expected.strip(), decoded.strip()
    position = count_equal(expected, decoded)
    shown = slice(max(0, position - 10), position + 30)
    return f"the tokenizer loses characters: {expected[shown]!r} becomes {decoded[shown]!r}"
