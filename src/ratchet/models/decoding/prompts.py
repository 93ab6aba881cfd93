"""Prompts, what becomes of them, and what they are while they are answered."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

from ratchet.models.device import Model
from ratchet.models.likelihoods import LEAST_HEADER_TOKENS

Finish = Literal["stop", "length", "context", "memory", "invalid"]
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class Asked:
    """One prompt."""

    place: int
    """What the caller knows it by."""
    ids: tuple[int, ...]
    stream: str
    """What its random draws depend on (model/sampling.stream); not read when temperature is 0."""


@dataclass(frozen=True)
class Answered:
    """What became of it."""

    place: int
    ids: tuple[int, ...]
    """Of the answer; its end token included, if there is one."""
    finish: Finish
    """
    stop     an end token was given
    length   `max_new_tokens` were given
    context  the model's context ended before; or the prompt fills it, and there is no answer
    memory   does not fit into memory even alone; no answer
    invalid  logits from which nothing can be chosen (NaN), by the row's plain pass as well; tokens before are kept
    """
    nats: float
    """Mean log-probability of the answer's tokens under the model, at temperature 1, to 4 decimals; 0.0 of none."""


@dataclass(frozen=True)
class Decoding:
    """How answers are made."""

    max_new_tokens: int
    ends: tuple[int, ...]
    pad: int
    temperature: float = 0.0
    top_p: float = 1.0
    exact: bool = True
    """Whether plain passes decide in doubt; otherwise the batch does, and answers may depend on it."""
    rows: int = 0
    """At once, at most; 0: as many as serve the device (model/decoding.py)."""
    window: int = 1024
    """Prompts that are pulled at a time, to be sorted by length."""


@dataclass(eq=False)
class Row:
    """A prompt and what it has got."""

    asked: Asked
    limit: int
    """Tokens that it may get; fewer than the settings say if the context ends before."""
    header: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    nats: float = 0.0
    scale: float = 0.0
    """Greatest absolute logit so far."""
    spoilt: bool = False
    """Whether logits of the batch were not finite: neither may its keys be."""

    def text(self) -> tuple[int, ...]:
        return (*self.asked.ids, *self.ids)

    @property
    def tokens(self) -> int:
        return len(self.asked.ids) + len(self.ids)

    def after(self, more: int) -> int:
        """Tokens after so many more, or when it has all it may get."""
        return self.tokens + min(more, self.limit - len(self.ids))

    def take(self, token: int, nats: float, scale: float) -> None:
        """One more token, with its log-probability and the greatest logit beside it."""
        self.ids.append(token)
        self.nats += nats
        self.scale = max(self.scale, scale)


def order(row: Row) -> tuple[int, int]:
    """Longest first: what does not fit shows itself early, and rows that join are never longer than the others were."""
    return -row.tokens, row.asked.place


def header(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What all prompts begin with, if that is worth computing once; each has a token behind it."""
    if len(prompts) < 2:
        return ()
    least, most = min(prompts), max(prompts)
    pairs = zip(least[: min(map(len, prompts)) - 1], most, strict=False)
    shared = tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shared if len(shared) >= LEAST_HEADER_TOKENS else ()


def context(model: Model) -> int | None:
    """Tokens that a text may have; None: the model says nothing."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = whole.config.get_text_config()
    found = [value for name in _LIMITS if isinstance(value := getattr(config, name, None), int)]
    return min(found, default=None)
