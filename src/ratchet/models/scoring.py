"""Score a model on rows, one batch at a time: likelihood of the true answers, and the answers it gives itself."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import DynamicCache

from ratchet.data.conversation import MASKED
from ratchet.models.chunked_loss import ForwardPass
from ratchet.models.decoding.token_choice import GumbelLogitsWarper
from ratchet.models.likelihoods import is_plain_kv_cache, select_cache_rows
from ratchet.models.loading import Model
from ratchet.models.loss import pad_rows as padded


@dataclass(frozen=True)
class RowLikelihood:
    """How likely the tokens of one row are, each after those before it; in nats. Its first token counts nowhere."""

    nll: float
    """Negative log-likelihood of all answer tokens (those with a label) together."""
    tokens: int
    prompt_nll: float
    """The same of all other tokens."""
    prompt_tokens: int


def score_rows(
    model: Model, input_ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad: int
) -> list[RowLikelihood]:
    """Likelihood of rows that are computed at once, in their order.

    Every token is a target, whatever the labels say, so answer and prompt cost one pass. No attention mask is needed:
    rows are filled on the right, where a causal model does not look. Sums are of float64.

    Args:
        labels: MASKED where a token belongs to no answer.
        pad: token that rows are filled with.
    """
    lengths = [len(ids) for ids in input_ids]
    if max(lengths) < 2:
        return [RowLikelihood(0.0, 0, 0.0, 0) for _ in lengths]
    with torch.no_grad():
        ids = padded(input_ids, pad, model.device)
        nll = ForwardPass(model, ids, (0, ids.shape[1] - 1)).nll(ids[:, 1:]).double()
        answers = (padded(labels, MASKED, model.device) != MASKED)[:, 1:]
        inside = torch.arange(1, ids.shape[1]) < torch.tensor(lengths).unsqueeze(1)
        prompts = inside.to(model.device) & ~answers
        # Not by multiplying with 0: what stands where rows are filled may be NaN.
        sums = [torch.where(mask, nll, 0.0).sum(dim=1).tolist() for mask in (answers, prompts)]
    counts = [mask.sum(dim=1).tolist() for mask in (answers, prompts)]
    return [RowLikelihood(*found) for found in zip(sums[0], counts[0], sums[1], counts[1], strict=True)]


def list_end_tokens(model: Model, tokenizer: Any, end_of_turn: str) -> list[int]:
    """Ids that end an answer: what was learned as end of turn, and what the model's own files name.

    They may differ: a template's end-of-turn token need not be the tokenizer's `eos_token`.
    """
    named = model.generation_config.eos_token_id if model.generation_config else None
    known = tokenizer.get_vocab()
    ids = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named]), known.get(end_of_turn)}
    return sorted(one for one in ids if one is not None)


def generate(
    model: Model, prompts: Sequence[Sequence[int]], ends: Sequence[int], max_new_tokens: int, pad: int,
    draw: GumbelLogitsWarper | None = None,
) -> list[list[int]]:  # fmt: skip
    """Tokens of the answer to each prompt (ids that end where the assistant begins), computed at once, in their order.

    An answer ends with one of the tokens `ends`, which it holds, or after `max_new_tokens`. What a model's files say
    about generation (a repetition penalty, say) is left out: all models answer in one way.

    Args:
        draw: chooses tokens at random; None takes the likeliest.
    """
    longest = max(map(len, prompts))
    # On the left: all answers begin in the same column.
    ids = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    wanted = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, pad_token_id=pad, eos_token_id=list(ends)
    )
    with torch.no_grad(), _ignore_generation_config(whole):
        output = whole.generate(
            input_ids=torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=wanted,
            logits_processor=LogitsProcessorList([draw] if draw else []),
        )
    return [_cut_at_end_token(tokens, set(ends)) for tokens in output[:, longest:].tolist()]


@contextmanager
def _ignore_generation_config(whole: Model) -> Iterator[None]:
    """transformers takes from a model's generation_config what a call does not set."""
    own = whole.generation_config
    whole.generation_config = GenerationConfig()
    try:
        yield
    finally:
        whole.generation_config = own


def _cut_at_end_token(tokens: list[int], ends: set[int]) -> list[int]:
    """Up to the first end; what follows is filling, while others in the batch went on."""
    stop = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:stop]


@dataclass(frozen=True)
class LogitComparison:
    """Two models' logits on the same rows."""

    greatest: float
    mean: float
    positions: int
    agreeing: int
    """Answer positions at which both find the same token most likely."""
    answer_positions: int


def compare_logits(
    reference: Sequence[torch.Tensor], model: Model, input_ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
) -> LogitComparison:
    """Compare a model's logits with `reference` (from `collect_logits`), row by row, without padding."""
    greatest, total, elements, positions, agreeing, answer_positions = 0.0, 0.0, 0, 0, 0, 0
    for expected, found, row_labels in zip(reference, collect_logits(model, input_ids), labels, strict=True):
        difference = (expected - found).abs()
        greatest = max(greatest, float(difference.max()))
        total += float(difference.double().sum())
        elements += difference.numel()
        positions += difference.shape[0]
        learned = torch.tensor([label != MASKED for label in row_labels[1:]])
        same = expected[:-1].argmax(-1) == found[:-1].argmax(-1)
        agreeing += int((same & learned).sum())
        answer_positions += int(learned.sum())
    return LogitComparison(greatest, total / elements, positions, agreeing, answer_positions)


def collect_logits(model: Model, input_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [positions, vocabulary] of each row in float32, on the CPU."""
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0].float().cpu() for ids in input_ids
        ]


# How likely each of a fixed set of labels is as the whole answer: the prompt is computed once, for all of them.

Labels = Sequence[Sequence[int]]
"""Token ids of each label, its end of turn included; at least one token each."""


def score_labels(
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
        begun = ForwardPass(model, ids, (ids.shape[1] - 1, ids.shape[1]), keep=True)
        if not is_plain_kv_cache(begun.cache):
            return _score_labels_without_cache(model, prompts, labels, batch_rows, pad)
        ((_, logits),) = begun.pieces()
        first = functional.log_softmax(logits[:, 0].float(), dim=-1).double()
        found = first[:, [label[0] for label in labels]]
        for some in _group_by_length(labels, max(1, batch_rows // len(prompts))):
            if len(labels[some[0]]) > 1:
                found[:, some] -= _label_tail_nll(model, begun.cache, len(prompts), [labels[k] for k in some], pad)
    scores: list[list[float]] = found.tolist()
    return scores


def _group_by_length(labels: Labels, count: int) -> Iterator[list[int]]:
    """Indices of labels in groups of at most `count`, those of like length together, longest first."""
    order = sorted(range(len(labels)), key=lambda k: (-len(labels[k]), k))
    return (order[start : start + count] for start in range(0, len(order), count))


def _label_tail_nll(model: Model, cache: DynamicCache, prompts: int, labels: Labels, pad: int) -> Tensor:
    """Negative log-likelihood of all but the first tokens of labels after each prompt; float64 [prompts, labels]."""
    own = select_cache_rows(cache, [row for row in range(prompts) for _ in labels])
    ids, targets = (
        padded([label[part] for label in labels], fill, model.device).repeat(prompts, 1)
        for part, fill in ((slice(None, -1), pad), (slice(1, None), MASKED))
    )
    known = targets != MASKED
    nll = ForwardPass(model, ids, (0, ids.shape[1]), cache=own).nll(torch.where(known, targets, pad)).double()
    return torch.where(known, nll, 0.0).sum(dim=1).view(prompts, len(labels))


def _score_labels_without_cache(
    model: Model, prompts: Sequence[Sequence[int]], labels: Labels, batch_rows: int, pad: int
) -> list[list[float]]:
    pairs = [(prompt, labels[k]) for prompt in prompts for k in range(len(labels))]
    found: list[float] = []
    for start in range(0, len(pairs), batch_rows):
        some = pairs[start : start + batch_rows]
        ids = [[*prompt, *label] for prompt, label in some]
        learned = [[MASKED] * len(prompt) + list(label) for prompt, label in some]
        found += [-one.nll for one in score_rows(model, ids, learned, pad)]
    return [found[start : start + len(labels)] for start in range(0, len(found), len(labels))]
