"""Merging, on tiny models of the real classes: the merged model is the one that was trained."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from ratchet.config_train import Train
from ratchet.errors import BaseModelError, SettingsError
from ratchet.model import adapter, factors, merge, quantized, scoring, vocabulary
from ratchet.model.quantized import Model

CPU = torch.device("cpu")
ROWS = [list(range(3, 40)), list(range(50, 90))]
ROUNDING = 1e-4
"""Greatest difference of a logit that float32 sums in another order may make."""


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


def greatest_difference(a: Model, b: Model, rows: list[list[int]] | None = None) -> float:
    rows = rows or ROWS
    labels = [[-100, *row[1:]] for row in rows]
    return scoring.compare_logits(scoring.logits_of(a, rows), b, rows, labels).greatest


def reopened(model: Model, directory: Path) -> Model:
    model.save_pretrained(directory)
    return quantized.load_plain(directory, torch.float32, CPU)


def check(adapted: Model, directory: Path, tmp_path: Path, within: float = ROUNDING) -> Model:
    """That the merged model, in memory and from disk, is the adapted one, and that the adapter matters."""
    merged = merge.merge(adapted, directory, "dequantized", torch.float32)
    assert greatest_difference(adapted, merged) <= within
    assert greatest_difference(adapted, reopened(merged, tmp_path / "merged")) <= within
    assert not [name for name, _ in merged.named_modules() if "lora" in name or name.endswith("base_layer")]
    assert not [name for name, module in merged.named_modules() if isinstance(module, Linear4bit)]
    with adapted.disable_adapter():
        assert greatest_difference(adapted, merged) > 100 * within, "a merge that changes nothing would pass as well"
    return merged


@pytest.mark.parametrize("family", sorted(families.FAMILIES.keys() - {"mamba"}))
def test_merged_it_is_the_trained_model(family: str, saved: Any, tmp_path: Path) -> None:
    quantization = "nf4" if family in ("gemma2", "gpt2", "llama-tied", "mixtral", "opt", "qwen3") else "none"
    directory = saved(family)
    adapted = attached(directory, settings(quantization=quantization))
    merged = check(adapted, directory, tmp_path)
    assert merged.config.tie_word_embeddings == adapted.config.tie_word_embeddings
    before = {name: tensor.shape for name, tensor in families.make(family).state_dict().items()}
    assert {name: tensor.shape for name, tensor in merged.state_dict().items()} == before


ADAPTERS = {
    "dora": {"adapter": "dora"},
    "dora-nf4": {"adapter": "dora", "quantization": "nf4"},
    "rank-stabilized": {"rank_stabilized": True},
    "patterns": {"rank_pattern": {"q_proj|c_attn": 7}, "alpha_pattern": {"down_proj|c_proj": 3.0}},
    "pissa": {"initialization": "pissa"},
    "adalora": {"adapter": "adalora", "rank": 6, "adalora": {"target_rank": 3}},
    "adalora-nf4": {"adapter": "adalora", "rank": 6, "adalora": {"target_rank": 3}, "quantization": "nf4"},
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_of_adapter_merges_live_and_from_disk(kind: str, family: str, saved: Any, tmp_path: Path) -> None:
    directory, chosen = saved(family), settings(**ADAPTERS[kind])
    live = attached(directory, chosen)
    merged = check(live, directory, tmp_path)
    (tmp_path / "adapter").mkdir()
    adapter.save(live, tmp_path / "adapter", "base")
    loaded = adapter.load(quantized.load(directory, None, chosen, CPU), tmp_path / "adapter")
    again = check(loaded, directory, tmp_path)
    assert greatest_difference(merged, again) <= ROUNDING


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_adapters_of_fused_experts_are_merged(family: str, saved: Any, tmp_path: Path) -> None:
    directory = saved(family)
    adapted = attached(directory, settings(targets=["experts.gate_up_proj", "experts.down_proj"]))
    assert all(found.a.dim() == 3 for found in factors.factors(adapted))
    check(adapted, directory, tmp_path)


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored_as", ["nf4", "fp4"])
def test_every_way_of_storing_four_bits(stored_as: str, storage: str, saved: Any, tmp_path: Path) -> None:
    directory = saved("llama")
    double = storage in ("uint8", "float16")
    chosen = settings(quantization=stored_as, quantization_storage=storage, double_quantization=double)
    check(attached(directory, chosen), directory, tmp_path)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_head_that_is_no_longer_the_embeddings_is_untied(kind: str, target: str, saved: Any, tmp_path: Path) -> None:
    """Our own adapters leave tied embeddings alone, but peft's need not."""
    directory = saved("llama-tied")
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=[target], use_dora=kind == "dora")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie")
        adapted = get_peft_model(quantized.load(directory, None, settings(), CPU), config)
    disturb(adapted)
    merged = check(adapted, directory, tmp_path)
    original = merge.merge(adapted, directory, "original", torch.float32)
    assert greatest_difference(merged, original) <= ROUNDING
    assert not merged.config.tie_word_embeddings
    assert not original.config.tie_word_embeddings


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "llama", "opt"])
@pytest.mark.parametrize(
    ("more", "quantization"), [(0, "none"), (3, "none"), (3, "nf4")], ids=["padded", "grown", "nf4"]
)
def test_rows_of_new_tokens_are_merged(family: str, more: int, quantization: str, saved: Any, tmp_path: Path) -> None:
    directory, chosen = saved(family), settings(quantization=quantization)
    model = quantized.load(directory, None, chosen, CPU)
    size = families.VOCABULARY + more
    vocabulary.grow(model, size, {size - 1: [3, 4], size - 2: [5]})
    adapted = adapter.attach(model, chosen, "base", [size - 2, size - 1])
    disturb(adapted)
    rows = [[5, size - 1, 7, size - 2, 9], [size - 2, 4]]
    for merge_base in ("dequantized", "original"):
        merged = merge.merge(adapted, directory, merge_base, torch.float32)
        assert merged.config.vocab_size == size == len(merged.get_input_embeddings().weight)
        assert merged.config.tie_word_embeddings == adapted.config.tie_word_embeddings
        if merge_base == "dequantized" or quantization == "none":
            assert greatest_difference(adapted, merged, rows) <= ROUNDING
            assert greatest_difference(adapted, reopened(merged, tmp_path / merge_base), rows) <= ROUNDING


def test_merged_into_the_original_base_it_is_another_model(saved: Any) -> None:
    """Why `dequantized` is the default: what was trained against are the rounded weights."""
    directory = saved("llama")
    adapted = attached(directory, settings(quantization="nf4"))
    original = merge.merge(adapted, directory, "original", torch.float32)
    assert greatest_difference(adapted, original) > 100 * greatest_difference(
        adapted, merge.merge(adapted, directory, "dequantized", torch.float32)
    )
    plain = attached(directory, settings())
    assert greatest_difference(plain, merge.merge(plain, directory, "original", torch.float32)) <= ROUNDING


@pytest.fixture
def stored_in_four_bits(saved: Any, tmp_path: Path) -> Iterator[Path]:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    model = AutoModelForCausalLM.from_pretrained(saved("llama"), quantization_config=config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "four")
    yield tmp_path / "four"


def test_a_base_that_is_quantised_on_disk_has_no_original_weights(stored_in_four_bits: Path, tmp_path: Path) -> None:
    chosen = settings(quantization="nf4", double_quantization=True)
    adapted = attached(stored_in_four_bits, chosen)
    merged = check(adapted, stored_in_four_bits, tmp_path)
    assert not hasattr(merged.config, "quantization_config")
    with pytest.raises(SettingsError, match=r"export\.merge_base: original.*set export\.merge_base: dequantized"):
        merge.merge(adapted, stored_in_four_bits, "original", torch.float32)


def test_sums_are_rounded_once(saved: Any) -> None:
    directory = saved("llama")
    adapted = attached(directory, settings(quantization="nf4"))
    exact = merge.merge(adapted, directory, "dequantized", torch.float32)
    rounded = merge.merge(adapted, directory, "dequantized", torch.bfloat16)
    for (name, a), (_, b) in zip(exact.named_parameters(), rounded.named_parameters(), strict=True):
        assert b.dtype == torch.bfloat16, name
        assert torch.equal(a.to(torch.bfloat16), b), name


def test_the_adapted_model_is_not_changed(saved: Any) -> None:
    directory = saved("gpt2")
    adapted = attached(directory, settings(adapter="dora"))
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    merge.merge(adapted, directory, "dequantized", torch.float16)
    after = adapted.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_weight_of_a_layer_is_outputs_by_inputs(saved: Any) -> None:
    made = families.make("gpt2").transformer.h[0].mlp.c_fc
    assert torch.equal(merge.weight_of(made), made.weight.T)
    directory = saved("llama")
    layer = quantized.load(directory, None, settings(), CPU).model.layers[0].mlp.down_proj
    whole = merge.weight_of(layer)
    assert whole.shape == (families.HIDDEN, families.INNER)
    pissa = adapter.attach(quantized.load(directory, None, settings(), CPU), settings(initialization="pissa"), "base")
    wrapped = pissa.get_base_model().model.layers[0].mlp.down_proj
    assert (wrapped.get_base_layer().weight - whole).abs().max() > 0.01
    torch.testing.assert_close(merge.weight_of(wrapped), whole)


def test_a_weight_of_unknown_storage_is_refused() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    layer.weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(BaseModelError, match=r"stored as torch\.int8"):
        merge.weight_of(layer)


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
    assert greatest_difference(adapted, again) == 0.0


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
