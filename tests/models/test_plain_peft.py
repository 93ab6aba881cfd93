"""Trained adapters load with plain peft, without Ratchet."""

from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM

import tiny_project
from ratchet.models import adapters, base_model, loading
from ratchet.models.device import Model
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard

PLAIN = tiny_project.SETTINGS.model_copy(
    update={"train": tiny_project.TRAIN.model_copy(update={"quantization": "none"})}
)
TOKENS = torch.tensor([[3, 40, 7, 19, 5, 11]])


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(TOKENS).logits.float()
    return result


def test_an_adapter_loads_in_the_directory_of_its_project(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ProjectLayout(tmp_path / "project")
    tiny_project.prepared(layout.root, PLAIN)
    tiny_project.adapted(layout, PLAIN)
    path = base_model.locate(layout, card := BaseCard.load(layout.base_card))
    base = loading.load(path, card, PLAIN.train, torch.device("cpu"))
    expected = logits(adapters.load(base, layout.adapter))
    assert not torch.allclose(expected, logits(AutoModelForCausalLM.from_pretrained(path)), atol=1e-3)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path), str(layout.adapter))
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)
    monkeypatch.chdir(layout.root)
    found = AutoPeftModelForCausalLM.from_pretrained("experiments/train/adapter")
    torch.testing.assert_close(logits(found), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("source", "revision", "converted", "name"),
    [
        ("org/name", "a" * 40, False, "org/name"),
        ("org/name", "a" * 40, True, "org/name"),
        ("models/base", None, False, "models/base"),
        ("models/base", None, True, "experiments/base/model"),
        ("tiny", None, False, "experiments/base/model"),
    ],
)
def test_an_adapter_names_its_base_as_peft_finds_it(
    source: str, revision: str | None, converted: bool, name: str
) -> None:
    card = BaseCard(
        source=source, revision=revision, digest="d" * 64, files={}, architecture="LlamaForCausalLM", parameters=1,
        licence=None, converted=converted,
    )  # fmt: skip
    assert base_model.refer_to(card) == base_model.BaseReference("d" * 64, name, revision)
