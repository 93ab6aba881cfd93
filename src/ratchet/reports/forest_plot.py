"""Formats values of metrics, and renders the gate's comparisons as a forest plot with a table."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ratchet.storage import html
from ratchet.storage.html import NONE, Html, explanation, tag
from ratchet.storage.records.evaluation import EvaluationReport, MetricValue, ModelRole
from ratchet.storage.records.gate import ModelComparison, RuleResult, Verdict

ROLES: tuple[ModelRole, ...] = ("base", "candidate", "merged", "champion", "anchor")
"""Evaluated models, in display order."""

REFERENCES: tuple[ModelRole, ...] = ("champion", "base", "anchor")
"""Reference models of the comparisons, in display order."""

MINUS = "\u2212"


SHAPES = {
    "pass": ("M0-7a7 7 0 1 1-.01 0z", "M-3.4.2-1 2.7 3.6-2.4"),
    "fail": ("M-6.4-6.4h12.8v12.8h-12.8z", "M-3-3 3 3M3-3-3 3"),
    "undecided": ("M0-8 8 0 0 8-8 0z", "M-3.4 0h6.8"),
    "invalid": ("M0-8 8 6.4h-16z", "M0-3.6V1.6M0 3.8v.4"),
}
"""Outline and inner symbol of each outcome, so that outcomes are distinguishable without colour."""

OUTCOME_WORDS = {"pass": "holds", "fail": "fails", "undecided": "undecided", "invalid": "invalid"}
"""Word for each outcome."""

STRIP_PX, AXIS_PX = 44, 30
"""Height of the plot of one comparison, and height of the axis, in pixels."""
END_PX = 5
"""Half the height of the caps of an interval, in pixels."""
PADDING = 0.05
"""Padding on both sides of the axis, as a fraction of its range."""
TICKS = 5
"""Approximate number of ticks."""
PLOT_NOTE = (
    "Each line is one paired comparison on the same samples. To the right of zero the candidate is better. "
    "The line spans the lower and upper one-sided bounds. The dashed line is the threshold of the rule (the margin, "
    "or the required improvement). The shaded area is too small to detect with this many samples at the planned power. "
    "A margin inside the shaded area gives HOLD."
)


@dataclass(frozen=True)
class MetricScale:
    """Unit and format of the differences of a metric. Comparisons with the same scale share an axis."""

    unit: str
    factor: float
    places: int | None
    """Number of digits after the decimal point. None: as many as four significant digits need."""

    def signed(self, amount: float) -> str:
        """Format an amount with its sign, including infinity."""
        return ("+" if amount > 0 else MINUS if amount < 0 else "") + self.plain(amount)

    def plain(self, amount: float) -> str:
        """Format an amount without its sign."""
        if math.isnan(amount):
            return NONE
        amount = abs(amount) * self.factor
        if math.isinf(amount):
            return "\u221e"
        return format_significant(amount) if self.places is None else f"{amount:,.{self.places}f}"


POINTS, PERCENT = MetricScale("percentage points", 100.0, 2), MetricScale("per cent of the perplexity", 100.0, 2)


def metric_scale(metric: MetricValue | None) -> MetricScale:
    """Return the scale of a metric's paired differences. The unit of an unmeasured metric is unknown."""
    if metric is None:
        return MetricScale("unknown unit", 1.0, None)
    if metric.kind == "perplexity":
        return PERCENT
    return POINTS if metric.unit == "proportion" else MetricScale(metric.unit, 1.0, None)


def find_metric(report: EvaluationReport, name: str) -> MetricValue | None:
    """Find a metric in the scores of any model. Unit and direction are the same for all models."""
    metrics = (scores.metrics[name] for scores in report.scores.values() if name in scores.metrics)
    return next(metrics, None)


def format_significant(amount: float) -> str:
    """Format with four significant digits, or all digits before the decimal point: `0.01234`, `12.35`, `12,346`."""
    if not math.isfinite(amount):
        return NONE if math.isnan(amount) else f"{MINUS if amount < 0 else ''}\u221e"
    return f"{amount:,.0f}" if abs(amount) >= 1000 else f"{amount:.4g}"


def format_metric(metric: MetricValue, value: float) -> str:
    """Format a value of a metric."""
    return f"{value:.1%}".replace("%", "\u00a0%") if metric.unit == "proportion" else format_significant(value)


def render_interval(metric: MetricValue | None) -> Html:
    """Render a value with its 95 % interval below, or a dash if it was not measured."""
    if metric is None:
        return Html(NONE)
    return tag(
        "span",
        format_metric(metric, metric.value),
        tag("small", f"{format_metric(metric, metric.low)} to {format_metric(metric, metric.high)}"),
    )


def format_p_value(p: float | None) -> str:
    """Format a p-value."""
    return NONE if p is None or math.isnan(p) else "<\u00a00.001" if p < 0.001 else f"{p:.3f}"


def render_outcome(outcome: str, word: str) -> Html:
    """Render an outcome as coloured shape and word."""
    outline, inner = SHAPES[outcome]
    icon = tag("svg", tag("path", d=outline), tag("path", d=inner, class_="sign"), viewBox="-8 -8 16 16", width="16",
                height="16", aria_hidden="true")  # fmt: skip
    return tag("span", icon, word, class_=f"outcome {outcome}")


def render_digest(fingerprint: str | None) -> Html:
    """Render the beginning of a digest, with the full digest as tooltip."""
    return tag("code", fingerprint[:12], title=fingerprint) if fingerprint else Html(NONE)


# The comparisons as a forest plot, one axis per unit, and the same values as a table.


@dataclass(frozen=True)
class ForestPlotRow:
    """One comparison of one rule."""

    reason: RuleResult
    comparison: ModelComparison
    scale: MetricScale


@dataclass(frozen=True)
class ForestPlotAxis:
    """Range of the horizontal axis, in units of the metric."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Return the position of a value from 0 to 1, clipped to the axis."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def place(self, value: float) -> str:
        """Return the position as a percentage of the width."""
        return f"{100 * self.share(value):.3f}%"


def render_comparisons(verdict: Verdict, report: EvaluationReport) -> Sequence[Html] | str:
    """Render the section: one plot per unit, then the table."""
    lines = [
        ForestPlotRow(reason, comparison, metric_scale(find_metric(report, comparison.metric)))
        for reason in verdict.reasons
        for comparison in reason.comparisons
    ]
    if not lines:
        return "No rule compares two models."
    content = [explanation(PLOT_NOTE)]
    for unit in dict.fromkeys(line.scale for line in lines):
        content.append(_render_plot(unit, [line for line in lines if line.scale == unit]))
    heads = ("comparison", "difference", "threshold", "n", "p", "detectable", "samples needed", "method")
    table = html.table("Comparisons", "tnnnnnnt", heads, [_format_numbers(line) for line in lines])
    return [*content, tag("h3", "Values"), table]


def _render_plot(unit: MetricScale, lines: Sequence[ForestPlotRow]) -> Html:
    axis = _build_axis([line.comparison for line in lines])
    rows = [part for line in lines for part in _render_row(line, axis)]
    plot = tag("div", *rows, tag("span", class_="tick"), _render_axis_line(unit, axis), class_="forest")
    return tag("figure", tag("figcaption", f"Difference in {unit.unit}"), plot)


def _build_axis(comparisons: Sequence[ModelComparison]) -> ForestPlotAxis:
    values = [0.0]
    for comparison in comparisons:
        values += [
            value
            for value in (comparison.difference, comparison.low, comparison.high, comparison.bound)
            if math.isfinite(value)
        ]
    low, high = min(values), max(values)
    if low == high:
        # If no difference was measured, the detectable difference sets the scale.
        low, high = -1.0, 1.0
        if detectable := [comparison.detectable for comparison in comparisons if 0 < comparison.detectable < math.inf]:
            low, high = -2 * max(detectable), 2 * max(detectable)
    padding = PADDING * (high - low)
    return ForestPlotAxis(low - padding, high + padding)


def _render_row(line: ForestPlotRow, axis: ForestPlotAxis) -> Iterator[Html]:
    """Render name, plot and main values of one comparison."""
    comparison, unit = line.comparison, line.scale
    yield tag(
        "div", tag("strong", tag("bdi", comparison.metric)), tag("small", _describe_comparison(line)), class_="name"
    )
    yield _render_strip(line, axis)
    counts = f"n {comparison.n:,}"
    if comparison.better is not None and comparison.worse is not None:
        counts += f", {comparison.better:,} better, {comparison.worse:,} worse"
    counts += f"; detects {unit.plain(comparison.detectable)}"
    outcome = render_outcome(line.reason.outcome, OUTCOME_WORDS[line.reason.outcome])
    yield tag("div", tag("strong", unit.signed(comparison.difference)), outcome, tag("small", counts), class_="found")


def _render_strip(line: ForestPlotRow, axis: ForestPlotAxis) -> Html:
    """Render the plot of one comparison, as high as its row so that the zero lines connect."""
    comparison, unit = line.comparison, line.scale
    parts = []
    if math.isfinite(comparison.detectable):
        left, right = axis.share(-comparison.detectable), axis.share(comparison.detectable)
        x, width = f"{100 * left:.3f}%", f"{100 * (right - left):.3f}%"
        parts.append(tag("rect", x=x, y="0", width=width, height="100%", class_="seen"))
    zero = axis.place(0.0)
    parts.append(tag("line", x1=zero, x2=zero, y1="0", y2="100%", class_="zero"))
    if comparison.bound:
        bound = axis.place(comparison.bound)
        parts.append(tag("line", x1=bound, x2=bound, y1="0", y2="100%", class_="dashed"))
    if not math.isnan(comparison.difference):
        parts += _draw_interval(line, axis, f"{STRIP_PX / 2:g}")
    description = (
        f"{comparison.metric} against {comparison.against}: {unit.signed(comparison.difference)} {unit.unit}, "
        f"bounds {unit.signed(comparison.low)} and {unit.signed(comparison.high)}, "
        f"threshold {unit.signed(comparison.bound)}; the rule {OUTCOME_WORDS[line.reason.outcome]}"
    )
    return tag("svg", *parts, width="100%", height=str(STRIP_PX), role="img", aria_label=description, class_="strip")


def _draw_interval(line: ForestPlotRow, axis: ForestPlotAxis, y: str) -> Iterator[Html]:
    """Draw both bounds and the difference, in the shape of the outcome."""
    comparison, outcome = line.comparison, line.reason.outcome
    low, high = axis.place(comparison.low), axis.place(comparison.high)
    yield tag("line", x1=low, x2=high, y1=y, y2=y, class_="bounds")
    for value, place in ((comparison.low, low), (comparison.high, high)):
        # A bound that is not finite is drawn as an arrow.
        end = f"M0-{END_PX}V{END_PX}" if math.isfinite(value) else "M-7-5 0 0-7 5" if value > 0 else "M7-5 0 0 7 5"
        yield _place_content(place, y, tag("path", d=end, class_="end"))
    outline, inner = SHAPES[outcome]
    shape = (tag("path", d=outline), tag("path", d=inner, class_="sign"))
    yield _place_content(axis.place(comparison.difference), y, *shape, kind=f"outcome {outcome}")


def _place_content(x: str, y: str, *content: Html, kind: str = "") -> Html:
    """Place content at a position given in per cent."""
    return tag("svg", tag("g", *content, class_=kind), x=x, y=y, width="1", height="1")


def _render_axis_line(unit: MetricScale, axis: ForestPlotAxis) -> Html:
    parts = [tag("line", x1="0", x2="100%", y1="0", y2="0", class_="zero")]
    for tick in _axis_ticks(axis):
        x, share = axis.place(tick), axis.share(tick)
        parts.append(tag("line", x1=x, x2=x, y1="0", y2="4", class_="zero"))
        anchor = "start" if share < 0.04 else "end" if share > 0.96 else "middle"
        label = "0" if tick == 0 else ("+" if tick > 0 else "\u2212") + f"{abs(tick) * unit.factor:g}"
        parts.append(tag("text", label, x=x, y="18", text_anchor=anchor))
    return tag("svg", *parts, width="100%", height=str(AXIS_PX), aria_hidden="true", class_="ticks")


def _axis_ticks(axis: ForestPlotAxis) -> list[float]:
    """Return round tick values of 1, 2 or 5 times a power of ten, including zero."""
    rough = (axis.high - axis.low) / TICKS
    ten = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * ten for factor in (1, 2, 5, 10) if factor * ten >= rough * (1 - 1e-9))
    first, last = math.ceil(axis.low / step), math.floor(axis.high / step)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def _format_numbers(line: ForestPlotRow) -> list[str]:
    comparison, unit = line.comparison, line.scale
    name = f"{_describe_comparison(line)}; {unit.unit}"
    bounds = f"{unit.signed(comparison.low)} to {unit.signed(comparison.high)}"
    counts = [f"in {comparison.groups:,} groups"] if comparison.groups is not None else []
    if comparison.better is not None and comparison.worse is not None:
        counts.append(f"{comparison.better:,} better, {comparison.worse:,} worse")
    adjusted = "" if comparison.p_adjusted is None else f"Holm {format_p_value(comparison.p_adjusted)}"
    return [
        tag("span", tag("bdi", comparison.metric), tag("small", name)),
        _render_pair(unit.signed(comparison.difference), bounds),
        unit.signed(comparison.bound),
        _render_pair(f"{comparison.n:,}", ", ".join(counts)),
        _render_pair(format_p_value(comparison.p), adjusted),
        unit.plain(comparison.detectable),
        _format_required_samples(line),
        _render_pair(comparison.method, f"bounds at {comparison.confidence:.3g} each"),
    ]


def _format_required_samples(line: ForestPlotRow) -> str:
    """Format the number of required samples. For a threshold of zero, this number cannot be derived."""
    needed = line.comparison.required_samples
    if line.reason.outcome == "pass" or needed is None:
        return "sufficient" if line.comparison.bound else NONE
    return f"{needed:,}"


def _render_pair(value: str, note: str) -> Html:
    """Render a value with a note in small print below."""
    return tag("span", value, tag("small", note))


def _describe_comparison(line: ForestPlotRow) -> str:
    return f"against {line.comparison.against}, {line.comparison.role}, {line.reason.rule.replace('_', ' ')}"
