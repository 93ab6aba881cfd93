"""Tests that swapping adapters on one loaded base equals loading each on its own base."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor

import families
from ratchet.config.train import Train
from ratchet.errors import BaseModelError, DamagedFileError
from ratchet.models import adapters, base_model, loading
from ratchet.models.base_model import BaseReference
from ratchet.models.device import Model

CPU = torch.device("cpu")
IDS = torch.randint(3, families.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5))
NEW = [int(IDS[0, 3]), 94]

ADAPTERS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "lora": ({"rank": 4}, []),
    "narrow": ({"rank": 2, "alpha": 3, "target_modules": ["o_proj", "c_proj"]}, []),
    "dora": ({"rank": 3, "adapter": "dora"}, []),
    "tokens": ({"rank": 5}, NEW),
    "other tokens": ({"rank": 2, "use_rslora": True}, [7, 8, 9]),
    "embedding": ({"rank": 4, "target_modules": ["embed_tokens", "lm_head", "q_proj"]}, []),
    "experts": ({"rank": 4, "target_modules": ["down_proj", "gate_up_proj", "q_proj"]}, []),
}


def settings(quantization: str, changes: dict[str, Any]) -> Train:
    return Train.model_validate({"quantization": quantization, "alpha": 6, "dropout": 0.0, **changes})


@pytest.fixture
def fresh(saved_family: Callable[[str], Path]) -> Callable[[str, str], Model]:
    """Return a function that loads a new copy of a base."""

    def make(family: str, quantization: str) -> Model:
        return loading.load(saved_family(family), None, settings(quantization, {}), CPU)

    return make


def saved(base: Model, quantization: str, name: str, folder: Path) -> Path:
    """Save an adapter with random, nonzero weights."""
    changes, tokens = ADAPTERS[name]
    targets = changes.get("target_modules")
    if targets and name == "narrow":  # the modules that the family has
        changes = changes | {
            "target_modules": [t for t in targets if any(n.endswith(t) for n, _ in base.named_modules())]
        }
    model = adapters.attach(base, settings(quantization, changes), "digest", tokens)
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for _, parameter in adapters.trainable_parameters(model):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapters.save(model, folder, BaseReference("digest"))
    return folder


def logits(model: Model) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CANNOT = "{}: cannot be read .*; train again"
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
    expected = {name: logits(adapters.load(fresh(family, quantization), folder)) for name, folder in folders.items()}
    model = adapters.load(fresh(family, quantization), folders[order[0]])
    for place, name in enumerate(order):
        if place:
            model = adapters.swap(model, folders[name])
        assert not model.training
        assert not list(adapters.trainable_parameters(model))
        assert torch.equal(logits(model), expected[name]), name
        assert (expected[name] - plain).abs().max() > 1e-3
        with model.disable_adapter():
            assert torch.equal(logits(model), plain), name
        assert torch.equal(logits(model), expected[name]), name
    alone = adapters.load(fresh(family, quantization), folders[order[-1]])
    assert tensors(model) == tensors(alone)  # no weight of an earlier adapter is left


def tensors(model: Model) -> dict[str, tuple[Any, ...]]:
    state = {name: (tuple(t.shape), t.dtype) for name, t in model.state_dict().items()}
    layers = [n for n, m in model.named_modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    return state | {"layers": tuple(layers)}


def test_the_base_is_not_read_again(fresh: Callable[[str, str], Model], tmp_path: Path) -> None:
    folders = [saved(fresh("llama", "nf4"), "nf4", name, tmp_path / name) for name in ("lora", "dora")]
    model = adapters.load(fresh("llama", "nf4"), folders[0])
    name = "model.layers.0.self_attn.q_proj"
    before = model.get_base_model().get_submodule(name).get_base_layer()
    after = adapters.swap(model, folders[1]).get_base_model().get_submodule(name).get_base_layer()
    assert after is before


def renamed(folder: Path) -> None:
    """Make the adapter name another base."""
    path = folder / WEIGHTS
    save_file(load_file(path), path, metadata={base_model.BASE_DIGEST: "another-base-x"})


@pytest.mark.parametrize(
    ("family", "damage", "error", "message"),
    [
        ("llama", renamed, BaseModelError, "belongs to base model another-base, but base model digest is loaded"),
        ("gpt2", lambda _: None, BaseModelError, "does not fit this base model"),
        ("llama", lambda folder: (folder / CONFIG).write_bytes(b"{half"), DamagedFileError, CANNOT.format(CONFIG)),
        ("llama", lambda folder: (folder / WEIGHTS).write_bytes(b"{half"), DamagedFileError, CANNOT.format(WEIGHTS)),
    ],
    ids=["another base", "another family", "damaged config", "damaged weights"],
)
def test_an_adapter_that_cannot_be_taken_is_refused(
    tmp_path: Path, family: str, damage: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    model = adapters.load(families.make("llama"), saved(families.make("llama"), "none", "lora", tmp_path / "own"))
    before = logits(model)
    other = saved(families.make(family), "none", "narrow", tmp_path / "other")
    damage(other)
    with pytest.raises(error, match=message):
        adapters.swap(model, other)
    if family == "llama":  # the adapter stays until the files have been read
        assert torch.equal(logits(model), before)
