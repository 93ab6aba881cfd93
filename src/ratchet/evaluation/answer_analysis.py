"""Analyzes the answers of a generation (accuracy, labels, confusion, calibration, agreement) and formats a report."""

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.config.evaluate import Evaluate
from ratchet.errors import DamagedFileError, InputError
from ratchet.evaluation import answer_metrics, metrics
from ratchet.evaluation.metrics import ConfusionMatrix, mean_metric, mean_score_metric, proportion_metric
from ratchet.inference import output
from ratchet.inference.output import LABEL_LOG_PROBABILITIES
from ratchet.inference.prompts import FieldValue
from ratchet.inference.spec import FINISH_REASONS, GenerationCard
from ratchet.storage.html import escape_invisible
from ratchet.storage.records.evaluation import SHARE, MetricValue

MAX_UNPARSEABLE = 10
"""Maximum number of unparseable answers that are listed."""
MAX_FIELD_VALUES = 30
"""Maximum number of values of a field for which error rates are computed."""
EXACT = "exact_match"
MIN_WIDTH = 1e-9
"""Smallest width of an interval, relative to the range of the metric, that is not a rounding error."""
BINS = 10
"""Number of bins of equal width, each including its upper edge: (0, 0.1], ..., (0.9, 1]."""
NAME_WIDTH, MAX_LABEL_CHARACTERS = 28, 24
"""Number of characters of a metric's name, and maximum number of characters of a label."""
MAX_LABELS_LISTED, MAX_MATRIX_LABELS, MAX_PAIRS_LISTED, MAX_VALUES_LISTED = 20, 10, 10, 12
"""Maximum number of worst labels with metrics, labels of a confusion matrix, confused pairs, and values of a field."""
PLACES = 3
"""Number of decimal places of metrics, in the terminal report and on the HTML page."""
NO_REFERENCE = "answers that are not the reference of any prompt, possible or not"


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """One answer."""

    text: str
    """Stripped text without reasoning, as stage evaluate compares answers."""
    finish: str
    tokens: int | None
    mean_log_probability: float | None
    """Mean log-probability of the answer's tokens in nats."""


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """One prompt with its answers."""

    id: str
    reference: str | None
    """Stripped reference; None if the prompt has no reference."""
    fields: Mapping[str, FieldValue]
    answers: Sequence[GeneratedAnswer]
    """At least one answer, in the order of samples."""
    label_log_probabilities: "array[float] | None"
    """Log-probability in nats of each label of the generation as the complete answer; NaN if unknown."""

    @property
    def accuracy(self) -> float:
        """Share of the answers that equal the reference."""
        return math.fsum(answer.text == self.reference for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class GenerationAnswers:
    """All answers of a generation."""

    path: Path
    card: GenerationCard
    prompts: Sequence[AnsweredPrompt]
    is_labels: bool
    """Whether the answers come from a small set and are analyzed label by label."""

    @cached_property
    def with_reference(self) -> Sequence[AnsweredPrompt]:
        """Prompts with a reference."""
        return [prompt for prompt in self.prompts if prompt.reference is not None]

    @cached_property
    def possible_answers(self) -> tuple[str, ...]:
        """generate.labels and all other references; empty for free text."""
        labels = self.card.spec.generate.labels
        references = {str(prompt.reference) for prompt in self.with_reference}
        return (*labels, *sorted(references - set(labels))) if self.is_labels else ()

    @property
    def unknown_references(self) -> Sequence[AnsweredPrompt]:
        """Prompts with a reference that is not in generate.labels; empty without generate.labels."""
        labels = set(self.card.spec.generate.labels)
        return [prompt for prompt in self.with_reference if labels and prompt.reference not in labels]


def is_output(name: str) -> bool:
    """Return whether a generation's output may have this file name."""
    return Path(name).suffix in output.OUTPUT_ENDINGS


def read_generation(path: Path, task: str) -> GenerationAnswers:
    """Read all answers of an output of `ratchet generate`, with its card in the same folder; `task` is prepare.task.

    Raises SettingsError and DamagedFileError like `output.read_card` and `read_answers`.
    """
    card = output.read_card(path)
    return GenerationAnswers(path, card, list(read_answers(path, card)), has_label_answers(card, task))


def has_label_answers(card: GenerationCard, task: str) -> bool:
    """Return whether the answers come from a small set, by generate.labels or prepare.task."""
    return bool(card.spec.generate.labels) or task == "labels"


def read_answers(path: Path, card: GenerationCard) -> Iterator[AnsweredPrompt]:
    """Read an output prompt by prompt. Raises DamagedFileError if the output was changed after it was written."""
    answers: list[GeneratedAnswer] = []
    count = 0
    for number, record in enumerate(output.read_records(path, card), start=1):
        try:
            if record["finish"] not in FINISH_REASONS:
                raise ValueError(f"finish {record['finish']!r}")
            nats = record["mean_log_probability"]
            known = nats if nats is not None and math.isfinite(nats) and record["tokens"] else None
            answers.append(GeneratedAnswer(record["answer"].strip(), record["finish"], record["tokens"], known))
            if len(answers) == card.spec.generate.samples:
                yield _parse_prompt(record, answers, card.spec.generate.labels)
                answers, count = [], count + 1
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFileError(f"{path}: record {number} is not from `ratchet generate` ({error!r})") from None
    if answers or not count:
        raise DamagedFileError(f"{path}: found {count:,} complete prompts, but the card has {card.prompts:,}")


def _parse_prompt(
    record: Mapping[str, Any], answers: Sequence[GeneratedAnswer], labels: Sequence[str]
) -> AnsweredPrompt:
    reference, by_label = record.get("reference"), record.get(LABEL_LOG_PROBABILITIES)
    nats = None
    if labels and by_label is not None:
        nats = array("d", (math.nan if by_label[label] is None else float(by_label[label]) for label in labels))
    text = None if reference is None else str(reference).strip()
    return AnsweredPrompt(str(record["id"]), text, record.get("fields") or {}, tuple(answers), nats)


# Metrics of the answers: by label, by field, by finish reason.


@dataclass(frozen=True)
class DistributionSummary:
    """Distribution of a number over answers. Each percentile is one of the numbers."""

    n: int
    minimum: float
    p5: float
    median: float
    p95: float
    maximum: float


@dataclass(frozen=True)
class UnparseableAnswers:
    """Answers that are not one of the possible answers."""

    count: int
    total: int
    first: Sequence[tuple[str, str, str]]
    """Id of the prompt, answer, and finish reason."""


@dataclass(frozen=True)
class LikelihoodAnalysis:
    """Analysis of the log-probabilities of labels, independent of the answers."""

    n: int
    skipped: int
    """Number of prompts with a reference that is not a label, or with an unknown log-probability."""
    curves: Mapping[str, Mapping[str, Any]]
    """Precision and recall of each label (metrics.precision_recall_curves)."""
    average_precision: MetricValue
    """Mean over labels."""
    calibration: "LabelCalibration"


@dataclass(frozen=True)
class LabelAnalysis:
    """Analysis of answers from a small set."""

    metrics: Mapping[str, MetricValue]
    """`accuracy`, `macro_f1`, `micro_f1`, `balanced_accuracy`."""
    classes: Mapping[str, dict[str, float]]
    """Precision, recall, F1, support and average precision of each label that is a reference."""
    confusion: ConfusionMatrix
    confused_pairs: Counter[tuple[str, str]]
    """Counts of pairs of reference and first answer that differ."""
    likelihoods: LikelihoodAnalysis | None
    """None without log-probabilities of labels."""


@dataclass(frozen=True)
class SampleAgreement:
    """Agreement between several answers to the same prompt."""

    samples: int
    agreement: MetricValue
    """Mean over prompts of the share of answer pairs that are equal."""
    unanimous: MetricValue
    """Share of prompts whose answers are all equal."""
    majority: MetricValue | None
    """Share of prompts whose most frequent answer (the first of equally frequent ones) equals the reference; None
    without references."""


@dataclass(frozen=True)
class AnswerAnalysis:
    """Analysis of a generation's answers."""

    answers: GenerationAnswers
    finishes: Mapping[str, tuple[int, MetricValue | None]]
    """By finish reason: number of answers, and accuracy of answers with a reference."""
    tokens: DistributionSummary | None
    log_probabilities: DistributionSummary | None
    """Distribution of the answers' mean log-probabilities."""
    text_metrics: Mapping[str, MetricValue]
    """Exact match and token F1 of free text; empty for labels and without references."""
    labels: LabelAnalysis | None
    categories: Mapping[str, Mapping[str, MetricValue]]
    """Error rates: for each field of generate.extra_fields, the rate by value."""
    fields_with_many_values: Mapping[str, int]
    """Fields with too many values for error rates, and the number of values."""
    unparseable: UnparseableAnswers | None
    """None for free text."""
    agreement: SampleAgreement | None
    """None with one answer per prompt."""


def analyze_answers(answers: GenerationAnswers, seed: int) -> AnswerAnalysis:
    """Analyze the answers of a generation; `seed` is that of bootstrap intervals."""
    prompts, possible = answers.with_reference, set(answers.possible_answers)
    all_answers = [(prompt, answer) for prompt in answers.prompts for answer in prompt.answers]
    nats = [a.mean_log_probability for _, a in all_answers if a.mean_log_probability is not None]
    unparseable = [(p.id, a.text, a.finish) for p, a in all_answers if a.text not in possible]
    text_metrics = {}
    if prompts and not answers.is_labels:
        texts = [[answer.text for answer in prompt.answers] for prompt in prompts]
        expected = [str(prompt.reference) for prompt in prompts]
        scored = answer_metrics.score_answers(expected, texts, Evaluate(metrics=("token_f1",)), EXACT)
        text_metrics = {result.name: widen_interval(result.metric) for result in scored}
    categories, value_counts = _score_categories(answers)
    return AnswerAnalysis(
        answers=answers,
        finishes=_count_finishes(answers),
        tokens=_summarize_distribution([a.tokens for _, a in all_answers if a.tokens is not None]),
        log_probabilities=_summarize_distribution(nats),
        text_metrics=text_metrics,
        labels=_analyze_labels(answers, seed) if prompts and answers.is_labels else None,
        categories=categories,
        fields_with_many_values=value_counts,
        unparseable=UnparseableAnswers(len(unparseable), len(all_answers), unparseable[:MAX_UNPARSEABLE])
        if possible
        else None,
        agreement=_measure_agreement(answers) if answers.card.spec.generate.samples > 1 else None,
    )


def widen_interval(metric: MetricValue, maximum: float = 1.0) -> MetricValue:
    """Use Wilson's interval if the normal interval has no width, because equal samples do not make their mean certain.

    Among samples between 0 and `maximum` with a given mean, the variance is largest if each sample is 0 or `maximum`.
    The mean of such samples is a proportion. So the interval of a proportion is never too narrow for other samples.
    """
    if metric.high - metric.low > MIN_WIDTH * maximum:
        return metric
    share = proportion_metric([metric.value / maximum] * metric.n)
    low, high = min(metric.value, share.low * maximum), max(metric.value, share.high * maximum)
    return metric.model_copy(update={"low": low, "high": high})


def _mean_share(shares: Sequence[float]) -> MetricValue:
    """Compute the mean of one share for each prompt; several answers to a prompt are one sample."""
    return widen_interval(mean_score_metric(shares, "higher", SHARE))


def _summarize_distribution(values: Sequence[float]) -> DistributionSummary | None:
    ordered = sorted(values)
    if not ordered:
        return None
    return DistributionSummary(
        len(ordered), *(ordered[round(share * (len(ordered) - 1))] for share in (0, 0.05, 0.5, 0.95, 1))
    )


def _count_finishes(answers: GenerationAnswers) -> dict[str, tuple[int, MetricValue | None]]:
    counts, hits = Counter[str](), dict[str, list[float]]()
    for prompt in answers.prompts:
        for answer in prompt.answers:
            counts[answer.finish] += 1
            if prompt.reference is not None:
                hits.setdefault(answer.finish, []).append(float(answer.text == prompt.reference))
    return {
        name: (count, proportion_metric(hits[name]) if name in hits else None)
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    }


def _analyze_labels(answers: GenerationAnswers, seed: int) -> LabelAnalysis:
    prompts = answers.with_reference
    expected = [str(prompt.reference) for prompt in prompts]
    first = [prompt.answers[0].text for prompt in prompts]
    classes, confusion = metrics.score_classes(expected, first)
    chance = metrics.majority_share(expected)
    accuracy = _mean_share([prompt.accuracy for prompt in prompts]).model_copy(update={"chance": chance})
    likelihoods = _analyze_likelihoods(answers, seed)
    for label, curve in likelihoods.curves.items() if likelihoods else ():
        if label in classes and math.isfinite(curve["average_precision"]):
            classes[label]["average_precision"] = curve["average_precision"]
    confused_pairs = Counter(pair for pair in zip(expected, first, strict=True) if pair[0] != pair[1])
    label_metrics = {"accuracy": accuracy, **metrics.compute_label_metrics(expected, first, seed)}
    return LabelAnalysis(label_metrics, classes, confusion, confused_pairs, likelihoods)


def _analyze_likelihoods(answers: GenerationAnswers, seed: int) -> LikelihoodAnalysis | None:
    labels = answers.card.spec.generate.labels
    known = [
        (prompt.reference, prompt.label_log_probabilities)
        for prompt in answers.with_reference
        if prompt.label_log_probabilities is not None
        and prompt.reference in labels
        and all(map(math.isfinite, prompt.label_log_probabilities))
    ]
    if not known:
        return None
    expected, nats = [str(reference) for reference, _ in known], [row for _, row in known]
    return LikelihoodAnalysis(
        n=len(known),
        skipped=len(answers.with_reference) - len(known),
        curves=metrics.precision_recall_curves(labels, expected, nats),
        average_precision=metrics.mean_average_precision(labels, expected, nats, seed),
        calibration=compute_calibration(labels, expected, nats),
    )


def _score_categories(answers: GenerationAnswers) -> tuple[dict[str, dict[str, MetricValue]], dict[str, int]]:
    """Return error rates by field and value, and the number of values of each field with too many values."""
    categories, value_counts = {}, {}
    for name in answers.card.spec.generate.extra_fields:
        errors: dict[str, list[float]] = {}
        for prompt in answers.with_reference:
            if name in prompt.fields:
                value = prompt.fields[name]
                text = value if isinstance(value, str) else json.dumps(value)
                errors.setdefault(text, []).append(1.0 - prompt.accuracy)
        if len(errors) > MAX_FIELD_VALUES:
            value_counts[name] = len(errors)
        elif errors:
            rates = {value: _mean_share(errors[value]) for value in sorted(errors)}
            categories[name] = {value: rate.model_copy(update={"better": "lower"}) for value, rate in rates.items()}
    return categories, value_counts


def _measure_agreement(answers: GenerationAnswers) -> SampleAgreement:
    agreements, unanimous, hits = [], [], []
    samples = answers.card.spec.generate.samples
    for prompt in answers.prompts:
        votes = Counter(answer.text for answer in prompt.answers)  # Equally frequent answers keep their order.
        agreements.append(sum(count * (count - 1) for count in votes.values()) / (samples * (samples - 1)))
        unanimous.append(float(len(votes) == 1))
        if prompt.reference is not None:
            hits.append(float(votes.most_common(1)[0][0] == prompt.reference))
    agreement = widen_interval(mean_metric(agreements, "unknown", SHARE))
    return SampleAgreement(samples, agreement, proportion_metric(unanimous), proportion_metric(hits) if hits else None)


# Calibration: the agreement of a label's probability with the frequency at which the label is right.
#
# A label's probability is its share of the probability of all labels (softmax over their log-probabilities); all other
# answers are ignored. Expected calibration error: M. P. Naeini, G. F. Cooper and M. Hauskrecht, AAAI 2015, of the
# likeliest label as in C. Guo et al., "On Calibration of Modern Neural Networks", ICML 2017, equation 3. Brier score:
# G. W. Brier, Monthly Weather Review 78, 1950, over all labels, so it is between 0 and 2.


@dataclass(frozen=True)
class CalibrationBin:
    """Prompts whose likeliest label has a probability in one range."""

    low: float
    high: float
    confidence: float
    """Mean probability of the likeliest label."""
    accuracy: MetricValue
    """Share of prompts whose likeliest label is the reference."""


@dataclass(frozen=True)
class LabelCalibration:
    """Calibration of one generation."""

    bins: Sequence[CalibrationBin]
    """Bins that are not empty, in ascending order."""
    error: float
    """Expected calibration error: mean over bins of |confidence - accuracy|, weighted by their numbers of prompts."""
    brier: MetricValue
    confidence: float
    """Mean probability of the likeliest label."""
    accuracy: MetricValue
    """Share of prompts whose likeliest label is the reference."""


def label_probabilities(nats: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Compute the softmax over labels, of shape [prompts, labels]."""
    scores = np.asarray(nats, dtype=np.float64)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True), dtype=np.float64)


def compute_calibration(
    labels: Sequence[str], expected: Sequence[str], nats: Sequence[Sequence[float]]
) -> LabelCalibration:
    """Compute the calibration of finite log-probabilities, [prompts, labels]; each reference in `expected` is one of
    the labels.
    """
    probabilities = label_probabilities(nats)
    index = {label: k for k, label in enumerate(labels)}
    true = np.array([index[label] for label in expected])
    hits = (probabilities.argmax(axis=1) == true).astype(float)  # The first of equally likely labels.
    confidence = probabilities.max(axis=1)
    edges = np.linspace(0.0, 1.0, BINS + 1)
    bin_of_prompt = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, BINS - 1)
    bins = []
    for k in np.unique(bin_of_prompt).tolist():
        inside = bin_of_prompt == k
        accuracy = proportion_metric(hits[inside].tolist())
        bins.append(CalibrationBin(float(edges[k]), float(edges[k + 1]), float(confidence[inside].mean()), accuracy))
    error = sum(bin_.accuracy.n * abs(bin_.accuracy.value - bin_.confidence) for bin_ in bins) / len(true)
    squares = ((probabilities - np.eye(len(labels))[true]) ** 2).sum(axis=1).tolist()
    brier = widen_interval(mean_metric(squares, "lower", "0 to 2, mean of prompts"), maximum=2.0)
    return LabelCalibration(bins, error, brier, float(confidence.mean()), proportion_metric(hits.tolist()))


def summarize_generation(path: Path, task: str) -> list[str]:
    """Return a short summary of the accuracy for the terminal; empty if no prompt has a reference. `task` is
    prepare.task.

    It is computed prompt by prompt without keeping the answers in memory.
    """
    accuracies: list[float] = []
    others, texts = set[str](), Counter[str]()
    try:
        card = output.read_card(path)
        labels = set(card.spec.generate.labels)
        for prompt in read_answers(path, card):
            if labels:
                texts.update(answer.text for answer in prompt.answers if answer.text not in labels)
            if prompt.reference is not None:
                accuracies.append(prompt.accuracy)
                others |= {prompt.reference} - labels if labels else set()
    except InputError as error:  # The output was changed after it was written.
        return [f"  no accuracy: {error}"]
    if not accuracies:
        return []
    metric = _mean_share(accuracies)
    name = "accuracy" if has_label_answers(card, task) else "exact match"
    lines = [
        f"  {name}: {metric.value:.3f} (95 %: {metric.low:.3f} to {metric.high:.3f}) "
        f"of {metric.n:,} prompts with a reference"
    ]
    if labels:
        unparseable = sum(count for text, count in texts.items() if text not in others)
        known = f"{len(labels):,} labels" + (f" or the {len(others):,} other references" if others else "")
        lines.append(f"  {unparseable:,} of {card.answers:,} answers are not one of the {known}")
    return [*lines, f"  more: ratchet report {path}"]


# Report for the terminal.


def format_analysis(analysis: AnswerAnalysis) -> str:
    """Format an analysis for the terminal."""
    card, tokens, nats = analysis.answers.card, analysis.tokens, analysis.log_probabilities
    head = f"generation {card.id}: {card.answers:,} answers to {card.prompts:,} prompts by "
    figures = {"finish": ", ".join(f"{count:,} {name}" for name, (count, _) in analysis.finishes.items())}
    if tokens is not None:
        figures["tokens of an answer"] = (
            f"median {tokens.median:,.0f}, 95th percentile {tokens.p95:,.0f}, maximum {tokens.maximum:,.0f}"
        )
    if nats is not None:
        figures["mean log-probability"] = f"median {nats.median:.3f}, 5th percentile {nats.p5:.3f}"
    lines = [head + sanitize_line(card.model_name), *_format_figures(figures)]
    lines += [f"  note: {note}" for note in describe_omissions(analysis)]
    lines += _format_metrics(analysis.text_metrics)
    lines += [*_label_lines(analysis), *_category_lines(analysis)]
    if (agreement := analysis.agreement) is not None:
        lines += ["", f"agreement of {agreement.samples} answers per prompt"]
        shares = {"pairs that agree": agreement.agreement, "prompts with equal answers": agreement.unanimous}
        lines += _format_metrics(shares)
        lines += _format_metrics({"most frequent answer is right": agreement.majority} if agreement.majority else {})
    return "\n".join(lines)


def _format_figures(figures: Mapping[str, str]) -> Iterator[str]:
    return (f"  {name:{NAME_WIDTH}} {value}" for name, value in figures.items())


def _format_metrics(values: Mapping[str, MetricValue]) -> Iterator[str]:
    return _format_figures({name.replace("_", " "): format_metric(metric) for name, metric in values.items()})


def format_metric(metric: MetricValue) -> str:
    """Format value, 95 % interval and number of samples."""
    value, low, high = (f"{number:.{PLACES}f}" for number in (metric.value, metric.low, metric.high))
    chance = "" if metric.chance is None else f"; always the most frequent label: {metric.chance:.{PLACES}f}"
    return f"{value} ({low} to {high}), n {metric.n:,}{chance}"


def sanitize_line(text: str) -> str:
    """Join a text into one line without control characters."""
    return " ".join(escape_invisible(text).split())


def truncate_text(text: str, maximum: int = MAX_LABEL_CHARACTERS) -> str:
    """Sanitize a text and truncate it to `maximum` characters."""
    line = sanitize_line(text)
    return line if len(line) <= maximum else f"{line[: maximum - 1]}…"


def describe_omissions(analysis: AnswerAnalysis) -> list[str]:
    """Return notes about prompts and values that the metrics leave out, and why."""
    answers, labels, notes = analysis.answers, analysis.labels, []
    missing = len(answers.prompts) - len(answers.with_reference)
    if not answers.with_reference:
        notes.append("No prompt has a reference (the answer of its record), so there is no accuracy.")
    elif missing:
        notes.append(
            f"Prompts without a reference: {missing:,} of {len(answers.prompts):,}; accuracy and error rates leave "
            "them out."
        )
    if unknown := answers.unknown_references:
        references = sorted({str(prompt.reference) for prompt in unknown})[:5]
        notes.append(
            f"References that are none of the {len(answers.card.spec.generate.labels):,} generate.labels: "
            f"{len(unknown):,} ({', '.join(repr(truncate_text(text)) for text in references)}). "
            "They count as further labels: an equal answer is right, an answer from generate.labels is wrong."
        )
    if labels and len(labels.classes) == 1:
        notes.append("All references are the same label, so the chance level is 1.")
    if labels and labels.likelihoods and labels.likelihoods.skipped:
        notes.append(
            f"Prompts in no precision-recall curve and no calibration: {labels.likelihoods.skipped:,}; their reference "
            "is not a label, or the likelihood of a label is unknown."
        )
    elif labels and not labels.likelihoods and answers.card.spec.generate.labels:
        notes.append(
            "Only text was available: no prompt with a label as reference has log-probabilities of labels. There are "
            "no precision-recall curves and no calibration."
        )
    elif labels and not labels.likelihoods:
        notes.append(
            "Only text was available: precision-recall curves and calibration need generate.labels, so that the "
            "log-probability of each label is recorded."
        )
    for name, count in analysis.fields_with_many_values.items():
        notes.append(f"Field {sanitize_line(name)} has {count:,} values, too many for error rates by value.")
    if "invalid" in analysis.finishes:
        notes.append(f"Answers that ended because the model returned NaN: {analysis.finishes['invalid'][0]:,}.")
    return notes


def _label_lines(analysis: AnswerAnalysis) -> Iterator[str]:
    if (unparseable := analysis.unparseable) is not None:
        examples = "; ".join(
            f"{sanitize_line(prompt_id)}: {truncate_text(text) or '(nothing)'!r}"
            for prompt_id, text, _ in unparseable.first[:5]
        )
        value = f"{unparseable.count:,} of {unparseable.total:,}" + (f" ({examples})" if examples else "")
        yield from _format_figures({"unparseable answers": value})
    if (labels := analysis.labels) is None:
        return
    yield from _format_metrics(labels.metrics)
    if (likelihoods := labels.likelihoods) is not None:
        found = likelihoods.calibration
        yield from _format_metrics({"most likely label is right": found.accuracy})
        yield from _format_metrics({"mean average precision": likelihoods.average_precision})
        error = f"{found.error:.3f}; mean probability {found.confidence:.3f}, right {found.accuracy.value:.3f}"
        yield from _format_figures({"expected calibration error": error})
        yield from _format_metrics({"Brier score (0 to 2)": found.brier})
    order = sorted(labels.classes, key=lambda name: (labels.classes[name]["f1"], name))
    rest = f" (the worst {MAX_LABELS_LISTED} of {len(order):,})" if len(order) > MAX_LABELS_LISTED else ""
    yield from ("", f"by label{rest}", _format_row("", ("F1", "precision", "recall", "av. prec.", "rows")))
    for name in order[:MAX_LABELS_LISTED]:
        scores = labels.classes[name]
        shares = [
            f"{scores[key]:.3f}" if key in scores else "" for key in ("f1", "precision", "recall", "average_precision")
        ]
        yield _format_row(name, [*shares, f"{scores['support']:,.0f}"])
    names = labels.confusion.labels
    if len(names) <= MAX_MATRIX_LABELS:
        yield from ("", f"confusion matrix (rows: references; columns: answers; (other): {NO_REFERENCE})")
        yield _format_row("", [*(truncate_text(name, 9) for name in names), "(other)"])
        for name, counts in zip(names, labels.confusion.matrix, strict=True):
            yield _format_row(name, [f"{count:,}" for count in counts])
    elif labels.confused_pairs:
        yield from ("", f"most frequently confused, of {len(labels.confused_pairs):,} pairs")
        pairs = sorted(labels.confused_pairs.items(), key=lambda item: (-item[1], item[0]))
        for (reference, answer), count in pairs[:MAX_PAIRS_LISTED]:
            yield f"  {truncate_text(reference)!r} answered {truncate_text(answer) or '(nothing)'!r}: {count:,}"


def _format_row(name: str, cells: Sequence[str]) -> str:
    return f"  {truncate_text(name):{MAX_LABEL_CHARACTERS}} " + " ".join(f"{cell:>9}" for cell in cells)


def _category_lines(analysis: AnswerAnalysis) -> Iterator[str]:
    for name, by_value in analysis.categories.items():
        worst = sorted(by_value.items(), key=lambda item: (-item[1].value, item[0]))
        rest = f" (the worst {MAX_VALUES_LISTED} of {len(worst):,})" if len(worst) > MAX_VALUES_LISTED else ""
        yield from ("", f"error rate by {truncate_text(name)}{rest}")
        for value, metric in worst[:MAX_VALUES_LISTED]:
            yield f"  {truncate_text(value):{MAX_LABEL_CHARACTERS}} {format_metric(metric)}"
