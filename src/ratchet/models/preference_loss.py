"""Losses of preference tuning: the model learns to prefer the chosen answer of a pair to the rejected one.

Let pi_c and pi_r be the log-probabilities, summed over tokens, that the model gives to the chosen and the rejected
answer, and let ref_c and ref_r be those of the reference, which is the model before its first step. With
d = (pi_c - ref_c) - (pi_r - ref_r), the loss of a pair is:

- `dpo` (Rafailov et al. 2023, equation 7): -log sigmoid(beta x d).
- `ipo` (Azar et al. 2023, equation 17): (d' - 1 / (2 beta))^2, where d' is d with means over tokens instead of sums.
- `orpo` (Hong et al. 2024, equation 6): the mean negative log-likelihood of the chosen answer, minus
  beta x log sigmoid(log odds_c - log odds_r), with odds = p / (1 - p), where log p is the mean over tokens. It needs no
  reference.

A loss depends on the tokens only through these sums. So the head runs once: it gives the gradient of each token's
negative log-likelihood by its hidden state, which is then multiplied by the derivative of the loss by its row's sum.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ratchet.config.train import Objective, Train
from ratchet.errors import DataError
from ratchet.models import adapters
from ratchet.models.chunked_loss import ChunkedLoss, Phase, ignore_phase
from ratchet.models.device import Model
from ratchet.models.loss import SequenceBatch, answer_nll


@dataclass(frozen=True)
class PairLosses:
    """Losses of pairs, and their derivatives by the log-probability of each row."""

    losses: Tensor
    """float64 [pairs], in nats."""
    gradient: Tensor
    """Derivative of the sum of the losses by the log-probability of each row, float64 [2 x pairs]."""
    margins: Tensor
    """float64 [pairs]: beta x d."""


def compute_pair_losses(
    log_probabilities: Tensor, reference: Tensor | None, tokens: Tensor, objective: Objective, beta: float
) -> PairLosses:
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
            log_odds = means - torch.log1p(-means.exp())
            difference = log_odds[:, 0] - log_odds[:, 1]
            losses = -means[:, 0] - beta * functional.logsigmoid(difference)
        else:
            ratios = (sums - reference).view(-1, 2)
            difference = ratios[:, 0] - ratios[:, 1]
            if objective == "ipo":
                mean_ratios = ratios / tokens.view(-1, 2)
                losses = (mean_ratios[:, 0] - mean_ratios[:, 1] - 1 / (2 * beta)).square()
            else:
                losses = -functional.logsigmoid(beta * difference)
        [gradient] = torch.autograd.grad(losses.sum(), sums)
    return PairLosses(losses.detach(), gradient, beta * difference.detach())


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

    @classmethod
    def from_settings(cls, settings: Train, model: Model) -> "Preference | None":
        """Return the objective of a training that begins with this model; None for `sft`."""
        if settings.objective == "sft":
            return None
        reference = None if settings.objective == "orpo" else ReferenceModel(model)
        return cls(settings.objective, settings.beta, reference)


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


class PreferenceLoss(AnswerLikelihoods):
    """Loss of a micro-batch of pairs, in nats, summed over the pairs.

    The rows of the batch are chosen and rejected answers in turns. Call `backward()` once; without a `scale`, no
    gradient is computed.
    """

    statistics: Tensor
    """Sums over the pairs, float64 [5], in the order of PREFERENCE_STATISTICS: beta x d, the number of pairs with
    d > 0, pi_c, pi_r, and an estimate of the divergence from the reference per token (half the mean square of the
    log-ratios; Schulman 2020). For `orpo`, d is the difference of the log odds, and the divergence is 0."""

    def __init__(
        self,
        model: Model,
        batch: SequenceBatch,
        scale: float | None,
        preference: Preference,
        phase: Phase = ignore_phase,
    ) -> None:
        self._preference = preference
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
        """Return whether parameters outside of the body are trained."""
        of_body = {id(parameter) for parameter in self.body.parameters()}
        return any(p.requires_grad and id(p) not in of_body for p in self.base.parameters())

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
        pairs = compute_pair_losses(sums, reference, tokens, self._preference.objective, self._preference.beta)
        self.value = pairs.losses.sum()
        by_pair = sums.view(-1, 2)
        self.statistics = torch.stack(
            [
                pairs.margins.sum(), (pairs.margins > 0).double().sum(), by_pair[:, 0].sum(), by_pair[:, 1].sum(),
                divergence.view(-1, 2).mean(dim=1).sum(),
            ]
        )  # fmt: skip
        return -pairs.gradient[rows] * scale

    def _rows_of_positions(self) -> Tensor:
        """Return the row of each trained position, int64, counted from 0 over the batch. Raises DataError if an answer
        has no trained token."""
        batch = self.batch
        width = batch.input_ids.shape[1]
        starts = self.positions // width if batch.position_ids is None else self._count_starts(batch.position_ids)
        rows: Tensor
        _, rows = torch.unique_consecutive(starts, return_inverse=True)
        if len(rows) and (int(rows[-1]) + 1) % 2:
            raise DataError("an answer of a pair has no trained token; run `ratchet prepare` again")
        return rows

    def _count_starts(self, position_ids: Tensor) -> Tensor:
        """Return the number of rows that begin up to each trained position."""
        return (position_ids.flatten() == 0).cumsum(0)[self.positions]
