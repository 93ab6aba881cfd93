"""Tests prepare.balance: equal numbers of training rows, independent of other rows."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fake_generations as made
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.base import Base
from ratchet.config.prepare import BalanceSettings, Prepare
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.data.conversation import Conversation, SourceRow
from ratchet.data.ingest import CategoryBalancer
from ratchet.data.row_table import RowTable
from ratchet.errors import DataError, SettingsError
from ratchet.stages import base
from ratchet.stages.prepare import prepare
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard

AREAS = {"a": 90, "b": 40, "c": 25}


def rows(areas: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {n} about {area}", "response": f"answer {area.upper()}", "area": area}
        for area, count in areas.items()
        for n in range(count)
    ]


MakeProject = Callable[..., ProjectLayout]


@pytest.fixture
def project(model: Path, tmp_path: Path) -> MakeProject:
    def make(found: list[dict[str, Any]], **knobs: Any) -> ProjectLayout:
        knobs = {
            "sources": ["data/raw/rows.jsonl"],
            "deduplication": {"jaccard_threshold": None},
            "max_tokens": 512,
            **knobs,
        }
        chosen = Settings(base=Base(source=str(model)), prepare=Prepare.model_validate(knobs))
        layout = made.project(tmp_path / "project", chosen)
        layout.tasks.mkdir(exist_ok=True)
        made.write_lines(layout.raw / "rows.jsonl", found)
        if not layout.base_card.exists():
            base.base(Project.from_parts(layout, chosen))
        return layout

    return make


def train_rows(layout: ProjectLayout) -> Counter[str]:
    """Count the training rows of each prompt."""
    return Counter(
        Conversation.from_json(text).prompt for text in token_files.open_split(layout.data, "train")["conversation"]
    )


def run(layout: ProjectLayout) -> tuple[DatasetCard, Counter[str]]:
    prepare(Project.from_parts(layout, params_file.load(layout.params)))
    return DatasetCard.load(layout.dataset_card), train_rows(layout)


def by_area(found: Counter[str]) -> dict[str, int]:
    return dict(sum((Counter({prompt[-1]: times}) for prompt, times in found.items()), Counter()))


def test_smallest_balances_and_the_card_has_counts_before_and_after(project: MakeProject) -> None:
    plain, everything = run(project(rows(AREAS)))
    card, found = run(project(rows(AREAS), balance={"by": "area"}))
    before = by_area(everything)
    least = min(before.values())
    assert by_area(found) == dict.fromkeys("abc", least)
    assert found.keys() < everything.keys()
    assert card.balanced.before == before
    assert card.balanced.after == dict.fromkeys("abc", least)
    assert card.dropped["balanced_out"].count == plain.splits["train"] - 3 * least
    assert card.rows_in == card.rows_out + sum(drop.count for drop in card.dropped.values())
    assert {**card.splits, "train": plain.splits["train"]} == plain.splits
    assert plain.balanced is None
    assert card.digest != plain.digest


def test_page_and_terminal_report_the_balance(project: MakeProject, capsys: pytest.CaptureFixture[str]) -> None:
    layout = project(rows(AREAS), balance={"by": "area", "rows": 30, "on_shortage": "repeat"})
    assert main(["--project", str(layout.root), "prepare"]) == 0
    said = capsys.readouterr().out
    assert "balanced by area: 3 categories of " in said
    assert "training rows, now of 30" in said
    assert " rows of it again to balance" in said
    page = layout.dataset_page.read_text(encoding="utf-8")
    assert "Balanced by area: 30 training rows of each category per epoch; 1 of 3 categories have fewer" in page


def test_a_row_number_takes_or_repeats_rows(project: MakeProject) -> None:
    _, everything = run(project(rows(AREAS)))
    before = by_area(everything)
    wanted = before["b"] + 5
    _, found = run(project(rows(AREAS), balance={"by": "area", "rows": wanted}))
    assert by_area(found) == {**before, "a": wanted}
    card, found = run(project(rows(AREAS), balance={"by": "area", "rows": wanted, "on_shortage": "repeat"}))
    assert by_area(found) == dict.fromkeys("abc", wanted)
    assert {times for prompt, times in found.items() if prompt[-1] == "b"} == {1, 2}
    assert found.keys() >= {prompt for prompt in everything if prompt[-1] != "a"}
    assert card.repeated == 2 * wanted - before["b"] - before["c"]


def test_labels_are_categories_in_a_label_task(project: MakeProject) -> None:
    card, _ = run(project(rows(AREAS), balance={"by": "label"}, task="labels"))
    assert set(card.labels) == {"answer A", "answer B", "answer C"}
    assert len(set(card.labels.values())) == 1


def test_the_sample_does_not_depend_on_the_file_order(project: MakeProject) -> None:
    balance = {"by": "area", "rows": 20}
    shuffled = rows(AREAS)
    random.Random(1).shuffle(shuffled)
    _, before = run(project(rows(AREAS), balance=balance))
    _, after = run(project(shuffled, balance=balance))
    assert after == before


@pytest.mark.parametrize(
    ("found", "balance", "said"),
    [
        (rows(AREAS), {"by": "aera"}, "prepare.balance.by: no record has a field 'aera'; did you mean 'area'?"),
        (rows(AREAS), {"by": "label"}, "label selects the response only if prepare.task is labels"),
        ([{**row, "area": [1]} for row in rows(AREAS)], {"by": "area"}, "is a list, expected text"),
        ([{**row, "area": None} for row in rows(AREAS)], {"by": "area"}, "no field 'area' (prepare.balance.by)"),
    ],
)
def test_an_invalid_category_field_is_refused(
    found: list[dict[str, Any]], balance: dict[str, Any], said: str, project: MakeProject,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert said in made.refused(project(found, balance=balance), capsys)


def test_a_field_with_too_many_values_is_refused(
    project: MakeProject, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.data.ingest.MAX_CATEGORIES", 2)
    said = made.refused(project(rows(AREAS), balance={"by": "area"}), capsys)
    assert "'area' has 3 different values; expected at most 2 categories" in said


@pytest.mark.parametrize("found", ["0", "-3", "true", "1.5", "least", "[1]"])
def test_an_invalid_number_of_rows_is_refused(found: str) -> None:
    with pytest.raises(SettingsError, match=r"balance\.rows: found .* expected an integer >= 1, or smallest") as raised:
        params_file.parse(f"prepare:\n  balance:\n    by: area\n    rows: {found}\n")
    assert len(str(raised.value).splitlines()) == 1


def test_the_card_notes_useless_balancing(project: MakeProject) -> None:
    def notes(**balance: Any) -> str:
        card, _ = run(project([{**row, "own": n} for n, row in enumerate(rows(AREAS))], balance=balance))
        return "\n".join(card.notes)

    said = notes(by="area", rows=500)
    assert "balancing has no effect: no category has more than 500 training rows (prepare.balance.rows)" in said
    said = notes(by="own")
    assert "categories of 'own' (prepare.balance.by) have only one training row" in said
    assert "balancing has no effect" not in said
    assert "balance" not in notes(by="area", rows=500, on_shortage="repeat")
    assert "balance" not in notes(by="area")


def test_weights_and_balance_exclude_each_other() -> None:
    text = "prepare:\n  sources:\n    - {files: data/raw/a.csv, weight: 2}\n  balance:\n    by: area\n"
    with pytest.raises(SettingsError, match=r"prepare.balance: by area and the weight of source data/raw/a.csv"):
        params_file.parse(text)


ROWS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2**64 - 1)), min_size=1, max_size=60, unique=True)
HOW = st.fixed_dictionaries(
    {"rows": st.just("smallest") | st.integers(1, 12), "on_shortage": st.sampled_from(["take", "repeat"])}
)


def copies(found: list[tuple[str, int]], **balance: Any) -> dict[tuple[str, int], int]:
    balancer = CategoryBalancer(BalanceSettings.model_validate({"by": "area", **balance}), False)
    values = RowTable(None, np.dtype([("id", "u8"), ("category", "i4")]))
    for area, number in found:
        row = SourceRow("x:1", Conversation([]), fields={"area": area})
        assert balancer.find_problem(row) is None
        values.add(id=number, category=balancer.add(row))
    times, card = balancer.count_copies(np.ones(len(found), dtype=np.bool_), values)
    assert sum(card.after.values()) == times.sum()
    return dict(zip(found, times.tolist(), strict=True))


@given(ROWS, HOW, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_sample_is_uniform_and_independent_of_row_order(
    found: list[tuple[str, int]], how: dict[str, Any], shuffle: random.Random
) -> None:
    times = copies(found, **how)
    sizes = Counter(area for area, _ in found)
    wanted = min(sizes.values()) if how["rows"] == "smallest" else how["rows"]
    for area, size in sizes.items():
        own = [count for (name, _), count in times.items() if name == area]
        assert sum(own) == (wanted if how["on_shortage"] == "repeat" else min(size, wanted))
        assert max(own) - min(own) <= 1
    other = list(found)
    shuffle.shuffle(other)
    assert copies(other, **how) == times


@given(ROWS, st.integers(1, 12), st.tuples(st.just("a"), st.integers(0, 2**64 - 1)))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_an_added_row_replaces_at_most_one_row(
    found: list[tuple[str, int]], wanted: int, more: tuple[str, int]
) -> None:
    if more in found:
        return
    before, after = (
        {row for row, times in copies(one, rows=wanted).items() if times} for one in (found, [*found, more])
    )
    assert len(before - after) <= 1
    assert after - before <= {more}


def test_categories_with_fewer_rows_can_be_refused() -> None:
    with pytest.raises(DataError, match=r"2 categories have fewer training rows: b \(1\), c \(1\)"):
        copies([(area, number) for number, area in enumerate("aabc")], rows=2, on_shortage="refuse")
