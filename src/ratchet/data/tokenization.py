"""From spans of text to tokens: which tokens carry what is learned, and the proof that they carry nothing else."""

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
    learned_turns,
    structure_key,
)
from ratchet.data.conversation import (
    MASKED,
    SYSTEM_ROLES,
    Conversation,
    EncodedConversation,
    Message,
    RefusedConversation,
    extract_text,
)
from ratchet.errors import DataError

_PROMPTS_CHECKED = 64
_PROMPT_END = 60
"""Rows whose prompt is tokenised by itself and compared, for each way in which prompts end, in characters."""


@dataclass
class ConversationDraft:
    """A conversation as text, and what of it is learned."""

    where: str
    conversation: Conversation
    text: str
    skeleton: TemplateSkeleton | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    """What is learned, in characters of the text; each ends with its end-of-turn token."""
    ids: list[int] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """What is learned, in tokens."""
    needs_offsets: bool = True
    encoding: Any = None
    """The tokens with their offsets, until they were used."""
    straddles: bool = False
    """A learned token carries white space of the prompt too."""

    def fill(self, skeleton: TemplateSkeleton, starts: list[int]) -> "ConversationDraft":
        """Set the spans from where the skeleton's literals are in the text."""
        self.skeleton, self.needs_offsets = skeleton, not skeleton.guessable
        for span in skeleton.spans:
            start, end = starts[span.start[0]] + span.start[1], starts[span.end[0]] + span.end[1]
            if span.given and self.text.startswith(span.given, start):
                start += len(span.given)
            self.spans.append((start, end))
        return self

    def encoded(self) -> EncodedConversation:
        """The ids, masked but where they are learned."""
        labels = [MASKED] * len(self.ids)
        for first, last in self.places:
            labels[first : last + 1] = self.ids[first : last + 1]
        return EncodedConversation(self.ids, labels)


class DraftTokenizer:
    """A tokenizer as drafts need it."""

    def __init__(self, tokenizer: Any, chat: ChatTemplate, control_ids: frozenset[int]) -> None:
        self._tokens = tokenizer.backend_tokenizer
        self._bos = tokenizer.bos_token_id
        self._chat, self._control_ids = chat, control_ids
        self._checked: Counter[str] = Counter()

    def reset(self) -> None:
        """Turn off truncation and padding: they stay set in a tokenizer from whoever used it last."""
        self._tokens.no_truncation()
        self._tokens.no_padding()

    def prompt_ids(self, question: Conversation) -> list[int]:
        """Ids of the text after which the assistant speaks. Raises TemplateRenderError."""
        text = self._chat.write(question.messages, question.tools, prompt=True)
        return list(self._tokens.encode(text, add_special_tokens=False).ids)

    def tokenise(self, drafts: Sequence[ConversationDraft]) -> None:
        """Set the ids of drafts. Offsets of every token, which cost half as much again, only where they are needed."""
        for offsets in (False, True):
            chosen = [draft for draft in drafts if draft.needs_offsets == offsets]
            run = self._tokens.encode_batch if offsets else self._tokens.encode_batch_fast
            encodings = run([draft.text for draft in chosen], add_special_tokens=False) if chosen else []
            for draft, encoding in zip(chosen, encodings, strict=True):
                draft.ids, draft.encoding = encoding.ids, encoding if offsets else None

    def prove(self, drafts: Sequence[ConversationDraft]) -> list[EncodedConversation | RefusedConversation]:
        """Token ids and masks of tokenised drafts.

        Raises:
            DataError: prompt and answer share a token, the prompt is tokenised otherwise without its answer, or the
                text begins with two BOS tokens.
        """
        wrong = self._guess([draft for draft in drafts if draft.encoding is None])
        for draft in wrong:
            draft.needs_offsets = True
        self.tokenise(wrong)
        refused = self._measure([draft for draft in drafts if draft.encoding is not None])
        results: list[EncodedConversation | RefusedConversation] = []
        for draft in drafts:
            if refusal := refused.get(id(draft)):
                results.append(refusal)
            else:
                self._check(draft)
                results.append(draft.encoded())
        return results

    def _guess(self, drafts: list[ConversationDraft]) -> list[ConversationDraft]:
        """Place spans by counting tokens from control tokens, as in earlier rows; returns where that was wrong.

        A guess gets no benefit of the doubt: the tokens must decode to the very characters of the span.
        """
        for draft in drafts:
            draft.places = _follow_anchors(draft.skeleton.anchors or [], draft.ids) if draft.skeleton else []
        wrong = []
        for draft, texts in zip(drafts, self._decode(drafts), strict=True):
            right = texts == [draft.text[start:end] for start, end in draft.spans]
            if draft.skeleton:
                draft.skeleton.guessed(right)
            if not right:
                wrong.append(draft)
        return wrong

    def _measure(self, drafts: list[ConversationDraft]) -> dict[int, RefusedConversation]:
        """Place spans by the offsets of tokens. Returns where tokens and text differ, by the draft's identity."""
        for draft in drafts:
            if draft.skeleton:
                spans = zip(draft.spans, draft.skeleton.spans, strict=True)
                draft.places = [
                    _locate_span_tokens(draft, start, end - len(span.ender)) for (start, end), span in spans
                ]
            draft.encoding = None
        refused = {}
        for draft, texts in zip(drafts, self._decode(drafts), strict=True):
            for (start, end), decoded in zip(draft.spans, texts, strict=True):
                if not self._same(decoded, draft.text[start:end]):
                    refused[id(draft)] = RefusedConversation(
                        "refused", _describe_difference(draft.text[start:end], decoded)
                    )
            if draft.skeleton and draft.skeleton.anchors is None and id(draft) not in refused:
                draft.skeleton.anchors = self._anchors(draft)
        return refused

    def _anchors(self, draft: ConversationDraft) -> list[SpanAnchor]:
        """How to find the spans of a draft from its control tokens."""
        anchors, ids, from_here = [], draft.ids, 0
        for first, last in draft.places:
            inside = ids[first:last].count(ids[last])
            before = next((i for i in range(first - 1, from_here - 1, -1) if ids[i] in self._control_ids), None)
            if before is None:
                anchors.append(SpanAnchor(None, 0, first - from_here, ids[last], inside))
            else:
                skipped = ids[from_here:before].count(ids[before])
                anchors.append(SpanAnchor(ids[before], skipped, first - before, ids[last], inside))
            from_here = last + 1
        return anchors

    def _decode(self, drafts: list[ConversationDraft]) -> list[list[str]]:
        pieces = [draft.ids[first : last + 1] for draft in drafts for first, last in draft.places]
        decoded = iter(self._tokens.decode_batch(pieces, skip_special_tokens=False) if pieces else [])
        return [[next(decoded) for _ in draft.places] for draft in drafts]

    def _same(self, decoded: str, expected: str) -> bool:
        """Equal but for white space at the ends, or for what the tokenizer's own normaliser does (NFC, say)."""
        decoded, expected = decoded.strip(), expected.strip()
        if decoded == expected:
            return True
        if self._tokens.normalizer is None:
            return False
        normal = self._tokens.normalizer.normalize_str(expected)
        if "▁" not in expected:
            normal = normal.replace("▁", " ")  # SentencePiece writes spaces so
        return bool(normal.strip() == decoded)

    def _check(self, draft: ConversationDraft) -> None:
        """Raise DataError where inference would give the model other tokens before the last answer than training."""
        ids, skeleton = draft.ids, draft.skeleton
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            raise DataError(f"{draft.where}: the chat template writes the BOS token twice; take one out")
        if skeleton is None or not skeleton.spans or not skeleton.ends_learned or skeleton.spans[-1].thinking:
            return
        literal, offset = skeleton.spans[-1].start
        ending = skeleton.literals[literal][:offset][-_PROMPT_END:]
        if self._checked[ending] >= _PROMPTS_CHECKED and not draft.straddles:
            return
        self._checked[ending] += 1
        first = draft.places[-1][0]
        prompt = self.prompt_ids(draft.conversation.question)
        if prompt == ids[:first]:
            return
        equal = _find_first_difference(prompt, ids[:first])
        apart = self._tokens.decode_batch([prompt[equal:], ids[equal:first]], skip_special_tokens=False)
        if any(text.strip() for text in apart):
            raise DataError(
                f"{draft.where}: the tokenizer splits the prompt otherwise once the answer follows ({apart[0][:40]!r}, "
                f"{apart[1][:40]!r}), so the model would be trained on prompts that it never gets; let the chat "
                "template end prompts with a control token or a line break"
            )


def _follow_anchors(anchors: list[SpanAnchor], ids: list[int]) -> list[tuple[int, int]]:
    """First and last token of each span; empty where a control token is not there."""
    places = []
    at = 0
    try:
        for anchor in anchors:
            if anchor.token is not None:
                at = _find_nth(ids, anchor.token, anchor.skipped, at)
            first = at + anchor.distance
            last = _find_nth(ids, anchor.end, anchor.ends_inside, first)
            places.append((first, last))
            at = last + 1
    except ValueError:
        return []
    return places


def _find_nth(ids: list[int], token: int, skipped: int, at: int) -> int:
    """Position of a token from `at` on, after others like it. Raises ValueError."""
    place = ids.index(token, at)
    for _ in range(skipped):
        place = ids.index(token, place + 1)
    return place


def _locate_span_tokens(draft: ConversationDraft, start: int, ender: int) -> tuple[int, int]:
    """First and last token of a span that begins at `start` and whose last token begins at `ender`."""
    encoding = draft.encoding
    at = start
    while (first := encoding.char_to_token(at)) is None and at < ender:
        at += 1  # white space that tokens do not count as theirs
    last = encoding.char_to_token(ender)
    if first is None or last is None:
        raise DataError(f"{draft.where}: the tokenizer has no token for the end of a turn; use another tokenizer")
    while first > 0 and (before := encoding.token_to_chars(first - 1)) is not None and before[0] >= start:
        first -= 1
    shared = draft.text[encoding.token_to_chars(first)[0] : start]
    if shared.strip():
        raise DataError(
            f"{draft.where}: one token holds the end of the prompt and the beginning of the answer ({shared[-20:]!r} "
            f"and {draft.text[start : start + 20]!r}); let the chat template write a space or a line break between them"
        )
    draft.straddles |= bool(shared)
    return first, last


def _find_first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _describe_difference(expected: str, decoded: str) -> str:
    """Where a text and what its tokens stand for begin to differ."""
    expected, decoded = expected.strip(), decoded.strip()
    at = _find_first_difference(expected, decoded)
    shown = slice(max(0, at - 10), at + 30)
    return f"the tokenizer loses characters: {expected[shown]!r} becomes {decoded[shown]!r}"


# Conversations to token ids by the tokenizer's own chat template, with a mask of what is learned, proved row by row.
#
# The text that the template writes is taken apart (`skeleton`), what the assistant has to say is found in it
# (`spans`),
# and the whole is tokenised once (`alignment`). No token of the prompt is learned from, and none of the answer is
# lost.

Turns = Literal["all", "last", "flagged"]

_BATCH_ROWS = 512
_MOST_SKELETONS = 4096
"""Skeletons kept: conversations with tools may have one each."""
_TRIAL = Conversation([{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two.", "train": True}])


class ConversationEncoder:
    """Conversations to token ids and masks, by one tokenizer and its chat template; proves every mask.

    Learned is what the model must write after the generation prompt: the assistant's words, reasoning and tool calls
    too, and the token that ends the turn. Where the template opens a thinking block for an answer (Qwen3's is empty
    when there is no reasoning), the block is learned too, for the model is expected to write it; what the prompt
    already says of it (DeepSeek-R1's ends with `<think>`) is not.
    """

    end_of_turn: str
    """The control token that ends an answer."""

    def __init__(self, tokenizer: Any, turns: Turns = "all") -> None:
        """Try the template on a conversation of one question and its answer.

        Raises:
            DataError: it cannot be trained on.
        """
        self._turns = turns
        self._chat, self._control = ChatTemplate(tokenizer), ControlTokens(tokenizer)
        self._tokens = DraftTokenizer(tokenizer, self._chat, self._control.ids)
        self._skeletons: dict[tuple[str, ...], TemplateSkeleton | None] = {}
        begins = {tokenizer.bos_token} - {tokenizer.eos_token}
        self._finder = SpanFinder(self._chat, self._control, self._control.names - begins)
        self.end_of_turn = self._trial()
        self._finder = SpanFinder(self._chat, self._control, {self.end_of_turn, tokenizer.eos_token})
        self._skeletons.clear()

    def _trial(self) -> str:
        try:
            skeleton = self._finder.find(build_outline(_TRIAL), None, [1])
        except UntrainableTemplateError as error:
            raise DataError(f"{error} (seen in a trial conversation of user and assistant)") from None
        except TemplateRenderError as error:
            raise DataError(_describe_render_failure(_TRIAL, error)) from None
        [tried] = self.encode([("trial conversation", _TRIAL)])
        if isinstance(tried, RefusedConversation):
            raise DataError(f"the tokenizer cannot write a trial conversation back: {tried.detail}; use another one")
        return skeleton.spans[0].ender

    def encode(self, rows: Sequence[tuple[str, Conversation]]) -> list[EncodedConversation | RefusedConversation]:
        """Token ids and masks of rows, each given with the place that it comes from.

        Raises:
            DataError: the template cannot be trained on, with the first row found to show it.
        """
        self._tokens.reset()
        batches = [rows[start : start + _BATCH_ROWS] for start in range(0, len(rows), _BATCH_ROWS)]
        results: list[EncodedConversation | RefusedConversation] = []
        waiting: tuple[list[ConversationDraft | RefusedConversation], Future[None]] | None = None
        with ThreadPoolExecutor(max_workers=1) as pool:  # tokenising leaves Python free to write the next batch
            for batch in batches:
                drafts = self._drafts(batch)
                ahead = pool.submit(
                    self._tokens.tokenise, [draft for draft in drafts if isinstance(draft, ConversationDraft)]
                )
                if waiting:
                    results += self._prove(*waiting)
                waiting = drafts, ahead
            if waiting:
                results += self._prove(*waiting)
        return results

    def leaves_out(self, conversation: Conversation) -> dict[str, bool]:
        """Of what this conversation has beside questions and answers, whether the template leaves it out."""
        [text] = self._chat.write_all([conversation])
        parts = {
            "system messages": [extract_text(m) for m in conversation.messages if m["role"] in SYSTEM_ROLES],
            "tool results": [extract_text(m) for m in conversation.messages if m["role"] == "tool"],
            "tools": [_tool_name(tool) for tool in conversation.tools or []],
        }
        return {
            name: isinstance(text, str) and any(not _is_text_written(one.strip(), text) for one in said)
            for name, said in parts.items()
            if any(one.strip() for one in said)
        }

    def _drafts(self, rows: Sequence[tuple[str, Conversation]]) -> list[ConversationDraft | RefusedConversation]:
        texts = self._chat.write_all([conversation for _, conversation in rows])
        return [self._draft(where, conversation, text) for (where, conversation), text in zip(rows, texts, strict=True)]

    def _prove(
        self, drafts: list[ConversationDraft | RefusedConversation], ahead: Future[None]
    ) -> list[EncodedConversation | RefusedConversation]:
        ahead.result()
        encoded = iter(self._tokens.prove([draft for draft in drafts if isinstance(draft, ConversationDraft)]))
        return [draft if isinstance(draft, RefusedConversation) else next(encoded) for draft in drafts]

    def _draft(
        self, where: str, conversation: Conversation, text: str | TemplateRenderError
    ) -> ConversationDraft | RefusedConversation:
        if found := self._control.find(conversation):
            return RefusedConversation("control_token", found)
        if isinstance(text, TemplateRenderError) or not _is_unicode(text):
            surrogate = "a text holds half of a surrogate pair, which is no character"
            return RefusedConversation(
                "refused", surrogate if isinstance(text, str) else f"the chat template raises {text}"
            )
        if unheard := next((said for said in _user_texts(conversation) if said not in text), None):
            return RefusedConversation(
                "refused", f"the chat template leaves out or changes what the user says: {unheard[:60]!r}"
            )
        learned = learned_turns(conversation.messages, self._turns)
        draft = ConversationDraft(where, conversation, text)
        if not learned:
            return draft
        key, texts = structure_key(conversation)
        if self._turns == "flagged":
            key = (*key, str(learned))
        skeleton = self._known(key, conversation, learned)
        if skeleton and (starts := skeleton.align(text, texts)):
            return draft.fill(skeleton, starts)
        return self._alone(draft, learned)

    def _known(self, key: tuple[str, ...], conversation: Conversation, learned: list[int]) -> TemplateSkeleton | None:
        """The skeleton of a structure; None where there is none that holds for every conversation of it."""
        if key not in self._skeletons:
            if len(self._skeletons) >= _MOST_SKELETONS:
                self._skeletons.clear()
            try:
                self._skeletons[key] = self._finder.find(build_outline(conversation), conversation.tools, learned)
            except (TemplateRenderError, UntrainableTemplateError):
                self._skeletons[key] = None
        return self._skeletons[key]

    def _alone(self, draft: ConversationDraft, learned: list[int]) -> ConversationDraft | RefusedConversation:
        """The same for one conversation by itself: the texts of turns that are not learned are part of its skeleton.

        Templates look into texts: Qwen3's, whether a user's message is the result of a tool.
        """
        conversation = draft.conversation
        own = build_outline(conversation, frozenset(learned))
        answer = repr(conversation.response[:60])
        try:
            skeleton = self._finder.find(own, conversation.tools, learned)
        except UntrainableTemplateError as error:
            raise DataError(f"{draft.where}: {error} (last answer: {answer})") from None
        except TemplateRenderError as error:
            raise DataError(
                f"{draft.where}: the chat template raises for some answers only ({error}), so it cannot be told where "
                "an answer lies; use another template"
            ) from None
        if starts := skeleton.align(draft.text, own.texts):
            return draft.fill(skeleton, starts)
        if any("</think>" in extract_text(conversation.messages[turn]) for turn in learned):
            return RefusedConversation(
                "refused", "an answer holds </think> where no reasoning ends, and the chat template cuts it"
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
    return f"the chat template cannot write a conversation of {roles} ({error}); mend chat_template.jinja, or the rows"


def _user_texts(conversation: Conversation) -> Iterator[str]:
    """What the user says, as templates write it; of content in parts each part is written by itself."""
    for message in conversation.messages:
        if message["role"] == "user" and isinstance(message.get("content"), str):
            yield message["content"].strip()


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _is_text_written(said: str, text: str) -> bool:
    """Whether a template wrote a text, plainly or as a JSON string."""
    return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text


def encode_conversation(
    tokenizer: Any, conversation: Conversation, where: str, turns: Turns = "all"
) -> EncodedConversation:
    """One conversation. Raises DataError like `ConversationEncoder`, and where a conversation is refused."""
    try:
        encoder = ConversationEncoder(tokenizer, turns)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    [encoded] = encoder.encode([(where, conversation)])
    if isinstance(encoded, RefusedConversation):
        raise DataError(f"{where}: {encoded.detail}; mend the row, or leave it out")
    return encoded


def encode_prompt(tokenizer: Any, question: Conversation) -> list[int]:
    """Token ids up to the place where the assistant begins to speak. Raises DataError where the template refuses."""
    tokens = DraftTokenizer(tokenizer, ChatTemplate(tokenizer), frozenset())
    tokens.reset()
    try:
        return tokens.prompt_ids(question)
    except TemplateRenderError as error:
        raise DataError(_describe_render_failure(question, error)) from None


def merge_system_messages(conversation: Conversation) -> Conversation:
    """Put leading system messages into the first user turn, a blank line between; for templates that refuse them."""
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
    """Cut a conversation to at most `max_tokens`.

    The last answer that begins early enough for one of its tokens to stay ends it: whole where it fits, else cut, with
    its own end-of-turn token last. None where there is no such answer.
    """
    ids, labels = encoded.input_ids, encoded.labels
    if len(ids) <= max_tokens:
        return encoded
    begins = [i for i, label in enumerate(labels) if label != MASKED and (i == 0 or labels[i - 1] == MASKED)]
    for begin in reversed(begins):
        end = next((i for i in range(begin, len(labels)) if labels[i] == MASKED), len(labels))
        if end <= max_tokens:
            return EncodedConversation(ids[:end], labels[:end])
        if begin + 2 <= max_tokens:
            return EncodedConversation(
                [*ids[: max_tokens - 1], ids[end - 1]], [*labels[: max_tokens - 1], labels[end - 1]]
            )
    return None
