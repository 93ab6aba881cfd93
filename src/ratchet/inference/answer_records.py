"""An answer as ledger, shards and result hold it."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ratchet.runs.journal import Reader

Finish = Literal["stop", "length", "context", "memory", "invalid", "refused", "filtered"]
"""How an answer ended.

stop      by itself
length    at generate.max_new_tokens
context   the model's context does not hold prompt and answer: nothing was computed, or it was cut there
memory    it does not fit into memory even alone
invalid   the model gave numbers that are none (NaN)
refused   the chat template cannot write the prompt, or a text in it would end or begin a turn
filtered  the server that was asked keeps the answer back
"""
FINISHES: tuple[Finish, ...] = get_args(Finish)


@dataclass(frozen=True)
class Answer:
    """What was said to one prompt, or why nothing was."""

    place: int
    """Number of the prompt times generate.samples, plus number of the sample."""
    said: str
    """The whole text, reasoning and its marks included, without control tokens."""
    finish: Finish
    prompt_tokens: int | None
    """None: whoever answered does not say."""
    tokens: int | None
    """Of the answer, its end and its reasoning included."""
    nats: float | None
    """Mean log-probability of the answer's tokens under the model, before any temperature; None: not known. The record
    of an answer without tokens has null."""
    opened: bool = False
    """The prompt ends within reasoning, so the text begins there."""
    reasoning: str | None = None
    """Set apart by the server that answered; then it is not in `said`."""
    labels: list[float | None] | None = None
    """Log-probability (nats) of each of generate.labels as the whole answer, in their order, to 4 decimals; None: not
    known, of one or of all."""

    def line(self) -> str:
        """As JSON, with the line's end; the same answer gives the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Answer":
        """What `line` or the ledger says. Raises TypeError or ValueError when it is none."""
        found = cls(**data)
        if not isinstance(found.place, int) or not isinstance(found.said, str) or found.finish not in FINISHES:
            raise ValueError(f"no answer: {data}")
        return found


def sound(text: str) -> str:
    """A text that a file can hold: halves of surrogate pairs, which some servers send, become the replacement sign."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not text.isascii() else text


# How many answers a generation has, as its files say; read, not checked, by whoever does not hold its ledger.


def answered(shards: Iterable[Path], ledger: Path) -> int:
    """Places that have an answer.

    Args:
        shards: files with the answers of sealed shards, a line each; the folder of each is named by its first place.
        ledger: lines of answers, some of which may stand in shards, too.
    """
    places = set[int]()
    for path in shards:
        first = path.parent.name.removeprefix("shard-")
        if first.isdecimal():  # not one that is being written
            with path.open("rb") as stream:
                places.update(range(int(first), int(first) + sum(1 for _ in stream)))
    for event in Reader(ledger).read():
        try:
            places.add(Answer.of(event.data).place)
        except (TypeError, ValueError):
            continue
    return len(places)
