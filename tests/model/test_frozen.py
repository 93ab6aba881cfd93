"""Frozen weights as ordinary numbers; and that saving, loading and evaluating leave base and adapter as they are."""

from pathlib import Path
from typing import Any

import pytest
import torch

import families
from ratchet.config_train import Train
from ratchet.errors import BaseModelError
from ratchet.model import adapter, frozen, quantized, scoring
from ratchet.model.device import Model

CPU = torch.device("cpu")
ROWS = [list(range(3, 40)), list(range(50, 90))]


def settings(**changes: Any) -> Train:
    return Train(**{"rank": 4, "alpha": 16, "quantization": "none", **changes})


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Saves a tiny model of a family and gives its directory."""

    def save(family: str, **changes: Any) -> Path:
        model = families.make(family, **changes)
        with torch.no_grad():
            for parameter in model.parameters():  # large enough for an adapter to be seen, biases too
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
        model.save_pretrained(tmp_path / family)
        return tmp_path / family

    return save


def attached(directory: Path, chosen: Train) -> Model:
    """The base with an adapter that does something."""
    model = adapter.attach(quantized.load(directory, None, chosen, CPU), chosen, "base", steps=10)
    return disturb(model)


def disturb(model: Model) -> Model:
    """As if it had learned something."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapter.trainable(model):
            drawn = torch.randn(parameter.shape, generator=draw)
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * drawn.to(parameter.dtype))
            else:
                parameter.add_(drawn.to(parameter.dtype), alpha=0.2)
    return model.eval()


def test_the_weight_of_a_layer_is_outputs_by_inputs(saved: Any) -> None:
    made = families.make("gpt2").transformer.h[0].mlp.c_fc
    assert torch.equal(frozen.weight_of(made), made.weight.T)
    directory = saved("llama")
    layer = quantized.load(directory, None, settings(), CPU).model.layers[0].mlp.down_proj
    whole = frozen.weight_of(layer)
    assert whole.shape == (families.HIDDEN, families.INNER)
    pissa = adapter.attach(quantized.load(directory, None, settings(), CPU), settings(initialization="pissa"), "base")
    wrapped = pissa.get_base_model().model.layers[0].mlp.down_proj
    assert (wrapped.get_base_layer().weight - whole).abs().max() > 0.01
    torch.testing.assert_close(frozen.weight_of(wrapped), whole)


def test_a_weight_of_unknown_storage_is_refused() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(BaseModelError, match=r"stored as torch\.int8"):
        frozen.weight_of(layer)


def test_a_saved_adapter_comes_back_as_it_was(saved: Any, tmp_path: Path) -> None:
    directory, chosen = saved("llama"), settings(quantization="nf4")
    adapted = attached(directory, chosen)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        adapter.save(adapted, tmp_path / name, "digest of the base")
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    again = adapter.load(quantized.load(directory, None, chosen, CPU), tmp_path / "a")
    assert all(map(torch.equal, scoring.logits_of(adapted, ROWS), scoring.logits_of(again, ROWS)))


def test_four_bit_layers_keep_their_layout_in_evaluation_mode(saved: Any) -> None:
    """bitsandbytes repacks them for a kernel without gradient on some CPUs; gradients must survive an evaluation."""
    directory, chosen = saved("llama"), settings(quantization="nf4")
    model = adapter.attach(quantized.load(directory, None, chosen, CPU), chosen, "base")
    gradients = []
    for _ in range(2):
        model.train()
        model(input_ids=torch.tensor(ROWS[:1])).logits.square().mean().backward()
        gradients.append([p.grad.clone() for _, p in adapter.trainable(model) if p.grad is not None])
        model.zero_grad()
        scoring.logits_of(model.eval(), ROWS)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert any(g.abs().max() > 0 for g in gradients[0])
