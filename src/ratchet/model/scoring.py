"""Score a model on prepared rows: likelihood of the true answers, and the answers it gives itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ratchet.data.batches import micro_batches
from ratchet.data.conversation import MASKED
from ratchet.model.loss import answer_nll, pad
from ratchet.model.quantized import Model


@dataclass(frozen=True)
class Likelihood:
    """How likely the true answer of one row is."""

    nll: float
    """Negative log-likelihood of all answer tokens together, in nats."""
    tokens: int


def likelihoods(
    model: Model, input_ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], batch_rows: int
) -> list[Likelihood]:
    """Likelihood of each row's answer, in the order of the rows; `batch_rows` rows are computed at once."""
    found: dict[int, Likelihood] = {}
    with torch.no_grad():
        for rows in micro_batches(list(range(len(input_ids))), [len(ids) for ids in input_ids], batch_rows):
            ids = pad([input_ids[i] for i in rows], 0, model.device)
            targets = pad([labels[i] for i in rows], MASKED, model.device)
            sums = answer_nll(model, ids, targets).double().sum(dim=1).tolist()
            for row, nll in zip(rows, sums, strict=True):
                found[row] = Likelihood(nll, sum(label != MASKED for label in labels[row][1:]))
    return [found[row] for row in range(len(input_ids))]


def end_tokens(model: Model, tokenizer: Any, end_of_turn: str) -> list[int]:
    """Ids that end an answer: what was learned as end of turn, and what the model's own files name.

    They may differ: a template's end-of-turn token need not be the tokenizer's `eos_token`.
    """
    named = model.generation_config.eos_token_id if model.generation_config else None
    known = tokenizer.get_vocab()
    ids = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named]), known.get(end_of_turn)}
    return sorted(one for one in ids if one is not None)


def answers(
    model: Model, tokenizer: Any, prompts: Sequence[Sequence[int]], ends: Sequence[int], max_new_tokens: int,
    batch_rows: int,
) -> list[str]:  # fmt: skip
    """Greedy answer to each prompt (token ids that end where the assistant begins), in their order, stripped.

    An answer ends with one of the tokens `ends` or after `max_new_tokens`.
    """
    found: dict[int, str] = {}
    for rows in micro_batches(list(range(len(prompts))), [len(ids) for ids in prompts], batch_rows):
        longest = max(len(prompts[i]) for i in rows)
        fill = [longest - len(prompts[i]) for i in rows]  # on the left: all answers begin in the same column
        ids = [[tokenizer.pad_token_id] * n + list(prompts[i]) for n, i in zip(fill, rows, strict=True)]
        mask = [[0] * n + [1] * (longest - n) for n in fill]
        with torch.no_grad():
            output = model.generate(
                input_ids=torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=list(ends),
            )
        for row, tokens in zip(rows, output[:, longest:].tolist(), strict=True):
            found[row] = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return [found[row] for row in range(len(prompts))]


@dataclass(frozen=True)
class LogitDifference:
    """Two models' logits on the same rows."""

    greatest: float
    mean: float
    positions: int
    agreeing: int
    """Answer positions at which both find the same token most likely."""
    answer_positions: int


def compare_logits(
    reference: Sequence[torch.Tensor], model: Model, input_ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]
) -> LogitDifference:
    """Compare a model's logits with `reference` (from `logits_of`), row by row, without padding."""
    greatest, total, elements, positions, agreeing, answer_positions = 0.0, 0.0, 0, 0, 0, 0
    for expected, found, row_labels in zip(reference, logits_of(model, input_ids), labels, strict=True):
        difference = (expected - found).abs()
        greatest = max(greatest, float(difference.max()))
        total += float(difference.double().sum())
        elements += difference.numel()
        positions += difference.shape[0]
        learned = torch.tensor([label != MASKED for label in row_labels[1:]])
        same = expected[:-1].argmax(-1) == found[:-1].argmax(-1)
        agreeing += int((same & learned).sum())
        answer_positions += int(learned.sum())
    return LogitDifference(greatest, total / elements, positions, agreeing, answer_positions)


def logits_of(model: Model, input_ids: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [positions, vocabulary] of each row in float32, on the CPU."""
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0].float().cpu() for ids in input_ids
        ]
