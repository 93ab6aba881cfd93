"""Merging from shards to shards: what is written is the trained model, to the last bit, for every kind of model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import in_memory
import small_bases as small
from merging_cases import (
    ROUNDING,
    check,
)
from ratchet.errors import SettingsError
from ratchet.merging import stream
from ratchet.model import quantized

ADAPTERS: dict[str, dict[str, Any]] = {
    "dora": {"adapter": "dora"},
    "dora-nf4": {"adapter": "dora", "quantization": "nf4"},
    "rank-stabilized": {"rank_stabilized": True, "alpha": 4},
    "patterns": {"rank_pattern": {"q_proj|c_attn": 7}, "alpha_pattern": {"down_proj|c_proj": 3.0}},
    "pissa": {"initialization": "pissa"},
    "adalora-nf4": {"adapter": "adalora", "rank": 6, "adalora": {"target_rank": 3}, "quantization": "nf4"},
    "bfloat16": {"quantization": "nf4", "compute_dtype": "bfloat16", "adapter_dtype": "bfloat16"},
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_of_adapter(kind: str, family: str, tmp_path: Path) -> None:
    base, chosen = small.write_base(tmp_path / "base", family), small.settings(**ADAPTERS[kind])
    saved = small.write_adapter(tmp_path / "adapter", base, chosen)
    wanted = small.recipe(base, saved, train=chosen)
    if kind != "bfloat16":
        check(wanted, tmp_path / "merged")
        return
    _, tensors, _ = small.merge(wanted, tmp_path / "merged")  # logits of bfloat16 are no measure
    for name, expected in in_memory.merged(small.trained(wanted)).items():
        assert torch.equal(tensors[name], expected), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_adapters_of_fused_experts_are_merged_and_written_expert_by_expert(family: str, tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", family)
    chosen = small.settings(targets=["experts.gate_up_proj", "experts.down_proj", "q_proj"])
    saved = small.write_adapter(tmp_path / "adapter", base, chosen)
    wanted = small.recipe(base, saved, train=chosen)
    _, tensors, _ = small.merge(wanted, tmp_path / "merged")
    live = small.trained(wanted)
    for name, expected in in_memory.merged(live).items():
        torch.testing.assert_close(tensors[name], expected)  # peft sums over experts in another order
    assert weight_map(tmp_path / "merged").keys() == weight_map(base).keys()


def test_a_model_without_attention(tmp_path: Path) -> None:
    base, chosen = small.write_base(tmp_path / "base", "mamba"), small.settings(targets=["in_proj", "x_proj"])
    check(
        small.recipe(base, small.write_adapter(tmp_path / "adapter", base, chosen), train=chosen), tmp_path / "merged"
    )


def test_code_that_the_base_brings_along_goes_with_the_merged_model(tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", "llama")
    (base / "modeling_mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\nclass MineConfig(LlamaConfig):\n"
        '    model_type = "mine"\n\n\nclass MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n'
    )
    held = json.loads((base / "config.json").read_text())
    named = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    (base / "config.json").write_text(json.dumps(held | {"model_type": "mine", "auto_map": named}))
    about, chosen = small.card(remote_code=True), small.settings(quantization="nf4")
    saved = small.write_adapter(tmp_path / "adapter", base, chosen, about)
    found = stream.merge(small.recipe(base, saved, train=chosen, card=about), tmp_path / "merged", lambda *_: None)
    assert found.streamed
    live = small.logits(small.trained(small.recipe(base, saved, train=chosen, card=about)))
    again = quantized.load_plain(tmp_path / "merged", torch.float32, small.CPU, remote_code=True)
    assert type(again).__name__ == "MineForCausalLM"
    assert (live - small.logits(again)).abs().max() <= ROUNDING


def weight_map(directory: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    return found


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored_as", ["nf4", "fp4"])
def test_every_way_of_storing_four_bits(stored_as: str, storage: str, tmp_path: Path) -> None:
    double = storage in ("uint8", "float16")
    chosen = small.settings(quantization=stored_as, quantization_storage=storage, double_quantization=double)
    base = small.write_base(tmp_path / "base", "llama", num_hidden_layers=1)
    check(
        small.recipe(base, small.write_adapter(tmp_path / "adapter", base, chosen), train=chosen), tmp_path / "merged"
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_base_that_is_quantised_on_disk(family: str, tmp_path: Path) -> None:
    plain, base = small.write_base(tmp_path / "plain", family), tmp_path / "base"
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    held = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=torch.float32)
    held.save_pretrained(base, max_shard_size=small.SHARD_BYTES)
    small.write_tokenizer(base)
    chosen = small.settings(quantization="nf4", double_quantization=True)
    saved = small.write_adapter(tmp_path / "adapter", base, chosen)
    check(small.recipe(base, saved, train=chosen), tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    with pytest.raises(SettingsError, match=r"export\.merge_base: original.*set export\.merge_base: dequantized"):
        stream.merge(small.recipe(base, saved, train=chosen, merge_base="original"), tmp_path / "no", lambda *_: None)
    assert not (tmp_path / "no").exists()


def test_a_base_that_was_quantised_from_bfloat16_is_merged_as_it_computes(tmp_path: Path) -> None:
    """bitsandbytes' kernel takes the type of the product, not the one that the checkpoint names."""
    plain, base = small.write_base(tmp_path / "plain", "llama"), tmp_path / "base"
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    held = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=torch.bfloat16)
    held.save_pretrained(base)
    small.write_tokenizer(base)
    chosen = small.settings(quantization="nf4", double_quantization=True, compute_dtype="float32")
    wanted = small.recipe(base, small.write_adapter(tmp_path / "adapter", base, chosen), train=chosen)
    _, _, merged = small.merge(wanted, tmp_path / "merged")
    assert (small.logits(merged) - small.logits(small.trained(wanted))).abs().max() < 1e-4


def test_sums_are_rounded_once_and_the_config_says_the_type(tmp_path: Path) -> None:
    base, chosen = small.write_base(tmp_path / "base", "llama-tied"), small.settings(quantization="nf4")
    saved = small.write_adapter(tmp_path / "adapter", base, chosen)
    _, exact, _ = small.merge(small.recipe(base, saved, train=chosen), tmp_path / "exact")
    for dtype in (torch.bfloat16, torch.float16):
        wanted = small.recipe(base, saved, train=chosen, dtype=dtype)
        _, rounded, model = small.merge(wanted, tmp_path / str(dtype))
        assert all(torch.equal(exact[name].to(dtype), one) for name, one in rounded.items())
        assert json.loads((tmp_path / str(dtype) / "config.json").read_text())["dtype"] == str(dtype)[6:]
        assert model.config.architectures == ["LlamaForCausalLM"]


def test_merged_into_the_original_base_it_is_another_model(tmp_path: Path) -> None:
    """Why what was trained against is the default: an adapter makes up for rounded weights."""
    base, chosen = small.write_base(tmp_path / "base", "llama"), small.settings(quantization="nf4")
    saved = small.write_adapter(tmp_path / "adapter", base, chosen)
    live = small.logits(small.trained(small.recipe(base, saved, train=chosen)))
    _, _, dequantized = small.merge(small.recipe(base, saved, train=chosen), tmp_path / "a")
    _, _, original = small.merge(small.recipe(base, saved, train=chosen, merge_base="original"), tmp_path / "b")
    far, near = ((live - small.logits(model)).abs().max() for model in (original, dequantized))
    assert far > 100 * near


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", "gemma2")
    saved = small.write_adapter(tmp_path / "adapter", base, small.settings())
    for name in ("a", "b"):
        small.merge(small.recipe(base, saved), tmp_path / name)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)


@pytest.mark.parametrize("prefix", ["without", "with"])
def test_a_checkpoint_without_the_prefix_of_its_class(prefix: str, tmp_path: Path) -> None:
    """As GPT-2's own on the hub: its tensors are named as those of the body alone."""
    from safetensors.torch import load_file, save_file

    base = small.write_base(tmp_path / "base", "gpt2", shard_bytes=10_000_000)
    if prefix == "without":
        tensors = load_file(base / "model.safetensors")
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        assert bare.keys().isdisjoint(tensors.keys())
        save_file(bare, base / "model.safetensors", metadata={"format": "pt"})
    chosen = small.settings(quantization="nf4")
    saved = small.write_adapter(tmp_path / "adapter", base, chosen)
    check(small.recipe(base, saved, train=chosen, shard_bytes=10_000_000), tmp_path / "merged")
    with safe_open(tmp_path / "merged" / "model.safetensors", framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        assert "transformer.h.0.attn.c_attn.weight" in tensors.keys()  # noqa: SIM118
    assert not (tmp_path / "merged" / "model.safetensors.index.json").exists()
