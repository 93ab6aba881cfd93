"""What another model said of the candidate's answers (evaluate.judge), for reports and the gate's page."""

from collections.abc import Iterator

from ratchet import markup
from ratchet.markup import NONE, Html, counted, quiet, tag
from ratchet.pages.facts import Body
from ratchet.pages.values import MINUS
from ratchet.records_evaluation import EvalReport, Judgements, Metric, Preference


def judged(report: EvalReport) -> Body:
    """A row an opponent, and what the verdicts cost."""
    found = report.judged
    if found is None:
        return "No judge was asked (evaluate.judge)."
    if not found.comparisons:
        return "There was no model to compare with."
    said = quiet(
        "Another model said which of two answers is better, each pair in both orders; it may like what comes first, "
        "long answers, or its own kind. It informs: no rule of the gate reads it. Intervals of 95 %."
    )
    rows = [_row(one) for one in found.comparisons.values()]
    heads = (f"{found.candidate} against", "win rate", "better / tied / worse", "both orders agree", "for the first")
    return [said, markup.table("Verdicts of the judge", "tnnnn", heads, rows), quiet(" ".join(_about(found)))]


def _row(one: Preference) -> tuple[Html, ...]:
    left = [f"{one.equal:,} the same text"] if one.equal else []
    left += [f"{one.left_out:,} left out"] if one.left_out else []
    name = tag("span", one.against, tag("small", ", ".join([counted(one.rows, "pair"), *left])))
    counts = tag("span", f"{one.wins:,} / {one.ties:,} / {one.losses:,}")
    return (name, _share(one.win_rate), counts, _share(one.agreement), _share(one.first_bias, signed=True))


def _share(metric: Metric | None, signed: bool = False) -> Html:
    if metric is None:
        return tag("span", NONE)
    value, low, high = (_percent(one, signed) for one in (metric.value, metric.low, metric.high))
    return tag("span", value, tag("small", f"{low} to {high}"))


def _percent(share: float, signed: bool) -> str:
    return f"{100 * share:{'+' if signed else ''}.1f}\u00a0%".replace("-", MINUS)


def _about(found: Judgements) -> Iterator[str]:
    yield f"Judge: {found.model} at {found.address}, rubric {found.rubric_digest[:12]}."
    counts = [counted(found.questions, "question"), counted(found.requests, "request")]
    if found.prompt_tokens is not None and found.tokens is not None:
        counts.append(f"{found.prompt_tokens:,} tokens sent, {found.tokens:,} written")
    if found.cost is not None:
        counts.append(f"price {found.cost:,.4g}")
    yield f"{', '.join(counts)}."
    for one in found.comparisons.values():
        if one.unreadable:
            why = ", ".join(f"{count:,} {reason}" for reason, count in one.unreadable.items())
            yield f"Replies without a verdict, {one.against}: {why}."
