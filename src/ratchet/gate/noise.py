"""The noise floor: how far the same model, scored twice, differs from itself (`ratchet gate --aa`)."""

from dataclasses import dataclass

from ratchet.config.gate import ForgettingRule, Gate, MustImproveRule, MustNotRegressRule
from ratchet.gate import messages, paired_test, validity
from ratchet.gate.evidence import GateEvidence, IncomparableError
from ratchet.gate.paired_test import PairedTestResult
from ratchet.gate.rules import GENERAL, RuleContext
from ratchet.storage.records.evaluation import MetricValue


@dataclass(frozen=True)
class MetricNoise:
    """What the second scoring changed of one metric."""

    name: str
    metric: MetricValue
    n: int
    differing: int
    """Samples whose scores are not the same."""
    found: PairedTestResult
    margin: float | None
    """The smallest that a rule asks of this metric."""

    @property
    def within(self) -> bool:
        """Whether the rules ask for more than noise."""
        return self.margin is None or abs(self.found.difference) <= self.margin


def measure_noise(evidence: GateEvidence, gate: Gate) -> list[MetricNoise]:
    """A line a metric that has samples and a direction.

    Raises:
        IncomparableError: nothing was scored twice, or it was another model, or under another contract.
    """
    noise = evidence.noise
    if noise is None:
        raise IncomparableError("nothing was scored twice yet; run `ratchet gate --aa`")
    margins, lines = _smallest_margins(gate), []
    plan = RuleContext(evidence, gate).plan(None)
    for name, metric in sorted(noise.metrics.items()):
        if metric.kind == "figure" or metric.better == "unknown":
            continue
        again = validity.pair_rescored_samples(evidence, name)
        if again is None:
            raise IncomparableError(
                f"what was scored twice is {noise.form} {noise.model_digest[:12]} under contract "
                f"{noise.contract[:12]}, not what was evaluated; run `ratchet gate --aa` again"
            )
        _, own, pairs = again
        differing = sum(new != old for new, old in zip(pairs.new, pairs.old, strict=True))
        found = paired_test.compare(pairs, 0.0, plan)
        lines.append(MetricNoise(name, own, len(pairs.new), differing, found, margins.get(name)))
    return lines


def _smallest_margins(gate: Gate) -> dict[str, float]:
    """The smallest difference that a rule is about, by metric; a rule about any difference at all has none."""
    asked = [(rule.metric, rule.margin) for rule in gate.rules if isinstance(rule, MustNotRegressRule)]
    asked += [(name, rule.by) for rule in gate.rules if isinstance(rule, MustImproveRule) for name in rule.metric]
    asked += [(GENERAL, rule.max_rise) for rule in gate.rules if isinstance(rule, ForgettingRule)]
    found: dict[str, float] = {}
    for name, margin in asked:
        if margin > 0:
            found[name] = min(margin, found.get(name, margin))
    return found


def format_noise_table(lines: list[MetricNoise], batch_rows: tuple[int, int], confidence: float) -> str:
    """A table for the terminal, a row a metric, and what it means."""
    table = [["", "samples", "differ", "of them", "difference", "at least", "at most", "rules allow", ""]]
    for line in lines:
        found, metric = line.found, line.metric
        table.append(
            [
                line.name, f"{line.n:,}", f"{line.differing:,}", f"{100 * line.differing / line.n:.1f} %",
                messages.format_signed_change(found.difference, metric),
                messages.format_signed_change(found.low, metric),
                messages.format_signed_change(found.high, metric),
                "-" if line.margin is None else messages.format_change(line.margin, metric),
                "within" if line.within else "NOISE",
            ]
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in table)
    first, second = batch_rows
    loud = [line.name for line in lines if not line.within]
    end = (
        f"the evaluation is noisier than the rules about {', '.join(loud)} allow: the gate says INVALID to them; "
        "widen the margins, or find out what differs (rows at once, threads, sampled answers)"
        if loud
        else "noise stays within what the rules allow"
    )
    head = (
        f"the same model twice ({first} rows at once, then {second}; "
        f"bounds {messages.format_percent(confidence)} sure, each); differences should be none"
    )
    return "\n".join([head, *(f"  {row}" for row in rows), end])
