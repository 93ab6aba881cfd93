"""How likely given continuations are: what several texts begin with is computed once, and logits only where they count.

A batch is two passes: the trunks of its groups (model/prefixes.py), filled on the right; then all branches, on top of
a copy of their trunk's keys and values. Where trunks differ in length, the filling lies between trunk and branch: a
mask hides it, and positions are told.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ratchet.model import memory
from ratchet.model.columns import Picked
from ratchet.model.device import Model
from ratchet.model.loss import pad as padded
from ratchet.model.prefixes import Group, Plan, Sharing, Text, plan

BRANCH_BYTES = 2**29
"""Keys and values that are copied for branches which are computed at once; or as many as their trunks have."""

TOLERANCE_EPSILONS = 16
LEAST_TOLERANCE = 1e-4
"""How far sums of log-probabilities may be off, relative to them, before a way to compute them counts as wrong."""


@dataclass(frozen=True)
class Likely:
    """A continuation after its prompt."""

    nats: float
    """Log-probability of all its tokens together."""
    greedy: bool
    """Whether each of its tokens is the likeliest."""


@dataclass(frozen=True)
class Continuations:
    """Reads texts with one model."""

    model: Model
    texts: Sequence[Text]
    pad: int
    """Token that rows are filled with."""
    header: int
    """Tokens that all texts begin with and that are computed once (Plan)."""

    def batch(self, groups: Sequence[Group]) -> dict[int, Likely]:
        """Compute one batch of a plan; by place in `texts`."""
        found = _Sums()
        with torch.no_grad():
            trunks = self._filled([self.texts[g.members[0]].ids[self.header : g.trunk] for g in groups])
            reads = [
                (row, place, position)
                for row, group in enumerate(groups)
                for place in group.members
                for position in range(self.texts[place].first, group.trunk)
            ]
            branches = list(self._branches(groups))
            start = taken(self._begun, [0] * len(groups)) if self.header else None
            cache = self._read(trunks, reads, [self.header] * len(groups), found, _Before(start, {}, bool(branches)))
            for some in _parts(branches, len(groups), cache):
                self._go_on(groups, some, cache, found)
        return {place: Likely(nats, place not in found.misses) for place, nats in found.nats.items()}

    def _filled(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return padded(rows, self.pad, self.model.device)

    @cached_property
    def _begun(self) -> DynamicCache:
        """Keys and values of what all texts begin with."""
        rows = self._filled([self.texts[0].ids[: self.header]])
        return self._read(rows, [], [0], _Sums(), _Before(None, {}, True))

    def _branches(self, groups: Sequence[Group]) -> Iterator["_Branch"]:
        for row, group in enumerate(groups):
            alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for place in group.members:
                if rest := self.texts[place].ids[group.trunk :]:
                    alike[rest].append(place)
            yield from (_Branch(row, rest, tuple(places)) for rest, places in alike.items())

    def _go_on(
        self, groups: Sequence[Group], branches: Sequence["_Branch"], cache: DynamicCache, found: "_Sums"
    ) -> None:  # fmt: skip
        """Branches, each on top of its trunk."""
        rows = self._filled([branch.ids for branch in branches])
        trunks = [groups[branch.trunk_row].trunk for branch in branches]
        longest = max(group.trunk for group in groups)
        reads = [
            (row, place, position)
            for row, branch in enumerate(branches)
            for place in branch.places
            for position in range(max(self.texts[place].first, trunks[row]), len(self.texts[place].ids))
        ]
        given: dict[str, Tensor] = {}
        if any(trunk != longest for trunk in trunks):
            given = _told(trunks, longest, rows.shape[1], self.model.device)
        own = taken(cache, [branch.trunk_row for branch in branches])
        self._read(rows, reads, trunks, found, _Before(own, given, True))

    def _read(
        self, rows: Tensor, reads: Sequence[tuple[int, int, int]], starts: Sequence[int], found: "_Sums",
        before: "_Before",
    ) -> Any:  # fmt: skip
        """One pass; notes how likely tokens are, and gives back the cache.

        Args:
            reads: row, place of the text, position in the text, whose next token is asked for.
            starts: position in the text of each row's first token.
        """
        width = rows.shape[1]
        wanted = [row * width + position - starts[row] for row, _, position in reads]
        places = sorted({*wanted}) or [0]
        picked = Picked(
            self.model, rows, torch.tensor(places, device=rows.device), before.given,
            cache=before.cache, keep=before.keep,
        )  # fmt: skip
        if not reads:
            return picked.cache
        at = {place: i for i, place in enumerate(places)}
        tokens = [self.texts[place].targets[position - self.texts[place].first] for _, place, position in reads]
        index, token = (
            torch.tensor(numbers, device=rows.device) for numbers in ([at[place] for place in wanted], tokens)
        )
        nats = torch.empty(len(reads), dtype=torch.float64, device=rows.device)
        greedy = torch.empty(len(reads), dtype=torch.bool, device=rows.device)
        for start, logits in picked.pieces():
            known = functional.log_softmax(logits[0].float(), dim=-1)
            here = ((index >= start) & (index < start + len(known))).nonzero().squeeze(1)
            local = index[here] - start
            nats[here] = known[local, token[here]].double()
            greedy[here] = known.argmax(dim=-1)[local] == token[here]
        found.add([place for _, place, _ in reads], nats.tolist(), greedy.tolist())
        return picked.cache


@dataclass(frozen=True)
class _Before:
    """What a pass builds on."""

    cache: Any
    given: dict[str, Tensor]
    keep: bool


@dataclass(frozen=True)
class _Branch:
    """What follows a trunk, and the texts that end with it."""

    trunk_row: int
    ids: tuple[int, ...]
    places: tuple[int, ...]


@dataclass
class _Sums:
    """Log-probabilities by text, while they are found token by token."""

    nats: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    misses: set[int] = field(default_factory=set)

    def add(self, places: Sequence[int], nats: Sequence[float], greedy: Sequence[bool]) -> None:
        for place, one, likeliest in zip(places, nats, greedy, strict=True):
            self.nats[place] += one
            if not likeliest:
                self.misses.add(place)


def _told(trunks: Sequence[int], longest: int, width: int, device: torch.device) -> dict[str, Tensor]:
    """Mask and positions of branches whose trunks are filled up to `longest`."""
    own = torch.tensor(trunks, device=device).unsqueeze(1)
    before = torch.arange(longest, device=device) < own
    mask = torch.cat([before, torch.ones(len(trunks), width, dtype=torch.bool, device=device)], dim=1)
    return {"attention_mask": mask.long(), "position_ids": own + torch.arange(width, device=device)}


def taken(cache: DynamicCache, rows: Sequence[int]) -> DynamicCache:
    """A cache of some rows of another, which stays what it is. Raises TypeError: it holds more than keys and values."""
    if not can_be_repeated(cache):
        raise TypeError(f"{type(cache).__name__} is no cache of keys and values alone")
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    own.batch_select_indices(torch.tensor(rows))  # on the CPU: layers may lie on several devices
    return own


def _keys(cache: DynamicCache) -> list[Tensor]:
    """Of all layers that have keys of their own."""
    return [layer.keys for layer in cache.layers if layer.get_seq_length() > 0]


def _parts(branches: Sequence[_Branch], trunks: int, cache: DynamicCache) -> Iterator[Sequence[_Branch]]:
    """Branches of like length, longest first, as many at a time as their keys and values have room."""
    if not branches:
        return
    ordered = sorted(branches, key=lambda branch: (-len(branch.ids), branch.trunk_row, branch.ids))
    row_bytes = sum(2 * keys[0].numel() * keys.element_size() for keys in _keys(cache))
    count = max(trunks, BRANCH_BYTES // max(1, row_bytes))
    for start in range(0, len(ordered), count):
        yield ordered[start : start + count]


def can_be_repeated(cache: Any) -> bool:
    """Whether it holds keys and values alone: states of recurrent layers are of other kinds."""
    known = DynamicLayer, DynamicSlidingWindowLayer
    return isinstance(cache, DynamicCache) and all(type(layer) in known for layer in cache.layers)


def window(model: Model) -> int | None:
    """Tokens that the narrowest sliding attention of a model sees; None where all layers see everything."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = DynamicCache(config=whole.config).layers
    return min((layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)), default=None)


def sharing(model: Model, texts: Sequence[Text], batch_rows: int, pad: int) -> Sharing | None:
    """What this model can share, tried out on the longest of these very texts; None: not even logits of its own body.

    Each way is compared with the model's plain answer to whole texts. Tried are the longest trunk and one of another
    length, so a cache that does not bear positions, masks or this length shows itself.
    """
    for way in Sharing:
        made = plan(texts, batch_rows, way, window(model))
        if all(_agrees(Continuations(model, texts, pad, made.header), groups) for groups in _samples(made)):
            return way
    return None


def _samples(made: Plan) -> Iterator[list[Group]]:
    """Of the longest group two texts; and two of two groups of different length, if any go on together.

    Of the shortest instead where nothing is shared: that says as much of reading single positions, and costs less.
    """
    if not made.shares:
        yield [_two_of(made.batches[-1][-1])]
        return
    longest = made.batches[0][0]
    for batch in made.batches:
        other = next((group for group in batch if group.trunk != batch[0].trunk), None)
        if other:
            yield [_two_of(batch[0]), _two_of(other)]
            if batch[0] is longest:
                return
            break
    yield [_two_of(longest)]


def _two_of(group: Group) -> Group:
    return Group(group.trunk, tuple(dict.fromkeys((group.members[0], group.members[-1]))))


def _agrees(reading: Continuations, groups: Sequence[Group]) -> bool:
    try:
        found = reading.batch(groups)
        return all(_near(found[group.members[-1]], reading, group.members[-1]) for group in groups)
    except Exception as error:  # whatever a model's own code raises when it is asked what it cannot do
        if memory.is_exhausted(error):
            raise
        return False


def _near(found: Likely, reading: Continuations, place: int) -> bool:
    text = reading.texts[place]
    with torch.no_grad():
        ids = torch.tensor([text.ids], device=reading.model.device)
        logits = reading.model(input_ids=ids, use_cache=False).logits[0, text.first :]
    known = functional.log_softmax(logits.float(), dim=-1).double()
    expected = float(known.gather(1, torch.tensor([text.targets], device=known.device).T).sum())
    tolerance = max(LEAST_TOLERANCE, TOLERANCE_EPSILONS * torch.finfo(logits.dtype).eps)
    return bool(abs(found.nats - expected) <= tolerance * max(1.0, abs(expected)))
