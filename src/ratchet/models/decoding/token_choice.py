"""Answers drawn at random, so that a row's draws are its own: other rows in the batch, order and restarts change none.

Gumbel-max (E. J. Gumbel 1954; C. J. Maddison, D. Tarlow, T. Minka, "A* Sampling", 2014): the index of the greatest of
logit / temperature + noise, with independent standard Gumbel noise, is a draw from the softmax. So greedy decoding of
logits with noise samples, and the noise is a function of (seed, row, sample, step). Two models that are asked the same
get the same noise: where they believe the same they say the same, and their difference is estimated with less variance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ratchet.models.device import Model
from ratchet.storage import digests


class GumbelLogitsWarper:
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
        noise = batched_gumbel_noise([(stream, step) for stream in self.streams], scores.shape[1])
        return scores.float() / self.temperature + noise.to(scores.device)


def noise_stream_key(seed: int, row: str, sample: int) -> str:
    """What the noise of one answer depends on. `row` is a fingerprint of what is asked."""
    return digests.hash_json(["gumbel", seed, row, sample])


def gumbel_noise(of: str, step: int, count: int) -> Tensor:
    """Standard Gumbel noise, float32 [count], a function of the arguments; made on the CPU, for GPUs draw otherwise."""
    return batched_gumbel_noise([(of, step)], count)[0]


def batched_gumbel_noise(of: Sequence[tuple[str, int]], count: int) -> Tensor:
    """The same for several streams, each at its step: float32 [streams, count]."""
    # In float32 one number in 2**24 would be 0 or next to 1, and decide for a token that nobody believes in.
    uniform = torch.empty(len(of), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, (stream, step) in zip(uniform, of, strict=True):
        generator.manual_seed(int(digests.hash_bytes(f"{stream}/{step}".encode())[:16], 16))
        torch.rand(count, dtype=torch.float64, generator=generator, out=row)
    return uniform.log_().neg_().log_().neg_().float()


# Which token comes next, and whether rounding could have chosen another.
#
# Logits of a row depend on its batch by rounding alone: sums are taken in another order. A choice is sure when its
# lead
# over every other token is more than twice what a logit can be off (`bound`); whoever asks decides the others by the
# row's own plain pass, for which the bound is 0. So answers are those of plain passes, whatever the batches are.
#
# The nucleus (A. Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020) is told by mass alone: a token
# is
# in it if those likelier than it have together less than top_p. Equal logits are in it together, so their order in a
# sort decides nothing.

FINE_EPSILONS, COARSE_EPSILONS = 16.0, 4.0
"""What a logit of a batch may be off, in units of eps x the row's greatest absolute logit; eps is that of the coarsest
numbers the model computes in: float32, or coarser ones. A product of bfloat16 is summed in float32 and rounded once, so
its units are fewer. The most that was seen in the families of tests/support/families.py, filled, joined and behind a
header: 7.2 and 1.7. Models that are further off are found out (decoding_trial.py) and get a bound of their own.
"""
MARGIN = 4.0
"""The bound is at least so many times what was seen with this very model."""
MEAN_SHARE = 0.125
"""Of the bound of a logit: what a mean of log-probabilities over 64 tokens or more may be off, for errors have both
signs (seen: 1.7 units where single ones had 7.2); of fewer tokens, as much as a mean of independent errors."""
DECIMALS = 4
"""Of the mean log-probability that is told."""
_NOISE = 40.0
"""Greatest Gumbel noise that float64 can give is 36.7."""


@dataclass(frozen=True)
class TokenChoices:
    """For each row of logits."""

    tokens: list[int]
    nats: list[float]
    """Log-probability of the token under the model, at temperature 1 and without a nucleus."""
    sure: list[bool]
    finite: list[bool]
    """Whether the row can be chosen from at all: no NaN, no positive infinity, something above minus infinity."""
    scales: list[float]
    """Greatest absolute finite logit."""


@dataclass(frozen=True)
class TokenSampler:
    """Takes tokens from logits."""

    temperature: float
    """0: the likeliest."""
    top_p: float

    def choose(self, logits: Tensor, draws: Sequence[tuple[str, int]], bound: float) -> TokenChoices:
        """Choose a token for each row.

        Args:
            logits: [rows, vocabulary], of any floating type.
            draws: stream and step of each row; read if there is a temperature.
            bound: what a logit may be off, relative to the row's greatest; 0: these logits decide, and every finite
                row is sure.
        """
        x = logits.float()
        top, low = x.amax(dim=-1), x.amin(dim=-1)
        finite = torch.isfinite(top) & ~torch.isnan(low)
        scale = torch.maximum(top.abs(), low.abs())
        if not bool(torch.isfinite(scale).all()):
            kept = torch.isfinite(x)
            finite &= (kept | (x == -math.inf)).all(dim=-1)
            scale = torch.where(kept, x.abs(), 0.0).amax(dim=-1)
            x = torch.where(finite.unsqueeze(1), x, 0.0)
        off = bound * scale
        if self.temperature == 0:
            tokens, sure = _argmax_with_lead(x, 2 * off if bound else None)
        else:
            tokens, sure = self._drawn(x, draws, off if bound else None)
        nats = x.gather(1, tokens.unsqueeze(1)).squeeze(1).double() - x.logsumexp(dim=-1).double()
        return TokenChoices(tokens.tolist(), nats.tolist(), (sure & finite).tolist(), finite.tolist(), scale.tolist())

    def _drawn(self, x: Tensor, draws: Sequence[tuple[str, int]], off: Tensor | None) -> tuple[Tensor, Tensor]:
        noise = batched_gumbel_noise(draws, x.shape[1]).to(x.device)
        heated = x / self.temperature
        off = None if off is None else off / self.temperature
        # These very sums are rounded, too: to half an eps of their size, before and after.
        rounding = torch.finfo(torch.float32).eps * (heated.abs().nan_to_num(posinf=0.0).amax(dim=-1) + _NOISE)
        lead = None if off is None else 2 * (off + rounding)
        if self.top_p >= 1:
            return _argmax_with_lead(heated + noise, lead)
        ordered, index = heated.double().sort(dim=-1, descending=True, stable=True)
        possible, certain = self._nucleus(ordered, off)
        scores = torch.where(possible, ordered.float() + noise.gather(1, index), -math.inf)
        place, sure = _argmax_with_lead(scores, lead)
        sure &= certain.gather(1, place.unsqueeze(1)).squeeze(1)
        return index.gather(1, place.unsqueeze(1)).squeeze(1), sure

    def _nucleus(self, ordered: Tensor, off: Tensor | None) -> tuple[Tensor, Tensor]:
        """Which tokens may be in it, and which are; the likeliest always is.

        Args:
            ordered: float64 [rows, vocabulary], descending.
        """
        mass = ordered.softmax(dim=-1)
        before = torch.cat([torch.zeros_like(mass[:, :1]), mass.cumsum(dim=-1)], dim=1)  # of the first k, at k
        rising = -ordered
        width = torch.zeros_like(rising[:, :1]) if off is None else 2 * off.double().unsqueeze(1)
        above = before.gather(1, torch.searchsorted(rising, rising - width))
        around = before.gather(1, torch.searchsorted(rising, rising + width))
        around = torch.where(width > 0, around - mass, around)
        possible, certain = above * (-width).exp() < self.top_p, around * width.exp() < self.top_p
        possible[:, 0] = True
        if off is None:
            certain[:, 0] = True
        return possible, certain


def _argmax_with_lead(scores: Tensor, lead: Tensor | None) -> tuple[Tensor, Tensor]:
    """Index of the greatest of each row, the first of equals; and whether it leads the second by more than `lead`."""
    tokens = scores.argmax(dim=-1)
    if lead is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    two = scores.topk(min(2, scores.shape[1]), dim=-1).values
    return tokens, two[:, 0] - two[:, -1] > lead if two.shape[1] == 2 else lead >= 0


def default_error_units(eps: float) -> float:
    """How many of them a logit may be off before anything is known of the model."""
    return FINE_EPSILONS if eps <= torch.finfo(torch.float32).eps else COARSE_EPSILONS


def is_rounding_certain(mean: float, tokens: int, bound: float) -> bool:
    """Whether a mean log-probability is rounded in one way only, where a token's may be off by `bound`."""
    off = bound * max(MEAN_SHARE, tokens**-0.5)
    return bool(round(mean - off, DECIMALS) == round(mean + off, DECIMALS))


def coarsest_epsilon(model: Model) -> float:
    """Of the coarsest numbers that the model computes in."""
    types = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    types |= {one.compute_dtype for one in model.modules() if isinstance(_compute_dtype(one), torch.dtype)}
    found = float(max((torch.finfo(one).eps for one in types), default=torch.finfo(torch.float32).eps))
    coarse = model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return max(found, 2.0**-10) if coarse else found  # TF32 has 10 bits


def _compute_dtype(module: Any) -> Any:
    return getattr(module, "compute_dtype", None)
