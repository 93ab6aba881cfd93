"""Adapters exchanged on one base in memory compute what each computes on a base that was loaded for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor

import families
from ratchet.config_train import Train
from ratchet.errors import BaseModelError, DamagedError
from ratchet.model import adapter, quantized
from ratchet.model.device import Model

CPU = torch.device("cpu")
IDS = torch.randint(3, families.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5))
NEW = [int(IDS[0, 3]), 94]

ADAPTERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "lora": ({"rank": 4}, []),
    "narrow": ({"rank": 2, "alpha": 3, "targets": ["o_proj", "c_proj"]}, []),
    "dora": ({"rank": 3, "adapter": "dora"}, []),
    "tokens": ({"rank": 5}, NEW),
    "other tokens": ({"rank": 2, "rank_stabilized": True}, [7, 8, 9]),
    "embedding": ({"rank": 4, "targets": ["embed_tokens", "lm_head", "q_proj"]}, []),
    "experts": ({"rank": 4, "targets": ["down_proj", "gate_up_proj", "q_proj"]}, []),
}


def settings(quantization: str, changes: dict[str, Any]) -> Train:
    return Train.model_validate({"quantization": quantization, "alpha": 6, "dropout": 0.0, **changes})


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[str, str], Model]:
    """Loads a base, as if for the first time."""

    def make(family: str, quantization: str) -> Model:
        folder = tmp_path / family
        if not folder.exists():
            families.make(family).save_pretrained(folder)
        return quantized.load(folder, None, settings(quantization, {}), CPU)

    return make


def saved(base: Model, quantization: str, name: str, folder: Path) -> Path:
    """An adapter that does something, on disk."""
    changes, tokens = ADAPTERS[name]
    targets = changes.get("targets")
    if targets and name == "narrow":  # what the family has of them
        changes = changes | {"targets": [t for t in targets if any(n.endswith(t) for n, _ in base.named_modules())]}
    model = adapter.attach(base, settings(quantization, changes), "digest", tokens)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for _, parameter in adapter.trainable(model):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapter.save(model, folder, "digest")
    return folder


def logits(model: Model) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


CASES = [
    ("llama", "nf4", ["lora", "dora", "tokens", "narrow", "other tokens", "lora"]),
    ("llama-tied", "nf4", ["tokens", "dora", "other tokens", "narrow"]),
    ("gpt2", "nf4", ["dora", "tokens", "narrow"]),
    ("llama", "none", ["embedding", "lora", "dora"]),
    ("gemma3", "none", ["tokens", "lora"]),
    ("mixtral", "none", ["experts", "narrow", "experts"]),
    ("qwen3-moe", "none", ["experts", "tokens"]),
]


@pytest.mark.parametrize(("family", "quantization", "order"), CASES, ids=[f"{c[0]}-{c[1]}-{c[2][0]}" for c in CASES])
def test_each_computes_what_it_computes_on_a_base_of_its_own(
    fresh: Callable[[str, str], Model], tmp_path: Path, family: str, quantization: str, order: list[str]
) -> None:
    folders = {n: saved(fresh(family, quantization), quantization, n, tmp_path / n) for n in dict.fromkeys(order)}
    plain = logits(fresh(family, quantization))
    expected = {name: logits(adapter.load(fresh(family, quantization), folder)) for name, folder in folders.items()}
    model = adapter.load(fresh(family, quantization), folders[order[0]])
    for place, name in enumerate(order):
        if place:
            model = adapter.exchange(model, folders[name])
        assert not model.training
        assert not list(adapter.trainable(model))
        assert torch.equal(logits(model), expected[name]), name
        assert (expected[name] - plain).abs().max() > 1e-3
        with model.disable_adapter():
            assert torch.equal(logits(model), plain), name
        assert torch.equal(logits(model), expected[name]), name
    alone = adapter.load(fresh(family, quantization), folders[order[-1]])
    assert tensors(model) == tensors(alone)  # nothing of those before is left


def tensors(model: Model) -> dict[str, tuple[Any, ...]]:
    state = {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}
    layers = [n for n, m in model.named_modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    return state | {"layers": tuple(layers)}


def test_the_base_is_not_read_again(fresh: Callable[[str, str], Model], tmp_path: Path) -> None:
    folders = [saved(fresh("llama", "nf4"), "nf4", name, tmp_path / name) for name in ("lora", "dora")]
    model = adapter.load(fresh("llama", "nf4"), folders[0])
    name = "model.layers.0.self_attn.q_proj"
    before = model.get_base_model().get_submodule(name).get_base_layer()
    after = adapter.exchange(model, folders[1]).get_base_model().get_submodule(name).get_base_layer()
    assert after is before


@pytest.fixture
def loaded(tmp_path: Path) -> Model:
    return adapter.load(families.make("llama"), saved(families.make("llama"), "none", "lora", tmp_path / "own"))


def test_an_adapter_of_another_base_is_refused_and_nothing_is_taken_out(loaded: Model, tmp_path: Path) -> None:
    before = logits(loaded)
    other = saved(families.make("llama"), "none", "narrow", tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_bytes())
    (other / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "another-base-x"}))
    with pytest.raises(BaseModelError, match="is of base model another-base, the one that is loaded is digest"):
        adapter.exchange(loaded, other)
    assert torch.equal(logits(loaded), before)


def test_an_adapter_that_does_not_fit_is_refused_like_at_loading(loaded: Model, tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match="does not fit this base model"):
        adapter.exchange(loaded, saved(families.make("gpt2"), "none", "lora", tmp_path / "gpt2"))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_damaged_files_are_told_and_nothing_is_taken_out(loaded: Model, tmp_path: Path, name: str) -> None:
    before = logits(loaded)
    other = saved(families.make("llama"), "none", "narrow", tmp_path / "other")
    (other / name).write_bytes(b"{half")
    with pytest.raises(DamagedError, match=rf"{name}: cannot be read .*; train again"):
        adapter.exchange(loaded, other)
    assert torch.equal(logits(loaded), before)
