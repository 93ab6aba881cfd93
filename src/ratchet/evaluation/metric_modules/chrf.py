"""chrF of each answer by sacrebleu: F-score of shared character n-grams up to six, with recall counted twice.

Source: Popovic, "chrF: character n-gram F-score for automatic MT evaluation", WMT 2015.
"""

from typing import Any

import evaluate
import sacrebleu

from ratchet.evaluation.metric_modules.module_info import metric_info


class Chrf(evaluate.Metric):  # type: ignore[misc]
    """chrF in points, 0 to 100."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(str(__doc__), "Popovic, WMT 2015")

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        scorer = sacrebleu.CHRF()
        return {"chrf": [scorer.sentence_score(a, [b]).score for a, b in zip(predictions, references, strict=True)]}
