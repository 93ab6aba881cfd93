"""The scale of the loss when computing in float16, so that small gradients do not vanish in its narrow range.

Dynamic loss scaling (Micikevicius et al., "Mixed Precision Training", 2018, section 3.2): a gradient that overflows
halves the scale, a long time without doubles it. Unlike there, an overflow costs no step: the same one is computed
again. Powers of two scale floating-point numbers exactly, so the scale itself changes no result.
"""

import math
from dataclasses import replace

import torch

from ratchet.training.state import State

FIRST = 2.0**16
LARGEST = 2.0**24
GROW_AFTER_STEPS = 2000


def first_scale(compute_dtype: torch.dtype) -> float:
    """The scale to begin with; 1 where none is needed: bfloat16 and float32 reach as far as gradients do."""
    return FIRST if compute_dtype == torch.float16 else 1.0


def overflowed(state: State, loss: float, norm: float) -> bool:
    """Whether a smaller scale may mend this step: the loss is finite, its gradient is not."""
    return state.loss_scale > 1 and math.isfinite(loss) and not math.isfinite(norm)


def after_overflow(state: State) -> State:
    """The state in which the same step is computed again."""
    return replace(state, loss_scale=state.loss_scale / 2, scale_steps=0)


def after_good(state: State) -> State:
    """The state after a step without overflow."""
    if state.loss_scale == 1:
        return state
    if state.scale_steps + 1 < GROW_AFTER_STEPS:
        return replace(state, scale_steps=state.scale_steps + 1)
    return replace(state, loss_scale=min(LARGEST, 2 * state.loss_scale), scale_steps=0)
