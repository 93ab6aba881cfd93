"""The evidence page: what the gate found, for people. One HTML file that loads nothing, whole without its script."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ratchet import files, markup
from ratchet.gating.evidence import Evidence
from ratchet.markup import NONE, Html, counted, tag
from ratchet.pages import browser, facts, flips, forest, forms
from ratchet.pages.flips import Documents
from ratchet.pages.judged import judged
from ratchet.pages.values import SAID, short, sign
from ratchet.records_evaluation import EvaluatedRow, Who
from ratchet.records_gate import Champion, Decision, Outcome, Verdict

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
    texts = flips.read_documents(rows, answers, documents)
    sections: dict[str, Sequence[Html] | str] = {
        "Rules": _rules(verdict),
        "Comparisons": forest.comparisons(verdict, evidence.report),
        "Flipped samples": browser.samples(flips.pairings(verdict, evidence), texts),
        "Metrics": facts.metrics(evidence.report),
        "Forgetting": facts.forgetting(evidence.report),
        "Labels": facts.labels(evidence.report, evidence.scored_forms, rows, answers),
        "Export parity": forms.forms(evidence.bundle),
        "Costs and floors": facts.costs(evidence, verdict),
        **({"Judge": judged(evidence.report)} if evidence.report.judged is not None else {}),
        "Noise": facts.noise(evidence),
        "Lineage": facts.lineage(verdict, evidence),
    }
    links = [tag("a", title, href=f"#{markup.anchor(title)}") for title in sections]
    contents = tag("nav", *links, aria_label="Sections")
    main = tag("main", *(markup.section(title, body) for title, body in sections.items()))
    style, more, script = (path.read_text(encoding="utf-8") for path in (HOUSE_STYLE, STYLE, SCRIPT))
    title = f"{verdict.decision}: {verdict.run_id}"
    page = markup.document(title, style + more, _header(verdict, evidence), contents, main, script=script)
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
        markup.table("Rules", "ttw", ("", "rule", "what it found"), lines),
    ]
