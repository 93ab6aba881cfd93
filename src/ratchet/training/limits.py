"""What this machine can do at best (matrix products, moving bytes), and what a step asks of it."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from ratchet.model import capacity, storage
from ratchet.model.device import Model
from ratchet.training.utilisation import matrices

Shape = list[int]

BLOCK_S, BLOCKS = 0.02, 5
"""A rate is the median of so many blocks, each of at least so many seconds."""
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}
"""What is copied to measure bandwidth: many times the caches. At most an eighth of the memory at hand."""
SQUARE = {"cpu": 1024, "cuda": 8192}


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """How long one call takes when many follow each other, in seconds."""

    def block(calls: int) -> float:
        _settle(device)
        begun_s = time.perf_counter()
        for _ in range(calls):
            work()
        _settle(device)
        return time.perf_counter() - begun_s

    block(2)  # the first call may compile
    calls = 1
    while (spent_s := block(calls)) < BLOCK_S:
        calls *= 2
    return statistics.median([spent_s, *(block(calls) for _ in range(BLOCKS - 1))]) / calls


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def product_flops_s(shapes: Counter[tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second over products [rows, inputs] x [inputs, outputs], as often as each shape comes."""
    flops = spent_s = 0.0
    for (rows, inputs, outputs), count in shapes.items():
        left = torch.randn(rows, inputs, device=device).to(dtype)
        right = torch.randn(outputs, inputs, device=device).to(dtype)
        flops += 2.0 * rows * inputs * outputs * count
        spent_s += count * seconds_of(partial(torch.mm, left, right.t()), device)
    return flops / spent_s


def square_flops_s(dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of a large square product: what the machine does at best."""
    side = SQUARE[device.type]
    return product_flops_s(Counter([(side, side, side)]), dtype, device)


def bandwidth_bytes_s(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written counted."""
    size = min(COPY_BYTES[device.type], capacity.of(device).available_bytes // 8)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    return 2.0 * size / seconds_of(lambda: target.copy_(source), device)


def shapes_of(model: Model, rows: int, learned: int) -> Counter[tuple[int, int, int]]:
    """Products of a micro-batch with the frozen matrices, forward and back, those of the adapter left out.

    Args:
        model: with its adapter.
        rows: padded tokens of the micro-batch.
        learned: of them, positions that are learned from; only there the head computes.
    """
    head = model.get_output_embeddings()
    found: Counter[tuple[int, int, int]] = Counter()
    for module, inputs, outputs in matrices(model):
        m = max(1, learned) if module is head else max(1, rows)
        found[m, inputs, outputs] += 1  # what it gives
        found[m, outputs, inputs] += 1  # the gradient of what it takes; the matrix itself has none
    return found


@dataclass
class Asked:
    """What one computation of a step asks of the machine."""

    flops: int = 0
    saved_bytes: int = 0
    """Of tensors kept for backward passes, all micro-batches together."""
    most_saved_bytes: int = 0
    """At any one time."""
    _held: Counter[int] = field(default_factory=Counter)
    """By address of storages, how often each is kept now."""
    _held_bytes: int = 0

    def keep(self, tensor: Tensor) -> "_Kept":
        """A tensor is kept; those that share their memory count once."""
        return _Kept(self, tensor)


class _Kept:
    """A tensor that waits for the backward pass; forgotten when the graph is."""

    def __init__(self, asked: Asked, tensor: Tensor) -> None:
        self.tensor, self._asked = tensor, asked
        self._storage = tensor.untyped_storage()
        self._place, self._bytes = self._storage.data_ptr(), self._storage.nbytes()
        if not asked._held[self._place]:
            asked.saved_bytes += self._bytes
            asked._held_bytes += self._bytes
            asked.most_saved_bytes = max(asked.most_saved_bytes, asked._held_bytes)
        asked._held[self._place] += 1

    def __del__(self) -> None:
        self._asked._held[self._place] -= 1
        if not self._asked._held[self._place]:
            self._asked._held_bytes -= self._bytes


@contextmanager
def watched(model: Model) -> Iterator[Asked]:
    """Count what is computed inside: operations of products and attention, and tensors kept beside the model's own.

    torch counts attention as if every position saw every other; causal kernels skip up to half of that. Of what
    activation checkpointing keeps only the part outside the recomputed blocks is seen.
    """
    asked = Asked()
    own = {tensor.untyped_storage().data_ptr() for tensor in storage.tensors_of(model)}

    def pack(tensor: Tensor) -> Tensor | _Kept:
        is_own = tensor.untyped_storage().data_ptr() in own
        return tensor if is_own else asked.keep(tensor)

    def unpack(kept: Tensor | _Kept) -> Tensor:
        return kept.tensor if isinstance(kept, _Kept) else kept

    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), counter:
        yield asked
    asked.flops = counter.get_total_flops()


def _formulas() -> dict[Any, Any]:
    """Of what torch (2.13) counts as nothing: fused attention on CPUs, and the product with a matrix in 4 bits."""

    def forward(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    def backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
        return int(sdpa_backward_flop_count(gradient, query, key, value))

    def four_bits(left: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
        return 2 * math.prod(left) * out_shape[-1]

    aten = torch.ops.aten
    return {
        torch.ops.bitsandbytes.gemm_4bit: four_bits,
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }


def moved_bytes(model: Model, asked: Asked, micro_batches: int, passes: int, states_bytes: int) -> dict[str, float]:
    """Bytes that a step must move between memory and processor, by what they are.

    Args:
        model: with its adapter.
        asked: of the step.
        micro_batches: of the step.
        passes: over the weights for each of them: forward, backward, and once more where activations are recomputed.
        states_bytes: of the optimizer.
    """
    layers = [module for module, _, _ in matrices(model)]
    read = {id(module.weight) for module in layers}
    rows = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} - read  # few of them are looked up
    stored = sum(tensor.nbytes for tensor in storage.tensors_of(model) if id(tensor) not in rows)
    plain = sum(
        m.in_features * m.out_features * (m.compute_dtype or torch.float32).itemsize
        for m in layers if isinstance(m, Linear4bit)
    )  # fmt: skip
    learned = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return {
        "weights as stored, read": float(stored * passes * micro_batches),
        "weights out of 4 bits, written and read": 2.0 * plain * passes * micro_batches,
        "activations kept, written and read": 2.0 * asked.saved_bytes,
        "adapter, its gradient and the optimizer's state, read and written": 2.0 * (2 * learned + states_bytes),
    }
