"""Finds a way in which a model can decode several rows at once, by testing it on the actual prompts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ratchet.models import oom
from ratchet.models.decoding.batch import (
    BeforePass,
    DecodingBatch,
    KvCacheBatch,
    UncachedBatch,
    UniformLengthBatch,
    compute_reference_logits,
)
from ratchet.models.decoding.token_choice import coarsest_epsilon
from ratchet.models.device import Model
from ratchet.models.likelihoods import MIN_TOLERANCE, TOLERANCE_EPSILONS

PROBE_TOKENS = 3
"""Tokens by which the probe's texts grow beyond the prompts."""


@dataclass(frozen=True)
class BatchingMethod:
    """A way to decode rows together."""

    name: str
    """`joined`: rows join and leave at any time. `even`: rows of one length start together. `own cache`: like `even`,
    for a model whose cache holds more than keys and values. `alone`: each text is read whole for each token."""
    create_batch: Callable[[], DecodingBatch]
    error_units: float
    """Largest measured difference to plain logits, in units of eps x the greatest logit."""


def choose_batching_method(
    model: Model, prompts: Sequence[Sequence[int]], prefix: tuple[int, ...], pad: int, before_pass: BeforePass
) -> BatchingMethod:
    """Return the first method whose logits equal plain ones except for rounding.

    Args:
        prompts: some prompts, of different length if possible; all start with `prefix`.

    Raises:
        An out-of-memory error (`oom.is_out_of_memory`) of a forward pass.
    """
    alone = partial(UncachedBatch, model, before_pass)
    candidates: dict[str, Callable[[], DecodingBatch]] = {
        "joined": partial(KvCacheBatch, model, pad, before_pass),
        "even": partial(KvCacheBatch, model, pad, before_pass, False),
        "own cache": partial(UniformLengthBatch, model, pad, before_pass),
    }
    for name, create_batch in candidates.items():
        error_units = _measure_method_error(model, create_batch, prompts, prefix)
        if error_units is not None:
            return BatchingMethod(name, create_batch, error_units)
    return BatchingMethod("alone", alone, 0.0)


def _measure_method_error(
    model: Model, create_batch: Callable[[], DecodingBatch], prompts: Sequence[Sequence[int]], prefix: tuple[int, ...]
) -> float | None:  # fmt: skip
    """Return the greatest logit difference in units; None if the method fails or gives other logits."""
    try:
        with torch.no_grad():
            return _exercise_batch(model, create_batch(), prompts, prefix)
    except Exception as error:  # a model's own code may raise anything for an unsupported call
        if oom.is_out_of_memory(error):
            raise
        return None


def _exercise_batch(
    model: Model, batch: DecodingBatch, prompts: Sequence[Sequence[int]], prefix: tuple[int, ...]
) -> float | None:  # fmt: skip
    """Start, extend and remove rows, and let another row join if the batch supports it."""
    eps, worst = coarsest_epsilon(model), 0.0
    max_units = max(MIN_TOLERANCE, TOLERANCE_EPSILONS * eps) / eps
    first = list(prompts[0])
    texts = [first, list(prompts[-1]) if batch.supports_joining else [*first[:-1], first[0]]]
    joined_text = [*prefix, *prompts[-1][len(prefix) :][::-1]]

    def is_near(logits: Tensor) -> bool:
        nonlocal worst
        worst = max(worst, *(_error_in_units(row, model, text, eps) for row, text in zip(logits, texts, strict=True)))
        return bool(worst <= max_units)

    if not is_near(batch.add([tuple(text) for text in texts], prefix)):
        return None
    for step in range(PROBE_TOKENS):
        for text in texts:
            text.append(text[step % len(text)])
        if not is_near(batch.step([text[-1] for text in texts])):
            return None
        if step == 0:
            texts = [texts[i] for i in batch.keep([1])]
            if batch.supports_joining:
                texts.append(joined_text)
                logits = batch.add([tuple(joined_text)], prefix)
                worst = max(worst, _error_in_units(logits[0], model, joined_text, eps))
        elif step == 1:  # a row alone may take another code path: in bitsandbytes it does
            texts = [texts[i] for i in batch.keep([0])]
    return worst if worst <= max_units else None


def _error_in_units(found: Tensor, model: Model, text: Sequence[int], eps: float) -> float:
    """Return the logit error in units of eps x the greatest logit; infinite if it is not finite."""
    off = relative_logit_difference(found, compute_reference_logits(model, text)[0])
    return off / eps if math.isfinite(off) else math.inf


def relative_logit_difference(found: Tensor, expected: Tensor) -> float:
    """Return the greatest logit difference relative to the greatest logit [vocabulary]; equal infinities agree."""
    a, b = found.float(), expected.float()
    off = torch.where(a == b, 0.0, (a - b).abs()).amax()
    scale = torch.where(torch.isfinite(b), b.abs(), 0.0).amax()
    return float(off / scale) if float(off) else 0.0
