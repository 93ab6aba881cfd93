"""ROUGE-1, ROUGE-2 and ROUGE-L (F-measures, without stemming), by rouge_score.

Words are runs of letters and digits of any script, in lower case. The library's own tokenizer knows a-z and 0-9 only
and gives 0 to every answer in another script; for English both are the same. Scripts without spaces are not cut into
words.

Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", ACL workshop 2004.
"""

import re
from typing import Any

import evaluate
from rouge_score import rouge_scorer

from ratchet.evaluation.metric_modules.texts import metric_info

KINDS = ("rouge1", "rouge2", "rougeL")
WORD = re.compile(r"[^\W_]+")


class RougeWordTokenizer:
    """A tokenizer as rouge_score wants one."""

    def tokenize(self, text: str) -> list[str]:
        """Words of a text."""
        return WORD.findall(text.lower())


class Rouge(evaluate.Metric):  # type: ignore[misc]
    """F-measures between 0 and 1."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(str(__doc__), "Lin, ACL workshop 2004")

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        scorer = rouge_scorer.RougeScorer(list(KINDS), tokenizer=RougeWordTokenizer())
        found = [scorer.score(target=b, prediction=a) for a, b in zip(predictions, references, strict=True)]
        return {kind: [float(one[kind].fmeasure) for one in found] for kind in KINDS}
