"""What 4 bits cost: full precision against NF4 and FP4, on real rows and layer by layer, before any training."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ratchet.config.train import Train
from ratchet.data.conversation import MASKED
from ratchet.models import frozen_weights, oom
from ratchet.models.loading import Model
from ratchet.models.memory import parameters
from ratchet.storage.records.training import LayerQuantizationCost, QuantizationCost

FULL = "full"
VARIANTS: dict[str, dict[str, Any]] = {
    "nf4": {"quantization": "nf4", "double_quantization": False},
    "nf4+dq": {"quantization": "nf4", "double_quantization": True},
    "fp4": {"quantization": "fp4", "double_quantization": False},
    "fp4+dq": {"quantization": "fp4", "double_quantization": True},
}
"""Ways to store the base (section train of params.yaml), beside full precision."""

CHUNK_POSITIONS = 256
"""Positions whose distributions are compared at once: 100 MB each at a vocabulary of 100,000."""

Row = tuple[Sequence[int], Sequence[int]]
"""Token ids and labels."""


def count_answer_tokens(rows: Sequence[Row]) -> int:
    """Positions that are compared."""
    return sum(label != MASKED for _, labels in rows for label in labels[1:])


@dataclass
class _DivergenceSums:
    """Of one model, over all answer positions seen; in nats."""

    positions: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agreeing: int = 0

    def cost(self, name: str, weight_bytes: int, layers: dict[str, LayerQuantizationCost]) -> QuantizationCost:
        return QuantizationCost(
            name=name,
            weight_bytes=weight_bytes,
            loss=self.nll / self.positions,
            kl=self.kl / self.positions,
            greedy_agreement=self.agreeing / self.positions,
            layers=layers,
        )


def measure_cost(
    load: Callable[[Train], Model], settings: Train, rows: Sequence[Row], progress: Callable[[str], None]
) -> tuple[QuantizationCost, ...]:
    """Compare the variants on rows that have at least one answer token each; full precision comes first.

    Two models are in memory at a time: that of full precision, and one in 4 bits.

    Args:
        load: makes the frozen base for settings.
        settings: of which those that VARIANTS names, and what 4 bits exclude, are replaced.
        progress: told which variant is at work.
    """
    plain = settings.model_copy(update={"initialization": "zero", "quantization": "none"})
    progress(f"{FULL}: loading")
    full = load(plain)
    found = [_sum_divergences(full, full, rows).cost(FULL, _tensor_bytes(full), {})]
    for name, update in VARIANTS.items():
        progress(f"{name}: loading")
        model = load(plain.model_copy(update=update))
        pairs = _pair_layers(full, model)
        progress(f"{name}: {len(rows)} rows, {len(pairs)} layers")
        found.append(_compare_variant(full, model, pairs, rows, name))
        del model, pairs
        oom.release_memory()
    return tuple(found)


def _compare_variant(
    full: Model, model: Model, pairs: dict[str, tuple[nn.Module, nn.Module]], rows: Sequence[Row], name: str
) -> QuantizationCost:
    with _record_output_errors(pairs) as squares:
        sums = _sum_divergences(full, model, rows)
    layers = {
        layer: LayerQuantizationCost(
            bytes_full=_tensor_bytes(whole),
            bytes_stored=_tensor_bytes(stored),
            weight_error=_relative_error(*_weight_squared_norms(whole, stored)),
            output_error=_relative_error(*(float(square) for square in squares[layer])),
        )
        for layer, (whole, stored) in pairs.items()
    }
    return sums.cost(name, _tensor_bytes(model), layers)


def _sum_divergences(full: Model, model: Model, rows: Sequence[Row]) -> _DivergenceSums:
    """Compare two models' next-token distributions, row by row, at the positions that predict an answer token."""
    sums = _DivergenceSums()
    with torch.no_grad():
        for input_ids, labels in rows:
            targets = torch.tensor(labels, device=full.device)[1:]
            columns = (targets != MASKED).nonzero().squeeze(1)
            ids = torch.tensor([list(input_ids)], device=full.device)
            reference = _row_logits(full, ids, columns)
            logits = reference if model is full else _row_logits(model, ids, columns)
            for chunk in torch.arange(len(columns), device=full.device).split(CHUNK_POSITIONS):
                _add_positions(sums, reference[chunk], logits[chunk], targets[columns[chunk]])
    return sums


def _row_logits(model: Model, ids: Tensor, columns: Tensor) -> Tensor:
    """Logits [columns, vocabulary] of one row."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kept: Tensor = model(input_ids=ids, logits_to_keep=columns, use_cache=False).logits[0]
        return kept
    every: Tensor = model(input_ids=ids, use_cache=False).logits[0, columns]
    return every


def _add_positions(sums: _DivergenceSums, reference: Tensor, logits: Tensor, targets: Tensor) -> None:
    """Add positions: logits are [positions, vocabulary].

    KL(full || model) = sum of p log(p / q), with p the distribution of full precision.
    """
    known = functional.log_softmax(reference.float(), dim=-1)
    found = functional.log_softmax(logits.float(), dim=-1)
    sums.positions += len(targets)
    sums.nll -= float(found.gather(1, targets.unsqueeze(1)).sum(dtype=torch.float64))
    sums.kl += float((known.exp() * (known - found)).sum(dtype=torch.float64))
    sums.agreeing += int((known.argmax(-1) == found.argmax(-1)).sum())


def _pair_layers(full: Model, model: Model) -> dict[str, tuple[nn.Module, nn.Module]]:
    """The layers that are stored in 4 bits, with those of full precision, by name."""
    from bitsandbytes.nn import Linear4bit

    whole = dict(full.named_modules())
    return {name: (whole[name], layer) for name, layer in model.named_modules() if isinstance(layer, Linear4bit)}


@contextmanager
def _record_output_errors(pairs: dict[str, tuple[nn.Module, nn.Module]]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """While it lasts, each layer in 4 bits is shown what its counterpart in full precision is; yields, by layer, the
    sums of squares of the difference of their outputs and of the outputs in full precision."""
    squares: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str, stored: nn.Module, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        difference, size = squares[name]
        difference += _squared_norm(stored(*inputs) - output)
        size += _squared_norm(output)

    hooks = []
    for name, (whole, stored) in pairs.items():
        zeros = torch.zeros(2, dtype=torch.float64, device=stored.weight.device)
        squares[name] = (zeros[0], zeros[1])
        hooks.append(whole.register_forward_hook(partial(watch, name, stored)))
    try:
        yield squares
    finally:
        for hook in hooks:
            hook.remove()


def _weight_squared_norms(whole: nn.Module, stored: nn.Module) -> tuple[float, float]:
    weight = frozen_weights.dense_weight(whole)
    return float(_squared_norm(frozen_weights.dense_weight(stored) - weight)), float(_squared_norm(weight))


def _tensor_bytes(module: nn.Module) -> int:
    """Of all tensors as they lie in memory, constants of quantisation included."""
    return sum(tensor.nbytes for tensor in parameters.list_unique_tensors(module))


def _squared_norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).square()


def _relative_error(difference: float, size: float) -> float:
    """Root of the ratio; 0 for an expert that no token was sent to."""
    return math.sqrt(difference / size) if size else 0.0
