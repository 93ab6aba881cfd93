"""What a generation was worth, in a few lines behind its end; the panel says more. Reads answer by answer."""

from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from ratchet.errors import InputError
from ratchet.evaluation import answer_analysis
from ratchet.evaluation.answer_analysis import ByLabel, Panel
from ratchet.inference import output
from ratchet.inference.spec import Card
from ratchet.storage.html import visible
from ratchet.storage.records.evaluation import Metric


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
        for asked in answer_analysis.asked(path, card):
            if asked.reference is not None:
                right.append(asked.right)
                references |= {asked.reference} if labels else set()
        strange = _strange(path, card, labels | references) if labels and right else 0
    except InputError as error:  # somebody changed it since it was written
        return [f"  not judged: {error}"]
    if not right:
        return []
    figure = answer_analysis.accuracy(right)
    what = "accuracy" if answer_analysis.is_labels(card, task) else "exactly the reference"
    of = f"of {figure.n:,} prompts with a reference"
    told = [f"  {what}: {figure.value:.3f} (95 %: {figure.low:.3f} to {figure.high:.3f}) {of}"]
    if labels:
        others = f", nor of the {len(references - labels):,} references beside them" if references - labels else ""
        told.append(f"  {strange:,} of {card.answers:,} answers are none of the {len(labels):,} labels{others}")
    return [*told, f"  more: ratchet report {path}"]


def _strange(path: Path, card: Card, possible: Set[str]) -> int:
    """Answers that are none of the possible ones. They are read again: which references there are is known now."""
    return sum(one.said not in possible for asked in answer_analysis.asked(path, card) for one in asked.answers)


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
    return "\n".join([head, *_ends(panel), *_right(panel), *_labels(panel), *_categories(panel), *_agreement(panel)])


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


def _categories(panel: Panel) -> Lines:
    for name, by_value in panel.categories.items():
        worst = sorted(by_value.items(), key=lambda item: (-item[1].value, item[0]))
        rest = f" (the worst {VALUES_LISTED} of {len(worst):,})" if len(worst) > VALUES_LISTED else ""
        yield from ("", f"error rate by {cut(name)}{rest}", *_values(worst[:VALUES_LISTED]))


def _values(found: Sequence[tuple[str, Metric]]) -> Lines:
    for value, metric in found:
        yield f"  {cut(value):{LONGEST}} {figure(metric)}"


def _agreement(panel: Panel) -> Lines:
    if (found := panel.agreement) is None:
        return
    yield from ("", f"among {found.samples} answers to a prompt")
    yield _line("pairs that agree", figure(found.agreement))
    yield _line("prompts with one answer only", figure(found.unanimous))
    if found.majority is not None:
        yield _line("most frequent answer is right", figure(found.majority))
