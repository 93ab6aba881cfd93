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
from ratchet.errors import DamagedError, InputError
from ratchet.evaluation import answer_metrics, metrics
from ratchet.evaluation.metric_modules.figures import SHARE, mean, mean_score, proportion
from ratchet.inference import output
from ratchet.inference.output import LABELS
from ratchet.inference.prompts import Value
from ratchet.inference.spec import FINISHES, Card
from ratchet.storage.html import visible
from ratchet.storage.records.evaluation import Metric

NO_WIDTH = 1e-9
"""Of the range of a figure: what rounding leaves of an interval without width."""


def widened(metric: Metric, most: float = 1.0) -> Metric:
    """The same with Wilson's interval, if a normal one has no width because no sample differs from another.

    Numbers between 0 and `most` vary the most, for their mean, where each is one of these two: a share. So the interval
    of a share is never too short for them.

    Args:
        metric: mean of samples, each between 0 and `most`.
        most: in the metric's unit.
    """
    if metric.high - metric.low > NO_WIDTH * most:
        return metric
    share = proportion([metric.value / most] * metric.n)
    low, high = min(metric.value, share.low * most), max(metric.value, share.high * most)
    return metric.model_copy(update={"low": low, "high": high})


# The answers of a generation, read from its output for whoever judges them; its card vouches for every byte.


@dataclass(frozen=True, slots=True)
class Given:
    """One answer."""

    said: str
    """Without reasoning, and without white space at its ends: as `evaluate` compares answers."""
    finish: str
    tokens: int | None
    nats: float | None
    """Mean log-probability of its tokens."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt with its answers."""

    id: str
    reference: str | None
    """Without white space at its ends; None: it has none."""
    fields: Mapping[str, Value]
    answers: Sequence[Given]
    """In the order of their numbers, at least one."""
    labels: "array[float] | None"
    """Log-probability in nats of each of the generation's labels as the whole answer, NaN where it is not known."""

    @property
    def right(self) -> float:
        """Share of its answers that are the reference."""
        return math.fsum(one.said == self.reference for one in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Answers:
    """All of a generation."""

    path: Path
    card: Card
    prompts: Sequence[Asked]
    is_labels: bool
    """Whether answers come from a small set, so that they are judged label by label."""

    @property
    def judged(self) -> Sequence[Asked]:
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
    def strange(self) -> Sequence[Asked]:
        """Prompts whose reference is none of generate.labels, if these are given."""
        named = set(self.card.spec.generate.labels)
        return [one for one in self.judged if one.reference not in named] if named else []


def is_output(name: str) -> bool:
    """Whether a name is that of a generation's output."""
    return Path(name).suffix in output.ENDINGS


def read_answers(path: Path, card: Card) -> Iterator[Asked]:
    """Prompt by prompt what an output says.

    Raises:
        DamagedError: it is not as it was written.
    """
    answers: list[Given] = []
    count = 0
    for number, record in enumerate(output.read(path, card), start=1):
        try:
            answers.append(_given(record))
            if len(answers) == card.spec.generate.samples:
                yield _asked(record, answers, card.spec.generate.labels)
                answers, count = [], count + 1
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedError(f"{path}: record {number} is none of `ratchet generate` ({error!r})") from None
    if answers or not count:
        raise DamagedError(f"{path}: holds {count:,} whole prompts, and its card says {card.prompts:,}")


def read(path: Path, task: str) -> Answers:
    """All answers of an output.

    Args:
        path: what `ratchet generate --output` wrote; its card lies beside it.
        task: prepare.task: `labels` if answers come from a small set; generate.labels say so, too.

    Raises:
        SettingsError, DamagedError: see `output.card` and `asked`.
    """
    card = output.card(path)
    return Answers(path, card, list(read_answers(path, card)), is_labels(card, task))


def is_labels(card: Card, task: str) -> bool:
    """Whether answers come from a small set: generate.labels name it, or prepare.task says so."""
    return bool(card.spec.generate.labels) or task == "labels"


def accuracy(right: Sequence[float]) -> Metric:
    """Of `Asked.right`: share of answers that are the reference; the mean of several to a prompt is one sample."""
    return widened(mean_score(right, "higher", SHARE))


def _given(record: Mapping[str, Any]) -> Given:
    if record["finish"] not in FINISHES:
        raise ValueError(f"finish {record['finish']!r}")
    nats = record["mean_log_probability"]
    known = nats if nats is not None and math.isfinite(nats) and record["tokens"] else None
    return Given(record["answer"].strip(), record["finish"], record["tokens"], known)


def _asked(record: Mapping[str, Any], answers: Sequence[Given], labels: Sequence[str]) -> Asked:
    reference, said = record.get("reference"), record.get(LABELS)
    known = None
    if labels and said is not None:
        known = array("d", (math.nan if said[label] is None else float(said[label]) for label in labels))
    text = None if reference is None else str(reference).strip()
    return Asked(str(record["id"]), text, record.get("fields") or {}, tuple(answers), known)


def written(value: Value) -> str:
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
class Bin:
    """Prompts whose likeliest label has a probability in one range."""

    low: float
    high: float
    confidence: float
    """Mean probability of the likeliest label."""
    right: Metric
    """Share of prompts whose likeliest label is the reference."""


@dataclass(frozen=True)
class Calibration:
    """Of one generation."""

    bins: Sequence[Bin]
    """Those that are not empty, in their order."""
    error: float
    """Expected calibration error: mean distance of probability and share, weighted with the prompts of the bins."""
    brier: Metric
    confidence: float
    """Mean probability of the likeliest label."""
    right: Metric
    """Share of prompts whose likeliest label is the reference."""


def probabilities(nats: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    """Softmax over labels; [prompts, labels]."""
    scores = np.asarray(nats, dtype=np.float64)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True), dtype=np.float64)


def calibration(labels: Sequence[str], expected: Sequence[str], nats: Sequence[Sequence[float]]) -> Calibration:
    """From finite log-probabilities of labels.

    Args:
        labels: in the order of the log-probabilities.
        expected: reference of each prompt, one of the labels; at least one.
        nats: log-probability of each label, for each prompt.
    """
    shares = probabilities(nats)
    place = {label: k for k, label in enumerate(labels)}
    true = np.array([place[label] for label in expected])
    likeliest = shares.argmax(axis=1)  # of equals the first
    confidence = shares.max(axis=1)
    right = likeliest == true
    edges = np.linspace(0.0, 1.0, BINS + 1)
    number = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, BINS - 1)
    bins = [
        Bin(
            float(edges[k]), float(edges[k + 1]), float(confidence[number == k].mean()),
            proportion(right[number == k].astype(float).tolist()),
        )
        for k in range(BINS)
        if (number == k).any()
    ]  # fmt: skip
    error = sum(one.right.n * abs(one.right.value - one.confidence) for one in bins) / len(true)
    wanted = np.zeros_like(shares)
    wanted[np.arange(len(true)), true] = 1.0
    brier = widened(mean(((shares - wanted) ** 2).sum(axis=1).tolist(), "lower", "0 to 2, mean of prompts"), most=2.0)
    return Calibration(bins, error, brier, float(confidence.mean()), proportion(right.astype(float).tolist()))


# What answers are worth beside their references: by label, by category, by how they ended.

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


# What a generation was worth, in a few lines behind its end; the panel says more. Reads answer by answer.


def lines(path: Path, task: str) -> list[str]:
    """Nothing where no prompt has a reference.

    Args:
        path: the generation's output, with its card beside it.
        task: prepare.task.
    """
    right: list[float] = []
    references: set[str] = set()
    try:
        card = output.card(path)
        labels = set(card.spec.generate.labels)
        for asked in read_answers(path, card):
            if asked.reference is not None:
                right.append(asked.right)
                references |= {asked.reference} if labels else set()
        strange = _strange(path, card, labels | references) if labels and right else 0
    except InputError as error:  # somebody changed it since it was written
        return [f"  not judged: {error}"]
    if not right:
        return []
    figure = accuracy(right)
    what = "accuracy" if is_labels(card, task) else "exactly the reference"
    of = f"of {figure.n:,} prompts with a reference"
    told = [f"  {what}: {figure.value:.3f} (95 %: {figure.low:.3f} to {figure.high:.3f}) {of}"]
    if labels:
        others = f", nor of the {len(references - labels):,} references beside them" if references - labels else ""
        told.append(f"  {strange:,} of {card.answers:,} answers are none of the {len(labels):,} labels{others}")
    return [*told, f"  more: ratchet report {path}"]


def _strange(path: Path, card: Card, possible: Set[str]) -> int:
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


def figure(metric: Metric) -> str:
    """Value, 95 % interval and number of samples."""
    value, low, high = (f"{one:.{PLACES}f}" for one in (metric.value, metric.low, metric.high))
    chance = "" if metric.chance is None else f"; always the most frequent label: {metric.chance:.{PLACES}f}"
    return f"{value} ({low} to {high}), n {metric.n:,}{chance}"


def bare(text: str) -> str:
    """A text in one line that cannot move the cursor."""
    return " ".join(visible(text).split())


def cut(text: str, longest: int = LONGEST) -> str:
    """The same, no longer than so many characters."""
    line = bare(text)
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def described(panel: Panel) -> str:
    """Everything, in lines."""
    card = panel.answers.card
    head = f"generation {card.id}: {card.answers:,} answers to {card.prompts:,} prompts by {bare(card.model_name)}"
    return "\n".join(
        [head, *_ends(panel), *_right(panel), *_labels(panel), *_categories_text(panel), *_agreement_text(panel)]
    )


def notes(panel: Panel) -> list[str]:
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
        shown = ", ".join(repr(cut(str(text))) for text in sorted({str(one.reference) for one in answers.strange})[:5])
        found.append(
            f"References that are none of the {len(answers.card.spec.generate.labels):,} generate.labels: "
            f"{len(answers.strange):,} ({shown}). They are judged as labels of their own: an answer that says the same "
            "is right, one of generate.labels is wrong."
        )
    if panel.labels is not None:
        if len(panel.labels.classes) == 1:
            found.append("All references are the same label: nothing is told apart, and chance is 1.")
        found += _of_likelihoods(panel, panel.labels)
    for name, count in panel.many.items():
        found.append(f"Field {bare(name)} has {count:,} values: too many for error rates one by one.")
    if invalid := card_count(panel, "invalid"):
        found.append(f"Answers that ended because the model gave numbers that are none (NaN): {invalid:,}.")
    return found


def card_count(panel: Panel, finish: str) -> int:
    """Answers that ended so."""
    return panel.finishes.get(finish, (0, None))[0]


def _of_likelihoods(panel: Panel, labels: ByLabel) -> list[str]:
    if labels.likely is not None:
        left_out = labels.likely.left_out
        said = f"Prompts in no precision-recall curve and no calibration: {left_out:,}; their reference is no label, or"
        return [f"{said} a label's likelihood is not known."] if left_out else []
    if panel.answers.card.spec.generate.labels:
        why = "no log-probabilities of labels are known of prompts whose reference is a label"
        return [f"Only text was available: {why}. There are no precision-recall curves and no calibration."]
    what = "precision-recall curves and calibration need generate.labels"
    return [f"Only text was available: {what}, so that each label's log-probability is recorded."]


def _line(name: str, value: str) -> str:
    return f"  {name:{NAME_WIDTH - 2}} {value}"


def _ends(panel: Panel) -> Lines:
    yield _line("finish", ", ".join(f"{count:,} {name}" for name, (count, _) in panel.finishes.items()))
    if (tokens := panel.tokens) is not None:
        yield _line("tokens of an answer", f"median {tokens.median:,.0f}, 95 % have at most {tokens.p95:,.0f}, "
                    f"longest {tokens.greatest:,.0f}")  # fmt: skip
    if (nats := panel.nats) is not None:
        yield _line("mean log-probability", f"median {nats.median:.3f}, 5 % below {nats.p5:.3f}")
    for note in notes(panel):
        yield f"  note: {note}"


def _right(panel: Panel) -> Lines:
    for name, metric in panel.right.items():
        yield _line(name.replace("_", " "), figure(metric))


def _labels(panel: Panel) -> Lines:
    if (found := panel.unparseable) is not None:
        shown = "; ".join(f"{bare(where)}: {cut(said) or '(nothing)'!r}" for where, said, _ in found.first[:5])
        yield _line("unparseable answers", f"{found.count:,} of {found.of:,}" + (f" ({shown})" if shown else ""))
    if (labels := panel.labels) is None:
        return
    for name, metric in labels.figures.items():
        yield _line(name.replace("_", " "), figure(metric))
    if (likely := labels.likely) is not None:
        yield _line("likeliest label is right", figure(likely.calibration.right))
        yield _line("mean average precision", figure(likely.average_precision))
        yield _line("expected calibration error", f"{likely.calibration.error:.3f}; sure by "
                    f"{likely.calibration.confidence:.3f}, right {likely.calibration.right.value:.3f}")  # fmt: skip
        yield _line("Brier score (0 to 2)", figure(likely.calibration.brier))
    yield from _classes(labels)
    yield from _confusion(labels)


def _classes(labels: ByLabel) -> Lines:
    found = labels.classes
    order = sorted(found, key=lambda name: (found[name]["f1"], name))
    rest = f" (the worst {LABELS_LISTED} of {len(order):,})" if len(order) > LABELS_LISTED else ""
    heads = ("F1", "precision", "recall", "av. prec.", "rows")
    yield from ("", f"by label{rest}", f"  {'':{LONGEST}} " + " ".join(f"{head:>9}" for head in heads))
    for name in order[:LABELS_LISTED]:
        one = found[name]
        values = [f"{one[key]:9.3f}" if key in one else f"{'':>9}" for key in
                  ("f1", "precision", "recall", "average_precision")]  # fmt: skip
        yield f"  {cut(name):{LONGEST}} {' '.join(values)} {one['support']:9,.0f}"


def _confusion(labels: ByLabel) -> Lines:
    names = labels.confusion.labels
    if len(names) <= LABELS_CROSSED:
        columns = [*(cut(name, 9) for name in names), OTHER]
        yield from ("", f"confusion matrix (rows: expected; columns: answered; {OTHER}: {NO_REFERENCE})")
        yield f"  {'':{LONGEST}} " + " ".join(f"{name:>9}" for name in columns)
        for name, counts in zip(names, labels.confusion.matrix, strict=True):
            yield f"  {cut(name):{LONGEST}} " + " ".join(f"{count:9,}" for count in counts)
    elif labels.pairs:
        yield from ("", f"taken for each other most often, of {len(labels.pairs):,} pairs")
        for (right, given), count in sorted(labels.pairs.items(), key=lambda item: (-item[1], item[0]))[:PAIRS_LISTED]:
            yield f"  {cut(right)!r} answered {cut(given) or '(nothing)'!r}: {count:,}"


def _categories_text(panel: Panel) -> Lines:
    for name, by_value in panel.categories.items():
        worst = sorted(by_value.items(), key=lambda item: (-item[1].value, item[0]))
        rest = f" (the worst {VALUES_LISTED} of {len(worst):,})" if len(worst) > VALUES_LISTED else ""
        yield from ("", f"error rate by {cut(name)}{rest}", *_values(worst[:VALUES_LISTED]))


def _values(found: Sequence[tuple[str, Metric]]) -> Lines:
    for value, metric in found:
        yield f"  {cut(value):{LONGEST}} {figure(metric)}"


def _agreement_text(panel: Panel) -> Lines:
    if (found := panel.agreement) is None:
        return
    yield from ("", f"among {found.samples} answers to a prompt")
    yield _line("pairs that agree", figure(found.agreement))
    yield _line("prompts with one answer only", figure(found.unanimous))
    if found.majority is not None:
        yield _line("most frequent answer is right", figure(found.majority))
