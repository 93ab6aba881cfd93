"""Likelihoods of many continuations: planned over all of them, computed in chunks, each kept under all it was asked."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ratchet import digest
from ratchet.model import prefixes
from ratchet.model.continuations import Continuations, Likely, sharing, window
from ratchet.model.device import Model
from ratchet.model.prefixes import Group, Sharing, Text

METHOD = "prefixes shared 1"
"""Part of what results are kept under: another way to compute them rounds their sums otherwise."""

CHUNK_BATCHES = 4
"""Batches that are kept, and lost by a kill, together."""

Take = Callable[[str, Callable[[], Any]], Any]
"""What is kept under a key, else what a function returns (JSON), kept from now on."""


class UnreadableError(ValueError):
    """A pair that no model, or not this one, can be asked about."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place
        """Which of the pairs."""


@dataclass(frozen=True)
class Limits:
    """What a model is given at once."""

    batch_rows: int
    """Texts, or beginnings of several texts, that are computed together."""
    most_tokens: int
    """Tokens that the model reads; what is longer loses its beginning."""
    pad: int
    """Token that rows are filled with."""


def likelihoods(
    model: Model, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], limits: Limits, take: Take
) -> list[Likely] | None:
    """How likely the second tokens of each pair are after the first, in the order of the pairs.

    Args:
        take: asked before anything is computed; its keys name all that is asked, but not the model.

    Returns:
        None when not even whole texts can be read with this model's body apart from its head.

    Raises:
        UnreadableError: an empty prompt or continuation, or a continuation that is longer than what the model reads.
    """
    texts = [_text(place, *pair, limits.most_tokens) for place, pair in enumerate(pairs)]
    asked = [METHOD, limits.batch_rows, limits.pad]
    names = [_name(text) for text in texts]
    tried = digest.of_json([*asked, "way", names])
    way = take(tried, lambda: sharing(model, texts, limits.batch_rows, limits.pad))
    if way is None:
        return None
    plan = prefixes.plan(texts, limits.batch_rows, Sharing(way), window(model))
    reading = Continuations(model, texts, limits.pad, plan.header)

    def make(batches: Sequence[Sequence[Group]]) -> list[tuple[float, bool]]:
        found: dict[int, Likely] = {}
        for batch in batches:
            found |= reading.batch(batch)
        return [(found[place].nats, found[place].greedy) for place in _places(batches)]

    found: dict[int, Likely] = {}
    for start in range(0, len(plan.batches), CHUNK_BATCHES):
        batches = plan.batches[start : start + CHUNK_BATCHES]
        shape = [[[group.trunk, [names[place] for place in group.members]] for group in batch] for batch in batches]
        key = digest.of_json([*asked, way, plan.header, shape])
        for place, (nats, greedy) in zip(_places(batches), take(key, partial(make, batches)), strict=True):
            found[place] = Likely(nats, greedy)
    return [found[place] for place in range(len(texts))]


def _text(place: int, prompt: Sequence[int], continuation: Sequence[int], most: int) -> Text:
    try:
        return Text.of(prompt, continuation, most)
    except ValueError as error:
        raise UnreadableError(place, str(error)) from None


def _name(text: Text) -> str:
    """Of all that a text asks; quicker than JSON, of millions of tokens."""
    return digest.of_bytes(array("q", (len(text.targets), *text.ids, text.targets[-1])).tobytes())


def _places(batches: Sequence[Sequence[Group]]) -> list[int]:
    return [place for batch in batches for group in batch for place in group.members]
