"""What answers are worth beside their references: by label, by category, by how they ended."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.appraisal.answers import Answers, Asked, accuracy, written
from ratchet.appraisal.calibration import Calibration, calibration
from ratchet.appraisal.intervals import widened
from ratchet.config_evaluation import Evaluate
from ratchet.measures.figures import SHARE, mean, mean_score, proportion
from ratchet.records_evaluation import Metric
from ratchet.services import answer_metrics, metrics

UNPARSEABLE_SHOWN = 10
CATEGORIES = 30
"""Values of a field, at most, for which error rates are given one by one."""
EXACT = "exact_match"


@dataclass(frozen=True)
class Spread:
    """How a number is distributed over answers."""

    n: int
    least: float
    p5: float
    median: float
    p95: float
    greatest: float


@dataclass(frozen=True)
class Unparseable:
    """Answers that are none of the answers that are possible."""

    count: int
    of: int
    first: Sequence[tuple[str, str, str]]
    """Id of the prompt, the answer, how it ended."""


@dataclass(frozen=True)
class Likely:
    """What the log-probabilities of labels say, whatever was answered."""

    n: int
    left_out: int
    """Prompts with a reference that are not among them: the reference is no label, or a label's is not known."""
    curves: Mapping[str, Mapping[str, Any]]
    """Precision and recall of each label, as services/metrics.curves gives them."""
    average_precision: Metric
    """Mean over labels."""
    calibration: Calibration


@dataclass(frozen=True)
class ByLabel:
    """Answers that come from a small set."""

    figures: Mapping[str, Metric]
    """`accuracy`, `macro_f1`, `micro_f1`, `balanced_accuracy`."""
    classes: Mapping[str, dict[str, float]]
    """Precision, recall, F1, support and average precision of each label that is a reference."""
    confusion: metrics.Confusion
    pairs: Counter[tuple[str, str]]
    """Reference and answer, where they are not the same: first answers to each prompt."""
    likely: Likely | None
    """None: only text is there."""


@dataclass(frozen=True)
class Agreement:
    """Among several answers to the same prompt."""

    samples: int
    agreement: Metric
    """Mean over prompts: share of pairs of answers that are the same."""
    unanimous: Metric
    """Share of prompts whose answers are all the same."""
    majority: Metric | None
    """Share of prompts whose most frequent answer is the reference, of equals the first; None: no references."""


@dataclass(frozen=True)
class Panel:
    """All that is said of a generation's answers."""

    answers: Answers
    finishes: Mapping[str, tuple[int, Metric | None]]
    """How answers ended: how many, and which share of those with a reference are right."""
    tokens: Spread | None
    nats: Spread | None
    """Of the answers' mean log-probabilities."""
    right: Mapping[str, Metric]
    """Free answers: exact match and token F1; empty for labels, and without references."""
    labels: ByLabel | None
    categories: Mapping[str, Mapping[str, Metric]]
    """Error rate by field of generate.keep and its value."""
    many: Mapping[str, int]
    """Fields with too many values for that, and how many they have."""
    unparseable: Unparseable | None
    """None: answers are free."""
    agreement: Agreement | None
    """None: one answer to each prompt."""


def panel(answers: Answers, seed: int) -> Panel:
    """Judge the answers of a generation.

    Args:
        answers: of it.
        seed: of bootstrap intervals.
    """
    judged = answers.judged
    free = bool(judged) and not answers.is_labels
    categories, many = _categories(answers, judged)
    given = [one for asked in answers.prompts for one in asked.answers]
    return Panel(
        answers=answers,
        finishes=_finishes(answers),
        tokens=spread([one.tokens for one in given if one.tokens is not None]),
        nats=spread([one.nats for one in given if one.nats is not None]),
        right=_free(judged) if free else {},
        labels=_by_label(answers, judged, seed) if judged and answers.is_labels else None,
        categories=categories,
        many=many,
        unparseable=unparseable(answers) if answers.vocabulary else None,
        agreement=_agreement(answers) if answers.card.spec.generate.samples > 1 else None,
    )


def unparseable(answers: Answers) -> Unparseable:
    """Answers that are none of the vocabulary, and the first of them."""
    known = set(answers.vocabulary)
    found = [
        (asked.id, one.said, one.finish)
        for asked in answers.prompts
        for one in asked.answers
        if one.said not in known
    ]  # fmt: skip
    return Unparseable(len(found), answers.card.answers, found[:UNPARSEABLE_SHOWN])


def spread(values: Sequence[float]) -> Spread | None:
    """Of numbers, by nearest rank; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    least, p5, median, p95, greatest = (ordered[round(share * (len(ordered) - 1))] for share in (0, 0.05, 0.5, 0.95, 1))
    return Spread(len(ordered), least, p5, median, p95, greatest)


def _finishes(answers: Answers) -> dict[str, tuple[int, Metric | None]]:
    counts, right = Counter[str](), dict[str, list[float]]()
    for asked in answers.prompts:
        for one in asked.answers:
            counts[one.finish] += 1
            if asked.reference is not None:
                right.setdefault(one.finish, []).append(float(one.said == asked.reference))
    return {
        name: (count, proportion(right[name]) if name in right else None)
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    }


def _free(judged: Sequence[Asked]) -> dict[str, Metric]:
    expected = [str(one.reference) for one in judged]
    given = [[answer.said for answer in one.answers] for one in judged]
    found = answer_metrics.measure(expected, given, Evaluate(measures=("token_f1",)), EXACT)
    return {one.name: widened(one.metric) for one in found}


def _by_label(answers: Answers, judged: Sequence[Asked], seed: int) -> ByLabel:
    expected = [str(one.reference) for one in judged]
    first = [one.answers[0].said for one in judged]
    classes, confusion = metrics.per_class(expected, first)
    chance = metrics.majority(expected)
    figures = {"accuracy": accuracy([one.right for one in judged]).model_copy(update={"chance": chance})}
    likely = _likely(answers, judged, seed)
    for label, curve in likely.curves.items() if likely else ():
        if label in classes and math.isfinite(curve["average_precision"]):
            classes[label]["average_precision"] = curve["average_precision"]
    pairs = Counter(pair for pair in zip(expected, first, strict=True) if pair[0] != pair[1])
    figures |= metrics.label_figures(expected, first, seed)
    return ByLabel(figures, classes, confusion, pairs, likely)


def _likely(answers: Answers, judged: Sequence[Asked], seed: int) -> Likely | None:
    labels = answers.card.spec.generate.labels
    known = {
        place: one.labels
        for place, one in enumerate(judged)
        if one.labels is not None and one.reference in labels and all(map(math.isfinite, one.labels))
    }
    if not known:
        return None
    nats = list(known.values())
    expected = [str(judged[place].reference) for place in known]
    return Likely(
        len(nats), len(judged) - len(nats), metrics.curves(labels, expected, nats),
        metrics.average_precision(labels, expected, nats, seed), calibration(labels, expected, nats),
    )  # fmt: skip


def _categories(
    answers: Answers, judged: Sequence[Asked]
) -> tuple[dict[str, dict[str, Metric]], dict[str, int]]:  # fmt: skip
    found, many = {}, {}
    for name in answers.card.spec.generate.keep:
        wrong: dict[str, list[float]] = {}
        for one in judged:
            if name in one.fields:
                wrong.setdefault(written(one.fields[name]), []).append(1.0 - one.right)
        if len(wrong) > CATEGORIES:
            many[name] = len(wrong)
        elif wrong:
            found[name] = {value: _error(wrong[value]) for value in sorted(wrong)}
    return found, many


def _error(wrong: Sequence[float]) -> Metric:
    metric = widened(mean_score(wrong, "higher", SHARE))
    return metric.model_copy(update={"better": "lower"})


def _agreement(answers: Answers) -> Agreement:
    same, unanimous, hits = [], [], []
    samples = answers.card.spec.generate.samples
    for asked in answers.prompts:
        votes = Counter(one.said for one in asked.answers)  # of equals, the first that was given comes first
        same.append(sum(count * (count - 1) for count in votes.values()) / (samples * (samples - 1)))
        unanimous.append(float(len(votes) == 1))
        if asked.reference is not None:
            hits.append(float(votes.most_common(1)[0][0] == asked.reference))
    agreement = widened(mean(same, "unknown", SHARE))
    return Agreement(samples, agreement, proportion(unanimous), proportion(hits) if hits else None)
