"""How likely each of a fixed set of labels is as the whole answer: the prompt is computed once, for all of them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import DynamicCache

from ratchet.data.conversation import MASKED
from ratchet.models import scoring
from ratchet.models.likelihoods import can_be_repeated, taken
from ratchet.models.loading import Model
from ratchet.models.logit_chunks import Pass
from ratchet.models.loss import pad as padded

Labels = Sequence[Sequence[int]]
"""Token ids of each label, its end of turn included; at least one token each."""


def label_scores(
    model: Model, prompts: Sequence[Sequence[int]], labels: Labels, batch_rows: int, pad: int
) -> list[list[float]]:
    """Log-probability in nats of each label as the whole answer to each prompt: [prompts][labels].

    The first token of a label is read off the prompt's last logits; for the others the cache of keys and values goes
    on, `batch_rows` rows of (prompt, label) at a time. Models without such a cache (recurrent ones) read prompt and
    label anew for each pair.

    Args:
        prompts: all of one length, so that nothing is filled.
        pad: token that shorter labels are filled with, on the right.

    Raises:
        ValueError: prompts of several lengths, an empty prompt, or an empty label.
    """
    if len(set(map(len, prompts))) != 1 or not prompts[0] or not all(labels):
        raise ValueError("label_scores takes prompts of one length, and no empty prompt or label")
    with torch.no_grad():
        ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
        begun = Pass(model, ids, (ids.shape[1] - 1, ids.shape[1]), keep=True)
        if not can_be_repeated(begun.cache):
            return _anew(model, prompts, labels, batch_rows, pad)
        ((_, logits),) = begun.pieces()
        first = functional.log_softmax(logits[:, 0].float(), dim=-1).double()
        found = first[:, [label[0] for label in labels]]
        for some in _alike(labels, max(1, batch_rows // len(prompts))):
            if len(labels[some[0]]) > 1:
                found[:, some] -= _rest(model, begun.cache, len(prompts), [labels[k] for k in some], pad)
    scores: list[list[float]] = found.tolist()
    return scores


def _alike(labels: Labels, count: int) -> Iterator[list[int]]:
    """Indices of labels in groups of at most `count`, those of like length together, longest first."""
    order = sorted(range(len(labels)), key=lambda k: (-len(labels[k]), k))
    return (order[start : start + count] for start in range(0, len(order), count))


def _rest(model: Model, cache: DynamicCache, prompts: int, labels: Labels, pad: int) -> Tensor:
    """Negative log-likelihood of all but the first tokens of labels after each prompt; float64 [prompts, labels]."""
    own = taken(cache, [row for row in range(prompts) for _ in labels])
    ids, targets = (
        padded([label[part] for label in labels], fill, model.device).repeat(prompts, 1)
        for part, fill in ((slice(None, -1), pad), (slice(1, None), MASKED))
    )
    known = targets != MASKED
    nll = Pass(model, ids, (0, ids.shape[1]), cache=own).nll(torch.where(known, targets, pad)).double()
    return torch.where(known, nll, 0.0).sum(dim=1).view(prompts, len(labels))


def _anew(
    model: Model, prompts: Sequence[Sequence[int]], labels: Labels, batch_rows: int, pad: int
) -> list[list[float]]:
    pairs = [(prompt, labels[k]) for prompt in prompts for k in range(len(labels))]
    found: list[float] = []
    for start in range(0, len(pairs), batch_rows):
        some = pairs[start : start + batch_rows]
        ids = [[*prompt, *label] for prompt, label in some]
        learned = [[MASKED] * len(prompt) + list(label) for prompt, label in some]
        found += [-one.nll for one in scoring.likelihoods(model, ids, learned, pad)]
    return [found[start : start + len(labels)] for start in range(0, len(found), len(labels))]
