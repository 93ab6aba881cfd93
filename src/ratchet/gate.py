"""EvalReport x Bundle x rules x champion → Verdict. Pure: a gate that does not pass is an answer, not an error."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ratchet import files, records
from ratchet.config import Settings
from ratchet.config_gate import AtLeast, ExportParity, Gate, MustImprove, MustNotRegress, Rule
from ratchet.errors import DamagedError, GateError
from ratchet.gating import paired
from ratchet.layout import Layout
from ratchet.records import Bundle
from ratchet.records_evaluation import EvalReport, Metric
from ratchet.records_gate import ChampionFile, Reason, Verdict, read_champion
from ratchet.run.directory import RunPaths

Who = Literal["base", "candidate", "champion"]
Samples = Mapping[Who, Mapping[str, Mapping[str, float]]]
"""Score by sample id, by metric, by model."""


def judge(report: EvalReport, bundle: Bundle, samples: Samples, rules: Gate, champion: ChampionFile) -> Verdict:
    """Apply every rule; PROMOTE only if all pass.

    INVALID when the reports are not about the same things, REJECT when a rule clearly fails, HOLD when the data
    cannot decide one. Raises nothing for a bad model or bad data: those are answers.
    """
    current = champion.champion
    is_champion = current is not None and current.model_digest == bundle.model_digest
    reasons = _identities(report, bundle, champion) or tuple(
        _apply(rule, report, bundle, samples, rules.confidence, is_champion) for rule in rules.rules
    )
    outcomes = {reason.outcome for reason in reasons}
    decision: Literal["PROMOTE", "HOLD", "REJECT", "INVALID"] = "PROMOTE"
    if "invalid" in outcomes:
        decision = "INVALID"
    elif "fail" in outcomes:
        decision = "REJECT"
    elif "undecided" in outcomes:
        decision = "HOLD"
    return Verdict(
        decision=decision,
        model_digest=bundle.model_digest,
        adapter_digest=bundle.adapter_digest,
        run_id=bundle.run_id,
        is_champion=is_champion,
        champion_digest=current.model_digest if current else None,
        reasons=reasons,
    )


def _identities(report: EvalReport, bundle: Bundle, champion: ChampionFile) -> tuple[Reason, ...]:
    """What makes every comparison meaningless."""
    current = champion.champion.model_digest if champion.champion else None
    pairs = {
        "adapter": (report.adapter_digest, bundle.adapter_digest),
        "base": (report.base_digest, bundle.base_digest),
        "data": (report.data_digest, bundle.data_digest),
    }
    wrong = [
        f"the evaluation is of {what} {a[:12]}, the export of {b[:12]}" for what, (a, b) in pairs.items() if a != b
    ]
    if report.champion_digest != current:
        was, now = (report.champion_digest or "none")[:12], (current or "none")[:12]
        wrong.append(f"the champion was {was} when it was evaluated and is {now} now: run `dvc repro evaluate`")
    return tuple(Reason(rule="identity", metric="-", outcome="invalid", text=text) for text in wrong)


def _apply(
    rule: Rule, report: EvalReport, bundle: Bundle, samples: Samples, confidence: float, is_champion: bool
) -> Reason:
    if isinstance(rule, ExportParity):
        return _export_parity(rule, bundle)
    if isinstance(rule, AtLeast):
        return _at_least(rule, report)
    return _compare(rule, report, samples, confidence, is_champion)


def _export_parity(rule: ExportParity, bundle: Bundle) -> Reason:
    parity = bundle.parity
    close = parity.max_logit_difference <= rule.max_logit_difference
    agree = parity.greedy_agreement >= rule.min_greedy_agreement
    text = (
        f"exported model against base + adapter: logits differ by at most {parity.max_logit_difference:.2g} "
        f"(allowed {rule.max_logit_difference:g}), same greedy token at {parity.greedy_agreement:.4f} of the answer "
        f"positions (required {rule.min_greedy_agreement:g})"
    )
    return Reason(rule=rule.rule, metric="export_parity", outcome="pass" if close and agree else "fail", text=text)


def _at_least(rule: AtLeast, report: EvalReport) -> Reason:
    metric = _metric(report, rule.metric)
    if metric is None:
        return _missing(rule.rule, rule.metric, "candidate", report)
    if not all(map(math.isfinite, (metric.value, metric.low, metric.high))):
        text = f"{rule.metric}: {metric.value} [{metric.low}, {metric.high}] is not a finite number"
        return Reason(rule=rule.rule, metric=rule.metric, outcome="invalid", text=text)
    sign = 1.0 if metric.better == "higher" else -1.0
    worst, best = sorted((sign * metric.low, sign * metric.high))
    floor = sign * rule.value
    outcome = _outcome(passes=worst >= floor, fails=best < floor)
    text = (
        f"{rule.metric} {metric.value:.4f} [{metric.low:.4f}, {metric.high:.4f}], n={metric.n}, against {rule.value:g}"
    )
    return Reason(rule=rule.rule, metric=rule.metric, outcome=outcome, text=text)


def _compare(
    rule: MustImprove | MustNotRegress, report: EvalReport, samples: Samples, confidence: float, is_champion: bool
) -> Reason:
    reference: Who = rule.over if isinstance(rule, MustImprove) else rule.against
    if reference == "champion" and (is_champion or report.champion_digest is None):
        text = "the candidate is the champion" if is_champion else "no champion yet, nothing to compare with"
        return Reason(rule=rule.rule, metric=rule.metric, outcome="pass", text=text)
    metric = _metric(report, rule.metric)
    for who in ("candidate", reference):
        if metric is None or rule.metric not in samples.get(who, {}):
            return _missing(rule.rule, rule.metric, who, report)
    new, old = samples["candidate"][rule.metric], samples[reference][rule.metric]
    if problem := _unpaired(new, old):
        return Reason(rule=rule.rule, metric=rule.metric, outcome="invalid", text=f"{rule.metric}: {problem}")
    sign = 1.0 if metric is not None and metric.better == "higher" else -1.0
    ids = sorted(new)
    found = paired.difference([sign * new[i] for i in ids], [sign * old[i] for i in ids], confidence)
    if isinstance(rule, MustImprove):
        outcome = _outcome(passes=found.low > rule.by, fails=found.high <= rule.by)
        wanted = f"must exceed {rule.by:g}"
    else:
        outcome = _outcome(passes=found.low > -rule.margin, fails=found.high < -rule.margin)
        wanted = f"must stay above {-rule.margin:g}"
    text = (
        f"{rule.metric} against {reference}: better by {found.mean:+.4f}, {confidence:.0%} one-sided bounds "
        f"[{found.low:+.4f}, {found.high:+.4f}], n={found.n}; {wanted}"
    )
    if outcome == "undecided":
        text += ": these samples cannot tell; more test rows would"
    return Reason(
        rule=rule.rule, metric=rule.metric, outcome=outcome, text=text,
        difference=found.mean, low=found.low, high=found.high,
    )  # fmt: skip


def _metric(report: EvalReport, name: str) -> Metric | None:
    """The candidate's figure of this name, if it was measured."""
    scores = report.scores.get("candidate")
    return scores.metrics.get(name) if scores else None


def _outcome(passes: bool, fails: bool) -> Literal["pass", "fail", "undecided"]:
    return "pass" if passes else "fail" if fails else "undecided"


def _missing(rule: str, metric: str, who: str, report: EvalReport) -> Reason:
    scores = report.scores.get("champion" if who == "champion" else "base" if who == "base" else "candidate")
    known = ", ".join(sorted(scores.samples)) if scores else "nothing"
    text = f"{metric}: not measured per sample for {who}; there is: {known}"
    return Reason(rule=rule, metric=metric, outcome="invalid", text=text)


def _unpaired(new: Mapping[str, float], old: Mapping[str, float]) -> str | None:
    if not new:
        return "no samples"
    if differing := new.keys() ^ old.keys():
        return f"{len(differing)} samples were scored for one model only, e.g. {min(differing)}"
    bad = [key for scores in (new, old) for key, value in scores.items() if not math.isfinite(value)]
    return f"score of sample {bad[0]} is not a finite number" if bad else None


def read_samples(directory: Path, report: EvalReport) -> Samples:
    """Per-sample scores of an evaluation. Raises DamagedError when a sample appears twice."""
    found: dict[Who, dict[str, dict[str, float]]] = {}
    for who, scores in report.scores.items():
        for metric, name in scores.samples.items():
            rows = records.read_lines(directory / name)
            values = {str(row["id"]): float(row["value"]) for row in rows}
            if len(values) != len(rows):
                raise DamagedError(f"{directory / name}: a sample appears twice; run `dvc repro -f evaluate`")
            found.setdefault(who, {})[metric] = values
    return found


def gate(layout: Layout, settings: Settings) -> str:
    """Run the stage: write the verdict; a verdict that says no is a success of the stage."""
    from ratchet.services import plots
    from ratchet.services.tracking import Tracking

    files.verify(layout.evaluate, "evaluation")
    report, bundle = EvalReport.load(layout.eval_report), Bundle.load(layout.bundle)
    samples = read_samples(layout.evaluate, report)
    verdict = judge(report, bundle, samples, settings.gate, read_champion(layout.champion))
    with files.sealed_directory(layout.gate, "gate") as scratch:
        verdict.save(scratch / layout.verdict.name)
    tracking = Tracking(layout, settings.promote.model_name)
    run = tracking.observer(RunPaths(layout.runs / verdict.run_id), settings, plots.loss_curve)
    tracking.report(run, {}, {"gate": [layout.verdict]}, {"ratchet.verdict": verdict.decision})
    return describe(verdict)


def check(layout: Layout) -> tuple[bool, str]:
    """Whether the verdict on file is PROMOTE, and the verdict in words.

    Raises:
        GateError: there is no verdict, or it is about another model or another champion than those on file now.
    """
    if not layout.verdict.exists():
        raise GateError(f"{layout.verdict}: no verdict yet; run `dvc repro`")
    verdict = Verdict.load(layout.verdict)
    current = read_champion(layout.champion).champion
    champion = current.model_digest if current else None
    promoted = champion == verdict.model_digest  # by this very verdict, or it was champion already
    same_model = Bundle.load(layout.bundle).model_digest == verdict.model_digest
    if not same_model or not (promoted or champion == verdict.champion_digest):
        raise GateError(f"{layout.verdict}: is about an earlier model or champion; run `dvc repro`")
    return verdict.decision == "PROMOTE", describe(verdict)


def describe(verdict: Verdict) -> str:
    """The verdict for people: the decision, then a line a rule."""
    marks = {"pass": "pass", "fail": "FAIL", "undecided": "????", "invalid": "INVALID"}
    head = f"{verdict.decision}: model {verdict.model_digest[:12]}, run {verdict.run_id}"
    if verdict.is_champion:
        head += " (it is the champion)"
    elif verdict.decision == "PROMOTE":
        head += "; `ratchet promote` makes it champion"
    return "\n".join([head, *(f"  {marks[r.outcome]:4}  {r.rule}: {r.text}" for r in verdict.reasons)])
