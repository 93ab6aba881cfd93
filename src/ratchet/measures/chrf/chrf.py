"""chrF of each answer, by sacrebleu: F-score of shared character n-grams up to six, recall counting twice.

Source: Popovic, "chrF: character n-gram F-score for automatic MT evaluation", WMT 2015.
"""

from typing import Any

import datasets
import evaluate
import sacrebleu


class Chrf(evaluate.Metric):  # type: ignore[misc]
    """chrF in points, 0 to 100."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=str(__doc__),
            citation="Popovic, WMT 2015",
            inputs_description="predictions and references: a text each",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        scorer = sacrebleu.CHRF()
        return {"chrf": [scorer.sentence_score(a, [b]).score for a, b in zip(predictions, references, strict=True)]}
