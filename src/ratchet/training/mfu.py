"""What a training asks of a device, and what the device can do by its data sheet: their ratio is the model FLOP
utilisation (MFU; Chowdhery et al. 2022, appendix B)."""

import re
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ratchet.models.device import Model

SHEETS: tuple[tuple[str, float], ...] = (
    (r"H100 (PCIe|NVL)", 0.0),  # of other clocks than the SXM module, and of many: not told rather than wrong
    (r"H[12]00\b", 989e12),  # H100 and H200 Tensor Core GPU data sheets, SXM: 1,979 with sparsity
    (r"A100\b", 312e12),  # A100 Tensor Core GPU data sheet
    (r"L4\b", 121e12),  # L4 Tensor Core GPU data sheet: 242 with sparsity
    (r"A10\b", 125e12),  # A10 Tensor Core GPU data sheet; the A10G of clouds is another
    (r"RTX 4090\b", 165e12),  # NVIDIA Ada GPU architecture, appendix A: 165.2, sums in float32
    (r"T4\b", 65e12),  # T4 data sheet; float16, it has no bfloat16
)
"""Dense products in bfloat16 or float16 by NVIDIA's data sheets, in operations a second, by name of the GPU."""

UNSEEN = 0.1
"""Frozen matrices that are no layer we know, experts in one tensor say: beyond this share nothing is told."""


def datasheet_flops_s(name: str, dtype: torch.dtype) -> float | None:
    """What a GPU of this name does in a type of 16 bits, by its data sheet; None where we do not know."""
    if dtype.itemsize != 2:
        return None
    found = (rate for pattern, rate in SHEETS if re.search(rf"(?<![A-Z0-9]){pattern}", name))
    return next(found, 0.0) or None


def iterate_matrices(model: Model) -> Iterator[tuple[Any, int, int]]:
    """Linear layers of the frozen base: module, inputs, outputs."""
    for name, module in model.named_modules():
        if "lora_" in name:
            continue
        if isinstance(module, nn.Linear):
            yield module, module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            yield module, module.nx, module.nf


def flops_per_token(model: Model, learned: float, passes: Literal[1, 2] = 2) -> float | None:
    """Operations that a token of input takes in training, forward and back, without what is computed twice.

    A frozen matrix takes part in two products, the output and the gradient of its input, one that learns in three; a
    product is two operations a number. What tokens do among each other in attention is left out, so the MFU is a lower
    bound.

    Args:
        model: with its adapter.
        learned: share of tokens that are learned from; only there the head computes.
        passes: 2, forward and back; 1, forward alone, of a model in which nothing learns.

    Returns:
        None where the model has matrices in layers of another kind, such as experts that are one tensor.
    """
    head = model.get_output_embeddings()
    seen, known, found = 0, set[int](), 0.0
    for module, inputs, outputs in iterate_matrices(model):
        seen += inputs * outputs
        known.add(id(module.weight))
        found += 2.0 * passes * inputs * outputs * (learned if module is head else 1.0)
    rows = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    frozen = [p for p in model.parameters() if not p.requires_grad and p.dim() > 1 and id(p) not in known | rows]
    if sum(p.numel() for p in frozen) > UNSEEN * seen:
        return None
    learns = sum(int(p.numel()) for p in model.parameters() if p.requires_grad)
    return found + 6.0 * learns
