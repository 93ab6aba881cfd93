"""F1 of the words that answer and reference share, computed as for SQuAD.

Words are compared in lower case, without ASCII punctuation and without the articles a, an and the. Repeated words count
as often as they occur. If answer or reference has no words, the score is 1 if neither has any, else 0.

Source: Rajpurkar, Zhang, Lopyrev and Liang, "SQuAD: 100,000+ Questions for Machine Comprehension of Text", EMNLP 2016;
answers without words: Rajpurkar, Jia and Liang, "Know What You Don't Know", ACL 2018, evaluation script of SQuAD 2.0.
"""

import re
import string
from collections import Counter
from typing import Any

import evaluate

from ratchet.evaluation.metric_modules.module_info import metric_info

ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


class TokenF1(evaluate.Metric):  # type: ignore[misc]
    """F1 of shared words, between 0 and 1."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(str(__doc__), "Rajpurkar et al., EMNLP 2016")

    def _compute(self, predictions: list[str], references: list[str]) -> dict[str, Any]:
        return {
            "token_f1": [
                word_f1(normalize_words(a), normalize_words(b)) for a, b in zip(predictions, references, strict=True)
            ]
        }


def normalize_words(text: str) -> list[str]:
    """Return the words of a text that are compared."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def word_f1(answer: list[str], reference: list[str]) -> float:
    """Compute the harmonic mean of precision and recall of the shared words."""
    if not answer or not reference:
        return float(answer == reference)
    shared = sum((Counter(answer) & Counter(reference)).values())
    return 2 * shared / (len(answer) + len(reference))
