"""Text of verdicts: percentage points for proportions, percent for perplexities, and how many more samples to add."""

from ratchet.config.gate import Reference
from ratchet.storage.digests import SHORT
from ratchet.storage.records.evaluation import MetricValue
from ratchet.storage.records.gate import ModelComparison, Verdict

REFERENCES: dict[Reference, str] = {"base": "the base", "champion": "the champion", "anchor": "the anchor"}
OUTCOME_LABELS = {"pass": "pass", "fail": "FAIL", "undecided": "????", "invalid": "INVALID"}


def describe_verdict(verdict: Verdict) -> str:
    """Format a verdict for the terminal: the decision, then one line per rule."""
    head = f"{verdict.decision}: model {verdict.model_digest[:SHORT]}, run {verdict.run_id}"
    if verdict.is_champion:
        head += " (already the champion)"
    elif verdict.decision == "PROMOTE":
        head += "; run `ratchet promote` to make it the champion"
    lines = [f"  {OUTCOME_LABELS[r.outcome]:4}  {r.rule}: {r.text}" for r in verdict.reasons]
    if verdict.earlier_decisions:
        lines.append(f"  note  {describe_changed_rules(verdict)}")
    return "\n".join([head, *lines])


def describe_changed_rules(verdict: Verdict) -> str:
    """Return a warning that these samples were judged under different rules before."""
    return (
        f"under different rules the gate decided {', '.join(verdict.earlier_decisions)} for this model on these "
        "samples; a margin set after the results were seen is weaker evidence"
    )


def describe_comparison(comparison: ModelComparison, metric: MetricValue) -> str:
    """Describe a comparison: direction, size, bounds and number of samples."""
    amount = "the same as"
    if comparison.difference:
        direction = "better" if comparison.difference > 0 else "worse"
        amount = f"{format_change(comparison.difference, metric)} {direction} than"
    counts = f"{comparison.n} samples"
    if comparison.groups is not None:
        counts += f" in {comparison.groups} groups"
    if comparison.better is not None and comparison.worse is not None:
        counts += f", {comparison.better} better, {comparison.worse} worse"
    return (
        f"{comparison.metric} {amount} {REFERENCES[comparison.against]} "
        f"({format_percent(comparison.confidence)} confidence: at least "
        f"{format_signed_change(comparison.low, metric)}, at most {format_signed_change(comparison.high, metric)}; "
        f"{counts})"
    )


def is_share(metric: MetricValue) -> bool:
    """Return whether the metric is a proportion, such as the share of right answers."""
    return metric.unit == "proportion"


def format_value(value: float, metric: MetricValue) -> str:
    """Format a value of a metric: `84.5 %`, `1.234 nats`, `12.3`."""
    if is_share(metric):
        return f"{100 * value:.1f} %"
    return f"{value:.4g}{_unit_suffix(metric)}"


def format_change(difference: float, metric: MetricValue) -> str:
    """Format a difference without its sign: `2.5 points`, `3.1 %`, `0.031 nats`."""
    if metric.kind == "perplexity":
        return f"{format_number(100 * abs(difference))} %"
    if is_share(metric):
        number = format_number(100 * abs(difference))
        return f"{number} point{'' if number == '1' else 's'}"
    return f"{abs(difference):.3g}{_unit_suffix(metric)}"


def format_signed_change(difference: float, metric: MetricValue) -> str:
    """Format a difference with its sign."""
    return f"{'-' if difference < 0 else '+'}{format_change(difference, metric)}"


def format_percent(share: float) -> str:
    """Format a confidence or a fraction: `95 %`, `97.5 %`."""
    return f"{format_number(100 * share)} %"


def format_number(value: float) -> str:
    """Format with two decimals without trailing zeros, or with one significant digit if that would show nothing."""
    if value == 0 or abs(value) >= 0.01:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:.1g}"


def _unit_suffix(metric: MetricValue) -> str:
    return " nats" if metric.unit.startswith("nats") else ""
