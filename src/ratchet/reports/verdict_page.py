"""What another model said of the candidate's answers (evaluate.judge), for reports and the gate's page."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ratchet.gate.evidence import Evidence
from ratchet.reports import forest_plot, sample_browser, verdict_sections
from ratchet.reports.sample_browser import Documents
from ratchet.reports.value_format import MINUS, SAID, short, sign
from ratchet.reports.verdict_sections import Body
from ratchet.storage import files, html
from ratchet.storage.html import NONE, Html, counted, quiet, tag
from ratchet.storage.records.evaluation import EvalReport, EvaluatedRow, Judgements, Metric, Preference, Who
from ratchet.storage.records.gate import Champion, Decision, Outcome, Verdict


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
    return [said, html.table("Verdicts of the judge", "tnnnn", heads, rows), quiet(" ".join(_about(found)))]


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


# The evidence page: what the gate found, for people. One HTML file that loads nothing, whole without its script.

HOUSE_STYLE, STYLE, SCRIPT = (Path(__file__).with_name(name) for name in ("page.css", "gate.css", "gate.js"))

ANSWER: dict[Decision, tuple[Outcome, str]] = {
    "PROMOTE": ("pass", "Every rule holds: this model may be promoted."),
    "HOLD": ("undecided", "The samples cannot decide: do not promote yet."),
    "REJECT": ("fail", "A rule clearly fails: this model must not ship."),
    "INVALID": ("invalid", "The comparison means nothing as it is: mend it, then ask again."),
}

GRAVITY: tuple[Outcome, ...] = ("invalid", "fail", "undecided", "pass")
"""Rules in the order in which they decide."""


def write(
    verdict: Verdict,
    evidence: Evidence,
    rows: Sequence[EvaluatedRow],
    answers: Mapping[Who, Mapping[str, Sequence[str]]],
    documents: Documents,
    target: Path,
) -> None:
    """Write the page. Equal arguments give equal bytes.

    Args:
        verdict: the gate's answer.
        evidence: what it judged by.
        rows: the test rows.
        answers: of each model, by id of the row.
        documents: of the harness {id, prompt, target, answers, scores}, by model and task.
        target: the HTML file.
    """
    texts = sample_browser.read_documents(rows, answers, documents)
    sections: dict[str, Sequence[Html] | str] = {
        "Rules": _rules(verdict),
        "Comparisons": forest_plot.comparisons(verdict, evidence.report),
        "Flipped samples": sample_browser.samples(sample_browser.pairings(verdict, evidence), texts),
        "Metrics": verdict_sections.metrics(evidence.report),
        "Forgetting": verdict_sections.forgetting(evidence.report),
        "Labels": verdict_sections.labels(evidence.report, evidence.scored_forms, rows, answers),
        "Export parity": verdict_sections.forms(evidence.bundle),
        "Costs and floors": verdict_sections.costs(evidence, verdict),
        **({"Judge": judged(evidence.report)} if evidence.report.judged is not None else {}),
        "Noise": verdict_sections.noise(evidence),
        "Lineage": verdict_sections.lineage(verdict, evidence),
    }
    links = [tag("a", title, href=f"#{html.anchor(title)}") for title in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(html.section(title, body) for title, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (HOUSE_STYLE, STYLE, SCRIPT))
    title = f"{verdict.decision}: {verdict.run_id}"
    page = html.document(title, style + more, _header(verdict, evidence), contents, main, script=script)
    files.write_atomic(target, page)


def _header(verdict: Verdict, evidence: Evidence) -> Html:
    outcome, said = ANSWER[verdict.decision]
    figures = {
        "Model": (short(verdict.model_digest), evidence.bundle.dtype),
        "Run": (tag("bdi", verdict.run_id), f"adapter {verdict.adapter_digest[:12]}"),
        "Champion": _promoted(verdict.champion_digest, evidence.champion.champion),
        "Anchor": _promoted(verdict.anchor_digest, evidence.champion.anchor),
    }
    shown = [
        tag("div", tag("dt", name), tag("dd", tag("strong", value), tag("small", note)))
        for name, (value, note) in figures.items()
    ]
    if verdict.is_champion:
        said += " It is the champion already."
    parts = [
        tag("p", "Gate verdict", class_="quiet"),
        tag("h1", sign(outcome, verdict.decision), tag("span", said), class_="verdict"),
        tag("dl", *shown),
    ]
    for name, one in (("champion", evidence.champion.champion), ("anchor", evidence.champion.anchor)):
        if one and one.forced:
            forced = f"The {name}, version {one.version:,}, was promoted against the verdict {one.forced.decision} by "
            parts.append(tag("p", sign("invalid", "forced"), " ", forced, tag("bdi", one.forced.by), ": ",
                             tag("bdi", one.forced.reason), class_="forced"))  # fmt: skip
    return tag("header", *parts)


def _promoted(fingerprint: str | None, one: Champion | None) -> tuple[Html, str]:
    if fingerprint is None:
        return Html(NONE), "there is none"
    return short(fingerprint), f"version {one.version:,}" if one and one.model_digest == fingerprint else ""


def _rules(verdict: Verdict) -> Sequence[Html] | str:
    if not verdict.reasons:
        return "No rule was applied."
    ordered = sorted(verdict.reasons, key=lambda reason: GRAVITY.index(reason.outcome))
    lines = [
        (
            sign(reason.outcome, SAID[reason.outcome]),
            tag("span", reason.rule.replace("_", " "), tag("small", tag("bdi", reason.metric.strip("-")))),
            tag("bdi", reason.text),
        )
        for reason in ordered
    ]
    found = {outcome: sum(reason.outcome == outcome for reason in ordered) for outcome in GRAVITY}
    summed = ", ".join(f"{SAID[outcome]} {number:,}" for outcome, number in found.items() if number)
    return [
        tag("p", f"{counted(len(ordered), 'rule')}: {summed}."),
        html.table("Rules", "ttw", ("", "rule", "what it found"), lines),
    ]
