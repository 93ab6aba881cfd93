"""Length of each answer, in characters (Unicode code points) and in words (runs without white space)."""

from typing import Any

import datasets
import evaluate


class Length(evaluate.Metric):  # type: ignore[misc]
    """Neither longer nor shorter is better."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=str(__doc__),
            citation="",
            inputs_description="predictions: a text each; references are not looked at",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        return {
            "length_characters": [float(len(answer)) for answer in predictions],
            "length_words": [float(len(answer.split())) for answer in predictions],
        }
