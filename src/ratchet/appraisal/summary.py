"""What a generation was worth, in a few lines behind its end; the panel says more. Reads answer by answer."""

from collections.abc import Set
from pathlib import Path

from ratchet.appraisal import answers
from ratchet.errors import InputError
from ratchet.generating import output
from ratchet.generating.spec import Card


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
        for asked in answers.asked(path, card):
            if asked.reference is not None:
                right.append(asked.right)
                references |= {asked.reference} if labels else set()
        strange = _strange(path, card, labels | references) if labels and right else 0
    except InputError as error:  # somebody changed it since it was written
        return [f"  not judged: {error}"]
    if not right:
        return []
    figure = answers.accuracy(right)
    what = "accuracy" if answers.is_labels(card, task) else "exactly the reference"
    of = f"of {figure.n:,} prompts with a reference"
    told = [f"  {what}: {figure.value:.3f} (95 %: {figure.low:.3f} to {figure.high:.3f}) {of}"]
    if labels:
        others = f", nor of the {len(references - labels):,} references beside them" if references - labels else ""
        told.append(f"  {strange:,} of {card.answers:,} answers are none of the {len(labels):,} labels{others}")
    return [*told, f"  more: ratchet report {path}"]


def _strange(path: Path, card: Card, possible: Set[str]) -> int:
    """Answers that are none of the possible ones. They are read again: which references there are is known now."""
    return sum(one.said not in possible for asked in answers.asked(path, card) for one in asked.answers)
