"""Tests of initial adapter weights from the base's files (LoftQ), from training rows (EVA), and by peft's formulas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

import families
from ratchet.config.train import Train
from ratchet.errors import SettingsError
from ratchet.models import adapters, initialization, loading, weights
from ratchet.models.adapter_format import ADAPTER, adapted_layers
from ratchet.models.base_model import BaseReference
from ratchet.models.device import Model

CPU = torch.device("cpu")
IDS = torch.randint(3, families.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5))


def make_model(path: Path, **changes: Any) -> Model:
    train = Train.model_validate({"rank": 4, "alpha": 6} | changes)
    return adapters.attach(loading.load(path, None, train, CPU), train, "digest")


def logits(model: Model) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_loftq_starts_closer_to_the_base_in_full_precision(
    saved_family: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    path = saved_family(family)
    full = logits(loading.load_plain(path, torch.float32, CPU))
    model = make_model(path, initialization="loftq")
    plain = {name: weights.dense_weight(layer) for name, layer in adapted_layers(model)}
    error = float((logits(model) - full).norm())
    initialization.correct_quantization(model, path)
    assert float((logits(model) - full).norm()) < 0.95 * error
    stored = weights.WeightReader(path).tensors()
    for factors in adapters.iterate_factors(model):
        original = stored[f"{factors.name}.weight"][:]
        residual = (original.T if family == "gpt2" else original) - plain[factors.name]
        best = torch.linalg.svdvals(residual)
        left = torch.linalg.norm(residual - (factors.b @ factors.a) * factors.scale)
        assert float(left) == pytest.approx(float(best[4:].norm()), rel=1e-3)  # no matrix of rank 4 is closer
    adapters.save(model, tmp_path, BaseReference("digest"))
    loaded = adapters.load(loading.load(path, None, Train(), CPU), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)


def test_loftq_needs_the_original_weights(saved_family: Callable[[str], Path]) -> None:
    model = make_model(saved_family("llama"), initialization="loftq")
    with pytest.raises(SettingsError, match=r"loftq compares each 4-bit weight .*gpt2 has none for model\."):
        initialization.correct_quantization(model, saved_family("gpt2"))


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_eva_takes_the_principal_components_of_the_inputs(
    saved_family: Callable[[str], Path], quantization: str
) -> None:
    path = saved_family("llama")
    model = make_model(path, initialization="eva", quantization=quantization, rank_pattern={"o_proj": 2})
    before = logits(model)
    inputs: dict[str, list[Tensor]] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, x, name=name: inputs.setdefault(name, []).append(x[0].flatten(0, -2)))
        for name, layer in adapted_layers(model)
    ]
    rows = [torch.randint(3, families.VOCABULARY, (length,)).tolist() for length in (9, 17, 24, 13)]
    initialization.explain_inputs(model, rows, CPU)
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(logits(model), before, rtol=0, atol=0)
    for name, layer in adapted_layers(model):
        a = layer.lora_A[ADAPTER].weight.detach()
        assert len(a) == (2 if name.endswith("o_proj") else 4)
        collected = torch.cat(inputs[name]).float()
        expected = torch.linalg.svd(collected - collected.mean(dim=0), full_matrices=False)[2][: len(a)]
        torch.testing.assert_close((a @ expected.T).abs(), torch.eye(len(a)), rtol=0, atol=1e-3)


def test_eva_with_fewer_tokens_than_ranks_is_refused(saved_family: Callable[[str], Path]) -> None:
    model = make_model(saved_family("llama"), initialization="eva", rank=8, quantization="none")
    with pytest.raises(
        SettingsError, match=r"has rank 8, and the training rows have 6 tokens; set a smaller train\.rank"
    ):
        initialization.explain_inputs(model, [[3, 4, 5], [6, 7, 8]], CPU)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_gaussian_and_orthogonal_matrices_have_the_shape_of_their_papers(
    saved_family: Callable[[str], Path], quantization: str
) -> None:
    for _, layer in adapted_layers(make_model(saved_family("llama"), initialization="gaussian", rank=16)):
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        assert float(a.detach().std()) == pytest.approx(1 / 16, rel=0.1)
        assert not b.any()
    model = make_model(saved_family("llama"), initialization="orthogonal", quantization=quantization)
    for _, layer in adapted_layers(model):
        a, b = layer.lora_A[ADAPTER].weight.detach(), layer.lora_B[ADAPTER].weight.detach()
        assert torch.linalg.matrix_rank(a) == torch.linalg.matrix_rank(b) == 2  # half the directions each
        assert float((b @ a).abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"initialization": "orthogonal", "rank": 5}, "splits the rank into halves; found rank 5"),
        ({"initialization": "orthogonal", "rank_pattern": {"q_proj": 3}}, "found rank 3; set an even one"),
        (
            {"initialization": "loftq", "quantization": "none"},
            "loftq needs 4-bit weights and train.adapter: lora, found",
        ),
        ({"initialization": "loftq", "adapter": "dora"}, "loftq needs 4-bit weights and train.adapter: lora, found"),
        ({"initialization": "eva", "adapter": "adalora", "adalora": {"target_rank": 2}}, "adalora has three"),
        ({"initialization": "eva", "init_adapter": "0123456789ab"}, "have no state of train.initialization: eva"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        Train.model_validate(settings)
