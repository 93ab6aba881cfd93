"""Replaces attention and rotary embeddings of transformers' models on a CPU.

transformers computes attention over the whole pack and masks other rows, so the time grows with the square of the
pack's length. Here each row is computed separately, without a mask, so it grows with the sum of the squares of the
rows' lengths. Ratchet's kernels (`models.cpu_kernels`) compute the rows of packs and of padded batches. What they
cannot compute is left to torch, row by row in packs.
"""

import sys
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from ratchet.models.cpu_kernels import library, operators
from ratchet.models.cpu_kernels.attention import Span, attend, is_suitable
from ratchet.models.device import Model
from ratchet.models.fused_operators import has_equal_code, is_on_cpu

SDPA = "sdpa"
"""Name in transformers of attention by torch's `scaled_dot_product_attention`."""

ROTATE = "apply_rotary_pos_emb"
"""Name of the function for rotary embeddings in transformers' modules."""
_ROTARY_FUNCTIONS = {ROTATE: modeling_llama.apply_rotary_pos_emb, "rotate_half": modeling_llama.rotate_half}

BACKEND_ATTRIBUTE = "_supports_attention_backend"
"""Attribute of transformers' model classes; true if they look up their attention function in a table."""


@contextmanager
def attend_within_rows(model: Model, input_ids: Tensor, position_ids: Tensor | None) -> Iterator[None]:
    """Compute sdpa attention within rows inside this context, if the model runs on a CPU. Rotary embeddings use
    Ratchet's kernel if the model's function has the same code as Llama's.

    This replaces transformers' functions in the whole process; run no other model meanwhile. Layers with a sliding
    window, an attention mask or an added mask function keep transformers' mask. Models that do not look up their
    attention function do not change. Run the backward pass inside this context too, because it may compute a block's
    forward pass again.

    Args:
        model: the model, with or without adapter; its only inputs are token ids and position ids.
        input_ids: int64 [sequences, positions]; only the shape is read.
        position_ids: int64 [sequences, positions], restarting at 0 in each row; None: each sequence is one row, and may
            end with padding.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    is_pack = position_ids is not None
    is_replaced = is_on_cpu(input_ids) and getattr(base, BACKEND_ATTRIBUTE, False)
    if not is_replaced or not (is_pack or library.load_kernels().is_available):
        yield
        return
    rows = _RowAttention(input_ids.shape, _find_spans(input_ids.shape, position_ids), is_pack)
    functions: list[tuple[MutableMapping[str, Any], str, Any]] = [(ALL_ATTENTION_FUNCTIONS, SDPA, rows.attend)]
    if is_pack:
        functions.append((ALL_MASK_ATTENTION_FUNCTIONS, SDPA, rows.make_mask))
    names = vars(sys.modules[type(base).__module__])
    if all(has_equal_code(names.get(name), function) for name, function in _ROTARY_FUNCTIONS.items()):
        functions.append((names, ROTATE, partial(operators.rotate, names[ROTATE])))
    before = [table[name] for table, name, _ in functions]
    for table, name, function in functions:
        table[name] = function
    try:
        yield
    finally:
        for (table, name, _), function in zip(functions, before, strict=True):
            table[name] = function


def _find_spans(shape: torch.Size, position_ids: Tensor | None) -> list[list[Span]]:
    """Return the spans of each sequence."""
    sequences, end = shape
    if position_ids is None or position_ids.is_meta:  # tensors on the meta device have no contents
        return [[(sequence, 0, end, True)] for sequence in range(sequences)]
    starts = [(positions == 0).nonzero().flatten().tolist() for positions in position_ids]
    return [
        _join_single_tokens(sequence, zip(of_rows, [*of_rows[1:], end], strict=True))
        for sequence, of_rows in enumerate(starts)
    ]


def _join_single_tokens(sequence: int, rows: Iterable[tuple[int, int]]) -> list[Span]:
    spans: list[Span] = []
    for start, end in rows:
        is_row = end - start > 1
        is_joined = not is_row and spans and not spans[-1][-1]
        spans.append((sequence, spans.pop()[1] if is_joined else start, end, is_row))
    return spans


@dataclass(frozen=True)
class _RowAttention:
    """Replaces transformers' functions for attention and its mask, for inputs [sequences, positions]."""

    shape: torch.Size
    """Number of sequences and of positions."""
    spans: list[list[Span]]
    """Spans of each sequence."""
    is_pack: bool

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
        uses_kernel = attention_mask is None and self._can_use_kernel(module, query, key, value, options)
        if uses_kernel:
            scale = options.get("scaling") or query.shape[-1] ** -0.5
            return attend(query, key, value, [span for spans in self.spans for span in spans], scale), None
        if attention_mask is not None or not self.is_pack:
            output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]
            return output, None
        bias = options.pop("position_bias", None)
        sequences = []
        for spans, *parts in zip(self.spans, query.split(1), key.split(1), value.split(1), strict=True):
            lengths = [end - start for _, start, end, _ in spans]
            heads_of_spans = zip(*(part.split(lengths, dim=2) for part in parts), strict=True)
            outputs = []
            for (_, start, end, is_row), (q, k, v) in zip(spans, heads_of_spans, strict=True):
                if is_row:
                    own_bias = None if bias is None else bias[..., start:end, start:end]
                    outputs.append(sdpa_attention_forward(module, q, k, v, None, position_bias=own_bias, **options)[0])
                else:  # a token that sees only itself
                    outputs.append(repeat_kv(v, q.shape[1] // v.shape[1]).transpose(1, 2))
            sequences.append(torch.cat(outputs, dim=1))
        return torch.cat(sequences), None

    def _can_use_kernel(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
        """Return whether Ratchet's kernel can compute this call: whole inputs, causal, without dropout, bias, cache or
        soft cap."""
        is_causal = options.get("is_causal")
        return (
            query.shape[::2] == self.shape
            and is_suitable(query, key, value, sum(map(len, self.spans)))
            and not options.get("dropout")
            and options.get("position_bias") is None
            and options.get("cache") is None
            and options.get("softcap") is None
            and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        )
