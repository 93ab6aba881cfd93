"""Length of each answer, in characters (Unicode code points) and in words (runs without white space)."""

from typing import Any

import evaluate

from ratchet.evaluation.metric_modules.texts import metric_info


class Length(evaluate.Metric):  # type: ignore[misc]
    """Neither longer nor shorter is better."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(str(__doc__))

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        return {
            "length_characters": [float(len(answer)) for answer in predictions],
            "length_words": [float(len(answer.split())) for answer in predictions],
        }
