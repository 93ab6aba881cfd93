"""Initial weights of adapters that depend on the base's files (LoftQ) or on training rows (EVA).

peft 0.21 has both, but its LoftQ for 4-bit weights needs CUDA and ignores the scale alpha / rank, and its EVA repeats
the rows until the directions converge, however long that takes.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from peft.utils.incremental_pca import IncrementalPCA
from torch import Tensor

from ratchet.errors import SettingsError
from ratchet.models import weights
from ratchet.models.adapter_format import ADAPTER, adapted_layers
from ratchet.models.device import Model

MAX_ERROR = 0.5
"""Largest accepted error of a 4-bit weight, relative to its norm. That of NF4 and FP4 is about 0.1; a larger one means
that the file holds another tensor under this name."""
OVERSAMPLING = 8
EXACT_SVD_MAX_SIZE = 512
"""Length of a matrix's smaller side up to which all singular values are computed."""
EVA_TOKENS = 8192
"""Number of tokens of training rows from which EVA computes its directions."""
EVA_CHUNK_TOKENS = 512
"""Number of tokens whose layer inputs are in memory at a time."""


def correct_quantization(model: Model, base_path: Path) -> None:
    """Initialize adapters with the part of the 4-bit error that their rank can express (one step of LoftQ, Li et al.
    2023, arXiv 2310.08659), so that the initial model is closer to the base in full precision.

    Layers that are not in 4 bits keep their initialization. Raises SettingsError if the weights of a layer are not in
    the base's files.
    """
    stored = weights.WeightReader(base_path).tensors()
    for name, layer in adapted_layers(model):
        if not isinstance(layer.get_base_layer(), Linear4bit):
            continue
        dense = weights.dense_weight(layer)
        original = stored[f"{name}.weight"][:] if f"{name}.weight" in stored else torch.zeros(0, 0)
        # GPT-2's files have transposed weights.
        layouts = [tensor for tensor in (original, original.T) if tensor.shape == dense.shape]
        residuals = [tensor.to(dense.device, torch.float32) - dense for tensor in layouts]
        residual = min(residuals, key=lambda tensor: float(tensor.norm()), default=None)
        if residual is None or float(residual.norm()) > MAX_ERROR * float(dense.norm()):
            raise SettingsError(
                f"train.initialization: loftq compares each 4-bit weight with its original, but {base_path} has none "
                f"for {name}; use a base in 16 or 32 bits, or set initialization: zero"
            )
        rank = layer.r[ADAPTER]
        if min(residual.shape) <= EXACT_SVD_MAX_SIZE:
            u, s, vh = torch.linalg.svd(residual, full_matrices=False)
        else:
            u, s, v = torch.svd_lowrank(residual, q=min(rank + OVERSAMPLING, *residual.shape), niter=4)
            vh = v.T
        root = (s[:rank] / layer.scaling[ADAPTER]).sqrt()
        _set(layer, root.unsqueeze(1) * vh[:rank], u[:, :rank] * root)


def explain_inputs(model: Model, rows: Iterable[Sequence[int]], device: torch.device) -> None:
    """Initialize the matrices A with the principal components of their layers' inputs (EVA, Paischer et al. 2024, arXiv
    2410.07170, without moving ranks between layers); B stays zero, so the initial model is the base.

    Raises SettingsError if the rows have fewer tokens than a layer has ranks.

    Args:
        model: model with a new adapter.
        rows: token ids of training rows; the first EVA_TOKENS tokens are used.
        device: device of the model.
    """
    layers = dict(adapted_layers(model))
    collector = _InputCollector(layers)
    was_training = model.training
    model.eval()
    tokens = 0
    with torch.no_grad(), collector:
        for row in rows:
            model(input_ids=torch.tensor([list(row)], device=device), use_cache=False)
            tokens += len(row)
            collector.end_row()
            if tokens >= EVA_TOKENS:
                break
        collector.fit()
    model.train(was_training)
    for name, layer in layers.items():
        rank = layer.r[ADAPTER]
        components = collector.components(name)
        if components is None or len(components) < rank:
            raise SettingsError(
                f"train.initialization: eva needs at least as many tokens as ranks; {name} has rank {rank}, and the "
                f"training rows have {tokens} tokens; set a smaller train.rank, or initialization: zero"
            )
        _set(layer, components[:rank], layer.lora_B[ADAPTER].weight.detach())


class _InputCollector:
    """Collects the inputs of layers, and fits their principal components chunk by chunk. Layers with the same input,
    such as the projections of an attention, share one fit."""

    def __init__(self, layers: dict[str, Any]) -> None:
        self._layers = layers
        self._source: dict[str, str] = {}
        """The first layer with the same input, by name of the layer."""
        self._inputs: dict[str, list[Tensor]] = {}
        self._first_names: dict[int, tuple[str, Tensor]] = {}
        """Inputs of the current row: the first layer, and the tensor, whose id stays unique while it is kept."""
        self._fits: dict[str, IncrementalPCA] = {}
        self._hooks: list[Any] = []
        self._chunk_tokens = max(EVA_CHUNK_TOKENS, *(layer.r[ADAPTER] for layer in layers.values()))

    def __enter__(self) -> "_InputCollector":
        self._hooks = [
            layer.register_forward_pre_hook(lambda _, inputs, name=name: self._add(name, inputs[0]))
            for name, layer in self._layers.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add(self, name: str, inputs: Tensor) -> None:
        first, _ = self._first_names.setdefault(id(inputs), (name, inputs))
        if self._source.setdefault(name, first) == name:
            self._inputs.setdefault(name, []).append(inputs.flatten(0, -2))

    def end_row(self) -> None:
        """Fit the components if there are enough inputs."""
        self._first_names.clear()
        if any(sum(map(len, parts)) >= self._chunk_tokens for parts in self._inputs.values()):
            self.fit()

    def fit(self) -> None:
        """Fit the components to the inputs since the last fit; inputs that are too few to do so are left out."""
        for name, parts in self._inputs.items():
            inputs = torch.cat(parts).float() if parts else None
            rank = max(self._layers[other].r[ADAPTER] for other, source in self._source.items() if source == name)
            if inputs is not None and len(inputs) >= rank:
                self._fits.setdefault(name, IncrementalPCA(rank)).partial_fit(inputs)
            parts.clear()

    def components(self, name: str) -> Tensor | None:
        """Return the principal components of a layer's inputs; None if there were too few inputs."""
        fit = self._fits.get(self._source.get(name, ""))
        return None if fit is None else fit.components_


def _set(layer: Any, a: Tensor, b: Tensor) -> None:
    for matrix, value in ((layer.lora_A[ADAPTER].weight, a), (layer.lora_B[ADAPTER].weight, b)):
        matrix.data = value.to(matrix.device, matrix.dtype).contiguous().clone()
