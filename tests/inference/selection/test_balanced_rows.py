"""prepare.balance: as many training rows of each category, the same ones whatever else there is."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import made_generations as made
from ratchet.cli import command_line
from ratchet.config import params_file
from ratchet.config.data import BalanceSettings, Prepare
from ratchet.config.schema import Base, Settings
from ratchet.data import token_files
from ratchet.data.balance import CategoryBalancer
from ratchet.data.conversation import Conversation, SourceRow
from ratchet.errors import DataError, SettingsError
from ratchet.stages import base
from ratchet.stages.prepare import prepare
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard

AREAS = {"a": 90, "b": 40, "c": 25}


def rows(areas: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {"prompt": f"question {n} about {area}", "response": f"answer {area.upper()}", "area": area}
        for area, count in areas.items()
        for n in range(count)
    ]


Project = Callable[..., ProjectLayout]


@pytest.fixture
def project(model: Path, tmp_path: Path) -> Project:
    def make(found: list[dict[str, Any]], **knobs: Any) -> ProjectLayout:
        knobs = {"sources": ["data/raw/rows.jsonl"], "duplicates": {"near": None}, "max_tokens": 512, **knobs}
        chosen = Settings(base=Base(source=str(model)), prepare=Prepare.model_validate(knobs))
        layout = made.project(tmp_path / "project", chosen)
        layout.tasks.mkdir(exist_ok=True)
        made.write_lines(layout.raw / "rows.jsonl", found)
        if not layout.base_card.exists():
            base.base(layout, chosen, lambda _: None)
        return layout

    return make


def train_rows(layout: ProjectLayout) -> Counter[str]:
    """Prompts of training rows, as often as each comes."""
    return Counter(
        Conversation.from_json(text).prompt for text in token_files.open_split(layout.data, "train")["conversation"]
    )


def run(layout: ProjectLayout) -> tuple[DatasetCard, Counter[str]]:
    prepare(layout, params_file.load(layout.params))
    return DatasetCard.load(layout.dataset_card), train_rows(layout)


def by_area(found: Counter[str]) -> dict[str, int]:
    return dict(sum((Counter({prompt[-1]: times}) for prompt, times in found.items()), Counter()))


def test_as_many_of_each_as_the_smallest_has_and_the_card_says_before_and_after(project: Project) -> None:
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


def test_the_page_and_the_terminal_tell_of_it(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    layout = project(rows(AREAS), balance={"by": "area", "rows": 30, "fewer": "repeat"})
    assert command_line.main(["--project", str(layout.root), "prepare"]) == 0
    said = capsys.readouterr().out
    assert "balanced by area: 3 categories of " in said
    assert "training rows, now of 30" in said
    assert " rows of it again to balance" in said
    page = layout.dataset_page.read_text(encoding="utf-8")
    assert "Balanced by area: 30 training rows of each category in an epoch; 1 of 3 categories have fewer" in page


def test_a_number_takes_what_there_is_or_repeats(project: Project) -> None:
    _, everything = run(project(rows(AREAS)))
    before = by_area(everything)
    wanted = before["b"] + 5
    _, found = run(project(rows(AREAS), balance={"by": "area", "rows": wanted}))
    assert by_area(found) == {**before, "a": wanted}
    card, found = run(project(rows(AREAS), balance={"by": "area", "rows": wanted, "fewer": "repeat"}))
    assert by_area(found) == dict.fromkeys("abc", wanted)
    assert {times for prompt, times in found.items() if prompt[-1] == "b"} == {1, 2}
    assert found.keys() >= {prompt for prompt in everything if prompt[-1] != "a"}
    assert card.repeated == 2 * wanted - before["b"] - before["c"]


def test_labels_are_categories_in_a_label_task(project: Project) -> None:
    card, _ = run(project(rows(AREAS), balance={"by": "label"}, task="labels"))
    assert set(card.labels) == {"answer A", "answer B", "answer C"}
    assert len(set(card.labels.values())) == 1


def test_the_choice_depends_on_the_seed_and_not_on_the_order_of_the_file(project: Project) -> None:
    balance = {"by": "area", "rows": 20}
    shuffled = rows(AREAS)
    random.Random(1).shuffle(shuffled)
    _, before = run(project(rows(AREAS), balance=balance))
    _, after = run(project(shuffled, balance=balance))
    _, other = run(project(rows(AREAS), balance={**balance, "seed": 1}))
    assert after == before != other


@pytest.mark.parametrize(
    ("found", "balance", "said"),
    [
        (rows(AREAS), {"by": "aera"}, "prepare.balance.by: no record has a field 'aera'; did you mean 'area'?"),
        (rows(AREAS), {"by": "label"}, "the response is meant by label where prepare.task is labels, and it is text"),
        ([{**row, "area": [1]} for row in rows(AREAS)], {"by": "area"}, "is a list, expected text"),
        ([{**row, "area": None} for row in rows(AREAS)], {"by": "area"}, "no field 'area' (prepare.balance.by)"),
    ],
)
def test_what_is_no_category_is_refused(
    found: list[dict[str, Any]], balance: dict[str, Any], said: str, project: Project,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert said in made.refused(project(found, balance=balance), capsys)


def test_a_field_of_thousands_of_values_is_no_category(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.data.balance.MOST", 2)
    said = made.refused(project(rows(AREAS), balance={"by": "area"}), capsys)
    assert "'area' has 3 different values, and no more than 2 are categories" in said


@pytest.mark.parametrize("found", ["0", "-3", "true", "1.5", "least", "[1]"])
def test_a_number_of_rows_that_is_none_is_refused_in_one_line(found: str) -> None:
    with pytest.raises(SettingsError, match=r"balance\.rows: found .* write one from 1, or smallest") as raised:
        params_file.parse(f"prepare:\n  balance:\n    by: area\n    rows: {found}\n")
    assert len(str(raised.value).splitlines()) == 1


def test_the_card_notes_where_nothing_is_balanced_and_where_a_field_is_no_category(project: Project) -> None:
    def notes(**balance: Any) -> str:
        card, _ = run(project([{**row, "own": n} for n, row in enumerate(rows(AREAS))], balance=balance))
        return "\n".join(card.notes)

    said = notes(by="area", rows=500)
    assert "nothing is balanced: no category has more than 500 training rows (prepare.balance.rows)" in said
    said = notes(by="own")
    assert "categories of 'own' (prepare.balance.by) have one training row only" in said
    assert "nothing is balanced" not in said
    assert "balance" not in notes(by="area", rows=500, fewer="repeat")
    assert "balance" not in notes(by="area")


def test_weights_and_balance_exclude_each_other() -> None:
    text = "prepare:\n  sources:\n    - {files: data/raw/a.csv, weight: 2}\n  balance:\n    by: area\n"
    with pytest.raises(SettingsError, match=r"prepare.balance: by area, and source data/raw/a.csv has a weight"):
        params_file.parse(text)


ROWS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 2**64 - 1)), min_size=1, max_size=60, unique=True)
HOW = st.fixed_dictionaries(
    {"rows": st.just("smallest") | st.integers(1, 12), "fewer": st.sampled_from(["take", "repeat"]),
     "seed": st.integers(0, 3)}
)  # fmt: skip


def copies(found: list[tuple[str, int]], **balance: Any) -> dict[tuple[str, int], int]:
    categories = CategoryBalancer(BalanceSettings.model_validate({"by": "area", **balance}), False)
    for area, _ in found:
        row = SourceRow("x:1", Conversation([]), fields={"area": area})
        assert categories.fault(row) is None
        categories.add(row)
    times, card = categories.copies(
        np.ones(len(found), dtype=np.bool_), np.array([i for _, i in found], dtype=np.uint64)
    )
    assert sum(card.after.values()) == times.sum()
    return dict(zip(found, times.tolist(), strict=True))


@given(ROWS, HOW, st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_the_choice_is_even_and_does_not_depend_on_the_order_of_the_rows(
    found: list[tuple[str, int]], how: dict[str, Any], shuffle: random.Random
) -> None:
    times = copies(found, **how)
    sizes = Counter(area for area, _ in found)
    wanted = min(sizes.values()) if how["rows"] == "smallest" else how["rows"]
    for area, size in sizes.items():
        own = [count for (name, _), count in times.items() if name == area]
        assert sum(own) == (wanted if how["fewer"] == "repeat" else min(size, wanted))
        assert max(own) - min(own) <= 1
    other = list(found)
    shuffle.shuffle(other)
    assert copies(other, **how) == times


@given(ROWS, st.integers(1, 12), st.tuples(st.just("a"), st.integers(0, 2**64 - 1)))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_a_row_that_is_added_takes_the_place_of_one_at_most(
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
        copies([(area, number) for number, area in enumerate("aabc")], rows=2, fewer="refuse")
