"""Noise floor of an evaluation: how far the same model, scored twice, differs from itself (`ratchet gate --aa`)."""

from dataclasses import dataclass

from ratchet.config.gate import ForgettingRule, Gate, MustImproveRule, MustNotRegressRule
from ratchet.quality_gate import messages, paired_test, validity
from ratchet.quality_gate.evidence import GateEvidence, IncomparableError
from ratchet.quality_gate.paired_test import PairedTestResult
from ratchet.quality_gate.rules import GENERAL_PERPLEXITY, RuleContext
from ratchet.storage.records.evaluation import MetricValue


@dataclass(frozen=True)
class MetricNoise:
    """Difference between the first and the second scoring in one metric."""

    name: str
    metric: MetricValue
    n: int
    differing: int
    """Samples whose scores differ."""
    result: PairedTestResult
    margin: float | None
    """Smallest difference that a rule tests in this metric; None if no rule has a margin for it."""

    @property
    def is_within_margin(self) -> bool:
        """Whether the noise is at most the margin."""
        return self.margin is None or abs(self.result.difference) <= self.margin


def measure_noise(evidence: GateEvidence, gate: Gate) -> list[MetricNoise]:
    """Measure the noise of each metric that has samples and a direction.

    Raises:
        IncomparableError: No model was scored twice, or it was another model or another contract.
    """
    noise = evidence.noise
    if noise is None:
        raise IncomparableError("no model was scored twice yet; run `ratchet gate --aa`")
    margins, lines = _smallest_margins(gate), []
    plan = RuleContext(evidence, gate).build_plan(None)
    for name, metric in sorted(noise.metrics.items()):
        if metric.kind == "aggregate" or metric.better == "unknown":
            continue
        rescored = validity.pair_rescored_samples(evidence, name)
        if rescored is None:
            raise IncomparableError(
                f"the second scoring is of {noise.model_format} {noise.model_digest[:12]} under contract "
                f"{noise.contract[:12]}, not of the evaluated model; run `ratchet gate --aa` again"
            )
        _, metric_value, pairs = rescored
        differing = sum(new != old for new, old in zip(pairs.new, pairs.old, strict=True))
        result = paired_test.compare(pairs, 0.0, plan)
        lines.append(MetricNoise(name, metric_value, len(pairs.new), differing, result, margins.get(name)))
    return lines


def _smallest_margins(gate: Gate) -> dict[str, float]:
    """Return the smallest positive margin of the rules, by metric."""
    tested = [(rule.metric, rule.margin) for rule in gate.rules if isinstance(rule, MustNotRegressRule)]
    tested += [(name, rule.by) for rule in gate.rules if isinstance(rule, MustImproveRule) for name in rule.metric]
    tested += [(GENERAL_PERPLEXITY, rule.max_rise) for rule in gate.rules if isinstance(rule, ForgettingRule)]
    margins: dict[str, float] = {}
    for name, margin in tested:
        if margin > 0:
            margins[name] = min(margin, margins.get(name, margin))
    return margins


def format_noise_table(lines: list[MetricNoise], batch_rows: tuple[int, int], confidence: float) -> str:
    """Format the noise for the terminal: one row per metric, then a conclusion."""
    table = [["", "samples", "differ", "share", "difference", "at least", "at most", "margin", ""]]
    for line in lines:
        result, metric = line.result, line.metric
        table.append(
            [
                line.name, f"{line.n:,}", f"{line.differing:,}", f"{100 * line.differing / line.n:.1f} %",
                messages.format_signed_change(result.difference, metric),
                messages.format_signed_change(result.low, metric),
                messages.format_signed_change(result.high, metric),
                "-" if line.margin is None else messages.format_change(line.margin, metric),
                "within" if line.is_within_margin else "NOISE",
            ]
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    first, second = batch_rows
    noisy = [line.name for line in lines if not line.is_within_margin]
    conclusion = (
        f"the noise exceeds the margin of the rules about {', '.join(noisy)}, so the gate returns INVALID for them; "
        "widen the margins, or find the cause (batch size, threads, sampled answers)"
        if noisy
        else "the noise is within the margins of all rules"
    )
    head = (
        f"the same model scored twice (batches of {first} rows, then {second}; each bound with "
        f"{messages.format_percent(confidence)} confidence); all differences should be zero"
    )
    return "\n".join([head, *(f"  {row}" for row in rows), conclusion])
