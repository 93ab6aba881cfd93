"""Metric points: each is stored once, with the step and the time of the journal, however often it is sent."""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from ratchet.run.shown import Point
from ratchet.tracked.experiment import Experiment, log_batch, run_tags

MAX_BATCH = 900
"""Metrics in one call, which takes 1,000 things in all."""
REPORT_STEP = 0
"""Figures of a whole run are points of their own, not of a training step."""
FROM_JOURNAL = ("train/", "validation/", "system/")
"""What keys begin with whose points have steps."""


class Stored:
    """Which steps MLflow has of one run. What is there is not sent again: steps that are done again after a crash, on
    this machine or on another, are told as they were the first time."""

    def __init__(self, experiment: Experiment, run: Any) -> None:
        """Asks for the keys that the run has, and for no others."""
        self._mlflow_id = run.info.run_id
        with experiment.connected() as client:
            keys = [key for key in run.data.metrics if key.startswith(FROM_JOURNAL)]
            histories = experiment.each([partial(client.get_metric_history, self._mlflow_id, key) for key in keys])
        self._steps = {key: {point.step for point in points} for key, points in zip(keys, histories, strict=True)}

    def send(self, client: Any, points: Iterable[Point], tags: Mapping[str, str]) -> None:
        """Store what is new of these points, and the tags."""
        from mlflow.entities import Metric

        new: dict[tuple[str, int], Any] = {}
        for point in points:
            if point.step not in self._steps.get(point.key, ()):
                new.setdefault(
                    (point.key, point.step), Metric(point.key, point.value, round(point.t * 1000), point.step)
                )
        metrics = list(new.values())
        for start in range(0, max(len(metrics), bool(tags)), MAX_BATCH):
            batch = metrics[start : start + MAX_BATCH]
            log_batch(client, self._mlflow_id, metrics=batch, tags=run_tags({} if start else tags))
            for metric in batch:
                self._steps.setdefault(metric.key, set()).add(metric.step)


def of_report(experiment: Experiment, client: Any, run: Any, figures: Mapping[str, float]) -> list[Any]:
    """Points for figures of the whole run, without those that MLflow shows already: a changed value is a later point.

    Args:
        experiment: of the run.
        client: MLflow's.
        run: as MLflow has it now.
        figures: by key.
    """
    from mlflow.entities import Metric

    changed = {key: value for key, value in figures.items() if run.data.metrics.get(key) != value}
    there = [key for key in changed if key in run.data.metrics]
    histories = experiment.each([partial(client.get_metric_history, run.info.run_id, key) for key in there])
    newest = {key: _newest(points) for key, points in zip(there, histories, strict=True)}
    now_ms = round(time.time() * 1000)
    return [Metric(key, value, max(now_ms, newest.get(key, 0) + 1), REPORT_STEP) for key, value in changed.items()]


def _newest(points: Sequence[Any]) -> int:
    return max((int(point.timestamp) for point in points if point.step == REPORT_STEP), default=0)
