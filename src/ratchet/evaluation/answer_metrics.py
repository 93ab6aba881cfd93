"""Metrics of generated answers, computed by the library `evaluate` with the modules in metric_modules.

The modules are loaded from their file path, so nothing is downloaded. `evaluate` copies a module into a cache before it
imports it, and by default trusts the contents of ~/.cache/huggingface. Here the cache is a private temporary folder.
"""

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config.evaluate import BUILTIN_METRICS, Evaluate
from ratchet.config.extensions import load_extension
from ratchet.errors import SettingsError
from ratchet.evaluation import metric_modules
from ratchet.evaluation.metrics import POINTS, SHARE, Better, mean_score_metric
from ratchet.storage.records.evaluation import MetricValue

MODULES = Path(str(metric_modules.__file__)).parent

EXTENSION_UNIT = "score, mean of samples"
"""Unit of metrics of installed packages."""

PATTERN_TIMEOUT_S = 20.0
"""Time limit of a regular expression on all answers together; ordinary ones take microseconds per answer."""

UNITS: Mapping[str, tuple[Better, str]] = {
    "token_f1": ("higher", SHARE),
    "bleu": ("higher", POINTS),
    "rouge1": ("higher", SHARE),
    "rouge2": ("higher", SHARE),
    "rougeL": ("higher", SHARE),
    "chrf": ("higher", POINTS),
    "length_characters": ("unknown", "characters"),
    "length_words": ("unknown", "words"),
    "format_validity": ("higher", SHARE),
}
"""Direction and unit of each metric."""


@dataclass(frozen=True)
class AnswerMetricResult:
    """One metric of a model's answers."""

    name: str
    values: list[float] | None
    """Mean over the answers of each row. None if the metric is not a mean of rows (corpus BLEU)."""
    metric: MetricValue


def score_answers(
    expected: Sequence[str], answers: Sequence[Sequence[str]], settings: Evaluate, exact_name: str
) -> list[AnswerMetricResult]:
    """Score generated answers.

    Args:
        expected: Reference of each row; rows after the last answered one are ignored.
        answers: Answers to each row; the same number for every row, at least one.
        settings: `metrics`, `answer_format` and `seed` are read.
        exact_name: Name of the share of exactly right answers (`accuracy` for labels).

    Raises:
        SettingsError: The regular expression of `answer_format` takes too long on these answers.
    """
    pairs = _AnswerPairs(expected[: len(answers)], answers)
    with _open_metric_loader() as compute:
        metrics = [pairs.mean(exact_name, compute("exact_match", pairs)["exact_match"], ("higher", SHARE))]
        for name in settings.metrics:
            if name == "bleu":
                metrics += pairs.bleu(compute("bleu", pairs, answers_per_row=pairs.answers_per_row, seed=settings.seed))
            elif name not in BUILTIN_METRICS:
                metrics.append(pairs.mean(name, pairs.score_with_extension(name), ("higher", EXTENSION_UNIT)))
            else:
                metrics += [pairs.mean(key, values, UNITS[key]) for key, values in compute(name, pairs).items()]
        if settings.answer_format is not None:
            options = {"answer_format": settings.answer_format, "timeout_s": PATTERN_TIMEOUT_S}
            try:
                valid = compute("format_validity", pairs, **options)["format_validity"]
            except TimeoutError as error:
                raise SettingsError(
                    f"evaluate.answer_format: {error}; avoid a repetition inside a repetition"
                ) from None
            metrics.append(pairs.mean("format_validity", valid, UNITS["format_validity"]))
    return metrics


class _AnswerPairs:
    """Answers and references, pair by pair."""

    def __init__(self, expected: Sequence[str], answers: Sequence[Sequence[str]]) -> None:
        self.answers_per_row = len(answers[0])
        self.answers = [answer for row in answers for answer in row]
        self.expected = [text for text, row in zip(expected, answers, strict=True) for _ in row]

    def mean(self, name: str, values: Sequence[float], kind: tuple[Better, str]) -> AnswerMetricResult:
        """Average over rows. Several answers to a row are one sample with a more precise score."""
        k = self.answers_per_row
        rows = [sum(values[i : i + k]) / k for i in range(0, len(values), k)]
        return AnswerMetricResult(name, rows, mean_score_metric(rows, *kind))

    def score_with_extension(self, name: str) -> list[float]:
        """Return the score of each answer by a metric of an installed package.

        Raises:
            SettingsError: The metric fails, or does not return a finite number for each answer.
        """
        score = load_extension("ratchet.metrics", name, "evaluate.metrics")
        try:
            values = [float(value) for value in score(self.answers, self.expected)]
        except Exception as error:
            raise SettingsError(f"evaluate.metrics: {name} failed: {type(error).__name__}: {error}") from error
        if len(values) != len(self.answers) or not all(map(math.isfinite, values)):
            raise SettingsError(
                f"evaluate.metrics: {name} returned {len(values)} numbers for {len(self.answers)} answers, or one that "
                "is not finite; it must return a finite number for each answer"
            )
        return values

    def bleu(self, scores: Mapping[str, Any]) -> list[AnswerMetricResult]:
        """Return the mean of sentence BLEU, which can be paired by row, and corpus BLEU, which papers report."""
        value, low, high = scores["corpus"], scores["low"], scores["high"]
        corpus = MetricValue(
            value=value,
            n=len(self.answers) // self.answers_per_row,
            low=min(low, value),
            high=max(high, value),
            better="higher",
            unit=POINTS,
            kind="aggregate",
        )
        return [self.mean("bleu", scores["bleu"], UNITS["bleu"]), AnswerMetricResult("corpus_bleu", None, corpus)]


@contextmanager
def _open_metric_loader() -> Iterator[Any]:
    """Yield a function that loads a metric module and computes it on answers; restore the module cache afterwards."""
    import evaluate

    prefix = evaluate.config.MODULE_NAME_FOR_DYNAMIC_MODULES
    cache, path = evaluate.config.HF_MODULES_CACHE, list(sys.path)
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == prefix}
    with tempfile.TemporaryDirectory(prefix="ratchet-metrics-") as folder:

        def compute(name: str, pairs: _AnswerPairs, **options: Any) -> Mapping[str, Any]:
            module = evaluate.load(str(MODULES / f"{name}.py"), cache_dir=folder, keep_in_memory=True)
            result = module.compute(predictions=pairs.answers, references=pairs.expected, **options)
            return result if isinstance(result, Mapping) else {}

        evaluate.config.HF_MODULES_CACHE = folder
        # The library appends its folder to sys.path: a folder of an earlier use would be found first.
        sys.path.insert(0, folder)
        try:
            yield compute
        finally:
            evaluate.config.HF_MODULES_CACHE, sys.path[:] = cache, path
            for name in [name for name in sys.modules if name.split(".")[0] == prefix]:
                del sys.modules[name]
            sys.modules |= loaded
