"""A tokenizer's chat template as a function from messages to text, and the control tokens that no message may hold."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ratchet.data.conversation import Conversation, Message

OURS = ("train", "weight")
"""Fields of a message that are for us (is this turn learned from?) and not for the template."""


class UnwritableError(Exception):
    """The template raised for these messages; the text is its own reason, on one line."""


class ChatTemplate:
    """Writes conversations as the tokenizer's template does."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def write(self, messages: Sequence[Message], tools: list[Any] | None, prompt: bool = False) -> str:
        """The text; with `prompt`, up to where the assistant begins to speak. Raises UnwritableError."""
        try:
            return str(self._apply([_plain(message) for message in messages], tools, prompt))
        except Exception as error:  # a template is a program: it raises what it likes
            reason = " ".join(str(error).split())
            raise UnwritableError(f"{type(error).__name__}: {reason}" if reason else type(error).__name__) from error

    def write_all(self, conversations: Sequence[Conversation]) -> list[str | UnwritableError]:
        """The text of each, or why there is none. One call where none has tools, which is a fifth faster."""
        if not conversations or any(conversation.tools for conversation in conversations):
            return [self._write_or_why(conversation) for conversation in conversations]
        try:
            return list(self._apply([[_plain(m) for m in c.messages] for c in conversations], None, False))
        except Exception:  # one of them is to blame: one by one it shows which, and why
            return [self._write_or_why(conversation) for conversation in conversations]

    def _write_or_why(self, conversation: Conversation) -> str | UnwritableError:
        try:
            return self.write(conversation.messages, conversation.tools)
        except UnwritableError as error:
            return error

    def _apply(self, messages: list[Any], tools: list[Any] | None, prompt: bool) -> Any:
        return self._tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=prompt
        )


def _plain(message: Message) -> Message:
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
        self.pattern = re.compile(any_of(self.names))

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


def any_of(names: Iterable[str]) -> str:
    """A regular expression that finds any of the names, the longest first.

    It is written as a prefix tree: Gemma's tokenizer has thousands of control tokens that begin alike, and a plain list
    of alternatives is tried one by one at every `<` of a text.
    """
    ordered = sorted(set(names))
    if not ordered:
        return r"(?!)"
    return _branch(ordered)


def _branch(names: list[str]) -> str:
    """The expression for sorted, different names."""
    shared = shared_start(names[0], names[-1])
    rest = [name[len(shared) :] for name in names]
    ends_here = rest[0] == ""
    groups: dict[str, list[str]] = {}
    for name in rest[ends_here:]:
        groups.setdefault(name[0], []).append(name)
    if not groups:
        return re.escape(shared)
    return f"{re.escape(shared)}(?:{'|'.join(_branch(group) for group in groups.values())}){'?' if ends_here else ''}"


def shared_start(first: str, last: str) -> str:
    """What two texts begin with, and so every text that is sorted between them."""
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]
