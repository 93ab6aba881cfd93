"""Prompts, what becomes of them, and what they are while they are answered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import takewhile
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ratchet.models.chunked_loss import ForwardPass
from ratchet.models.device import Model
from ratchet.models.likelihoods import LEAST_HEADER_TOKENS, is_plain_kv_cache

Finish = Literal["stop", "length", "context", "memory", "invalid"]
_LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


@dataclass(frozen=True)
class DecodingRequest:
    """One prompt."""

    place: int
    """What the caller knows it by."""
    ids: tuple[int, ...]
    stream: str
    """What its random draws depend on (model/sampling.stream); not read when temperature is 0."""


@dataclass(frozen=True)
class DecodingResult:
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
class DecodingOptions:
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
class DecodingRow:
    """A prompt and what it has got."""

    asked: DecodingRequest
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


def longest_first_key(row: DecodingRow) -> tuple[int, int]:
    """Longest first: what does not fit shows itself early, and rows that join are never longer than the others were."""
    return -row.tokens, row.asked.place


def find_shared_prefix(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What all prompts begin with, if that is worth computing once; each has a token behind it."""
    if len(prompts) < 2:
        return ()
    least, most = min(prompts), max(prompts)
    pairs = zip(least[: min(map(len, prompts)) - 1], most, strict=False)
    shared = tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shared if len(shared) >= LEAST_HEADER_TOKENS else ()


def get_context_length(model: Model) -> int | None:
    """Tokens that a text may have; None: the model says nothing."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = whole.config.get_text_config()
    found = [value for name in _LIMITS if isinstance(value := getattr(config, name, None), int)]
    return min(found, default=None)


# Rows that are decoded together: their keys and values in one buffer, written in place, while rows come and go.
#
# Rows are aligned on the right: row r of n tokens lies in columns end - n .. end - 1, so each step writes one column
# for
# all, a mask hides what lies before a row, and positions are told. A new row is read straight into a free place;
# nothing
# that lies there already is copied, as it would be with a cache that grows by concatenation.

ROOM_COLUMNS = 64
"""Columns that a buffer gets beyond what is needed now."""

BeforePass = Callable[[int], None]
"""Called with the padded tokens (rows x columns, those with keys already included) of each pass before it is made."""


class DecodingBatch(Protocol):
    """Rows with what the model keeps of them. After an exception rows are as before, or are to be thrown away."""

    joins: bool
    """Whether rows may be added to others; otherwise all begin together, and prompts have one length."""

    def add(self, rows: Sequence[Sequence[int]], header: tuple[int, ...]) -> Tensor:
        """Read new rows, which all begin with `find_shared_prefix`; logits of their last tokens, [rows, vocabulary]."""

    def step(self, tokens: Sequence[int]) -> Tensor:
        """One more token for each row, in their order; logits [rows, vocabulary]."""

    def keep(self, places: Sequence[int]) -> list[int]:
        """Keep these rows; gives back their new order, as indices of the old one."""

    def tokens(self) -> int:
        """Padded tokens that are held."""


class LastPositionPass(ForwardPass):
    """A pass of which the logits of the last position are wanted."""

    def __init__(self, model: Model, ids: Tensor, given: dict[str, Any], cache: Any = None, keep: bool = False):
        self._given = given
        super().__init__(model, ids, (ids.shape[1] - 1, ids.shape[1]), cache=cache, keep=keep)

    def logits(self) -> Tensor:
        """[rows, vocabulary]."""
        ((_, found),) = self.pieces()
        return found[:, 0]


def compute_reference_logits(model: Model, ids: Sequence[int]) -> Tensor:
    """Logits [1, vocabulary] after a text by itself: one row, no filling, no cache. What decides in doubt."""
    return LastPositionPass(model, torch.tensor([list(ids)], device=model.device), {}).logits()


class KvCacheBatch:
    """Rows of a model whose cache is keys and values alone."""

    def __init__(self, model: Model, pad: int, before_pass: BeforePass, joins: bool = True) -> None:
        """`joins`: tell mask and positions, so that rows of several lengths lie together."""
        self.joins = joins
        self._model, self._pad, self._before_pass = model, pad, before_pass
        self._place = _CacheWindow()
        self._cache = Cache(layer_class_to_replicate=lambda: _KvCacheLayer(self._place))
        self._lengths: list[int] = []
        self._end = 0
        self._header: tuple[int, ...] = ()
        self._header_layers: list[tuple[Tensor, Tensor]] = []

    def tokens(self) -> int:
        return len(self._lengths) * max(self._lengths, default=0)

    def add(self, rows: Sequence[Sequence[int]], header: tuple[int, ...]) -> Tensor:
        """A row's part behind the header is computed; of rows with less behind it, some of the header as well, so that
        nothing is filled."""
        longest, first = max(map(len, rows)), len(self._lengths)
        self._make_room(first + len(rows), longest)
        if header and header != self._header:
            self._read_header(header)
        width = longest - len(header)
        # Where a row is shorter than the others are behind the header, it is filled, and computed whole.
        ids = [[self._pad] * (width - len(row)) + list(row[-width:]) for row in rows]
        for i, row in enumerate(rows):
            self._put_header(first + i, len(row), max(0, len(row) - width))
        self._before_pass(len(rows) * longest)
        lengths = [len(row) for row in rows]
        logits = self._run(ids, first, lengths)
        self._lengths += lengths
        return logits

    def step(self, tokens: Sequence[int]) -> Tensor:
        self._before_pass(len(tokens) * (max(self._lengths) + 1))
        self._make_room(len(tokens), 0, more=1)
        self._end += 1
        try:
            logits = self._run([[token] for token in tokens], 0, [length + 1 for length in self._lengths])
        except BaseException:
            self._end -= 1
            raise
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def keep(self, places: Sequence[int]) -> list[int]:
        """Places that are given up are taken by the last rows: so few are moved."""
        kept = set(places)
        order = list(range(len(self._lengths)))
        for place in range(len(order)):
            while order and order[-1] not in kept:
                order.pop()
            if place >= len(order):
                break
            if order[place] not in kept:
                self._move(len(order) - 1, place)
                order[place] = order.pop()
        self._lengths = [self._lengths[i] for i in order]
        return order

    def _run(self, ids: Sequence[Sequence[int]], first: int, lengths: Sequence[int]) -> Tensor:
        """Read the last tokens of neighbouring rows; keys before them are there."""
        columns, width, device = max(lengths), len(ids[0]), self._model.device
        self._place.open(slice(first, first + len(ids)), self._end - columns, self._end, width)
        given: dict[str, Tensor] = {}
        if self.joins:
            own = torch.tensor(lengths).unsqueeze(1)
            position = torch.arange(columns) - (columns - own)
            given["position_ids"] = position[:, -width:].clamp(min=0).to(device)
            given["attention_mask"] = (position >= 0).long().to(device)
        tokens = torch.tensor([list(row) for row in ids], device=device)
        return LastPositionPass(self._model, tokens, given, self._cache).logits()

    def _read_header(self, header: tuple[int, ...]) -> None:
        self._before_pass(len(header))
        begun = LastPositionPass(
            self._model, torch.tensor([header], device=self._model.device), {}, DynamicCache(), keep=True
        )
        if not is_plain_kv_cache(begun.cache):
            raise TypeError(f"{type(begun.cache).__name__} is no cache of keys and values alone")
        self._header_layers = [(layer.keys, layer.values) for layer in begun.cache.layers]
        self._header = header
        for i, (keys, values) in enumerate(self._header_layers):
            if i >= len(self._cache.layers):
                self._cache.layers.append(_KvCacheLayer(self._place))
            self._layers[i].reserve(keys, values)

    @property
    def _layers(self) -> list["_KvCacheLayer"]:
        found: list[_KvCacheLayer] = self._cache.layers
        return found

    def _put_header(self, row: int, length: int, count: int) -> None:
        """The first `count` tokens of the header, where a row of this length begins."""
        if count:
            begin = self._end - length
            for layer, (keys, values) in zip(self._layers, self._header_layers, strict=True):
                layer.keys[row, :, begin : begin + count] = keys[0, :, :count]
                layer.values[row, :, begin : begin + count] = values[0, :, :count]

    def _move(self, source: int, target: int) -> None:
        columns = slice(self._end - self._lengths[source], self._end)
        for layer in self._layers:
            layer.keys[target, :, columns] = layer.keys[source, :, columns]
            layer.values[target, :, columns] = layer.values[source, :, columns]

    def _make_room(self, rows: int, longest: int, more: int = 0) -> None:
        """For so many rows, a row of `longest` tokens, and `more` columns behind: shift what is there, or grow."""
        held = max(self._lengths, default=0)
        needed = max(held, longest)
        begin, end = needed, needed + more
        if self._end < needed or self._end + more > self._place.columns:
            if end > self._place.columns:
                self._place.columns = end + max(ROOM_COLUMNS, end // 4)
            elif self._lengths and more and self._place.columns - end < min(ROOM_COLUMNS, end // 4):
                self._place.columns += ROOM_COLUMNS  # or each step would shift
            for layer in self._layers:
                layer.shift(len(self._lengths), slice(self._end - held, self._end), begin - held)
            self._end = begin
        self._place.rows = max(self._place.rows, rows)
        for layer in self._layers:
            layer.grow()


class _CacheWindow:
    """Where a pass reads and writes, the same for all layers."""

    def __init__(self) -> None:
        self.rows, self.columns = 0, 0
        self.some, self.begin, self.end, self.width = slice(0), 0, 0, 0

    def open(self, some: slice, begin: int, end: int, width: int) -> None:
        """The next pass is of rows `some`, sees columns begin..end - 1, and writes the last `width` of them."""
        self.some, self.begin, self.end, self.width = some, begin, end, width


class _KvCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: [rows, heads, columns, size of a head]."""

    is_sliding = False
    keys: Tensor
    values: Tensor
    is_initialized: bool

    def __init__(self, place: _CacheWindow) -> None:
        super().__init__()
        self._place = place

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.reserve(key_states, value_states)

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Make buffers for such keys and values, if there are none. Zeros: what is masked must be finite."""
        if not self.is_initialized:
            shape = self._place.rows, self._place.columns
            self.keys = keys.new_zeros(shape[0], keys.shape[1], shape[1], keys.shape[3])
            self.values = values.new_zeros(shape[0], values.shape[1], shape[1], values.shape[3])
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.reserve(key_states, value_states)
        place = self._place
        columns = slice(place.end - place.width, place.end)
        self.keys[place.some, :, columns] = key_states
        self.values[place.some, :, columns] = value_states
        seen = slice(place.begin, place.end)
        return self.keys[place.some, :, seen], self.values[place.some, :, seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._place.end - self._place.begin - self._place.width

    def get_max_length(self) -> int:
        return -1

    def shift(self, rows: int, columns: slice, to: int) -> None:
        """Move columns of the first rows to where `to` is their first; after `grow`, if they end beyond the buffer."""
        self.grow()
        if self.is_initialized and columns.start != to:
            for buffer in (self.keys, self.values):
                held = buffer[:rows, :, columns].clone()
                buffer[:rows, :, to : to + held.shape[2]] = held

    def grow(self) -> None:
        """As large as `place` says by now."""
        if self.is_initialized and self.keys.shape[0::2] != (self._place.rows, self._place.columns):
            self.keys, self.values = self._larger(self.keys), self._larger(self.values)

    def _larger(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self._place.rows, old.shape[1], self._place.columns, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new


class UniformLengthBatch:
    """Rows of one length of a model with a cache of its own kind: it stays as it is until the last of them ends."""

    joins = False

    def __init__(self, model: Model, pad: int, before_pass: BeforePass) -> None:
        self._model, self._pad, self._before_pass = model, pad, before_pass
        self._kept: list[int] = []
        self._length = 0
        self._rows = 0
        self._given: dict[str, Any] = {}

    def tokens(self) -> int:
        return self._rows * self._length if self._kept else 0

    def add(self, rows: Sequence[Sequence[int]], header: tuple[int, ...]) -> Tensor:
        self._before_pass(len(rows) * len(rows[0]))
        whole = self._model.get_base_model() if hasattr(self._model, "get_base_model") else self._model
        # Recurrent models have another word for it. All of them write into what they are given.
        word = "cache_params" if "cache_params" in signature(whole.forward).parameters else "past_key_values"
        self._given = {word: DynamicCache(config=whole.config.get_text_config())}
        self._length, self._rows, self._kept = len(rows[0]), len(rows), list(range(len(rows)))
        return self._run(torch.tensor([list(row) for row in rows]))

    def step(self, tokens: Sequence[int]) -> Tensor:
        self._before_pass(self._rows * (self._length + 1))
        ids = torch.full((self._rows, 1), self._pad)
        ids[self._kept, 0] = torch.tensor(tokens)
        logits = self._run(ids)
        self._length += 1
        return logits[self._kept]

    def keep(self, places: Sequence[int]) -> list[int]:
        self._kept = [self._kept[i] for i in places]
        return list(places)

    def _run(self, ids: Tensor) -> Tensor:
        return LastPositionPass(self._model, ids.to(self._model.device), self._given, keep=True).logits()


class UncachedBatch:
    """Each row by itself, read anew for each token: a model with no cache that could be used."""

    joins = True

    def __init__(self, model: Model, before_pass: BeforePass) -> None:
        self._model, self._before_pass = model, before_pass
        self._texts: list[list[int]] = []

    def tokens(self) -> int:
        return sum(map(len, self._texts))

    def add(self, rows: Sequence[Sequence[int]], header: tuple[int, ...]) -> Tensor:
        logits = self._read(rows)
        self._texts += [list(row) for row in rows]
        return logits

    def step(self, tokens: Sequence[int]) -> Tensor:
        texts = [[*text, token] for text, token in zip(self._texts, tokens, strict=True)]
        logits = self._read(texts)
        self._texts = texts
        return logits

    def keep(self, places: Sequence[int]) -> list[int]:
        self._texts = [self._texts[i] for i in places]
        return list(places)

    def _read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        found = []
        for text in texts:
            self._before_pass(len(text))
            found.append(compute_reference_logits(self._model, text))
        return torch.cat(found)
