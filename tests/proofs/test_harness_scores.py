"""Proves that benchmark scores equal those of the lm-evaluation-harness command."""

from typing import Any

import pytest

from harness_cases import (
    bench,  # noqa: F401 (a fixture)
    command,  # noqa: F401 (a fixture)
    of,
    ours,  # noqa: F401 (a fixture)
    theirs,  # noqa: F401 (a fixture)
    total,
)

PACKAGES = ("reports", "evaluation")


@pytest.mark.parametrize(
    ("task", "metric"),
    [
        ("choice", "acc"), ("choice", "acc_norm"), ("write", "exact_match"), ("write", "bleu"), ("write", "letters"),
        ("read", "word_perplexity"), ("read", "byte_perplexity"), ("read", "bits_per_byte"), ("last", "perplexity"),
        ("last", "acc"),
    ],
)  # fmt: skip
def test_scores_are_those_of_the_harness_command(task: str, metric: str, ours: Any, theirs: Any) -> None:
    assert total(of(ours[task], metric)) == pytest.approx(theirs["results"][task][f"{metric},none"], rel=1e-6)
