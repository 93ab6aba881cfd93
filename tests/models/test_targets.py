"""Tests that train.target_modules is interpreted as in peft, and invalid values are refused before loading."""

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from families import FAMILIES, LAYERS, T5, make
from ratchet.config.train import Train
from ratchet.errors import BaseModelError, SettingsError
from ratchet.models import model_spec, targets
from ratchet.models.model_spec import LayerSpec, ModelSpec

ADAPTABLE = [family for family in FAMILIES if family != "mamba"]


def of(family: str, **changes: Any) -> ModelSpec:
    return model_spec.from_config(FAMILIES[family](**changes))


def leaves(layers: tuple[LayerSpec, ...]) -> set[str]:
    return {layer.name.rsplit(".", 1)[-1] for layer in layers}


def attached(family: str, chosen: tuple[LayerSpec, ...], settings: Train) -> Any:
    """Return the family's real model with peft's own adapters on these layers."""
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=[layer.name for layer in chosen if layer.kind != "experts"],
        target_parameters=[layer.name for layer in chosen if layer.kind == "experts"] or None,
        rank_pattern=settings.rank_pattern,
        alpha_pattern=settings.alpha_pattern,
        fan_in_fan_out=any(layer.kind == "conv1d" for layer in chosen),
    )
    return get_peft_model(make(family), config)


@pytest.mark.parametrize("family", ADAPTABLE)
def test_groups_take_attention_mlp_or_both_and_peft_adapts_exactly_those(family: str) -> None:
    made = of(family)
    attention, mlp, both = (targets.choose(made.layers, group) for group in ("attention", "mlp", "all"))
    assert {layer.role for layer in attention} == {"attention"}
    assert {layer.role for layer in mlp} == {"mlp"}
    assert set(both) == {*attention, *mlp}
    assert [layer for layer in made.layers if layer in both] == list(both)
    adapted = {
        name.removeprefix("base_model.model.").split(".lora_A")[0]
        for name, _ in attached(family, both, Train(rank=2)).named_parameters()
        if "lora_A" in name
    }
    modules = {layer.name for layer in both if layer.kind != "experts"}
    assert {name for name in adapted if "experts" not in name} == modules
    holders = {layer.name.rsplit(".", 1)[0] for layer in both if layer.kind == "experts"}
    assert {name.split(".base_layer")[0] for name in adapted if "experts" in name} == holders


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (["q_proj", "v_proj"], {"q_proj", "v_proj"}),
        (["self_attn.o_proj"], {"o_proj"}),
        (["model.layers.0.mlp.up_proj"], {"up_proj"}),
        (r".*\.(up|down)_proj", {"up_proj", "down_proj"}),
        (r"model\.layers\.1\.self_attn\..*", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (["lm_head"], {"lm_head"}),
        (["embed_tokens", "q_proj"], {"embed_tokens", "q_proj"}),
    ],
    ids=["leaves", "dotted", "full", "regex", "regex-one-layer", "head-by-name", "embedding-by-name"],
)
def test_names_and_expressions(wanted: str | list[str], expected: set[str]) -> None:
    made = of("llama")
    assert leaves(targets.choose(made.layers, wanted, made.others)) == expected


def test_a_full_name_is_one_layer_and_an_expression_matches_whole_names() -> None:
    made = of("llama")
    name = "model.layers.1.mlp.up_proj"
    assert [layer.name for layer in targets.choose(made.layers, [name])] == [name]
    assert len(targets.choose(made.layers, r".*layers\.1\..*")) == 7


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt-neox", "mpt"])
def test_a_misspelt_name_is_refused_with_the_nearest(family: str) -> None:
    made = of(family)
    leaf = min(leaves(targets.choose(made.layers, "attention")))
    wrong = leaf[:-1] + "x"
    with pytest.raises(SettingsError) as refused:
        targets.choose(made.layers, [leaf, wrong], made.others)
    message = str(refused.value)
    assert message.startswith(f"train.target_modules: {wrong}: the model has no module with this name; nearest: ")
    assert leaf in message
    assert message.endswith("groups: attention, mlp, all")


@pytest.mark.parametrize(
    ("family", "wanted", "said"),
    [
        ("llama", r".*\.q_prj", r"nearest: .*q_proj.*for module names, use a list: \[\.\*\\\.q_prj\]"),
        ("llama", "(q", r"train\.target_modules: \(q: not a regular expression"),
        ("llama", "q_proj", "neither a group"),
        # As in peft, a name in a list matches whole components: `up_proj` does not match gate_up_proj.
        ("phi3", ["up_proj"], r"up_proj: the model has no module .* nearest: .*gate_up_proj"),
        ("llama", ["input_layernorm"], r"input_layernorm and 1 more is of class LlamaRMSNorm, not a linear layer"),
        ("llama", ["act_fn"], "of class SiLUActivation, not a linear layer"),
        ("llama", ["mlp"], r"of class LlamaMLP.*name its layers: gate_proj \(1\), up_proj \(1\), down_proj \(1\)"),
        ("mixtral", ["gate"], "of class MixtralTopKRouter, not a linear layer"),
        ("qwen3", r".*self_attn.*", r"self_attn\.q_norm and 3 more is of class Qwen3RMSNorm"),
    ],
    ids=[
        "no match", "broken expression", "expression of a part", "name of a part",
        "norm", "activation", "block", "router", "expression of norms",
    ],
)  # fmt: skip
def test_targets_without_a_linear_layer_are_refused(family: str, wanted: Any, said: str) -> None:
    made = of(family)
    with pytest.raises(SettingsError, match=said):
        targets.choose(made.layers, wanted, made.others)


def test_a_model_without_such_layers_names_those_that_it_has() -> None:
    made = of("mamba")
    with pytest.raises(SettingsError, match=r"all: the model has no such layers.*in_proj \(2\), x_proj \(2\)"):
        targets.choose(made.layers, "all")
    assert leaves(targets.choose(made.layers, ["in_proj", "x_proj"])) == {"in_proj", "x_proj"}


def test_projections_that_fused_kernels_read_themselves_are_refused_as_peft_refuses_them() -> None:
    made = of("mamba")
    chosen = targets.choose(made.layers, ["out_proj"])
    with pytest.raises(ValueError, match="incompatible with Mamba"):
        attached("mamba", chosen, Train(rank=2))
    with pytest.raises(SettingsError, match=r"mixer\.out_proj: fused kernels of mamba read this weight directly"):
        targets.check(made, Train(rank=2, target_modules=("in_proj", "out_proj")))
    fine = targets.check(made, Train(rank=2, target_modules=("in_proj", "x_proj")))
    assert attached("mamba", fine, Train(rank=2))


# peft checks keys against modules only for its warning; parameters of experts get their rank anyway.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match any targeted module")
@pytest.mark.parametrize(
    ("family", "ranks", "alphas"),
    [
        ("llama", {"q_proj": 4, "layers.1.mlp.up_proj": 8}, {"v_proj": 3.0}),
        ("llama", {r"layers\.0\..*": 1, "q_proj": 4}, {r".*_proj": 5.0}),
        ("gpt2", {"attn.c_proj": 3, "c_proj": 5}, {"c_attn": 1.0}),
        ("gpt-neox", {"dense": 3}, {"dense_h_to_4h": 7.0}),
        ("qwen3-moe", {"experts.down_proj": 3}, {"experts.gate_up_proj": 7.0}),
    ],
)
def test_patterns_mean_what_they_mean_to_peft(family: str, ranks: dict[str, int], alphas: dict[str, float]) -> None:
    settings = Train(rank=2, alpha=4, rank_pattern=ranks, alpha_pattern=alphas)
    chosen = targets.check(of(family), settings)
    modules = dict(attached(family, chosen, settings).base_model.model.named_modules())
    seen = set()
    for layer in chosen:
        name, leaf = layer.name, None
        if layer.kind == "experts":
            name, _, leaf = layer.name.rpartition(".")
        module = modules[name]
        while leaf and module.parameter_name != leaf:
            module = module.base_layer
        assert module.r["default"] == targets.layer_rank(layer, settings), layer.name
        assert module.lora_alpha["default"] == targets.layer_alpha(layer, settings), layer.name
        seen.add((targets.layer_rank(layer, settings), targets.layer_alpha(layer, settings)))
    assert len(seen) > 1


@pytest.mark.parametrize("knob", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("q_prj", "q_prj: no layer with an adapter has a name that ends like this; nearest: .*q_proj"),
        ("up_proj", "up_proj: no layer with an adapter"),
        ("(q", "not a regular expression"),
    ],
    ids=["misspelt", "without-adapter", "broken"],
)
def test_a_pattern_that_matches_nothing_is_refused(knob: str, key: str, said: str) -> None:
    settings = Train(target_modules="attention", rank=2, **{knob: {key: 2}})
    with pytest.raises(SettingsError, match=rf"train\.{knob}: .*{said}"):
        targets.check(of("llama"), settings)


def test_a_rank_above_the_smaller_side_is_refused_with_module_shape_and_rank() -> None:
    made = of("llama")
    said = r"train\.rank: 33, but model\.layers\.0\.self_attn\.k_proj is 32 x 64 and its updates have at most rank 32"
    with pytest.raises(SettingsError, match=said):
        targets.check(made, Train(rank=33))
    assert targets.check(made, Train(rank=32))
    assert targets.check(made, Train(rank=33, target_modules="mlp"))
    with pytest.raises(SettingsError, match=r"train\.rank_pattern\.k_proj: 40, but .*k_proj is 32 x 64"):
        targets.check(made, Train(rank=8, rank_pattern={"k_proj": 40}))


def test_only_causal_models_are_for_training(tmp_path: Path) -> None:
    (tmp_path / "t5.json").write_text(json.dumps(T5().to_dict()))
    with pytest.raises(BaseModelError, match="T5ForConditionalGeneration"):
        targets.check(model_spec.load(tmp_path / "t5.json"), Train())
    assert len(targets.check(of("llama"), Train(rank=4))) == 7 * LAYERS
