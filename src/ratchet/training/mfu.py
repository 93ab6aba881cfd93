"""Operations per token of a training, and the peak rate of a GPU by its data sheet.

Their ratio gives the model FLOP utilisation (MFU; Chowdhery et al. 2022, appendix B).
"""

import re
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ratchet.models.device import Model

SHEETS: tuple[tuple[str, float], ...] = (
    (r"H100 (PCIe|NVL)", 0.0),  # clocks differ from the SXM module and between variants: unknown
    (r"H[12]00\b", 989e12),  # H100 and H200 Tensor Core GPU data sheets, SXM: 1,979 with sparsity
    (r"A100\b", 312e12),  # A100 Tensor Core GPU data sheet
    (r"L4\b", 121e12),  # L4 Tensor Core GPU data sheet: 242 with sparsity
    (r"A10\b", 125e12),  # A10 Tensor Core GPU data sheet; the A10G of cloud providers is a different GPU
    (r"RTX 4090\b", 165e12),  # NVIDIA Ada GPU architecture, appendix A: 165.2, accumulated in float32
    (r"T4\b", 65e12),  # T4 data sheet; float16, it has no bfloat16
)
"""Dense products in bfloat16 or float16 by NVIDIA's data sheets, in operations per second, by name of the GPU."""

MAX_UNKNOWN_SHARE = 0.1
"""Above this share of frozen matrices in unknown layers (for example experts in one tensor) the count is unknown."""


def datasheet_flops_per_s(name: str, dtype: torch.dtype) -> float | None:
    """Return the peak rate of a GPU in a 16-bit dtype by its data sheet; None if it is unknown."""
    if dtype.itemsize != 2:
        return None
    rates = (rate for pattern, rate in SHEETS if re.search(rf"(?<![A-Z0-9]){pattern}", name))
    return next(rates, 0.0) or None


def iterate_matrices(model: Model) -> Iterator[tuple[Any, int, int]]:
    """Yield the linear layers of the frozen base: module, inputs, outputs."""
    for name, module in model.named_modules():
        if "lora_" in name:
            continue
        if isinstance(module, nn.Linear):
            yield module, module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            yield module, module.nx, module.nf


def flops_per_token(model: Model, trained_share: float, passes: Literal[1, 2] = 2) -> float | None:
    """Return the operations per input token in training, forward and backward, without recomputed activations.

    A frozen matrix takes part in two products (its output, and the gradient of its input), a trainable one in three. A
    product is two operations per element. Attention between tokens is left out, so the MFU is a lower bound.

    Args:
        model: with its adapter.
        trained_share: share of trained tokens; the head computes only these.
        passes: 2: forward and backward; 1: forward only, for a model without trainable parameters.

    Returns:
        None if too many matrices are in unknown layers, such as experts in one tensor.
    """
    head = model.get_output_embeddings()
    elements, known, flops = 0, set[int](), 0.0
    for module, inputs, outputs in iterate_matrices(model):
        elements += inputs * outputs
        known.add(id(module.weight))
        flops += 2.0 * passes * inputs * outputs * (trained_share if module is head else 1.0)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    frozen = [p for p in model.parameters() if not p.requires_grad and p.dim() > 1 and id(p) not in known | embeddings]
    if sum(p.numel() for p in frozen) > MAX_UNKNOWN_SHARE * elements:
        return None
    trainable = sum(int(p.numel()) for p in model.parameters() if p.requires_grad)
    return flops + 6.0 * trainable
