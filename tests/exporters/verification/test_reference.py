"""Tests that base + adapters, with weights and on some modules, equal sums computed here from peft's own merges."""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from ratchet.config.train import Train
from ratchet.errors import BaseModelError, DamagedFileError, SettingsError
from ratchet.exporters.merge import merger
from ratchet.exporters.merge.recipe import MergeBase, MergeRecipe, WeightedAdapter
from ratchet.exporters.verification import layers, reference
from ratchet.models import adapters as adapter
from ratchet.models import base_model, loading, scoring, vocabulary
from ratchet.models.base_model import BaseReference
from ratchet.models.device import Model
from ratchet.storage.records.base import BaseCard
from trained import CPU, ROWS, disturb, merged_by_peft, settings, write_adapter, write_base

WEIGHTS = (0.7, -0.4)


def with_tokenizer(base: Path) -> Path:
    words = {f"w{number}": number for number in range(96)}
    made = Tokenizer(models.WordLevel(words, "w0"))
    names = dict(zip(("eos_token", "pad_token", "unk_token"), ("w2", "w0", "w0"), strict=True))
    PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(base)
    return base


def adapters(
    folder: Path, base: Path, kinds: Sequence[Train], seed: int = 0, strength: float = 0.2
) -> list[WeightedAdapter]:
    """Write two adapters of these kinds; return them with the weights of these tests."""
    return [
        WeightedAdapter(write_adapter(folder / f"adapter{n}", base, kind, seed=seed + n, strength=strength), weight)
        for n, (kind, weight) in enumerate(zip(kinds, WEIGHTS, strict=True))
    ]


def recipe(base: Path, chosen: Train, parts: Sequence[WeightedAdapter], **changes: Any) -> MergeRecipe:
    card = BaseCard(
        source="here", revision=None, digest="base", files={}, architecture="", parameters=1, licence=None,
        added_tokens=changes.pop("added_tokens", ()),
    )  # fmt: skip
    wanted: dict[str, Any] = {
        "modules": (), "merge_base": "dequantized", "dtype": torch.float32, "device": CPU, "shard_bytes": 10**9
    } | changes  # fmt: skip
    return MergeRecipe(base=base, card=card, train=chosen, adapters=tuple(parts), **wanted)


def logits(model: Model) -> Tensor:
    return torch.cat(scoring.collect_logits(model, ROWS))


def summed(base: Path, chosen: Train, parts: Sequence[WeightedAdapter]) -> Model:
    """Compute W + sum w_i (merged_i - W) for every tensor, where merged_i is peft's own merge of one adapter."""
    (base.parent / "none").mkdir(exist_ok=True)
    nothing = base.parent / "none" / "adapter"
    if not nothing.exists():
        write_adapter(nothing, base, settings(), strength=0.0)
    bare = merged_by_peft(base, nothing, chosen)
    made = copy.deepcopy(bare)
    with torch.no_grad():
        for part in parts:
            alone = dict(merged_by_peft(base, part.adapter, chosen).named_parameters())
            own = dict(made.named_parameters())
            for name, was in bare.named_parameters():
                own[name] += part.weight * (alone[name] - was)
    return made


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_one_adapter_equals_the_trained_model_bit_for_bit(quantization: str, tmp_path: Path) -> None:
    base, chosen = with_tokenizer(write_base(tmp_path / "base", "llama")), settings(quantization=quantization)
    saved = write_adapter(tmp_path / "adapter", base, chosen)
    found = reference.load_adapted_model(recipe(base, chosen, [WeightedAdapter(saved)]))
    trained = adapter.load(loading.load(base, None, chosen, CPU), saved)
    assert torch.equal(logits(found), logits(trained))
    assert not any(parameter.requires_grad for parameter in found.parameters())
    with reference.disable_adapters(found):
        assert torch.equal(logits(found), logits(loading.load(base, None, chosen, CPU)))
    assert torch.equal(logits(found), logits(trained))


KINDS: dict[str, Sequence[dict[str, Any]]] = {
    "lora": ({}, {"rank": 7, "alpha": 3.0}),
    "ranks": ({"rank_pattern": {"q_proj|c_attn": 6}}, {"use_rslora": True}),
    "dora": ({"adapter": "dora"}, {"adapter": "dora", "rank": 2}),
    "dora-and-lora": ({"adapter": "dora"}, {"target_modules": "attention"}),
    "pissa": ({"initialization": "pissa"}, {}),
}


@pytest.mark.parametrize(("kind", "family"), [*((kind, "llama") for kind in KINDS), ("lora", "gpt2"), ("dora", "gpt2")])
def test_adapters_are_added_with_their_weights(kind: str, family: str, tmp_path: Path) -> None:
    quantization = "nf4" if kind in ("lora", "dora-and-lora") else "none"
    base = with_tokenizer(write_base(tmp_path / "base", family))
    kinds = [settings(quantization=quantization, **more) for more in KINDS[kind]]
    parts = adapters(tmp_path, base, kinds, seed=3)
    chosen = settings(quantization=quantization)
    model, oracle = reference.load_adapted_model(recipe(base, chosen, parts)), summed(base, chosen, parts)
    found = layers.check_merge(layers.record_activations(model, ROWS), oracle, torch.float32)
    assert found.adapter_effect > 0.01
    assert (logits(model) - logits(oracle)).abs().max() <= 1e-4


def test_adapters_of_fused_experts_are_added_with_their_weights(tmp_path: Path) -> None:
    base = with_tokenizer(write_base(tmp_path / "base", "mixtral"))
    chosen = settings(target_modules=["experts.gate_up_proj", "experts.down_proj", "q_proj"])
    parts = adapters(tmp_path, base, [chosen, chosen], strength=0.1)
    model, oracle = reference.load_adapted_model(recipe(base, chosen, parts)), summed(base, chosen, parts)
    assert layers.check_merge(layers.record_activations(model, ROWS), oracle, torch.float32).adapter_effect > 0.01
    alone = reference.load_adapted_model(recipe(base, chosen, [parts[0]]))
    assert (
        layers.check_merge(
            layers.record_activations(alone, ROWS), summed(base, chosen, [parts[0]]), torch.float32
        ).adapter_effect
        > 0.01
    )


@pytest.mark.parametrize("more", [{}, {"adapter": "dora"}], ids=["lora", "dora"])
@pytest.mark.parametrize(
    "patterns", [("q_proj", r".*\.layers\.1\.mlp\..*"), ("model.layers.0.mlp.up_proj",)], ids=["two", "one"]
)
def test_only_some_modules(patterns: tuple[str, ...], more: dict[str, Any], tmp_path: Path) -> None:
    base, chosen = with_tokenizer(write_base(tmp_path / "base", "llama")), settings(quantization="nf4", **more)
    part = WeightedAdapter(write_adapter(tmp_path / "adapter", base, chosen))
    wanted = recipe(base, chosen, [part], modules=patterns)
    oracle, whole = summed(base, chosen, []), summed(base, chosen, [part])
    with torch.no_grad():
        for name, module in oracle.named_modules():
            if wanted.includes(name) and isinstance(module, torch.nn.Linear):
                module.weight.copy_(whole.get_submodule(name).weight)
    model = reference.load_adapted_model(wanted)
    recording = layers.record_activations(model, ROWS)
    assert layers.check_merge(recording, oracle, torch.float32).adapter_effect > 0.01
    assert torch.cat(recording.base_logits).sub(torch.cat(recording.logits)).abs().max() > 0.01
    assert (logits(model) - logits(oracle)).abs().max() <= 1e-4, "bare() must not put taken adapters back"
    with pytest.raises(DamagedFileError, match="differs by"):
        layers.check_merge(recording, whole, torch.float32)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_rows_of_the_same_tokens_are_added(family: str, tmp_path: Path) -> None:
    base = with_tokenizer(write_base(tmp_path / "base", family))
    chosen, tokens = settings(), ("new0", "new1")
    card = recipe(base, chosen, [], added_tokens=tokens).card
    parts = []
    for number, weight in enumerate((0.5, 1.0)):
        model = loading.load(base, card, chosen, CPU)
        tokenizer = base_model.open_tokenizer(base)
        vocabulary.add_tokens(tokenizer, tokens)
        made = adapter.attach(model, chosen, "base", vocabulary.list_new_token_ids(tokenizer, card, model))
        disturb(made, seed=number)
        folder = tmp_path / f"adapter{number}"
        folder.mkdir()
        adapter.save(made, folder, BaseReference("base"))
        parts.append(WeightedAdapter(folder, weight))
    wanted = recipe(base, chosen, parts, added_tokens=tokens)
    found = reference.load_adapted_model(wanted)
    embedding = found.get_input_embeddings()
    ids = torch.tensor([[96, 97, 5]])
    bare = loading.load(base, card, chosen, CPU).get_input_embeddings()(ids)
    alone = [adapter.load(loading.load(base, card, chosen, CPU), p.adapter).get_input_embeddings()(ids) for p in parts]
    expected = bare + sum(p.weight * (one - bare) for p, one in zip(parts, alone, strict=True))
    assert (embedding(ids) - expected).abs().max() <= 1e-6
    assert (expected - bare).abs().max() > 0.05
    head = found.get_output_embeddings()
    assert (
        head(expected)[0, :, 96] != loading.load(base, card, chosen, CPU).get_output_embeddings()(expected)[0, :, 96]
    ).all()
    layers.record_activations(found, [[96, 5, 97, 4, 3]])


def made_elsewhere(base: Path, folder: Path, seed: int, chosen: Train | None = None, **more: Any) -> Path:
    """Write an adapter with peft alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie")
        model = get_peft_model(
            loading.load(base, None, chosen or settings(), CPU),
            LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **more),
        )
    disturb(model, seed)
    model.peft_config["default"].base_model_name_or_path = "base"
    model.save_pretrained(folder, save_embedding_layers=False)
    return folder


@pytest.mark.parametrize(
    "more",
    [{"modules_to_save": ["lm_head"]}, {"bias": "all"}, {"bias": "lora_only"}],
    ids=["head", "biases", "own-biases"],
)
def test_updates_of_foreign_adapters_are_added(more: dict[str, Any], tmp_path: Path) -> None:
    base, chosen = with_tokenizer(write_base(tmp_path / "base", "qwen2")), settings()
    parts = [
        WeightedAdapter(made_elsewhere(base, tmp_path / f"adapter{n}", n, **more), weight)
        for n, weight in enumerate(WEIGHTS)
    ]
    bare = logits(loading.load(base, None, chosen, CPU))
    for some in (parts[:1], parts):
        model = reference.load_adapted_model(recipe(base, chosen, some))
        assert (
            layers.check_merge(
                layers.record_activations(model, ROWS), summed(base, chosen, some), torch.float32
            ).adapter_effect
            > 0.01
        )
        with reference.disable_adapters(model):
            assert torch.equal(logits(model), bare)


def test_biases_of_an_adapter_are_recorded_in_float32_too(tmp_path: Path) -> None:
    base = with_tokenizer(write_base(tmp_path / "base", "qwen2"))
    chosen = settings(compute_dtype="bfloat16")
    part = WeightedAdapter(made_elsewhere(base, tmp_path / "adapter", 1, chosen, bias="all"))
    model = reference.compute_in_float32(reference.load_adapted_model(recipe(base, chosen, [part])))
    recording = layers.record_activations(model, ROWS)
    assert recording.dtype == torch.float32
    assert not torch.equal(torch.cat(recording.logits), torch.cat(recording.base_logits))


@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_the_original_base_has_the_weights_of_the_files(quantization: str, tmp_path: Path) -> None:
    base = with_tokenizer(write_base(tmp_path / "base", "llama"))
    chosen = settings(quantization=quantization, compute_dtype="bfloat16")
    part = WeightedAdapter(write_adapter(tmp_path / "adapter", base, chosen))
    found: dict[MergeBase, Tensor] = {}
    for kind in ("dequantized", "original"):
        found[kind] = logits(reference.load_adapted_model(recipe(base, chosen, [part]), kind))
    plain = adapter.load(loading.load_plain(base, torch.float32, CPU), part.adapter)
    assert (found["original"] - logits(plain)).abs().max() <= 1e-5
    assert (found["original"] - found["dequantized"]).abs().max() > 1e-3


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    base, chosen = with_tokenizer(write_base(tmp_path / "base", "llama")), settings()
    good = write_adapter(tmp_path / "good", base, chosen)
    wide = write_base(tmp_path / "wide", "llama", intermediate_size=160)
    other = write_adapter(tmp_path / "other", wide, chosen)
    deep = write_base(tmp_path / "deep", "llama", num_hidden_layers=3)
    deeper = write_adapter(tmp_path / "deeper", deep, chosen)
    for parts in (
        [WeightedAdapter(other)],
        [WeightedAdapter(good), WeightedAdapter(other)],
        [WeightedAdapter(good), WeightedAdapter(deeper)],
    ):
        with pytest.raises(BaseModelError, match=r"(other|deeper): the adapter (does not fit|cannot be combined)"):
            reference.load_adapted_model(recipe(base, chosen, parts))


def test_saved_modules_of_other_shapes_cannot_be_weighted(tmp_path: Path) -> None:
    base, chosen = with_tokenizer(write_base(tmp_path / "base", "qwen2")), settings()
    merge = recipe(
        base, chosen, [WeightedAdapter(made_elsewhere(base, tmp_path / "a", 1, modules_to_save=["lm_head"]))]
    )
    model = reference.load_adapted_model(merge)
    head = model.get_base_model().lm_head
    head.modules_to_save["default"].weight.data = torch.zeros(3, 3)
    with pytest.raises(SettingsError, match="whole Linear with another shape"):
        reference._combine_adapters(model, {"default": 0.5}, merge)


@pytest.mark.parametrize("merge_base", ["dequantized", "original"])
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_the_merge_equals_what_peft_computes(
    compute_dtype: Literal["float32", "bfloat16"], merge_base: MergeBase, tmp_path: Path
) -> None:
    """Forward passes of peft and sums over files share no code, but must give the same numbers."""
    base = with_tokenizer(write_base(tmp_path / "base", "llama"))
    chosen = settings(quantization="nf4", compute_dtype=compute_dtype)
    parts = adapters(tmp_path, base, [settings(adapter="dora"), settings(use_rslora=True)], strength=0.1)
    wanted = recipe(base, chosen, parts, merge_base=merge_base, modules=("mlp.up_proj", r".*layers\.1\.self_attn.*"))
    merger.merge_model(wanted, tmp_path / "merged", lambda *_: None)
    merged = loading.load_plain(tmp_path / "merged", torch.float32, CPU)
    model = reference.compute_in_float32(reference.load_adapted_model(wanted, merge_base))
    assert layers.check_merge(layers.record_activations(model, ROWS), merged, torch.float32).adapter_effect > 0.01
