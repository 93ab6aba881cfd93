"""Tests the check of a merge: correct merges pass in every family; for wrong ones, the error names the module."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import families
from ratchet.config.train import Train
from ratchet.errors import DamagedFileError
from ratchet.exporters.verification import layers, reference
from ratchet.models import adapters, loading
from ratchet.models.device import Model
from trained import CPU, ROWS, merged_by_peft, settings, write_adapter, write_base

TARGETS: dict[str, Any] = {"mamba": {"target_modules": ["in_proj", "x_proj"]}}


class Made:
    """Holds a base, an adapter, the recording of both, and the merged model."""

    def __init__(self, folder: Path, family: str, chosen: Train, strength: float = 0.2, **changes: Any) -> None:
        self.base = write_base(folder / "base", family, **changes)
        self.adapter = write_adapter(folder / "adapter", self.base, chosen, strength=strength)
        self.chosen = chosen
        self.recording = layers.record_activations(self.adapted(), ROWS)
        self.merged = merged_by_peft(self.base, self.adapter, chosen)

    def adapted(self) -> Model:
        return adapters.load(loading.load(self.base, None, self.chosen, CPU), self.adapter)


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("llama"), "llama", settings(quantization="nf4"))


@pytest.fixture
def llama(made_once: Made) -> Made:
    """Return the same with a copy of the merged model, which the test may damage."""
    own = copy.copy(made_once)
    own.merged = copy.deepcopy(made_once.merged)
    return own


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_a_correct_merge_passes_in_every_family(family: str, tmp_path: Path) -> None:
    plain = {"quantization": "none"} if family == "mamba" else {"quantization": "nf4"}
    made = Made(tmp_path, family, settings(**plain, **TARGETS.get(family, {})))
    found = layers.check_merge(made.recording, made.merged, torch.float32)
    assert found.layers == families.LAYERS
    assert found.modules >= 10
    assert found.tolerance == layers.SUM_TOLERANCE
    assert len(found.worst) == layers.LISTED_MODULES
    assert all(one.max_difference <= found.tolerance * one.scale for one in found.worst)
    ratios = [one.max_difference / one.scale for one in found.worst]
    assert ratios == sorted(ratios, reverse=True)
    assert found.adapter_effect > 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_a_merge_in_half_precision_passes_within_its_rounding(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = Made(tmp_path, family, settings(quantization="nf4"), strength=0.05)
    found = layers.check_merge(made.recording, made.merged.to(dtype), dtype)
    assert found.tolerance == pytest.approx(layers.SUM_TOLERANCE + 4 * torch.finfo(dtype).eps)
    # The difference is real: it would exceed the tolerance of float32.
    assert found.worst[0].max_difference > layers.SUM_TOLERANCE * found.worst[0].scale
    with torch.no_grad():
        name, leaf = next(
            (name, one) for name, one in made.merged.named_modules() if name.endswith((".o_proj", ".c_proj"))
        )
        leaf.weight *= 1.1
    with pytest.raises(DamagedFileError, match=rf"{name} differs"):
        layers.check_merge(made.recording, made.merged, dtype)


def weight(merged: Model, name: str) -> torch.Tensor:
    return merged.get_submodule(name).weight


def swap_layers(merged: Model) -> None:
    first, second = merged.model.layers
    merged.model.layers = nn.ModuleList([second, first])


UP, QUERY = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj"
GATE, NORM = "model.layers.1.mlp.gate_proj", "model.layers.1.post_attention_layernorm"
FAULTS: dict[str, tuple[Callable[[Model], Any], str]] = {
    "a little off": (lambda model: weight(model, UP).add_(2e-3 * weight(model, UP).abs().mean()), f"{UP} differs"),
    "transposed": (lambda model: weight(model, QUERY).copy_(weight(model, QUERY).T.clone()), f"{QUERY} differs"),
    "another norm": (lambda model: weight(model, NORM)[5].mul_(1.01), f"{NORM} differs"),
    "other embeddings": (lambda model: model.model.embed_tokens.weight.mul_(1.001), r"model\.embed_tokens differs"),
    "another head": (lambda model: model.lm_head.weight[7].add_(0.01), "lm_head differs"),
    "another rotation": (
        lambda model: model.model.rotary_emb.inv_freq.mul_(1.01),
        r"for the same input, model\.layers\.[01] differs",
    ),
    "swapped layers": (swap_layers, r"model\.layers\.[01]\..* differs .* other modules differ"),
    "NaN": (lambda model: weight(model, GATE)[3, 4].fill_(float("nan")), f"{GATE} differs by nan"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_deviating_module_is_named(fault: str, llama: Made) -> None:
    change, said = FAULTS[fault]
    layers.check_merge(llama.recording, llama.merged, torch.float32)
    with torch.no_grad():
        change(llama.merged)
    with pytest.raises(DamagedFileError, match=said):
        layers.check_merge(llama.recording, llama.merged, torch.float32)


def test_an_adapter_that_is_missing_in_one_layer_is_named(llama: Made) -> None:
    bare = loading.load_plain(llama.base, torch.float32, CPU)
    llama.merged.model.layers[1].self_attn.o_proj = bare.model.layers[1].self_attn.o_proj
    with pytest.raises(DamagedFileError, match=r"model\.layers\.1\.self_attn\.o_proj differs"):
        layers.check_merge(llama.recording, llama.merged, torch.float32)


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_merge_that_equals_the_base_is_refused(quantization: str, tmp_path: Path) -> None:
    chosen = settings(quantization=quantization)
    made = Made(tmp_path, "llama", chosen)
    (tmp_path / "nothing").mkdir()
    nothing = write_adapter(tmp_path / "nothing" / "adapter", made.base, chosen, strength=0.0)
    base = merged_by_peft(made.base, nothing, chosen)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(DamagedFileError, match="the merged model equals the base"):
            layers.check_merge(made.recording, base.to(dtype), dtype)


def test_a_wrong_scaling_is_refused(tmp_path: Path) -> None:
    """The merge reads rsLoRA's alpha / sqrt(rank) as alpha / rank, which halves the update."""
    made = Made(tmp_path, "llama", settings(use_rslora=True))
    config = made.adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_rslora": true', '"use_rslora": false'))
    wrong = merged_by_peft(made.base, made.adapter, made.chosen)
    with pytest.raises(DamagedFileError, match=r"differs by .* other modules differ"):
        layers.check_merge(made.recording, wrong, torch.float32)


def test_an_adapter_without_effect_is_reported_and_accepted(tmp_path: Path) -> None:
    made = Made(tmp_path, "llama", settings(quantization="nf4"), strength=0.0)
    assert layers.check_merge(made.recording, made.merged, torch.float32).adapter_effect == 0.0


def test_errors_in_fused_experts_are_found_by_their_layer(tmp_path: Path) -> None:
    made = Made(tmp_path, "mixtral", settings(target_modules=["experts.gate_up_proj", "experts.down_proj"]))
    assert layers.check_merge(made.recording, made.merged, torch.float32).adapter_effect > 0.01
    with torch.no_grad():
        made.merged.model.layers[1].mlp.experts.down_proj *= 1.01
    with pytest.raises(DamagedFileError, match=r"for the same input, model\.layers\.1 differs"):
        layers.check_merge(made.recording, made.merged, torch.float32)


def test_a_layer_is_compared_with_the_change_that_it_makes(tmp_path: Path) -> None:
    """Features a thousand times as large as the others, as in large models, do not hide an error."""
    made = Made(tmp_path, "mixtral", settings(target_modules=["experts.down_proj"]))
    with torch.no_grad():
        for model in (plain := made.merged, adapted := made.adapted()):
            model.get_input_embeddings().weight[:, 3] = 500.0
        recording = layers.record_activations(adapted, ROWS)
        layers.check_merge(recording, plain, torch.float32)
        plain.model.layers[0].mlp.experts.down_proj *= 1.01
    with pytest.raises(DamagedFileError, match=r"model\.layers\.0 differs"):
        layers.check_merge(recording, plain, torch.float32)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_hidden_layers": 1}, r"has no module model\.layers\.1\.\w+"),
        ({"num_hidden_layers": 3}, r"has 3 layers; expected 2"),
        ({"vocab_size": 100}, r"has 100 logits; expected 96"),
        ({"intermediate_size": 160}, r"mlp\.\w+.*(rejects the recorded input|160\) in the merged model)"),
    ],
    ids=["fewer-layers", "more-layers", "more-tokens", "wider"],
)
def test_a_model_of_another_shape_is_refused(changes: dict[str, Any], text: str, llama: Made) -> None:
    other = families.make("llama", **changes)
    mine = llama.merged.state_dict()
    with torch.no_grad():
        for name, tensor in other.state_dict().items():
            if name in mine and mine[name].shape == tensor.shape:
                tensor.copy_(mine[name])
    with pytest.raises(DamagedFileError, match=text):
        layers.check_merge(llama.recording, other, torch.float32)


def test_base_and_adapter_that_compute_nan_are_refused(llama: Made) -> None:
    adapted = llama.adapted()
    with torch.no_grad():
        adapted.get_base_model().model.layers[1].input_layernorm.weight[0] = float("inf")
    with pytest.raises(DamagedFileError, match=r"model\.layers\.1\.input_layernorm: base \+ adapter computes NaN"):
        layers.record_activations(adapted, ROWS)


def test_a_model_loaded_from_disk_passes(llama: Made, tmp_path: Path) -> None:
    llama.merged.save_pretrained(tmp_path / "merged")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in read.state_dict().items()}
    layers.check_merge(llama.recording, read, torch.float32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in read.state_dict().items())


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_training_in_bfloat16_is_checked_in_float32(quantization: str, tmp_path: Path) -> None:
    made = Made(tmp_path, "llama", settings(quantization=quantization, compute_dtype="bfloat16"), strength=0.05)
    assert layers.check_merge(made.recording, made.merged, torch.float32).tolerance > 0.03
    sharp = layers.record_activations(reference.compute_in_float32(made.adapted()), ROWS)
    assert layers.check_merge(sharp, made.merged, torch.float32).tolerance == layers.SUM_TOLERANCE
    with torch.no_grad():
        made.merged.model.layers[0].mlp.down_proj.weight *= 1.005
    layers.check_merge(made.recording, made.merged, torch.float32)  # the rounding of bfloat16 hides the error
    with pytest.raises(DamagedFileError, match=r"model\.layers\.0\.mlp\.down_proj differs"):
        layers.check_merge(sharp, made.merged, torch.float32)
