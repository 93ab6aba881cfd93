"""ROUGE-1, ROUGE-2 and ROUGE-L (F-measures without stemming) by rouge_score.

Words are lower-case runs of letters and digits of any script. The library's own tokenizer only knows a-z and 0-9, so it
gives 0 to every answer in another script; for English both tokenizers agree. Scripts without spaces are not segmented.

Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", ACL workshop 2004.
"""

import re
from typing import Any

import evaluate
from rouge_score import rouge_scorer

from ratchet.evaluation.metric_modules.module_info import metric_info

KINDS = ("rouge1", "rouge2", "rougeL")
WORD = re.compile(r"[^\W_]+")


class RougeWordTokenizer:
    """Tokenizer with the interface of rouge_score."""

    def tokenize(self, text: str) -> list[str]:
        """Split a text into words."""
        return WORD.findall(text.lower())


class Rouge(evaluate.Metric):  # type: ignore[misc]
    """F-measures between 0 and 1."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(str(__doc__), "Lin, ACL workshop 2004")

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        scorer = rouge_scorer.RougeScorer(list(KINDS), tokenizer=RougeWordTokenizer())
        scores = [scorer.score(target=b, prediction=a) for a, b in zip(predictions, references, strict=True)]
        return {kind: [float(one[kind].fmeasure) for one in scores] for kind in KINDS}
