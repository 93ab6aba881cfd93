"""Tests stage prepare with teacher answers: they are trained on and never used for evaluation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_generations as made
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.base import Base
from ratchet.config.generate import Generate
from ratchet.config.prepare import Prepare
from ratchet.config.select import Select
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.data.conversation import Conversation
from ratchet.data.splits import SPLITS
from ratchet.errors import DataError
from ratchet.stages import base
from ratchet.stages.init import init
from ratchet.stages.prepare import prepare
from ratchet.stages.project import Project
from ratchet.stages.select_answers import select
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard

DISTILLED = "data/raw/distilled.jsonl"
SOURCES = ({"files": "data/raw/rows.jsonl"}, {"files": DISTILLED})
OLD = 120
NEW = 60


def rows() -> list[dict[str, Any]]:
    """Build rows with true answers, from four areas and 28 days."""
    return [
        {"id": f"old {n}", "prompt": f"old question {n} of its own kind {n * 7}", "response": f"truth {n}",
         "area": "abcd"[n % 4], "day": f"2026-01-{1 + n % 28:02}", "user": f"u{n % 30}"}
        for n in range(OLD)
    ]  # fmt: skip


def settings_of(model: Path, sources: Any = SOURCES, generate: dict[str, Any] | None = None, **knobs: Any) -> Settings:
    knobs = {"max_tokens": 512, "deduplication": {"jaccard_threshold": None}, **knobs}
    return Settings(
        base=Base(source=str(model)), prepare=Prepare.model_validate({"sources": list(sources), **knobs}),
        generate=Generate.model_validate(generate or {}),
    )  # fmt: skip


MakeProject = Callable[..., tuple[ProjectLayout, Settings]]


@pytest.fixture
def project(model: Path, tmp_path: Path) -> MakeProject:
    """Return a function that makes a project with true rows, and teacher answers to the same and to new prompts."""

    def make(**knobs: Any) -> tuple[ProjectLayout, Settings]:
        settings = settings_of(model, **knobs)
        layout = made.project(tmp_path / "project", settings)
        layout.tasks.mkdir(exist_ok=True)
        made.write_lines(layout.raw / "rows.jsonl", rows())
        base.base(Project.from_parts(layout, settings))
        fields = ("area", "day", "user")
        asked = [{key: row[key] for key in ("id", "prompt", *fields)} for row in rows()]
        asked += [
            {"id": f"new {n}", "prompt": f"new question {n}", "area": "e", "day": "never", "user": f"u{n}"}
            for n in range(NEW)
        ]
        prompts = made.write_lines(tmp_path / "asked.jsonl", asked)
        given = made.generation(layout, settings, prompts, lambda id, _: f"distilled {id}", tmp_path / "answers.jsonl")
        select(Project.from_parts(layout, settings), (given,), layout.root / DISTILLED)
        return layout, settings

    return make


def answers(layout: ProjectLayout) -> dict[str, dict[str, str]]:
    """Map each prompt and answer (`prompt > answer`) to the answer, for each split."""
    found: dict[str, dict[str, str]] = {}
    for split in SPLITS:
        texts = token_files.open_split(layout.data, split)["conversation"][:]
        talks = [Conversation.from_json(text) for text in texts]
        found[split] = {f"{talk.prompt} > {talk.response}": talk.response for talk in talks}
    return found


def prepared(layout: ProjectLayout, settings: Settings) -> tuple[DatasetCard, dict[str, dict[str, str]]]:
    prepare(Project.from_parts(layout, settings))
    return DatasetCard.load(layout.dataset_card), answers(layout)


def test_a_distilled_row_of_a_held_out_prompt_is_dropped_and_the_card_names_the_teacher(project: MakeProject) -> None:
    layout, settings = project()
    card, found = prepared(layout, settings)
    held = [text for split in ("validation", "test") for text in found[split].values()]
    assert held
    assert not any(text.startswith("distilled") for text in held)
    prompts = {pair.split(" > ")[0] for split in ("validation", "test") for pair in found[split]}
    assert not any(pair.split(" > ")[0] in prompts for pair in found["train"])
    distilled = sum(text.startswith("distilled") for text in found["train"].values())
    assert card.teacher_rows == distilled > NEW / 2
    assert card.dropped["teacher_held_out"].count == OLD + NEW - distilled
    one = card.source_cards[DISTILLED].teacher_provenance
    assert one.teachers == ("models/a (merged aaaaaaaaaaaa)",)
    assert (one.answers, one.rows, one.training_rows) == (OLD + NEW, OLD + NEW, distilled)
    assert card.rows_in == card.rows_out + sum(drop.count for drop in card.dropped.values())
    page = layout.dataset_page.read_text(encoding="utf-8")
    assert "models/a (merged aaaaaaaaaaaa)" in page
    assert f"{distilled} training rows" in page
    with pytest.raises(DataError, match=r"distilled\.jsonl: the rows are answers that `ratchet select` selected"):
        init(layout.root / "own", layout.root / DISTILLED)


@pytest.mark.parametrize(
    ("split", "new_are_kept"),
    [
        ({}, False),
        ({"group": "user"}, False),
        ({"stratify": "area"}, True),
        ({"stratify": "length"}, True),
        ({"time": "day"}, True),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_distilled_rows_do_not_change_the_split_of_other_rows(
    split: dict[str, str], new_are_kept: bool, project: MakeProject
) -> None:
    layout, settings = project(split=split, generate={"extra_fields": ["user"]})
    card, found = prepared(layout, settings)
    alone = settings_of(Path(settings.base.source), [{"files": "data/raw/rows.jsonl"}], split=split)
    _, without = prepared(layout, alone)
    for name in SPLITS:
        truths = {pair for pair, text in found[name].items() if text.startswith("truth")}
        assert truths == without[name].keys()
        assert name == "train" or not any(text.startswith("distilled") for text in found[name].values())
    held = {pair.split(" > ")[0] for name in ("validation", "test") for pair in without[name]}
    assert not any(pair.split(" > ")[0] in held for pair in found["train"])
    new = sum(text.startswith("distilled new") for text in found["train"].values())
    assert new == NEW if new_are_kept else new < NEW
    assert card.teacher_rows > 0


def test_with_split_train_only_rows_of_held_out_prompts_are_dropped(project: MakeProject) -> None:
    layout, settings = project(sources=({"files": "data/raw/rows.jsonl"}, {"files": DISTILLED, "split": "train"}))
    card, found = prepared(layout, settings)
    assert sum(text.startswith("distilled new") for text in found["train"].values()) == NEW
    assert card.dropped["teacher_held_out"].count == len(found["validation"]) + len(found["test"])


def test_merged_system_messages_do_not_hide_held_out_prompts(project: MakeProject) -> None:
    layout, settings = project(
        system="merge", generate={"system_prompt": "be short\n\nand kind"},
        sources=({"files": "data/raw/rows.jsonl"}, {"files": DISTILLED, "split": "train"}),
    )  # fmt: skip
    _, found = prepared(layout, settings)
    held = [pair.split(" > ")[0] for name in ("validation", "test") for pair in found[name]]
    train = [pair.split(" > ")[0] for pair in found["train"] if "be short" in pair]
    assert len(train) == OLD + NEW - len(held)
    assert not any(prompt.endswith(f"\n\n{one}") for prompt in train for one in held)


def test_among_duplicates_the_row_without_teacher_is_kept(project: MakeProject, tmp_path: Path) -> None:
    layout, settings = project()
    (layout.root / DISTILLED).unlink()
    prompts = made.write_lines(tmp_path / "same.jsonl", [{"id": r["id"], "prompt": r["prompt"]} for r in rows()])
    given = made.generation(
        layout, settings, prompts, lambda id, _: f"TRUTH {id.split()[1]}", tmp_path / "same_answers.jsonl"
    )
    select(Project.from_parts(layout, settings), (given,), layout.root / DISTILLED)
    card, found = prepared(layout, settings)
    assert card.teacher_rows == 0
    assert card.rows_out == OLD
    assert all(text.startswith("truth") for split in SPLITS for text in found[split].values())


def test_a_label_only_in_teacher_answers_is_noted(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, task="labels")
    layout = made.project(tmp_path / "project", settings)
    layout.tasks.mkdir()
    own = [{"id": str(n), "prompt": f"question {n}", "response": "abcde"[n % 5]} for n in range(OLD)]
    made.write_lines(layout.raw / "rows.jsonl", own)
    base.base(Project.from_parts(layout, settings))
    asked = made.write_lines(tmp_path / "asked.jsonl", [{"id": f"{n}", "prompt": f"new {n}"} for n in range(NEW)])
    answers_ = made.generation(
        layout, settings, asked, lambda id, _: "I am not sure" if int(id) % 2 else "a", tmp_path / "answers.jsonl"
    )
    for chosen, expected in (({}, 6), ({"answer_format": "[a-e]"}, 5)):
        (layout.root / DISTILLED).unlink(missing_ok=True)
        choice = settings.model_copy(update={"select": Select.model_validate(chosen)})
        select(Project.from_parts(layout, choice), (answers_,), layout.root / DISTILLED)
        card, _ = prepared(layout, settings)
        assert len(card.labels) == expected
        notes = [note for note in card.notes if "only in teacher answers" in note]
        if expected == 5:
            assert notes == []
            continue
        count = card.labels["I am not sure"]
        assert len(notes) == 1
        assert notes[0].startswith("1 of 6 labels occur only in teacher answers, not in your own rows: ")
        assert f"'I am not sure' ({count} rows)" in notes[0]


def test_changed_rows_or_a_missing_card_are_refused(project: MakeProject, capsys: pytest.CaptureFixture[str]) -> None:
    layout, _ = project()
    distilled, card = layout.root / DISTILLED, layout.root / f"{DISTILLED}.card.json"
    whole, card_bytes = distilled.read_bytes(), card.read_bytes()
    distilled.write_bytes(whole.replace(b"distilled old 1", b"better old 1"))
    assert f"{DISTILLED}: the file changed since `ratchet select` wrote it" in made.refused(layout, capsys)
    distilled.write_bytes(whole)
    card.unlink()
    assert "put distilled.jsonl.card.json next to the file" in made.refused(layout, capsys)
    card.write_text("{}", encoding="utf-8")
    assert "is not a card of `ratchet select`" in made.refused(layout, capsys)
    card.write_bytes(card_bytes)
    assert main(["--project", str(layout.root), "prepare"]) == 0
    said = capsys.readouterr().out
    assert "by models/a (merged aaaaaaaaaaaa): " in said
    assert "% of the training rows" in said


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (({"files": "data/raw/rows.jsonl"}, {"files": DISTILLED, "split": "test"}), "cannot serve as ground truth"),
        (({"files": "data/raw/*.jsonl"},), "exclude it from the pattern"),
    ],
)
def test_invalid_teacher_sources_are_refused(
    sources: Any, said: str, project: MakeProject, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, settings = project()
    changed = settings.model_copy(update={"prepare": Prepare.model_validate({"sources": list(sources)})})
    layout.params.write_text(params_file.dump(changed), encoding="utf-8")
    assert said in made.refused(layout, capsys)


def test_a_glob_does_not_match_cards(project: MakeProject) -> None:
    layout, settings = project()
    (layout.raw / "more.json").write_text(json.dumps(rows()[:1]), encoding="utf-8")
    sources = [{"files": "data/raw/rows.jsonl"}, {"files": "data/raw/*.json"}, {"files": DISTILLED}]
    changed = settings_of(Path(settings.base.source), sources)
    card, _ = prepared(layout, changed)
    assert list(card.source_cards["data/raw/*.json"].files) == ["data/raw/more.json"]
