"""BLEU by sacrebleu: of each answer, and of all answers as one corpus with a bootstrap interval.

Sentence BLEU omits n-gram orders that an answer is too short for (effective order) and smooths exponentially, as
sacrebleu does for sentences. Corpus BLEU uses sacrebleu's defaults (tokenizer 13a, exponential smoothing). The 95 %
interval resamples rows with all their answers (Koehn, "Statistical Significance Tests for Machine Translation
Evaluation", EMNLP 2004).

Source: Papineni et al., ACL 2002; Post, "A Call for Clarity in Reporting BLEU Scores", WMT 2018.
"""

from typing import Any

import evaluate
import numpy as np
import sacrebleu

from ratchet.evaluation.metric_modules.module_info import metric_info

RESAMPLES = 1000


class Bleu(evaluate.Metric):  # type: ignore[misc]
    """BLEU in points, 0 to 100."""

    def _info(self) -> evaluate.MetricInfo:
        return metric_info(str(__doc__), "Papineni et al., ACL 2002; Post, WMT 2018")

    def _compute(
        self, predictions: list[str], references: list[str], answers_per_row: int = 1, seed: int = 0
    ) -> dict[str, Any]:
        scorer = sacrebleu.BLEU(effective_order=True)
        scores = [scorer.sentence_score(a, [b]) for a, b in zip(predictions, references, strict=True)]
        counts = np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in scores], dtype=np.int64)
        rows = counts.reshape(-1, answers_per_row, counts.shape[1]).sum(axis=1)
        rng = np.random.default_rng(seed)
        resampled = [corpus_score(rows[rng.integers(0, len(rows), len(rows))].sum(axis=0)) for _ in range(RESAMPLES)]
        low, high = np.percentile(resampled, [2.5, 97.5])
        return {
            "bleu": [one.score for one in scores],
            "corpus": corpus_score(rows.sum(axis=0)),
            "low": float(low),
            "high": float(high),
        }


def corpus_score(counts: Any) -> float:
    """Compute BLEU from summed counts: matching n-grams, n-grams, length of the answers, length of the references."""
    *grams, answer_length, reference_length = (int(x) for x in counts)
    half = len(grams) // 2
    score = sacrebleu.BLEU.compute_bleu(
        grams[:half], grams[half:], answer_length, reference_length, smooth_method="exp"
    )
    return float(score.score)
