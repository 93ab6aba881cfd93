"""Tests several adapters, weights, a subset of modules, tied heads, and adapters made with peft alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import families
import small_bases as small
from merging_cases import ROUNDING
from ratchet.errors import BaseModelError, SettingsError
from ratchet.exporters.merge import merger, model_files
from ratchet.exporters.merge.model_files import UnknownNamesError
from ratchet.exporters.merge.recipe import WeightedAdapter
from ratchet.models import loading

Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def tensors_of(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Write a base with a LoRA and a DoRA adapter."""
    folder = tmp_path_factory.mktemp("two")
    base = small.write_base(folder / "base", "llama")
    one = small.write_adapter(folder / "one", base, small.settings())
    other = small.write_adapter(
        folder / "other", base, small.settings(adapter="dora", target_modules=["q_proj"]), seed=4
    )
    return base, one, other


def test_adapters_are_summed_with_their_weights(two: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, one, other = two
    before = tensors_of(base)
    parts = (WeightedAdapter(one, 0.5), WeightedAdapter(other, -2.0))
    found, both, _ = small.merge(small.recipe(base, *parts), tmp_path / "both")
    _, first, _ = small.merge(small.recipe(base, one), tmp_path / "first")
    _, second, _ = small.merge(small.recipe(base, other), tmp_path / "second")
    for name in (Q, DOWN):
        expected = before[name] + 0.5 * (first[name] - before[name]) - 2.0 * (second[name] - before[name])
        torch.testing.assert_close(both[name], expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(both[name], before[name], atol=1e-2)
    assert torch.equal(second[DOWN], before[DOWN])  # the second adapter changes q_proj only
    assert found.changed == 14
    _, zero, _ = small.merge(small.recipe(base, WeightedAdapter(one, 0.0)), tmp_path / "zero")
    assert all(torch.equal(zero[name], tensor) for name, tensor in before.items())


def test_only_the_named_modules_are_merged(two: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, one, _ = two
    _, every, _ = small.merge(small.recipe(base, one), tmp_path / "every")
    before = tensors_of(base)
    for number, pattern in enumerate(("q_proj", "self_attn.q_proj", r"model\.layers\.\d+\.self_attn\.q_.*")):
        found, some, _ = small.merge(small.recipe(base, one, modules=(pattern,)), tmp_path / str(number))
        assert found.changed == 2, pattern
        for name, tensor in some.items():
            assert torch.equal(tensor, (every if "q_proj" in name else before)[name]), (pattern, name)


@pytest.mark.parametrize(
    ("number", "modules", "said"),
    [
        (1, ("o_proj", "q_porj"), r"'q_porj' matches no module .* closest names: q_proj"),
        (2, ("mlp.down_proj",), r"'mlp\.down_proj' matches no .* updated modules: self_attn\.q_proj"),
        (1, ("(",), r"found '\('; expected a module name or a regular expression"),
    ],
    ids=["misspelt", "without adapter", "broken"],
)
def test_a_pattern_that_matches_nothing_is_refused_with_close_names(
    number: int, modules: tuple[str, ...], said: str, two: tuple[Path, Path, Path]
) -> None:
    with pytest.raises(SettingsError, match=r"export\.modules: " + said):
        merger.merged_size_bytes(small.recipe(two[0], two[number], modules=modules))


# ---------------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("merge_base", ["dequantized", "original"])
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_a_head_that_differs_from_the_embeddings_is_untied(
    kind: str, target: str, merge_base: str, tmp_path: Path
) -> None:
    """Ratchet's adapters leave tied embeddings unchanged, but peft's may change them."""
    base = small.write_base(tmp_path / "base", "llama-tied")
    if kind == "full":
        words: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": [target]}
    else:
        words = {"target_modules": [target], "use_dora": kind == "dora"}
    live = small.write_foreign(tmp_path / "adapter", base, embeddings=kind != "full", r=4, **words)
    wanted = small.recipe(base, tmp_path / "adapter", merge_base=merge_base)
    found, tensors, model = small.merge(wanted, tmp_path / "merged")
    assert found.is_streamed
    assert not found.is_tied
    assert not model.config.tie_word_embeddings
    assert not torch.equal(tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])
    assert (small.logits(live) - small.logits(model)).abs().max() <= ROUNDING


@pytest.mark.parametrize("stored", ["head", "both", "apart"])
def test_files_may_store_a_tied_head_in_several_ways(stored: str, tmp_path: Path) -> None:
    """The config declares tied weights; the files may have either name, both, or, wrongly, two different tensors."""
    base = small.write_base(tmp_path / "base", "llama-tied", shard_bytes=10_000_000)
    tensors = load_file(base / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.flip(0).clone() if stored == "apart" else embedding.clone()
    if stored == "head":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    wanted = small.adapted(tmp_path / "adapter", base, small.settings())
    found, merged, model = small.merge(wanted, tmp_path / "merged")
    assert found.is_streamed
    assert found.is_tied == (stored != "apart")
    assert torch.equal(merged["lm_head.weight"], tensors["lm_head.weight"])
    assert torch.equal(merged["model.embed_tokens.weight"], embedding)
    assert (small.logits(small.trained(wanted)) - small.logits(model)).abs().max() <= ROUNDING


# ------------------------------------------------------------------------------------------------------- rows of tokens


@pytest.mark.parametrize("size", [94, 96], ids=["padded", "grown"])
@pytest.mark.parametrize(
    ("family", "merge_base"),
    [("gemma2", "dequantized"), ("gpt2", "dequantized"), ("llama", "dequantized"), ("opt", "original")],
)
def test_rows_of_new_tokens_are_merged(family: str, size: int, merge_base: str, tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", family)
    small.write_tokenizer(base, size)  # 94: the tokens reuse two rows of padding; 96: two rows are added
    about = small.card(added_tokens=("<one>", "<two>"))
    chosen = small.settings(quantization="nf4")
    wanted = small.adapted(tmp_path / "adapter", base, chosen, about, merge_base=merge_base)
    found, _, model = small.merge(wanted, tmp_path / "merged")
    live = small.trained(wanted)
    assert model.config.vocab_size == max(size + 2, families.VOCABULARY)
    assert found.is_tied == (family != "llama")
    rows = live.get_base_model().get_input_embeddings().token_adapter.trainable_tokens_delta["default"]
    assert torch.equal(model.get_input_embeddings().weight[size : size + 2], rows)
    if merge_base == "dequantized":
        asked = [[5, size, 7, size + 1, 9], [size + 1, 4]]
        assert (small.logits(live, asked) - small.logits(model, asked)).abs().max() <= ROUNDING


def test_new_rows_that_are_not_merged_are_initialized_as_in_training(tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", "llama")
    about, chosen = small.card(added_tokens=("t5 t6",)), small.settings()
    saved = small.write_adapter(tmp_path / "adapter", base, chosen, about)
    untrained = loading.load(base, about, chosen, small.CPU)
    for merge_base in ("dequantized", "original"):
        wanted = small.recipe(base, saved, card=about, modules=("q_proj",), merge_base=merge_base)
        _, tensors, _ = small.merge(wanted, tmp_path / merge_base)
        assert len(tensors["lm_head.weight"]) == families.VOCABULARY + 1
        assert torch.equal(tensors["lm_head.weight"], untrained.lm_head.weight)
        assert torch.equal(tensors["model.embed_tokens.weight"], untrained.model.embed_tokens.weight)


# ---------------------------------------------------------------------------------------- adapters made with peft alone


@pytest.mark.parametrize(
    ("words", "changed"),
    [({"bias": "all"}, 16), ({"bias": "lora_only"}, 4), ({"lora_bias": True}, 4)],
    ids=["all", "of adapted layers", "of the thin matrices"],
)
def test_trained_biases_are_merged(words: dict[str, Any], changed: int, tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", "phi")
    live = small.write_foreign(tmp_path / "adapter", base, r=4, target_modules=["q_proj", "fc1"], **words)
    _, tensors, model = small.merge(small.recipe(base, tmp_path / "adapter"), tmp_path / "merged")
    assert (small.logits(live) - small.logits(model)).abs().max() <= ROUNDING
    before = tensors_of(base)
    found = [name for name, tensor in tensors.items() if name.endswith("bias") and not tensor.equal(before[name])]
    assert len(found) == changed


def test_a_trained_bias_for_a_layer_without_bias_is_refused(tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", "llama")
    small.write_foreign(tmp_path / "adapter", base, r=4, target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(BaseModelError, match=r"has a bias for model\.layers\.0\.self_attn\.q_proj \(lora_bias\)"):
        merger.merged_size_bytes(small.recipe(base, tmp_path / "adapter"))


def test_fully_trained_modules_are_merged(tmp_path: Path) -> None:
    base = small.write_base(tmp_path / "base", "llama")
    live = small.write_foreign(
        tmp_path / "adapter", base, r=4, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens", "mlp"]
    )
    found, tensors, model = small.merge(small.recipe(base, tmp_path / "adapter"), tmp_path / "merged")
    assert found.changed == 2 + 2 + 6
    assert (small.logits(live) - small.logits(model)).abs().max() <= ROUNDING
    half = small.recipe(base, WeightedAdapter(tmp_path / "adapter", 0.5))
    _, halves, _ = small.merge(half, tmp_path / "half")
    before = tensors_of(base)
    torch.testing.assert_close(halves["lm_head.weight"], (before["lm_head.weight"] + tensors["lm_head.weight"]) / 2)


# --------------------------------------------------------------------------------------------------- whole-model merges


@pytest.mark.parametrize(
    ("family", "merge_base"),
    [("gemma2", "dequantized"), ("gpt2", "dequantized"), ("llama", "original"), ("mixtral", "original")],
)
def test_unmappable_names_are_merged_in_memory(
    family: str, merge_base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, about = small.write_base(tmp_path / "base", family), small.card(added_tokens=("t5 t6",))
    chosen = small.settings(quantization="nf4")
    wanted = small.adapted(tmp_path / "adapter", base, chosen, about, merge_base=merge_base)
    streamed, _, _ = small.merge(wanted, tmp_path / "streamed")

    def strange(*_: object) -> None:
        raise UnknownNamesError("two tensors would have one name")

    monkeypatch.setattr(model_files, "stored_names", strange)
    found = merger.merge_model(wanted, tmp_path / "whole", lambda *_: None)
    assert not found.is_streamed
    assert (found.changed, found.is_tied) == (streamed.changed, streamed.is_tied)
    whole = tensors_of(tmp_path / "whole")
    assert whole.keys() == tensors_of(tmp_path / "streamed").keys()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors_of(tmp_path / "streamed").items())
    assert (
        abs(merger.merged_size_bytes(wanted) - sum(f.stat().st_size for f in (tmp_path / "whole").iterdir())) < 20_000
    )
    texts = [(tmp_path / name / "config.json").read_text() for name in ("streamed", "whole")]
    assert json.loads(texts[0]) == json.loads(texts[1])
