"""Intervals of figures whose samples are all the same, which is no certainty."""

from ratchet.measures.figures import proportion
from ratchet.records_evaluation import Metric

NO_WIDTH = 1e-9
"""Of the range of a figure: what rounding leaves of an interval without width."""


def widened(metric: Metric, most: float = 1.0) -> Metric:
    """The same with Wilson's interval, if a normal one has no width because no sample differs from another.

    Numbers between 0 and `most` vary the most, for their mean, where each is one of these two: a share. So the interval
    of a share is never too short for them.

    Args:
        metric: mean of samples, each between 0 and `most`.
        most: in the metric's unit.
    """
    if metric.high - metric.low > NO_WIDTH * most:
        return metric
    share = proportion([metric.value / most] * metric.n)
    low, high = min(metric.value, share.low * most), max(metric.value, share.high * most)
    return metric.model_copy(update={"low": low, "high": high})
