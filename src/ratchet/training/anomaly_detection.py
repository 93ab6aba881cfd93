"""What is done about a step whose loss or gradient is not as it should be: pure rules, told by `train.guards`.

They are asked before the optimizer sees the gradient, so no weight is ever moved by a number that is not finite. Like
the budget, what they decide depends on the run's own figures alone: repeated, it is decided the same.
"""

import math
import statistics
from dataclasses import dataclass, replace

from ratchet.config.train import GuardSettings
from ratchet.training.train_state import TrainState

MAD_SCALE = 1.4826
"""Makes the median absolute deviation of normal samples their standard deviation (Rousseeuw & Croux, "Alternatives to
the Median Absolute Deviation", JASA 88, 1993: b = 1.4826)."""
LEAST_DEVIATION = 0.05
"""Of the median: norms that hardly vary must not make every step a spike."""


@dataclass(frozen=True)
class StepAcceptance:
    """Learn from the step."""


@dataclass(frozen=True)
class GradientSpike:
    """Learn from it, and say that its gradient is unusually large."""

    median: float
    """Of the gradient norms of the steps before."""
    deviations: float
    """By how many scaled median absolute deviations the norm is above it."""


@dataclass(frozen=True)
class StepRepeat:
    """Compute the same step once more: a flicker of the hardware does not come twice."""

    reason: str


@dataclass(frozen=True)
class StepSkip:
    """Go on without learning from this step."""

    reason: str


@dataclass(frozen=True)
class StepRollback:
    """Go on with the weights of the last good snapshot; the steps since, and this one, are left out."""

    reason: str


@dataclass(frozen=True)
class TrainingHalt:
    """End the run; a person must look."""

    diagnosis: str


Verdict = StepAcceptance | GradientSpike | StepRepeat | StepSkip | StepRollback | TrainingHalt


def judge_step(
    rules: GuardSettings, state: TrainState, loss: float, norm: float, rate: float, *, repeated: bool
) -> Verdict:
    """What to do about the step after `state.step`.

    Args:
        rules: `train.guards`.
        state: before the step.
        loss: of the step, in nats per answer token.
        norm: L2 norm of its gradient before clipping.
        rate: learning rate that it would be learned with.
        repeated: it has been computed a second time already.
    """
    found = _describe_non_finite(loss, norm)
    if found:
        if not repeated:
            return StepRepeat(found)
        return _choose_remedy(rules, state, f"{found}, computed twice", rate, rules.on_non_finite)
    spike = _detect_spike(rules, state, norm)
    if spike is None:
        return StepAcceptance()
    if rules.on_spike == "report":
        return spike
    text = f"gradient norm {norm:.4g} is {spike.deviations:.4g} deviations above the running median {spike.median:.4g}"
    return _choose_remedy(rules, state, text, rate, rules.on_spike)


def record_good_step(state: TrainState, rules: GuardSettings, norm: float) -> TrainState:
    """The state with one more gradient norm to compare later ones with; `step` is left to the caller."""
    return replace(state, norms=(*state.norms, norm)[-rules.window_steps :])


def record_bad_step(state: TrainState, rules: GuardSettings, back_to: TrainState | None = None) -> TrainState:
    """The state after a step that was left out: counted as done, and learned nothing from.

    Counters and histories go on, also when the weights go back. The gradient norms of undone steps stay: their median
    is that of this stage of the training, unless more than half of the window was bad.

    Args:
        state: before the step.
        rules: `train.guards`.
        back_to: state of the snapshot whose weights go on; None when the weights stay what they are.
    """
    step = state.step + 1
    # What was left out before the snapshot stays left out, and of what came after nothing is in the weights any more.
    skipped = state.skipped_steps + 1 if back_to is None else back_to.skipped_steps + step - back_to.step
    return replace(
        state,
        step=step,
        skipped_steps=skipped,
        bad_steps=(*_recent_bad_steps(rules, state), step),
        rate_scale=state.rate_scale * rules.rate_factor,
    )


def _recent_bad_steps(rules: GuardSettings, state: TrainState) -> tuple[int, ...]:
    """Bad steps of the window that ends with the step after `state.step`."""
    return tuple(step for step in state.bad_steps if step > state.step + 1 - rules.window_steps)


def _describe_non_finite(loss: float, norm: float) -> str:
    for what, value in (("loss", loss), ("gradient norm", norm)):
        if not math.isfinite(value):
            return f"{what} is {value}"
    return ""


def _detect_spike(rules: GuardSettings, state: TrainState, norm: float) -> GradientSpike | None:
    """How far the norm is above those before it; None when that is not too far, or too few are known."""
    norms = state.norms[-rules.window_steps :]
    if len(norms) < rules.window_steps // 2:
        return None
    median = statistics.median(norms)
    spread = MAD_SCALE * statistics.median(abs(value - median) for value in norms)
    deviation = max(spread, LEAST_DEVIATION * median)
    if norm <= median + rules.spike_deviations * deviation or deviation == 0:
        return None  # a window of zeros (nothing to learn from) has no scale
    return GradientSpike(median, (norm - median) / deviation)


def _choose_remedy(rules: GuardSettings, state: TrainState, reason: str, rate: float, action: str) -> Verdict:
    """Do without the step, in the way that the rules ask for and as long as they put up with it."""
    bad = (*_recent_bad_steps(rules, state), state.step + 1)
    if action == "stop" or len(bad) > rules.patience:
        return TrainingHalt(_write_diagnosis(rules, state, reason, rate, bad))
    return StepRollback(reason) if action == "roll_back" else StepSkip(reason)


def _write_diagnosis(rules: GuardSettings, state: TrainState, reason: str, rate: float, bad: tuple[int, ...]) -> str:
    """Which steps, what was found, and what to change."""
    step = state.step + 1
    lines = [f"step {step}: {reason}"]
    if len(bad) > 1:
        named = ", ".join(map(str, bad[-10:]))
        in_a_row = " in a row" if bad[-1] - bad[0] == len(bad) - 1 else f" within {rules.window_steps}"
        lines.append(
            f"{len(bad)} bad steps{in_a_row} ({'..., ' if len(bad) > 10 else ''}{named}); "
            f"train.guards.patience puts up with {rules.patience}"
        )
    norms = state.norms[-rules.window_steps :]
    if norms:
        lines.append(f"median gradient norm of the last {len(norms)} good steps {statistics.median(norms):.4g}")
    scale = "" if state.rate_scale == 1 else f" (train.guards has multiplied it by {state.rate_scale:.4g})"
    lines.append(f"learning rate {rate:.4g}{scale}; no weight was changed by these steps")
    if norms or len(bad) > 1:
        advice = "lower train.learning_rate or raise train.warmup, and look at the rows of these steps"
    else:
        advice = "look at the rows of this step and at train.compute_dtype (float16 overflows), or lower the rate"
    spikes = "; a higher train.guards.spike_deviations lets such steps pass" if "deviations above" in reason else ""
    return "; ".join(lines) + f". What to do: {advice}{spikes}"
