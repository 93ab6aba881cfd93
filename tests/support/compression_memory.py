"""Measures the memory of a gradient reducer on a rank. The process imports only the modules that it needs."""

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gloo_ranks import parameters
from ratchet.config.train import GradientCompressionSettings
from ratchet.models.gradient_compression import GradientReducer

GRANULE = 64
"""Block sizes on a CPU are multiples of this number of bytes."""


class Peak(TorchDispatchMode):  # type: ignore[misc]  # torch has no type for this class
    """Measures the peak of the bytes that are allocated while the mode is active."""

    def __init__(self, known: dict[int, int]) -> None:
        super().__init__()
        self.known, self.alive_bytes, self.most_bytes = set(known), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_iter(result):
            if isinstance(one, Tensor) and one.data_ptr() and one.untyped_storage().data_ptr() not in self.known:
                self._begin(one.untyped_storage())
        return result

    def _begin(self, storage: Any) -> None:
        place, size = storage.data_ptr(), rounded(storage.nbytes())
        self.known.add(place)
        self.alive_bytes += size
        self.most_bytes = max(self.most_bytes, self.alive_bytes)
        weakref.finalize(storage, self._end, place, size)

    def _end(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.alive_bytes -= size


def rounded(count: int) -> int:
    return -(-count // GRANULE) * GRANULE


def living() -> dict[int, int]:
    """Return the rounded size in bytes of each storage that a tensor of this process refers to, by address."""
    gc.collect()
    storages = [one.untyped_storage() for one in gc.get_objects() if isinstance(one, Tensor)]
    return {one.data_ptr(): rounded(one.nbytes()) for one in storages}


def measured(
    _: int, shapes: list[tuple[int, ...]], ways: list[GradientCompressionSettings], alone: bool
) -> list[tuple[int, int, int]]:  # fmt: skip
    """Return for each compression method on this rank: the bytes before the first sum, the bytes after three sums, and
    the peak during a sum."""
    gc.freeze()  # later collections skip the objects of the libraries
    return [_one(shapes, way, alone) for way in ways]


def _one(shapes: list[tuple[int, ...]], way: GradientCompressionSettings, alone: bool) -> tuple[int, int, int]:
    given = parameters(shapes)
    for _, parameter in given:
        parameter.grad = torch.randn_like(parameter)
    before = living()
    with Peak(before) as peak:
        wire = GradientReducer(given, None if alone else dist.group.WORLD, way)
        begun = living()
        for _ in range(3):
            wire.sum()
    after = living()
    sizes = [sum(size for place, size in one.items() if place not in before) for one in (begun, after)]
    return sizes[0], sizes[1], peak.most_bytes
