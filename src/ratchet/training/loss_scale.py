"""Dynamic loss scaling for float16, so that small gradients do not vanish in its narrow range.

An overflow of the gradient halves the scale, and GROW_AFTER_STEPS steps without one double it (Micikevicius et al.,
"Mixed Precision Training", 2018, section 3.2). Unlike there, an overflow costs no step: the same step is computed
again. Powers of two scale floating-point numbers exactly, so the scale itself changes no result.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from ratchet.training.train_state import TrainState

INITIAL_SCALE = 2.0**16
MAX_SCALE = 2.0**24
GROW_AFTER_STEPS = 2000


def initial_loss_scale(compute_dtype: torch.dtype) -> float:
    """Return the scale of the first step; 1 for bfloat16 and float32, whose range covers all gradients."""
    return INITIAL_SCALE if compute_dtype == torch.float16 else 1.0


def unscale_gradients(parameters: Iterable[torch.nn.Parameter], loss_scale: float) -> None:
    """Divide every gradient by the loss scale, in place."""
    if loss_scale != 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.div_(loss_scale)


def is_overflow(state: TrainState, loss: float, grad_norm: float) -> bool:
    """Return whether a smaller scale may help: the loss is finite, but its gradient is not."""
    return state.loss_scale > 1 and math.isfinite(loss) and not math.isfinite(grad_norm)


def reduce_loss_scale(state: TrainState) -> TrainState:
    """Return the state in which the same step is computed again, with half the scale."""
    return replace(state, loss_scale=state.loss_scale / 2, loss_scale_steps=0)


def advance_loss_scale(state: TrainState) -> TrainState:
    """Return the state after a step without overflow."""
    if state.loss_scale == 1:
        return state
    if state.loss_scale_steps + 1 < GROW_AFTER_STEPS:
        return replace(state, loss_scale_steps=state.loss_scale_steps + 1)
    return replace(state, loss_scale=min(MAX_SCALE, 2 * state.loss_scale), loss_scale_steps=0)
