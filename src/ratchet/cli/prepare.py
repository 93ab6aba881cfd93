"""`ratchet prepare`: the DVC stage that turns source files into tokenized rows."""

import argparse
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.stages.project import Project
from ratchet.storage.progress import report_step

if TYPE_CHECKING:
    from ratchet.storage.records.data import DatasetCard

HELP = "stage: turn source files into split, templated, tokenized rows"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no flags of its own."""


def run(arguments: argparse.Namespace) -> None:
    with report_step("loading libraries"):
        from ratchet.stages.prepare import prepare

    print_record(prepare(Project(arguments.project)), format_dataset, arguments)


def format_dataset(card: "DatasetCard") -> str:
    """Format the dataset card in a few lines."""
    lines = [
        f"{card.rows_in:,} rows in, {card.rows_out:,} out: " + ", ".join(f"{n:,} {s}" for s, n in card.splits.items())
    ]
    for name, source in card.source_cards.items():
        weight = f", weight {source.weight:g}" if source.weight != 1 else ""
        lines.append(f"  {name}: {source.rows:,} rows, read as {source.record_schema}{weight}")
    for reason, drop in card.dropped.items():
        lines.append(f"  dropped {drop.count:,}: {reason.replace('_', ' ')} ({'; '.join(drop.examples[:2])})")
    for check, rows in card.flaws.items():
        if not rows.is_dropped:
            lines.append(f"  reported {rows.count:,}: {check.replace('_', ' ')} ({'; '.join(rows.examples[:2])})")
    if near := card.near_duplicates:
        leaked = (
            f"; {near.across_splits:,} of their rows would have leaked between splits" if near.across_splits else ""
        )
        lines.append(f"  {near.clusters:,} clusters of near-duplicates at Jaccard {near.threshold:g}{leaked}")
    if semantic := card.semantic_duplicates:
        lines.append(f"  {semantic.clusters:,} clusters of the same meaning at cosine {semantic.threshold:g}")
    if pairs := card.pairs:
        lengths = f"{pairs.chosen_tokens:,.1f} tokens in the mean, rejected {pairs.rejected_tokens:,.1f}"
        lines.append(f"  the chosen answer is longer in {pairs.longer_chosen:.0%} of the pairs ({lengths})")
    answers = card.splits["train"] + card.repeated
    labelled = f"  {card.desirable_rows or 0:,} of {answers:,} training answers are labelled true"
    lines += [] if card.desirable_rows is None else [labelled]
    for name, leak in card.leaks.items():
        example = f" ({leak.examples[0]})" if leak.examples else ""
        lines.append(f"  {name}: {leak.rows:,} rows overlap with it{example}")
    lines += [f"  cut in {name}: {cut.rows:,} rows, {cut.tokens:,} tokens" for name, cut in card.truncated.items()]
    for source in card.source_cards.values():
        if origin := source.teacher_provenance:
            lines.append(f"  by {', '.join(origin.teachers)}: {origin.training_rows:,} training rows")
    if card.teacher_rows:
        lines.append(f"  from teachers: {card.teacher_rows / card.splits['train']:.1%} of the training rows")
    if balance := card.balanced:
        smallest, largest = min(balance.before.values()), max(balance.before.values())
        sizes = f"{smallest:,}" if smallest == largest else f"{smallest:,} to {largest:,}"
        new_sizes = sorted({*balance.after.values()})
        lines.append(
            f"  balanced by {balance.by}: {len(balance.before):,} categories of {sizes} training rows, now of "
            + (f"{new_sizes[0]:,}" if len(new_sizes) == 1 else f"{new_sizes[0]:,} to {new_sizes[-1]:,}")
        )
    train = card.lengths["train"]
    reason = "to balance" if card.balanced else "by weight"
    repeated = f", {card.repeated:,} rows of it again {reason}" if card.repeated else ""
    labels = f"; {len(card.labels)} labels" if card.labels else ""
    learned = "learned" if card.pairs is None else "of chosen answers, without the rejected ones"
    lines.append(
        f"  training tokens {train.total:,} ({train.trained:,} {learned}){repeated}; "
        f"a row has {train.median} in the median, {train.greatest} at most{labels}"
    )
    return "\n".join([*lines, *(f"  note: {note}" for note in card.notes)])
