"""Tests 4-bit base models: storage, devices, dtypes, and prequantized files."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit

import families
from ratchet.config.train import Train
from ratchet.errors import BaseModelError, SettingsError
from ratchet.models import adapters, loading, scoring
from ratchet.models.tiled_linear import TiledLinear4bit
from ratchet.models.weights import dense_weight

CPU = torch.device("cpu")
GPU = torch.device("cuda")
IDS = torch.tensor([[3, 17, 5, 90, 41]])
Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def llama(saved_family: Saved) -> Path:
    return saved_family("llama")


def linear(model: Any) -> list[Linear4bit]:
    return [module for module in model.modules() if isinstance(module, Linear4bit)]


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(IDS).logits
        return found


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float16", "float32"])
def test_layers_are_quantized_as_configured(llama: Path, kind: Any, double: bool, storage: Any) -> None:
    settings = Train(quantization=kind, double_quantization=double, quantization_storage=storage)
    model = loading.load(llama, None, settings, CPU)
    layers = linear(model)
    assert len(layers) == 14
    for layer in layers:
        assert layer.weight.dtype == getattr(torch, storage)
        assert layer.weight.quant_state.quant_type == kind
        assert layer.weight.quant_state.nested is double
        assert layer.compute_dtype == torch.float32
        assert layer.support_avx512bf16_for_cpu is False
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


def test_what_is_packed_makes_no_difference_to_the_numbers(llama: Path) -> None:
    found = [
        logits(loading.load(llama, None, Train(quantization_storage=storage), CPU)) for storage in ("uint8", "float32")
    ]
    assert torch.equal(*found)


def test_without_quantisation_every_weight_is_the_file_s(llama: Path) -> None:
    model = loading.load(llama, None, Train(quantization="none"), CPU)
    assert linear(model) == []
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(logits(model), logits(families.make("llama")))


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "bloom"])
def test_a_model_in_4_bits_is_recognised_and_loaded_as_it_is(tmp_path: Path, saved_family: Saved, family: str) -> None:
    first = loading.load(saved_family(family), None, Train(), CPU)
    first.save_pretrained(tmp_path)
    again = loading.load(tmp_path, None, Train(compute_dtype="bfloat16"), CPU)
    pairs = list(zip(linear(first), linear(again), strict=True))
    assert pairs
    for before, after in pairs:
        assert torch.equal(before.weight, after.weight)
        weights = [dequantize_4bit(layer.weight.data, layer.weight.quant_state) for layer in (before, after)]
        assert torch.equal(*weights)
        assert after.compute_dtype == torch.bfloat16
        assert after.support_avx512bf16_for_cpu is False
    assert not any(parameter.requires_grad for parameter in again.parameters())
    plain = {p.dtype for p in again.parameters() if not hasattr(p, "quant_state")}
    assert plain == {torch.bfloat16}
    assert torch.isfinite(logits(again)).all()


@pytest.fixture(scope="module")
def stored(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model in FP4 without double quantization."""
    directory = tmp_path_factory.mktemp("stored")
    settings = Train(quantization="fp4", double_quantization=False)
    loading.load(llama, None, settings, CPU).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Train(quantization="fp4"), "set train.double_quantization: false;"),
        (Train(double_quantization=False), "train.quantization: nf4, but"),
        (Train(quantization="none", double_quantization=False), "set train.quantization: fp4;"),
        (
            Train(quantization="fp4", double_quantization=False, quantization_storage="bfloat16"),
            "set train.quantization_storage: uint8;",
        ),
    ],
    ids=["double", "nf4", "none", "storage"],
)
def test_nothing_is_quantized_twice(stored: Path, settings: Train, words: str) -> None:
    with pytest.raises(SettingsError, match="already quantized") as caught:
        loading.load(stored, None, settings, CPU)
    assert words in str(caught.value)


def test_a_model_in_4_bits_has_no_plain_weights(stored: Path) -> None:
    with pytest.raises(BaseModelError, match="the stored weights are quantized"):
        loading.load_plain(stored, torch.float32, CPU)


@pytest.mark.parametrize(
    ("note", "method"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq"),
        ({"quant_method": "awq", "bits": 4}, "awq"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes 8 bits"),
        ({"bits": 3}, "an unnamed method"),
    ],
    ids=["gptq", "awq", "fp8", "8-bit", "unnamed"],
)
def test_other_quantisations_are_named_and_refused(
    tmp_path: Path, llama: Path, note: dict[str, Any], method: str
) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": note}))
    with pytest.raises(
        BaseModelError, match=rf"already quantized \({method}\).*use the model from before it was quantized"
    ):
        loading.load(tmp_path, None, Train(), CPU)


def test_falcon_is_stored_in_4_bits_though_its_linear_layers_are_a_class_of_their_own(saved_family: Saved) -> None:
    model = loading.load(saved_family("falcon"), None, Train(), CPU)
    assert {type(module) for name, module in model.named_modules() if name.endswith("query_key_value")} == {
        TiledLinear4bit
    }
    plain = loading.load(saved_family("falcon"), None, Train(quantization="none"), CPU)
    assert torch.allclose(logits(plain), logits(families.make("falcon")), atol=1e-5)
    assert not torch.equal(logits(model), logits(plain))


def test_a_model_that_cannot_compute_in_4_bits_fails_when_loaded(saved_family: Saved) -> None:
    """Mamba's mixers read the weights of their layers directly."""
    with pytest.raises(SettingsError, match=r"MambaForCausalLM does not compute with layers in 4 bits.*none"):
        loading.load(saved_family("mamba"), None, Train(), CPU)
    plain = loading.load(saved_family("mamba"), None, Train(quantization="none"), CPU)
    assert torch.equal(logits(plain), logits(families.make("mamba")))


def test_a_device_without_bitsandbytes_is_named(llama: Path) -> None:
    with pytest.raises(SettingsError, match=r"bitsandbytes cannot quantize to 4 bits on this mps.*quantization: none"):
        loading.load(llama, None, Train(), torch.device("mps"))


def test_an_encoder_decoder_is_refused(saved_family: Saved) -> None:
    with pytest.raises(BaseModelError, match="encoder-decoder; expected a causal language model"):
        loading.load(saved_family("t5"), None, Train(), CPU)


@pytest.mark.parametrize(
    ("native", "wanted", "found"),
    [
        (True, "auto", torch.bfloat16),
        (False, "auto", torch.float16),
        (False, "float32", torch.float32),
        (False, "float16", torch.float16),
    ],
    ids=["new-auto", "old-auto", "old-float32", "old-float16"],
)
def test_types_of_gpus(monkeypatch: pytest.MonkeyPatch, native: bool, wanted: str, found: torch.dtype) -> None:
    as_gpu(monkeypatch, native)
    assert loading.pick_dtype(wanted, GPU) == found
    loading.require_dtype(wanted, GPU)


def as_gpu(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Make torch report a Turing GPU, or, if `native`, native bfloat16. Turing only emulates bfloat16.

    torch counts emulated bfloat16 as supported.
    """
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))


def test_bfloat16_is_refused_where_it_is_only_emulated(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    as_gpu(monkeypatch, native=False)
    with pytest.raises(SettingsError, match=r"Tesla T4 \(compute capability 7\.5; .*\); set auto or float16"):
        loading.load(llama, None, Train(compute_dtype="bfloat16"), GPU)


@pytest.mark.parametrize("wanted", ["auto", "float32", "bfloat16", "float16"])
def test_types_of_cpus(llama: Path, wanted: Any) -> None:
    model = loading.load(llama, None, Train(compute_dtype=wanted), CPU)
    assert model.dtype == getattr(torch, "float32" if wanted == "auto" else wanted)
    assert {layer.compute_dtype for layer in linear(model)} == {model.dtype}


# ------------------------------------------------------------------------------------------------------- frozen weights

ROWS = [list(range(3, 40)), list(range(50, 90))]


def test_the_weight_of_a_layer_is_outputs_by_inputs() -> None:
    conv1d = families.make("gpt2").transformer.h[0].mlp.c_fc
    assert torch.equal(dense_weight(conv1d), conv1d.weight.T)
    model = families.make("llama")
    whole = dense_weight(model.model.layers[0].mlp.down_proj).clone()
    assert whole.shape == (families.HIDDEN, families.INNER)
    pissa = adapters.attach(model, Train(rank=4, alpha=16, quantization="none", initialization="pissa"), "base")
    wrapped = pissa.get_base_model().model.layers[0].mlp.down_proj
    assert (wrapped.get_base_layer().weight - whole).abs().max() > 0.01
    torch.testing.assert_close(dense_weight(wrapped), whole)


def test_a_weight_of_unknown_storage_is_refused() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(BaseModelError, match=r"found torch\.int8"):
        dense_weight(layer)


def test_four_bit_layers_keep_their_layout_in_evaluation_mode(llama: Path) -> None:
    """On some CPUs, bitsandbytes repacks the weights for a kernel without gradient. Gradients must survive that."""
    model = adapters.attach(loading.load(llama, None, Train(rank=4, alpha=16), CPU), Train(rank=4, alpha=16), "base")
    gradients = []
    for _ in range(2):
        model.train()
        model(input_ids=torch.tensor(ROWS[:1])).logits.square().mean().backward()
        gradients.append([p.grad.clone() for _, p in adapters.trainable_parameters(model) if p.grad is not None])
        model.zero_grad()
        scoring.collect_logits(model.eval(), ROWS)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert any(g.abs().max() > 0 for g in gradients[0])
