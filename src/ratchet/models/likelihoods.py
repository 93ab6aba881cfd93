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
from ratchet.models.chunked_loss import SelectedPositionsPass
from ratchet.models.device import Model
from ratchet.models.loss import pad_rows as padded
from ratchet.storage import digests

LEAST_HEADER_TOKENS = 16
"""What all texts begin with is computed apart from this length on: it costs a pass of its own."""

BRANCH_TOKENS = 4
"""What a branch costs beside its tokens, in tokens: its trunk's keys and values are copied for it."""


class CacheSharing(StrEnum):
    """What a model's cache of keys and values can be used for."""

    RAGGED = "ragged"
    """Trunks of several lengths go on together: the model heeds a mask and positions."""
    EVEN = "even"
    """Only trunks of one length go on together."""
    NONE = "none"
    """Nothing; every text is computed as a whole."""


@dataclass(frozen=True)
class PromptContinuation:
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
    def of(cls, prompt: Sequence[int], continuation: Sequence[int], most: int) -> "PromptContinuation":
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
class PrefixGroup:
    """Texts that begin alike."""

    trunk: int
    """How many tokens are computed once for all of them, what all texts begin with included."""
    members: tuple[int, ...]
    """Which texts; in the order of their tokens."""


@dataclass(frozen=True)
class LikelihoodPlan:
    """What is computed, and in which order."""

    header: int
    """How many tokens all texts begin with that are computed once for all of them."""
    batches: tuple[tuple[PrefixGroup, ...], ...]
    shares: bool
    """Whether anything is computed on top of what was computed before."""


def plan_batches(
    texts: Sequence[PromptContinuation], batch_rows: int, sharing: CacheSharing, window: int | None = None
) -> LikelihoodPlan:
    """Batches of groups of like length, the longest first; those whose texts branch before all others.

    Args:
        batch_rows: trunks in a batch.
        window: tokens that the model's narrowest sliding attention sees: what trunks of several lengths are filled
            with would take some of it away from longer texts.
    """
    header = _shared_header_length(texts) if sharing != CacheSharing.NONE else 0
    groups = sorted(
        _group_by_prefix(texts, header, sharing != CacheSharing.NONE),
        key=lambda group: (-group.trunk, texts[group.members[0]].ids),
    )
    branching = [group for group in groups if len(texts[group.members[-1]].ids) > group.trunk]
    whole = [group for group in groups if len(texts[group.members[-1]].ids) <= group.trunk]
    rests = (len(texts[place].ids) - group.trunk for group in branching for place in group.members)
    filled = max((group.trunk for group in branching), default=0) + max(rests, default=0)
    even = sharing == CacheSharing.EVEN or (window is not None and filled >= window)
    batches = [*_split_into_batches(branching, batch_rows, even), *_split_into_batches(whole, batch_rows, even=False)]
    return LikelihoodPlan(header, tuple(batches), bool(header or branching))


def _shared_header_length(texts: Sequence[PromptContinuation]) -> int:
    """Of the tokens that all texts begin with, those whose logits nobody asks for."""
    if len({text.ids for text in texts}) < 2:
        return 0
    least, most = min(text.ids for text in texts), max(text.ids for text in texts)
    shared = min(_shared_prefix_length(least, most), *(text.first for text in texts))
    return shared if shared >= LEAST_HEADER_TOKENS else 0


def _shared_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the shared prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _group_by_prefix(texts: Sequence[PromptContinuation], header: int, sharing: bool) -> list[PrefixGroup]:
    """Each text in one group, such that few tokens are computed.

    In the order of their tokens, texts that begin alike stand together: what they have in common makes a tree. From
    its leaves on, each knot is the trunk of all texts below it, or leaves them the groups that they have.
    """
    same: dict[tuple[int, ...], list[int]] = {}
    for place, text in enumerate(texts):
        same.setdefault(text.ids, []).append(place)
    order = sorted(same)
    if not sharing:
        return [PrefixGroup(len(ids), tuple(same[ids])) for ids in order]
    lengths = [0, *accumulate(len(ids) - header for ids in order)]
    open_knots: list[_PrefixNode] = []
    for i in range(len(order) + 1):
        # Below the header nothing is shared any more: a knot of no depth gathers all that remains.
        shared = max(0, _shared_prefix_length(order[i - 1], order[i]) - header) if 0 < i < len(order) else 0
        while open_knots and open_knots[-1].depth > shared:
            closed = open_knots.pop()
            closed.settle(i, lengths)
            if not open_knots or open_knots[-1].depth < shared:
                open_knots.append(_PrefixNode(shared, closed.start, 0))
            open_knots[-1].take(closed)
        if i < len(order):
            open_knots.append(_PrefixNode(len(order[i]) - header, i, 1))
    (root,) = open_knots
    root.settle(len(order), lengths)
    return [
        PrefixGroup(header + trunk, tuple(place for ids in order[start:stop] for place in same[ids]))
        for trunk, start, stop in root.groups
    ]


@dataclass
class _PrefixNode:
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

    def take(self, below: "_PrefixNode") -> None:
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


def _split_into_batches(groups: Sequence[PrefixGroup], count: int, even: bool) -> Iterator[tuple[PrefixGroup, ...]]:
    """Groups in their order, `count` at a time; with `even`, never two lengths of trunk together."""
    batch: list[PrefixGroup] = []
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
class ContinuationScore:
    """A continuation after its prompt."""

    nats: float
    """Log-probability of all its tokens together."""
    greedy: bool
    """Whether each of its tokens is the likeliest."""


@dataclass(frozen=True)
class ContinuationScorer:
    """Reads texts with one model."""

    model: Model
    texts: Sequence[PromptContinuation]
    pad: int
    """Token that rows are filled with."""
    header: int
    """Tokens that all texts begin with and that are computed once (Plan)."""

    def batch(self, groups: Sequence[PrefixGroup]) -> dict[int, ContinuationScore]:
        """Compute one batch of a plan; by place in `texts`."""
        found = _LikelihoodSums()
        with torch.no_grad():
            trunks = self._filled([self.texts[g.members[0]].ids[self.header : g.trunk] for g in groups])
            reads = [
                (row, place, position)
                for row, group in enumerate(groups)
                for place in group.members
                for position in range(self.texts[place].first, group.trunk)
            ]
            branches = list(self._branches(groups))
            start = select_cache_rows(self._begun, [0] * len(groups)) if self.header else None
            cache = self._read(
                trunks, reads, [self.header] * len(groups), found, _PassContext(start, {}, bool(branches))
            )
            for some in _split_branches(branches, len(groups), cache):
                self._go_on(groups, some, cache, found)
        return {place: ContinuationScore(nats, place not in found.misses) for place, nats in found.nats.items()}

    def _filled(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return padded(rows, self.pad, self.model.device)

    @cached_property
    def _begun(self) -> DynamicCache:
        """Keys and values of what all texts begin with."""
        rows = self._filled([self.texts[0].ids[: self.header]])
        return self._read(rows, [], [0], _LikelihoodSums(), _PassContext(None, {}, True))

    def _branches(self, groups: Sequence[PrefixGroup]) -> Iterator["_PrefixBranch"]:
        for row, group in enumerate(groups):
            alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
            for place in group.members:
                if rest := self.texts[place].ids[group.trunk :]:
                    alike[rest].append(place)
            yield from (_PrefixBranch(row, rest, tuple(places)) for rest, places in alike.items())

    def _go_on(
        self, groups: Sequence[PrefixGroup], branches: Sequence["_PrefixBranch"],
        cache: DynamicCache, found: "_LikelihoodSums",
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
            given = _branch_mask_and_positions(trunks, longest, rows.shape[1], self.model.device)
        own = select_cache_rows(cache, [branch.trunk_row for branch in branches])
        self._read(rows, reads, trunks, found, _PassContext(own, given, True))

    def _read(
        self, rows: Tensor, reads: Sequence[tuple[int, int, int]], starts: Sequence[int], found: "_LikelihoodSums",
        before: "_PassContext",
    ) -> Any:  # fmt: skip
        """One pass; notes how likely tokens are, and gives back the cache.

        Args:
            reads: row, place of the text, position in the text, whose next token is asked for.
            starts: position in the text of each row's first token.
        """
        width = rows.shape[1]
        wanted = [row * width + position - starts[row] for row, _, position in reads]
        places = sorted({*wanted}) or [0]
        picked = SelectedPositionsPass(
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
class _PassContext:
    """What a pass builds on."""

    cache: Any
    given: dict[str, Tensor]
    keep: bool


@dataclass(frozen=True)
class _PrefixBranch:
    """What follows a trunk, and the texts that end with it."""

    trunk_row: int
    ids: tuple[int, ...]
    places: tuple[int, ...]


@dataclass
class _LikelihoodSums:
    """Log-probabilities by text, while they are found token by token."""

    nats: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    misses: set[int] = field(default_factory=set)

    def add(self, places: Sequence[int], nats: Sequence[float], greedy: Sequence[bool]) -> None:
        for place, one, likeliest in zip(places, nats, greedy, strict=True):
            self.nats[place] += one
            if not likeliest:
                self.misses.add(place)


def _branch_mask_and_positions(
    trunks: Sequence[int], longest: int, width: int, device: torch.device
) -> dict[str, Tensor]:
    """Mask and positions of branches whose trunks are filled up to `longest`."""
    own = torch.tensor(trunks, device=device).unsqueeze(1)
    before = torch.arange(longest, device=device) < own
    mask = torch.cat([before, torch.ones(len(trunks), width, dtype=torch.bool, device=device)], dim=1)
    return {"attention_mask": mask.long(), "position_ids": own + torch.arange(width, device=device)}


def select_cache_rows(cache: DynamicCache, rows: Sequence[int]) -> DynamicCache:
    """A cache of some rows of another, which stays what it is. Raises TypeError: it holds more than keys and values."""
    if not is_plain_kv_cache(cache):
        raise TypeError(f"{type(cache).__name__} is no cache of keys and values alone")
    own = copy.copy(cache)
    own.layers = [copy.copy(layer) for layer in cache.layers]
    own.batch_select_indices(torch.tensor(rows))  # on the CPU: layers may lie on several devices
    return own


def _cache_keys(cache: DynamicCache) -> list[Tensor]:
    """Of all layers that have keys of their own."""
    return [layer.keys for layer in cache.layers if layer.get_seq_length() > 0]


def _split_branches(
    branches: Sequence[_PrefixBranch], trunks: int, cache: DynamicCache
) -> Iterator[Sequence[_PrefixBranch]]:
    """Branches of like length, longest first, as many at a time as their keys and values have room."""
    if not branches:
        return
    ordered = sorted(branches, key=lambda branch: (-len(branch.ids), branch.trunk_row, branch.ids))
    row_bytes = sum(2 * keys[0].numel() * keys.element_size() for keys in _cache_keys(cache))
    count = max(trunks, BRANCH_BYTES // max(1, row_bytes))
    for start in range(0, len(ordered), count):
        yield ordered[start : start + count]


def is_plain_kv_cache(cache: Any) -> bool:
    """Whether it holds keys and values alone: states of recurrent layers are of other kinds."""
    known = DynamicLayer, DynamicSlidingWindowLayer
    return isinstance(cache, DynamicCache) and all(type(layer) in known for layer in cache.layers)


def narrowest_attention_window(model: Model) -> int | None:
    """Tokens that the narrowest sliding attention of a model sees; None where all layers see everything."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = DynamicCache(config=whole.config).layers
    return min((layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)), default=None)


def probe_cache_sharing(
    model: Model, texts: Sequence[PromptContinuation], batch_rows: int, pad: int
) -> CacheSharing | None:
    """What this model can share, tried out on the longest of these very texts; None: not even logits of its own body.

    Each way is compared with the model's plain answer to whole texts. Tried are the longest trunk and one of another
    length, so a cache that does not bear positions, masks or this length shows itself.
    """
    for way in CacheSharing:
        made = plan_batches(texts, batch_rows, way, narrowest_attention_window(model))
        if all(
            _agrees_with_plain_pass(ContinuationScorer(model, texts, pad, made.header), groups)
            for groups in _sample_groups(made)
        ):
            return way
    return None


def _sample_groups(made: LikelihoodPlan) -> Iterator[list[PrefixGroup]]:
    """Of the longest group two texts; and two of two groups of different length, if any go on together.

    Of the shortest instead where nothing is shared: that says as much of reading single positions, and costs less.
    """
    if not made.shares:
        yield [_first_two_members(made.batches[-1][-1])]
        return
    longest = made.batches[0][0]
    for batch in made.batches:
        other = next((group for group in batch if group.trunk != batch[0].trunk), None)
        if other:
            yield [_first_two_members(batch[0]), _first_two_members(other)]
            if batch[0] is longest:
                return
            break
    yield [_first_two_members(longest)]


def _first_two_members(group: PrefixGroup) -> PrefixGroup:
    return PrefixGroup(group.trunk, tuple(dict.fromkeys((group.members[0], group.members[-1]))))


def _agrees_with_plain_pass(reading: ContinuationScorer, groups: Sequence[PrefixGroup]) -> bool:
    try:
        found = reading.batch(groups)
        return all(_is_near_plain_pass(found[group.members[-1]], reading, group.members[-1]) for group in groups)
    except Exception as error:  # whatever a model's own code raises when it is asked what it cannot do
        if oom.is_out_of_memory(error):
            raise
        return False


def _is_near_plain_pass(found: ContinuationScore, reading: ContinuationScorer, place: int) -> bool:
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


class UnscorablePairError(ValueError):
    """A pair that no model, or not this one, can be asked about."""

    def __init__(self, place: int, why: str) -> None:
        super().__init__(why)
        self.place = place
        """Which of the pairs."""


@dataclass(frozen=True)
class LikelihoodLimits:
    """What a model is given at once."""

    batch_rows: int
    """Texts, or beginnings of several texts, that are computed together."""
    most_tokens: int
    """Tokens that the model reads; what is longer loses its beginning."""
    pad: int
    """Token that rows are filled with."""


def score_pairs(
    model: Model, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], limits: LikelihoodLimits, take: Take
) -> list[ContinuationScore] | None:
    """How likely the second tokens of each pair are after the first, in the order of the pairs.

    Args:
        take: asked before anything is computed; its keys name all that is asked, but not the model.

    Returns:
        None when not even whole texts can be read with this model's body apart from its head.

    Raises:
        UnscorablePairError: an empty prompt or continuation, or a continuation longer than the model's window.
    """
    texts = [_build_prompt_continuation(place, *pair, limits.most_tokens) for place, pair in enumerate(pairs)]
    asked = [METHOD, limits.batch_rows, limits.pad]
    names = [_text_digest(text) for text in texts]
    tried = digests.hash_json([*asked, "way", names])
    way = take(tried, lambda: probe_cache_sharing(model, texts, limits.batch_rows, limits.pad))
    if way is None:
        return None
    plan = plan_batches(texts, limits.batch_rows, CacheSharing(way), narrowest_attention_window(model))
    reading = ContinuationScorer(model, texts, limits.pad, plan.header)

    def make(batches: Sequence[Sequence[PrefixGroup]]) -> list[tuple[float, bool]]:
        found: dict[int, ContinuationScore] = {}
        for batch in batches:
            found |= reading.batch(batch)
        return [(found[place].nats, found[place].greedy) for place in _member_indices(batches)]

    found: dict[int, ContinuationScore] = {}
    for start in range(0, len(plan.batches), CHUNK_BATCHES):
        batches = plan.batches[start : start + CHUNK_BATCHES]
        shape = [[[group.trunk, [names[place] for place in group.members]] for group in batch] for batch in batches]
        key = digests.hash_json([*asked, way, plan.header, shape])
        for place, (nats, greedy) in zip(_member_indices(batches), take(key, partial(make, batches)), strict=True):
            found[place] = ContinuationScore(nats, greedy)
    return [found[place] for place in range(len(texts))]


def _build_prompt_continuation(
    place: int, prompt: Sequence[int], continuation: Sequence[int], most: int
) -> PromptContinuation:
    try:
        return PromptContinuation.of(prompt, continuation, most)
    except ValueError as error:
        raise UnscorablePairError(place, str(error)) from None


def _text_digest(text: PromptContinuation) -> str:
    """Of all that a text asks; quicker than JSON, of millions of tokens."""
    return digests.hash_bytes(array("q", (len(text.targets), *text.ids, text.targets[-1])).tobytes())


def _member_indices(batches: Sequence[Sequence[PrefixGroup]]) -> list[int]:
    return [place for batch in batches for group in batch for place in group.members]
