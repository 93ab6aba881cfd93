"""In which way a model can decode several rows at once: tried out on the very prompts, against its plain answers."""

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
from ratchet.models.likelihoods import LEAST_TOLERANCE, TOLERANCE_EPSILONS

MORE_TOKENS = 3
"""How much longer than the prompts the texts of a trial get."""


@dataclass(frozen=True)
class BatchingMethod:
    """How rows are decoded together."""

    name: str
    """`joined`: rows come and go. `even`: rows of one length begin together. `own cache`: the same, of a model with
    another cache than keys and values. `alone`: whole texts, one by one, token by token."""
    make: Callable[[], DecodingBatch]
    seen: float
    """How far its logits were from plain ones, in units of eps x the greatest logit."""


def choose_batching_method(
    model: Model, prompts: Sequence[Sequence[int]], header: tuple[int, ...], pad: int, before: BeforePass
) -> BatchingMethod:
    """The first way whose logits are the plain ones, but for rounding.

    Args:
        prompts: some, of different length where there are such; all begin with `header`.

    Raises:
        Whatever says that memory ran out (model.memory.is_exhausted).
    """
    alone = partial(UncachedBatch, model, before)
    ways: dict[str, Callable[[], DecodingBatch]] = {
        "joined": partial(KvCacheBatch, model, pad, before),
        "even": partial(KvCacheBatch, model, pad, before, False),
        "own cache": partial(UniformLengthBatch, model, pad, before),
    }
    for name, make in ways.items():
        seen = _measure_method_error(model, make, prompts, header)
        if seen is not None:
            return BatchingMethod(name, make, seen)
    return BatchingMethod("alone", alone, 0.0)


def _measure_method_error(
    model: Model, make: Callable[[], DecodingBatch], prompts: Sequence[Sequence[int]], header: tuple[int, ...]
) -> float | None:  # fmt: skip
    """Greatest difference of a logit, in units; None: another answer, or none."""
    try:
        with torch.no_grad():
            return _exercise_batch(model, make(), prompts, header)
    except Exception as error:  # whatever a model's own code raises when it is asked what it cannot do
        if oom.is_out_of_memory(error):
            raise
        return None


def _exercise_batch(
    model: Model, rows: DecodingBatch, prompts: Sequence[Sequence[int]], header: tuple[int, ...]
) -> float | None:  # fmt: skip
    """Rows are begun, go on, are given up, and, where that is possible, joined by another."""
    eps, worst = coarsest_epsilon(model), 0.0
    most = max(LEAST_TOLERANCE, TOLERANCE_EPSILONS * eps) / eps
    first = list(prompts[0])
    texts = [first, list(prompts[-1]) if rows.joins else [*first[:-1], first[0]]]
    again = [*header, *prompts[-1][len(header) :][::-1]]

    def near(logits: Tensor) -> bool:
        nonlocal worst
        worst = max(
            worst, *(_error_in_units(found, model, text, eps) for found, text in zip(logits, texts, strict=True))
        )
        return worst <= most

    if not near(rows.add([tuple(text) for text in texts], header)):
        return None
    for turn in range(MORE_TOKENS):
        for text in texts:
            text.append(text[turn % len(text)])
        if not near(rows.step([text[-1] for text in texts])):
            return None
        if turn == 0:
            texts = [texts[i] for i in rows.keep([1])]
            if rows.joins:
                texts.append(again)
                found = rows.add([tuple(again)], header)
                worst = max(worst, _error_in_units(found[0], model, again, eps))
        elif turn == 1:  # one row alone may be computed otherwise: bitsandbytes does
            texts = [texts[i] for i in rows.keep([0])]
    return worst if worst <= most else None


def _error_in_units(found: Tensor, model: Model, text: Sequence[int], eps: float) -> float:
    """What logits are off, in units of eps x the greatest; infinite where that cannot be said."""
    off = relative_logit_difference(found, compute_reference_logits(model, text)[0])
    return off / eps if math.isfinite(off) else math.inf


def relative_logit_difference(found: Tensor, expected: Tensor) -> float:
    """Greatest difference of logits [vocabulary], relative to the greatest of them; those of minus infinity agree."""
    a, b = found.float(), expected.float()
    off = torch.where(a == b, 0.0, (a - b).abs()).amax()
    scale = torch.where(torch.isfinite(b), b.abs(), 0.0).amax()
    return float(off / scale) if float(off) else 0.0
