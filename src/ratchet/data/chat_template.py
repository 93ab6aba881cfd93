"""Conversations to token ids by the tokenizer's own chat template, with a mask of what is learned, proved row by row.

The text that the template writes is taken apart (`skeleton`), what the assistant has to say is found in it (`spans`),
and the whole is tokenised once (`alignment`). No token of the prompt is learned from, and none of the answer is lost.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal

from ratchet.data.conversation import MASKED, SYSTEM_ROLES, Conversation, Encoded, Message, Refused, text_of
from ratchet.data.label_mask import Draft, Tokens
from ratchet.data.template_rendering import ChatTemplate, ControlTokens, UnwritableError
from ratchet.data.template_structure import Skeleton, SpanFinder, UntrainableError, learned_turns, outline, structure
from ratchet.errors import DataError

Turns = Literal["all", "last", "flagged"]

_BATCH_ROWS = 512
_MOST_SKELETONS = 4096
"""Skeletons kept: conversations with tools may have one each."""
_TRIAL = Conversation([{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two.", "train": True}])


class Encoder:
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
        self._tokens = Tokens(tokenizer, self._chat, self._control.ids)
        self._skeletons: dict[tuple[str, ...], Skeleton | None] = {}
        begins = {tokenizer.bos_token} - {tokenizer.eos_token}
        self._finder = SpanFinder(self._chat, self._control, self._control.names - begins)
        self.end_of_turn = self._trial()
        self._finder = SpanFinder(self._chat, self._control, {self.end_of_turn, tokenizer.eos_token})
        self._skeletons.clear()

    def _trial(self) -> str:
        try:
            skeleton = self._finder.find(outline(_TRIAL), None, [1])
        except UntrainableError as error:
            raise DataError(f"{error} (seen in a trial conversation of user and assistant)") from None
        except UnwritableError as error:
            raise DataError(_unwritable(_TRIAL, error)) from None
        [tried] = self.encode([("trial conversation", _TRIAL)])
        if isinstance(tried, Refused):
            raise DataError(f"the tokenizer cannot write a trial conversation back: {tried.detail}; use another one")
        return skeleton.spans[0].ender

    def encode(self, rows: Sequence[tuple[str, Conversation]]) -> list[Encoded | Refused]:
        """Token ids and masks of rows, each given with the place that it comes from.

        Raises:
            DataError: the template cannot be trained on, with the first row found to show it.
        """
        self._tokens.reset()
        batches = [rows[start : start + _BATCH_ROWS] for start in range(0, len(rows), _BATCH_ROWS)]
        results: list[Encoded | Refused] = []
        waiting: tuple[list[Draft | Refused], Future[None]] | None = None
        with ThreadPoolExecutor(max_workers=1) as pool:  # tokenising leaves Python free to write the next batch
            for batch in batches:
                drafts = self._drafts(batch)
                ahead = pool.submit(self._tokens.tokenise, [draft for draft in drafts if isinstance(draft, Draft)])
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
            "system messages": [text_of(m) for m in conversation.messages if m["role"] in SYSTEM_ROLES],
            "tool results": [text_of(m) for m in conversation.messages if m["role"] == "tool"],
            "tools": [_tool_name(tool) for tool in conversation.tools or []],
        }
        return {
            name: isinstance(text, str) and any(not _is_in(one.strip(), text) for one in said)
            for name, said in parts.items()
            if any(one.strip() for one in said)
        }

    def _drafts(self, rows: Sequence[tuple[str, Conversation]]) -> list[Draft | Refused]:
        texts = self._chat.write_all([conversation for _, conversation in rows])
        return [self._draft(where, conversation, text) for (where, conversation), text in zip(rows, texts, strict=True)]

    def _prove(self, drafts: list[Draft | Refused], ahead: Future[None]) -> list[Encoded | Refused]:
        ahead.result()
        encoded = iter(self._tokens.prove([draft for draft in drafts if isinstance(draft, Draft)]))
        return [draft if isinstance(draft, Refused) else next(encoded) for draft in drafts]

    def _draft(self, where: str, conversation: Conversation, text: str | UnwritableError) -> Draft | Refused:
        if found := self._control.find(conversation):
            return Refused("control_token", found)
        if isinstance(text, UnwritableError) or not _is_unicode(text):
            surrogate = "a text holds half of a surrogate pair, which is no character"
            return Refused("refused", surrogate if isinstance(text, str) else f"the chat template raises {text}")
        if unheard := next((said for said in _asked(conversation) if said not in text), None):
            return Refused("refused", f"the chat template leaves out or changes what the user says: {unheard[:60]!r}")
        learned = learned_turns(conversation.messages, self._turns)
        draft = Draft(where, conversation, text)
        if not learned:
            return draft
        key, texts = structure(conversation)
        if self._turns == "flagged":
            key = (*key, str(learned))
        skeleton = self._known(key, conversation, learned)
        if skeleton and (starts := skeleton.align(text, texts)):
            return draft.fill(skeleton, starts)
        return self._alone(draft, learned)

    def _known(self, key: tuple[str, ...], conversation: Conversation, learned: list[int]) -> Skeleton | None:
        """The skeleton of a structure; None where there is none that holds for every conversation of it."""
        if key not in self._skeletons:
            if len(self._skeletons) >= _MOST_SKELETONS:
                self._skeletons.clear()
            try:
                self._skeletons[key] = self._finder.find(outline(conversation), conversation.tools, learned)
            except (UnwritableError, UntrainableError):
                self._skeletons[key] = None
        return self._skeletons[key]

    def _alone(self, draft: Draft, learned: list[int]) -> Draft | Refused:
        """The same for one conversation by itself: the texts of turns that are not learned are part of its skeleton.

        Templates look into texts: Qwen3's, whether a user's message is the result of a tool.
        """
        conversation = draft.conversation
        own = outline(conversation, frozenset(learned))
        answer = repr(conversation.response[:60])
        try:
            skeleton = self._finder.find(own, conversation.tools, learned)
        except UntrainableError as error:
            raise DataError(f"{draft.where}: {error} (last answer: {answer})") from None
        except UnwritableError as error:
            raise DataError(
                f"{draft.where}: the chat template raises for some answers only ({error}), so it cannot be told where "
                "an answer lies; use another template"
            ) from None
        if starts := skeleton.align(draft.text, own.texts):
            return draft.fill(skeleton, starts)
        if any("</think>" in text_of(conversation.messages[turn]) for turn in learned):
            return Refused("refused", "an answer holds </think> where no reasoning ends, and the chat template cuts it")
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


def _unwritable(conversation: Conversation, error: UnwritableError) -> str:
    roles = ", ".join(message["role"] for message in conversation.messages)
    return f"the chat template cannot write a conversation of {roles} ({error}); mend chat_template.jinja, or the rows"


def _asked(conversation: Conversation) -> Iterator[str]:
    """What the user says, as templates write it; of content in parts each part is written by itself."""
    for message in conversation.messages:
        if message["role"] == "user" and isinstance(message.get("content"), str):
            yield message["content"].strip()


def _tool_name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name", "")) if isinstance(function, dict) else ""


def _is_in(said: str, text: str) -> bool:
    """Whether a template wrote a text, plainly or as a JSON string."""
    return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text


def encode(tokenizer: Any, conversation: Conversation, where: str, turns: Turns = "all") -> Encoded:
    """One conversation. Raises DataError like `Encoder`, and where a conversation is refused."""
    try:
        encoder = Encoder(tokenizer, turns)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    [encoded] = encoder.encode([(where, conversation)])
    if isinstance(encoded, Refused):
        raise DataError(f"{where}: {encoded.detail}; mend the row, or leave it out")
    return encoded


def prompt_ids(tokenizer: Any, question: Conversation) -> list[int]:
    """Token ids up to the place where the assistant begins to speak. Raises DataError where the template refuses."""
    tokens = Tokens(tokenizer, ChatTemplate(tokenizer), frozenset())
    tokens.reset()
    try:
        return tokens.prompt_ids(question)
    except UnwritableError as error:
        raise DataError(_unwritable(question, error)) from None


def merge_system(conversation: Conversation) -> Conversation:
    """Put leading system messages into the first user turn, a blank line between; for templates that refuse them."""
    messages = conversation.messages
    leading = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if not leading or first is None:
        return conversation
    system = [text for message in messages[:leading] if (text := text_of(message))]
    merged = [*messages[leading:first], _with_text_before(messages[first], system), *messages[first + 1 :]]
    return replace(conversation, messages=merged)


def _with_text_before(message: Message, texts: list[str]) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [*({"type": "text", "text": f"{text}\n\n"} for text in texts), *content]}
    return {**message, "content": "\n\n".join([*texts, *([content] if content else [])])}


def shorten(encoded: Encoded, max_tokens: int) -> Encoded | None:
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
            return Encoded(ids[:end], labels[:end])
        if begin + 2 <= max_tokens:
            return Encoded([*ids[: max_tokens - 1], ids[end - 1]], [*labels[: max_tokens - 1], labels[end - 1]])
    return None
