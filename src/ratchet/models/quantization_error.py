"""Measures the error of 4-bit quantization (NF4, FP4) against full precision, on real rows and layer by layer."""

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torch.nn import functional

from ratchet.config.train import Train
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models import oom, weights
from ratchet.models.device import Model
from ratchet.models.memory import parameters
from ratchet.storage.progress import report_progress
from ratchet.storage.records.training import LayerQuantizationCost, QuantizationCost

FULL = "full"
VARIANTS: dict[str, dict[str, Any]] = {
    "nf4": {"quantization": "nf4", "double_quantization": False},
    "nf4+dq": {"quantization": "nf4", "double_quantization": True},
    "fp4": {"quantization": "fp4", "double_quantization": False},
    "fp4+dq": {"quantization": "fp4", "double_quantization": True},
}
"""Quantization variants (settings of section train) that are compared with full precision."""

CHUNK_POSITIONS = 256
"""Number of positions compared at once. Their distributions are a tensor of 100 MB at a vocabulary of 100,000."""

Row = tuple[Sequence[int], Sequence[int]]
"""Token ids and labels."""


def count_answer_tokens(rows: Sequence[Row]) -> int:
    """Return the number of positions at which models are compared."""
    return sum(label != IGNORE_INDEX for _, labels in rows for label in labels[1:])


@dataclass
class _DivergenceSums:
    """Sums for one model over all answer positions, in nats."""

    positions: int = 0
    nll: float = 0.0
    kl: float = 0.0
    agreements: int = 0

    def to_cost(self, name: str, weight_bytes: int, layers: dict[str, LayerQuantizationCost]) -> QuantizationCost:
        return QuantizationCost(
            name=name,
            weight_bytes=weight_bytes,
            loss=self.nll / self.positions,
            kl=self.kl / self.positions,
            greedy_agreement=self.agreements / self.positions,
            layers=layers,
        )


def measure_cost(
    load: Callable[[Train], Model], settings: Train, rows: Sequence[Row], progress: Callable[[str], None]
) -> tuple[QuantizationCost, ...]:
    """Compare the variants on rows with at least one answer token each; full precision comes first.

    Two models are in memory at a time: full precision and one in 4 bits.

    Args:
        load: loads the frozen base for settings.
        settings: section train, in which quantization, double_quantization and initialization are replaced.
    """
    unquantized = settings.model_copy(update={"initialization": "zero", "quantization": "none"})
    progress(f"{FULL}: loading")
    full = load(unquantized)
    costs = [_sum_divergences(full, full, rows).to_cost(FULL, _tensor_bytes(full), {})]
    for name, update in VARIANTS.items():
        progress(f"{name}: loading")
        model = load(unquantized.model_copy(update=update))
        full_modules = dict(full.named_modules())
        # Pairs by layer name: a layer in full precision, and its counterpart in 4 bits.
        pairs = {
            layer: (full_modules[layer], module)
            for layer, module in model.named_modules()
            if isinstance(module, Linear4bit)
        }
        progress(f"{name}: {len(rows)} rows, {len(pairs)} layers")
        costs.append(_compare_variant(full, model, pairs, rows, name))
        del model, pairs, full_modules
        oom.release_memory()
    return tuple(costs)


def _compare_variant(
    full: Model, model: Model, pairs: dict[str, tuple[nn.Module, nn.Module]], rows: Sequence[Row], name: str
) -> QuantizationCost:
    with _record_output_errors(pairs) as squared_errors:
        sums = _sum_divergences(full, model, rows)
    layers = {}
    for layer, (full_layer, quantized_layer) in pairs.items():
        weight = weights.dense_weight(full_layer)
        difference = _squared_norm(weights.dense_weight(quantized_layer) - weight)
        layers[layer] = LayerQuantizationCost(
            bytes_full=_tensor_bytes(full_layer),
            bytes_stored=_tensor_bytes(quantized_layer),
            weight_error=_relative_error(float(difference), float(_squared_norm(weight))),
            output_error=_relative_error(*(float(square) for square in squared_errors[layer])),
        )
    return sums.to_cost(name, _tensor_bytes(model), layers)


def _sum_divergences(full: Model, model: Model, rows: Sequence[Row]) -> _DivergenceSums:
    """Compare two models' next-token distributions, row by row, at the positions that predict an answer token."""
    sums = _DivergenceSums()
    with torch.no_grad():
        for number, (input_ids, labels) in enumerate(rows, start=1):
            targets = torch.tensor(labels, device=full.device)[1:]
            positions = (targets != IGNORE_INDEX).nonzero().squeeze(1)
            ids = torch.tensor([list(input_ids)], device=full.device)
            reference = _row_logits(full, ids, positions)
            logits = reference if model is full else _row_logits(model, ids, positions)
            for chunk in torch.arange(len(positions), device=full.device).split(CHUNK_POSITIONS):
                _add_positions(sums, reference[chunk], logits[chunk], targets[positions[chunk]])
            report_progress("rows compared", number, len(rows))
    return sums


def _row_logits(model: Model, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the logits of one row at these positions: [positions, vocabulary]."""
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        selected: Tensor = model(input_ids=ids, logits_to_keep=positions, use_cache=False).logits[0]
        return selected
    all_logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, positions]
    return all_logits


def _add_positions(sums: _DivergenceSums, reference: Tensor, logits: Tensor, targets: Tensor) -> None:
    """Add the positions of two tensors of logits [positions, vocabulary] to the sums.

    KL(full || model) = sum of p log(p / q), with p the distribution of full precision.
    """
    log_p = functional.log_softmax(reference.float(), dim=-1)
    log_q = functional.log_softmax(logits.float(), dim=-1)
    sums.positions += len(targets)
    sums.nll -= float(log_q.gather(1, targets.unsqueeze(1)).sum(dtype=torch.float64))
    sums.kl += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
    sums.agreements += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())


@contextmanager
def _record_output_errors(pairs: dict[str, tuple[nn.Module, nn.Module]]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Whenever a layer in full precision runs, run its 4-bit counterpart on the same inputs.

    Yields:
        For each layer, two sums of squares: of the differences between both outputs, and of the full-precision outputs.
    """
    squares: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str, quantized_layer: nn.Module, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        difference_square, output_square = squares[name]
        difference_square += _squared_norm(quantized_layer(*inputs) - output)
        output_square += _squared_norm(output)

    hooks = []
    for name, (full_layer, quantized_layer) in pairs.items():
        zeros = torch.zeros(2, dtype=torch.float64, device=quantized_layer.weight.device)
        squares[name] = (zeros[0], zeros[1])
        hooks.append(full_layer.register_forward_hook(partial(record, name, quantized_layer)))
    try:
        yield squares
    finally:
        for hook in hooks:
            hook.remove()


def _tensor_bytes(module: nn.Module) -> int:
    """Return the bytes of all tensors in memory, including quantization constants."""
    return sum(tensor.nbytes for tensor in parameters.list_unique_tensors(module))


def _squared_norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).square()


def _relative_error(difference_square: float, reference_square: float) -> float:
    """Return the square root of the ratio; 0 if the reference is 0, as for an expert that received no tokens."""
    return math.sqrt(difference_square / reference_square) if reference_square else 0.0
