"""From spans of text to tokens: which tokens carry what is learned, and the proof that they carry nothing else."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ratchet.data.conversation import MASKED, Conversation, Encoded, Refused
from ratchet.data.template_rendering import ChatTemplate
from ratchet.data.template_structure import Anchor, Skeleton
from ratchet.errors import DataError

_PROMPTS_CHECKED = 64
_PROMPT_END = 60
"""Rows whose prompt is tokenised by itself and compared, for each way in which prompts end, in characters."""


@dataclass
class Draft:
    """A conversation as text, and what of it is learned."""

    where: str
    conversation: Conversation
    text: str
    skeleton: Skeleton | None = None
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

    def fill(self, skeleton: Skeleton, starts: list[int]) -> "Draft":
        """Set the spans from where the skeleton's literals are in the text."""
        self.skeleton, self.needs_offsets = skeleton, not skeleton.guessable
        for span in skeleton.spans:
            start, end = starts[span.start[0]] + span.start[1], starts[span.end[0]] + span.end[1]
            if span.given and self.text.startswith(span.given, start):
                start += len(span.given)
            self.spans.append((start, end))
        return self

    def encoded(self) -> Encoded:
        """The ids, masked but where they are learned."""
        labels = [MASKED] * len(self.ids)
        for first, last in self.places:
            labels[first : last + 1] = self.ids[first : last + 1]
        return Encoded(self.ids, labels)


class Tokens:
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
        """Ids of the text after which the assistant speaks. Raises UnwritableError."""
        text = self._chat.write(question.messages, question.tools, prompt=True)
        return list(self._tokens.encode(text, add_special_tokens=False).ids)

    def tokenise(self, drafts: Sequence[Draft]) -> None:
        """Set the ids of drafts. Offsets of every token, which cost half as much again, only where they are needed."""
        for offsets in (False, True):
            chosen = [draft for draft in drafts if draft.needs_offsets == offsets]
            run = self._tokens.encode_batch if offsets else self._tokens.encode_batch_fast
            encodings = run([draft.text for draft in chosen], add_special_tokens=False) if chosen else []
            for draft, encoding in zip(chosen, encodings, strict=True):
                draft.ids, draft.encoding = encoding.ids, encoding if offsets else None

    def prove(self, drafts: Sequence[Draft]) -> list[Encoded | Refused]:
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
        results: list[Encoded | Refused] = []
        for draft in drafts:
            if refusal := refused.get(id(draft)):
                results.append(refusal)
            else:
                self._check(draft)
                results.append(draft.encoded())
        return results

    def _guess(self, drafts: list[Draft]) -> list[Draft]:
        """Place spans by counting tokens from control tokens, as in earlier rows; returns where that was wrong.

        A guess gets no benefit of the doubt: the tokens must decode to the very characters of the span.
        """
        for draft in drafts:
            draft.places = _follow(draft.skeleton.anchors or [], draft.ids) if draft.skeleton else []
        wrong = []
        for draft, texts in zip(drafts, self._decode(drafts), strict=True):
            right = texts == [draft.text[start:end] for start, end in draft.spans]
            if draft.skeleton:
                draft.skeleton.guessed(right)
            if not right:
                wrong.append(draft)
        return wrong

    def _measure(self, drafts: list[Draft]) -> dict[int, Refused]:
        """Place spans by the offsets of tokens. Returns where tokens and text differ, by the draft's identity."""
        for draft in drafts:
            if draft.skeleton:
                spans = zip(draft.spans, draft.skeleton.spans, strict=True)
                draft.places = [_place(draft, start, end - len(span.ender)) for (start, end), span in spans]
            draft.encoding = None
        refused = {}
        for draft, texts in zip(drafts, self._decode(drafts), strict=True):
            for (start, end), decoded in zip(draft.spans, texts, strict=True):
                if not self._same(decoded, draft.text[start:end]):
                    refused[id(draft)] = Refused("refused", _difference(draft.text[start:end], decoded))
            if draft.skeleton and draft.skeleton.anchors is None and id(draft) not in refused:
                draft.skeleton.anchors = self._anchors(draft)
        return refused

    def _anchors(self, draft: Draft) -> list[Anchor]:
        """How to find the spans of a draft from its control tokens."""
        anchors, ids, from_here = [], draft.ids, 0
        for first, last in draft.places:
            inside = ids[first:last].count(ids[last])
            before = next((i for i in range(first - 1, from_here - 1, -1) if ids[i] in self._control_ids), None)
            if before is None:
                anchors.append(Anchor(None, 0, first - from_here, ids[last], inside))
            else:
                skipped = ids[from_here:before].count(ids[before])
                anchors.append(Anchor(ids[before], skipped, first - before, ids[last], inside))
            from_here = last + 1
        return anchors

    def _decode(self, drafts: list[Draft]) -> list[list[str]]:
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

    def _check(self, draft: Draft) -> None:
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
        equal = _first_difference(prompt, ids[:first])
        apart = self._tokens.decode_batch([prompt[equal:], ids[equal:first]], skip_special_tokens=False)
        if any(text.strip() for text in apart):
            raise DataError(
                f"{draft.where}: the tokenizer splits the prompt otherwise once the answer follows ({apart[0][:40]!r}, "
                f"{apart[1][:40]!r}), so the model would be trained on prompts that it never gets; let the chat "
                "template end prompts with a control token or a line break"
            )


def _follow(anchors: list[Anchor], ids: list[int]) -> list[tuple[int, int]]:
    """First and last token of each span; empty where a control token is not there."""
    places = []
    at = 0
    try:
        for anchor in anchors:
            if anchor.token is not None:
                at = _nth(ids, anchor.token, anchor.skipped, at)
            first = at + anchor.distance
            last = _nth(ids, anchor.end, anchor.ends_inside, first)
            places.append((first, last))
            at = last + 1
    except ValueError:
        return []
    return places


def _nth(ids: list[int], token: int, skipped: int, at: int) -> int:
    """Position of a token from `at` on, after others like it. Raises ValueError."""
    place = ids.index(token, at)
    for _ in range(skipped):
        place = ids.index(token, place + 1)
    return place


def _place(draft: Draft, start: int, ender: int) -> tuple[int, int]:
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


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _difference(expected: str, decoded: str) -> str:
    """Where a text and what its tokens stand for begin to differ."""
    expected, decoded = expected.strip(), decoded.strip()
    at = _first_difference(expected, decoded)
    shown = slice(max(0, at - 10), at + 30)
    return f"the tokenizer loses characters: {expected[shown]!r} becomes {decoded[shown]!r}"
