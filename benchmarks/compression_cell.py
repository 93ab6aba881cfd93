"""Runs one rank of benchmarks/compression.py in its own process. Reads JSON, prints JSON.

`link`: sums LoRA gradients with every method in turn. `loss`: trains a small model with every method, using the
project's own data, batches, adapters, loss, optimizer and schedule.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import compression_link
import torch
import torch.distributed as dist
from torch import nn

from ratchet.config.train import GradientCompressionSettings, Train
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan, TokenRows
from ratchet.models import adapters, chunked_loss, loading
from ratchet.models.gradient_compression import GradientReducer
from ratchet.models.loss import SequenceBatch
from ratchet.training import optimizer as optimizers
from ratchet.training import optimizer as schedule

Named = list[tuple[str, nn.Parameter]]


# --------------------------------------------------------------------------------------------------------------- link


def lora(layers: int, rank: int) -> Named:
    """Return the parameters of a LoRA on all linear layers of a Qwen2.5-0.5B with this many blocks: two matrices per
    layer."""
    widths = [(896, 896), (128, 896), (128, 896), (896, 896), (4864, 896), (4864, 896), (896, 4864)]
    shapes = [shape for n, m in widths for shape in ((rank, m), (n, rank))] * layers
    return [(str(number), nn.Parameter(torch.zeros(shape))) for number, shape in enumerate(shapes)]


def measure_link(given: dict[str, Any]) -> dict[str, Any]:
    """Return, for each method, the seconds of each sum and the bytes of a sum: as calculated, and as counted by the
    interface."""
    parameters = lora(given["layers"], given["rank"])
    draw = torch.Generator().manual_seed(dist.get_rank())
    drawn = [torch.randn(parameter.shape, generator=draw) for _, parameter in parameters]
    wires = {
        name: GradientReducer(parameters, dist.group.WORLD, GradientCompressionSettings.model_validate(settings))
        for name, settings in given["methods"].items()
    }
    found: dict[str, Any] = {name: {"seconds": [], "counted": [], "sent": []} for name in wires}
    for _ in range(given["rounds"] + 1):  # the first sum of each method allocates its state, and is not measured
        for name, wire in wires.items():
            seconds, counted, sent = _one_sum(wire, parameters, drawn, given["interface"])
            found[name]["seconds"].append(seconds)
            found[name]["counted"].append(counted)
            found[name]["sent"].append(sent)
    warm = {name: {key: values[1:] for key, values in figures.items()} for name, figures in found.items()}
    return {"numbers": sum(parameter.numel() for _, parameter in parameters), "methods": warm}


def _one_sum(
    wire: GradientReducer, parameters: Named, drawn: list[torch.Tensor], interface: str
) -> tuple[float, int, int]:
    for (_, parameter), gradient in zip(parameters, drawn, strict=True):
        parameter.grad = gradient.clone()
    dist.barrier()
    counted, sent, begun = compression_link.sent_bytes(interface), wire.sent_bytes, time.perf_counter()
    wire.sum()
    seconds = time.perf_counter() - begun
    dist.barrier()
    return seconds, compression_link.sent_bytes(interface) - counted, wire.sent_bytes - sent


# --------------------------------------------------------------------------------------------------------------- loss


def measure_loss(given: dict[str, Any]) -> dict[str, Any]:
    """Return, for each method and seed, a training's results with its final validation loss in nats per token."""
    found: dict[str, Any] = {}
    for seed in range(given["seeds"]):
        for name, compression in given["methods"].items():
            settings = Train.model_validate(given["train"] | {"seed": seed, "gradient_compression": compression})
            found.setdefault(name, []).append(_trained(Path(given["base"]), Path(given["data"]), settings))
            if dist.get_rank() == 0:
                print(f"{name}, seed {seed}: {found[name][-1]['loss']:.4f}", file=sys.stderr, flush=True)
    return found


def _trained(base: Path, data: Path, settings: Train) -> dict[str, Any]:
    device, rank, world = torch.device("cpu"), dist.get_rank(), dist.get_world_size()
    train, validation = token_files.load_rows(data, "train"), token_files.load_rows(data, "validation")
    plan = BatchPlan(train.lengths, settings)
    torch.manual_seed(settings.seed)
    loaded = loading.load(base, None, settings, device)
    model = adapters.attach(loaded, settings, "base", (), plan.steps)
    parameters = list(adapters.trainable_parameters(model))
    optimizer = optimizers.build(model, settings, device)
    compression = settings.gradient_compression
    wire = GradientReducer(
        parameters, dist.group.WORLD, compression, uncompressed_sums=compression.uncompressed_steps(plan.steps)
    )
    learned, losses = 0, []
    for step in range(plan.steps):
        torch.manual_seed(schedule.step_seed(settings.seed, step, rank))
        batch = plan.batch(step)
        trained = sum(map(train.count_trained, batch))
        learned += trained
        model.train()
        for _, parameter in parameters:
            parameter.grad = None
        nll = chunked_loss.forward_backward(
            model, SequenceBatch.from_sequences(train, batch[rank::world], device), 1 / trained
        )
        losses.append(float(nll) / max(1, sum(map(train.count_trained, batch[rank::world]))))
        wire.sum()
        torch.nn.utils.clip_grad_norm_([parameter for _, parameter in parameters], settings.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = schedule.compute_learning_rate(step, plan.steps, settings)
        optimizer.step()
    last = statistics.mean(losses[-10:])
    weights = torch.cat([parameter.detach().flatten() for _, parameter in parameters])
    return {
        "loss": _validation(model, validation), "tokens": learned, "steps": plan.steps, "train_loss": last,
        "sent": wire.sent_bytes, "alike": _alike(weights),
    }  # fmt: skip


def _validation(model: Any, rows: TokenRows) -> float:
    model.eval()
    with torch.no_grad():
        total = sum(
            float(
                chunked_loss.compute_nll(
                    model, SequenceBatch.from_sequences(rows, [[k] for k in part.tolist()], torch.device("cpu"))
                )
            )
            for part in torch.arange(len(rows)).split(32)
        )
    return total / rows.count_trained(list(range(len(rows))))


def _alike(weights: torch.Tensor) -> bool:
    """Return whether all ranks have the same bits."""
    found = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(found, weights)
    return all(torch.equal(one, weights) for one in found)


def main() -> None:
    """Run one rank: connect to the other rank, measure, print the results."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=given["meeting"], rank=given["number"], world_size=2)
    found = measure_link(given) if given["what"] == "link" else measure_loss(given)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
