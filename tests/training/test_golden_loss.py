"""Comparing losses with transformers' Trainer, on the same rows in the same order, detects another normalisation.

The comparison runs fifty steps in float32 from the same adapter with the same learning rates. Its tolerance allows
for sums that are rounded in another order; another normalisation exceeds ten times the tolerance.
tests/proofs/test_golden_losses.py compares the losses with those of Trainer and TRL.
"""

from pathlib import Path
from typing import Any

from transformers import Trainer

from golden_loss_cases import (
    TOLERANCE,
    both,
    greatest_difference,
    trainer,
)


class MeanOfMeans(Trainer):
    """Trainer that normalises each micro-batch by its own tokens, as Trainer did until 4.45."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return super().compute_loss(model, inputs) / self.args.gradient_accumulation_steps


def test_another_normalisation_would_be_seen(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, 8, 2, trainer, kind=MeanOfMeans)
    assert greatest_difference(ours, theirs) > 10 * TOLERANCE
