"""Answers drawn at random, so that a row's draws are its own: other rows in the batch, order and restarts change none.

Gumbel-max (E. J. Gumbel 1954; C. J. Maddison, D. Tarlow, T. Minka, "A* Sampling", 2014): the index of the greatest of
logit / temperature + noise, with independent standard Gumbel noise, is a draw from the softmax. So greedy decoding of
logits with noise samples, and the noise is a function of (seed, row, sample, step). Two models that are asked the same
get the same noise: where they believe the same they say the same, and their difference is estimated with less variance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ratchet import digest


class Draw:
    """Turns greedy decoding of a batch into drawing; one of transformers' logits processors by its shape.

    Args:
        streams: for each row of the batch what its noise depends on; equal texts, equal noise.
        temperature: what logits are divided by.
        columns: tokens of the (filled) prompts, so that the first token drawn is step 0 whatever the batch is.
    """

    def __init__(self, streams: Sequence[str], temperature: float, columns: int) -> None:
        self.streams = streams
        self.temperature = temperature
        self.columns = columns

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits [rows, vocabulary] with noise."""
        step = input_ids.shape[1] - self.columns
        noise = gumbels([(stream, step) for stream in self.streams], scores.shape[1])
        return scores.float() / self.temperature + noise.to(scores.device)


def stream(seed: int, row: str, sample: int) -> str:
    """What the noise of one answer depends on. `row` is a fingerprint of what is asked."""
    return digest.of_json(["gumbel", seed, row, sample])


def gumbel(of: str, step: int, count: int) -> Tensor:
    """Standard Gumbel noise, float32 [count], a function of the arguments; made on the CPU, for GPUs draw otherwise."""
    return gumbels([(of, step)], count)[0]


def gumbels(of: Sequence[tuple[str, int]], count: int) -> Tensor:
    """The same for several streams, each at its step: float32 [streams, count]."""
    # In float32 one number in 2**24 would be 0 or next to 1, and decide for a token that nobody believes in.
    uniform = torch.empty(len(of), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, (stream, step) in zip(uniform, of, strict=True):
        generator.manual_seed(int(digest.of_bytes(f"{stream}/{step}".encode())[:16], 16))
        torch.rand(count, dtype=torch.float64, generator=generator, out=row)
    return uniform.log_().neg_().log_().neg_().float()
