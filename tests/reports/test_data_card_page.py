"""Tests the page of the dataset card: complete, safe with any data, and equal bytes for equal cards."""

import itertools
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from page_reading import heard, read, section
from ratchet.reports.data_card_page import SECTIONS, write_dataset_page
from ratchet.storage.records.data import (
    DatasetCard,
    DroppedRows,
    LeakageReport,
    LengthDistribution,
    NearDuplicateCluster,
    NearDuplicateReport,
    SourceCard,
    SplitStratum,
    TruncationReport,
)

SPLITS = ("train", "validation", "test")
HOSTILE = '<script>alert("1")</script><img src=x onerror=alert(1)> & \' \x00\x1b[31m \u202e\ud800 </style></body>'


def drawn(seed: int, rows: int, middle: float, width: int) -> LengthDistribution:
    """Draw lengths as stage prepare would measure them: log-normal, in bins of `width` tokens."""
    random_ = random.Random(seed)
    lengths = sorted(8 + int(random_.lognormvariate(middle, 0.45)) for _ in range(rows))
    bins = {edge * width: len(list(group)) for edge, group in itertools.groupby(lengths, lambda n: n // width)}
    total = sum(lengths)
    return LengthDistribution(
        least=lengths[0],
        median=lengths[rows // 2],
        p95=lengths[rows * 95 // 100],
        greatest=lengths[-1],
        total=total,
        trained=total // 5,
        histogram=bins,
    )


def strata(count: int) -> dict[str, SplitStratum]:
    """Return labels with decreasing numbers of rows, split 75 / 10 / 15."""
    found = {}
    for number in range(count):
        rows = 187 - 2 * number
        test, validation = round(0.15 * rows), round(0.1 * rows)
        parts = dict(zip(SPLITS, (rows - test - validation, validation, test), strict=True))
        found[f"label_{number:03}"] = SplitStratum(rows=rows, splits=parts)
    return found


def label_card(labels: int = 77) -> DatasetCard:
    """Build the card of a label task with content in every section."""
    by_label = strata(labels)
    splits = {name: sum(one.splits[name] for one in by_label.values()) for name in SPLITS}
    dropped = {
        "duplicate": DroppedRows(count=431, examples=("data/raw/a.csv:19: as data/raw/a.csv:7", "data/raw/a.csv:204")),
        "near_duplicate": DroppedRows(count=214, examples=("data/raw/a.csv:77: like data/raw/a.csv:12",)),
        "leaked": DroppedRows(
            count=9, examples=("data/raw/a.csv:3: banking: what is the exchange rate that i will get",)
        ),
        "malformed": DroppedRows(count=3, examples=("data/raw/a.csv:9000: 5 fields instead of 2",)),
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
            "data/raw/a.csv": SourceCard(
                files={"data/raw/a.csv": "a" * 64}, record_schema="columns text, label", rows=9003
            ),
            "data/raw/b.csv": SourceCard(
                files={"data/raw/b2.csv": "f" * 64, "data/raw/b.csv": "c" * 64},
                record_schema="columns text, label",
                rows=kept + 657 - 9003,
                weight=1.5,
            ),
        },
        repeated=812,
        template="e" * 64,
        end_of_turn="<|im_end|>",
        wanted={"train": 0.75, "validation": 0.1, "test": 0.15},
        strata=by_label,
        near_duplicates=NearDuplicateReport(
            threshold=0.8,
            shingle_words=3,
            clusters=187,
            across_splits=61,
            largest=(
                NearDuplicateCluster(
                    kept="data/raw/a.csv:12",
                    dropped=("data/raw/a.csv:77", "data/raw/b.csv:401", "data/raw/b.csv:5"),
                    size=9,
                    texts=texts,
                ),
                NearDuplicateCluster(
                    kept="data/raw/a.csv:40", dropped=("data/raw/b.csv:41",), size=2, texts=(texts[0], texts[0])
                ),
            ),
        ),
        leaks={
            "banking": LeakageReport(
                documents=3080, unchecked=2711, rows=9, examples=("data/raw/a.csv:3: what is the rate",)
            ),
            "gsm8k": LeakageReport(documents=1319, unchecked=2, rows=0, examples=()),
        },
        truncated={"train": TruncationReport(rows=21, tokens=1930), "test": TruncationReport(rows=2, tokens=88)},
        packing={"512": 0.9931, "1024": 0.9987},
        notes=("2 labels or strata have no training row: label_a, label_b",),
    )


def text_card() -> DatasetCard:
    """Build the card of a text task in which nothing was dropped, found or cut."""
    splits = {"train": 750, "validation": 100, "test": 150}
    return DatasetCard(
        digest="0" * 64,
        sources={"data/raw/gsm8k.jsonl": "1" * 64},
        base_digest="2" * 64,
        task="text",
        rows_in=1000,
        rows_out=1000,
        dropped={},
        splits=splits,
        lengths={name: drawn(n, rows, 5.1, 20) for n, (name, rows) in enumerate(splits.items())},
        labels={},
        wanted={"train": 0.75, "validation": 0.1, "test": 0.15},
        near_duplicates=NearDuplicateReport(threshold=0.8, shingle_words=3, clusters=0, across_splits=0, largest=()),
    )


def hostile_card(text: str) -> DatasetCard:
    """Build a card with `text` in all fields that may hold text of the data, and in names."""
    card = label_card(3)
    return card.model_copy(
        update={
            "dropped": {text: DroppedRows(count=657, examples=(text, text))},
            "labels": {text: 3},
            "strata": {text: SplitStratum(rows=3, splits={"train": 3})},
            "source_cards": {text: SourceCard(files={text: text}, record_schema=text, rows=3)},
            "leaks": {text: LeakageReport(documents=1, unchecked=0, rows=1, examples=(text,))},
            "near_duplicates": NearDuplicateReport(
                threshold=0.8,
                shingle_words=3,
                clusters=1,
                across_splits=1,
                largest=(NearDuplicateCluster(kept=text, dropped=(text, text), size=3, texts=(text, text)),),
            ),
            "end_of_turn": text,
            "template": text,
            "notes": (text,),
        }
    )


def written(card: DatasetCard, folder: Path) -> str:
    target = folder / "card.html"
    write_dataset_page(card, target)
    return target.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(label_card(), tmp_path_factory.mktemp("card"))


def table(page: str, name: str) -> list[list[str]]:
    """Return the cells of the section's tables, without headers."""
    return [[heard(cell) for cell in row] for row in section(page, name).iterfind(".//tbody/tr")]


def test_head_and_sections_are_complete_and_accessible(page: str) -> None:
    card, tree = label_card(), read(page)
    assert [heard(h) for h in tree.iterfind(".//h2")] == list(SECTIONS)
    assert list(SECTIONS) == [
        "Sources", "Row flow", "Text quality", "Lengths", "Splits", "Class balance", "Near-duplicates",
        "Leaks", "Truncation", "Packing", "Tokens per epoch", "Template", "Notes",
    ]  # fmt: skip
    anchors = {section.get("id") for section in tree.iter("section")}
    assert {link.get("href", "").removeprefix("#") for link in tree.iterfind(".//nav/a")} == anchors
    [title] = tree.iter("h1")
    assert heard(title) == f"9,204 rows in, 8,547 out{card.lengths['train'].total:,} tokens per epoch"
    assert heard(next(tree.iter("title"))) == "Dataset card 3f9a2c71d0e4"
    figures = {heard(one[0]): heard(one[1]) for one in tree.iterfind(".//header/dl/div")}
    assert figures["Rows kept"] == "92.9 %657 dropped"
    assert figures["Labels"] == "77of 26 to 140 training rows"
    assert figures["Leaks"] == "9overlaps with 2 evaluation sets"
    assert tree.get("lang") == "en-GB"
    assert all(svg.get("aria-label") and svg.find("title") is not None for svg in tree.iter("svg"))
    assert all(bar.get("aria-hidden") for bar in tree.iterfind(".//td/span[@class='bar']"))
    scrolled = [div for div in tree.iter("div") if div.get("class") == "scroll"]
    assert len(scrolled) == len(list(tree.iter("table")))
    assert all(div.get("role") == "region" and div.get("aria-label") and div.get("tabindex") for div in scrolled)
    assert all(th.get("scope") in ("col", "row") for th in tree.iter("th"))


def test_every_dropped_row_is_accounted_for_in_order_of_count(page: str, tmp_path: Path) -> None:
    assert "9,204 in = 8,547 out + 657 dropped" in page
    rows = table(page, "row-flow")
    assert [row[2:4] for row in rows] == [["431", "4.7 %"], ["214", "2.3 %"], ["9", "0.1 %"], ["3", "< 0.1 %"]]
    assert rows[0][0] == "duplicateExact duplicates."
    assert "data/raw/a.csv:19: as data/raw/a.csv:7" in rows[0][4]
    bars = section(page, "row-flow").iterfind(".//td/span")
    widths = [[float(re.findall(r"[\d.]+", part.get("style", ""))[0]) for part in bar] for bar in bars]
    ends = [sum(parts) for parts in widths]
    assert [parts[0] for parts in widths[1:]] == pytest.approx(ends[:-1], abs=0.01)
    assert ends[-1] == pytest.approx(100, abs=0.01)
    unequal = written(label_card().model_copy(update={"rows_in": 10_000}), tmp_path)
    assert "10,000 in ≠ 8,547 out + 657 dropped" in unequal


def test_histograms_are_on_one_scale_and_their_areas_are_the_shares_of_rows(tmp_path: Path) -> None:
    one = LengthDistribution(
        least=0, median=12, p95=28, greatest=29, total=900, trained=90, histogram={0: 10, 10: 30, 20: 10}
    )
    two = one.model_copy(update={"histogram": {10: 5, 20: 5}})
    card = text_card().model_copy(update={"lengths": {"train": one, "test": two}})
    pictures = list(section(written(card, tmp_path), "lengths").iter("svg"))
    assert [p.get("role") for p in pictures] == ["img", "img"]
    assert pictures[0].get("aria-label") == "Lengths of train rows: 0 to 29 tokens, median 12, 95th percentile 28"
    bars = [[(r.get("x"), r.get("width"), float(r.get("height", 0))) for r in p.iter("rect")] for p in pictures]
    assert [x for x, _, _ in bars[0]] == ["0.000%", "33.333%", "66.667%"]
    assert {width for _, width, _ in bars[0]} == {"33.333%"}
    full = max(height for _, _, height in bars[0])
    assert [height / full for _, _, height in bars[0]] == pytest.approx([1 / 3, 1, 1 / 3], abs=0.01)
    assert [height / full for _, _, height in bars[1]] == pytest.approx([0.5 / 0.6, 0.5 / 0.6], abs=0.01)
    assert [heard(text) for text in pictures[0].iter("text")][-2:] == ["median 12", "95 % ≤ 28"]


def test_splits_show_what_was_wanted_and_a_split_of_its_own_has_no_fraction(tmp_path: Path) -> None:
    card = text_card()
    rows = table(written(card, tmp_path), "splits")
    assert [[row[0], *row[2:]] for row in rows] == [
        ["train", "750", "75.0 %", "75.0 %"],
        ["validation", "100", "10.0 %", "10.0 %"],
        ["test", "150", "15.0 %", "15.0 %"],
    ]
    own = SourceCard(files={"test.csv": "a" * 64}, record_schema="columns a, b", split="test", rows=150)
    wanted = {"train": 0.9, "validation": 0.1, "test": 0.0}
    card = card.model_copy(update={"source_cards": {"test.csv": own}, "wanted": wanted})
    rows = table(written(card, tmp_path), "splits")
    assert [row[3:] for row in rows] == [["88.2 %", "90.0 %"], ["11.8 %", "10.0 %"], ["–", "own source"]]  # noqa: RUF001


@pytest.mark.parametrize(("labels", "shown"), [(5, 5), (40, 40), (41, 40), (77, 40)])
def test_many_labels_are_shown_from_both_ends(labels: int, shown: int, tmp_path: Path) -> None:
    page = written(label_card(labels), tmp_path)
    rows = table(page, "class-balance")
    assert len(rows) == shown
    assert (rows[0][0], rows[-1][0]) == ("label_000", f"label_{labels - 1:03}")
    assert [row[0] for row in rows] == sorted({row[0] for row in rows})
    assert ("between them are omitted" in page) == (labels > shown)
    assert rows[0][2:] == ["187", "140", "19", "28"]


def test_class_balance_names_what_is_missing_and_what_is_furthest(tmp_path: Path) -> None:
    found = {
        "even": SplitStratum(rows=100, splits={"train": 75, "validation": 10, "test": 15}),
        "skewed": SplitStratum(rows=50, splits={"train": 45, "validation": 5, "test": 0}),
    }
    said = heard(section(written(label_card(2).model_copy(update={"strata": found}), tmp_path), "class-balance"))
    assert "The largest stratum has 100 rows (even), the smallest 50 (skewed), 2.0 to 1." in said
    assert "1 of 2 have no test row, for example skewed." in said
    shares = (
        "skewed has 45 in train; the target of 75.0 % is 37.5",
        "skewed has 0 in test; the target of 15.0 % is 7.5",
    )
    assert any(share in said for share in shares)


def test_near_duplicates_are_shown_with_their_differences_marked(page: str) -> None:
    found = section(page, "near-duplicates")
    assert "61 dropped rows would have leaked" in heard(found)
    first, second = found.iter("article")
    assert [heard(box) for box in first.iterfind("./div/div/small")] == [
        "kept: data/raw/a.csv:12",
        "dropped: data/raw/a.csv:77",
    ]
    assert [mark.text for mark in first.iter("mark")] == ["to", "with"]
    assert "Also dropped: data/raw/b.csv:401, data/raw/b.csv:5 and 5 more" in heard(first)
    assert "They differ only after the visible part." in heard(second)


def test_leaks_truncation_packing_tokens_and_template(page: str, tmp_path: Path) -> None:
    card = label_card()
    assert table(page, "leaks") == [
        ["banking", "3,080", "2,711", "9", "data/raw/a.csv:3: what is the rate"],
        ["gsm8k", "1,319", "2", "0", "–"],  # noqa: RUF001
    ]
    few = card.lengths["train"].model_copy(update={"total": 5790})
    cut = table(written(card.model_copy(update={"lengths": {"train": few}}), tmp_path), "truncation")
    assert cut == [["train", "21", "0.3 %", "1,930", "25.0 %"], ["test", "2", "0.2 %", "88", "100.0 %"]]
    assert [row[::2] for row in table(page, "packing")] == [["512 tokens", "99.3 %"], ["1,024 tokens", "99.9 %"]]
    assert [row[2] for row in table(page, "tokens-per-epoch")] == [f"{card.lengths[s].total:,}" for s in SPLITS]
    assert "812 rows repeated by weight are included in these sums" in heard(section(page, "tokens-per-epoch"))
    template = heard(section(page, "template"))
    assert all(value in template for value in ("<|im_end|>", card.template, card.base_digest, card.digest))
    assert card.notes[0] in heard(section(page, "notes"))


def test_sections_without_content_say_so_in_a_line(tmp_path: Path) -> None:
    page = written(text_card(), tmp_path)
    for name, said in {
        "row-flow": "No row was dropped.",
        "class-balance": "The data has no labels, and the splits are not stratified.",
        "near-duplicates": "No near-duplicates were found at Jaccard ≥ 0.8, shingles of 3 words.",
        "leaks": "No evaluation set is configured, so none was checked.",
        "truncation": "No conversation was truncated.",
        "packing": "The fill rate was not measured: the longest row exceeds every usual pack size.",
        "notes": "There are no notes.",
    }.items():
        assert heard(section(page, name)[-1]) == said
    unsearched = written(text_card().model_copy(update={"near_duplicates": None}), tmp_path)
    assert "were not searched" in heard(section(unsearched, "near-duplicates"))
    nothing = {"rows_in": 0, "rows_out": 0, "splits": {}, "lengths": {}, "wanted": {}, "sources": {}}
    empty = read(written(text_card().model_copy(update=nothing), tmp_path))
    assert len(list(empty.iter("section"))) == len(SECTIONS)
    assert "0 rows in, 0 out" in heard(empty)


def test_files_of_a_glob_are_folded_and_bounded(tmp_path: Path) -> None:
    many = {f"data/raw/shard-{n:04}.jsonl": f"{n:064x}" for n in range(1000)}
    card = text_card().model_copy(
        update={"source_cards": {"*.jsonl": SourceCard(files=many, record_schema="messages")}}
    )
    found = section(written(card, tmp_path), "sources")
    assert heard(next(found.iter("summary"))) == "1,000 files"
    assert "and 960 more" in heard(found)
    assert len(list(found.iter("li"))) == 41


ELSEWHERE = re.compile(
    r"""(?:src|srcset|href|action|data|poster)\s*=\s*["'](?!#)|url\(|@import|https?:|<script|<link|<iframe"""
)


@pytest.mark.parametrize("labels", [2, 77, 500])
def test_the_page_is_one_file_that_loads_nothing_and_is_small(labels: int, tmp_path: Path) -> None:
    card = label_card(77).model_copy(update={"strata": strata(90), "labels": {f"label {n}": n for n in range(labels)}})
    page = written(card, tmp_path)
    assert ELSEWHERE.findall(page) == []
    assert "default-src 'none'" in page.replace("&#x27;", "'")
    assert "prefers-color-scheme: dark" in page
    assert len(page.encode()) < 200_000
    assert [path.name for path in tmp_path.iterdir()] == ["card.html"]


def shuffled(value: object, seed: int) -> object:
    """Return the same value with the keys of its dicts in another order."""
    if isinstance(value, dict):
        keys = list(value)
        random.Random(seed).shuffle(keys)
        return {key: shuffled(value[key], seed) for key in keys}
    return value


@pytest.mark.parametrize("seed", range(5))
def test_equal_cards_give_equal_bytes(seed: int, tmp_path: Path) -> None:
    card = label_card()
    again = DatasetCard.model_validate(shuffled(card.model_dump(), seed))
    assert again == card
    card.save(tmp_path / "card.json")
    pages = {written(one, tmp_path) for one in (card, again, DatasetCard.load(tmp_path / "card.json"))}
    assert len(pages) == 1


def test_texts_of_the_data_stay_texts(tmp_path: Path) -> None:
    page = written(hostile_card(HOSTILE), tmp_path)
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("</style>") == page.count("</body>") == 1
    shown = HOSTILE.replace("\x00", "\\u0000").replace("\x1b", "\\u001b").replace("\u202e", "\\u202e")
    shown = shown.replace("\ud800", "\\ud800").strip()
    for name in ("sources", "row-flow", "class-balance", "near-duplicates", "leaks", "template", "notes"):
        assert shown in heard(section(page, name)), name


@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(st.characters(), max_size=40))
def test_no_text_changes_the_page_around_it(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    tags = [element.tag for element in read(written(hostile_card("plain"), folder)).iter()]
    assert [element.tag for element in read(written(hostile_card(text), folder)).iter()] == tags
