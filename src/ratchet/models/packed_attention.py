"""Lets attention on a CPU compute the rows of a pack one after the other, without a mask.

transformers computes attention over the whole pack and masks other rows, so the time grows with the square of the
pack's length. Row by row, it grows with the sum of the squares of the rows' lengths.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ratchet.models.device import Model
from ratchet.models.fused_operators import is_on_cpu

SDPA = "sdpa"
"""Name in transformers of attention by torch's `scaled_dot_product_attention`."""

BACKEND_ATTRIBUTE = "_supports_attention_backend"
"""Attribute of transformers' model classes; true if they look up their attention function in a table."""


class _Span(NamedTuple):
    """A range of positions in a sequence."""

    start: int
    end: int
    is_row: bool
    """Whether the positions are one row; otherwise each is a row of one token, as padding is."""


@contextmanager
def attend_within_rows(model: Model, position_ids: Tensor | None) -> Iterator[None]:
    """Compute sdpa attention row by row inside this context, if the model runs on a CPU.

    This replaces transformers' functions in the whole process; run no other model meanwhile. Layers with a sliding
    window, an attention mask or an added mask function keep transformers' mask. Models that do not look up their
    attention function do not change. Run the backward pass inside this context too, because it may compute a block's
    forward pass again.

    Args:
        model: the model, with or without adapter; its only inputs are token ids and position ids.
        position_ids: int64 [sequences, positions], which restart at 0 in each row; None: nothing changes.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if position_ids is None or not is_on_cpu(position_ids) or not getattr(base, BACKEND_ATTRIBUTE, False):
        yield
        return
    rows = _RowAttention(position_ids.shape, _find_spans(position_ids))
    functions: tuple[tuple[Any, Any], ...] = (
        (ALL_ATTENTION_FUNCTIONS, rows.attend), (ALL_MASK_ATTENTION_FUNCTIONS, rows.make_mask)
    )  # fmt: skip
    before = [table[SDPA] for table, _ in functions]
    for table, function in functions:
        table[SDPA] = function
    try:
        yield
    finally:
        for (table, _), function in zip(functions, before, strict=True):
            table[SDPA] = function


def _find_spans(position_ids: Tensor) -> list[list[_Span]]:
    """Return the spans of each sequence."""
    end = position_ids.shape[1]
    if position_ids.is_meta:  # it has no contents, so each sequence is one row
        return [[_Span(0, end, True)] for _ in position_ids]
    starts = [(positions == 0).nonzero().flatten().tolist() for positions in position_ids]
    return [_join_single_tokens(zip(of_rows, [*of_rows[1:], end], strict=True)) for of_rows in starts]


def _join_single_tokens(rows: Iterable[tuple[int, int]]) -> list[_Span]:
    spans: list[_Span] = []
    for start, end in rows:
        is_row = end - start > 1
        is_joined = not is_row and spans and not spans[-1].is_row
        spans.append(_Span(spans.pop().start if is_joined else start, end, is_row))
    return spans


@dataclass(frozen=True)
class _RowAttention:
    """Replaces transformers' functions for attention and its mask, for inputs [sequences, positions]."""

    shape: torch.Size
    spans: list[list[_Span]]
    """Spans of each sequence."""

    def make_mask(self, *, batch_size: int, q_length: int, kv_length: int, **options: Any) -> Tensor | None:
        """Return None where each token sees all earlier tokens of its row; elsewhere transformers' mask."""
        is_whole = (batch_size, q_length, kv_length) == (*self.shape, self.shape[1])
        has_other_mask = options["attention_mask"] is not None or options["use_vmap"]  # use_vmap: of an added function
        if is_whole and not has_other_mask and options.get("local_size") is None:
            return None
        mask: Tensor | None = sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **options)
        return mask

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Return attention [sequences, positions, heads, width] of heads [sequences, heads, positions, width]; row by
        row without a mask."""
        if attention_mask is not None:
            output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]
            return output, None
        bias = options.pop("position_bias", None)
        sequences = []
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
