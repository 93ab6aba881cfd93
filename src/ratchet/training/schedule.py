"""Learning rate and random streams as pure functions of the step: nothing of either is saved in a checkpoint."""

import math

import torch

from ratchet.config.train import Train
from ratchet.storage import digests


def learning_rate(step: int, steps: int, settings: Train) -> float:
    """Rate of optimizer step `step` (from 0) of `steps`: linear warm-up to the peak, then the chosen decay to zero."""
    warmup = math.ceil(settings.warmup * steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    if settings.schedule == "constant":
        return settings.learning_rate
    done = (step - warmup) / max(1, steps - warmup)
    if settings.schedule == "linear":
        return settings.learning_rate * (1.0 - done)
    return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Start the random stream (dropout) of one optimizer step, on every device of a rank.

    A stream a step, instead of one for the run: resuming needs no saved generator state, and nothing that draws
    numbers in between (validation, a retried step) can shift what later steps draw.
    """
    key = [seed, step, rank] if rank else [seed, step]
    torch.manual_seed(int(digests.of_json(key)[:15], 16))
