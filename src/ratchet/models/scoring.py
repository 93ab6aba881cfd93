"""Scores rows with a model: likelihood of reference answers, generated answers, and likelihoods of labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, LogitsProcessorList
from transformers.cache_utils import DynamicCache

from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models.chunked_loss import ForwardPass
from ratchet.models.decoding.token_choice import GumbelLogitsWarper
from ratchet.models.device import Model
from ratchet.models.likelihoods import is_plain_kv_cache, select_cache_rows
from ratchet.models.loss import pad_rows

Labels = Sequence[Sequence[int]]
"""Token ids of each label, including its end of turn; at least one token each."""


@dataclass(frozen=True)
class RowLikelihood:
    """Likelihood of one row's tokens in nats, each given the tokens before it. The first token has no likelihood."""

    nll: float
    """Negative log-likelihood of all answer tokens (those with a label) together."""
    tokens: int
    prompt_nll: float
    """Negative log-likelihood of all other tokens together."""
    prompt_tokens: int


def score_rows(
    model: Model, input_ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], pad_token_id: int
) -> list[RowLikelihood]:
    """Compute the likelihoods of rows in one pass, in order.

    Every token is a target, with or without a label, so one pass covers answer and prompt. No attention mask is needed,
    because rows are padded on the right, and causal attention does not see later positions. Sums are in float64.

    Args:
        labels: labels of each row; IGNORE_INDEX for tokens that do not belong to an answer.
    """
    lengths = [len(ids) for ids in input_ids]
    if max(lengths) < 2:
        return [RowLikelihood(0.0, 0, 0.0, 0) for _ in lengths]
    with torch.no_grad():
        ids = pad_rows(input_ids, pad_token_id, model.device)
        nll = ForwardPass(model, ids, (0, ids.shape[1] - 1)).nll(ids[:, 1:]).double()
        is_answer = (pad_rows(labels, IGNORE_INDEX, model.device) != IGNORE_INDEX)[:, 1:]
        is_real = torch.arange(1, ids.shape[1]) < torch.tensor(lengths).unsqueeze(1)
        is_prompt = is_real.to(model.device) & ~is_answer
        # `where` is used instead of a product with 0, because values at padding may be NaN.
        sums = [torch.where(mask, nll, 0.0).sum(dim=1).tolist() for mask in (is_answer, is_prompt)]
    counts = [mask.sum(dim=1).tolist() for mask in (is_answer, is_prompt)]
    return [RowLikelihood(*fields) for fields in zip(sums[0], counts[0], sums[1], counts[1], strict=True)]


def list_end_tokens(model: Model, tokenizer: Any, end_of_turn: str) -> list[int]:
    """Return the ids that end an answer: the trained end of turn, and those in the model's own files.

    They may differ, because a template's end-of-turn token need not be the tokenizer's `eos_token`.
    """
    model_ids = model.generation_config.eos_token_id if model.generation_config else None
    vocabulary = tokenizer.get_vocab()
    ids = {
        tokenizer.eos_token_id,
        *(model_ids if isinstance(model_ids, list) else [model_ids]),
        vocabulary.get(end_of_turn),
    }
    return sorted(token for token in ids if token is not None)


def generate(
    model: Model, prompts: Sequence[Sequence[int]], end_token_ids: Sequence[int], max_new_tokens: int,
    pad_token_id: int, sampler: GumbelLogitsWarper | None = None,
) -> list[list[int]]:  # fmt: skip
    """Generate the answers to all prompts (ids that end where the assistant's turn begins) in one batch, in order.

    An answer ends with one of `end_token_ids`, which it includes, or after `max_new_tokens`. Generation settings in a
    model's files, such as a repetition penalty, are ignored, so that all models answer in the same way.

    Args:
        sampler: adds noise to sample; None: greedy.
    """
    longest = max(map(len, prompts))
    # Padded on the left, so that all answers begin in the same column.
    ids = [[pad_token_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=pad_token_id,
        eos_token_id=list(end_token_ids),
    )
    # transformers takes all settings that a call does not pass from the model's own generation_config.
    original, base.generation_config = base.generation_config, GenerationConfig()
    try:
        with torch.no_grad():
            output = base.generate(
                input_ids=torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler] if sampler else []),
            )
    finally:
        base.generation_config = original
    answers = output[:, longest:].tolist()
    ends = [next((k + 1 for k, token in enumerate(tokens) if token in end_token_ids), None) for tokens in answers]
    return [tokens[:end] for tokens, end in zip(answers, ends, strict=True)]  # the rest is padding


def collect_logits(model: Model, input_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return logits [positions, vocabulary] of each row in float32, on the CPU."""
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0].float().cpu() for ids in input_ids
        ]


# Likelihood of each of a fixed set of labels as the complete answer. The prompt is computed once for all labels.


def score_labels(
    model: Model, prompts: Sequence[Sequence[int]], labels: Labels, batch_rows: int, pad_token_id: int
) -> list[list[float]]:
    """Return the log-probability in nats of each label as the complete answer to each prompt: [prompts][labels].

    The prompt's last logits score the first token of a label. The other tokens are scored with the prompt's key-value
    cache, `batch_rows` pairs of prompt and label at a time. Models without such a cache (recurrent models) read the
    whole prompt and label for each pair. Raises ValueError if prompts differ in length, or a prompt or label is empty.

    Args:
        prompts: token ids of each prompt; all prompts have one length, so that no padding is needed.
        pad_token_id: padding token for shorter labels, on the right.
    """
    if len(set(map(len, prompts))) != 1 or not prompts[0] or not all(labels):
        raise ValueError("score_labels: expected prompts of one length, and no empty prompt or label")
    with torch.no_grad():
        ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
        forward_pass = ForwardPass(model, ids, (ids.shape[1] - 1, ids.shape[1]), make_cache=True)
        if not is_plain_kv_cache(forward_pass.cache):
            return _score_labels_without_cache(model, prompts, labels, batch_rows, pad_token_id)
        ((_, logits),) = forward_pass.pieces()
        first = functional.log_softmax(logits[:, 0].float(), dim=-1).double()
        nats = first[:, [label[0] for label in labels]]
        # Labels of similar length are computed together, longest first.
        order = sorted(range(len(labels)), key=lambda k: (-len(labels[k]), k))
        count = max(1, batch_rows // len(prompts))
        for start in range(0, len(order), count):
            group = order[start : start + count]
            if len(labels[group[0]]) > 1:
                nats[:, group] -= _label_tail_nll(
                    model, forward_pass.cache, len(prompts), [labels[k] for k in group], pad_token_id
                )
    scores: list[list[float]] = nats.tolist()
    return scores


def _label_tail_nll(model: Model, cache: DynamicCache, prompts: int, labels: Labels, pad_token_id: int) -> Tensor:
    """Compute the negative log-likelihood of all but the first tokens of labels; float64 [prompts, labels]."""
    rows_cache = select_cache_rows(cache, [row for row in range(prompts) for _ in labels])
    ids, targets = (
        pad_rows([label[part] for label in labels], fill, model.device).repeat(prompts, 1)
        for part, fill in ((slice(None, -1), pad_token_id), (slice(1, None), IGNORE_INDEX))
    )
    is_real = targets != IGNORE_INDEX
    nll = (
        ForwardPass(model, ids, (0, ids.shape[1]), cache=rows_cache)
        .nll(torch.where(is_real, targets, pad_token_id))
        .double()
    )
    return torch.where(is_real, nll, 0.0).sum(dim=1).view(prompts, len(labels))


def _score_labels_without_cache(
    model: Model, prompts: Sequence[Sequence[int]], labels: Labels, batch_rows: int, pad_token_id: int
) -> list[list[float]]:
    pairs = [(prompt, labels[k]) for prompt in prompts for k in range(len(labels))]
    nats: list[float] = []
    for start in range(0, len(pairs), batch_rows):
        chunk = pairs[start : start + batch_rows]
        ids = [[*prompt, *label] for prompt, label in chunk]
        masked_labels = [[IGNORE_INDEX] * len(prompt) + list(label) for prompt, label in chunk]
        nats += [-row.nll for row in score_rows(model, ids, masked_labels, pad_token_id)]
    return [nats[start : start + len(labels)] for start in range(0, len(nats), len(labels))]
