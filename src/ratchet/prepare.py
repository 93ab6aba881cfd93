"""Source files → validated, split, templated and tokenised data, with a card that accounts for every row."""

import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from ratchet import digest, files, records
from ratchet.card import DatasetCard, Drop, Lengths
from ratchet.config import Settings
from ratchet.config_data import Prepare
from ratchet.data import sources, splits, template, tokens
from ratchet.data.splits import SPLITS, SplitName
from ratchet.data.tokens import Sample
from ratchet.errors import DataError
from ratchet.layout import Layout
from ratchet.model import source
from ratchet.records import BaseCard

EXAMPLES = 5
"""Places named on the card for each reason of dropping."""

LABEL_LIMIT = 500
"""More different responses than this are free text, not labels."""


@dataclass
class _Ledger:
    """Every row is either in a split or under a reason."""

    rows_in: int = 0
    kept: dict[SplitName, list[Sample]] = field(default_factory=lambda: {name: [] for name in SPLITS})
    dropped: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def rows_out(self) -> int:
        return sum(map(len, self.kept.values()))


def prepare(layout: Layout, settings: Settings) -> str:
    """Run the stage.

    Raises:
        DataError: a source that cannot be read, or splits that would be empty.
        BaseModelError: the pinned base model is not there any more.
    """
    base = BaseCard.load(layout.base_card)
    tokenizer = source.load_tokenizer(source.locate(layout, base))
    ledger = _Ledger()
    _sort_rows(layout.root, settings.prepare, tokenizer, ledger)
    _check_splits(settings.prepare, ledger)
    card = _card(layout.root, settings.prepare, base.digest, ledger)
    with files.sealed_directory(layout.data, "data") as scratch:
        for name, samples in ledger.kept.items():
            tokens.write(samples, scratch / name)
        _write_documents(ledger.kept["test"], scratch / "test.jsonl")
        card.save(scratch / layout.dataset_card.name)
    return describe(card)


def _sort_rows(root: Path, settings: Prepare, tokenizer: template.ChatTokenizer, ledger: _Ledger) -> None:
    seen: set[str] = set()
    for row in sources.rows(root, settings):
        ledger.rows_in += 1
        key = digest.of_json([row.system, splits.normalised(row.prompt), splits.normalised(row.response)])
        if not row.prompt:
            ledger.dropped["empty prompt"].append(row.where)
        elif not row.response:
            ledger.dropped["empty response"].append(row.where)
        elif key in seen:
            ledger.dropped["duplicate"].append(row.where)
        else:
            seen.add(key)
            conversation = template.messages(row)
            encoded = template.encode(tokenizer, conversation, row.where)
            if len(encoded.input_ids) > settings.max_tokens:
                ledger.dropped["too long"].append(row.where)
            else:
                sample = Sample(tokens.sample_id(conversation), conversation, encoded)
                ledger.kept[splits.split_of(row.prompt, settings.split)].append(sample)
    for samples in ledger.kept.values():
        samples.sort(key=lambda sample: sample.id)  # the order of files and lines does not matter


def _check_splits(settings: Prepare, ledger: _Ledger) -> None:
    sizes = {name: len(samples) for name, samples in ledger.kept.items()}
    if empty := [name for name, size in sizes.items() if not size]:
        shown = ", ".join(f"{size} {name}" for name, size in sizes.items())
        reasons = "".join(f"; dropped {len(places)}: {reason}" for reason, places in ledger.dropped.items())
        raise DataError(
            f"prepare.split: {ledger.rows_in} rows give {shown} rows, and {empty[0]} needs at least one{reasons}: "
            "add rows, or raise its fraction" + (", or raise prepare.max_tokens" if ledger.dropped["too long"] else "")
        )
    responses = {sample.response for sample in ledger.kept["train"]}
    if settings.task == "labels" and len(responses) > LABEL_LIMIT:
        raise DataError(
            f"prepare.task: labels, but {len(responses)} different responses (more than {LABEL_LIMIT}); "
            "set prepare.task: text, or check prepare.columns.response"
        )


def _card(root: Path, settings: Prepare, base_digest: str, ledger: _Ledger) -> DatasetCard:
    labels = Counter(sample.response for sample in ledger.kept["train"]) if settings.task == "labels" else {}
    return DatasetCard(
        digest=tokens.content_digest(ledger.kept),
        sources={name: digest.of_file(path) for name, path in sources.paths(root, settings).items()},
        base_digest=base_digest,
        task=settings.task,
        rows_in=ledger.rows_in,
        rows_out=ledger.rows_out,
        dropped={
            reason: Drop(count=len(places), examples=tuple(places[:EXAMPLES]))
            for reason, places in sorted(ledger.dropped.items())
            if places
        },
        splits={name: len(samples) for name, samples in ledger.kept.items()},
        lengths={name: _lengths(samples) for name, samples in ledger.kept.items()},
        labels=dict(sorted(labels.items())),
    )


def _lengths(samples: list[Sample]) -> Lengths:
    lengths = sorted(len(sample.encoded.input_ids) for sample in samples)
    return Lengths(
        least=lengths[0],
        median=round(statistics.median(lengths)),
        p95=lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))],
        greatest=lengths[-1],
        total=sum(lengths),
        trained=sum(sample.encoded.trained for sample in samples),
    )


def _write_documents(samples: list[Sample], path: Path) -> None:
    """Test rows as plain documents, for harness tasks of the project."""
    rows = []
    for sample in samples:
        by_role = {message["role"]: message["content"] for message in sample.messages}
        rows.append(
            {
                "id": sample.id,
                "system": by_role.get("system", ""),
                "prompt": by_role["user"],
                "response": sample.response,
            }
        )
    records.write_lines(path, rows)


def describe(card: DatasetCard) -> str:
    """The card in a few lines, for the terminal."""
    lines = [f"{card.rows_in} rows in, {card.rows_out} out: " + ", ".join(f"{n} {s}" for s, n in card.splits.items())]
    lines += [f"  dropped {d.count}: {reason} ({', '.join(d.examples[:3])})" for reason, d in card.dropped.items()]
    train = card.lengths["train"]
    lines.append(
        f"  training tokens {train.total:,} ({train.trained:,} learned); a row has {train.median} in the median, "
        f"{train.greatest} at most" + (f"; {len(card.labels)} labels" if card.labels else "")
    )
    return "\n".join(lines)
