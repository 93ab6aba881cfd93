"""Intervals of figures whose samples are all the same, which is no certainty."""

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.config.evaluation import Evaluate
from ratchet.errors import DamagedFileError, InputError
from ratchet.evaluation import answer_metrics, metrics
from ratchet.evaluation.metric_modules.figures import SHARE, mean_metric, mean_score_metric, proportion_metric
from ratchet.inference import output
from ratchet.inference.output import LABELS
from ratchet.inference.prompts import Value
from ratchet.inference.spec import FINISHES, GenerationCard
from ratchet.storage.html import escape_invisible
from ratchet.storage.records.evaluation import MetricValue

NO_WIDTH = 1e-9
"""Of the range of a figure: what rounding leaves of an interval without width."""


def widen_interval(metric: MetricValue, most: float = 1.0) -> MetricValue:
    """The same with Wilson's interval, if a normal one has no width because no sample differs from another.

    Numbers between 0 and `most` vary the most, for their mean, where each is one of these two: a share. So the interval
    of a share is never too short for them.

    Args:
        metric: mean of samples, each between 0 and `most`.
        most: in the metric's unit.
    """
    if metric.high - metric.low > NO_WIDTH * most:
        return metric
    share = proportion_metric([metric.value / most] * metric.n)
    low, high = min(metric.value, share.low * most), max(metric.value, share.high * most)
    return metric.model_copy(update={"low": low, "high": high})


# The answers of a generation, read from its output for whoever judges them; its card vouches for every byte.


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """One answer."""

    said: str
    """Without reasoning, and without white space at its ends: as `evaluate` compares answers."""
    finish: str
    tokens: int | None
    nats: float | None
    """Mean log-probability of its tokens."""


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """One prompt with its answers."""

    id: str
    reference: str | None
    """Without white space at its ends; None: it has none."""
    fields: Mapping[str, Value]
    answers: Sequence[GeneratedAnswer]
    """In the order of their numbers, at least one."""
    labels: "array[float] | None"
    """Log-probability in nats of each of the generation's labels as the whole answer, NaN where it is not known."""

    @property
    def right(self) -> float:
        """Share of its answers that are the reference."""
        return math.fsum(one.said == self.reference for one in self.answers) / len(self.answers)


@dataclass(frozen=True)
class GenerationAnswers:
    """All of a generation."""

    path: Path
    card: GenerationCard
    prompts: Sequence[AnsweredPrompt]
    is_labels: bool
    """Whether answers come from a small set, so that they are judged label by label."""

    @property
    def judged(self) -> Sequence[AnsweredPrompt]:
        """Prompts with a reference."""
        return [one for one in self.prompts if one.reference is not None]

    @cached_property
    def vocabulary(self) -> tuple[str, ...]:
        """Answers that are possible: generate.labels, and references beside them. Empty where answers are free."""
        if not self.is_labels:
            return ()
        named = self.card.spec.generate.labels
        return (*named, *sorted({one.reference for one in self.prompts if one.reference is not None} - set(named)))

    @cached_property
    def strange(self) -> Sequence[AnsweredPrompt]:
        """Prompts whose reference is none of generate.labels, if these are given."""
        named = set(self.card.spec.generate.labels)
        return [one for one in self.judged if one.reference not in named] if named else []


def is_output(name: str) -> bool:
    """Whether a name is that of a generation's output."""
    return Path(name).suffix in output.ENDINGS


def read_answers(path: Path, card: GenerationCard) -> Iterator[AnsweredPrompt]:
    """Prompt by prompt what an output says.

    Raises:
        DamagedFileError: it is not as it was written.
    """
    answers: list[GeneratedAnswer] = []
    count = 0
    for number, record in enumerate(output.read_records(path, card), start=1):
        try:
            answers.append(_parse_answer(record))
            if len(answers) == card.spec.generate.samples:
                yield _parse_prompt(record, answers, card.spec.generate.labels)
                answers, count = [], count + 1
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedFileError(f"{path}: record {number} is none of `ratchet generate` ({error!r})") from None
    if answers or not count:
        raise DamagedFileError(f"{path}: holds {count:,} whole prompts, and its card says {card.prompts:,}")


def read_generation(path: Path, task: str) -> GenerationAnswers:
    """All answers of an output.

    Args:
        path: what `ratchet generate --output` wrote; its card lies beside it.
        task: prepare.task: `labels` if answers come from a small set; generate.labels say so, too.

    Raises:
        SettingsError, DamagedFileError: see `output.read_card` and `asked`.
    """
    card = output.read_card(path)
    return GenerationAnswers(path, card, list(read_answers(path, card)), has_label_answers(card, task))


def has_label_answers(card: GenerationCard, task: str) -> bool:
    """Whether answers come from a small set: generate.labels name it, or prepare.task says so."""
    return bool(card.spec.generate.labels) or task == "labels"


def compute_accuracy(right: Sequence[float]) -> MetricValue:
    """Of `AnsweredPrompt.right`: share of answers that are the reference.

    The mean of several answers to a prompt is one sample.
    """
    return widen_interval(mean_score_metric(right, "higher", SHARE))


def _parse_answer(record: Mapping[str, Any]) -> GeneratedAnswer:
    if record["finish"] not in FINISHES:
        raise ValueError(f"finish {record['finish']!r}")
    nats = record["mean_log_probability"]
    known = nats if nats is not None and math.isfinite(nats) and record["tokens"] else None
    return GeneratedAnswer(record["answer"].strip(), record["finish"], record["tokens"], known)


def _parse_prompt(
    record: Mapping[str, Any], answers: Sequence[GeneratedAnswer], labels: Sequence[str]
) -> AnsweredPrompt:
    reference, said = record.get("reference"), record.get(LABELS)
    known = None
    if labels and said is not None:
        known = array("d", (math.nan if said[label] is None else float(said[label]) for label in labels))
    text = None if reference is None else str(reference).strip()
    return AnsweredPrompt(str(record["id"]), text, record.get("fields") or {}, tuple(answers), known)


def format_field(value: Value) -> str:
    """A kept field's value for people: texts as they are, the rest as in JSON."""
    return value if isinstance(value, str) else json.dumps(value)


# Whether the probabilities that a model gives to labels are what becomes of them.
#
# A label's probability is its share of the probability of all labels together (softmax over their log-probabilities):
# what else the model could have said is left out. Expected calibration error: M. P. Naeini, G. F. Cooper and M.
# Hauskrecht, AAAI 2015, on the likeliest label as in C. Guo et al., "On Calibration of Modern Neural Networks", ICML
# 2017, equation 3. Brier score: G. W. Brier, Monthly Weather Review 78, 1950: over all labels, so from 0 to 2.

BINS = 10
"""Of equal width, each with its upper edge: (0, 0.1], ..., (0.9, 1]."""


@dataclass(frozen=True)
class CalibrationBin:
    """Prompts whose likeliest label has a probability in one range."""

    low: float
    high: float
    confidence: float
    """Mean probability of the likeliest label."""
    right: MetricValue
    """Share of prompts whose likeliest label is the reference."""


@dataclass(frozen=True)
class LabelCalibration:
    """Of one generation."""

    bins: Sequence[CalibrationBin]
    """Those that are not empty, in their order."""
    error: float
    """Expected calibration error: mean distance of probability and share, weighted with the prompts of the bins."""
    brier: MetricValue
    confidence: float
    """Mean probability of the likeliest label."""
    right: MetricValue
    """Share of prompts whose likeliest label is the reference."""


def label_probabilities(nats: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Softmax over labels; [prompts, labels]."""
    scores = np.asarray(nats, dtype=np.float64)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True), dtype=np.float64)


def compute_calibration(
    labels: Sequence[str], expected: Sequence[str], nats: Sequence[Sequence[float]]
) -> LabelCalibration:
    """From finite log-probabilities of labels.

    Args:
        labels: in the order of the log-probabilities.
        expected: reference of each prompt, one of the labels; at least one.
        nats: log-probability of each label, for each prompt.
    """
    shares = label_probabilities(nats)
    place = {label: k for k, label in enumerate(labels)}
    true = np.array([place[label] for label in expected])
    likeliest = shares.argmax(axis=1)  # of equals the first
    confidence = shares.max(axis=1)
    right = likeliest == true
    edges = np.linspace(0.0, 1.0, BINS + 1)
    number = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, BINS - 1)
    bins = [
        CalibrationBin(
            float(edges[k]), float(edges[k + 1]), float(confidence[number == k].mean()),
            proportion_metric(right[number == k].astype(float).tolist()),
        )
        for k in range(BINS)
        if (number == k).any()
    ]  # fmt: skip
    error = sum(one.right.n * abs(one.right.value - one.confidence) for one in bins) / len(true)
    wanted = np.zeros_like(shares)
    wanted[np.arange(len(true)), true] = 1.0
    brier = widen_interval(
        mean_metric(((shares - wanted) ** 2).sum(axis=1).tolist(), "lower", "0 to 2, mean of prompts"), most=2.0
    )
    return LabelCalibration(
        bins, error, brier, float(confidence.mean()), proportion_metric(right.astype(float).tolist())
    )


# What answers are worth beside their references: by label, by category, by how they ended.

UNPARSEABLE_SHOWN = 10
CATEGORIES = 30
"""Values of a field, at most, for which error rates are given one by one."""
EXACT = "exact_match"


@dataclass(frozen=True)
class DistributionSummary:
    """How a number is distributed over answers."""

    n: int
    least: float
    p5: float
    median: float
    p95: float
    greatest: float


@dataclass(frozen=True)
class UnparseableAnswers:
    """Answers that are none of the answers that are possible."""

    count: int
    of: int
    first: Sequence[tuple[str, str, str]]
    """Id of the prompt, the answer, how it ended."""


@dataclass(frozen=True)
class LikelihoodAnalysis:
    """What the log-probabilities of labels say, whatever was answered."""

    n: int
    left_out: int
    """Prompts with a reference that are not among them: the reference is no label, or a label's is not known."""
    curves: Mapping[str, Mapping[str, Any]]
    """Precision and recall of each label, as evaluation/metrics.curves gives them."""
    average_precision: MetricValue
    """Mean over labels."""
    calibration: LabelCalibration


@dataclass(frozen=True)
class LabelAnalysis:
    """Answers that come from a small set."""

    figures: Mapping[str, MetricValue]
    """`compute_accuracy`, `macro_f1`, `micro_f1`, `balanced_accuracy`."""
    classes: Mapping[str, dict[str, float]]
    """Precision, recall, F1, support and average precision of each label that is a reference."""
    confusion: metrics.ConfusionMatrix
    pairs: Counter[tuple[str, str]]
    """Reference and answer, where they are not the same: first answers to each prompt."""
    likely: LikelihoodAnalysis | None
    """None: only text is there."""


@dataclass(frozen=True)
class SampleAgreement:
    """Among several answers to the same prompt."""

    samples: int
    agreement: MetricValue
    """Mean over prompts: share of pairs of answers that are the same."""
    unanimous: MetricValue
    """Share of prompts whose answers are all the same."""
    majority: MetricValue | None
    """Share of prompts whose most frequent answer is the reference, of equals the first; None: no references."""


@dataclass(frozen=True)
class AnswerAnalysis:
    """All that is said of a generation's answers."""

    answers: GenerationAnswers
    finishes: Mapping[str, tuple[int, MetricValue | None]]
    """How answers ended: how many, and which share of those with a reference are right."""
    tokens: DistributionSummary | None
    nats: DistributionSummary | None
    """Of the answers' mean log-probabilities."""
    right: Mapping[str, MetricValue]
    """Free answers: exact match and token F1; empty for labels, and without references."""
    labels: LabelAnalysis | None
    categories: Mapping[str, Mapping[str, MetricValue]]
    """Error rate by field of generate.keep and its value."""
    many: Mapping[str, int]
    """Fields with too many values for that, and how many they have."""
    unparseable: UnparseableAnswers | None
    """None: answers are free."""
    agreement: SampleAgreement | None
    """None: one answer to each prompt."""


def analyze_answers(answers: GenerationAnswers, seed: int) -> AnswerAnalysis:
    """Judge the answers of a generation.

    Args:
        answers: of it.
        seed: of bootstrap intervals.
    """
    judged = answers.judged
    free = bool(judged) and not answers.is_labels
    categories, many = _score_categories(answers, judged)
    given = [one for asked in answers.prompts for one in asked.answers]
    return AnswerAnalysis(
        answers=answers,
        finishes=_count_finishes(answers),
        tokens=summarize_distribution([one.tokens for one in given if one.tokens is not None]),
        nats=summarize_distribution([one.nats for one in given if one.nats is not None]),
        right=_score_free_text(judged) if free else {},
        labels=_analyze_labels(answers, judged, seed) if judged and answers.is_labels else None,
        categories=categories,
        many=many,
        unparseable=find_unparseable(answers) if answers.vocabulary else None,
        agreement=_measure_agreement(answers) if answers.card.spec.generate.samples > 1 else None,
    )


def find_unparseable(answers: GenerationAnswers) -> UnparseableAnswers:
    """Answers that are none of the vocabulary, and the first of them."""
    known = set(answers.vocabulary)
    found = [
        (asked.id, one.said, one.finish)
        for asked in answers.prompts
        for one in asked.answers
        if one.said not in known
    ]  # fmt: skip
    return UnparseableAnswers(len(found), answers.card.answers, found[:UNPARSEABLE_SHOWN])


def summarize_distribution(values: Sequence[float]) -> DistributionSummary | None:
    """Of numbers, by nearest rank; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    least, p5, median, p95, greatest = (ordered[round(share * (len(ordered) - 1))] for share in (0, 0.05, 0.5, 0.95, 1))
    return DistributionSummary(len(ordered), least, p5, median, p95, greatest)


def _count_finishes(answers: GenerationAnswers) -> dict[str, tuple[int, MetricValue | None]]:
    counts, right = Counter[str](), dict[str, list[float]]()
    for asked in answers.prompts:
        for one in asked.answers:
            counts[one.finish] += 1
            if asked.reference is not None:
                right.setdefault(one.finish, []).append(float(one.said == asked.reference))
    return {
        name: (count, proportion_metric(right[name]) if name in right else None)
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    }


def _score_free_text(judged: Sequence[AnsweredPrompt]) -> dict[str, MetricValue]:
    expected = [str(one.reference) for one in judged]
    given = [[answer.said for answer in one.answers] for one in judged]
    found = answer_metrics.score_answers(expected, given, Evaluate(measures=("token_f1",)), EXACT)
    return {one.name: widen_interval(one.metric) for one in found}


def _analyze_labels(answers: GenerationAnswers, judged: Sequence[AnsweredPrompt], seed: int) -> LabelAnalysis:
    expected = [str(one.reference) for one in judged]
    first = [one.answers[0].said for one in judged]
    classes, confusion = metrics.score_classes(expected, first)
    chance = metrics.majority_share(expected)
    figures = {"accuracy": compute_accuracy([one.right for one in judged]).model_copy(update={"chance": chance})}
    likely = _analyze_likelihoods(answers, judged, seed)
    for label, curve in likely.curves.items() if likely else ():
        if label in classes and math.isfinite(curve["average_precision"]):
            classes[label]["average_precision"] = curve["average_precision"]
    pairs = Counter(pair for pair in zip(expected, first, strict=True) if pair[0] != pair[1])
    figures |= metrics.compute_label_metrics(expected, first, seed)
    return LabelAnalysis(figures, classes, confusion, pairs, likely)


def _analyze_likelihoods(
    answers: GenerationAnswers, judged: Sequence[AnsweredPrompt], seed: int
) -> LikelihoodAnalysis | None:
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
    return LikelihoodAnalysis(
        len(nats), len(judged) - len(nats), metrics.precision_recall_curves(labels, expected, nats),
        metrics.mean_average_precision(labels, expected, nats, seed), compute_calibration(labels, expected, nats),
    )  # fmt: skip


def _score_categories(
    answers: GenerationAnswers, judged: Sequence[AnsweredPrompt]
) -> tuple[dict[str, dict[str, MetricValue]], dict[str, int]]:  # fmt: skip
    found, many = {}, {}
    for name in answers.card.spec.generate.keep:
        wrong: dict[str, list[float]] = {}
        for one in judged:
            if name in one.fields:
                wrong.setdefault(format_field(one.fields[name]), []).append(1.0 - one.right)
        if len(wrong) > CATEGORIES:
            many[name] = len(wrong)
        elif wrong:
            found[name] = {value: _error_rate(wrong[value]) for value in sorted(wrong)}
    return found, many


def _error_rate(wrong: Sequence[float]) -> MetricValue:
    metric = widen_interval(mean_score_metric(wrong, "higher", SHARE))
    return metric.model_copy(update={"better": "lower"})


def _measure_agreement(answers: GenerationAnswers) -> SampleAgreement:
    same, unanimous, hits = [], [], []
    samples = answers.card.spec.generate.samples
    for asked in answers.prompts:
        votes = Counter(one.said for one in asked.answers)  # of equals, the first that was given comes first
        same.append(sum(count * (count - 1) for count in votes.values()) / (samples * (samples - 1)))
        unanimous.append(float(len(votes) == 1))
        if asked.reference is not None:
            hits.append(float(votes.most_common(1)[0][0] == asked.reference))
    agreement = widen_interval(mean_metric(same, "unknown", SHARE))
    return SampleAgreement(samples, agreement, proportion_metric(unanimous), proportion_metric(hits) if hits else None)


# What a generation was worth, in a few lines behind its end; the panel says more. Reads answer by answer.


def summarize_generation(path: Path, task: str) -> list[str]:
    """Nothing where no prompt has a reference.

    Args:
        path: the generation's output, with its card beside it.
        task: prepare.task.
    """
    right: list[float] = []
    references: set[str] = set()
    try:
        card = output.read_card(path)
        labels = set(card.spec.generate.labels)
        for asked in read_answers(path, card):
            if asked.reference is not None:
                right.append(asked.right)
                references |= {asked.reference} if labels else set()
        strange = _count_unparseable(path, card, labels | references) if labels and right else 0
    except InputError as error:  # somebody changed it since it was written
        return [f"  not judged: {error}"]
    if not right:
        return []
    figure = compute_accuracy(right)
    what = "accuracy" if has_label_answers(card, task) else "exactly the reference"
    of = f"of {figure.n:,} prompts with a reference"
    told = [f"  {what}: {figure.value:.3f} (95 %: {figure.low:.3f} to {figure.high:.3f}) {of}"]
    if labels:
        others = f", nor of the {len(references - labels):,} references beside them" if references - labels else ""
        told.append(f"  {strange:,} of {card.answers:,} answers are none of the {len(labels):,} labels{others}")
    return [*told, f"  more: ratchet report {path}"]


def _count_unparseable(path: Path, card: GenerationCard, possible: Set[str]) -> int:
    """Answers that are none of the possible ones. They are read again: which references there are is known now."""
    return sum(one.said not in possible for asked in read_answers(path, card) for one in asked.answers)


# A panel for the terminal.

NAME_WIDTH, LONGEST = 30, 24
"""Characters of a figure's name with its indentation, and of a label."""
LABELS_LISTED, LABELS_CROSSED, PAIRS_LISTED, VALUES_LISTED = 20, 10, 10, 12
"""Labels with their own figures (the worst), labels of which every pair is shown, pairs, values of a field."""
PLACES = 3
"""Of figures, after the point: here and on the page."""
OTHER = "(other)"
NO_REFERENCE = "answers that are nobody's reference, possible or not"
Lines = Iterator[str]


def format_metric(metric: MetricValue) -> str:
    """Value, 95 % interval and number of samples."""
    value, low, high = (f"{one:.{PLACES}f}" for one in (metric.value, metric.low, metric.high))
    chance = "" if metric.chance is None else f"; always the most frequent label: {metric.chance:.{PLACES}f}"
    return f"{value} ({low} to {high}), n {metric.n:,}{chance}"


def sanitize_line(text: str) -> str:
    """A text in one line that cannot move the cursor."""
    return " ".join(escape_invisible(text).split())


def truncate_text(text: str, longest: int = LONGEST) -> str:
    """The same, no longer than so many characters."""
    line = sanitize_line(text)
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def format_analysis(panel: AnswerAnalysis) -> str:
    """Everything, in lines."""
    card = panel.answers.card
    head = (
        f"generation {card.id}: {card.answers:,} answers to {card.prompts:,} prompts "
        f"by {sanitize_line(card.model_name)}"
    )
    return "\n".join(
        [
            head,
            *_ending_lines(panel),
            *_accuracy_lines(panel),
            *_label_lines(panel),
            *_category_lines(panel),
            *_agreement_lines(panel),
        ]
    )


def describe_omissions(panel: AnswerAnalysis) -> list[str]:
    """What a reader must know beside the figures: what was left out of them, and why."""
    answers, found = panel.answers, []
    missing = len(answers.prompts) - len(answers.judged)
    if not answers.judged:
        found.append(
            "No prompt has a reference (its record's own answer), so it cannot be said which answers are right."
        )
    elif missing:
        found.append(f"Prompts without a reference: {missing:,} of {len(answers.prompts):,}; they are in no share that "
                     "is right or wrong.")  # fmt: skip
    if answers.strange:
        shown = ", ".join(
            repr(truncate_text(str(text))) for text in sorted({str(one.reference) for one in answers.strange})[:5]
        )
        found.append(
            f"References that are none of the {len(answers.card.spec.generate.labels):,} generate.labels: "
            f"{len(answers.strange):,} ({shown}). They are judged as labels of their own: an answer that says the same "
            "is right, one of generate.labels is wrong."
        )
    if panel.labels is not None:
        if len(panel.labels.classes) == 1:
            found.append("All references are the same label: nothing is told apart, and chance is 1.")
        found += _likelihood_lines(panel, panel.labels)
    for name, count in panel.many.items():
        found.append(f"Field {sanitize_line(name)} has {count:,} values: too many for error rates one by one.")
    if invalid := count_card_finishes(panel, "invalid"):
        found.append(f"Answers that ended because the model gave numbers that are none (NaN): {invalid:,}.")
    return found


def count_card_finishes(panel: AnswerAnalysis, finish: str) -> int:
    """Answers that ended so."""
    return panel.finishes.get(finish, (0, None))[0]


def _likelihood_lines(panel: AnswerAnalysis, labels: LabelAnalysis) -> list[str]:
    if labels.likely is not None:
        left_out = labels.likely.left_out
        said = f"Prompts in no precision-recall curve and no calibration: {left_out:,}; their reference is no label, or"
        return [f"{said} a label's likelihood is not known."] if left_out else []
    if panel.answers.card.spec.generate.labels:
        why = "no log-probabilities of labels are known of prompts whose reference is a label"
        return [f"Only text was available: {why}. There are no precision-recall curves and no calibration."]
    what = "precision-recall curves and calibration need generate.labels"
    return [f"Only text was available: {what}, so that each label's log-probability is recorded."]


def _format_line(name: str, value: str) -> str:
    return f"  {name:{NAME_WIDTH - 2}} {value}"


def _ending_lines(panel: AnswerAnalysis) -> Lines:
    yield _format_line("finish", ", ".join(f"{count:,} {name}" for name, (count, _) in panel.finishes.items()))
    if (tokens := panel.tokens) is not None:
        yield _format_line("tokens of an answer", f"median {tokens.median:,.0f}, 95 % have at most {tokens.p95:,.0f}, "
                    f"longest {tokens.greatest:,.0f}")  # fmt: skip
    if (nats := panel.nats) is not None:
        yield _format_line("mean log-probability", f"median {nats.median:.3f}, 5 % below {nats.p5:.3f}")
    for note in describe_omissions(panel):
        yield f"  note: {note}"


def _accuracy_lines(panel: AnswerAnalysis) -> Lines:
    for name, metric in panel.right.items():
        yield _format_line(name.replace("_", " "), format_metric(metric))


def _label_lines(panel: AnswerAnalysis) -> Lines:
    if (found := panel.unparseable) is not None:
        shown = "; ".join(
            f"{sanitize_line(where)}: {truncate_text(said) or '(nothing)'!r}" for where, said, _ in found.first[:5]
        )
        yield _format_line("unparseable answers", f"{found.count:,} of {found.of:,}" + (f" ({shown})" if shown else ""))
    if (labels := panel.labels) is None:
        return
    for name, metric in labels.figures.items():
        yield _format_line(name.replace("_", " "), format_metric(metric))
    if (likely := labels.likely) is not None:
        yield _format_line("likeliest label is right", format_metric(likely.calibration.right))
        yield _format_line("mean average precision", format_metric(likely.average_precision))
        yield _format_line("expected calibration error", f"{likely.calibration.error:.3f}; sure by "
                    f"{likely.calibration.confidence:.3f}, right {likely.calibration.right.value:.3f}")  # fmt: skip
        yield _format_line("Brier score (0 to 2)", format_metric(likely.calibration.brier))
    yield from _class_lines(labels)
    yield from _confusion_lines(labels)


def _class_lines(labels: LabelAnalysis) -> Lines:
    found = labels.classes
    order = sorted(found, key=lambda name: (found[name]["f1"], name))
    rest = f" (the worst {LABELS_LISTED} of {len(order):,})" if len(order) > LABELS_LISTED else ""
    heads = ("F1", "precision", "recall", "av. prec.", "rows")
    yield from ("", f"by label{rest}", f"  {'':{LONGEST}} " + " ".join(f"{head:>9}" for head in heads))
    for name in order[:LABELS_LISTED]:
        one = found[name]
        values = [f"{one[key]:9.3f}" if key in one else f"{'':>9}" for key in
                  ("f1", "precision", "recall", "average_precision")]  # fmt: skip
        yield f"  {truncate_text(name):{LONGEST}} {' '.join(values)} {one['support']:9,.0f}"


def _confusion_lines(labels: LabelAnalysis) -> Lines:
    names = labels.confusion.labels
    if len(names) <= LABELS_CROSSED:
        columns = [*(truncate_text(name, 9) for name in names), OTHER]
        yield from ("", f"confusion matrix (rows: expected; columns: answered; {OTHER}: {NO_REFERENCE})")
        yield f"  {'':{LONGEST}} " + " ".join(f"{name:>9}" for name in columns)
        for name, counts in zip(names, labels.confusion.matrix, strict=True):
            yield f"  {truncate_text(name):{LONGEST}} " + " ".join(f"{count:9,}" for count in counts)
    elif labels.pairs:
        yield from ("", f"taken for each other most often, of {len(labels.pairs):,} pairs")
        for (right, given), count in sorted(labels.pairs.items(), key=lambda item: (-item[1], item[0]))[:PAIRS_LISTED]:
            yield f"  {truncate_text(right)!r} answered {truncate_text(given) or '(nothing)'!r}: {count:,}"


def _category_lines(panel: AnswerAnalysis) -> Lines:
    for name, by_value in panel.categories.items():
        worst = sorted(by_value.items(), key=lambda item: (-item[1].value, item[0]))
        rest = f" (the worst {VALUES_LISTED} of {len(worst):,})" if len(worst) > VALUES_LISTED else ""
        yield from ("", f"error rate by {truncate_text(name)}{rest}", *_value_lines(worst[:VALUES_LISTED]))


def _value_lines(found: Sequence[tuple[str, MetricValue]]) -> Lines:
    for value, metric in found:
        yield f"  {truncate_text(value):{LONGEST}} {format_metric(metric)}"


def _agreement_lines(panel: AnswerAnalysis) -> Lines:
    if (found := panel.agreement) is None:
        return
    yield from ("", f"among {found.samples} answers to a prompt")
    yield _format_line("pairs that agree", format_metric(found.agreement))
    yield _format_line("prompts with one answer only", format_metric(found.unanimous))
    if found.majority is not None:
        yield _format_line("most frequent answer is right", format_metric(found.majority))
