"""Tests that merging shard by shard writes the trained model bit for bit, for every kind of model."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import plain_merge
import small_bases as small
from merging_cases import ROUNDING, check
from ratchet.errors import SettingsError
from ratchet.exporters.merge import merger
from ratchet.models import loading

ADAPTERS: dict[str, dict[str, Any]] = {
    "dora": {"adapter": "dora"},
    "dora-nf4": {"adapter": "dora", "quantization": "nf4"},
    "rank-stabilized": {"use_rslora": True, "alpha": 4},
    "patterns": {"rank_pattern": {"q_proj|c_attn": 7}, "alpha_pattern": {"down_proj|c_proj": 3.0}},
    "pissa": {"initialization": "pissa"},
    "adalora-nf4": {"adapter": "adalora", "rank": 6, "adalora": {"target_rank": 3}, "quantization": "nf4"},
    "bfloat16": {"quantization": "nf4", "compute_dtype": "bfloat16", "adapter_dtype": "bfloat16"},
}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_kind_of_adapter(kind: str, family: str, tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", family)
    wanted = small.adapted(tmp_path / "adapter", base, small.settings(**ADAPTERS[kind]))
    if kind != "bfloat16":
        check(wanted, tmp_path / "merged")
        return
    _, tensors, _ = small.merge(wanted, tmp_path / "merged")  # bfloat16 logits are too coarse to compare
    for name, expected in plain_merge.merged(small.trained(wanted)).items():
        assert torch.equal(tensors[name], expected), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_adapters_of_fused_experts_are_merged_and_written_expert_by_expert(family: str, tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", family)
    chosen = small.settings(target_modules=["experts.gate_up_proj", "experts.down_proj", "q_proj"])
    wanted = small.adapted(tmp_path / "adapter", base, chosen)
    _, tensors, _ = small.merge(wanted, tmp_path / "merged")
    for name, expected in plain_merge.merged(small.trained(wanted)).items():
        torch.testing.assert_close(tensors[name], expected)  # peft sums over experts in another order
    assert weight_map(tmp_path / "merged").keys() == weight_map(base).keys()


def test_a_model_without_attention(tmp_path: Path) -> None:
    base, chosen = small.write_base(tmp_path / "base", "mamba"), small.settings(target_modules=["in_proj", "x_proj"])
    check(small.adapted(tmp_path / "adapter", base, chosen), tmp_path / "merged")


def test_code_of_the_base_is_copied_to_the_merged_model(tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", "llama")
    (base / "modeling_mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n\n\nclass MineConfig(LlamaConfig):\n"
        '    model_type = "mine"\n\n\nclass MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n'
    )
    named = {"AutoConfig": "modeling_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    edit = {"model_type": "mine", "auto_map": named}
    (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | edit))
    chosen = small.settings(quantization="nf4")
    wanted = small.adapted(tmp_path / "adapter", base, chosen, small.card(remote_code=True))
    assert merger.merge_model(wanted, tmp_path / "merged", lambda *_: None).is_streamed
    live = small.logits(small.trained(wanted))
    again = loading.load_plain(tmp_path / "merged", torch.float32, small.CPU, remote_code=True)
    assert type(again).__name__ == "MineForCausalLM"
    assert (live - small.logits(again)).abs().max() <= ROUNDING


def weight_map(directory: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    return found


@pytest.mark.parametrize("storage", ["uint8", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("stored_as", ["nf4", "fp4"])
def test_every_4_bit_storage_format(stored_as: str, storage: str, tmp_path: Path) -> None:
    double = storage in ("uint8", "float16")
    chosen = small.settings(quantization=stored_as, quantization_storage=storage, double_quantization=double)
    base = small.write_base(tmp_path / "base", "llama", num_hidden_layers=1)
    check(small.adapted(tmp_path / "adapter", base, chosen), tmp_path / "merged")


def quantised_base(folder: Path, family: str, dtype: torch.dtype) -> Path:
    """Write a base quantized from weights of this type, in several files."""
    plain = small.write_base(folder / "plain", family)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    held = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=dtype)
    held.save_pretrained(folder / "base", max_shard_size=small.SHARD_BYTES)
    small.write_tokenizer(folder / "base")
    return folder / "base"


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_base_that_is_quantised_on_disk(family: str, tmp_path: Path) -> None:
    base = quantised_base(tmp_path, family, torch.float32)
    wanted = small.adapted(tmp_path / "adapter", base, small.settings(quantization="nf4", double_quantization=True))
    check(wanted, tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    with pytest.raises(SettingsError, match=r"export\.merge_base: found original.*set export\.merge_base: dequantized"):
        merger.merge_model(replace(wanted, merge_base="original"), tmp_path / "no", lambda *_: None)
    assert not (tmp_path / "no").exists()


def test_a_base_that_was_quantised_from_bfloat16_is_merged_as_it_computes(tmp_path: Path) -> None:
    """bitsandbytes' kernel uses the type of the product, not the type named in the checkpoint."""
    base = quantised_base(tmp_path, "llama", torch.bfloat16)
    chosen = small.settings(quantization="nf4", double_quantization=True, compute_dtype="float32")
    wanted = small.adapted(tmp_path / "adapter", base, chosen)
    _, _, merged = small.merge(wanted, tmp_path / "merged")
    assert (small.logits(merged) - small.logits(small.trained(wanted))).abs().max() < 1e-4


def test_sums_are_rounded_once_and_the_config_names_the_type(tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", "llama-tied")
    wanted = small.adapted(tmp_path / "adapter", base, small.settings(quantization="nf4"))
    _, exact, _ = small.merge(wanted, tmp_path / "exact")
    for dtype in (torch.bfloat16, torch.float16):
        _, rounded, model = small.merge(replace(wanted, dtype=dtype), tmp_path / str(dtype))
        assert all(torch.equal(exact[name].to(dtype), one) for name, one in rounded.items())
        assert json.loads((tmp_path / str(dtype) / "config.json").read_text())["dtype"] == str(dtype)[6:]
        assert model.config.architectures == ["LlamaForCausalLM"]


def test_merged_into_the_original_base_it_is_another_model(tmp_path: Path) -> None:
    """The trained weights are the default for this reason: an adapter compensates for rounded weights."""
    base = small.write_base(tmp_path / "base", "llama")
    wanted = small.adapted(tmp_path / "adapter", base, small.settings(quantization="nf4"))
    live = small.logits(small.trained(wanted))
    _, _, dequantized = small.merge(wanted, tmp_path / "a")
    _, _, original = small.merge(replace(wanted, merge_base="original"), tmp_path / "b")
    far, near = ((live - small.logits(model)).abs().max() for model in (original, dequantized))
    assert far > 100 * near


def test_equal_inputs_give_equal_bytes(tmp_path: Path) -> None:
    wanted = small.adapted(tmp_path / "adapter", small.write_base(tmp_path / "base", "gemma2"), small.settings())
    for name in ("a", "b"):
        small.merge(wanted, tmp_path / name)
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("a", "b"))
    assert a == b


@pytest.mark.parametrize("prefix", ["without", "with"])
def test_a_checkpoint_without_the_prefix_of_its_class(prefix: str, tmp_path: Path) -> None:
    """GPT-2's checkpoint on the hub names its tensors like those of the bare body."""
    base = small.write_base(tmp_path / "base", "gpt2", shard_bytes=10_000_000)
    if prefix == "without":
        tensors = load_file(base / "model.safetensors")
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        assert bare.keys().isdisjoint(tensors.keys())
        save_file(bare, base / "model.safetensors", metadata={"format": "pt"})
    chosen = small.settings(quantization="nf4")
    check(small.adapted(tmp_path / "adapter", base, chosen, shard_bytes=10_000_000), tmp_path / "merged")
    with safe_open(tmp_path / "merged" / "model.safetensors", framework="pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        assert "transformer.h.0.attn.c_attn.weight" in tensors.keys()  # noqa: SIM118
    assert not (tmp_path / "merged" / "model.safetensors.index.json").exists()
