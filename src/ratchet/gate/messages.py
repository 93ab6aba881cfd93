"""Verdicts in words: points for proportions, per cent for perplexities, and what would help where data cannot tell."""

from ratchet.config.gate import Reference
from ratchet.storage.digests import SHORT
from ratchet.storage.records.evaluation import MetricValue
from ratchet.storage.records.gate import ModelComparison, Verdict

REFERENCES: dict[Reference, str] = {"base": "the base", "champion": "the champion", "anchor": "the anchor"}
MARKS = {"pass": "pass", "fail": "FAIL", "undecided": "????", "invalid": "INVALID"}


def is_share(metric: MetricValue) -> bool:
    """Whether the metric counts right answers, or another share."""
    return metric.unit == "proportion"


def format_value(value: float, metric: MetricValue) -> str:
    """A value of a metric: `84.5 %`, `1.234 nats`, `12.3`."""
    if is_share(metric):
        return f"{100 * value:.1f} %"
    return f"{value:.4g}{_unit_suffix(metric)}"


def format_change(difference: float, metric: MetricValue) -> str:
    """A difference, without its sign: `2.5 points`, `3.1 %`, `0.031 nats`."""
    if metric.kind == "perplexity":
        return f"{format_number(100 * abs(difference))} %"
    if is_share(metric):
        shown = format_number(100 * abs(difference))
        return f"{shown} point{'' if shown == '1' else 's'}"
    return f"{abs(difference):.3g}{_unit_suffix(metric)}"


def format_signed_change(difference: float, metric: MetricValue) -> str:
    """A difference with its sign."""
    return f"{'-' if difference < 0 else '+'}{format_change(difference, metric)}"


def format_number(value: float) -> str:
    """Two decimals, trailing zeros left out; one significant digit of what is smaller than these."""
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:.1g}"


def _unit_suffix(metric: MetricValue) -> str:
    return " nats" if metric.unit.startswith("nats") else ""


def format_percent(share: float) -> str:
    """A confidence or a fraction: `95 %`, `97.5 %`."""
    return f"{format_number(100 * share)} %"


def describe_comparison(found: ModelComparison, metric: MetricValue) -> str:
    """A comparison: which way, how much, how sure, of how many samples."""
    way = "better than" if found.difference >= 0 else "worse than"
    amount = f"{format_change(found.difference, metric)} {way}" if found.difference else "no different from"
    counts = f"{found.n} samples"
    if found.groups is not None:
        counts += f" in {found.groups} groups"
    if found.better is not None and found.worse is not None:
        counts += f", {found.better} better, {found.worse} worse"
    return (
        f"{found.metric} {amount} {REFERENCES[found.against]} ({format_percent(found.confidence)} sure: at least "
        f"{format_signed_change(found.low, metric)}, at most {format_signed_change(found.high, metric)}; {counts})"
    )


def describe_verdict(verdict: Verdict) -> str:
    """The verdict for the terminal: the decision, then a line a rule."""
    head = f"{verdict.decision}: model {verdict.model_digest[:SHORT]}, run {verdict.run_id}"
    if verdict.is_champion:
        head += " (it is the champion)"
    elif verdict.decision == "PROMOTE":
        head += "; `ratchet promote` makes it champion"
    lines = [f"  {MARKS[r.outcome]:4}  {r.rule}: {r.text}" for r in verdict.reasons]
    if verdict.judged_before:
        lines.append(f"  note  {describe_changed_rules(verdict)}")
    return "\n".join([head, *lines])


def describe_changed_rules(verdict: Verdict) -> str:
    """That the rules were others when these samples were first judged by."""
    return (
        f"under other rules the gate said {', '.join(verdict.judged_before)} of this model on these samples; "
        "a margin that is set after the look proves less"
    )
