"""Exact match: whether an answer equals the reference, ignoring leading and trailing whitespace."""

from typing import Any

import evaluate

from ratchet.evaluation.metric_modules.module_info import metric_info


class ExactMatch(evaluate.Metric):  # type: ignore[misc]
    """1 for the reference, else 0."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(str(__doc__))

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        pairs = zip(predictions, references, strict=True)
        return {"exact_match": [float(answer.strip() == reference.strip()) for answer, reference in pairs]}
