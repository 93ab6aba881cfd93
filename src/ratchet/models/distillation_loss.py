"""The loss of learning from a larger model: cross entropy of the answers, and the distance of two distributions.

At each learned position, with student's and teacher's distributions q and p of temperature T (softmax of logits / T):

    (1 - weight) x -log q_1(answer)  +  weight x T^2 x D,    D = KL(p || q), or KL(q || p) where `direction` is reverse

T^2 keeps the second part's gradient of one size whatever T is (Hinton et al. 2015, arXiv 1503.02531, section 2); the
reverse direction is that of MiniLLM (Gu et al. 2024, arXiv 2306.08543), on given answers, not on the student's own.

Of p either every token is known, and then q is taken over these tokens too, without the padding that a student's
embedding may have beyond them. Or the `k` most probable tokens S are, and what all others have together. Then D is of
the distributions over the k tokens and one bucket for the rest: `q_rest = 1 - sum of q over S`. By the log-sum
inequality (Cover and Thomas, theorem 2.7.1) this is never more than D of the whole, and 0 wherever that is. Cutting p
off and scaling it up to 1 instead would teach probabilities that are too large (Anshumann et al. 2025, arXiv
2503.16870).

The gradient is written by hand, since the logits of a micro-batch are never all there (heads.py). By u = logits / T it
is, of a bucket b, `g_b = q_b - p_b` (forward), `g_b = q_b (log(q_b / p_b) - D)` (reverse); a token of S is a bucket of
its own, and of the rest each token has the part of g_rest that it has of q_rest.
"""

from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

SOME, ALL = 2, 4
"""Tensors of all logits that are there at a time, for each that there is without a teacher: where it says most probable
tokens, and where it says all."""


@dataclass(frozen=True)
class Lesson:
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
        """See `Lecture`."""
        return ALL if self.tokens is None else SOME

    def some(self, positions: slice) -> "Lesson":
        """Of a piece of the positions."""
        tokens = None if self.tokens is None else self.tokens[positions]
        return replace(self, tokens=tokens, log_probabilities=self.log_probabilities[positions])


class Lecture(Protocol):
    """What a teacher says of a micro-batch: it is there (`Lesson`), or computed when a piece of it is asked for."""

    @property
    def distributions(self) -> int:
        """SOME or ALL: pieces are smaller by so much."""

    def some(self, positions: slice) -> Lesson:
        """Of a piece of the positions."""


def loss_and_gradient(logits: Tensor, targets: Tensor, lesson: Lesson) -> tuple[Tensor, Tensor]:
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
            distance = _add_of_all(gradient, numbers, lesson)
        else:
            distance = _add_of_some(gradient, numbers, lesson, lesson.tokens)
        loss = loss + share * temperature**2 * distance.sum(dtype=torch.float64)
    return loss, gradient


def _add_of_some(gradient: Tensor, numbers: Tensor, lesson: Lesson, tokens: Tensor) -> Tensor:
    """Add the distance's gradient, of some tokens and one bucket for the rest; returns the distances [positions, 1]."""
    student = functional.log_softmax(numbers / lesson.temperature, dim=-1)
    kept = student.gather(1, tokens)
    rest = student.scatter_(1, tokens, -torch.inf).logsumexp(dim=1, keepdim=True)
    own, theirs = torch.cat([kept, rest], dim=1), _whole(lesson.log_probabilities.to(numbers.dtype))
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


def _add_of_all(gradient: Tensor, numbers: Tensor, lesson: Lesson) -> Tensor:
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


def _whole(log_probabilities: Tensor) -> Tensor:
    """Probabilities that sum to 1: in 16 bits, as they are stored, they did so but to rounding."""
    return log_probabilities - log_probabilities.logsumexp(dim=1, keepdim=True)
