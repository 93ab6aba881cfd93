"""From a judge's verdicts to figures: win rate, agreement between the two orders, and liking for what comes first."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ratchet.gating import intervals, paired
from ratchet.gating.paired import Pairs, Plan
from ratchet.records_evaluation import Metric, Preference, Who

Preferred = Literal["candidate", "opponent", "tie"]

CONFIDENCE = 0.975
"""Of each bound: two of them make a 95 % interval."""
RESAMPLES = 9999
SCORE: dict[Preferred, float] = {"candidate": 1.0, "tie": 0.5, "opponent": 0.0}


@dataclass(frozen=True)
class Judged:
    """What was said of a row's two answers."""

    group: str
    """Rows of one group are no independent samples; a row without one has a name of its own."""
    preferred: tuple[Preferred | None, Preferred | None]
    """With the candidate's answer first, and with it second; None: no verdict could be read."""
    equal: bool = False
    """Both answers are the same text, so nobody was asked: a tie."""

    @property
    def score(self) -> float | None:
        """1: the candidate's answer is better, whatever its place; 0: the other; None: a verdict is missing."""
        if self.equal:
            return 0.5
        first, second = self.preferred
        return None if first is None or second is None else (SCORE[first] + SCORE[second]) / 2


def preference(against: Who, rows: Sequence[Judged], unreadable: Counter[str], seed: int) -> Preference:
    """The figures of one comparison.

    Args:
        against: whom the candidate is compared with.
        rows: what was said of each.
        unreadable: replies without a verdict, by reason.
        seed: of the bootstrap.
    """
    plan = Plan(CONFIDENCE, 0.8, 0.1, RESAMPLES, seed)  # power and discordance plan samples: not asked
    scored = [(row.group, score) for row in rows if (score := row.score) is not None]
    scores = [score for _, score in scored]
    return Preference(
        against=against,
        rows=len(scored),
        wins=sum(score > 0.5 for score in scores),
        ties=sum(score == 0.5 for score in scores),
        losses=sum(score < 0.5 for score in scores),
        equal=sum(row.equal for row in rows),
        left_out=len(rows) - len(scored),
        unreadable=dict(sorted(unreadable.items())),
        win_rate=_win_rate(scored, plan),
        agreement=_agreement(rows),
        first_bias=_first_bias(rows, plan),
    )


def _win_rate(scored: Sequence[tuple[str, float]], plan: Plan) -> Metric | None:
    """Mean score of the rows; its interval is that of wins minus losses, paired, halved and moved."""
    if not scored:
        return None
    scores = [score for _, score in scored]
    pairs = Pairs(scores, [1 - score for score in scores], "higher", groups=[group for group, _ in scored])
    found = paired.compare(pairs, 0.0, plan)
    value, low, high = (min(1.0, max(0.0, (1 + end) / 2)) for end in (found.difference, found.low, found.high))
    unit = "share of pairs, a tie is half"
    return Metric(value=value, n=len(scores), low=low, high=high, better="higher", unit=unit, chance=0.5)


def _agreement(rows: Sequence[Judged]) -> Metric | None:
    """How often both orders led to the same verdict, with Wilson's interval."""
    both = [row.preferred[0] == row.preferred[1] for row in rows if not row.equal and None not in row.preferred]
    if not both:
        return None
    low, high = intervals.wilson(sum(both), len(both), CONFIDENCE)
    value = sum(both) / len(both)
    return Metric(value=value, n=len(both), low=low, high=high, better="higher", unit="share of pairs")


def _first_bias(rows: Sequence[Judged], plan: Plan) -> Metric | None:
    """Share of verdicts for the answer that came first, ties aside, beyond a half; the verdicts on a row are a group.

    A judge that never looks at the order is for the first once and for the second once: nought, whoever is better.
    """
    first, groups = [], []
    for row in rows:
        for order, preferred in enumerate(row.preferred):
            if preferred in ("candidate", "opponent"):
                first.append(float((preferred == "candidate") == (order == 0)))
                groups.append(row.group)
    if not first:
        return None
    found = paired.compare(Pairs(first, [1 - one for one in first], "higher", groups=groups), 0.0, plan)
    value, low, high = (min(0.5, max(-0.5, end / 2)) for end in (found.difference, found.low, found.high))
    return Metric(value=value, n=len(first), low=low, high=high, better="unknown", unit="share of verdicts beyond 1/2")
