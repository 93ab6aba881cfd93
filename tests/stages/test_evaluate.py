"""Tests of stage evaluate in a small project: models and formats, reuse of stored scores, little memory, and
refusals."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluate_cases import (
    SETTINGS,
    cold,  # noqa: F401 (a fixture)
    evaluated,
    export_of,
    forwards,  # noqa: F401 (a fixture)
    keep_as_champion,
    layout,  # noqa: F401 (a fixture)
    made,  # noqa: F401 (a fixture)
    samples,
)
from ratchet.config import params_file
from ratchet.errors import ChampionError, DataError, MemoryExhaustedError, SettingsError
from ratchet.quality_gate import evidence as reading
from ratchet.stages import evaluate
from ratchet.stages.project import Project
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import EvaluationNoise, EvaluationReport, ObjectiveSet
from ratchet.storage.records.export import ModelBundle


@pytest.fixture
def made_once(made: Path) -> ProjectLayout:
    """Return the shared project itself, for tests that only read it."""
    return ProjectLayout(made)


def test_base_and_candidate_under_one_contract(made_once: ProjectLayout) -> None:
    report = EvaluationReport.load(made_once.eval_report)
    assert set(report.scores) == {"base", "candidate"}
    base, candidate = report.scores["base"], report.scores["candidate"]
    assert base.contract == candidate.contract
    assert base.model_format == candidate.model_format == "adapter"
    contract = report.contracts[base.contract]
    assert digests.hash_json(contract) == base.contract
    assert contract["tasks"].keys() == contract["harness"].keys() == {"answers"}
    assert contract["weights"] == "nf4+dq uint8"
    assert contract["versions"].keys() >= {"torch", "transformers", "lm_eval"}
    wanted = {
        "answer_loss", "perplexity", "answer_perplexity", "prompt_perplexity", "general_perplexity", "accuracy",
        "label_accuracy", "macro_f1",
    }  # fmt: skip
    assert wanted <= base.metrics.keys()
    assert base.metrics.keys() == candidate.metrics.keys()
    assert base.metrics["answer_loss"].value != candidate.metrics["answer_loss"].value, "the adapter is at work"
    assert report.model_digest == ModelBundle.load(made_once.bundle).model_digest
    assert report.selection_overlaps == {}


def test_figures_are_those_of_their_samples(made_once: ProjectLayout) -> None:
    report = EvaluationReport.load(made_once.eval_report)
    for scores in report.scores.values():
        for name, file in scores.samples.items():
            lines = base.read_lines(made_once.evaluate / file)
            assert len({line["id"] for line in lines}) == len(lines) == scores.metrics[name].n
            values, weights = [line["value"] for line in lines], [line["weight"] for line in lines]
            found = scores.metrics[name]
            if found.kind == "perplexity":
                assert found.value == pytest.approx(torch.tensor(sum(values) / sum(weights)).exp().item(), rel=1e-5)
            else:
                assert found.value == pytest.approx(sum(values) / len(values))


def test_rows_answers_and_slices_are_stored_with_the_scores(made_once: ProjectLayout) -> None:
    layout = made_once
    report = EvaluationReport.load(layout.eval_report)
    asked = base.read_lines(layout.evaluate / "rows.jsonl")
    answers = base.read_lines(layout.evaluate / "answers" / "candidate.jsonl")
    assert len(answers) == 12
    assert [row["id"] for row in asked[:12]] == [row["id"] for row in answers]
    assert all(row["answer_tokens"] > 0 and row["prompt_tokens"] > 0 for row in asked)
    documents = base.read_lines(layout.evaluate / "harness" / "candidate" / "answers.jsonl")
    assert len(documents) == 4
    assert {"id", "prompt", "target", "answers", "scores"} <= documents[0].keys()
    parts = report.scores["candidate"].slices
    assert sum(part["perplexity"].n for part in parts.values()) == len(asked)
    curves = json.loads((layout.evaluate / "curves" / "candidate.json").read_text(encoding="utf-8"))
    assert set(curves) == {row["expected"] for row in asked}
    assert "<polyline" in (layout.evaluate / "curves" / "candidate.html").read_text(encoding="utf-8")
    assert "Confusion matrix of" in (layout.evaluate / "confusion" / "candidate.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_stored_scores_are_not_computed_again(layout: ProjectLayout, forwards: list[int]) -> None:
    first = files.read_manifest(layout.evaluate)
    evaluated(layout)
    assert len(forwards) <= 1, "loading in 4 bits tries the model once"
    assert files.read_manifest(layout.evaluate) == first

    forwards.clear()
    folder = layout.promoted_model(keep_as_champion(layout, 1).model_digest)
    report = evaluated(layout)  # the candidate is also the champion and is scored once
    assert len(forwards) <= 1
    assert samples(layout, report, "champion", "accuracy") == samples(layout, report, "candidate", "accuracy")

    before = files.read_manifest(layout.evaluate)
    weights = folder / "hf" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    weights.unlink()  # the file may be a hard link to the export
    content[-1] ^= 1
    weights.write_bytes(content)
    for remove in (False, True):
        if remove:
            shutil.rmtree(folder)
        with pytest.raises(ChampionError, match="version 1 as champion, but its model is not usable on this machine"):
            evaluated(layout)
        assert files.read_manifest(layout.evaluate) == before


@pytest.mark.long
def test_the_merged_model_is_scored_with_the_adapter_and_alone(layout: ProjectLayout) -> None:
    report = evaluated(layout, params_file.apply_changes(SETTINGS, {"evaluate.formats": ["adapter", "merged"]}))
    assert set(report.scores) == {"base", "candidate", "merged"}
    adapter, merged = report.scores["candidate"], report.scores["merged"]
    assert merged.model_format == "merged"
    assert merged.model_digest == report.model_digest
    assert merged.contract != adapter.contract
    assert merged.metrics["answer_loss"].value == pytest.approx(adapter.metrics["answer_loss"].value, rel=1e-4)

    report = evaluated(layout, params_file.apply_changes(SETTINGS, {"evaluate.formats": ["merged"]}))
    assert set(report.scores) == {"base", "merged"}
    assert report.scores["base"].contract == report.scores["merged"].contract, "the base as plain weights"


def test_categories_and_drawn_answers(layout: ProjectLayout) -> None:
    settings = params_file.apply_changes(
        SETTINGS,
        {
            "evaluate.samples": 3,
            "evaluate.temperature": 1.0,
            "evaluate.metrics": ["token_f1", "length"],
            "evaluate.answer_format": "json",
        },
    )
    report = evaluated(layout, settings)
    lines = base.read_lines(layout.evaluate / "answers" / "base.jsonl")
    assert {len(line["answers"]) for line in lines} == {3}
    assert {"token_f1", "length_characters", "length_words", "format_validity"} <= report.scores["base"].metrics.keys()
    assert report.scores["base"].metrics["length_words"].better == "unknown"


@pytest.fixture
def small_memory() -> Iterator[Callable[..., None]]:
    """Return a function that simulates a device on which a batch of more than `rows` rows or `tokens` tokens does
    not fit."""
    hooks = []

    def of(rows: int, tokens: int = 10**6) -> None:
        def refuse(module: torch.nn.Module, arguments: Any) -> None:
            if not isinstance(module, torch.nn.Embedding) or arguments[0].dim() != 2:
                return
            if arguments[0].shape[0] > rows or arguments[0].shape[1] > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 byte")

        hooks.append(torch.nn.modules.module.register_module_forward_pre_hook(refuse))

    yield of
    for hook in hooks:
        hook.remove()


@pytest.mark.long
def test_with_too_little_memory_all_models_are_scored_in_smaller_batches(
    layout: ProjectLayout, small_memory: Callable[..., None]
) -> None:
    settings = params_file.apply_changes(
        SETTINGS, {"machine.evaluation_batch_size": 16, "evaluate.label_scores": False}
    )
    small_memory(4)
    report = evaluated(layout, settings)
    assert {report.contracts[one.contract]["batch_rows"] for one in report.scores.values()} == {4}
    assert [note for note in report.notes if "memory" in note] == [
        "memory did not suffice for 16 rows at once; all models were scored by 8",
        "memory did not suffice for 8 rows at once; all models were scored by 4",
    ]


@pytest.mark.parametrize(("tokens", "what"), [(10, "a single row"), (0, "the model itself")], ids=["row", "model"])
def test_not_even_one_row_fits(
    layout: ProjectLayout, small_memory: Callable[..., None], tokens: int, what: str
) -> None:
    small_memory(64, tokens)
    before = files.read_manifest(layout.evaluate)
    with pytest.raises(MemoryExhaustedError, match=f"memory does not suffice for {what} "):
        evaluated(layout, params_file.apply_changes(SETTINGS, {"machine.evaluation_batch_size": 2}))
    assert files.read_manifest(layout.evaluate) == before


@pytest.mark.long
def test_each_model_counts_once_as_a_test_set_use_and_selection_overlaps_are_reported(
    layout: ProjectLayout,
) -> None:
    report = evaluated(layout)
    ids = tuple(row["id"] for row in base.read_lines(layout.evaluate / "rows.jsonl"))
    layout.objectives.mkdir()
    ObjectiveSet(name="sweep of ranks", sample_ids=(*ids[:3], "elsewhere"), tasks=("answers",)).save(
        layout.objectives / "sweep.json"
    )
    assert reading.read_evidence(layout, SETTINGS, {}).report.selection_overlaps == {"sweep of ranks": 4}, (
        "also without a new evaluation"
    )
    export_of(layout, 4)
    assert evaluated(layout).selection_overlaps == {"sweep of ranks": 4}
    lines = base.read_lines(layout.test_set_uses)
    assert lines[0]["digest"] == report.test_set_digest
    assert sorted(lines[0]["rows"]) == sorted(ids)
    assert [line["test_set_digest"] for line in lines[1:]] == 2 * [report.test_set_digest]


def test_the_candidate_against_itself(layout: ProjectLayout) -> None:
    report = EvaluationReport.load(layout.eval_report)
    evaluate.evaluate_again(Project.from_parts(layout, SETTINGS), lambda _: None)
    files.verify_sealed(layout.noise, "noise")
    noise = EvaluationNoise.load(layout.noise / "noise.json")
    assert noise.contract == report.scores["candidate"].contract
    assert noise.batch_rows[0] != noise.batch_rows[1]
    assert noise.metrics.keys() == report.scores["candidate"].metrics.keys()
    assert noise.metrics["answer_loss"].value == pytest.approx(
        report.scores["candidate"].metrics["answer_loss"].value, rel=1e-5
    )


def test_bad_settings_are_refused_before_anything_is_scored(cold: ProjectLayout) -> None:
    for change, message in (
        ({"evaluate.slice_by": ["colour"]}, "evaluate.slice_by: 'colour' is not in prepare.extra_fields"),
        ({"evaluate.general_text.file": "nowhere.txt"}, "evaluate.general_text.file: file nowhere.txt not found"),
        ({"evaluate.harness.tasks": ["nothing"]}, "evaluate.harness.tasks: no task 'nothing'"),
    ):
        with pytest.raises(SettingsError, match=message):
            evaluated(cold, params_file.apply_changes(SETTINGS, change))
        assert not cold.evaluate.exists()
        assert not list(cold.scores.glob("*"))


def test_a_champion_of_another_base_needs_the_export(layout: ProjectLayout) -> None:
    keep_as_champion(layout, 1, with_adapter=False)
    shutil.rmtree(layout.export)
    with pytest.raises(
        DataError, match=r"the champion and anchor has another base or form and can only be scored as plain weights"
    ):
        evaluated(layout)


@pytest.mark.long
def test_a_sequential_gate_ends_the_evaluation_when_it_has_decided(
    layout: ProjectLayout, monkeypatch: pytest.MonkeyPatch, forwards: list[int]
) -> None:
    monkeypatch.setattr(evaluate, "MIN_LOOK_ROWS", 4)
    full = EvaluationReport.load(layout.eval_report)
    count = full.scores["candidate"].metrics["answer_loss"].n

    def run(*rules: dict[str, object]) -> EvaluationReport:
        return evaluated(layout, params_file.apply_changes(SETTINGS, {"gate.test": "sequential", "gate.rules": rules}))

    report = run({"rule": "budget", "resource": "size", "maximum": 2**40})  # needs no row
    assert report.remaining_rows == count - 4
    assert {scores.metrics["answer_loss"].n for scores in report.scores.values()} == {4}
    assert report.test_set_digest == full.test_set_digest, "the test set is that of all rows"
    rows = [row["id"] for row in base.read_lines(layout.evaluate / "rows.jsonl")]
    assert rows == sorted(rows)
    again = reading.read_evidence(layout, params_file.apply_changes(SETTINGS, {"gate.test": "sequential"}), {})
    assert again.test_set is not None
    assert {id for task, id in again.test_set.places if not task} > {*rows}

    undecided = {"rule": "at_least", "metric": "accuracy", "value": 0.01}  # by so few rows
    report = run(undecided)
    assert report.remaining_rows == 0
    assert {scores.metrics["answer_loss"].n for scores in report.scores.values()} == {count}
    forwards.clear()
    assert run(undecided) == report
    assert len(forwards) <= 4, "loading in 4 bits tries the model once at each look; all scores are found"
