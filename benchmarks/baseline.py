"""Compares a classical baseline (TF-IDF + logistic regression) with base and tuned model on the same split.

Run after `dvc repro`, in the project: `python benchmarks/baseline.py [--quick] [--json FILE]`. The targets are for the
bundled demonstration: the base scores low, and tuning improves it clearly. The baseline may score higher than a model
of two million parameters; the benchmark prints the difference in either case.
"""

import argparse
import sys
from pathlib import Path

from report import finish
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from ratchet.data import token_files
from ratchet.data.conversation import Conversation
from ratchet.data.splits import SplitName
from ratchet.evaluation.metrics import proportion_metric
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import EvaluationReport, MetricValue


def texts(layout: ProjectLayout, split: SplitName) -> tuple[list[str], list[str]]:
    """Return prompts and responses of a split."""
    rows = [Conversation.from_json(text) for text in token_files.open_split(layout.data, split)["conversation"]]
    return [row.prompt for row in rows], [row.response for row in rows]


def baseline(layout: ProjectLayout, quick: bool) -> MetricValue:
    """Return the accuracy of word and word-pair TF-IDF with logistic regression, trained on the training rows alone.
    Quick: words only."""
    prompts, labels = texts(layout, "train")
    model = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 1) if quick else (1, 2), sublinear_tf=True),
        LogisticRegression(C=10.0, max_iter=200 if quick else 2000),
    )
    model.fit(prompts, labels)
    test_prompts, test_labels = texts(layout, "test")
    found = model.predict(test_prompts)
    return proportion_metric([float(a == b) for a, b in zip(found, test_labels, strict=True)])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="single words, fewer iterations")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    layout = ProjectLayout.find(Path())
    if not layout.eval_report.is_file():
        print("skipped: no evaluation in this project to compare with (run `dvc repro` first)")
        return finish([], options.json)
    report = EvaluationReport.load(layout.eval_report)
    base = report.scores["base"].metrics["accuracy"]
    tuned = report.scores["candidate"].metrics["accuracy"]
    classical = baseline(layout, options.quick)
    behind = classical.value - tuned.value
    shown = [("base", base), ("tuned model", tuned), ("TF-IDF + logistic regression", classical)]
    for name, metric in shown:
        print(f"accuracy of {name:30} {metric.value:.3f} [{metric.low:.3f}, {metric.high:.3f}]  n={metric.n}")
    rows = [
        {"name": "accuracy of the base", "value": base.value, "target": "<= 0.10", "ok": base.value <= 0.10},
        {"name": "accuracy of the tuned model", "value": tuned.value, "target": ">= 0.70", "ok": tuned.value >= 0.70},
        {"name": "TF-IDF + LR ahead of the tuned model by", "value": behind, "target": "<= 0.20", "ok": behind <= 0.20},
    ]
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
