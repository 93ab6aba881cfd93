"""Which continuations are computed together: texts that begin alike share the computation of what they begin with.

A task asks for several continuations of one prompt, and all its prompts may begin with the same instruction: of four
short choices after a long text, three in four tokens need not be computed. The plan is made over all texts before the
first is computed, and depends on nothing else.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

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


def plan(texts: Sequence[Text], batch_rows: int, sharing: Sharing, window: int | None = None) -> Plan:
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
