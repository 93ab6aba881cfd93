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
from ratchet.training.trend import mann_kendall

MAD_SCALE = 1.4826
"""Standard deviation of normal samples divided by their median absolute deviation (Rousseeuw & Croux, "Alternatives to
the Median Absolute Deviation", JASA 88, 1993: b = 1.4826)."""
MIN_DEVIATION = 0.05
"""Smallest deviation that is used, as a share of the median. When norms hardly vary, their deviation is almost 0, and
without this limit every step would be a spike."""


RISE_Z = 3.719
"""Losses rise if the statistic of Mann and Kendall is above this: the quantile of the normal distribution for p =
0.0001, one-sided. It is strict, because the test is repeated at every step."""
MAX_MODULES = 5
"""Number of modules that a report of a spike names."""


@dataclass(frozen=True)
class StepVerdict:
    """The action for a step, with its reason."""

    action: Literal["apply", "report", "repeat", "skip", "roll_back", "stop"]
    """`report`: apply the step, and report that its gradient is unusually large, or its loss abnormal. `repeat`:
    compute the same step again, because a transient hardware error does not repeat. `skip`: continue without it.
    `roll_back`: continue with the weights of the last snapshot, without the steps since then. `stop`: end the run; a
    person must decide."""
    reason: str = ""
    """The problem of the step; for `stop` a diagnosis; empty for a `report` of the gradient norm."""
    median: float = 0.0
    """For `report` of the gradient norm: median norm of the previous steps."""
    deviations: float = 0.0
    """For `report` of the gradient norm: its distance from the median, divided by the scaled median absolute deviation,
    or by MIN_DEVIATION times the median if that is larger."""


_SEVERITY = ("apply", "report", "skip", "roll_back", "stop")


def judge_step(  # noqa: PLR0913 (the rules, what is known, and the numbers of the step)
    rules: GuardSettings,
    state: TrainState,
    loss: float,
    norm: float,
    learning_rate: float,
    *,
    repeated: bool,
    origin: str = "",
) -> StepVerdict:
    """Return what to do about the step after `state.step`.

    Args:
        rules: `train.guards`.
        state: state before the step.
        loss: loss of the step, in nats per answer token.
        norm: L2 norm of its gradient before clipping.
        learning_rate: learning rate of the step.
        repeated: the step is computed again after the verdict `repeat`.
        origin: of a repeated step, where its first number that is not finite was found.
    """
    for name, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            reason = f"{name} is {value}"
            if not repeated:
                return StepVerdict("repeat", reason)
            reason = f"{reason}, computed twice{origin and f'; {origin}'}"
            return _choose_remedy(rules, state, reason, learning_rate, rules.on_non_finite)
    verdicts = [StepVerdict("apply")]
    if (spike := _measure_spike(rules, state.grad_norms, norm)) is not None:
        median, deviations = spike
        if rules.on_spike == "report":
            verdicts.append(StepVerdict("report", median=median, deviations=deviations))
        else:
            text = f"gradient norm {norm:.4g} is {deviations:.4g} deviations above the running median {median:.4g}"
            verdicts.append(_choose_remedy(rules, state, text, learning_rate, rules.on_spike))
    if rules.on_loss_spike != "ignore" and (spike := _measure_spike(rules, state.losses, loss)) is not None:
        median, deviations = spike
        text = f"loss {loss:.4g} is {deviations:.4g} deviations above the running median {median:.4g}"
        verdicts.append(_choose_remedy(rules, state, text, learning_rate, rules.on_loss_spike))
    if rules.on_rising_loss != "ignore" and is_rising(rules, state, loss):
        half = rules.window_steps // 2
        losses = (*state.losses, loss)[-rules.window_steps :]
        first, last = statistics.median(losses[:half]), statistics.median(losses[-half:])
        text = f"the losses of the last {rules.window_steps} steps rise (medians of the halves {first:.4g}, {last:.4g})"
        verdicts.append(_choose_remedy(rules, state, text, learning_rate, rules.on_rising_loss))
    return max(verdicts, key=lambda verdict: _SEVERITY.index(verdict.action))


def is_rising(rules: GuardSettings, state: TrainState, loss: float) -> bool:
    """Return whether the losses of a full window, which ends with this loss, have a rising trend."""
    losses = (*state.losses, loss)[-rules.window_steps :]
    return len(losses) == rules.window_steps and mann_kendall(losses) > RISE_Z


def _measure_spike(rules: GuardSettings, history: tuple[float, ...], value: float) -> tuple[float, float] | None:
    """Return the median of the history and the distance of a value from it in deviations, if the value is a spike."""
    window = history[-rules.window_steps :]
    if len(window) < rules.window_steps // 2:
        return None
    median = statistics.median(window)
    spread = MAD_SCALE * statistics.median(abs(item - median) for item in window)
    deviation = max(spread, MIN_DEVIATION * median)
    if deviation <= 0 or value <= median + rules.spike_deviations * deviation:
        return None  # a window of zeros has no scale
    return median, (value - median) / deviation


def record_good_step(state: TrainState, rules: GuardSettings, norm: float, loss: float) -> TrainState:
    """Return the state with one more gradient norm and loss in its histories; the caller advances `step`.

    A learning rate that was reduced recovers by one factor after `recovery_steps` good steps.
    """
    # After a report of rising losses, the history begins again, so that the same rise is not reported at every step.
    losses: tuple[float, ...] = ()
    if rules.uses_losses and not (rules.on_rising_loss == "report" and is_rising(rules, state, loss)):
        losses = (*state.losses, loss)[-rules.window_steps :]
    state = replace(state, grad_norms=(*state.grad_norms, norm)[-rules.window_steps :], losses=losses)
    if not rules.recovery_steps or state.learning_rate_scale == 1:
        return state
    if state.recovering_steps + 1 < rules.recovery_steps:
        return replace(state, recovering_steps=state.recovering_steps + 1)
    scale = state.learning_rate_scale / rules.learning_rate_factor
    # Rounding must not leave a factor of almost 1.
    return replace(state, learning_rate_scale=1.0 if scale > 1 - 1e-9 else scale, recovering_steps=0)


def record_bad_step(state: TrainState, rules: GuardSettings, rollback_to: TrainState | None = None) -> TrainState:
    """Return the state after a skipped step, which is counted as done but not applied.

    Counters and the history of gradient norms continue, also after a rollback. The gradient norms of undone steps stay
    in the history, because their median is typical of this stage of the training unless more than half of the window
    was bad. The history of losses begins again with the restored weights.

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
        recovering_steps=0,
        losses=state.losses if rollback_to is None else (),
    )


def _recent_bad_steps(rules: GuardSettings, state: TrainState) -> tuple[int, ...]:
    """Return the bad steps of the window that ends with the step after `state.step`."""
    return tuple(step for step in state.bad_steps if step > state.step + 1 - rules.window_steps)


def _choose_remedy(
    rules: GuardSettings,
    state: TrainState,
    reason: str,
    learning_rate: float,
    action: Literal["report", "skip", "roll_back", "stop"],
) -> StepVerdict:
    """Report or skip the step, roll back, or stop after too many bad steps."""
    if action == "report":
        return StepVerdict("report", reason)
    bad = (*_recent_bad_steps(rules, state), state.step + 1)
    if action == "stop" or len(bad) > rules.max_bad_steps:
        return StepVerdict("stop", _write_diagnosis(rules, state, reason, learning_rate, bad))
    return StepVerdict(action, reason)


def _write_diagnosis(
    rules: GuardSettings, state: TrainState, reason: str, learning_rate: float, bad: tuple[int, ...]
) -> str:
    """Return a text that lists the bad steps, the reason, and what to change."""
    step, these_steps = state.step + 1, "these steps" if len(bad) > 1 else "this step"
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
    lines.append(f"learning rate {learning_rate:.4g}{scale}; {these_steps} changed no weight")
    if "losses of the last" in reason:
        advice = "lower train.learning_rate or raise train.warmup_ratio"
    elif norms or len(bad) > 1:
        advice = f"lower train.learning_rate or raise train.warmup_ratio, and check the rows of {these_steps}"
    else:
        advice = "check the rows of this step and train.compute_dtype (float16 overflows), or lower train.learning_rate"
    spikes = "; a higher train.guards.spike_deviations accepts such steps" if "deviations above" in reason else ""
    return "; ".join(lines) + f". What to do: {advice}{spikes}"
