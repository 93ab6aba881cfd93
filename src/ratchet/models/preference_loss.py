"""Losses of preference tuning: the model learns to prefer some answers to others.

Let pi_c and pi_r be the log-probabilities, summed over tokens, that the model gives to the chosen and the rejected
answer, and let ref_c and ref_r be those of the reference, which is the model before its first step. With
d = (pi_c - ref_c) - (pi_r - ref_r), the loss of a pair is:

- `dpo` (Rafailov et al. 2023, equation 7): -log sigmoid(beta x d).
- `ipo` (Azar et al. 2023, equation 17): (d' - 1 / (2 beta))^2, where d' is d with means over tokens instead of sums.
- `orpo` (Hong et al. 2024, equation 6): the mean negative log-likelihood of the chosen answer, minus
  beta x log sigmoid(log odds_c - log odds_r), with odds = p / (1 - p), where log p is the mean over tokens. It needs no
  reference.

`kto` (Ethayarajh et al. 2024, equations 7 and 8) has single answers that are desirable or not. The loss of an answer is
w x (1 - sigmoid(+-beta (pi - ref - z))), with + for a desirable answer and - for another one. z estimates how far the
model is from the reference: the mean of pi - ref over the prompts of the batch, each with the answer to another prompt
(`TokenRows.mismatch`); it is not negative, and has no gradient. It depends on the batch of the step (for a validation,
on all validation rows), and not on its division into micro-batches. w is 1, or more for the rarer kind of answers
(`weigh_labels`).

A loss depends on the tokens only through these sums. So the head runs once: it gives the gradient of each token's
negative log-likelihood by its hidden state, which is then multiplied by the derivative of the loss by its row's sum.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor
from torch.nn import functional

from ratchet.config.train import Objective, Train
from ratchet.data.batches import TokenRows
from ratchet.errors import DataError
from ratchet.models import adapters
from ratchet.models.chunked_loss import ChunkedLoss, Phase, ignore_phase
from ratchet.models.device import Model
from ratchet.models.loss import SequenceBatch, answer_nll

MAX_DESIRABLE_RATIO = 4 / 3
"""Largest ratio of the weights of all desirable to all undesirable answers; the smallest is 1 (Ethayarajh et al. 2024,
equation 9)."""
MIN_MEAN_NLL = 1e-7
"""Lower limit of the mean negative log-likelihood, in nats per token, for the odds of `orpo`. A certain answer has 0 in
float32, and its odds are infinite."""
STATISTIC_SUMS = 8
"""Number of sums in `PreferenceLoss.statistics`."""


@dataclass(frozen=True)
class AnswerLosses:
    """Losses of pairs or of labelled answers, and their derivatives by the log-probability of each row."""

    losses: Tensor
    """float64 [pairs or rows]."""
    gradient: Tensor
    """Derivative of the sum of the losses by the log-probability of each row, float64 [rows]."""
    rewards: Tensor
    """float64 [rows]: beta x (pi - ref); for `orpo`, beta x log odds."""


def compute_pair_losses(
    log_probabilities: Tensor, reference: Tensor | None, tokens: Tensor, objective: Objective, beta: float
) -> AnswerLosses:
    """Compute the losses of pairs from the log-probabilities of their answers.

    Args:
        log_probabilities: log-probability of each answer, summed over its tokens, in nats; float64 [2 x pairs]: chosen
            and rejected in turns.
        reference: the same of the reference; None for `orpo`.
        tokens: number of tokens of each answer, [2 x pairs].
    """
    sums = log_probabilities.detach().requires_grad_()
    with torch.enable_grad():
        means = (sums / tokens).view(-1, 2)
        if reference is None:
            clamped = means.clamp(max=-MIN_MEAN_NLL)
            log_odds = clamped - torch.log(-torch.expm1(clamped))
            scores = log_odds
            difference = log_odds[:, 0] - log_odds[:, 1]
            losses = -means[:, 0] - beta * functional.logsigmoid(difference)
        else:
            scores = (sums - reference).view(-1, 2)
            difference = scores[:, 0] - scores[:, 1]
            if objective == "ipo":
                mean_ratios = scores / tokens.view(-1, 2)
                losses = (mean_ratios[:, 0] - mean_ratios[:, 1] - 1 / (2 * beta)).square()
            else:
                losses = -functional.logsigmoid(beta * difference)
        [gradient] = torch.autograd.grad(losses.sum(), sums)
    return AnswerLosses(losses.detach(), gradient, beta * scores.detach().flatten())


def compute_label_losses(
    log_probabilities: Tensor, reference: Tensor, is_desirable: Tensor, beta: float, divergence: float,
    weights: tuple[float, float],
) -> AnswerLosses:  # fmt: skip
    """Compute the losses of `kto` from the log-probabilities of answers.

    Args:
        log_probabilities: log-probability of each answer, summed over its tokens, in nats; float64 [rows].
        reference: the same of the reference.
        is_desirable: bool [rows].
        divergence: z in nats, at least 0.
        weights: weights of desirable and of undesirable answers (`weigh_labels`).
    """
    sums = log_probabilities.detach().requires_grad_()
    desirable_weight, undesirable_weight = weights
    with torch.enable_grad():
        rewards = beta * (sums - reference)
        sign = is_desirable.double() * 2 - 1
        weight = torch.where(is_desirable, desirable_weight, undesirable_weight)
        losses = weight * torch.sigmoid(-sign * (rewards - beta * divergence))
        [gradient] = torch.autograd.grad(losses.sum(), sums)
    return AnswerLosses(losses.detach(), gradient, rewards.detach())


def weigh_labels(is_desirable: NDArray[np.bool_]) -> tuple[float, float]:
    """Return the weights of desirable and of undesirable training answers: 1, or as much more for the rarer kind as the
    ratio of the sums of both needs to be between 1 and 4/3. Raises DataError if there is only one kind."""
    count, desirable = len(is_desirable), int(is_desirable.sum())
    if desirable in (0, count):
        kind, other = ("desirable", "undesirable") if desirable else ("undesirable", "desirable")
        raise DataError(
            f"train.objective: kto: all {count:,} training answers are {kind}; add {other} ones, or set train.objective"
        )
    ratio = desirable / (count - desirable)
    return max(1.0, 1 / ratio), max(1.0, ratio / MAX_DESIRABLE_RATIO)


def name_statistics(sums: Sequence[float], examples: int) -> dict[str, float]:
    """Return PREFERENCE_STATISTICS from the sums of `PreferenceLoss.statistics` over all micro-batches.

    Without any sums, there are no statistics, and a batch of labelled answers that are all of one kind lacks the
    statistics of the other kind.
    """
    hits, divergence, *by_kind = sums
    chosen, rejected = by_kind[:3], by_kind[3:]
    if not chosen[0] + rejected[0]:
        return {}
    statistics = {"reward_accuracy": hits / examples, "kl": divergence / (chosen[0] + rejected[0])}
    for kind, (count, reward, log_probability) in (("chosen", chosen), ("rejected", rejected)):
        if count:
            statistics |= {f"{kind}_reward": reward / count, f"{kind}_log_probability": log_probability / count}
    if chosen[0] and rejected[0]:
        statistics["reward_margin"] = statistics["chosen_reward"] - statistics["rejected_reward"]
    return statistics


class ReferenceModel:
    """The model before its first step, on the same base: only the trainable weights exist twice."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._parameters = [parameter for _, parameter in adapters.trainable_parameters(model)]
        self._weights = [parameter.detach().clone() for parameter in self._parameters]

    def compute_nll(self, batch: SequenceBatch) -> Tensor:
        """Return the negative log-likelihood of each trained position, float32 [positions], row after row."""
        with torch.no_grad(), self._in_place():
            return AnswerLikelihoods(self._model, batch).nll

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let the model compute with the weights of the reference, without dropout."""
        was_training = self._model.training
        self._model.eval()
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
            self._model.train(was_training)

    def _exchange(self) -> None:
        for k, parameter in enumerate(self._parameters):
            parameter.data, self._weights[k] = self._weights[k], parameter.data


@dataclass(frozen=True)
class Preference:
    """The objective of a training."""

    objective: Objective
    beta: float
    reference: ReferenceModel | None
    """None for `orpo`."""
    weights: tuple[float, float] | None = None
    """Weights of desirable and of undesirable answers; None unless the objective is `kto`."""

    @classmethod
    def from_settings(cls, settings: Train, model: Model, rows: TokenRows) -> "Preference | None":
        """Return the objective of a training that begins with this model on these rows; None for `sft`.

        Raises DataError if `kto` has only one kind of answers.
        """
        if settings.objective == "sft":
            return None
        reference = ReferenceModel(model) if settings.has_reference else None
        weights = None if rows.is_desirable is None else weigh_labels(rows.is_desirable)
        return cls(settings.objective, settings.beta, reference, weights)


class AnswerLikelihoods(ChunkedLoss):
    """A forward pass that keeps the negative log-likelihood of each trained position."""

    nll: Tensor
    """float32 [trained positions], in nats, row after row."""

    def __init__(
        self, model: Model, batch: SequenceBatch, scale: float | None = None, phase: Phase = ignore_phase
    ) -> None:
        super().__init__(model, batch, scale, None, phase)

    def _run_head(self, states: Tensor, trains_body: bool, scale: float | None) -> Tensor | None:
        self.nll = torch.zeros(len(self.positions), dtype=torch.float32, device=states.device)
        return super()._run_head(states, trains_body, scale)

    def _compute_at_once(self, scale: float | None) -> None:
        self.nll = self._compute_nll_at_once()

    def _compute_nll_at_once(self) -> Tensor:
        batch = self.batch
        with self.phase("forward"):
            nll = answer_nll(self.model, batch.input_ids, batch.labels, batch.position_ids)
        return functional.pad(nll, (0, 1)).flatten()[self.positions]

    def _add_nll(self, start: int, nll: Tensor) -> None:
        self.nll[start : start + len(nll)] = nll


class LogRatios(AnswerLikelihoods):
    """Log-ratios of model and reference of a micro-batch of answers; `value` is their sum in nats. No gradient is
    computed. Call this under torch.no_grad."""

    def __init__(self, model: Model, batch: SequenceBatch, reference: ReferenceModel, phase: Phase) -> None:
        super().__init__(model, batch, None, phase)
        with phase("forward"):
            self.value = (reference.compute_nll(batch).double() - self.nll.double()).sum()


class PreferenceLoss(AnswerLikelihoods):
    """Loss of a micro-batch of pairs or labelled answers, in nats, summed over them.

    The rows of pairs are chosen and rejected answers in turns. Call `backward()` once; without a `scale`, no gradient
    is computed.
    """

    statistics: Tensor
    """Sums over the pairs or rows, float64 [8], for `name_statistics`: the number of pairs whose chosen answer has the
    higher reward (of rows whose reward has the sign of their label), the divergence of each row, then of the chosen
    (desirable) rows and again of the rejected ones: their number, rewards, and log-probabilities.

    The divergence from the reference is, for `kto`, that in the loss, otherwise an estimate per token: half the mean
    square of the log-ratios (Schulman 2020), and 0 for `orpo`."""

    def __init__(
        self,
        model: Model,
        batch: SequenceBatch,
        scale: float | None,
        preference: Preference,
        phase: Phase = ignore_phase,
        divergence: float = 0.0,
    ) -> None:
        """`divergence` is that in the loss of `kto`."""
        self._preference, self._divergence = preference, divergence
        with phase("forward"):
            self._reference_nll = None if preference.reference is None else preference.reference.compute_nll(batch)
        self._weights: Tensor | None = None
        """Derivative of the loss by the negative log-likelihood of each position, times `scale`."""
        super().__init__(model, batch, scale, phase)

    def _run_head(self, states: Tensor, trains_body: bool, scale: float | None) -> Tensor | None:
        if scale is not None and self._trains_head():  # its gradient needs the weights, and these need the likelihoods
            with torch.no_grad():
                super()._run_head(states, False, None)
            self._weights = self._weigh_positions(scale)
            gradient = super()._run_head(states, trains_body, scale)
            self._weigh_positions(scale)
            return gradient
        gradient = super()._run_head(states, trains_body, None if scale is None else 1.0)
        weights = self._weigh_positions(scale or 1.0)
        if gradient is not None:
            gradient[self.positions] *= weights.to(gradient.dtype).unsqueeze(1)
        return gradient

    def _compute_at_once(self, scale: float | None) -> None:
        nll = self._compute_nll_at_once()
        self.nll = nll.detach()
        weights = self._weigh_positions(scale or 1.0)
        if scale is not None:
            self._backward = (nll.double() * weights).sum().backward

    def _scale_gradient(self, start: int, gradient: Tensor, scale: float) -> Tensor:
        if self._weights is None:
            return super()._scale_gradient(start, gradient, scale)
        weights = self._weights[start : start + len(gradient)]
        return gradient.mul_(weights.to(gradient.dtype).unsqueeze(1))

    def _trains_head(self) -> bool:
        """Return whether modules outside of the body use trained parameters.

        A tied head uses the trained rows of tokens that belong to the embedding, and so to the body.
        """
        of_body = {id(module) for module in self.body.modules()}
        return any(
            isinstance(module, TrainableTokensWrapper)
            or any(parameter.requires_grad for parameter in module.parameters(recurse=False))
            for module in self.base.modules()
            if id(module) not in of_body
        )

    def _weigh_positions(self, scale: float) -> Tensor:
        """Set the loss and the statistics from the likelihoods; return `scale` times the derivative of the loss by each
        position's negative log-likelihood, float64 [positions]."""
        rows = self._rows_of_positions()
        count = int(rows[-1]) + 1 if len(rows) else 0
        zeros = torch.zeros(count, dtype=torch.float64, device=rows.device)
        tokens = zeros.index_add(0, rows, torch.ones_like(rows, dtype=torch.float64))
        sums = zeros.index_add(0, rows, -self.nll.double())
        reference, divergence = None, zeros
        if self._reference_nll is not None:
            reference = zeros.index_add(0, rows, -self._reference_nll.double())
            ratios = self._reference_nll.double() - self.nll.double()
            divergence = zeros.index_add(0, rows, ratios.square() / 2) / tokens
        objective, beta, weights = self._preference.objective, self._preference.beta, self._preference.weights
        is_chosen = self.batch.is_desirable
        if is_chosen is not None and weights is not None and reference is not None:
            found = compute_label_losses(sums, reference, is_chosen, beta, self._divergence, weights)
            hits = torch.where(is_chosen, found.rewards, -found.rewards) > 0
            divergence = torch.full_like(sums, self._divergence)
        else:
            found = compute_pair_losses(sums, reference, tokens, objective, beta)
            is_chosen = torch.arange(count, device=rows.device) % 2 == 0
            hits = found.rewards[::2] > found.rewards[1::2]
        self.value = found.losses.sum()
        by_row = torch.stack([torch.ones_like(sums), found.rewards, sums])
        totals = [hits.double().sum(), divergence.sum(), *(by_row[:, kind].sum(1) for kind in (is_chosen, ~is_chosen))]
        self.statistics = torch.cat([total.reshape(-1) for total in totals])
        return -found.gradient[rows] * scale

    def _rows_of_positions(self) -> Tensor:
        """Return the row of each trained position, int64, counted from 0 over the batch. Raises DataError if an answer
        has no trained token."""
        batch, labels = self.batch, self.batch.is_desirable
        width = batch.input_ids.shape[1]
        starts = self.positions // width if batch.position_ids is None else self._count_starts(batch.position_ids)
        rows: Tensor
        _, rows = torch.unique_consecutive(starts, return_inverse=True)
        count = int(rows[-1]) + 1 if len(rows) else 0
        if count % 2 if labels is None else count != len(labels):
            raise DataError("an answer has no trained token; run `ratchet prepare` again")
        return rows

    def _count_starts(self, position_ids: Tensor) -> Tensor:
        """Return the number of rows that begin up to each trained position."""
        return (position_ids.flatten() == 0).cumsum(0)[self.positions]
