"""Ranks for tests: separate processes that communicate over gloo, and their results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fork_server import fork_server_context
from ratchet.config.train import GradientCompressionSettings
from ratchet.models.gradient_compression import GradientReducer

SHAPES = [(8, 40), (40, 8), (12,), (8, 40), (), (33, 9)]
"""Shapes of the parameters in a sum: matrices, two of them with equal shapes, a vector and a scalar."""
SECONDS = 120
"""Timeout in seconds for the results of all ranks; other processes may occupy the two cores."""


def on_ranks(world: int, folder: Path, work: Callable[..., Any], *given: Any) -> list[Any]:
    """Run `work(rank, *given)` in each of `world` processes of one group and return the results. Raises the first
    exception of a rank."""
    meeting = folder / f"meeting-{work.__name__}-{len(list(folder.iterdir()))}"
    # Each process takes one task, because no process is free before all processes have joined the group.
    with fork_server_context().Pool(world) as pool:
        asked = [pool.apply_async(_in_group, (rank, world, str(meeting), work, *given)) for rank in range(world)]
        results = [one.get(SECONDS) for one in asked]
        # The processes exit on their own. A signal would have to wait for the SIGTERM handler of coverage.py.
        pool.close()
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
    """Return the gradients of a rank. Their sizes range from 1e-6 to 1 as in a real model; rank and step determine the
    random numbers."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    sizes = [10.0 ** -(number % 7) for number in range(len(given))]
    return [torch.randn(p.shape, generator=draw) * size for (_, p), size in zip(given, sizes, strict=True)]


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def add_up(wire: GradientReducer, rank: int, step: int, given: list[tuple[str, nn.Parameter]]) -> Tensor:
    """Return the flattened sum of a step's gradients."""
    for (_, parameter), gradient in zip(given, gradients(rank, step, given), strict=True):
        parameter.grad = gradient.clone()
    wire.sum()
    return flat([parameter.grad for _, parameter in given if parameter.grad is not None])


def exact(world: int, step: int) -> Tensor:
    """Return the sum that each rank should have, computed from all gradients in float64."""
    given = parameters()
    return torch.stack([flat(gradients(rank, step, given)).double() for rank in range(world)]).sum(0)
