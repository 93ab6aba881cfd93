"""Measures how fast a training step is: the time of its parts, and its operations compared with the GPU's peak rate.

`StepTimer` measures the parts of a step, span by span. Without the profiler, a training uses `StepSpans`, which
measures nothing.

The operations per second of a training, divided by the peak rate in the GPU's data sheet, are the model FLOP
utilisation (MFU; Chowdhery et al. 2022, appendix B).
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from ratchet.models.device import Model

SHEETS: tuple[tuple[str, float], ...] = (
    (r"H100 (PCIe|NVL)", 0.0),  # unknown: clocks differ from the SXM module and between variants
    (r"H[12]00\b", 989e12),  # H100 and H200 Tensor Core GPU data sheets, SXM; with sparsity 1,979e12
    (r"A100\b", 312e12),  # A100 Tensor Core GPU data sheet
    (r"L4\b", 121e12),  # L4 Tensor Core GPU data sheet; with sparsity 242e12
    (r"A10\b", 125e12),  # A10 Tensor Core GPU data sheet; the A10G of cloud providers is a different GPU
    (r"RTX 4090\b", 165e12),  # NVIDIA Ada GPU architecture, appendix A: 165.2e12, accumulated in float32
    (r"T4\b", 65e12),  # T4 data sheet, float16; the T4 has no bfloat16
)
"""Pattern of a GPU's name, and the GPU's peak rate in NVIDIA's data sheet, in operations per second of dense matrix
products in bfloat16 or float16. A rate of 0 is unknown."""

MAX_UNKNOWN_SHARE = 0.1
"""Largest acceptable ratio of elements in unknown layers (such as experts in one tensor) to elements in known layers.
Above it, the operations of a model are unknown."""


def datasheet_flops_per_s(name: str, dtype: torch.dtype) -> float | None:
    """Return a GPU's peak rate for a 16-bit dtype in its data sheet; None if the rate is unknown or for other
    dtypes."""
    if dtype.itemsize != 2:
        return None
    rates = (rate for pattern, rate in SHEETS if re.search(rf"(?<![A-Z0-9]){pattern}", name))
    return next(rates, 0.0) or None


def iterate_matrices(model: Model) -> Iterator[tuple[Any, int, int]]:
    """Yield the linear layers of the frozen base, with their numbers of inputs and outputs."""
    for name, module in model.named_modules():
        if "lora_" in name:
            continue
        if isinstance(module, nn.Linear):
            yield module, module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            yield module, module.nx, module.nf


def flops_per_token(model: Model, trained_share: float, passes: Literal[1, 2] = 2) -> float | None:
    """Return the operations per input token in training, forward and backward, without recomputed activations.

    A frozen matrix takes part in two products (its output, and the gradient of its input), a trainable matrix in three.
    A product has two operations per element. Attention between tokens is not counted, so the MFU is a lower bound.

    Args:
        model: model with its adapter.
        trained_share: share of the input tokens that are trained on; the output head computes only these.
        passes: number of passes. 2: forward and backward; 1: forward only, for a model without trainable parameters.

    Returns:
        The operations; None if too many elements are in unknown layers (MAX_UNKNOWN_SHARE).
    """
    head = model.get_output_embeddings()
    known_elements, counted, flops = 0, set[int](), 0.0
    for module, inputs, outputs in iterate_matrices(model):
        known_elements += inputs * outputs
        counted.add(id(module.weight))
        flops += 2.0 * passes * inputs * outputs * (trained_share if module is head else 1.0)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    excluded = counted | embeddings
    unknown = [p for p in model.parameters() if not p.requires_grad and p.dim() > 1 and id(p) not in excluded]
    if sum(p.numel() for p in unknown) > MAX_UNKNOWN_SHARE * known_elements:
        return None
    trainable = sum(int(p.numel()) for p in model.parameters() if p.requires_grad)
    return flops + 6.0 * trainable


_UNTIMED: AbstractContextManager[None] = nullcontext()


class StepSpans:
    """Interface through which a step reports its spans. This class measures nothing."""

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Wrap work that belongs to the span `name`. The time of an inner span does not count for the outer span."""
        return _UNTIMED

    def count_micro_batch(self, padded_tokens: int) -> None:
        """Count a micro-batch (number of sequences times the length of the longest) that is about to be computed."""


@dataclass
class StepTimings:
    """Measurements between `StepTimer.start` and the next `stop`."""

    seconds: float = 0.0
    """Total time, inside and outside of spans."""
    spans: dict[str, float] = field(default_factory=dict)
    """Seconds of each span by name, without the time of inner spans."""
    micro_batches: int = 0
    padded_tokens: int = 0

    @property
    def rest_s(self) -> float:
        """Seconds outside of all spans."""
        return self.seconds - sum(self.spans.values())


class StepTimer(StepSpans):
    """Measures spans.

    Args:
        device: device of the training. A GPU works asynchronously, so the timer waits for the GPU at `start` and
            `stop`, and also at the edges of every span if `synchronizes_spans` is set.
        clock: returns monotonic seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._timings, self._started_s = StepTimings(), 0.0
        self._inner_s: list[float] = []
        """For each open span, the seconds of the spans inside it."""
        self.synchronizes_spans = device.type == "cuda"
        self.marks_spans = False
        """Whether spans appear in the trace of a torch profiler."""

    def start(self) -> None:
        """Start a measurement; drop the previous one."""
        self._synchronize()
        self._timings, self._inner_s = StepTimings(), []
        self._started_s = self._clock()

    def stop(self) -> StepTimings:
        """Return the measurements since `start`."""
        self._synchronize()
        self._timings.seconds = self._clock() - self._started_s
        return self._timings

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """See `StepSpans.measure`. The time of failed work counts, too."""
        mark = torch.profiler.record_function(name) if self.marks_spans else _UNTIMED
        with mark:
            started_s = self._now()
            self._inner_s.append(0.0)
            try:
                yield
            finally:
                spent_s = self._now() - started_s
                own_s = spent_s - self._inner_s.pop()
                self._timings.spans[name] = self._timings.spans.get(name, 0.0) + own_s
                if self._inner_s:
                    self._inner_s[-1] += spent_s

    def count_micro_batch(self, padded_tokens: int) -> None:
        self._timings.micro_batches += 1
        self._timings.padded_tokens += padded_tokens

    def _now(self) -> float:
        if self.synchronizes_spans:
            self._synchronize()
        return self._clock()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
