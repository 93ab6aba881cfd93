"""Stage evaluate with the metrics that need more than an answer and its reference: instructions, context, encoder,
changed prompts."""

import json
from pathlib import Path

import pytest
import torch

import tiny_project
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import SettingsError
from ratchet.stages import evaluate, prepare
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import EvaluationReport

SETTINGS: Settings = params_file.apply_changes(
    tiny_project.SETTINGS,
    {
        "prepare.sources": ["data/raw/rows.jsonl"],
        "prepare.extra_fields": ["instruction_id_list", "kwargs", "context", "paraphrase"],
        "evaluate.harness.tasks": [],
        "evaluate.generation_rows": 12,
        "evaluate.latency_rows": 0,
        "evaluate.general_text.max_blocks": 4,
        "evaluate.metrics": ["ifeval", "faithfulness", "semantic_similarity"],
    },
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    """Create a project of which half of the rows have instructions, a context and another wording."""
    torch.set_num_threads(1)
    layout = tiny_project.prepared(tmp_path_factory.mktemp("answers") / "project")
    rows = [json.loads(line) for line in (layout.raw / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    for number, row in enumerate(rows):
        if number % 2:
            row["instruction_id_list"] = ["punctuation:no_comma", "keywords:existence"]
            row["kwargs"] = [{}, {"keywords": ["there is no such word"]}]
            row["context"] = "refund delivery"
            row["paraphrase"] = f"{row['request']} again"
    (layout.raw / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    prepare.prepare(Project.from_parts(layout, SETTINGS))
    tiny_project.adapted(layout, SETTINGS, strength=0.5)
    return layout


@pytest.fixture
def layout(made: ProjectLayout, monkeypatch: pytest.MonkeyPatch) -> ProjectLayout:
    monkeypatch.setattr(evaluate, "_log_to_mlflow", lambda *_: None)
    return made


@pytest.mark.long
def test_metrics_of_instructions_context_meaning_and_changed_prompts(layout: ProjectLayout) -> None:
    evaluate.evaluate(Project.from_parts(layout, SETTINGS))
    report = EvaluationReport.load(layout.eval_report)
    candidate = report.scores["candidate"]
    rows = base.read_lines(layout.evaluate / "rows.jsonl")
    answers = {line["id"]: line["answers"][0] for line in base.read_lines(layout.evaluate / "answers/candidate.jsonl")}

    def samples(metric: str) -> dict[str, float]:
        return {line["id"]: line["value"] for line in base.read_lines(layout.evaluate / candidate.samples[metric])}

    followed, found = samples("ifeval_prompt_strict"), candidate.metrics
    assert 0 < len(followed) < len(answers) == 12, "rows without instructions are left out"
    assert set(followed.values()) == {0.0} and found["ifeval_prompt_strict"].n == len(followed)
    expected = sum("," not in answers[row] and bool(answers[row]) for row in followed) / (2 * len(followed))
    assert found["ifeval_instruction_strict"].value == pytest.approx(expected)
    assert "ifeval_instruction_strict" not in candidate.samples
    assert set(samples("faithfulness_words")) == set(samples("semantic_similarity")) == set(answers)

    texts = {row["id"]: row["expected"].strip() for row in rows}
    similar = samples("semantic_similarity")
    for row, answer in answers.items():
        assert -1 - 1e-5 <= similar[row] <= 1 + 1e-5
        if answer == texts[row]:
            assert similar[row] == pytest.approx(1, abs=1e-5)
    chance = found["semantic_similarity"].chance
    assert chance is not None and chance < 1
    assert report.scores["base"].metrics["semantic_similarity"].chance == chance, "one encoder for all models"
    assert report.contracts[candidate.contract]["encoder"] == f"base {report.base_digest}"


def test_answers_to_changed_prompts_are_compared_row_by_row(layout: ProjectLayout) -> None:
    wanted = {"evaluate.metrics": ["token_f1", "length"], "evaluate.perturbations": ["typos", "paraphrase"]}
    evaluate.evaluate(Project.from_parts(layout, params_file.apply_changes(SETTINGS, wanted)))
    report = EvaluationReport.load(layout.eval_report)
    candidate = report.scores["candidate"]
    found = candidate.metrics

    def samples(metric: str) -> dict[str, float]:
        return {line["id"]: line["value"] for line in base.read_lines(layout.evaluate / candidate.samples[metric])}

    same, plain = samples("robustness/paraphrase/same_answer"), samples("accuracy")
    assert 0 < len(same) < 12, "rows without another wording are left out"
    assert len(samples("robustness/typos/same_answer")) == 12
    after = samples("robustness/typos/accuracy")
    change = found["robustness/typos/accuracy_change"]
    assert change.value == pytest.approx(sum(after[row] - plain[row] for row in after) / len(after))
    assert change.low <= change.value <= change.high and change.kind == "aggregate"
    names = {name.rpartition("/")[2] for name in found if name.startswith("robustness/typos/")}
    assert names == {"same_answer", "accuracy", "accuracy_change", "token_f1", "token_f1_change"}
    report = EvaluationReport.load(layout.eval_report)
    assert report.contracts[candidate.contract]["settings"]["perturbations"] == ["typos", "paraphrase"]


def test_an_encoder_of_the_user_and_refusals_before_anything_is_scored(
    layout: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path / "encoder"
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "refund", "delivery", "password", "invoice"]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    BertTokenizerFast(vocab=dict(zip(words, range(len(words)), strict=True))).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertModel(config).save_pretrained(folder)
    (folder / "1_Pooling").mkdir()
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({"pooling_mode_cls_token": True}), encoding="utf-8")

    def settings(**changes: object) -> Settings:
        plain = {"metrics": ["semantic_similarity"], "embedding_model": str(folder)}
        return params_file.apply_changes(SETTINGS, {f"evaluate.{k}": v for k, v in (plain | changes).items()})

    evaluate.evaluate(Project.from_parts(layout, settings()))
    report = EvaluationReport.load(layout.eval_report)
    first = report.scores["candidate"].metrics["semantic_similarity"]
    pooling.write_text(json.dumps({"pooling_mode_mean_tokens": True}), encoding="utf-8")
    evaluate.evaluate(Project.from_parts(layout, settings()))
    second = EvaluationReport.load(layout.eval_report)
    assert second.scores["candidate"].metrics["semantic_similarity"].chance != first.chance
    assert second.contracts.keys() != report.contracts.keys(), "another encoder is another contract"

    monkeypatch.setattr(evaluate, "_evaluate_models", None)
    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True}), encoding="utf-8")
    for changes, said in (
        ({}, "found pooling_mode_max_tokens; expected either"),
        ({"embedding_model": "nowhere"}, "found no config.json in .*nowhere"),
    ):
        with pytest.raises(SettingsError, match=said):
            evaluate.evaluate(Project.from_parts(layout, settings(**changes)))
