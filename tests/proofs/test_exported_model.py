"""Proves that the exported model equals the trained model and uses the same tokens and prompts as the training."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny_project
from ratchet.config.base import Base
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.data import tokenization as chat_template
from ratchet.data.conversation import Conversation
from ratchet.exporters import merged_model
from ratchet.models import adapter_format, adapters, base_model, loading
from ratchet.stages import evaluate, export
from ratchet.stages.project import Project
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.export import ModelBundle

PACKAGES = ("stages", "exporters")
ADDED = ("<ticket>", "number forty-two")
SETTINGS = tiny_project.SETTINGS.model_copy(update={"base": Base(tiny=tiny_project.TINY, added_tokens=ADDED)})
CPU = torch.device("cpu")


def train(layout: ProjectLayout, settings: Settings) -> dict[str, torch.Tensor]:
    """Write a trained adapter as stage train does. Return the learned rows of the new tokens."""
    tiny_project.adapted(layout, settings)
    base = BaseCard.load(layout.base_card)
    model = adapters.load(loading.load(base_model.locate(layout, base), base, settings.train, CPU), layout.adapter)
    return {name: rows for name, _, rows in adapter_format.token_rows(model)}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[ProjectLayout, dict[str, torch.Tensor]]:
    layout = tiny_project.prepared(tmp_path_factory.mktemp("project"), SETTINGS)
    return layout, train(layout, SETTINGS)


@pytest.fixture
def exported(project: tuple[ProjectLayout, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> ProjectLayout:
    monkeypatch.setattr(export, "_log_to_mlflow", lambda *_: None)  # logging to MLflow is slow and has its own tests
    export.export(Project.from_parts(project[0], SETTINGS))
    return project[0]


def files_in(directory: Path) -> dict[str, str]:
    return {path.name: digests.hash_file(path) for path in sorted(directory.iterdir())}


def test_the_exported_model_is_the_trained_one_with_its_tokens(
    exported: ProjectLayout, project: tuple[ProjectLayout, dict[str, torch.Tensor]]
) -> None:
    bundle = ModelBundle.load(exported.bundle)
    assert bundle.parity.max_logit_difference <= 1e-4
    assert bundle.parity.greedy_agreement == 1.0

    tokenizer = AutoTokenizer.from_pretrained(exported.merged_model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(exported.merged_model, local_files_only=True)
    ids = tokenizer.convert_tokens_to_ids(list(ADDED))
    assert tokenizer.encode("".join(ADDED), add_special_tokens=False) == ids
    assert model.config.vocab_size == len(tokenizer) == max(ids) + 1 == len(model.get_input_embeddings().weight)
    learned = project[1]
    assert learned
    for name, rows in learned.items():
        assert torch.equal(model.get_parameter(name)[ids], rows), name
    assert not hasattr(model.config, "quantization_config")


def test_its_tokenizer_asks_as_in_training(exported: ProjectLayout) -> None:
    row = token_files.open_split(exported.data, "test")[0]
    question = Conversation.from_json(row["conversation"]).context
    _, tokenizer = merged_model.reopen_model(exported.merged_model, torch.float32, CPU)
    asked = chat_template.encode_prompt(tokenizer, question)
    assert row["input_ids"][: len(asked)] == asked


def test_the_card_is_part_of_the_model_and_equal_inputs_give_equal_bytes(exported: ProjectLayout) -> None:
    first = files_in(exported.merged_model)
    card = (exported.merged_model / merged_model.MODEL_CARD).read_text(encoding="utf-8")
    assert all(f"`{token}`" in card for token in ADDED)
    assert str(exported.root) not in card
    bundle = ModelBundle.load(exported.bundle)
    assert [one.name for one in bundle.artifacts] == ["hf"]
    assert bundle.artifacts[0].digest == digests.hash_tree(exported.merged_model, sorted(first))
    export.export(Project.from_parts(exported, SETTINGS))
    assert files_in(exported.merged_model) == first
    assert ModelBundle.load(exported.bundle).model_digest == bundle.model_digest


def test_a_base_whose_head_is_its_embedding_is_measured_and_exported_with_new_tokens(
    project: tuple[ProjectLayout, dict[str, torch.Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tied weights, peft trains rows of one tensor in two modules. Code that ties the embeddings again must handle
    both modules."""
    tied = AutoModelForCausalLM.from_pretrained(project[0].tiny_model, tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(project[0].tiny_model).save_pretrained(tmp_path / "tied")
    settings = SETTINGS.model_copy(update={"base": Base(source=str(tmp_path / "tied"), added_tokens=ADDED)})
    layout = tiny_project.prepared(tmp_path / "project", settings)
    train(layout, settings)
    for stage in (evaluate, export):
        monkeypatch.setattr(stage, "_log_to_mlflow", lambda *_: None)
    export.export(Project.from_parts(layout, settings))
    evaluate.evaluate(Project.from_parts(layout, settings))
    candidate = EvaluationReport.load(layout.eval_report).scores["candidate"]
    assert candidate.metrics["harness/answers/exact_match.stripped"].n == 10
    assert ModelBundle.load(layout.bundle).parity.max_logit_difference <= 1e-4
    assert AutoModelForCausalLM.from_pretrained(layout.merged_model).config.tie_word_embeddings is True
