"""Tests `ratchet select`: several generations, existing or changed outputs, missing prompts."""

import errno
import json
import shutil
from pathlib import Path

import pytest

import fake_generations as made
from ratchet.errors import DamagedFileError
from ratchet.stages.project import Project
from ratchet.stages.select_answers import select
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.output_card import card_path
from ratchet.storage.records.data import SelectionCard
from select_outputs_cases import (
    PROMPTS,
    answers,  # noqa: F401 (a fixture)
    layout,  # noqa: F401 (a fixture)
    ratchet,
    refused,
)


def test_selection_is_repeatable(layout: ProjectLayout, answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = layout.raw / "distilled.jsonl"
    assert ratchet(layout, answers, "--output", target) == 0
    said = capsys.readouterr().out
    assert "answers.jsonl: 4 answers to 4 prompts by models/a" in said
    assert "4 rows of 4 answers, for 4 of 4 prompts" in said
    before = target.read_bytes(), card_path(target).read_bytes()
    assert ratchet(layout, answers, "--output", target) == 0
    assert "nothing to do" in capsys.readouterr().out
    target.unlink()
    assert ratchet(layout, answers, "--output", target) == 0
    assert (target.read_bytes(), card_path(target).read_bytes()) == before


def test_an_output_of_another_selection_is_refused_with_the_difference(
    layout: ProjectLayout, answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = layout.raw / "distilled.jsonl"
    ratchet(layout, answers, "--output", target)
    before = target.read_bytes()
    made.project(layout.root, made.settings_of({"min_characters": 2, "reasoning": "keep"}))
    said = refused(layout, capsys, answers, "--output", target)
    assert "differs in select.min_characters, select.reasoning; remove it" in said
    made.project(layout.root, made.settings_of())
    target.write_bytes(before + b"\n")
    assert "changed since it was written" in refused(layout, capsys, answers, "--output", target)
    card_path(target).unlink()
    said = refused(layout, capsys, answers, "--output", target)
    assert "`ratchet select` did not write it (distilled.jsonl.card.json is missing)" in said
    card_path(target).write_text("{}", encoding="utf-8")
    said = refused(layout, capsys, answers, "--output", target)
    assert "`ratchet select` did not write it (distilled.jsonl.card.json is not such a card)" in said


def test_an_unwritable_output_is_refused_before_reading(
    layout: ProjectLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_file.csv").write_text("a,b\n", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    for target, said in (
        (tmp_path / "a_file.csv" / "t.jsonl", "--output "),
        (tmp_path / f"{'n' * 300}.jsonl", "--output "),
        (tmp_path / f"{'n' * 226}.jsonl", "--output: its card "),
        (Path("/proc/t.jsonl"), "--output "),
    ):
        message = refused(layout, capsys, tmp_path / "not_there.jsonl", "--output", target)
        assert f"{said}{target}" in message
        assert "not_there" not in message
    assert sorted(tmp_path.rglob("*")) == before


def test_answers_are_never_overwritten(
    layout: ProjectLayout, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = made.write_lines(tmp_path / "more.jsonl", PROMPTS[:2])
    other = made.generation(layout, made.settings_of(), prompts, lambda id, _: id, tmp_path / "other.jsonl")
    before = answers.read_bytes(), other.read_bytes()
    message = refused(layout, capsys, answers, "--output", answers.parent / "." / answers.name)
    assert f"is also the input {answers.parent}" in message
    message = refused(layout, capsys, answers, "--output", other)
    assert "other.jsonl: is an output of `ratchet generate`; name another --output" in message
    assert "remove" not in message
    assert (answers.read_bytes(), other.read_bytes()) == before


def test_invalid_inputs_are_refused(
    layout: ProjectLayout, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = layout.raw / "distilled.jsonl"
    assert "expected a name that ends in .jsonl" in refused(layout, capsys, answers, "--output", tmp_path / "a.parquet")
    assert "no such file" in refused(layout, capsys, tmp_path / "none.jsonl", "--output", target)
    assert "nnn: File name too long; outputs are consistent" in refused(
        layout, capsys, tmp_path / ("n" * 300), "--output", target
    )
    said = refused(layout, capsys, tmp_path / "prompts.jsonl", "--output", target)
    assert "not an output of `ratchet generate` (prompts.jsonl.card.json is missing); restore" in said
    assert "found a directory, expected a file" in refused(layout, capsys, tmp_path, "--output", target)
    assert "named twice" in refused(layout, capsys, answers, answers, "--output", target)
    for name in ("answers.jsonl", "answers.jsonl.card.json"):
        shutil.copy(tmp_path / name, tmp_path / f"same_{name}")
    assert "of the same generation" in refused(
        layout, capsys, answers, tmp_path / "same_answers.jsonl", "--output", target
    )
    mine = made.write_lines(tmp_path / "mine.jsonl", [{"prompt": "hi", "provenance": "mine"}])
    kept = made.generation(
        layout, made.settings_of(extra_fields=["provenance"]), mine, lambda *_: "yes", tmp_path / "k.jsonl"
    )
    assert "provenance" in refused(layout, capsys, kept, "--output", target)
    made.project(layout.root, made.settings_of({"answer_format": "labels"}))
    assert "was generated without generate.labels" in refused(layout, capsys, answers, "--output", target)
    answers.write_bytes(answers.read_bytes().replace(b"it is q1", b"it is q9"))
    assert "answers.jsonl: the file changed since" in refused(layout, capsys, answers, "--output", target)
    assert not target.exists()


def test_prompts_are_read_from_their_file_if_the_directory_is_gone(
    layout: ProjectLayout, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = layout.raw / "distilled.jsonl"
    ratchet(layout, answers, "--output", target)
    whole = target.read_bytes()
    target.unlink()
    shutil.rmtree(layout.generations)
    message = refused(layout, capsys, answers, "--output", target)
    assert "are missing (no " in message
    assert "name their original file with --prompts" in message
    assert "create it again" not in message
    other = made.write_lines(tmp_path / "other.jsonl", [*PROMPTS[:3], {"id": "q3", "prompt": "something else"}])
    said = refused(layout, capsys, answers, "--output", target, "--prompts", other)
    assert "not the prompts of generation" in said
    assert not target.exists()
    assert ratchet(layout, answers, "--output", target, "--prompts", tmp_path / "prompts.jsonl") == 0
    assert target.read_bytes() == whole


def test_damaged_prompts_are_detected(layout: ProjectLayout, answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = next(layout.generations.glob("*/prompts/prompts.jsonl"))
    kept.write_bytes(kept.read_bytes().replace(b"water", b"wafer"))
    said = refused(layout, capsys, answers, "--output", layout.raw / "distilled.jsonl")
    assert "are damaged (" in said


def test_parquet_and_json_lines_give_the_same_rows(layout: ProjectLayout, answers: Path, tmp_path: Path) -> None:
    settings_, asked = made.settings_of(), tmp_path / "prompts.jsonl"
    table = made.generation(layout, settings_, asked, lambda id, _: f"it is {id}", tmp_path / "answers.parquet")
    for given_, target in ((answers, "a.jsonl"), (table, "b.jsonl")):
        assert ratchet(layout, given_, "--output", layout.raw / target) == 0
    assert (layout.raw / "a.jsonl").read_bytes() == (layout.raw / "b.jsonl").read_bytes()


def test_generations_for_the_same_prompts_vote_together_and_others_follow(
    layout: ProjectLayout, tmp_path: Path
) -> None:
    settings_ = made.settings_of({"min_agreement": 0.6, "deduplication": {"jaccard_threshold": None}})
    made.project(layout.root, settings_)
    asked = made.write_lines(tmp_path / "p.jsonl", PROMPTS[:2])
    others = made.write_lines(tmp_path / "o.jsonl", [{"id": "o", "prompt": "another"}])
    said = {"a": {"q0": "yes", "q1": "yes"}, "b": {"q0": "yes", "q1": "no"}, "c": {"q0": "no", "q1": "maybe"}}
    given_ = [
        made.generation(layout, settings_, asked, lambda id, _, who=who: said[who][id], tmp_path / f"{who}.jsonl", who)
        for who in said
    ]
    given_.insert(1, made.generation(layout, settings_, others, lambda id, _: "other", tmp_path / "d.jsonl", "d"))
    target = layout.raw / "distilled.jsonl"
    select(Project.from_parts(layout, settings_), tuple(given_), target)
    rows = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert [(row["id"], row["messages"][-1]["content"]) for row in rows] == [("q0", "yes"), ("o", "other")]
    assert rows[0]["provenance"]["agreement"] == 0.6667
    card = SelectionCard.load(card_path(target))
    assert [one.model_digest[0] for one in card.spec.teachers] == ["a", "d", "b", "c"]
    assert (card.prompts, card.answers, card.prompts_with_rows) == (3, 7, 2)


def test_an_output_with_too_few_answers_is_damaged(layout: ProjectLayout, answers: Path) -> None:
    from ratchet.inference.spec import GenerationCard

    answers.write_bytes(b"".join(answers.read_bytes().splitlines(keepends=True)[:3]))
    card = GenerationCard.load(card_path(answers))
    card.model_copy(update={"output": digests.hash_file(answers)}).save(card_path(answers))
    with pytest.raises(DamagedFileError, match="sample 0 of prompt 'q3' is not at its position"):
        select(Project.from_parts(layout, made.settings_of()), (answers,), layout.raw / "t.jsonl")
    assert list(layout.raw.iterdir()) == []


@pytest.mark.parametrize("kind", ["write", "rename"])
def test_a_failing_disk_leaves_no_partial_file_and_the_command_can_be_repeated(
    kind: str, layout: ProjectLayout, answers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = layout.raw / "distilled.jsonl"

    def full(operation: str, path: Path) -> None:
        if operation == kind and path.name.endswith("distilled.jsonl") and path.parent == layout.raw:
            raise OSError(errno.ENOSPC, "no space left", str(path))

    monkeypatch.setattr(files, "before", full)
    said = refused(layout, capsys, answers, "--output", target)
    assert "no space left; outputs are consistent" in said
    assert [one.name for one in layout.raw.iterdir() if one.name != card_path(target).name] == []
    assert not list(layout.experiments.glob(".partial-*"))
    monkeypatch.undo()
    assert ratchet(layout, answers, "--output", target) == 0
    assert digests.hash_file(target) == SelectionCard.load(card_path(target)).output


def test_leftovers_of_a_killed_process_are_removed(layout: ProjectLayout, answers: Path) -> None:
    target = layout.raw / "distilled.jsonl"
    ratchet(layout, answers, "--output", target)
    whole = target.read_bytes()
    target.unlink()
    (layout.raw / ".partial-distilled.jsonl").write_bytes(whole[:10])
    name = digests.hash_bytes(str(target).encode())[: digests.SHORT]
    left = layout.experiments / f".partial-select-{name}"
    left.mkdir()
    (left / "left.jsonl").write_bytes(b"{")
    assert ratchet(layout, answers, "--output", target) == 0
    assert target.read_bytes() == whole
    assert not left.exists()
    assert sorted(one.name for one in layout.raw.iterdir()) == ["distilled.jsonl", "distilled.jsonl.card.json"]
