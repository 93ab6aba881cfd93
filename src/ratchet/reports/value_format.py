"""How the gate's figures are written for people: models, units, amounts, and outcomes as word, colour and shape."""

import math
from dataclasses import dataclass

from ratchet.storage.html import NONE, Html, tag
from ratchet.storage.records.evaluation import EvalReport, Metric, Who

WHO: tuple[Who, ...] = ("base", "candidate", "merged", "champion", "anchor")

REFERENCES: tuple[Who, ...] = ("champion", "base", "anchor")
"""What a candidate is compared with, in the order in which people ask."""

MINUS = "\u2212"


SHAPES = {
    "pass": ("M0-7a7 7 0 1 1-.01 0z", "M-3.4.2-1 2.7 3.6-2.4"),
    "fail": ("M-6.4-6.4h12.8v12.8h-12.8z", "M-3-3 3 3M3-3-3 3"),
    "undecided": ("M0-8 8 0 0 8-8 0z", "M-3.4 0h6.8"),
    "invalid": ("M0-8 8 6.4h-16z", "M0-3.6V1.6M0 3.8v.4"),
}
"""Outline and sign of an outcome: each is known without its colour."""

SAID = {"pass": "holds", "fail": "fails", "undecided": "undecided", "invalid": "invalid"}
"""Outcomes as they are read."""


@dataclass(frozen=True)
class Scale:
    """How differences of one kind of metric are written; only those of one scale share an axis."""

    unit: str
    factor: float
    places: int | None
    """After the decimal point; None: as many as four digits need."""

    def signed(self, amount: float) -> str:
        """A number with its sign; infinity, too."""
        return ("+" if amount > 0 else MINUS if amount < 0 else "") + self.plain(amount)

    def plain(self, amount: float) -> str:
        """The amount without its sign."""
        if math.isnan(amount):
            return NONE
        amount = abs(amount) * self.factor
        if math.isinf(amount):
            return "\u221e"
        return digits(amount) if self.places is None else f"{amount:,.{self.places}f}"


POINTS, PERCENT = Scale("percentage points", 100.0, 2), Scale("per cent of the perplexity", 100.0, 2)


def scale(metric: Metric | None) -> Scale:
    """Of a metric's paired differences; one that nobody measured has no unit."""
    if metric is None:
        return Scale("no unit known", 1.0, None)
    if metric.kind == "perplexity":
        return PERCENT
    return POINTS if metric.unit == "proportion" else Scale(metric.unit, 1.0, None)


def measured(report: EvalReport, name: str) -> Metric | None:
    """A metric as one of the models shows it: unit and direction are those of all."""
    found = (scores.metrics[name] for scores in report.scores.values() if name in scores.metrics)
    return next(found, None)


def digits(amount: float) -> str:
    """Four digits, or all before the point: `0.01234`, `12.35`, `12,346`."""
    if not math.isfinite(amount):
        return NONE if math.isnan(amount) else f"{MINUS if amount < 0 else ''}\u221e"
    return f"{amount:,.0f}" if abs(amount) >= 1000 else f"{amount:.4g}"


def amount(metric: Metric, value: float) -> str:
    """A value of a metric."""
    return f"{value:.1%}".replace("%", "\u00a0%") if metric.unit == "proportion" else digits(value)


def interval(metric: Metric | None) -> Html:
    """Value, and below it the 95 % interval; a dash for what was not measured."""
    if metric is None:
        return Html(NONE)
    return tag(
        "span",
        amount(metric, metric.value),
        tag("small", f"{amount(metric, metric.low)} to {amount(metric, metric.high)}"),
    )


def probability(p: float | None) -> str:
    """A p-value."""
    return NONE if p is None or math.isnan(p) else "<\u00a00.001" if p < 0.001 else f"{p:.3f}"


def sign(outcome: str, word: str) -> Html:
    """An outcome as coloured shape and word."""
    outline, inner = SHAPES[outcome]
    drawn = tag("svg", tag("path", d=outline), tag("path", d=inner, class_="sign"), viewBox="-8 -8 16 16", width="16",
                height="16", aria_hidden="true")  # fmt: skip
    return tag("span", drawn, word, class_=f"outcome {outcome}")


def short(fingerprint: str | None) -> Html:
    """The beginning of a digest, the whole of it on demand."""
    return tag("code", fingerprint[:12], title=fingerprint) if fingerprint else Html(NONE)
