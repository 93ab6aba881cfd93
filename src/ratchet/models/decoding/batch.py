"""Requests and rows of batched decoding, and the batches that hold rows with their keys and values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from itertools import takewhile
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ratchet.models.base_model import find_context_length
from ratchet.models.chunked_loss import ForwardPass
from ratchet.models.device import Model
from ratchet.models.likelihoods import MIN_SHARED_PREFIX_TOKENS, is_plain_kv_cache

FinishReason = Literal["stop", "length", "context", "memory", "invalid"]
ROOM_COLUMNS = 64
"""Minimum number of columns that an enlarged buffer gets in addition to those that it needs now."""
BeforePass = Callable[[int], None]
"""Called before each pass with its number of padded tokens (rows x columns, including columns with cached keys)."""


@dataclass(frozen=True)
class DecodingRequest:
    """A prompt to answer."""

    index: int
    ids: tuple[int, ...]
    stream: str
    """Key of the answer's random stream (`token_choice.noise_stream_key`); unused at temperature 0."""


@dataclass(frozen=True)
class DecodingResult:
    """The answer to a prompt."""

    index: int
    ids: tuple[int, ...]
    """Tokens of the answer, including its end token if there is one."""
    finish: FinishReason
    """
    stop     an end token was generated
    length   `max_new_tokens` were generated
    context  the model's context is full; if the prompt fills it, there is no answer
    memory   the prompt does not fit into memory even alone, so there is no answer
    invalid  even the row's plain pass gives logits from which no token can be chosen (NaN); earlier tokens are kept
    """
    nats: float
    """Mean log-probability of the answer's tokens under the model, at temperature 1, to 4 decimals; 0.0 if empty."""


@dataclass(frozen=True)
class DecodingOptions:
    """Settings of decoding."""

    max_new_tokens: int
    end_token_ids: tuple[int, ...]
    pad_token_id: int
    temperature: float = 0.0
    top_p: float = 1.0
    exact: bool = True
    """If True, plain passes decide doubtful tokens. If False, the batch decides them, and answers may depend on
    the batch."""
    max_rows: int = 0
    """Maximum rows decoded together; 0: a default for the device."""
    window: int = 1024
    """Number of prompts that are fetched together and sorted by length."""


@dataclass(eq=False)
class DecodingRow:
    """A prompt and the tokens generated so far."""

    request: DecodingRequest
    limit: int
    """Maximum new tokens; less than `max_new_tokens` if the context ends earlier."""
    shared_prefix: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    nats: float = 0.0
    scale: float = 0.0
    has_nonfinite_logits: bool = False
    """True if the batch gave logits that are not finite; the row's cached keys may then not be finite either."""

    def text(self) -> tuple[int, ...]:
        return (*self.request.ids, *self.ids)

    @property
    def tokens(self) -> int:
        return len(self.request.ids) + len(self.ids)

    def expected_length(self, new_tokens: int) -> int:
        """Return the length after `new_tokens` more tokens, or after the last token that the row may get."""
        return self.tokens + min(new_tokens, self.limit - len(self.ids))

    def append(self, token: int, nats: float, scale: float) -> None:
        """Append a token with its log-probability and the greatest absolute logit."""
        self.ids.append(token)
        self.nats += nats
        self.scale = max(self.scale, scale)


def longest_first_key(row: DecodingRow) -> tuple[int, int]:
    """Return a sort key, longest first: rows that do not fit fail early, and later rows are never longer."""
    return -row.tokens, row.request.index


def find_shared_prefix(prompts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the common prefix of all prompts (at least one token shorter than each prompt).

    Return () if the prefix has fewer than MIN_SHARED_PREFIX_TOKENS tokens.
    """
    if len(prompts) < 2:
        return ()
    smallest, largest = min(prompts), max(prompts)
    pairs = zip(smallest[: min(map(len, prompts)) - 1], largest, strict=False)
    shared = tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shared if len(shared) >= MIN_SHARED_PREFIX_TOKENS else ()


def get_context_length(model: Model) -> int | None:
    """Return the maximum length of a text; None if the config does not state it."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return find_context_length(base.config.to_dict())


# Batches. Keys and values of all rows are in one buffer that passes write in place, while rows join and leave.
#
# Rows are aligned on the right: a row of n tokens occupies columns end - n .. end - 1, so each step writes one column
# for all rows. A mask hides the columns before a row, and the model receives position ids. A new row is written
# directly into a free place; existing keys and values are not copied, unlike in a cache that grows by concatenation.


class DecodingBatch(Protocol):
    """Rows with their cached state. Discard the batch after an exception."""

    supports_joining: bool
    """True if rows may join later; otherwise all rows start together and have prompts of one length."""

    def add(self, rows: Sequence[Sequence[int]], prefix: tuple[int, ...]) -> Tensor:
        """Read new rows, which all start with `prefix`. Return logits of their last tokens, [rows, vocabulary]."""

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to each row, in order. Return logits [rows, vocabulary]."""

    def keep(self, indices: Sequence[int]) -> list[int]:
        """Keep only these rows. Return their new order, as indices of the old order."""

    def tokens(self) -> int:
        """Return the number of padded tokens held."""


def _compute_last_logits(model: Model, ids: Tensor, **options: Any) -> Tensor:
    """Return logits [rows, vocabulary] of the last position; `options` are those of ForwardPass."""
    forward_pass = ForwardPass(model, ids.to(model.device), (ids.shape[1] - 1, ids.shape[1]), **options)
    ((_, logits),) = forward_pass.pieces()
    return logits[:, 0]


def compute_reference_logits(model: Model, ids: Sequence[int]) -> Tensor:
    """Compute logits [1, vocabulary] after a text with a plain pass: one row, no padding, no cache.

    This pass decides doubtful tokens.
    """
    return _compute_last_logits(model, torch.tensor([list(ids)]))


class KvCacheBatch:
    """Rows of a model whose cache holds only keys and values, and which takes an attention mask and position ids."""

    supports_joining = True

    def __init__(self, model: Model, pad: int, before_pass: BeforePass) -> None:
        self._model, self._pad, self._before_pass = model, pad, before_pass
        self._window = _CacheWindow()
        self._cache = Cache(layer_class_to_replicate=lambda: _KvCacheLayer(self._window))
        self._lengths: list[int] = []
        self._end = 0
        self._prefix: tuple[int, ...] = ()
        self._prefix_layers: list[tuple[Tensor, Tensor]] = []

    def tokens(self) -> int:
        return len(self._lengths) * max(self._lengths, default=0)

    def add(self, rows: Sequence[Sequence[int]], prefix: tuple[int, ...]) -> Tensor:
        """Compute each row's part after the prefix.

        For rows with a shorter part, some of the prefix is computed too, so that no padding is needed.
        """
        longest, first = max(map(len, rows)), len(self._lengths)
        self._make_room(first + len(rows), longest)
        if prefix and prefix != self._prefix:
            self._read_prefix(prefix)
        width = longest - len(prefix)
        # A row that is shorter than `width` is padded and computed completely.
        ids = [[self._pad] * (width - len(row)) + list(row[-width:]) for row in rows]
        for i, row in enumerate(rows):
            if count := max(0, len(row) - width):  # tokens of the prefix that are not computed again
                columns = slice(self._end - len(row), self._end - len(row) + count)
                for layer, (keys, values) in zip(self._layers, self._prefix_layers, strict=True):
                    layer.keys[first + i, :, columns] = keys[0, :, :count]
                    layer.values[first + i, :, columns] = values[0, :, :count]
        self._before_pass(len(rows) * longest)
        lengths = [len(row) for row in rows]
        logits = self._run(ids, first, lengths)
        self._lengths += lengths
        return logits

    def step(self, tokens: Sequence[int]) -> Tensor:
        self._before_pass(len(tokens) * (max(self._lengths) + 1))
        self._make_room(len(tokens), 0, more_columns=1)
        self._end += 1
        try:
            logits = self._run([[token] for token in tokens], 0, [length + 1 for length in self._lengths])
        except BaseException:
            self._end -= 1
            raise
        self._lengths = [length + 1 for length in self._lengths]
        return logits

    def keep(self, indices: Sequence[int]) -> list[int]:
        """Move the last rows into the places of removed rows, so that few rows are moved."""
        kept = set(indices)
        order = list(range(len(self._lengths)))
        for index in range(len(order)):
            while order and order[-1] not in kept:
                order.pop()
            if index >= len(order):
                break
            if order[index] not in kept:
                source = len(order) - 1
                columns = slice(self._end - self._lengths[source], self._end)
                for layer in self._layers:
                    layer.keys[index, :, columns] = layer.keys[source, :, columns]
                    layer.values[index, :, columns] = layer.values[source, :, columns]
                order[index] = order.pop()
        self._lengths = [self._lengths[i] for i in order]
        return order

    def _run(self, ids: Sequence[Sequence[int]], first: int, lengths: Sequence[int]) -> Tensor:
        """Read the last tokens (`ids`) of adjacent rows from index `first`; keys of earlier tokens are in the cache."""
        columns, width, device = max(lengths), len(ids[0]), self._model.device
        window = self._window
        window.row_slice, window.width = slice(first, first + len(ids)), width
        window.start, window.end = self._end - columns, self._end
        position = torch.arange(columns) - (columns - torch.tensor(lengths).unsqueeze(1))
        forward_kwargs = {
            "position_ids": position[:, -width:].clamp(min=0).to(device),
            "attention_mask": (position >= 0).long().to(device),
        }
        tokens = torch.tensor([list(row) for row in ids])
        return _compute_last_logits(self._model, tokens, cache=self._cache, forward_kwargs=forward_kwargs)

    def _read_prefix(self, prefix: tuple[int, ...]) -> None:
        self._before_pass(len(prefix))
        cache = DynamicCache()
        _compute_last_logits(self._model, torch.tensor([prefix]), cache=cache)
        if not is_plain_kv_cache(cache):
            raise TypeError(f"{type(cache).__name__} holds more than keys and values")
        self._prefix_layers = [(layer.keys, layer.values) for layer in cache.layers]
        self._prefix = prefix
        for i, (keys, values) in enumerate(self._prefix_layers):
            if i >= len(self._cache.layers):
                self._cache.layers.append(_KvCacheLayer(self._window))
            self._layers[i].reserve(keys, values)

    @property
    def _layers(self) -> list["_KvCacheLayer"]:
        layers: list[_KvCacheLayer] = self._cache.layers
        return layers

    def _make_room(self, rows: int, longest: int, more_columns: int = 0) -> None:
        """Shift columns or enlarge buffers for `rows` rows, a row of `longest` tokens, and `more_columns` after it."""
        used = max(self._lengths, default=0)
        needed = max(used, longest)
        start, end = needed, needed + more_columns
        if self._end < needed or self._end + more_columns > self._window.columns:
            if end > self._window.columns:
                self._window.columns = end + max(ROOM_COLUMNS, end // 4)
            elif self._lengths and more_columns and self._window.columns - end < min(ROOM_COLUMNS, end // 4):
                self._window.columns += ROOM_COLUMNS  # otherwise each step would shift
            for layer in self._layers:
                layer.shift(len(self._lengths), slice(self._end - used, self._end), start - used)
            self._end = start
        self._window.rows = max(self._window.rows, rows)
        for layer in self._layers:
            layer.grow()


@dataclass
class _CacheWindow:
    """Size of the buffers, and the part that a pass uses; all layers share it.

    A pass reads `row_slice` and the columns from `start` to `end`, and writes the last `width` of these columns.
    """

    rows: int = 0
    columns: int = 0
    row_slice: slice = field(default_factory=lambda: slice(0))
    start: int = 0
    end: int = 0
    width: int = 0


class _KvCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer: [rows, heads, columns, size of a head]."""

    is_sliding = False
    keys: Tensor
    values: Tensor
    is_initialized: bool

    def __init__(self, window: _CacheWindow) -> None:
        super().__init__()
        self._window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.reserve(key_states, value_states)

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Allocate buffers if there are none. They contain zeros, because masked values must be finite."""
        if not self.is_initialized:
            shape = self._window.rows, self._window.columns
            self.keys = keys.new_zeros(shape[0], keys.shape[1], shape[1], keys.shape[3])
            self.values = values.new_zeros(shape[0], values.shape[1], shape[1], values.shape[3])
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.reserve(key_states, value_states)
        window = self._window
        columns = slice(window.end - window.width, window.end)
        self.keys[window.row_slice, :, columns] = key_states
        self.values[window.row_slice, :, columns] = value_states
        visible = slice(window.start, window.end)
        return self.keys[window.row_slice, :, visible], self.values[window.row_slice, :, visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._window.end - self._window.start - self._window.width

    def get_max_length(self) -> int:
        return -1

    def shift(self, rows: int, columns: slice, start: int) -> None:
        """Move columns of the first rows so that they begin at `start`; grow the buffer first if needed."""
        self.grow()
        if self.is_initialized and columns.start != start:
            for buffer in (self.keys, self.values):
                moved = buffer[:rows, :, columns].clone()
                buffer[:rows, :, start : start + moved.shape[2]] = moved

    def grow(self) -> None:
        """Enlarge the buffers to the size of the window."""
        if self.is_initialized and self.keys.shape[0::2] != (self._window.rows, self._window.columns):
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_zeros(self._window.rows, old.shape[1], self._window.columns, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                setattr(self, name, new)


class UniformLengthBatch:
    """Rows of equal length for a model that takes no mask or no positions, or has its own kind of cache (Mamba).

    Rows that ended stay in the cache until all end.
    """

    supports_joining = False

    def __init__(self, model: Model, pad: int, before_pass: BeforePass) -> None:
        self._model, self._pad, self._before_pass = model, pad, before_pass
        self._active: list[int] = []
        self._length = 0
        self._rows = 0
        self._forward_kwargs: dict[str, Any] = {}

    def tokens(self) -> int:
        return self._rows * self._length if self._active else 0

    def add(self, rows: Sequence[Sequence[int]], prefix: tuple[int, ...]) -> Tensor:
        self._before_pass(len(rows) * len(rows[0]))
        base = self._model.get_base_model() if hasattr(self._model, "get_base_model") else self._model
        # Recurrent models have another name for the argument. All models write into the cache that they receive.
        cache_argument = "cache_params" if "cache_params" in signature(base.forward).parameters else "past_key_values"
        self._forward_kwargs = {cache_argument: DynamicCache(config=base.config.get_text_config())}
        self._length, self._rows, self._active = len(rows[0]), len(rows), list(range(len(rows)))
        return self._run(torch.tensor([list(row) for row in rows]))

    def step(self, tokens: Sequence[int]) -> Tensor:
        self._before_pass(self._rows * (self._length + 1))
        ids = torch.full((self._rows, 1), self._pad)
        ids[self._active, 0] = torch.tensor(tokens)
        logits = self._run(ids)
        self._length += 1
        return logits[self._active]

    def keep(self, indices: Sequence[int]) -> list[int]:
        self._active = [self._active[i] for i in indices]
        return list(indices)

    def _run(self, ids: Tensor) -> Tensor:
        return _compute_last_logits(self._model, ids, make_cache=True, forward_kwargs=self._forward_kwargs)


class UncachedBatch:
    """Rows of a model without a usable cache: each row is read separately and from its start for each token."""

    supports_joining = True

    def __init__(self, model: Model, before_pass: BeforePass) -> None:
        self._model, self._before_pass = model, before_pass
        self._texts: list[list[int]] = []

    def tokens(self) -> int:
        return sum(map(len, self._texts))

    def add(self, rows: Sequence[Sequence[int]], prefix: tuple[int, ...]) -> Tensor:
        logits = self._read(rows)
        self._texts += [list(row) for row in rows]
        return logits

    def step(self, tokens: Sequence[int]) -> Tensor:
        texts = [[*text, token] for text, token in zip(self._texts, tokens, strict=True)]
        logits = self._read(texts)
        self._texts = texts
        return logits

    def keep(self, indices: Sequence[int]) -> list[int]:
        self._texts = [self._texts[i] for i in indices]
        return list(indices)

    def _read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        logits = []
        for text in texts:
            self._before_pass(len(text))
            logits.append(compute_reference_logits(self._model, text))
        return torch.cat(logits)
