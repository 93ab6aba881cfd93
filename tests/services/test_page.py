"""The dataset card as a page: complete, harmless whatever the data holds, the same bytes for the same card."""

import itertools
import random
from pathlib import Path
from xml.etree import ElementTree

from ratchet.card import (
    Cluster,
    DatasetCard,
    Drop,
    Leak,
    Lengths,
    NearDuplicates,
    SourceCard,
    Stratum,
    Truncated,
)
from ratchet.services.page import SECTIONS, dataset_page

SPLITS = ("train", "validation", "test")
HOSTILE = '<script>alert("1")</script><img src=x onerror=alert(1)> & \' \x00\x1b[31m \u202e\ud800 </style></body>'


def drawn(seed: int, rows: int, middle: float, width: int) -> Lengths:
    """Lengths as stage prepare would measure them: log-normal, in bins of `width` tokens."""
    random_ = random.Random(seed)
    lengths = sorted(8 + int(random_.lognormvariate(middle, 0.45)) for _ in range(rows))
    bins = {edge * width: len(list(group)) for edge, group in itertools.groupby(lengths, lambda n: n // width)}
    total = sum(lengths)
    return Lengths(
        least=lengths[0],
        median=lengths[rows // 2],
        p95=lengths[rows * 95 // 100],
        greatest=lengths[-1],
        total=total,
        trained=total // 5,
        histogram=bins,
    )


def strata(count: int) -> dict[str, Stratum]:
    """Labels of falling size, divided 75 / 10 / 15."""
    found = {}
    for number in range(count):
        rows = 187 - 2 * number
        test, validation = round(0.15 * rows), round(0.1 * rows)
        parts = dict(zip(SPLITS, (rows - test - validation, validation, test), strict=True))
        found[f"label_{number:03}"] = Stratum(rows=rows, splits=parts)
    return found


def label_card(labels: int = 77) -> DatasetCard:
    """A label task with something in every section."""
    by_label = strata(labels)
    splits = {name: sum(one.splits[name] for one in by_label.values()) for name in SPLITS}
    dropped = {
        "duplicate": Drop(count=431, examples=("data/raw/a.csv:19: as data/raw/a.csv:7", "data/raw/a.csv:204")),
        "near_duplicate": Drop(count=214, examples=("data/raw/a.csv:77: like data/raw/a.csv:12",)),
        "leaked": Drop(count=9, examples=("data/raw/a.csv:3: banking: what is the exchange rate that i will get",)),
        "malformed": Drop(count=3, examples=("data/raw/a.csv:9000: 5 fields instead of 2",)),
    }
    kept = sum(splits.values())
    texts = ("How do I link my new card to the app?\nlabel_001", "How do I link my new card with the app?\nlabel_001")
    return DatasetCard(
        digest="3f9a2c71d0e4" + "b" * 52,
        sources={"data/raw/a.csv": "a" * 64, "data/raw/b.csv": "c" * 64},
        base_digest="d" * 64,
        task="labels",
        rows_in=kept + 657,
        rows_out=kept,
        dropped=dropped,
        splits=splits,
        lengths={name: drawn(n, splits[name], 3.4, 5) for n, name in enumerate(SPLITS)},
        labels={name: one.splits["train"] for name, one in by_label.items()},
        source_cards={
            "data/raw/a.csv": SourceCard(files={"data/raw/a.csv": "a" * 64}, shape="columns text, label", rows=9003),
            "data/raw/b.csv": SourceCard(
                files={"data/raw/b.csv": "c" * 64}, shape="columns text, label", rows=kept + 657 - 9003, weight=1.5
            ),
        },
        repeated=812,
        template="e" * 64,
        end_of_turn="<|im_end|>",
        wanted={"train": 0.75, "validation": 0.1, "test": 0.15},
        strata=by_label,
        near_duplicates=NearDuplicates(
            threshold=0.8,
            shingle_words=3,
            clusters=187,
            across_splits=61,
            largest=(
                Cluster(
                    kept="data/raw/a.csv:12",
                    dropped=("data/raw/a.csv:77", "data/raw/b.csv:401", "data/raw/b.csv:5"),
                    size=9,
                    texts=texts,
                ),
                Cluster(kept="data/raw/a.csv:40", dropped=("data/raw/b.csv:41",), size=2, texts=(texts[0], texts[0])),
            ),
        ),
        leaks={
            "banking": Leak(documents=3080, unchecked=2711, rows=9, examples=("data/raw/a.csv:3: what is the rate",)),
            "gsm8k": Leak(documents=1319, unchecked=2, rows=0, examples=()),
        },
        truncated={"train": Truncated(rows=21, tokens=1930), "test": Truncated(rows=2, tokens=88)},
        packing={"512": 0.9931, "1024": 0.9987},
        notes=("2 labels or strata have no training row: label_a, label_b",),
    )


def text_card() -> DatasetCard:
    """A text task where nothing was dropped, found or cut."""
    return DatasetCard(
        digest="0" * 64,
        sources={"data/raw/gsm8k.jsonl": "1" * 64},
        base_digest="2" * 64,
        task="text",
        rows_in=1000,
        rows_out=1000,
        dropped={},
        splits={"train": 750, "validation": 100, "test": 150},
        lengths={name: drawn(n, 750, 5.1, 20) for n, name in enumerate(SPLITS)},
        labels={},
        wanted={"train": 0.75, "validation": 0.1, "test": 0.15},
        near_duplicates=NearDuplicates(threshold=0.8, shingle_words=3, clusters=0, across_splits=0, largest=()),
    )


def hostile_card(text: str) -> DatasetCard:
    """A card with `text` wherever a text of the data may stand, and in names."""
    card = label_card(3)
    return card.model_copy(
        update={
            "dropped": {text: Drop(count=657, examples=(text, text))},
            "labels": {text: 3},
            "strata": {text: Stratum(rows=3, splits={"train": 3})},
            "source_cards": {text: SourceCard(files={text: text}, shape=text, rows=3)},
            "leaks": {text: Leak(documents=1, unchecked=0, rows=1, examples=(text,))},
            "near_duplicates": NearDuplicates(
                threshold=0.8,
                shingle_words=3,
                clusters=1,
                across_splits=1,
                largest=(Cluster(kept=text, dropped=(text, text), size=3, texts=(text, text)),),
            ),
            "end_of_turn": text,
            "template": text,
            "notes": (text,),
        }
    )


def written(card: DatasetCard, folder: Path) -> str:
    target = folder / "card.html"
    dataset_page(card, target)
    return target.read_text(encoding="utf-8")


def parsed(page: str) -> ElementTree.Element:
    """The page as a tree: it is well-formed XML too, so nothing of the data opened or closed an element."""
    return ElementTree.fromstring(page)  # noqa: S314 - what we have just written


def heard(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).replace("\u00a0", " ").split())


def section(page: str, name: str) -> ElementTree.Element:
    found = parsed(page).find(f".//section[@id='{name}']")
    assert found is not None
    return found


def table(page: str, name: str) -> list[list[str]]:
    """Cells of the section's tables, heads left out."""
    return [[heard(cell) for cell in row] for row in section(page, name).iterfind(".//tbody/tr")]


def test_the_sections_stand_in_their_order_under_one_heading(tmp_path: Path) -> None:
    page = parsed(written(label_card(), tmp_path))
    assert [heard(h) for h in page.iterfind(".//h2")] == list(SECTIONS)
    assert list(SECTIONS) == [
        "Sources", "Where the rows went", "Lengths", "Splits", "Class balance", "Near-duplicates",
        "Leaks", "Truncation", "Packing", "Tokens per epoch", "Template", "Notes",
    ]  # fmt: skip
    assert len(list(page.iter("h1"))) == 1
    anchors = {section.get("id") for section in page.iter("section")}
    assert {link.get("href", "").removeprefix("#") for link in page.iterfind(".//nav/a")} == anchors
