"""A teacher beside the student: what it says about a micro-batch is computed while the student learns from it.

Its layers run once, before the student's, and leave the hidden states of the learned positions. Its head runs on as
many of them at a time as the student's does (heads.py), so the logits of neither are ever there as a whole.

What it says about a row depends on the micro-batch in its last bits, as the student's own sums do, and on nothing that
was computed before: it is frozen, in evaluation mode, and keeps no cache.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from ratchet.config.train import Distill
from ratchet.data.conversation import MASKED
from ratchet.models.device import Model
from ratchet.models.distillation_loss import ALL, SOME, Lesson
from ratchet.models.logit_chunks import Deferred
from ratchet.models.loss import Sequences
from ratchet.models.teacher import LEAST, first_not_finite, most_probable, not_finite


@dataclass(frozen=True)
class Beside:
    """A teacher that is asked about each micro-batch."""

    model: Model
    tokens: int
    """Ids that it shares with the student; what its embedding has beyond them is padding."""
    settings: Distill
    path: Path
    """Where it lies, for messages."""

    def lesson(self, batch: Sequences, row_of: Callable[[int], int]) -> "Spoken":
        """Let it read a micro-batch.

        Args:
            batch: as the student gets it.
            row_of: the training row of a learned position, by its number in the micro-batch.
        """
        return Spoken(self, batch, row_of)


class Spoken:
    """What it says at the learned positions of one micro-batch; see `Lecture`."""

    def __init__(self, teacher: Beside, batch: Sequences, row_of: Callable[[int], int]) -> None:
        self._teacher, self._row_of = teacher, row_of
        places = (functional.pad(batch.labels[:, 1:], (0, 1), value=MASKED).flatten() != MASKED).nonzero().squeeze(1)
        given = {} if batch.position_ids is None else {"position_ids": batch.position_ids}
        self._nothing = torch.empty((0, teacher.tokens), device=batch.labels.device)
        self._seen = None
        if len(places):
            with torch.no_grad():
                self._seen = Deferred(teacher.model, batch.input_ids, places, given, cache=None, keep=False)

    @property
    def distributions(self) -> int:
        """See `Lecture`."""
        return ALL if self._teacher.settings.top_k is None else SOME

    def some(self, positions: slice) -> Lesson:
        """Of a piece of the positions, computed now.

        Raises:
            DataError: the teacher answers with NaN.
        """
        told, first = self._teacher.settings, int(positions.start)
        with torch.no_grad():
            numbers = self._nothing
            if self._seen is not None:
                numbers = self._seen.between(first, int(positions.stop))[:, : self._teacher.tokens].float()
            tokens = None
            if told.top_k is None:
                known = functional.log_softmax(numbers / told.temperature, dim=1).clamp_(min=LEAST)
            else:
                tokens, known = most_probable(numbers, told.temperature, told.top_k)
            if (bad := first_not_finite(known)) is not None:
                raise not_finite(self._row_of(first + bad), self._teacher.path)
        return Lesson(tokens, known, told.weight, told.temperature, told.direction)
