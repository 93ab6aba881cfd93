"""Section `monitor` of params.yaml: comparison of the answers of a deployed model with its evaluation."""

from typing import Literal

from ratchet.config.fields import Fraction, Name, PositiveCount, Section


class Monitor(Section):
    """`ratchet monitor`: what an alarm does, and how rare false alarms are."""

    on_alarm: Literal["notify", "rollback"] = "notify"
    """Send the event `alarm` to the webhook; or also roll back the champion if its answers have changed."""
    requests_per_false_alarm: PositiveCount = 100_000
    """Within T requests, the probability of a false alarm is at most 1 % + T divided by this. Larger: later alarms."""
    score_metric: Name | None = None
    """Metric of the evaluation that the scores in the log measure. null: accuracy or exact_match."""
    score_margin: Fraction = 0.02
    """Smallest loss of the mean score that raises an alarm, as a fraction of the largest score."""
