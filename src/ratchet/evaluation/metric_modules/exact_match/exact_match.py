"""Whether an answer is the expected one, character for character; white space at its ends does not count."""

from typing import Any

import evaluate

from ratchet.evaluation.metric_modules.texts import metric_info


class ExactMatch(evaluate.Metric):  # type: ignore[misc]
    """1 for the expected answer, else 0."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(str(__doc__))

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        pairs = zip(predictions, references, strict=True)
        return {"exact_match": [float(answer.strip() == expected.strip()) for answer, expected in pairs]}
