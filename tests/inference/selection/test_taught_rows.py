"""Stage prepare over a teacher's answers: they are learned from, and nothing is ever judged by them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import made_generations as made
from ratchet.cli import command_line
from ratchet.config import params_file
from ratchet.config.data import Prepare
from ratchet.config.generate import Generate
from ratchet.config.schema import Base, Settings
from ratchet.config.selection import Select
from ratchet.data import token_files
from ratchet.data.conversation import Conversation
from ratchet.data.splits import SPLITS
from ratchet.stages import base
from ratchet.stages.prepare import prepare
from ratchet.stages.select_answers import SelectOptions, select
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard

TAUGHT = "data/raw/taught.jsonl"
SOURCES = ({"files": "data/raw/rows.jsonl"}, {"files": TAUGHT})
OLD = 120
NEW = 60


def rows() -> list[dict[str, Any]]:
    """Rows with true answers; four areas, a day each."""
    return [
        {"id": f"old {n}", "prompt": f"old question {n} of its own kind {n * 7}", "response": f"truth {n}",
         "area": "abcd"[n % 4], "day": f"2026-01-{1 + n % 28:02}", "user": f"u{n % 30}"}
        for n in range(OLD)
    ]  # fmt: skip


def settings_of(model: Path, sources: Any = SOURCES, generate: dict[str, Any] | None = None, **knobs: Any) -> Settings:
    knobs = {"max_tokens": 512, "duplicates": {"near": None}, **knobs}
    return Settings(
        base=Base(source=str(model)), prepare=Prepare.model_validate({"sources": list(sources), **knobs}),
        generate=Generate.model_validate(generate or {}),
    )  # fmt: skip


Project = Callable[..., tuple[ProjectLayout, Settings]]


@pytest.fixture
def project(model: Path, tmp_path: Path) -> Project:
    """A project with true rows, and a teacher's answers to the same prompts and to new ones."""

    def make(**knobs: Any) -> tuple[ProjectLayout, Settings]:
        settings = settings_of(model, **knobs)
        layout = made.project(tmp_path / "project", settings)
        layout.tasks.mkdir(exist_ok=True)
        made.write_lines(layout.raw / "rows.jsonl", rows())
        base.base(layout, settings, lambda _: None)
        fields = ("area", "day", "user")
        asked = [{key: row[key] for key in ("id", "prompt", *fields)} for row in rows()]
        asked += [
            {"id": f"new {n}", "prompt": f"new question {n}", "area": "e", "day": "never", "user": f"u{n}"}
            for n in range(NEW)
        ]
        prompts = made.write_lines(tmp_path / "asked.jsonl", asked)
        given = made.generation(layout, settings, prompts, lambda id, _: f"taught {id}", tmp_path / "answers.jsonl")
        select(layout, settings, SelectOptions((given,), layout.root / TAUGHT), lambda text: None)
        return layout, settings

    return make


def answers(layout: ProjectLayout) -> dict[str, dict[str, str]]:
    """Answer by prompt (what the user says last), of each split."""
    found: dict[str, dict[str, str]] = {}
    for split in SPLITS:
        texts = token_files.open_split(layout.data, split)["conversation"][:]
        talks = [Conversation.from_json(text) for text in texts]
        found[split] = {f"{talk.prompt} > {talk.response}": talk.response for talk in talks}
    return found


def prepared(layout: ProjectLayout, settings: Settings) -> tuple[DatasetCard, dict[str, dict[str, str]]]:
    prepare(layout, settings)
    return DatasetCard.load(layout.dataset_card), answers(layout)


def test_a_taught_row_of_a_held_out_prompt_is_dropped_and_the_card_names_the_teacher(project: Project) -> None:
    layout, settings = project()
    card, found = prepared(layout, settings)
    held = [text for split in ("validation", "test") for text in found[split].values()]
    assert held
    assert not any(text.startswith("taught") for text in held)
    prompts = {pair.split(" > ")[0] for split in ("validation", "test") for pair in found[split]}
    assert not any(pair.split(" > ")[0] in prompts for pair in found["train"])
    taught = sum(text.startswith("taught") for text in found["train"].values())
    assert card.taught_rows == taught > NEW / 2
    assert card.dropped["taught_held_out"].count == OLD + NEW - taught
    one = card.source_cards[TAUGHT].taught
    assert one.teachers == ("models/a (merged aaaaaaaaaaaa)",)
    assert (one.answers, one.rows, one.training_rows) == (OLD + NEW, OLD + NEW, taught)
    assert card.rows_in == card.rows_out + sum(drop.count for drop in card.dropped.values())
    page = layout.dataset_page.read_text(encoding="utf-8")
    assert "models/a (merged aaaaaaaaaaaa)" in page
    assert f"{taught} training rows" in page


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
def test_taught_rows_move_no_other_row_however_rows_are_divided(
    split: dict[str, str], new_are_kept: bool, project: Project
) -> None:
    layout, settings = project(split=split, generate={"keep": ["user"]})
    card, found = prepared(layout, settings)
    alone = settings_of(Path(settings.base.source), [{"files": "data/raw/rows.jsonl"}], split=split)
    _, without = prepared(layout, alone)
    for name in SPLITS:
        truths = {pair for pair, text in found[name].items() if text.startswith("truth")}
        assert truths == without[name].keys()
        assert name == "train" or not any(text.startswith("taught") for text in found[name].values())
    held = {pair.split(" > ")[0] for name in ("validation", "test") for pair in without[name]}
    assert not any(pair.split(" > ")[0] in held for pair in found["train"])
    new = sum(text.startswith("taught new") for text in found["train"].values())
    assert new == NEW if new_are_kept else new < NEW
    assert card.taught_rows > 0


def test_with_split_train_only_rows_of_held_out_prompts_are_dropped(project: Project) -> None:
    layout, settings = project(sources=({"files": "data/raw/rows.jsonl"}, {"files": TAUGHT, "split": "train"}))
    card, found = prepared(layout, settings)
    assert sum(text.startswith("taught new") for text in found["train"].values()) == NEW
    assert card.dropped["taught_held_out"].count == len(found["validation"]) + len(found["test"])


def test_a_system_message_merged_into_the_prompt_hides_no_held_out_prompt(project: Project) -> None:
    layout, settings = project(
        system="merge", generate={"system": "be short\n\nand kind"},
        sources=({"files": "data/raw/rows.jsonl"}, {"files": TAUGHT, "split": "train"}),
    )  # fmt: skip
    _, found = prepared(layout, settings)
    held = [pair.split(" > ")[0] for name in ("validation", "test") for pair in found[name]]
    train = [pair.split(" > ")[0] for pair in found["train"] if "be short" in pair]
    assert len(train) == OLD + NEW - len(held)
    assert not any(prompt.endswith(f"\n\n{one}") for prompt in train for one in held)


def test_of_rows_that_say_the_same_the_one_that_no_teacher_wrote_is_kept(project: Project, tmp_path: Path) -> None:
    layout, settings = project()
    (layout.root / TAUGHT).unlink()
    prompts = made.write_lines(tmp_path / "same.jsonl", [{"id": r["id"], "prompt": r["prompt"]} for r in rows()])
    given = made.generation(
        layout, settings, prompts, lambda id, _: f"TRUTH {id.split()[1]}", tmp_path / "same_answers.jsonl"
    )
    select(layout, settings, SelectOptions((given,), layout.root / TAUGHT), lambda text: None)
    card, found = prepared(layout, settings)
    assert card.taught_rows == 0
    assert card.rows_out == OLD
    assert all(text.startswith("truth") for split in SPLITS for text in found[split].values())


def test_a_label_that_only_a_teacher_gives_is_noted(model: Path, tmp_path: Path) -> None:
    settings = settings_of(model, task="labels")
    layout = made.project(tmp_path / "project", settings)
    layout.tasks.mkdir()
    own = [{"id": str(n), "prompt": f"question {n}", "response": "abcde"[n % 5]} for n in range(OLD)]
    made.write_lines(layout.raw / "rows.jsonl", own)
    base.base(layout, settings, lambda _: None)
    asked = made.write_lines(tmp_path / "asked.jsonl", [{"id": f"{n}", "prompt": f"new {n}"} for n in range(NEW)])
    answers_ = made.generation(
        layout, settings, asked, lambda id, _: "I am not sure" if int(id) % 2 else "a", tmp_path / "answers.jsonl"
    )
    for chosen, expected in (({}, 6), ({"format": "[a-e]"}, 5)):
        (layout.root / TAUGHT).unlink(missing_ok=True)
        choice = settings.model_copy(update={"select": Select.model_validate(chosen)})
        select(layout, choice, SelectOptions((answers_,), layout.root / TAUGHT), lambda text: None)
        card, _ = prepared(layout, settings)
        assert len(card.labels) == expected
        notes = [note for note in card.notes if "a teacher's alone" in note]
        if expected == 5:
            assert notes == []
            continue
        count = card.labels["I am not sure"]
        assert len(notes) == 1
        assert notes[0].startswith("1 of 6 labels are a teacher's alone, no row of yours has them: ")
        assert f"'I am not sure' ({count} rows)" in notes[0]


def test_rows_that_were_changed_or_lost_their_card_are_refused(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, _ = project()
    taught, card = layout.root / TAUGHT, layout.root / f"{TAUGHT}.card.json"
    whole, card_bytes = taught.read_bytes(), card.read_bytes()
    taught.write_bytes(whole.replace(b"taught old 1", b"better old 1"))
    assert f"{TAUGHT}: was changed since `ratchet select` wrote it" in made.refused(layout, capsys)
    taught.write_bytes(whole)
    card.unlink()
    assert "put taught.jsonl.card.json there" in made.refused(layout, capsys)
    card.write_text("{}", encoding="utf-8")
    assert "is no card of `ratchet select`" in made.refused(layout, capsys)
    card.write_bytes(card_bytes)
    assert command_line.main(["--project", str(layout.root), "prepare"]) == 0
    said = capsys.readouterr().out
    assert "by models/a (merged aaaaaaaaaaaa): " in said
    assert "% of the training rows" in said


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        (({"files": "data/raw/rows.jsonl"}, {"files": TAUGHT, "split": "test"}), "what a model says is no truth"),
        (({"files": "data/raw/*.jsonl"},), "leave it out of the pattern"),
    ],
)
def test_sources_that_a_teacher_cannot_be(
    sources: Any, said: str, project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, settings = project()
    changed = settings.model_copy(update={"prepare": Prepare.model_validate({"sources": list(sources)})})
    layout.params.write_text(params_file.dump(changed), encoding="utf-8")
    assert said in made.refused(layout, capsys)


def test_a_pattern_does_not_take_cards_for_rows(project: Project) -> None:
    layout, settings = project()
    (layout.raw / "more.json").write_text(json.dumps(rows()[:1]), encoding="utf-8")
    sources = [{"files": "data/raw/rows.jsonl"}, {"files": "data/raw/*.json"}, {"files": TAUGHT}]
    changed = settings_of(Path(settings.base.source), sources)
    card, _ = prepared(layout, changed)
    assert list(card.source_cards["data/raw/*.json"].files) == ["data/raw/more.json"]
