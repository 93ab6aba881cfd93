"""What ranks hold to add up their gradients: the code that will do it adds up tensors without data, and a ledger keeps
account of them (as trace.py does with the step)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from ratchet.config.train import Compression
from ratchet.models.gradient_compression.reducer import Wire
from ratchet.models.memory.trace import Batch, Device, Ledger

_OPERATIONS = (dist.all_reduce, dist.all_gather, dist.all_to_all_single)


@dataclass(frozen=True)
class Communication:
    """Memory of a rank's Wire, in bytes."""

    buffer_bytes: int = 0
    """What it begins with: the flat buffer."""
    held_bytes: int = 0
    """Between two sums: also what was left unsent by the last one, and by the one before, which may be gone back to."""
    peak_bytes: int = 0
    """The most during a sum: also what is gathered from other ranks, and temporary tensors."""
    unsent_bytes: int = 0
    """What one sum leaves unsent on this rank; snapshots take that of all ranks."""


def of(parameters: Sequence[nn.Parameter], settings: Compression, ranks: int, device: Device) -> Communication:
    """Of one of so many ranks, with these parameters, on the meta device, that learn; nothing where there is no Wire.

    Args:
        parameters: all that learn, in the order in which they are sent.
        settings: section train.compression. Sums that are sent whole need no more than those after it.
        ranks: all of the run.
        device: that trains.
    """
    if not parameters or (ranks == 1 and settings.method == "none"):
        return Communication()
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    gradients = (nn.Parameter(one.grad) for one in parameters if one.grad is not None)
    own = nn.ParameterList([*parameters, *gradients])
    ledger = Ledger(own, Batch(1, 1, 1, packed=False, device=device), learning=False)
    try:
        with _Collectives(), ledger:
            group = _Group(ranks) if ranks > 1 else None
            wire = Wire([("", parameter) for parameter in parameters], group, settings, lambda _: None)
            buffer = ledger.total_bytes()
            for _ in range(2):
                wire.sum()
            held = ledger.total_bytes()
        peak = max(one.total_bytes for one in ledger.peaks.values())
        unsent = sum(tensor.nbytes for tensor in wire.state().values())
    finally:
        for parameter in parameters:
            parameter.grad = None
    return Communication(buffer, held, peak, unsent if ranks > 1 else 0)


@dataclass(frozen=True)
class _Group:
    """What the Wire asks of torch's process group."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


class _Collectives(TorchFunctionMode):  # type: ignore[misc]  # torch gives it no type
    """Nothing travels: what would arrive has its place already. torch.distributed lets a mode answer for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATIONS:
            return None
        return func(*args, **(kwargs or {}))
