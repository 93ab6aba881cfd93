"""Ranks for tests: separate processes that communicate over gloo, and their results."""

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ratchet.config.train import GradientCompressionSettings
from ratchet.models.gradient_compression import GradientReducer

SHAPES = [(8, 40), (40, 8), (12,), (8, 40), (), (33, 9)]
"""Of the parameters that are added up: matrices of which some are alike, a vector, a single number."""
SECONDS = 120
"""Longest wait for them: two cores may be busy with much else."""


def on_ranks(world: int, folder: Path, work: Callable[..., Any], *given: Any) -> list[Any]:
    """What `work(rank, *given)` returns in each of `world` processes of one group; raises what any of them raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "ratchet.models.gradient_compression"])
    meeting = folder / f"meeting-{work.__name__}-{len(list(folder.iterdir()))}"
    with context.Pool(world) as pool:  # every process takes one: none is free before all have met
        asked = [pool.apply_async(_in_group, (rank, world, str(meeting), work, *given)) for rank in range(world)]
        results = [one.get(SECONDS) for one in asked]
        pool.close()  # the processes end by themselves: a signal would wait for what coverage.py does on SIGTERM
        pool.join()
    return results


def _in_group(rank: int, world: int, meeting: str, work: Callable[..., Any], *given: Any) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        return work(rank, *given)
    finally:
        dist.destroy_process_group()


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[tuple[str, nn.Parameter]]:
    return [(f"p{number}", nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes)]


def wire_of(given: list[tuple[str, nn.Parameter]], uncompressed_sums: int = 0, **settings: Any) -> GradientReducer:
    chosen = GradientCompressionSettings.model_validate({"bucket_bytes": 2000, "block_size": 16} | settings)
    return GradientReducer(given, dist.group.WORLD, chosen, uncompressed_sums=uncompressed_sums)


def gradients(rank: int, step: int, given: list[tuple[str, nn.Parameter]]) -> list[Tensor]:
    """Those of a rank: of sizes from 1e-6 to 1, as in a real model, drawn from rank and step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    sizes = [10.0 ** -(number % 7) for number in range(len(given))]
    return [torch.randn(p.shape, generator=draw) * size for (_, p), size in zip(given, sizes, strict=True)]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def add_up(wire: GradientReducer, rank: int, step: int, given: list[tuple[str, nn.Parameter]]) -> Tensor:
    """What the gradients of a step become, flat."""
    for (_, parameter), gradient in zip(given, gradients(rank, step, given), strict=True):
        parameter.grad = gradient.clone()
    wire.sum()
    return flat([parameter.grad for _, parameter in given if parameter.grad is not None])


def exact(world: int, step: int) -> Tensor:
    """The sum that every rank should have, from all gradients in float64."""
    given = parameters()
    return torch.stack([flat(gradients(rank, step, given)).double() for rank in range(world)]).sum(0)
