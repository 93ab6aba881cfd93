"""Length of each answer in characters (Unicode code points) and in words (runs without whitespace)."""

from typing import Any

import evaluate

from ratchet.evaluation.metric_modules.module_info import metric_info


class Length(evaluate.Metric):  # type: ignore[misc]
    """Lengths; neither longer nor shorter is better."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(str(__doc__))

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        return {
            "length_characters": [float(len(answer)) for answer in predictions],
            "length_words": [float(len(answer.split())) for answer in predictions],
        }
