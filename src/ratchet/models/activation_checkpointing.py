"""Activation checkpointing: what the backward pass needs of a block is computed again instead of kept."""

from ratchet.models.device import Model


def enable(model: Model) -> None:
    """Recompute from now on; the same bits come of it, dropout included, for its random numbers are drawn again."""
    model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})


def is_enabled(model: Model) -> bool:
    """Whether blocks are recomputed."""
    return bool(model.get_base_model().is_activation_checkpointing)
