"""The base's numbers, tensor by tensor, as they were trained against or as its files hold them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Params4bit
from torch import Tensor

from ratchet.export.merge.request import MergeRecipe
from ratchet.models import loading, vocabulary, weights


@dataclass(frozen=True)
class TokenRowInitialization:
    """How a tensor with a row for each token is begun anew in some rows."""

    count: int
    """Rows that it has in the end."""
    stored: int
    """Rows in the files."""
    starts: vocabulary.Pieces


@dataclass(frozen=True)
class BaseStorageFormat:
    """How each parameter of the base is held before an update is added."""

    dtypes: Mapping[str, torch.dtype]
    """Type of every parameter and buffer that is saved."""
    four_bits: frozenset[str]
    """Parameters that training puts in 4 bits."""
    in_files: frozenset[str]
    """Stored tensors that are in 4 bits in the files already."""
    turned: frozenset[str]
    """Parameters that lie as [inputs, outputs], and are quantised the other way round."""
    rows: Mapping[str, TokenRowInitialization]
    """Of parameters with a row for each token."""


class BaseWeightReader:
    """Reads stored tensors and makes of them the numbers to which updates are added."""

    def __init__(self, recipe: MergeRecipe, form: BaseStorageFormat) -> None:
        self._recipe = recipe
        self._form = form
        self._lazy = weights.WeightReader(recipe.base).tensors()
        self._computed_in = loading.pick_dtype(recipe.train.compute_dtype, recipe.device)

    def read(self, name: str, place: str) -> Tensor:
        """A stored tensor, in the type in which its parameter is loaded, in memory of its own.

        Args:
            name: in the files.
            place: the parameter that it is, or is a part of.
        """
        stored = self._lazy[name][...].to(self._recipe.device)
        if name in self._form.in_files:
            return self._unpacked(name, place, stored)
        return stored.to(self._form.dtypes[place])

    def as_trained(self, name: str, tensor: Tensor) -> Tensor:
        """A whole parameter in float32: grown by its new rows, rounded to 4 bits if it was; buffers as they are."""
        if not tensor.is_floating_point():
            return tensor
        if name in self._form.four_bits:
            return self._rounded(name, tensor)
        rows = self._form.rows.get(name)
        return tensor.float() if rows is None else self._grown(rows, tensor)

    def _rounded(self, name: str, tensor: Tensor) -> Tensor:
        """To 4 bits and back, as transformers 5 quantises (integrations.bitsandbytes, Bnb4bitQuantize) and
        bitsandbytes dequantises for each product."""
        turned, train = name in self._form.turned, self._recipe.train
        held: Any = Params4bit(
            tensor.T if turned else tensor,
            requires_grad=False,
            quant_type=train.quantization,
            compress_statistics=train.double_quantization,
            quant_storage=getattr(torch, train.quantization_storage),
        ).to(self._recipe.device)
        del tensor
        value: Tensor = dequantize_4bit(held.data, held.quant_state).float()
        return value.T if turned else value

    def _unpacked(self, name: str, place: str, stored: Tensor) -> Tensor:
        """A weight that is in 4 bits in the files, as its layer computes with it."""
        parts = {key: one[...] for key, one in self._lazy.items() if key.startswith(f"{name}.")}
        held: Any = Params4bit.from_prequantized(stored, parts, device=self._recipe.device)
        held.quant_state.dtype = self._computed_in  # bitsandbytes' kernel makes numbers of the type it computes in
        value: Tensor = dequantize_4bit(held.data, held.quant_state).to(self._form.dtypes[place])
        return value.T if place in self._form.turned else value

    def _grown(self, rows: TokenRowInitialization, tensor: Tensor) -> Tensor:
        """Add rows for new tokens, which begin as `vocabulary.grow_embeddings` begins them.

        They are computed in the type of the base.
        """
        if not rows.starts:
            return tensor.float()
        held = torch.zeros(rows.count, *tensor.shape[1:], dtype=self._computed_in, device=tensor.device)
        held[: rows.stored] = tensor
        vocabulary.initialize_rows(held, rows.starts, rows.stored)
        if tensor.dtype == held.dtype:
            return held.float()
        value = torch.zeros(held.shape, dtype=torch.float32, device=tensor.device)
        value[: rows.stored] = tensor
        ids = sorted(rows.starts)
        value[ids] = held[ids].float()
        return value
