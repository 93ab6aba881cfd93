"""Claims that the candidate is better: all of them together, for with each further claim one may be true by luck."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.config_gate import MustImprove
from ratchet.gating import matching, multiplicity, soundness, words
from ratchet.gating.matching import IncomparableError
from ratchet.gating.rules import Case, comparison, few, settled, would_decide
from ratchet.records_evaluation import Metric
from ratchet.records_gate import Comparison, Outcome, Reason


@dataclass(frozen=True)
class Claim:
    """One metric of a must_improve rule, compared."""

    metric: Metric
    found: Comparison


def reasons(case: Case) -> dict[int, Reason]:
    """What each must_improve rule finds, by its place among the rules.

    p-values of all claims are adjusted together (S. Holm, Scandinavian Journal of Statistics 6, 1979): the chance
    that any claim of a model that improved nothing is believed stays below 1 - confidence.
    """
    rules = {place: rule for place, rule in enumerate(case.gate.rules) if isinstance(rule, MustImprove)}
    made = {place: _claims_of(case, rule) for place, rule in rules.items()}
    p = [claim.found.p for some in made.values() if isinstance(some, list) for claim in some]
    adjusted = iter(multiplicity.holm(p) if len(p) > 1 else [None] * len(p))
    return {
        place: some
        if isinstance(some, Reason)
        else _must_improve(case, rules[place], [_adjusted(claim, next(adjusted)) for claim in some])
        for place, some in made.items()
    }


def _adjusted(claim: Claim, p: float | None) -> Claim:
    return Claim(claim.metric, claim.found.model_copy(update={"p_adjusted": p}))


def _claims_of(case: Case, rule: MustImprove) -> list[Claim] | Reason:
    names = ", ".join(rule.metric)
    why = matching.absent(case.evidence, rule.over)
    if why is not None:
        text = f"{names}: {why}, nothing to compare with"
        return Reason(rule=rule.rule, metric=names, outcome="pass", text=text)
    try:
        return [_claim(case, rule, name) for name in dict.fromkeys(rule.metric)]
    except IncomparableError as error:
        return Reason(rule=rule.rule, metric=names, outcome="invalid", text=str(error))


def _claim(case: Case, rule: MustImprove, name: str) -> Claim:
    if rule.by < 0:
        raise IncomparableError(
            f"by is {rule.by:g}: a loss is no improvement; write must_not_regress with margin {-rule.by:g}"
        )
    soundness.check_noise(case.evidence, name, rule.by)
    matched = matching.match(case.evidence, name, rule.over)
    soundness.check_bound(rule.by, "by", matched.metric, matched.pairs)
    return Claim(matched.metric, comparison(matched, rule.over, name, rule.by, case.plan(rule.confidence)))


def _must_improve(case: Case, rule: MustImprove, found: Sequence[Claim]) -> Reason:
    """Better beyond doubt in one metric at least; worse, or no better, in all of them fails."""
    confidence = rule.confidence or case.gate.confidence
    won = [claim for claim in found if _p(claim) < 1 - confidence and not few(claim.found)]
    lost = all(claim.found.high <= claim.found.bound for claim in found)
    outcome: Outcome = "pass" if won else "fail" if lost else "undecided"
    texts = []
    for claim in found:
        wanted = f"more than {words.change(rule.by, claim.metric)} better" if rule.by else "better"
        p = f"p = {claim.found.p:.2g}"
        if claim.found.p_adjusted is not None:
            p += f", {claim.found.p_adjusted:.2g} among all claims"
        texts.append(f"{words.compared(claim.found, claim.metric)}; must be {wanted} ({p})")
    text = "; or: ".join(texts)
    if outcome == "undecided":
        needed = [count for claim in found if (count := would_decide(claim.found))]
        text += ": these samples cannot tell; "
        text += f"about {min(needed):,} would, if it stays so" if needed else "more test rows would"
    return Reason(
        rule=rule.rule, metric=", ".join(rule.metric), outcome=outcome, text=text,
        comparisons=tuple(settled(claim.found, outcome) for claim in found),
    )  # fmt: skip


def _p(claim: Claim) -> float:
    adjusted = claim.found.p_adjusted
    p = claim.found.p if adjusted is None else adjusted
    return p if math.isfinite(p) else 1.0
