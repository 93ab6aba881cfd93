"""Computes log-probabilities of continuations after prompts; texts with a common prefix share its computation.

A task scores several continuations of one prompt, and all its prompts may start with the same instruction. If a long
text has four short choices, for example, three in four tokens need not be computed. All texts are planned before the
first is computed, and the plan depends only on the texts and the settings.
"""

import copy
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ratchet.models import oom
from ratchet.models.chunked_loss import SelectedPositionsPass
from ratchet.models.device import Model
from ratchet.models.loss import pad_rows
from ratchet.storage import digests
from ratchet.storage.progress import report_progress

MIN_SHARED_PREFIX_TOKENS = 16
"""Minimum length of a prefix common to all texts for which a separate pass is worth its cost."""

BRANCH_TOKENS = 4
"""Fixed cost of a branch (`PrefixGroup`), in tokens, because the trunk's keys and values are copied for each branch."""

BRANCH_BYTES = 2**29
"""Maximum bytes of keys and values that are copied for branches computed together. Even if they need more, as many
branches as the batch has trunks are computed together."""

TOLERANCE_EPSILONS = 16
MIN_TOLERANCE = 1e-4
"""Relative error of a sum of log-probabilities above which a cache-sharing method counts as wrong: the larger of
MIN_TOLERANCE and TOLERANCE_EPSILONS times the epsilon of the dtype."""

METHOD = "prefixes shared 1"
"""Name of this module's method. It is part of every cache key, because another method would round sums differently."""

CHUNK_BATCHES = 4
"""Number of batches whose results are cached together. A killed process loses the results of at most this many."""

ResultCache = Callable[[str, Callable[[], Any]], Any]
"""Returns the cached JSON value of a key; if absent, calls the function and caches its result."""


class CacheSharing(StrEnum):
    """Extent to which texts can share a model's key-value cache."""

    RAGGED = "ragged"
    """Branches on trunks of different lengths share a batch: the model respects the mask and position ids."""
    EVEN = "even"
    """Only branches on trunks of one length share a batch."""
    NONE = "none"
    """The cache is not shared, and every text is computed completely."""


class UnscorablePairError(ValueError):
    """Error for a pair that this model, or any model, cannot score."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


@dataclass(frozen=True)
class PromptContinuation:
    """Token ids of a prompt and its continuation."""

    ids: tuple[int, ...]
    """All tokens but the last, whose logits are not needed."""
    targets: tuple[int, ...]
    """The continuation: the tokens that follow the last `len(targets)` positions."""

    @property
    def first(self) -> int:
        """Position whose logits predict the continuation's first token."""
        return len(self.ids) - len(self.targets)

    def predictions(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the positions from `start` to `stop` whose logits are needed, each with the token that follows."""
        for position in range(max(start, self.first), stop):
            yield position, self.targets[position - self.first]

    @classmethod
    def from_tokens(cls, prompt: Sequence[int], continuation: Sequence[int], max_tokens: int) -> "PromptContinuation":
        """Build an instance. A text longer than `max_tokens` loses its beginning.

        Raises ValueError if prompt or continuation is empty, or the continuation alone is longer than `max_tokens`.
        """
        if not prompt or not continuation:
            raise ValueError("a prompt or a continuation has no tokens")
        if len(continuation) > max_tokens:
            raise ValueError(f"continuation has {len(continuation)} tokens, but the model reads at most {max_tokens}")
        return cls((*prompt, *continuation)[-(max_tokens + 1) : -1], tuple(continuation))


@dataclass(frozen=True)
class PrefixGroup:
    """Texts with a common prefix, the trunk. The rest of a text, if any, is a branch."""

    trunk_length: int
    """Number of tokens that are computed once for the group, including the prefix common to all texts."""
    text_indices: tuple[int, ...]
    """Indices of the texts, ordered by their tokens."""


@dataclass(frozen=True)
class LikelihoodPlan:
    """Batches to compute, in order."""

    prefix_length: int
    """Length of the prefix common to all texts, which is computed once for all texts; it may be 0."""
    batches: tuple[tuple[PrefixGroup, ...], ...]
    shares_prefixes: bool
    """True if any pass uses cached keys and values."""


def plan_batches(
    texts: Sequence[PromptContinuation], batch_rows: int, sharing: CacheSharing, window: int | None = None
) -> LikelihoodPlan:
    """Group texts, and split the groups into batches of similar length, longest first.

    Groups with branches come before groups without.

    Args:
        batch_rows: maximum number of trunks in a batch.
        window: number of tokens that the model's narrowest sliding attention sees; None: all. Padding between a trunk
            and its branch uses up part of this window. So trunks of different lengths share a batch only if all padded
            texts are shorter than the window.
    """
    prefix_length = 0
    if sharing != CacheSharing.NONE and len({text.ids for text in texts}) > 1:
        smallest, largest = min(text.ids for text in texts), max(text.ids for text in texts)
        # The prefix has no position whose logits are needed.
        shared = min(_count_equal_tokens(smallest, largest), *(text.first for text in texts))
        prefix_length = shared if shared >= MIN_SHARED_PREFIX_TOKENS else 0
    groups = sorted(
        _group_by_prefix(texts, prefix_length, sharing != CacheSharing.NONE),
        key=lambda group: (-group.trunk_length, texts[group.text_indices[0]].ids),
    )
    branching = [group for group in groups if len(texts[group.text_indices[-1]].ids) > group.trunk_length]
    branchless = [group for group in groups if len(texts[group.text_indices[-1]].ids) <= group.trunk_length]
    branch_lengths = (len(texts[index].ids) - group.trunk_length for group in branching for index in group.text_indices)
    padded_length = max((group.trunk_length for group in branching), default=0) + max(branch_lengths, default=0)
    equal_lengths = sharing == CacheSharing.EVEN or (window is not None and padded_length >= window)
    batches: list[list[PrefixGroup]] = []
    for kind, needs_equal_lengths in ((branching, equal_lengths), (branchless, False)):
        batch: list[PrefixGroup] = []
        for group in kind:
            is_different = needs_equal_lengths and batch and batch[0].trunk_length != group.trunk_length
            if not batch or len(batch) == batch_rows or is_different:
                batches.append(batch := [])
            batch.append(group)
    return LikelihoodPlan(prefix_length, tuple(map(tuple, batches)), bool(prefix_length or branching))


def _count_equal_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix of two sequences."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _group_by_prefix(texts: Sequence[PromptContinuation], prefix_length: int, sharing: bool) -> list[PrefixGroup]:
    """Put each text into one group such that few tokens are computed.

    Sorted by tokens, the texts form a prefix tree. From the leaves up, each node becomes the trunk of all texts below
    it, unless the groups of its children cost less.
    """
    indices_by_ids: dict[tuple[int, ...], list[int]] = {}
    for index, text in enumerate(texts):
        indices_by_ids.setdefault(text.ids, []).append(index)
    order = sorted(indices_by_ids)
    if not sharing:
        return [PrefixGroup(len(ids), tuple(indices_by_ids[ids])) for ids in order]
    lengths = [0, *accumulate(len(ids) - prefix_length for ids in order)]
    open_nodes: list[_PrefixNode] = []
    for i in range(len(order) + 1):
        # A node of depth 0 collects the groups of texts that share nothing beyond the common prefix.
        shared = max(0, _count_equal_tokens(order[i - 1], order[i]) - prefix_length) if 0 < i < len(order) else 0
        while open_nodes and open_nodes[-1].depth > shared:
            node = open_nodes.pop()
            node.close(i, lengths)
            if not open_nodes or open_nodes[-1].depth < shared:
                open_nodes.append(_PrefixNode(shared, node.start, 0))
            open_nodes[-1].cost += node.cost
            open_nodes[-1].groups += node.groups
        if i < len(order):
            open_nodes.append(_PrefixNode(len(order[i]) - prefix_length, i, 1))
    (root,) = open_nodes
    root.close(len(order), lengths)
    return [
        PrefixGroup(
            prefix_length + trunk_length, tuple(index for ids in order[start:stop] for index in indices_by_ids[ids])
        )
        for trunk_length, start, stop in root.groups
    ]


@dataclass
class _PrefixNode:
    """Node of the prefix tree: the common prefix of a range of texts, sorted by tokens."""

    depth: int
    """Length of this node's prefix in tokens, without the prefix common to all texts."""
    start: int
    ending_texts: int
    """Number of texts that end at this node: 0 or 1."""
    cost: int = 0
    """Tokens to compute for the texts below this node that already have groups."""
    groups: list[tuple[int, int, int]] = field(default_factory=list)
    """Groups of these texts, each as (`depth` of the node that is its trunk, first text, end of the range)."""

    def close(self, stop: int, lengths: Sequence[int]) -> None:
        """Make one group of all texts from `start` to `stop`, unless separate groups cost less.

        `lengths` holds, for each text, the tokens of all texts before it, without the prefix common to all texts.
        """
        count = stop - self.start
        branch_cost = (
            lengths[stop] - lengths[self.start] - count * self.depth + BRANCH_TOKENS * (count - self.ending_texts)
        )
        separate_cost = self.cost + self.ending_texts * self.depth
        if self.depth and (count == self.ending_texts or self.depth + branch_cost < separate_cost):
            self.cost, self.groups = self.depth + branch_cost, [(self.depth, self.start, stop)]
        elif self.ending_texts:
            self.cost, self.groups = separate_cost, [(self.depth, self.start, self.start + 1), *self.groups]


# Scoring: a common prefix is computed once, and logits only at positions of continuations.
#
# A batch takes two passes: first the trunks of its groups, padded on the right; then all branches, each with a copy of
# its trunk's keys and values. If trunks differ in length, there is padding between trunk and branch. An attention mask
# hides the padding, and position ids are passed to the model.


@dataclass(frozen=True)
class ContinuationScore:
    """Score of a continuation after its prompt."""

    nats: float
    """Sum of the log-probabilities of all its tokens."""
    is_greedy: bool
    """True if each of its tokens is the likeliest token at its position."""


@dataclass(frozen=True)
class ContinuationScorer:
    """Scorer of batches of texts with one model."""

    model: Model
    texts: Sequence[PromptContinuation]
    pad_token_id: int
    prefix_length: int
    """Length of the prefix that is computed once for all texts (`LikelihoodPlan.prefix_length`)."""

    def score_batch(self, groups: Sequence[PrefixGroup]) -> dict[int, ContinuationScore]:
        """Score one batch of a plan; return scores by index in `texts`."""
        sums = _LikelihoodSums()
        with torch.no_grad():
            trunks = self._pad([self.texts[g.text_indices[0]].ids[self.prefix_length : g.trunk_length] for g in groups])
            reads = [
                (row, position - self.prefix_length, index, token)
                for row, group in enumerate(groups)
                for index in group.text_indices
                for position, token in self.texts[index].predictions(0, group.trunk_length)
            ]
            # Tokens after a trunk, with the row of the trunk, and the indices of the texts that consist of both.
            branches: dict[_PrefixBranch, list[int]] = defaultdict(list)
            for row, group in enumerate(groups):
                for index in group.text_indices:
                    if rest := self.texts[index].ids[group.trunk_length :]:
                        branches[row, rest].append(index)
            start = select_cache_rows(self._prefix_cache, [0] * len(groups)) if self.prefix_length else None
            cache = self._run_pass(trunks, reads, sums, start, make_cache=bool(branches))
            # Branches of similar length are computed together, longest first.
            order = sorted(branches, key=lambda branch: (-len(branch[1]), branch))
            keys = [layer.keys for layer in cache.layers if layer.get_seq_length() > 0] if branches else []
            row_bytes = sum(2 * part[0].numel() * part.element_size() for part in keys)
            count = max(len(groups), BRANCH_BYTES // max(1, row_bytes))
            for first in range(0, len(order), count):
                chunk = {branch: branches[branch] for branch in order[first : first + count]}
                self._score_branches(groups, chunk, cache, sums)
        return {index: ContinuationScore(nats, index not in sums.misses) for index, nats in sums.nats.items()}

    def _pad(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return pad_rows(rows, self.pad_token_id, self.model.device)

    @cached_property
    def _prefix_cache(self) -> DynamicCache:
        """Keys and values of the prefix common to all texts."""
        rows = self._pad([self.texts[0].ids[: self.prefix_length]])
        return self._run_pass(rows, [], _LikelihoodSums(), None)

    def _score_branches(
        self, groups: Sequence[PrefixGroup], branches: Mapping["_PrefixBranch", Sequence[int]],
        cache: DynamicCache, sums: "_LikelihoodSums",
    ) -> None:  # fmt: skip
        """Score branches, each with its trunk's keys and values, and add the results to `sums`."""
        device, rows = self.model.device, self._pad([ids for _, ids in branches])
        trunks = [groups[trunk_row].trunk_length for trunk_row, _ in branches]
        longest = max(group.trunk_length for group in groups)
        reads = [
            (row, position - trunks[row], index, token)
            for row, indices in enumerate(branches.values())
            for index in indices
            for position, token in self.texts[index].predictions(trunks[row], len(self.texts[index].ids))
        ]
        forward_kwargs: dict[str, Tensor] = {}
        if any(trunk_length != longest for trunk_length in trunks):  # trunks are padded to the longest
            lengths = torch.tensor(trunks, device=device).unsqueeze(1)
            is_trunk = torch.arange(longest, device=device) < lengths
            forward_kwargs = {
                "attention_mask": torch.cat([is_trunk, torch.ones_like(rows, dtype=torch.bool)], dim=1).long(),
                "position_ids": lengths + torch.arange(rows.shape[1], device=device),
            }
        branch_cache = select_cache_rows(cache, [trunk_row for trunk_row, _ in branches])
        self._run_pass(rows, reads, sums, branch_cache, forward_kwargs)

    def _run_pass(
        self, rows: Tensor, reads: Sequence[tuple[int, int, int, int]], sums: "_LikelihoodSums",
        cache: DynamicCache | None, forward_kwargs: Mapping[str, Tensor] = MappingProxyType({}),
        make_cache: bool = True,
    ) -> Any:  # fmt: skip
        """Run one pass, add the token log-probabilities to `sums` and return the cache.

        Args:
            reads: (row, column, text index, next token) of each position whose logits are needed.
        """
        flat_positions = [row * rows.shape[1] + column for row, column, *_ in reads]
        positions = sorted({*flat_positions}) or [0]
        forward_pass = SelectedPositionsPass(
            self.model, rows, torch.tensor(positions, device=rows.device), forward_kwargs,
            cache=cache, make_cache=make_cache,
        )  # fmt: skip
        if not reads:
            return forward_pass.cache
        position_index = {index: i for i, index in enumerate(positions)}
        index = torch.tensor([position_index[position] for position in flat_positions], device=rows.device)
        target = torch.tensor([token for *_, token in reads], device=rows.device)
        nats = torch.empty(len(reads), dtype=torch.float64, device=rows.device)
        is_greedy = torch.empty(len(reads), dtype=torch.bool, device=rows.device)
        for start, logits in forward_pass.pieces():
            log_probabilities = functional.log_softmax(logits[0].float(), dim=-1)
            selected = ((index >= start) & (index < start + len(log_probabilities))).nonzero().squeeze(1)
            local = index[selected] - start
            nats[selected] = log_probabilities[local, target[selected]].double()
            is_greedy[selected] = log_probabilities.argmax(dim=-1)[local] == target[selected]
        for (_, _, text, _), value, is_likeliest in zip(reads, nats.tolist(), is_greedy.tolist(), strict=True):
            sums.nats[text] += value
            if not is_likeliest:
                sums.misses.add(text)
        return forward_pass.cache


_PrefixBranch = tuple[int, tuple[int, ...]]
"""Row of a trunk, and the tokens after it."""


@dataclass
class _LikelihoodSums:
    """Sums of log-probabilities by text."""

    nats: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    misses: set[int] = field(default_factory=set)
    """Texts with a token that is not the likeliest."""


def select_cache_rows(cache: DynamicCache, rows: Sequence[int]) -> DynamicCache:
    """Return a copy of some rows of a cache. Raises TypeError if the cache holds more than keys and values."""
    if not is_plain_kv_cache(cache):
        raise TypeError(f"{type(cache).__name__} holds more than keys and values")
    selected = copy.copy(cache)
    selected.layers = [copy.copy(layer) for layer in cache.layers]
    selected.batch_select_indices(torch.tensor(rows))  # on the CPU: layers may be on several devices
    return selected


def is_plain_kv_cache(cache: Any) -> bool:
    """Return True if a cache holds only keys and values; recurrent layers have other states."""
    plain_layers = DynamicLayer, DynamicSlidingWindowLayer
    return isinstance(cache, DynamicCache) and all(type(layer) in plain_layers for layer in cache.layers)


def narrowest_attention_window(model: Model) -> int | None:
    """Return how many tokens the narrowest sliding attention of a model sees; None if all layers see all tokens."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = DynamicCache(config=base.config).layers
    return min((layer.sliding_window for layer in layers if isinstance(layer, DynamicSlidingWindowLayer)), default=None)


def probe_cache_sharing(
    model: Model, texts: Sequence[PromptContinuation], batch_rows: int, pad: int
) -> CacheSharing | None:
    """Return how far this model's cache can be shared, by a test on the longest texts.

    The test compares each method of `CacheSharing`, in order, with the model's plain pass over complete texts; the
    first method that agrees is returned. The test uses the longest trunk and a trunk of another length, so it detects a
    cache that does not support positions, masks or this length. Returns None if logits at single positions differ from
    those of the plain pass even without a shared cache.
    """
    for sharing in CacheSharing:
        plan = plan_batches(texts, batch_rows, sharing, narrowest_attention_window(model))
        scorer = ContinuationScorer(model, texts, pad, plan.prefix_length)
        if all(_agrees_with_plain_pass(scorer, groups) for groups in _sample_groups(plan)):
            return sharing
    return None


def _sample_groups(plan: LikelihoodPlan) -> list[list[PrefixGroup]]:
    """Return test batches: two groups with trunks of different length, then the longest group if it is neither of them.

    If no pass shares a cache, only the shortest group is returned, which tests logits at single positions at the least
    cost.
    """
    if not plan.shares_prefixes:
        return [[plan.batches[-1][-1]]]
    longest = plan.batches[0][0]
    for batch in plan.batches:
        for second in batch:
            if second.trunk_length != batch[0].trunk_length:
                return [[batch[0], second], *([] if batch[0] is longest else [[longest]])]
    return [[longest]]


def _agrees_with_plain_pass(scorer: ContinuationScorer, groups: Sequence[PrefixGroup]) -> bool:
    """Score the first and the last text of each group; compare the last with the model's plain pass."""
    pairs = [tuple(dict.fromkeys((group.text_indices[0], group.text_indices[-1]))) for group in groups]
    try:
        scores = scorer.score_batch(
            [PrefixGroup(group.trunk_length, pair) for group, pair in zip(groups, pairs, strict=True)]
        )
        for *_, index in pairs:
            text = scorer.texts[index]
            with torch.no_grad():
                ids = torch.tensor([text.ids], device=scorer.model.device)
                logits = scorer.model(input_ids=ids, use_cache=False).logits[0, text.first :]
            targets = torch.tensor([text.targets], device=logits.device).T
            expected = float(functional.log_softmax(logits.float(), dim=-1).double().gather(1, targets).sum())
            tolerance = max(MIN_TOLERANCE, TOLERANCE_EPSILONS * torch.finfo(logits.dtype).eps)
            if not abs(scores[index].nats - expected) <= tolerance * max(1.0, abs(expected)):
                return False
    except Exception as error:  # a model's own code may raise anything for an unsupported call
        if oom.is_out_of_memory(error):
            raise
        return False
    return True


@dataclass(frozen=True)
class LikelihoodLimits:
    """Limits and padding of a model's input."""

    batch_rows: int
    """Number of texts, or of trunks of several texts, that are computed together."""
    max_tokens: int
    """Maximum number of tokens that the model reads; longer texts lose their beginning."""
    pad_token_id: int


def score_pairs(
    model: Model, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], limits: LikelihoodLimits, cached: ResultCache
) -> list[ContinuationScore] | None:
    """Return the score of each pair's continuation after its prompt, in the order of the pairs.

    All pairs are planned together and computed in chunks, each cached under a key of all its inputs. Returns None if
    the model's logits cannot be computed at single positions, not even for complete texts. Raises UnscorablePairError:
    prompt or continuation is empty, or the continuation is longer than the model's window.

    Args:
        cached: result cache; its keys cover all inputs except the model.
    """
    texts = []
    for index, (prompt, continuation) in enumerate(pairs):
        try:
            texts.append(PromptContinuation.from_tokens(prompt, continuation, limits.max_tokens))
        except ValueError as error:
            raise UnscorablePairError(index, str(error)) from None
    settings = [METHOD, limits.batch_rows, limits.pad_token_id]
    # A binary format is faster than JSON for millions of tokens.
    text_digests = [
        digests.hash_bytes(array("q", (len(text.targets), *text.ids, text.targets[-1])).tobytes()) for text in texts
    ]
    probe_key = digests.hash_json([*settings, "way", text_digests])
    sharing = cached(probe_key, lambda: probe_cache_sharing(model, texts, limits.batch_rows, limits.pad_token_id))
    if sharing is None:
        return None
    plan = plan_batches(texts, limits.batch_rows, CacheSharing(sharing), narrowest_attention_window(model))
    scorer = ContinuationScorer(model, texts, limits.pad_token_id, plan.prefix_length)

    def score_batches(batches: Sequence[Sequence[PrefixGroup]], indices: Sequence[int]) -> list[tuple[float, bool]]:
        computed = {index: score for batch in batches for index, score in scorer.score_batch(batch).items()}
        return [(computed[index].nats, computed[index].is_greedy) for index in indices]

    scores: dict[int, ContinuationScore] = {}
    for start in range(0, len(plan.batches), CHUNK_BATCHES):
        batches = plan.batches[start : start + CHUNK_BATCHES]
        plan_shape = [
            [[group.trunk_length, [text_digests[index] for index in group.text_indices]] for group in batch]
            for batch in batches
        ]
        key = digests.hash_json([*settings, sharing, plan.prefix_length, plan_shape])
        indices = [index for batch in batches for group in batch for index in group.text_indices]
        results = cached(key, partial(score_batches, batches, indices))
        for index, (nats, is_greedy) in zip(indices, results, strict=True):
            scores[index] = ContinuationScore(nats, is_greedy)
        report_progress("texts scored", len(scores), len(texts))
    return [scores[index] for index in range(len(texts))]
