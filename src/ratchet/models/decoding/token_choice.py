"""Chooses the next token, greedily or by sampling, and detects choices that rounding could have changed.

Sampling uses Gumbel-max (Gumbel 1954; Maddison et al., "A* Sampling", 2014): the argmax of logit / temperature +
independent standard Gumbel noise is a draw from the softmax. The noise is a function of (seed, row, sample, step), so a
row's draws depend neither on other rows nor on restarts, and two models get the same noise for the same prompt, which
reduces the variance of their estimated difference.

The nucleus (Holtzman et al. 2020) is defined by mass alone: a token belongs to it if all likelier tokens together have
less mass than top_p. Of tokens with equal logits, all or none belong to it.

The batch changes the logits of a row only by rounding. A choice is certain if its lead over every other token is more
than twice the maximum error of a logit (`bound`). The row's own plain pass, whose bound is 0, decides all other
choices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ratchet.models.device import Model
from ratchet.storage import digests

FINE_EPSILONS, COARSE_EPSILONS = 16.0, 4.0
"""Assumed maximum error of a logit in a batch, in units of eps x the row's greatest absolute logit. eps is that of the
coarsest dtype that the model computes in, at least float32's. FINE_EPSILONS holds for float32, COARSE_EPSILONS for
coarser dtypes: a bfloat16 product is summed in float32 and rounded once, so its error has fewer units. The greatest
errors measured with the model families of tests/support/families.py (padded, joined and after a prefix) are 7.2 and 1.7
units. `decoder.choose_batching_method` measures the error of each model, and `ExactTokenSelector.set_method` raises the
bound if the error is larger.
"""
MARGIN = 4.0
"""The bound is at least this multiple of the model's measured error."""
MEAN_SHARE = 0.125
"""Maximum error of a mean log-probability over 64 tokens or more, as a share of a logit's bound. The share is small
because errors have both signs (measured: 1.7 units where single logits had 7.2). For fewer tokens (n), the share is
n^-0.5, as for the mean of n independent errors."""
DECIMALS = 4
"""Number of decimals of the reported mean log-probability."""
_NOISE = 40.0
"""Upper bound of Gumbel noise; float64 can give at most 36.7."""


class GumbelLogitsWarper:
    """Logits processor of transformers that adds Gumbel noise, so that greedy decoding samples.

    Args:
        streams: key of the random stream of each row; equal keys give equal noise.
        columns: columns of the padded prompts, so that the first generated token is step 0 in every batch.
    """

    def __init__(self, streams: Sequence[str], temperature: float, columns: int) -> None:
        self.streams = streams
        self.temperature = temperature
        self.columns = columns

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return logits [rows, vocabulary] with noise."""
        step = input_ids.shape[1] - self.columns
        noise = batched_gumbel_noise([(stream, step) for stream in self.streams], scores.shape[1])
        return scores.float() / self.temperature + noise.to(scores.device)


def noise_stream_key(seed: int, row: str, sample: int) -> str:
    """Return the key of one answer's random stream. `row` is a digest of the prompt."""
    return digests.hash_json(["gumbel", seed, row, sample])


def batched_gumbel_noise(streams: Sequence[tuple[str, int]], count: int) -> Tensor:
    """Return standard Gumbel noise of several streams, each at its step: float32 [streams, count]."""
    # The noise is drawn on the CPU, because GPUs draw other numbers, and in float64, because in float32 one number in
    # 2**24 would be 0 or next to 1, and select a token of negligible probability.
    uniform = torch.empty(len(streams), count, dtype=torch.float64)
    generator = torch.Generator()
    for row, (name, step) in zip(uniform, streams, strict=True):
        generator.manual_seed(int(digests.hash_bytes(f"{name}/{step}".encode())[:16], 16))
        torch.rand(count, dtype=torch.float64, generator=generator, out=row)
    return uniform.log_().neg_().log_().neg_().float()


@dataclass(frozen=True)
class TokenChoices:
    """The chosen token of each row of logits."""

    tokens: list[int]
    nats: list[float]
    """Log-probability of the token under the model, at temperature 1 and without a nucleus."""
    is_certain: list[bool]
    is_finite: list[bool]
    """False if no token can be chosen: the logits hold NaN or positive infinity, or all are minus infinity."""
    scales: list[float]


@dataclass(frozen=True)
class TokenSampler:
    """Chooses tokens from logits."""

    temperature: float
    """0: greedy."""
    top_p: float

    def choose(self, logits: Tensor, streams: Sequence[tuple[str, int]], bound: float) -> TokenChoices:
        """Choose a token for each row.

        Args:
            logits: [rows, vocabulary], of any floating dtype.
            streams: random stream and step of each row; unused at temperature 0.
            bound: maximum error of a logit, relative to the row's greatest logit; 0: these logits decide, and every
                finite row is certain.
        """
        x = logits.float()
        top, low = x.amax(dim=-1), x.amin(dim=-1)
        is_finite = torch.isfinite(top) & ~torch.isnan(low)
        scale = torch.maximum(top.abs(), low.abs())
        if not bool(torch.isfinite(scale).all()):
            mask = torch.isfinite(x)
            is_finite &= (mask | (x == -math.inf)).all(dim=-1)
            scale = torch.where(mask, x.abs(), 0.0).amax(dim=-1)
            x = torch.where(is_finite.unsqueeze(1), x, 0.0)
        max_error = bound * scale
        if self.temperature == 0:
            tokens, is_certain = _argmax_with_lead(x, 2 * max_error if bound else None)
        else:
            tokens, is_certain = self._sample(x, streams, max_error if bound else None)
        nats = x.gather(1, tokens.unsqueeze(1)).squeeze(1).double() - x.logsumexp(dim=-1).double()
        return TokenChoices(
            tokens.tolist(), nats.tolist(), (is_certain & is_finite).tolist(), is_finite.tolist(), scale.tolist()
        )

    def _sample(self, x: Tensor, streams: Sequence[tuple[str, int]], max_error: Tensor | None) -> tuple[Tensor, Tensor]:
        noise = batched_gumbel_noise(streams, x.shape[1]).to(x.device)
        scaled = x / self.temperature
        max_error = None if max_error is None else max_error / self.temperature
        # The division and the sum with noise are rounded too, each by at most half an eps of its size.
        rounding = torch.finfo(torch.float32).eps * (scaled.abs().nan_to_num(posinf=0.0).amax(dim=-1) + _NOISE)
        lead = None if max_error is None else 2 * (max_error + rounding)
        if self.top_p >= 1:
            return _argmax_with_lead(scaled + noise, lead)
        ordered, index = scaled.double().sort(dim=-1, descending=True, stable=True)
        possible, certain = self._nucleus(ordered, max_error)
        scores = torch.where(possible, ordered.float() + noise.gather(1, index), -math.inf)
        choice, is_certain = _argmax_with_lead(scores, lead)
        is_certain &= certain.gather(1, choice.unsqueeze(1)).squeeze(1)
        return index.gather(1, choice.unsqueeze(1)).squeeze(1), is_certain

    def _nucleus(self, ordered: Tensor, max_error: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return masks of tokens that may belong to the nucleus, and of those that certainly do.

        The likeliest token always belongs to the nucleus.

        Args:
            ordered: float64 [rows, vocabulary], descending.
        """
        mass = ordered.softmax(dim=-1)
        mass_before = torch.cat([torch.zeros_like(mass[:, :1]), mass.cumsum(dim=-1)], dim=1)  # [k]: of the first k
        ascending = -ordered
        width = torch.zeros_like(ascending[:, :1]) if max_error is None else 2 * max_error.double().unsqueeze(1)
        mass_above = mass_before.gather(1, torch.searchsorted(ascending, ascending - width))
        mass_around = mass_before.gather(1, torch.searchsorted(ascending, ascending + width))
        mass_around = torch.where(width > 0, mass_around - mass, mass_around)
        possible, certain = mass_above * (-width).exp() < self.top_p, mass_around * width.exp() < self.top_p
        possible[:, 0] = True
        if max_error is None:
            certain[:, 0] = True
        return possible, certain


def _argmax_with_lead(scores: Tensor, lead: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the (first) argmax of each row, and whether it leads the second by more than `lead`."""
    tokens = scores.argmax(dim=-1)
    if lead is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    highest = scores.topk(min(2, scores.shape[1]), dim=-1).values
    return tokens, highest[:, 0] - highest[:, -1] > lead if highest.shape[1] == 2 else lead >= 0


def default_error_units(eps: float) -> float:
    """Return the assumed maximum error of a logit, in units, before the model is measured."""
    return FINE_EPSILONS if eps <= torch.finfo(torch.float32).eps else COARSE_EPSILONS


def is_rounding_certain(mean: float, tokens: int, bound: float) -> bool:
    """Return True if an error of up to `bound` per token cannot change the rounded mean log-probability."""
    max_error = bound * max(MEAN_SHARE, tokens**-0.5)
    return bool(round(mean - max_error, DECIMALS) == round(mean + max_error, DECIMALS))


def coarsest_epsilon(model: Model) -> float:
    """Return the eps of the coarsest dtype that the model computes in, at least float32's."""
    dtypes = {tensor.dtype for tensor in model.parameters() if tensor.is_floating_point()}
    compute_dtypes = (getattr(module, "compute_dtype", None) for module in model.modules())
    dtypes |= {dtype for dtype in compute_dtypes if isinstance(dtype, torch.dtype)}
    eps = float(max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps))
    uses_tf32 = model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return max(eps, 2.0**-10) if uses_tf32 else eps  # TF32 has 10 mantissa bits
