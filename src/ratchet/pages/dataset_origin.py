"""Parts of the dataset card's page: which rows a teacher wrote, and what balancing did."""

from collections.abc import Sequence

from ratchet import markup
from ratchet.card import DatasetCard
from ratchet.markup import Html, bar, counted, percentage, quiet, tag

MEANING = {
    "sampled_out": "Left out by a weight below 1, as prepare.sources asks.",
    "balanced_out": "Their category has more training rows than prepare.balance takes.",
    "taught_held_out": "A teacher's answers to validation or test prompts: no truth to judge by, nor to learn.",
}
"""Of reasons for which a row is dropped, those without a limit."""

SHOWN = 40
"""Categories in the table: the largest."""


def why_again(card: DatasetCard) -> str:
    """Why some training rows come more than once."""
    return "to balance" if card.balanced else "by weight"


def taught(card: DatasetCard) -> list[Html]:
    """Who wrote the rows of sources that are answers of a teacher, and what was left out of those answers."""
    found = {name: one.taught for name, one in sorted(card.source_cards.items()) if one.taught}
    if not found:
        return []
    rows = [
        (
            tag("bdi", name),
            markup.places(one.teachers),
            f"{one.answers:,}",
            markup.places([f"{filter_.replace('_', ' ')}: {count:,}" for filter_, count in one.filters]),
            f"{one.rows:,}",
            f"{one.training_rows:,}",
        )
        for name, one in found.items()
    ]
    heads = ("source", "teacher", "answers", "left out by", "chosen", "training rows here")
    share = percentage(card.taught_rows, card.splits.get("train", 0))
    said = f"{counted(card.taught_rows, 'training row')} ({share}) are answers of a teacher; nothing is judged by them."
    return [tag("p", said), markup.table("Answers of teachers", "twnwnn", heads, rows)]


def balanced(card: DatasetCard, labels: Sequence[Html] | str) -> Sequence[Html] | str:
    """What prepare.balance did, and below it the balance of labels or strata as it is."""
    if (one := card.balanced) is None:
        return labels
    most = max(1, *one.before.values(), *one.after.values())
    names = sorted(one.before, key=lambda name: (-one.before[name], name))
    rows = [
        (
            tag("bdi", name),
            bar(("lost", one.before[name] / most)),
            f"{one.before[name]:,}",
            bar(("train", one.after[name] / most)),
            f"{one.after[name]:,}",
        )
        for name in names[:SHOWN]
    ]
    fewer = sum(count < one.rows for count in one.before.values())
    said = f"Balanced by {one.by}: {counted(one.rows, 'training row')} of each category in an epoch"
    if fewer:
        how = {"take": "come as they are", "repeat": "are repeated"}.get(one.fewer, one.fewer)
        said += f"; {fewer:,} of {len(names):,} categories have fewer, which {how}"
    heads = ("category", "", "training rows before", "", "in an epoch now")
    shown = [tag("p", f"{said}."), markup.table("Training rows by category", "tbnbn", heads, rows)]
    if len(names) > SHOWN:
        shown.append(quiet(f"{len(names) - SHOWN:,} smaller ones are not shown; the JSON card has all."))
    return [*shown, *([quiet(labels)] if isinstance(labels, str) else labels)]
