"""Which continuations are computed together: texts that begin alike share the computation of what they begin with.

A task asks for several continuations of one prompt, and all its prompts may begin with the same instruction: of four
short choices after a long text, three in four tokens need not be computed. The plan is made over all texts before the
first is computed, and depends on nothing else.
"""

import copy
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ratchet.models import oom
from ratchet.models.chunked_loss import Picked
from ratchet.models.device import Model
from ratchet.models.loss import pad as padded
from ratchet.storage import digests

LEAST_HEADER_TOKENS = 16
"""What all texts begin with is computed apart from this length on: it costs a pass of its own."""

BRANCH_TOKENS = 4
"""What a branch costs beside its tokens, in tokens: its trunk's keys and values are copied for it."""


class Sharing(StrEnum):
    """What a model's cache of keys and values can be used for."""

    RAGGED = "ragged"
    """Trunks of several lengths go on together: the model heeds a mask and positions."""
    EVEN = "even"
    """Only trunks of one length go on together."""
    NONE = "none"
    """Nothing; every text is computed as a whole."""


@dataclass(frozen=True)
class Text:
    """A prompt and its continuation, as a model reads them."""

    ids: tuple[int, ...]
    """All tokens but the last, whose logits nobody asks for."""
    targets: tuple[int, ...]
    """The continuation: what follows each of the last positions."""

    @property
    def first(self) -> int:
        """The position whose logits say how likely the continuation's first token is."""
        return len(self.ids) - len(self.targets)

    @classmethod
    def of(cls, prompt: Sequence[int], continuation: Sequence[int], most: int) -> "Text":
        """What is longer than the `most` tokens that a model reads loses its beginning.

        Raises:
            ValueError: an empty prompt or continuation, or a continuation that is longer by itself.
        """
        if not prompt or not continuation:
            raise ValueError("a prompt or a continuation has no tokens")
        if len(continuation) > most:
            raise ValueError(f"a continuation has {len(continuation)} tokens, and the model reads {most} at most")
        return cls((*prompt, *continuation)[-(most + 1) : -1], tuple(continuation))


@dataclass(frozen=True)
class Group:
    """Texts that begin alike."""

    trunk: int
    """How many tokens are computed once for all of them, what all texts begin with included."""
    members: tuple[int, ...]
    """Which texts; in the order of their tokens."""


@dataclass(frozen=True)
class Plan:
    """What is computed, and in which order."""

    header: int
    """How many tokens all texts begin with that are computed once for all of them."""
    batches: tuple[tuple[Group, ...], ...]
    shares: bool
    """Whether anything is computed on top of what was computed before."""


def plan_batches(texts: Sequence[Text], batch_rows: int, sharing: Sharing, window: int | None = None) -> Plan:
    """Batches of groups of like length, the longest first; those whose texts branch before all others.

    Args:
        batch_rows: trunks in a batch.
        window: tokens that the model's narrowest sliding attention sees: what trunks of several lengths are filled
            with would take some of it away from longer texts.
    """
    header = _header(texts) if sharing != Sharing.NONE else 0
    groups = sorted(
        _groups(texts, header, sharing != Sharing.NONE),
        key=lambda group: (-group.trunk, texts[group.members[0]].ids),
    )
    branching = [group for group in groups if len(texts[group.members[-1]].ids) > group.trunk]
    whole = [group for group in groups if len(texts[group.members[-1]].ids) <= group.trunk]
    rests = (len(texts[place].ids) - group.trunk for group in branching for place in group.members)
    filled = max((group.trunk for group in branching), default=0) + max(rests, default=0)
    even = sharing == Sharing.EVEN or (window is not None and filled >= window)
    batches = [*_batches(branching, batch_rows, even), *_batches(whole, batch_rows, even=False)]
    return Plan(header, tuple(batches), bool(header or branching))


def _header(texts: Sequence[Text]) -> int:
    """Of the tokens that all texts begin with, those whose logits nobody asks for."""
    if len({text.ids for text in texts}) < 2:
        return 0
    least, most = min(text.ids for text in texts), max(text.ids for text in texts)
    shared = min(_alike(least, most), *(text.first for text in texts))
    return shared if shared >= LEAST_HEADER_TOKENS else 0


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the shared prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _groups(texts: Sequence[Text], header: int, sharing: bool) -> list[Group]:
    """Each text in one group, such that few tokens are computed.

    In the order of their tokens, texts that begin alike stand together: what they have in common makes a tree. From
    its leaves on, each knot is the trunk of all texts below it, or leaves them the groups that they have.
    """
    same: dict[tuple[int, ...], list[int]] = {}
    for place, text in enumerate(texts):
        same.setdefault(text.ids, []).append(place)
    order = sorted(same)
    if not sharing:
        return [Group(len(ids), tuple(same[ids])) for ids in order]
    lengths = [0, *accumulate(len(ids) - header for ids in order)]
    open_knots: list[_Knot] = []
    for i in range(len(order) + 1):
        # Below the header nothing is shared any more: a knot of no depth gathers all that remains.
        shared = max(0, _alike(order[i - 1], order[i]) - header) if 0 < i < len(order) else 0
        while open_knots and open_knots[-1].depth > shared:
            closed = open_knots.pop()
            closed.settle(i, lengths)
            if not open_knots or open_knots[-1].depth < shared:
                open_knots.append(_Knot(shared, closed.start, 0))
            open_knots[-1].take(closed)
        if i < len(order):
            open_knots.append(_Knot(len(order[i]) - header, i, 1))
    (root,) = open_knots
    root.settle(len(order), lengths)
    return [
        Group(header + trunk, tuple(place for ids in order[start:stop] for place in same[ids]))
        for trunk, start, stop in root.groups
    ]


@dataclass
class _Knot:
    """What some texts, neighbours in the order of their tokens, have in common."""

    depth: int
    """How many tokens, behind the header."""
    start: int
    """Which text is the first of them."""
    ends: int
    """How many texts have no further token: one or none."""
    cost: int = 0
    """Tokens to be computed for all texts below that have groups already."""
    groups: list[tuple[int, int, int]] = field(default_factory=list)
    """Of these: tokens of the trunk, first text, the one after the last."""

    def take(self, below: "_Knot") -> None:
        self.cost += below.cost
        self.groups += below.groups

    def settle(self, stop: int, lengths: Sequence[int]) -> None:
        """Make one group of all texts up to `stop`, unless that costs more.

        Args:
            lengths: tokens of all texts before each.
        """
        count = stop - self.start
        branches = lengths[stop] - lengths[self.start] - count * self.depth + BRANCH_TOKENS * (count - self.ends)
        apart = self.cost + self.ends * self.depth
        if self.depth and (count == self.ends or self.depth + branches < apart):
            self.cost, self.groups = self.depth + branches, [(self.depth, self.start, stop)]
        elif self.ends:
            self.cost, self.groups = apart, [(self.depth, self.start, self.start + 1), *self.groups]


def _batches(groups: Sequence[Group], count: int, even: bool) -> Iterator[tuple[Group, ...]]:
    """Groups in their order, `count` at a time; with `even`, never two lengths of trunk together."""
    batch: list[Group] = []
    for group in groups:
        if batch and (len(batch) == count or (even and batch[0].trunk != group.trunk)):
            yield tuple(batch)
            batch = []
        batch.append(group)
    if batch:
        yield tuple(batch)


# How likely given continuations are: what several texts begin with is computed once, and logits only where they count.
#
# A batch is two passes: the trunks of its groups (model/prefixes.py), filled on the right; then all branches, on top
# of
# a copy of their trunk's keys and values. Where trunks differ in length, the filling lies between trunk and branch: a
# mask hides it, and positions are told.

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
        made = plan_batches(texts, batch_rows, way, window(model))
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
        if oom.is_exhausted(error):
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


# Likelihoods of many continuations: planned over all of them, computed in chunks, each kept under all it was asked.

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
    tried = digests.of_json([*asked, "way", names])
    way = take(tried, lambda: sharing(model, texts, limits.batch_rows, limits.pad))
    if way is None:
        return None
    plan = plan_batches(texts, limits.batch_rows, Sharing(way), window(model))
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
        key = digests.of_json([*asked, way, plan.header, shape])
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
    return digests.of_bytes(array("q", (len(text.targets), *text.ids, text.targets[-1])).tobytes())


def _places(batches: Sequence[Sequence[Group]]) -> list[int]:
    return [place for batch in batches for group in batch for place in group.members]
