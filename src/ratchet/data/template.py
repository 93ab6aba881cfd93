"""Conversations to token ids by the tokenizer's own chat template, with a mask of what is learned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ratchet.data.sources import Row
from ratchet.errors import DataError

MASKED = -100
"""Label of a position that is not learned from (the value torch's cross entropy ignores)."""

Message = dict[str, str]


class ChatTokenizer(Protocol):
    """What we ask of a tokenizer (transformers' PreTrainedTokenizerBase has it)."""

    eos_token_id: int | None

    def apply_chat_template(self, conversation: Sequence[Message], **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class Encoded:
    """Token ids of a whole conversation, and labels of the same length: the id where it is learned, else MASKED."""

    input_ids: list[int]
    labels: list[int]

    @property
    def trained(self) -> int:
        """Number of positions that are learned from."""
        return sum(label != MASKED for label in self.labels)


def messages(row: Row) -> list[Message]:
    """A row as the conversation that it stands for."""
    system = [{"role": "system", "content": row.system}] if row.system else []
    return [*system, {"role": "user", "content": row.prompt}, {"role": "assistant", "content": row.response}]


def prompt_ids(tokenizer: ChatTokenizer, conversation: Sequence[Message]) -> list[int]:
    """Token ids up to the place where the assistant begins to speak. Raises DataError like `encode`."""
    return _templated(tokenizer, conversation, add_generation_prompt=True)


def _templated(tokenizer: ChatTokenizer, conversation: Sequence[Message], add_generation_prompt: bool) -> list[int]:
    try:
        ids = tokenizer.apply_chat_template(
            conversation, tokenize=True, add_generation_prompt=add_generation_prompt, return_dict=False
        )
    except Exception as error:  # a template is a program: it raises what it likes
        roles = ", ".join(message["role"] for message in conversation)
        raise DataError(
            f"the chat template cannot write a conversation of {roles} ({type(error).__name__}: {error}); mend "
            "chat_template.jinja, or the rows"
        ) from error
    return list(ids)


def encode(tokenizer: ChatTokenizer, conversation: Sequence[Message], where: str) -> Encoded:
    """Token ids with every position masked but the assistant's words and its end of turn.

    The span of a turn is what the template adds to the prompt of that turn. It is checked, not assumed: the prompt
    must be a prefix of the whole, and the span must decode to the assistant's text.

    Raises:
        DataError: the template does not allow this, with the row that shows it.
    """
    ids = _templated(tokenizer, conversation, add_generation_prompt=False)
    labels = [MASKED] * len(ids)
    for turn, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        before = prompt_ids(tokenizer, conversation[:turn])
        after = _templated(tokenizer, conversation[: turn + 1], add_generation_prompt=False)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise DataError(
                f"{where}: the chat template writes the prompt differently once the answer follows, so the answer's "
                "tokens cannot be told apart; use a tokenizer whose template only appends"
            )
        end = _end_of_turn(tokenizer, ids, len(before), len(after))
        decoded = tokenizer.decode(ids[len(before) : end], skip_special_tokens=True).strip()
        if decoded != message["content"].strip():
            raise DataError(
                f"{where}: the chat template turns the answer {message['content'][:60]!r} into {decoded[:60]!r}; "
                "a template that rewrites answers cannot be trained on"
            )
        labels[len(before) : end] = ids[len(before) : end]
    return Encoded(ids, labels)


def _end_of_turn(tokenizer: ChatTokenizer, ids: Sequence[int], start: int, stop: int) -> int:
    """One past the end-of-turn token: templates write a line break after it that the model never has to say."""
    for position in range(stop - 1, start - 1, -1):
        if ids[position] == tokenizer.eos_token_id:
            return position + 1
    return stop
