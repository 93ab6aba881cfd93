"""Whether an answer is the expected one, character for character; white space at its ends does not count."""

from typing import Any

import datasets
import evaluate


class ExactMatch(evaluate.Metric):  # type: ignore[misc]
    """1 for the expected answer, else 0."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=str(__doc__),
            citation="",
            inputs_description="predictions and references: a text each",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        pairs = zip(predictions, references, strict=True)
        return {"exact_match": [float(answer.strip() == expected.strip()) for answer, expected in pairs]}
