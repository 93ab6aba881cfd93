"""Reads the base's weights tensor by tensor, as the adapter was trained on them or as the files contain them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Params4bit
from torch import Tensor

from ratchet.exporters.merge.recipe import MergeRecipe
from ratchet.models import loading, vocabulary, weights


@dataclass(frozen=True)
class TokenRowInitialization:
    """How a tensor with one row per token gets its additional rows."""

    count: int
    """Rows of the grown tensor."""
    stored: int
    """Rows in the files."""
    pieces: vocabulary.Pieces


@dataclass(frozen=True)
class BaseStorageFormat:
    """How each parameter of the base is stored and loaded before an update is added."""

    dtypes: Mapping[str, torch.dtype]
    """Type of every saved parameter and buffer."""
    quantized: frozenset[str]
    """Parameters that training quantizes to 4 bits."""
    prequantized: frozenset[str]
    """Stored tensors that are 4-bit in the files already."""
    transposed: frozenset[str]
    """Parameters stored as [inputs, outputs]; they are transposed for quantization."""
    token_rows: Mapping[str, TokenRowInitialization]
    """Parameters with one row per token."""


class BaseWeightReader:
    """Reads stored tensors and converts them to the values that updates are added to."""

    def __init__(self, recipe: MergeRecipe, storage: BaseStorageFormat) -> None:
        self._recipe = recipe
        self._storage = storage
        self._tensors = weights.WeightReader(recipe.base).tensors()
        self._compute_dtype = loading.pick_dtype(recipe.train.compute_dtype, recipe.device)

    def read(self, name: str, parameter: str) -> Tensor:
        """Read a stored tensor in the type of its parameter, as a new tensor.

        Args:
            name: name in the files.
            parameter: name of the parameter that the tensor is, or is part of.
        """
        stored = self._tensors[name][...].to(self._recipe.device)
        if name in self._storage.prequantized:
            return self._dequantize_stored(name, parameter, stored)
        return stored.to(self._storage.dtypes[parameter])

    def as_trained(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole parameter in float32 as training used it: with new token rows, and rounded to 4 bits if
        quantized. Buffers of integers stay as they are."""
        if not tensor.is_floating_point():
            return tensor
        if name in self._storage.quantized:
            return self._round_to_4bit(name, tensor)
        rows = self._storage.token_rows.get(name)
        return tensor.float() if rows is None else self._add_token_rows(rows, tensor)

    def _round_to_4bit(self, name: str, tensor: Tensor) -> Tensor:
        """Quantize to 4 bits as transformers 5 does (integrations.bitsandbytes, Bnb4bitQuantize), and dequantize as
        bitsandbytes does for each matrix product."""
        is_transposed, train = name in self._storage.transposed, self._recipe.train
        quantized: Any = Params4bit(
            tensor.T if is_transposed else tensor,
            requires_grad=False,
            quant_type=train.quantization,
            compress_statistics=train.double_quantization,
            quant_storage=getattr(torch, train.quantization_storage),
        ).to(self._recipe.device)
        del tensor
        value: Tensor = dequantize_4bit(quantized.data, quantized.quant_state).float()
        return value.T if is_transposed else value

    def _dequantize_stored(self, name: str, parameter: str, stored: Tensor) -> Tensor:
        """Dequantize a weight that is 4-bit in the files, as its layer does."""
        parts = {key: one[...] for key, one in self._tensors.items() if key.startswith(f"{name}.")}
        quantized: Any = Params4bit.from_prequantized(stored, parts, device=self._recipe.device)
        quantized.quant_state.dtype = self._compute_dtype  # bitsandbytes' kernel returns this type
        value: Tensor = dequantize_4bit(quantized.data, quantized.quant_state).to(self._storage.dtypes[parameter])
        return value.T if parameter in self._storage.transposed else value

    def _add_token_rows(self, rows: TokenRowInitialization, tensor: Tensor) -> Tensor:
        """Add rows for new tokens, initialized as in `vocabulary.grow_embeddings`, in the base's compute type."""
        if not rows.pieces:
            return tensor.float()
        grown = torch.zeros(rows.count, *tensor.shape[1:], dtype=self._compute_dtype, device=tensor.device)
        grown[: rows.stored] = tensor
        vocabulary.initialize_rows(grown, rows.pieces, rows.stored)
        if tensor.dtype == grown.dtype:
            return grown.float()
        value = torch.zeros(grown.shape, dtype=torch.float32, device=tensor.device)
        value[: rows.stored] = tensor
        ids = sorted(rows.pieces)
        value[ids] = grown[ids].float()
        return value
