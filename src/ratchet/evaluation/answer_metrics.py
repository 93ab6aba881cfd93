"""Measures of generated answers, through the `evaluate` library with metric modules of our own.

The modules are in `ratchet/evaluation/metric_modules/NAME/NAME.py` and are loaded from there, so nothing is fetched.
`evaluate` copies a module into a cache of modules before it imports it, and by default trusts what is in
~/.cache/huggingface. Here the cache is a private folder that is removed afterwards.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config.evaluation import Evaluate
from ratchet.errors import SettingsError
from ratchet.evaluation import metric_modules
from ratchet.evaluation.metric_modules.figures import POINTS, SHARE, Better, mean_score_metric
from ratchet.storage.records.evaluation import MetricValue

MODULES = Path(str(metric_modules.__file__)).parent

LONGEST_S = 20.0
"""For a regular expression on all answers together; ordinary ones need microseconds an answer."""


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
"""Direction and unit of each figure."""


@dataclass(frozen=True)
class AnswerMetric:
    """One figure of a model's answers."""

    name: str
    values: list[float] | None
    """One a row: the mean over its answers. None where the figure is no function of them (corpus BLEU)."""
    metric: MetricValue


def score_answers(
    expected: Sequence[str], answers: Sequence[Sequence[str]], settings: Evaluate, exact_name: str
) -> list[AnswerMetric]:
    """Score answers.

    Args:
        expected: the true answer of each row; rows behind the last that was answered are not looked at.
        answers: of each row, as many as were drawn; the same number for every row, at least one.
        settings: `measures`, `answer_format` and `seed` are read.
        exact_name: what the share of exactly right answers is called (`accuracy` for labels).

    Raises:
        SettingsError: the regular expression of `answer_format` takes too long on these answers.
    """
    given = _AnswerPairs(expected[: len(answers)], answers)
    with _open_metric_loader() as load:
        found = [given.mean(exact_name, load("exact_match", given)["exact_match"], ("higher", SHARE))]
        for name in settings.measures:
            if name == "bleu":
                found += given.bleu(load("bleu", given, answers_per_row=given.per_row, seed=settings.seed))
            else:
                found += [given.mean(key, values, UNITS[key]) for key, values in load(name, given).items()]
        if settings.answer_format is not None:
            try:
                form = {"answer_format": settings.answer_format, "longest_s": LONGEST_S}
                valid = load("format_validity", given, **form)["format_validity"]
            except TimeoutError as error:
                raise SettingsError(
                    f"evaluate.answer_format: {error}; write it without a repetition inside a repetition"
                ) from None
            found.append(given.mean("format_validity", valid, UNITS["format_validity"]))
    return found


class _AnswerPairs:
    """Answers and expected answers, pair by pair."""

    def __init__(self, expected: Sequence[str], answers: Sequence[Sequence[str]]) -> None:
        self.per_row = len(answers[0])
        self.answers = [answer for row in answers for answer in row]
        self.expected = [text for text, row in zip(expected, answers, strict=True) for _ in row]

    def mean(self, name: str, values: Sequence[float], kind: tuple[Better, str]) -> AnswerMetric:
        """A figure whose samples are rows: an answer drawn again is no new sample, it makes its row's score surer."""
        k = self.per_row
        rows = [sum(values[i : i + k]) / k for i in range(0, len(values), k)]
        return AnswerMetric(name, rows, mean_score_metric(rows, *kind))

    def bleu(self, found: Mapping[str, Any]) -> list[AnswerMetric]:
        """The mean of the answers' own BLEU, which can be paired, and the corpus figure that papers give."""
        value, low, high = found["corpus"], found["low"], found["high"]
        corpus = MetricValue(
            value=value, n=len(self.answers) // self.per_row, low=min(low, value), high=max(high, value),
            better="higher", unit=POINTS, kind="figure",
        )  # fmt: skip
        return [self.mean("bleu", found["bleu"], UNITS["bleu"]), AnswerMetric("corpus_bleu", None, corpus)]


@contextmanager
def _open_metric_loader() -> Iterator[Any]:
    """A function that loads one of our modules and computes it on what was given."""
    import evaluate

    prefix = evaluate.config.MODULE_NAME_FOR_DYNAMIC_MODULES
    cache, path = evaluate.config.HF_MODULES_CACHE, list(sys.path)
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == prefix}
    with tempfile.TemporaryDirectory(prefix="ratchet-measures-") as folder:

        def load(name: str, given: _AnswerPairs, **wanted: Any) -> Mapping[str, Any]:
            module = evaluate.load(str(MODULES / name), cache_dir=folder, keep_in_memory=True)
            result = module.compute(predictions=given.answers, references=given.expected, **wanted)
            return result if isinstance(result, Mapping) else {}

        evaluate.config.HF_MODULES_CACHE = folder
        sys.path.insert(0, folder)  # the library appends it: a folder of an earlier use would be found before
        try:
            yield load
        finally:
            evaluate.config.HF_MODULES_CACHE, sys.path[:] = cache, path
            for name in [name for name in sys.modules if name.split(".")[0] == prefix]:
                del sys.modules[name]
            sys.modules |= others
