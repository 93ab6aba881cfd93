"""What a form answers to the gate's samples, scored as the evaluation scores, beside the answers of base + adapter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ratchet.gating import paired
from ratchet.records_export import TaskScore

Score = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""Expected and given answers, pair by pair, to a score each, higher is better. The evaluation's own measure is passed
in by whoever calls: what counts as right is defined in one place."""

_PLAN = paired.Plan(confidence=0.975, power=0.8, discordance=0.1, resamples=9999, seed=0)
"""Two one-sided bounds of 97.5 % are a two-sided interval of 95 %; the rest as section gate has it by default."""


@dataclass(frozen=True)
class Answers:
    """What one form answered, row by row."""

    tokens: Sequence[Sequence[int]]
    texts: Sequence[str]
    """The same as text, stripped, without special tokens."""


@dataclass(frozen=True)
class Task:
    """What was asked, and how answers to it are scored."""

    metric: str
    expected: Sequence[str]
    score: Score
    groups: Sequence[str | None] | None = None
    """Rows of one group are no independent samples; None: a group of its own."""


def task_score(task: Task, answers: Answers, reference: Answers) -> TaskScore | None:
    """Score answers beside those of base + adapter to the same prompts; None when nothing was asked.

    The interval of the difference is the gate's: Tango's score interval for right and wrong, else the BCa bootstrap,
    groups whole (gating/paired.py).

    Raises:
        ValueError: not as many answers as were expected.
    """
    if not task.expected:
        return None
    new, old = ([float(one) for one in task.score(task.expected, who.texts)] for who in (answers, reference))
    found = paired.compare(paired.Pairs(new, old, "higher", groups=task.groups), 0.0, _PLAN)
    same = sum(list(a) == list(b) for a, b in zip(answers.tokens, reference.tokens, strict=True))
    return TaskScore(
        metric=task.metric,
        rows=len(new),
        value=sum(new) / len(new),
        reference=sum(old) / len(old),
        difference=found.difference,
        low=found.low,
        high=found.high,
        same_answers=same / len(new),
    )
