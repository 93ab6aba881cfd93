"""Description of the metric modules for the library `evaluate`: inputs are pairs of texts, answer and reference."""

import datasets
import evaluate


def metric_info(description: str, citation: str = "") -> evaluate.MetricInfo:
    """Build the description that `evaluate` requires of a metric module.

    Args:
        description: Docstring of the module.
        citation: Sources.
    """
    text = datasets.Value("string")
    return evaluate.MetricInfo(
        description=description,
        citation=citation,
        inputs_description="predictions and references: one text each; the answers of one row are consecutive",
        features=datasets.Features({"predictions": text, "references": text}),
    )
