"""Loss on answer tokens: logits are computed only where they are learned from, and rows of a pack are kept apart."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ratchet.data.batches import TokenRows
from ratchet.data.conversation import MASKED
from ratchet.errors import SettingsError
from ratchet.models.loading import Model

ROUNDING = {torch.float32: (1e-5, 1e-3)}
"""How far logits of a row may differ for the company in its pack, and between pack and alone, by their type.

Both in standard deviations of the logits. Measured on small models of up to 24 layers: the eleven architectures that
keep rows apart show at most 2e-6 (0 but for mixtures of experts) and 4e-6 in float32, 0 and 0.04 in bfloat16; the seven
that mix them (recurrent, hybrid, without position ids) show company of at least 2e-4 and 0.018.
"""
ROUNDING_OF_16_BITS = (5e-3, 0.1)
"""The same for bfloat16 and float16."""


@dataclass(frozen=True)
class SequenceBatch:
    """A micro-batch: int64 tensors of [sequences, longest], filled on the right."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None
    """Only where a sequence holds several rows."""

    @classmethod
    def of(cls, rows: TokenRows, sequences: Sequence[Sequence[int]], device: torch.device) -> "SequenceBatch":
        """The sequences (each the indices of its rows) on a device."""
        batch = rows.padded(sequences)
        packed = any(len(sequence) > 1 for sequence in sequences)
        return cls(
            torch.from_numpy(batch.input_ids).to(device),
            torch.from_numpy(batch.labels).to(device),
            torch.from_numpy(batch.position_ids).to(device) if packed else None,
        )


def pad_rows(rows: Sequence[Sequence[int]], fill: int, device: torch.device) -> Tensor:
    """Rows of different length as one [rows, longest] tensor, filled on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], device=device)


def answer_nll(model: Model, input_ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
    """Negative log-likelihood in nats of each label, [sequences, positions - 1]; 0 where masked.

    No attention mask is needed: sequences are filled on the right, where a causal model's positions do not look.
    `position_ids` that begin again at 0 tell transformers to keep the rows of a pack apart.
    Logits are computed for the columns in which any sequence is learned from, never for the whole batch x vocabulary.
    """
    targets = labels[:, 1:]
    columns = (targets != MASKED).any(dim=0).nonzero().squeeze(1)
    logits = _compute_column_logits(model, input_ids, position_ids, columns)
    chosen = targets[:, columns]
    nll_of_columns = functional.cross_entropy(
        logits.float().flatten(0, 1), chosen.flatten(), ignore_index=MASKED, reduction="none"
    )
    nll = torch.zeros(targets.shape, dtype=nll_of_columns.dtype, device=targets.device)
    return nll.index_copy(1, columns, nll_of_columns.view(chosen.shape))


def forward_inputs(input_ids: Tensor, position_ids: Tensor | None) -> dict[str, Tensor]:
    """What a model is given, by its words for it."""
    # transformers looks for packs only where there is neither a mask nor a cache (masking_utils, 5.23).
    return {"input_ids": input_ids} | ({} if position_ids is None else {"position_ids": position_ids})


def compute_all_logits(model: Model, batch: SequenceBatch) -> Tensor:
    """Logits [sequences, positions, vocabulary], of every position."""
    logits: Tensor = model(**forward_inputs(batch.input_ids, batch.position_ids), use_cache=False).logits
    return logits


def _compute_column_logits(model: Model, input_ids: Tensor, position_ids: Tensor | None, columns: Tensor) -> Tensor:
    """Logits [sequences, columns, vocabulary]."""
    inputs = forward_inputs(input_ids, position_ids)
    if "logits_to_keep" in _forward_parameter_names(model):
        logits: Tensor = model(**inputs, logits_to_keep=columns, use_cache=False).logits
    else:
        logits = model(**inputs, use_cache=False).logits[:, columns]
    return logits


def _forward_parameter_names(model: Model) -> set[str]:
    """Names of what the model's forward pass takes."""
    forward = (model.get_base_model() if hasattr(model, "get_base_model") else model).forward
    return set(inspect.signature(forward).parameters)


def require_packing_isolation(model: Model, rows: TokenRows, pack: Sequence[int], device: torch.device) -> None:
    """Make sure on a real pack that the model keeps its rows apart. Draws no random number, changes nothing.

    Models differ: recurrent layers, or attention of another kind, may carry one row into the next. So other tokens in
    one row must not move the logits of the others, and the pack's logits must be those of its rows alone.

    Raises:
        SettingsError: the model mixes rows, or takes no position ids.
    """
    refusal = "train.batching: packed, but this model {}; set by_length"
    if "position_ids" not in _forward_parameter_names(model):
        raise SettingsError(refusal.format("takes no position ids and would read the rows of a pack as one text"))
    was_training = model.training
    model.eval()
    with torch.no_grad():
        batch = SequenceBatch.of(rows, [pack], device)
        logits = _learned_logits(model, batch)
        influence, noise = _cross_row_influence(model, batch, logits, rows, pack)
        distance = _deviation_from_unpacked(model, logits, rows, pack)
    model.train(was_training)
    of_company, of_packing = ROUNDING.get(logits.dtype, ROUNDING_OF_16_BITS)
    if not influence <= max(of_company, 4 * noise):
        text = (
            f"mixes the rows of a pack: other tokens in the first of {len(pack)} rows move the logits of those after it"
        )
        raise SettingsError(refusal.format(f"{text} by {influence:.2g} standard deviations"))
    if not distance <= of_packing:
        text = f"reads a row in a pack otherwise than alone: logits differ by {distance:.2g} standard deviations"
        raise SettingsError(refusal.format(f"{text}, where {of_packing:g} would be rounding"))


def _cross_row_influence(
    model: Model, batch: SequenceBatch, logits: Tensor, rows: TokenRows, pack: Sequence[int]
) -> tuple[float, float]:
    """Greatest change of the later rows' logits by the first row's tokens, and of the earlier rows' by the last row's.

    No causal model lets the last row change anything: that figure is noise (experts round by how many tokens they get).
    """
    first, last = rows.tokens(pack[:1]), rows.tokens(pack[:-1])
    learned_first, learned_last = rows.trained(pack[:1]), rows.trained(pack[:-1])
    moved = _learned_logits(model, _replace_tokens(batch, 0, first))
    influence = _greatest_deviation(logits[learned_first:], moved[learned_first:])
    moved = _learned_logits(model, _replace_tokens(batch, last, batch.input_ids.shape[1]))
    return influence, _greatest_deviation(logits[:learned_last], moved[:learned_last])


def _replace_tokens(batch: SequenceBatch, start: int, stop: int) -> SequenceBatch:
    input_ids = batch.input_ids.clone()
    span = input_ids[:, start:stop]
    span += torch.where(span > 0, -1, 1)
    return replace(batch, input_ids=input_ids)


def _greatest_deviation(logits: Tensor, others: Tensor) -> float:
    """Greatest difference in standard deviations of the logits; 0 where there are none."""
    if not logits.numel():
        return 0.0
    return float((logits.float() - others.float()).abs().max() / logits.float().std())


def _deviation_from_unpacked(model: Model, logits: Tensor, rows: TokenRows, pack: Sequence[int]) -> float:
    """Greatest root mean square difference of a row's logits in the pack from those alone, in standard deviations."""
    found, start = [0.0], 0
    for row in pack:
        alone = _learned_logits(model, SequenceBatch.of(rows, [[row]], logits.device)).float()
        if len(alone):
            difference = (logits[start : start + len(alone)].float() - alone).square().mean().sqrt()
            found.append(float(difference / alone.std()))
        start += len(alone)
    return float(torch.tensor(found).max())  # nan stays nan, unlike with Python's max


def _learned_logits(model: Model, batch: SequenceBatch) -> Tensor:
    """Logits [positions that are learned from, vocabulary] of a single sequence."""
    columns = (batch.labels[0, 1:] != MASKED).nonzero().squeeze(1)
    return _compute_column_logits(model, batch.input_ids, batch.position_ids, columns)[0]


# The loss of learning from a larger model: cross entropy of the answers, and the distance of two distributions.
#
# At each learned position, with student's and teacher's distributions q and p of temperature T (softmax of logits /
# T):
#
#     (1 - weight) x -log q_1(answer)  +  weight x T^2 x D,    D = KL(p || q), or KL(q || p) where `direction` is
# reverse
#
# T^2 keeps the second part's gradient of one size whatever T is (Hinton et al. 2015, arXiv 1503.02531, section 2); the
# reverse direction is that of MiniLLM (Gu et al. 2024, arXiv 2306.08543), on given answers, not on the student's own.
#
# Of p either every token is known, and then q is taken over these tokens too, without the padding that a student's
# embedding may have beyond them. Or the `k` most probable tokens S are, and what all others have together. Then D is
# of
# the distributions over the k tokens and one bucket for the rest: `q_rest = 1 - sum of q over S`. By the log-sum
# inequality (Cover and Thomas, theorem 2.7.1) this is never more than D of the whole, and 0 wherever that is. Cutting
# p
# off and scaling it up to 1 instead would teach probabilities that are too large (Anshumann et al. 2025, arXiv
# 2503.16870).
#
# The gradient is written by hand, since the logits of a micro-batch are never all there (heads.py). By u = logits / T
# it
# is, of a bucket b, `g_b = q_b - p_b` (forward), `g_b = q_b (log(q_b / p_b) - D)` (reverse); a token of S is a bucket
# of
# its own, and of the rest each token has the part of g_rest that it has of q_rest.

SOME, ALL = 2, 4
"""Tensors of all logits that are there at a time, for each that there is without a teacher: where it says most probable
tokens, and where it says all."""


@dataclass(frozen=True)
class StoredTeacherTargets:
    """What a teacher says at the learned positions of a micro-batch, row after row, and how much it counts."""

    tokens: Tensor | None
    """int64 [positions, k]: each once in a position. None: every token, in the order of their ids."""
    log_probabilities: Tensor
    """float [positions, k + 1], at the temperature: of the tokens, and last of all others together. Of every token:
    [positions, tokens]."""
    weight: float
    temperature: float
    direction: Literal["forward", "reverse"]

    @property
    def distributions(self) -> int:
        """See `TeacherTargets`."""
        return ALL if self.tokens is None else SOME

    def some(self, positions: slice) -> "StoredTeacherTargets":
        """Of a piece of the positions."""
        tokens = None if self.tokens is None else self.tokens[positions]
        return replace(self, tokens=tokens, log_probabilities=self.log_probabilities[positions])


class TeacherTargets(Protocol):
    """What a teacher says of a micro-batch.

    It is there (`StoredTeacherTargets`), or it is computed when a caller asks for a piece of it.
    """

    @property
    def distributions(self) -> int:
        """SOME or ALL: pieces are smaller by so much."""

    def some(self, positions: slice) -> StoredTeacherTargets:
        """Of a piece of the positions."""


def compute_loss_and_gradient(logits: Tensor, targets: Tensor, lesson: StoredTeacherTargets) -> tuple[Tensor, Tensor]:
    """Sum over positions, in nats (float64), and its gradient by the logits, in float32 (float64 where they are).

    Args:
        logits: [positions, vocabulary], of the student; the vocabulary may have tokens that the teacher never names.
        targets: int64 [positions]: the token of the answer.
        lesson: of the same positions.
    """
    with torch.no_grad():
        numbers = logits if logits.dtype == torch.float64 else logits.float()
        share, temperature = lesson.weight, lesson.temperature
        gradient = functional.log_softmax(numbers, dim=-1)
        loss = -(1 - share) * gradient.gather(1, targets.unsqueeze(1)).sum(dtype=torch.float64)
        gradient = gradient.exp_()
        gradient[torch.arange(len(targets), device=targets.device), targets] -= 1
        gradient.mul_(1 - share)

        if lesson.tokens is None:
            distance = _add_full_gradient(gradient, numbers, lesson)
        else:
            distance = _add_top_k_gradient(gradient, numbers, lesson, lesson.tokens)
        loss = loss + share * temperature**2 * distance.sum(dtype=torch.float64)
    return loss, gradient


def _add_top_k_gradient(gradient: Tensor, numbers: Tensor, lesson: StoredTeacherTargets, tokens: Tensor) -> Tensor:
    """Add the distance's gradient, of some tokens and one bucket for the rest; returns the distances [positions, 1]."""
    student = functional.log_softmax(numbers / lesson.temperature, dim=-1)
    kept = student.gather(1, tokens)
    rest = student.scatter_(1, tokens, -torch.inf).logsumexp(dim=1, keepdim=True)
    own, theirs = torch.cat([kept, rest], dim=1), _normalize_probabilities(lesson.log_probabilities.to(numbers.dtype))
    if lesson.direction == "forward":
        distance = (theirs.exp() * (theirs - own)).sum(dim=1, keepdim=True)
        by_bucket = own.exp() - theirs.exp()
    else:
        terms = own - theirs
        distance = (own.exp() * terms).sum(dim=1, keepdim=True)
        by_bucket = own.exp() * (terms - distance)
    by_bucket *= lesson.weight * lesson.temperature  # T^2, and 1 / T of u = logits / T
    # A token of the rest: its part of them. Those of S are -inf here, so 0.
    gradient += student.sub_(rest).exp_().mul_(by_bucket[:, -1:])
    # Each token is there once, so nothing is added up in an order that a GPU would choose.
    gradient.scatter_(1, tokens, gradient.gather(1, tokens) + by_bucket[:, :-1])
    return distance


def _add_full_gradient(gradient: Tensor, numbers: Tensor, lesson: StoredTeacherTargets) -> Tensor:
    """The same of every token that the teacher knows; few tensors of their size are there at a time."""
    theirs = lesson.log_probabilities
    own = functional.log_softmax(numbers[:, : theirs.shape[1]] / lesson.temperature, dim=-1)
    difference = own - theirs
    own.exp_()
    if lesson.direction == "forward":
        probabilities = theirs.exp()
        distance = -difference.mul_(probabilities).sum(dim=1, keepdim=True)
        by_token = own.sub_(probabilities)
    else:
        distance = (own * difference).sum(dim=1, keepdim=True)
        by_token = own.mul_(difference.sub_(distance))
    gradient[:, : theirs.shape[1]].add_(by_token, alpha=lesson.weight * lesson.temperature)
    return distance


def _normalize_probabilities(log_probabilities: Tensor) -> Tensor:
    """Probabilities that sum to 1: in 16 bits, as they are stored, they did so but to rounding."""
    return log_probabilities - log_probabilities.logsumexp(dim=1, keepdim=True)
