"""Rules of `train.guards` for a step whose loss or gradient is abnormal, as pure functions.

The rules run before the optimizer step, so a number that is not finite never changes a weight. A decision depends only
on numbers of the run itself, so a repeated step gets the same decision.
"""

import math
import statistics
from dataclasses import dataclass, replace
from typing import Literal

from ratchet.config.train import GuardSettings
from ratchet.training.train_state import TrainState

MAD_SCALE = 1.4826
"""Standard deviation of normal samples divided by their median absolute deviation (Rousseeuw & Croux, "Alternatives to
the Median Absolute Deviation", JASA 88, 1993: b = 1.4826)."""
MIN_DEVIATION = 0.05
"""Smallest deviation that is used, as a share of the median. When norms hardly vary, their deviation is almost 0, and
without this limit every step would be a spike."""


@dataclass(frozen=True)
class StepVerdict:
    """The action for a step, with its reason."""

    action: Literal["apply", "report", "repeat", "skip", "roll_back", "stop"]
    """`report`: apply the step, and report that its gradient is unusually large. `repeat`: compute the same step again,
    because a transient hardware error does not repeat. `skip`: continue without it. `roll_back`: continue with the
    weights of the last snapshot, without the steps since then. `stop`: end the run; a person must decide."""
    reason: str = ""
    """The problem of the step; for `stop` a diagnosis."""
    median: float = 0.0
    """For `report`: median gradient norm of the previous steps."""
    deviations: float = 0.0
    """For `report`: distance of the norm from the median, divided by the scaled median absolute deviation, or by
    MIN_DEVIATION times the median if that is larger."""


def judge_step(
    rules: GuardSettings, state: TrainState, loss: float, norm: float, learning_rate: float, *, repeated: bool
) -> StepVerdict:
    """Return what to do about the step after `state.step`, by its loss (nats per answer token) and the L2 norm of its
    gradient before clipping. `repeated`: it is computed again after the verdict `repeat`."""
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            reason = f"{name} is {value}"
            if not repeated:
                return StepVerdict("repeat", reason)
            return _choose_remedy(rules, state, f"{reason}, computed twice", learning_rate, rules.on_non_finite)
    norms = state.grad_norms[-rules.window_steps :]
    if len(norms) < rules.window_steps // 2:
        return StepVerdict("apply")
    median = statistics.median(norms)
    spread = MAD_SCALE * statistics.median(abs(value - median) for value in norms)
    deviation = max(spread, MIN_DEVIATION * median)
    if norm <= median + rules.spike_deviations * deviation or deviation == 0:
        return StepVerdict("apply")  # a window of zeros has no scale
    deviations = (norm - median) / deviation
    if rules.on_spike == "report":
        return StepVerdict("report", median=median, deviations=deviations)
    text = f"gradient norm {norm:.4g} is {deviations:.4g} deviations above the running median {median:.4g}"
    return _choose_remedy(rules, state, text, learning_rate, rules.on_spike)


def record_good_step(state: TrainState, rules: GuardSettings, norm: float) -> TrainState:
    """Return the state with one more gradient norm in its history; the caller advances `step`."""
    return replace(state, grad_norms=(*state.grad_norms, norm)[-rules.window_steps :])


def record_bad_step(state: TrainState, rules: GuardSettings, rollback_to: TrainState | None = None) -> TrainState:
    """Return the state after a skipped step, which is counted as done but not applied.

    Counters and histories continue, also after a rollback. The gradient norms of undone steps stay in the history,
    because their median is typical of this stage of the training unless more than half of the window was bad.

    Args:
        state: state before the step.
        rules: `train.guards`.
        rollback_to: state of the snapshot whose weights are restored; None when the weights do not change.
    """
    step = state.step + 1
    # Steps skipped before the snapshot stay skipped. All steps after the snapshot count as skipped, too, because the
    # restored weights do not contain them.
    skipped = state.skipped_steps + 1 if rollback_to is None else rollback_to.skipped_steps + step - rollback_to.step
    return replace(
        state,
        step=step,
        skipped_steps=skipped,
        bad_steps=(*_recent_bad_steps(rules, state), step),
        learning_rate_scale=state.learning_rate_scale * rules.learning_rate_factor,
    )


def _recent_bad_steps(rules: GuardSettings, state: TrainState) -> tuple[int, ...]:
    """Return the bad steps of the window that ends with the step after `state.step`."""
    return tuple(step for step in state.bad_steps if step > state.step + 1 - rules.window_steps)


def _choose_remedy(
    rules: GuardSettings,
    state: TrainState,
    reason: str,
    learning_rate: float,
    action: Literal["skip", "roll_back", "stop"],
) -> StepVerdict:
    """Skip the step, roll back, or stop after too many bad steps."""
    bad = (*_recent_bad_steps(rules, state), state.step + 1)
    if action == "stop" or len(bad) > rules.max_bad_steps:
        return StepVerdict("stop", _write_diagnosis(rules, state, reason, learning_rate, bad))
    return StepVerdict(action, reason)


def _write_diagnosis(
    rules: GuardSettings, state: TrainState, reason: str, learning_rate: float, bad: tuple[int, ...]
) -> str:
    """Return a text that lists the bad steps, the reason, and what to change."""
    step = state.step + 1
    lines = [f"step {step}: {reason}"]
    if len(bad) > 1:
        numbers = ", ".join(map(str, bad[-10:]))
        in_a_row = " in a row" if bad[-1] - bad[0] == len(bad) - 1 else f" within {rules.window_steps}"
        lines.append(
            f"{len(bad)} bad steps{in_a_row} ({'..., ' if len(bad) > 10 else ''}{numbers}); "
            f"train.guards.max_bad_steps is {rules.max_bad_steps}"
        )
    norms = state.grad_norms[-rules.window_steps :]
    if norms:
        lines.append(f"median gradient norm of the last {len(norms)} good steps {statistics.median(norms):.4g}")
    factor = state.learning_rate_scale
    scale = "" if factor == 1 else f" (train.guards has multiplied it by {factor:.4g})"
    lines.append(f"learning rate {learning_rate:.4g}{scale}; these steps changed no weight")
    if norms or len(bad) > 1:
        advice = "lower train.learning_rate or raise train.warmup_ratio, and check the rows of these steps"
    else:
        advice = "check the rows of this step and train.compute_dtype (float16 overflows), or lower train.learning_rate"
    spikes = "; a higher train.guards.spike_deviations accepts such steps" if "deviations above" in reason else ""
    return "; ".join(lines) + f". What to do: {advice}{spikes}"
