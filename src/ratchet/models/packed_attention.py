"""Lets attention on a CPU compute the rows of a pack one after the other, without a mask.

transformers separates the rows of a pack by a mask, so its time grows with the square of the pack's length. One row
after the other takes time that grows only with the squares of the rows' lengths.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ratchet.models.device import Model
from ratchet.models.fused_operators import represents_cpu

FUSED = "sdpa"
"""transformers' name of the attention that `scaled_dot_product_attention` computes."""

HAS_INTERFACE = "_supports_attention_backend"
"""Attribute of transformers' model classes that compute attention by the function of its name."""

Span = tuple[int, int, bool]
"""Start and end of positions in a sequence, and whether they are one row. If not, each of them is a row of one token;
padding consists of such rows."""


@contextmanager
def attend_within_rows(model: Model, position_ids: Tensor | None) -> Iterator[None]:
    """Let a model compute fused attention row by row inside this context, if it runs on a CPU.

    A layer that sees only a window of tokens, or has a mask of its own, still gets transformers' mask, and so do models
    that do not compute attention by a function of transformers. Run the backward pass inside this context too, because
    it may compute a block's forward pass again.

    Args:
        position_ids: int64 [sequences, positions], which restart at 0 in each row; None: nothing changes.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if position_ids is None or not represents_cpu(position_ids) or not getattr(base, HAS_INTERFACE, False):
        yield
        return
    rows = _RowAttention(position_ids.shape, _find_spans(position_ids))
    functions: tuple[tuple[Any, Any], ...] = (
        (ALL_ATTENTION_FUNCTIONS, rows.attend), (ALL_MASK_ATTENTION_FUNCTIONS, rows.make_mask)
    )  # fmt: skip
    before = [table[FUSED] for table, _ in functions]
    for table, function in functions:
        table[FUSED] = function
    try:
        yield
    finally:
        for (table, _), function in zip(functions, before, strict=True):
            table[FUSED] = function


def _find_spans(position_ids: Tensor) -> list[list[Span]]:
    """Return the spans of each sequence."""
    end = position_ids.shape[1]
    if position_ids.is_meta:  # it has no contents, so each sequence is one row
        return [[(0, end, True)] for _ in position_ids]
    starts = [(positions == 0).nonzero().flatten().tolist() for positions in position_ids]
    return [_join_single_tokens(zip(one, [*one[1:], end], strict=True)) for one in starts]


def _join_single_tokens(rows: Iterable[tuple[int, int]]) -> list[Span]:
    spans: list[Span] = []
    for start, end in rows:
        is_row = end - start > 1
        is_joined = not is_row and spans and not spans[-1][2]
        spans.append((spans.pop()[0] if is_joined else start, end, is_row))
    return spans


@dataclass(frozen=True)
class _RowAttention:
    """Replaces transformers' functions for attention and its mask, for inputs [sequences, positions]."""

    shape: torch.Size
    spans: list[list[Span]]
    """Spans of each sequence."""

    def make_mask(self, *, batch_size: int, q_length: int, kv_length: int, **options: Any) -> Tensor | None:
        """Return no mask for layers in which each token sees all earlier tokens of its row."""
        is_whole = (batch_size, q_length, kv_length) == (*self.shape, self.shape[1])
        if is_whole and options["attention_mask"] is options.get("local_size") is None and not options["use_vmap"]:
            return None
        mask: Tensor | None = sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **options)
        return mask

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Compute attention of heads, each [sequences, heads, positions, width], row by row if there is no mask.
        Returns [sequences, positions, heads, width]."""
        if attention_mask is not None:
            output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]
            return output, None
        bias, sequences = options.pop("position_bias", None), []
        for spans, *parts in zip(self.spans, query.split(1), key.split(1), value.split(1), strict=True):
            lengths = [end - start for start, end, _ in spans]
            heads_of_spans = zip(*(part.split(lengths, dim=2) for part in parts), strict=True)
            outputs = []
            for (start, end, is_row), (q, k, v) in zip(spans, heads_of_spans, strict=True):
                if is_row:
                    own_bias = None if bias is None else bias[..., start:end, start:end]
                    outputs.append(sdpa_attention_forward(module, q, k, v, None, position_bias=own_bias, **options)[0])
                else:  # a token that sees only itself
                    outputs.append(repeat_kv(v, q.shape[1] // v.shape[1]).transpose(1, 2))
            sequences.append(torch.cat(outputs, dim=1))
        return torch.cat(sequences), None
