"""What our metric modules have in common: they are given two texts at a time, an answer and what was expected."""

import datasets
import evaluate


def metric_info(about: str, citation: str = "") -> evaluate.MetricInfo:
    """What a module tells the library `evaluate` of itself: its own docstring, and sources."""
    text = datasets.Value("string")
    return evaluate.MetricInfo(
        description=about,
        citation=citation,
        inputs_description="predictions and references: a text each, the answers of a row behind each other",
        features=datasets.Features({"predictions": text, "references": text}),
    )
