"""Merging, on tiny models of the real classes: the merged model is the one that was trained."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from ratchet.config_train import Train
from ratchet.model import adapter, merge, quantized, scoring
from ratchet.model.quantized import Model

SHAPE = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip
SETTINGS = Train(rank=4, alpha=16, targets=["q_proj", "v_proj", "down_proj"])
ROWS = [list(range(3, 40)), list(range(90, 150))]
CPU = torch.device("cpu")


@pytest.fixture(params=["llama", "qwen2"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config: PretrainedConfig = {"llama": LlamaConfig, "qwen2": Qwen2Config}[request.param](**SHAPE)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapted(directory: Path) -> Model:
    """A 4-bit base with an adapter that does something."""
    model = adapter.attach(quantized.load(directory, SETTINGS, CPU), SETTINGS, "base")
    with torch.no_grad():
        for _, parameter in adapter.trainable(model):
            parameter.normal_(std=0.2)
    return model.eval()


def greatest_difference(a: Model, b: Model) -> float:
    labels = [[-100, *row[1:]] for row in ROWS]
    return scoring.compare_logits(scoring.logits_of(a, ROWS), b, ROWS, labels).greatest


def test_merged_into_the_dequantized_base_it_is_the_trained_model(adapted: Model, directory: Path) -> None:
    merged = merge.merge(adapted, directory, "dequantized", torch.float32)
    assert greatest_difference(adapted, merged) < 1e-3
    assert not [name for name, _ in merged.named_modules() if "lora" in name]
    with adapted.disable_adapter():
        assert greatest_difference(adapted, merged) > 0.1, "a merge that changes nothing would pass as well"


def test_merged_into_the_original_base_it_is_another_model(adapted: Model, directory: Path) -> None:
    """Why `dequantized` is the default: what was trained against are the rounded weights."""
    original = merge.merge(adapted, directory, "original", torch.float32)
    assert greatest_difference(adapted, original) > 100 * greatest_difference(
        adapted, merge.merge(adapted, directory, "dequantized", torch.float32)
    )


def test_a_saved_adapter_comes_back_as_it_was(adapted: Model, directory: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        adapter.save(adapted, tmp_path / name, "digest of the base")
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    again = adapter.load(quantized.load(directory, SETTINGS, CPU), tmp_path / "a")
    assert greatest_difference(adapted, again) == 0.0


def test_four_bit_layers_keep_their_layout_in_evaluation_mode(directory: Path) -> None:
    """bitsandbytes repacks them for a kernel without gradient on some CPUs; gradients must survive an evaluation."""
    model = adapter.attach(quantized.load(directory, SETTINGS, CPU), SETTINGS, "base")
    gradients = []
    for _ in range(2):
        model.train()
        model(input_ids=torch.tensor(ROWS[:1])).logits.square().mean().backward()
        gradients.append([p.grad.clone() for _, p in adapter.trainable(model) if p.grad is not None])
        model.zero_grad()
        scoring.logits_of(model.eval(), ROWS)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert any(g.abs().max() > 0 for g in gradients[0])
