"""Which finalist of a sweep wins: each was trained with several seeds and scored on the same rows.

The leader is whoever these very scores put first, so of two that are equal one leads in any case: its one-sided
p-values are doubled. Then Holm's correction for the number of the others.
"""

import math
from collections.abc import Sequence

from scipy import stats

from ratchet.gating import seeds
from ratchet.gating.contest import Contender, Contest, require_same_rows
from ratchet.gating.multiplicity import holm
from ratchet.records_sweep import Comparison, Finalist, Finals


def decide(contest: Contest, contenders: Sequence[Contender]) -> Finals:
    """Compare the leader with each of the others, and name the winner.

    The leader, if it is better than each of the others beyond doubt; else the cheapest of those that cannot be told
    from it: trainable parameters, then memory, then seconds of training, then the number of the trial. Who was dropped
    stands behind all others, and does not win.

    Raises:
        ValueError: no contender, scores of different rows, or scores that are not finite.
    """
    require_same_rows(contenders)
    leader, *others = sorted(contenders, key=lambda one: (bool(one.dropped), *contest.order(one)))
    comparisons = _comparisons(contest, leader, others)
    told_apart = {found.other for found in comparisons if found.better}
    equals = [leader, *(one for one in others if one.number not in told_apart and not one.dropped)]
    winner = min(equals, key=_price)
    return Finals(
        metric=contest.measure.metric,
        direction=contest.measure.direction,
        rows=leader.matrix.shape[1],
        finalists=tuple(_finalist(contest, one) for one in (leader, *others)),
        comparisons=tuple(comparisons),
        winner=winner.number,
        reason=_reason(contest, winner, equals, comparisons) + _doubt([leader, *others]),
    )


def behind(contest: Contest, contenders: Sequence[Contender], threshold: float) -> dict[int, str]:
    """Which contenders are so far behind the leader that further seeds would be a waste, and why, by trial number.

    Wilcoxon's signed-rank test (F. Wilcoxon, Biometrics Bulletin 1, 1945, 80-83) of the rows' differences, as Optuna's
    WilcoxonPruner does it: one-sided, zeros split, and the mean must be worse as well. It looks at rows alone: what
    another seed would change it does not know, so it is an economy and no verdict. Simulated, two equal finalists after
    one seed at p = 0.01: 2 % are dropped where seeds change nothing, 19 % where they change as much as the rows leave
    unsure.

    Args:
        contest: what they are compared by.
        contenders: all with the same seeds.
        threshold: p below which one is dropped; of each look, uncorrected.

    Raises:
        ValueError: as `decide`.
    """
    require_same_rows(contenders)
    leader = min(contenders, key=contest.order)
    found = {}
    for one in contenders:
        gains = contest.sign * (leader.rows - one.rows)
        if one is leader or math.fsum(gains) <= 0:
            continue
        p = float(stats.wilcoxon(contest.sums(gains), alternative="greater", zero_method="zsplit").pvalue)
        if p < threshold:
            after = f"{one.seeds} seed{'s' if one.seeds > 1 else ''}"
            found[one.number] = f"worse than trial {leader.number} after {after} (Wilcoxon signed-rank, p = {p:.2g})"
    return found


def _comparisons(contest: Contest, leader: Contender, others: Sequence[Contender]) -> list[Comparison]:
    """Each bound at the level at which Holm's procedure judges it, so that bound and p-value say the same."""
    alpha = 1 - contest.confidence
    everyone = [leader, *others]
    first = [seeds.difference(contest, (leader, one), everyone, alpha / 2) for one in others]
    adjusted = holm([min(1.0, 2 * found.p) for found in first])
    comparisons = []
    for one, found, p in zip(others, first, adjusted, strict=True):
        level = min(alpha / 2, alpha * found.p / p) if found.p > 0 else alpha / (2 * len(others))
        low = (found if level == alpha / 2 else seeds.difference(contest, (leader, one), everyone, level)).low
        better = p < alpha and low > 0  # close to the edge the two may differ by a hair: then neither is told as sure
        comparisons.append(
            Comparison(
                other=one.number,
                difference=found.value,
                low=low if better else min(low, 0.0),
                p=p if better else max(p, alpha),
                seed_error=found.seed_error,
                row_error=found.row_error,
                better=better,
                method=found.method,
            )
        )
    return comparisons


# ------------------------------------------------------------------------------------------------------------- words


def _finalist(contest: Contest, one: Contender) -> Finalist:
    return Finalist(
        number=one.number,
        values=dict(one.values),
        run_ids=one.run_ids,
        means=one.means(contest),
        mean=contest.mean(one.rows),
        cost=one.cost,
        dropped=one.dropped,
    )


_PRICES = ("fewest trainable parameters", "least memory", "shortest training", "tried first")


def _price(one: Contender) -> tuple[float, float, float, int]:
    """In the order of _PRICES; what nobody measured is not cheap."""
    cost = one.cost
    measured = (cost.trainable_parameters, cost.memory_bytes, cost.train_seconds)
    parameters, memory, seconds = (value or math.inf for value in measured)
    return parameters, memory, seconds, one.number


def _reason(contest: Contest, winner: Contender, equals: Sequence[Contender], comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return f"trial {winner.number} is the only finalist"
    if all(found.better for found in comparisons):
        p = max(found.p for found in comparisons)
        return f"trial {winner.number} is better than each of the others (p = {p:.2g} at most, after Holm's correction)"
    if len(equals) == 1:
        among = "all, and each was dropped" if winner.dropped else "those that were not dropped"
        return f"trial {winner.number} is best of {among}"
    others = [_price(one) for one in equals if one is not winner]
    by = next(i for i in range(len(_PRICES)) if any(price[i] != _price(winner)[i] for price in others))
    named = ", ".join(str(one.number) for one in equals)
    return (
        f"trials {named} cannot be told apart with confidence {contest.confidence:g}, and trial {winner.number} is the "
        f"cheapest of them ({_PRICES[by]})"
    )


def _doubt(contenders: Sequence[Contender]) -> str:
    if len(contenders) < 2 or any(one.seeds > 1 for one in contenders):
        return ""
    return "; each was trained with one seed, so what another seed would change is not known"
