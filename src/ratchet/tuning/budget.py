"""Whether another trial may begin, and why a sweep stops: pure functions of its history."""

import re
from collections.abc import Iterable, Sequence

from ratchet.config.sweep import Sweep
from ratchet.storage.records.sweep import Trial

STOPPED = "stopped"
"""Note of a study that has ended before its budget: the diagnosis; an empty text once it has been started again."""
FORGIVEN = "forgiven"
"""Note: trials before this number are no reason to stop any more, for somebody has started the sweep again since."""

ALL_INFEASIBLE = 3
"""Times `sweep.stop_after`: so many trials, and not one that fits, are no search any more."""


def counted(history: Iterable[Trial]) -> int:
    """Trials that the budget counts: one that goes on with a pruned one is none of its own."""
    return sum(trial.continues is None for trial in history)


def spent(history: Sequence[Trial]) -> tuple[float, int]:
    """Hours and answer tokens that all trainings came to; a continued one, told with all of it, counts once."""
    superseded = {trial.continues for trial in history if trial.is_over}
    own = [trial for trial in history if trial.number not in superseded]
    return sum(t.cost.train_seconds for t in own) / 3600, sum(t.cost.trained_tokens for t in own)


def exhausted(sweep: Sweep, history: Sequence[Trial]) -> str | None:
    """Why no further values may be tried; None: one more may. Trials under way go to their end."""
    if counted(history) >= sweep.trials:
        return f"all {sweep.trials} trials"
    return over_limit(sweep, history)


def over_limit(sweep: Sweep, history: Sequence[Trial]) -> str | None:
    """Which limit, hours or tokens, is reached: then not even a pruned trial goes on."""
    hours, tokens = spent(history)
    if sweep.hours is not None and hours >= sweep.hours:
        return f"{hours:.2f} hours trained of {sweep.hours:g}"
    if sweep.tokens is not None and tokens >= sweep.tokens:
        return f"{tokens:,} tokens learned from, of {sweep.tokens:,}"
    return None


def diagnosis(sweep: Sweep, history: Sequence[Trial]) -> str | None:
    """Why the sweep has to stop: the same failure again and again, or nothing that fits; None: it goes on.

    Args:
        sweep: stop_after is read.
        history: trials since it was last stopped and started again.
    """
    failed = [trial for trial in history if trial.state == "failed"]
    for trial in reversed(failed):
        alike = [other for other in failed if _like(other) == _like(trial)]
        if len(alike) >= sweep.stop_after:
            numbers = ", ".join(str(other.number) for other in alike)
            return (
                f"{len(alike)} trials failed for the same cause ({trial.cause.replace('_', ' ') or 'unknown'}; trials "
                f"{numbers}): {trial.reason}"
            )
    over = [trial for trial in history if trial.is_over]
    infeasible = [trial for trial in over if trial.state == "infeasible"]
    if len(over) == len(infeasible) >= ALL_INFEASIBLE * sweep.stop_after:
        return f"none of {len(over)} trials was feasible; the last one: {infeasible[-1].reason}"
    return None


def _like(trial: Trial) -> tuple[str, str]:
    """Cause and first line without its numbers and names of runs: those differ each time."""
    first = (trial.reason.splitlines() or [""])[0]
    return trial.cause, re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}\b|\d+(\.\d+)?", "#", first)
