"""What answering costs here: seconds, tokens a second and memory, one prompt at a time, as one user would wait."""

import math
import statistics
import time
from collections.abc import Sequence

import torch

from ratchet.model import capacity, scoring
from ratchet.model.quantized import Model
from ratchet.records_evaluation import Cost


def measure(
    model: Model, pad: int, prompts: Sequence[Sequence[int]], ends: Sequence[int], max_new_tokens: int
) -> Cost:  # fmt: skip
    """Answer at least one prompt, each alone and greedily; the first is answered once before, for warming up.

    Memory is what torch has allocated on a GPU at most, weights included; on a CPU it is what the process holds, at
    most while answering (since it began, where the kernel cannot forget an older peak: proc(5), clear_refs).
    """
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    else:
        capacity.forget_peak()
    seconds, tokens = [], 0
    for number, prompt in enumerate([prompts[0], *prompts]):
        _wait(model.device)
        begun = time.perf_counter()
        answer = scoring.generate(model, [prompt], ends, max_new_tokens, pad)[0]
        _wait(model.device)
        if number:
            seconds.append(time.perf_counter() - begun)
            tokens += len(answer)
    return Cost(
        rows=len(prompts),
        latency_s=statistics.median(seconds),
        latency_p95_s=sorted(seconds)[math.ceil(0.95 * len(seconds)) - 1],
        tokens_per_s=tokens / sum(seconds),
        memory_bytes=torch.cuda.max_memory_allocated(model.device) if cuda else capacity.peak_resident_bytes(),
        device=torch.cuda.get_device_name(model.device) if cuda else "cpu",
    )


def _wait(device: torch.device) -> None:
    """Until the GPU has done what it was asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
