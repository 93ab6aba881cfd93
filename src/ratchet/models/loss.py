"""Computes the losses of training, and checks that a model keeps packed rows separate.

The losses are the negative log-likelihood of answer tokens, and the distillation loss with its gradient. The
caller divides their sum by the answer tokens of the whole step, so micro-batches and ranks do not change the mean.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ratchet.data.batches import TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import SettingsError
from ratchet.models.device import Model
from ratchet.models.packed_attention import attend_within_rows

MAX_ROUNDING_DEVIATION = {torch.float32: (1e-5, 1e-3)}
"""Limits, by dtype, of two differences of a row's logits, in standard deviations of the logits.

The first is the change that other tokens in another row of the pack cause; the second is the difference between packed
and unpacked. The limits follow from measurements on small models of up to 24 layers. The eleven architectures that
keep rows separate show at most 2e-6 (0 except for mixtures of experts) and 4e-6 in float32, and 0 and 0.04 in bfloat16.
The seven that mix rows (recurrent, hybrid, without position ids) show at least 2e-4 and 0.018.
"""
MAX_ROUNDING_DEVIATION_16_BIT = (5e-3, 0.1)
"""The same limits for bfloat16 and float16."""

TOP_K_TENSORS, FULL_TENSORS = 2, 4
"""Number of tensors of the logits' size that exist at a time, relative to training without a teacher: if the teacher's
probabilities are known for its most probable tokens only, and if they are known for all tokens."""


@dataclass(frozen=True)
class SequenceBatch:
    """A micro-batch: int64 tensors [sequences, longest], padded on the right."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None
    """None if every sequence of the batch holds one row."""
    is_desirable: Tensor | None = None
    """Whether the answer of each row is desirable, bool [rows]; None for rows without this label."""

    @classmethod
    def from_sequences(
        cls, rows: TokenRows, sequences: Sequence[Sequence[int]], device: torch.device
    ) -> "SequenceBatch":
        """Build a batch on a device from sequences, each given as the indices of its rows."""
        batch = rows.pad(sequences)
        packed = any(len(sequence) > 1 for sequence in sequences)
        labels = None if rows.is_desirable is None else rows.is_desirable[[row for s in sequences for row in s]]
        return cls(
            torch.from_numpy(batch.input_ids).to(device),
            torch.from_numpy(batch.labels).to(device),
            torch.from_numpy(batch.position_ids).to(device) if packed else None,
            None if labels is None else torch.from_numpy(labels).to(device),
        )


def pad_rows(rows: Sequence[Sequence[int]], fill: int, device: torch.device) -> Tensor:
    """Pad rows of different lengths on the right; return one tensor [rows, longest]."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], device=device)


def answer_nll(model: Model, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Compute the negative log-likelihood in nats of each label, [sequences, positions - 1]; 0 where masked.

    No attention mask is needed: sequences are padded on the right, and causal attention does not see later positions.
    `position_ids` that restart at 0 separate the rows of a pack. Logits are computed only for
    columns with at least one label, never for all positions.
    """
    targets = labels[:, 1:]
    columns = (targets != IGNORE_INDEX).any(dim=0).nonzero().squeeze(1)
    logits = _compute_column_logits(model, input_ids, position_ids, columns)
    column_targets = targets[:, columns]
    column_nll = functional.cross_entropy(
        logits.float().flatten(0, 1), column_targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
    )
    nll = torch.zeros(targets.shape, dtype=column_nll.dtype, device=targets.device)
    return nll.index_copy(1, columns, column_nll.view(column_targets.shape))


def compute_logits(model: Model, input_ids: Tensor, position_ids: Tensor | None, **options: Tensor) -> Tensor:
    """Run a forward pass, in which packs are read row by row, and return its logits. `options` go to the model."""
    # transformers detects packs only without mask and cache (masking_utils, 5.23).
    inputs = options if position_ids is None else {"position_ids": position_ids, **options}
    with attend_within_rows(model, input_ids, position_ids):
        logits: Tensor = model(input_ids=input_ids, use_cache=False, **inputs).logits
    return logits


def _compute_column_logits(model: Model, input_ids: Tensor, position_ids: Tensor | None, columns: Tensor) -> Tensor:
    """Return logits [sequences, columns, vocabulary]."""
    if "logits_to_keep" in _forward_parameter_names(model):
        return compute_logits(model, input_ids, position_ids, logits_to_keep=columns)
    return compute_logits(model, input_ids, position_ids)[:, columns]


def _forward_parameter_names(model: Model) -> set[str]:
    forward = (model.get_base_model() if hasattr(model, "get_base_model") else model).forward
    return set(inspect.signature(forward).parameters)


def require_packing_isolation(model: Model, rows: TokenRows, pack: Sequence[int], device: torch.device) -> None:
    """Check on a real pack that the model keeps its rows separate. Draws no random numbers and changes nothing.

    Recurrent layers and some kinds of attention carry one row into the next. So the check replaces the tokens of one
    row, and requires that the logits of the other rows do not change. It also requires that a row has the same logits
    packed and unpacked. Raises SettingsError if the model mixes rows, or does not accept position ids.
    """
    template = "train.batching: packed, but this model {}; set by_length"
    if "position_ids" not in _forward_parameter_names(model):
        raise SettingsError(
            template.format("does not accept position ids and would read the rows of a pack as one text")
        )
    was_training = model.training
    model.eval()
    with torch.no_grad():
        batch = SequenceBatch.from_sequences(rows, [pack], device)
        logits = _trained_logits(model, batch)
        last = rows.count_tokens(pack[:-1])
        changed_first = _trained_logits(model, _replace_tokens(batch, 0, rows.count_tokens(pack[:1])))
        changed_last = _trained_logits(model, _replace_tokens(batch, last, batch.input_ids.shape[1]))
        trained_in_first, trained_before_last = rows.count_trained(pack[:1]), rows.count_trained(pack[:-1])
        influence = _greatest_deviation(logits[trained_in_first:], changed_first[trained_in_first:])
        # In a causal model the last row cannot influence earlier rows, so this change is noise: rounding in an expert
        # depends on how many tokens the expert processes.
        noise = _greatest_deviation(logits[:trained_before_last], changed_last[:trained_before_last])
        deviations, start = [0.0], 0
        for row in pack:
            unpacked = _trained_logits(model, SequenceBatch.from_sequences(rows, [[row]], device)).float()
            if len(unpacked):
                difference = (logits[start : start + len(unpacked)].float() - unpacked).square().mean().sqrt()
                deviations.append(float(difference / unpacked.std()))
            start += len(unpacked)
        distance = float(torch.tensor(deviations).max())  # nan stays nan, unlike with Python's max
    model.train(was_training)
    max_influence, max_distance = MAX_ROUNDING_DEVIATION.get(logits.dtype, MAX_ROUNDING_DEVIATION_16_BIT)
    if not influence <= max(max_influence, 4 * noise):
        text = (
            f"mixes the rows of a pack: other tokens in the first of {len(pack)} rows change the logits of later rows"
        )
        raise SettingsError(template.format(f"{text} by {influence:.2g} standard deviations"))
    if not distance <= max_distance:
        text = f"computes a row differently in a pack: logits differ by {distance:.2g} standard deviations"
        raise SettingsError(template.format(f"{text}, expected at most {max_distance:g}"))


def _replace_tokens(batch: SequenceBatch, start: int, stop: int) -> SequenceBatch:
    input_ids = batch.input_ids.clone()
    span = input_ids[:, start:stop]
    span += torch.where(span > 0, -1, 1)
    return replace(batch, input_ids=input_ids)


def _greatest_deviation(logits: Tensor, changed: Tensor) -> float:
    """Return the greatest difference, in standard deviations of the logits; 0 if there are no logits."""
    if not logits.numel():
        return 0.0
    return float((logits.float() - changed.float()).abs().max() / logits.float().std())


def _trained_logits(model: Model, batch: SequenceBatch) -> Tensor:
    """Return logits [trained positions, vocabulary] of a single sequence."""
    columns = (batch.labels[0, 1:] != IGNORE_INDEX).nonzero().squeeze(1)
    return _compute_column_logits(model, batch.input_ids, batch.position_ids, columns)[0]


# Distillation loss: cross entropy of the answers, and the divergence between student and teacher.
#
# Let q and p be the student's and the teacher's distributions at temperature T. The loss at each trained position is
#
#     (1 - weight) x -log q_1(answer)  +  weight x T^2 x D,    D = KL(p || q), or KL(q || p) if `direction` is reverse
#
# T^2 makes the size of the second part's gradient independent of T (Hinton et al. 2015, section 2). The reverse
# direction is that of MiniLLM (Gu et al. 2024), but on the answers of the data.
#
# If p is known for every token, q is normalized over the same tokens, which excludes padding in the student's
# embedding. If p is known only for the set S of the `k` most probable tokens, and as a total for the rest, D is
# computed over these k tokens and one bucket for the rest. By the log-sum inequality the result is at most the full D,
# and 0 wherever the full D is 0. To truncate p and rescale it to 1 would teach probabilities that are too large
# (Anshumann et al. 2025).
#
# The gradient is computed by hand, because the logits of a micro-batch never exist at once (chunked_loss.py). For a
# bucket b, the gradient with respect to u = logits / T is `g_b = q_b - p_b` (forward) or
# `g_b = q_b (log(q_b / p_b) - D)` (reverse). Each token of S is a bucket. A token of the rest has the same share of
# g_rest as of q_rest.


@dataclass(frozen=True)
class StoredTeacherTargets:
    """Teacher distributions at the trained positions of a micro-batch, row after row, and their weight in the loss."""

    tokens: Tensor | None
    """int64 [positions, k], unique per position. None: all tokens, ordered by id."""
    log_probabilities: Tensor
    """Log-probabilities at the temperature, float [positions, k + 1]: those of `tokens`, then that of all other tokens
    together. If `tokens` is None, the shape is [positions, tokens of the teacher]."""
    weight: float
    temperature: float
    direction: Literal["forward", "reverse"]

    @property
    def distributions(self) -> int:
        """See `TeacherTargets`."""
        return FULL_TENSORS if self.tokens is None else TOP_K_TENSORS

    def select(self, positions: slice) -> "StoredTeacherTargets":
        """Return the targets of a range of positions."""
        tokens = None if self.tokens is None else self.tokens[positions]
        return replace(self, tokens=tokens, log_probabilities=self.log_probabilities[positions])


class TeacherTargets(Protocol):
    """Teacher distributions of a micro-batch, stored (`StoredTeacherTargets`) or computed on request."""

    @property
    def distributions(self) -> int:
        """TOP_K_TENSORS or FULL_TENSORS; the size of a chunk is divided by this number."""

    def select(self, positions: slice) -> StoredTeacherTargets:
        """Return the targets of a range of positions."""


def compute_loss_and_gradient(
    logits: Tensor, targets: Tensor, teacher_targets: StoredTeacherTargets
) -> tuple[Tensor, Tensor]:
    """Return the loss summed over positions, in nats (float64), and its gradient by the logits.

    The gradient has dtype float32, or float64 if the logits have.

    Args:
        logits: student logits [positions, vocabulary]; the vocabulary may have tokens that the teacher lacks.
        targets: int64 [positions]: the tokens of the answer.
    """
    with torch.no_grad():
        logits_float = logits if logits.dtype == torch.float64 else logits.float()
        weight, temperature = teacher_targets.weight, teacher_targets.temperature
        log_probabilities = functional.log_softmax(logits_float, dim=-1)
        loss = -(1 - weight) * log_probabilities.gather(1, targets.unsqueeze(1)).sum(dtype=torch.float64)
        gradient = log_probabilities.exp_()  # in place, to save a tensor of this size
        gradient[torch.arange(len(targets), device=targets.device), targets] -= 1
        gradient.mul_(1 - weight)

        if teacher_targets.tokens is None:
            distance = _add_full_gradient(gradient, logits_float, teacher_targets)
        else:
            distance = _add_top_k_gradient(gradient, logits_float, teacher_targets, teacher_targets.tokens)
        loss = loss + weight * temperature**2 * distance.sum(dtype=torch.float64)
    return loss, gradient


def _add_top_k_gradient(
    gradient: Tensor, logits: Tensor, teacher_targets: StoredTeacherTargets, tokens: Tensor
) -> Tensor:
    """Add the divergence's gradient for k tokens and a bucket for the rest; return the divergences [positions, 1]."""
    student = functional.log_softmax(logits / teacher_targets.temperature, dim=-1)
    top_k = student.gather(1, tokens)
    rest = student.scatter_(1, tokens, -torch.inf).logsumexp(dim=1, keepdim=True)
    student_log = torch.cat([top_k, rest], dim=1)
    teacher_log = teacher_targets.log_probabilities.to(logits.dtype)
    teacher_log = teacher_log - teacher_log.logsumexp(dim=1, keepdim=True)  # stored 16-bit values have rounding errors
    if teacher_targets.direction == "forward":
        distance = (teacher_log.exp() * (teacher_log - student_log)).sum(dim=1, keepdim=True)
        bucket_gradient = student_log.exp() - teacher_log.exp()
    else:
        terms = student_log - teacher_log
        distance = (student_log.exp() * terms).sum(dim=1, keepdim=True)
        bucket_gradient = student_log.exp() * (terms - distance)
    bucket_gradient *= teacher_targets.weight * teacher_targets.temperature  # T^2, times 1 / T from u = logits / T
    # Each token of the rest gets its share of the bucket. Tokens of S are -inf in `student`, so their share is 0.
    gradient += student.sub_(rest).exp_().mul_(bucket_gradient[:, -1:])
    # Tokens are unique, so no sum depends on the order in which a GPU adds.
    gradient.scatter_(1, tokens, gradient.gather(1, tokens) + bucket_gradient[:, :-1])
    return distance


def _add_full_gradient(gradient: Tensor, logits: Tensor, teacher_targets: StoredTeacherTargets) -> Tensor:
    """Add the divergence's gradient for all tokens of the teacher, in place; return the divergences [positions, 1]."""
    teacher_log = teacher_targets.log_probabilities
    student_log = functional.log_softmax(logits[:, : teacher_log.shape[1]] / teacher_targets.temperature, dim=-1)
    difference = student_log - teacher_log
    student_log.exp_()
    if teacher_targets.direction == "forward":
        probabilities = teacher_log.exp()
        distance = -difference.mul_(probabilities).sum(dim=1, keepdim=True)
        token_gradient = student_log.sub_(probabilities)
    else:
        distance = (student_log * difference).sum(dim=1, keepdim=True)
        token_gradient = student_log.mul_(difference.sub_(distance))
    gradient[:, : teacher_log.shape[1]].add_(token_gradient, alpha=teacher_targets.weight * teacher_targets.temperature)
    return distance
