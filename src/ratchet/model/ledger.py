"""An account of every block of memory that lives while torch works: how much, for what, and in what order.

A dispatch mode sees the result of every operation. A block lives from there until torch lets go of its storage. On the
meta device it also answers what the contents of tensors would: how many positions are learned from (`nonzero`), and
whether a batch is packed. Work space inside operators is added where it is large.
"""

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ratchet.model.heap import Event
from ratchet.model.quantized import Model

Device = Literal["cpu", "cuda"]
Part = Literal["activations", "logits and loss", "dequantised weights", "gradients", "temporary"]
PARTS: tuple[Part, ...] = ("activations", "logits and loss", "dequantised weights", "gradients", "temporary")
Segment = tuple[str, str, int]
"""Forward or backward; before the blocks, in block number so and so, or after them. Peaks are kept for each."""

GRANULE_BYTES = {"cpu": 64, "cuda": 512}
"""Sizes of blocks are multiples of it: alignment of c10's CPU allocator, kMinBlockSize of CUDACachingAllocator."""
CUSTOM_GEMM_ROWS = 1536
"""Up to so many rows bitsandbytes 0.50 may multiply 4-bit weights on a GPU without writing them out (backends/cuda)."""


@dataclass(frozen=True)
class Batch:
    """What goes through the model at once; sizes only."""

    rows: int
    tokens: int
    """Of each row: padded."""
    learned: int
    """Positions of all rows together that are learned from: there logits are computed."""
    packed: bool
    device: Device


@dataclass
class Peak:
    """The most that lived at once, and what it was."""

    total_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)


@dataclass
class _Block:
    number: int
    alive: "weakref.ref[Any]"
    """Held, for it tells of the end."""
    size_bytes: int
    part: Part


class Ledger(TorchDispatchMode):  # type: ignore[misc]  # torch gives it no type
    """The account: live bytes by part, their peak in every segment, and all that happened to blocks.

    Args:
        model: its own tensors are not counted.
        batch: answers what the contents of tensors would.
        learning: a graph for the backward pass is made.
    """

    def __init__(self, model: Model, batch: Batch, learning: bool) -> None:
        super().__init__()
        self.batch = batch
        self.learning = learning
        self.segment: Segment = ("forward", "before", 0)
        self.recomputing = False
        self.live: dict[str, int] = dict.fromkeys(PARTS, 0)
        self.peaks: dict[Segment, Peak] = {}
        self.events: list[Event] = []
        self._blocks: dict[int, _Block] = {}
        self._granule = GRANULE_BYTES[batch.device]
        self._own = {tensor.untyped_storage()._cdata for tensor in own_tensors(model)}

    def leave_out(self, model: Model) -> None:
        """Another model's own tensors are not counted either."""
        self._own |= {tensor.untyped_storage()._cdata for tensor in own_tensors(model)}

    def total_bytes(self) -> int:
        """Alive at this moment."""
        return sum(self.live.values())

    def enter(self, segment: Segment) -> None:
        """From here on this segment's peak is taken."""
        if self.segment[0] == "backward":
            self.events.append(Event(None, -1, self.segment[1:]))
        self.segment = segment
        self._note(0)

    def count(self, tensor: Tensor, part: Part) -> None:
        """A block that is alive already, or is to be called otherwise."""
        storage = tensor.untyped_storage()
        if (known := self._blocks.get(storage._cdata)) is not None:
            self.live[known.part] -= known.size_bytes
            self.live[part] += known.size_bytes
            known.part = part
        else:
            self._add(storage, part)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self._answer(func, args, kwargs or {})
        part, extra = self._part(func), workspace_bytes(func, args, kwargs or {}, self.batch.device)
        if extra:
            self.events.append(Event("work space", extra, self._graph()))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._own and storage._cdata not in self._blocks:
                    self._add(storage, part)
        self._note(extra, part_of_workspace(func))
        if extra:
            self.events.append(Event("work space", -1))
        return result

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        aten = torch.ops.aten
        if not any(isinstance(one, Tensor) and one.is_meta for one in args):
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return not self.batch.packed if args[0].dtype == torch.bool else 1
        if func is aten.nonzero.default:
            return torch.empty((self.batch.learned, args[0].dim()), dtype=torch.int64, device="meta")
        if func is aten._grouped_mm.default:  # its kernel on meta takes bfloat16 only, those of CPUs take any type
            return _grouped_product(*args, **kwargs)
        return func(*args, **kwargs)

    def _part(self, func: Any) -> Part:
        if func.namespace == "bitsandbytes" and "dequantize" in str(func):
            return "dequantised weights"
        direction, place, _ = self.segment
        if place == "after":
            return "logits and loss"
        return "activations" if direction == "forward" or self.recomputing else "temporary"

    def _add(self, storage: Any, part: Part) -> None:
        key, size = storage._cdata, -(-storage.nbytes() // self._granule) * self._granule
        block = _Block(len(self.events), weakref.ref(storage, lambda _: self._drop(key)), size, part)
        self._blocks[key] = block
        self.live[part] += size
        self.events.append(Event(block.number, size, self._graph()))

    def _drop(self, key: int) -> None:
        block = self._blocks.pop(key)
        self.live[block.part] -= block.size_bytes
        self.events.append(Event(block.number, -1))

    def _graph(self) -> Any:
        """The part of the graph that is being made, if any is."""
        making = self.learning and (self.segment[0] == "forward" or self.recomputing)
        return self.segment[1:] if making else None

    def _note(self, extra_bytes: int, extra_part: Part = "temporary") -> None:
        total = self.total_bytes() + extra_bytes
        peak = self.peaks.setdefault(self.segment, Peak())
        if total > peak.total_bytes or not peak.parts:
            parts = dict(self.live)
            parts[extra_part] += extra_bytes
            self.peaks[self.segment] = Peak(total, parts)


def own_tensors(model: Model) -> Iterator[Tensor]:
    """Parameters, buffers and constants of quantisation."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor
        if (constants := getattr(tensor, "quant_state", None)) is not None:
            inner = constants.state2
            nested = () if inner is None else (inner.absmax, inner.code, constants.offset)
            yield from (one for one in (constants.absmax, constants.code, *nested) if isinstance(one, Tensor))


def _grouped_product(first: Tensor, second: Tensor, offsets: Tensor, *_: Any, **__: Any) -> Tensor:
    """Shape of `grouped_mm`: rows in groups times a matrix a group, or (the gradient of those) a matrix a group."""
    if first.dim() == 2 and second.dim() == 2:
        return first.new_empty((offsets.shape[0], first.shape[0], second.shape[1]))
    if first.dim() == 3 and second.dim() == 2:
        return first.new_empty((first.shape[1], second.shape[1]))
    return first.new_empty((*first.shape[:-1], second.shape[-1]))


def workspace_bytes(func: Any, args: Any, kwargs: dict[str, Any], device: Device) -> int:
    """What an operator allocates and frees inside itself, where that is large."""
    if func is torch.ops.bitsandbytes.gemm_4bit.default:
        rows = math.prod(args[0].shape[:-1])
        if device == "cuda" and rows <= CUSTOM_GEMM_ROWS and args[0].dtype != torch.float32:
            return 0
        elements = math.prod(args[2])
        constants = 2 * 4 * -(-elements // args[4]) if kwargs.get("absmax_8bit") is not None else 0
        return int(elements * args[0].element_size() + constants)
    if func is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
        # The deterministic backward pass of FlashAttention 2 gathers dq in float32 (flash_api.cpp, dq_accum).
        return int(4 * args[1].numel())
    return 0


def part_of_workspace(func: Any) -> Part:
    """What such work space is for."""
    return "dequantised weights" if func.namespace == "bitsandbytes" else "temporary"
