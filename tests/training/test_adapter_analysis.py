"""Tests of the adapter analysis, module by module, against full weight matrices that only these tests compute."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

from ratchet.config.train import AdaLoraSettings, Train
from ratchet.models import adapter_format, adapters, loading, weights
from ratchet.models.device import Model
from ratchet.runs.directory import RunPaths
from ratchet.storage.records.training import AdapterAnalysis, ModuleAnalysis
from ratchet.training import analysis
from ratchet.training.train_state import TrainState
from small_loop import SMALL, after_steps, loop_of

SIZE = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WIDTHS = {**SIZE, "intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS = {
    "llama": lambda: LlamaConfig(**WIDTHS),
    "gpt2": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64),
    "mixtral": lambda: MixtralConfig(**WIDTHS, num_local_experts=4, num_experts_per_tok=2),
}
PLAIN = Train(quantization="none", rank=4, alpha=8, seed=5)
METHODS = {
    "lora": PLAIN,
    "rslora": PLAIN.model_copy(update={"use_rslora": True}),
    "pissa": PLAIN.model_copy(update={"initialization": "pissa"}),
    "adalora": PLAIN.model_copy(update={"adapter": "adalora", "adalora": AdaLoraSettings(target_rank=2)}),
    "dora": PLAIN.model_copy(update={"adapter": "dora"}),
}


def plain(family: str) -> Model:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()


def adapted(family: str, settings: Train, new_tokens: tuple[int, ...] = ()) -> Model:
    """Create a model with a random adapter that changes its outputs, as after training."""
    model = adapters.attach(plain(family), settings, "base", new_tokens, 20)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapters.trainable_parameters(model):
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(parameter * (1 + noise) if "magnitude" in name else parameter + noise)
    return model.eval()


def matrix(layer: nn.Module, inputs: int) -> torch.Tensor:
    """Return the effective weights of a layer, shape [outputs, inputs]."""
    with torch.no_grad():
        return (layer(torch.eye(inputs)) - layer(torch.zeros(1, inputs))).T.double()


def moved(model: Model, base: Model) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the weights before and the weight change of every adapted linear layer, measured by applying the layer."""
    found = {}
    for name, layer in adapter_format.adapted_layers(model):
        before = matrix(base.get_submodule(name), layer.in_features)
        found[name] = (before, matrix(layer, layer.in_features) - before)
    return found


@pytest.mark.parametrize("steps", [1, 2, 49, 50, 51, 97, 1000, 123_457])
def test_gradients_are_taken_apart_at_a_grid_that_depends_on_the_plan_only(steps: int) -> None:
    found = [step for step in range(steps + 2) if analysis.is_due(step, steps)]
    assert found[0] == 1
    assert found[-1] == steps
    assert len(found) == min(steps, 50)
    gaps = {b - a for a, b in pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 1, "evenly spread"


@pytest.mark.parametrize("family", CONFIGS)
def test_gradient_norms_of_modules_are_all_of_the_gradient(family: str) -> None:
    model = adapted(family, PLAIN)
    model.train()
    model(input_ids=torch.arange(3, 33).view(2, 15), labels=torch.arange(3, 33).view(2, 15)).loss.backward()
    found = analysis.compute_module_norms(model)
    total = float(
        torch.nn.utils.get_total_norm([p.grad for _, p in adapters.trainable_parameters(model) if p.grad is not None])
    )
    assert math.hypot(*found.values()) == pytest.approx(total, rel=1e-5)
    assert sorted(found) == sorted(name for name, _ in adapter_format.adapted_layers(model))
    name, layer = next(iter(adapter_format.adapted_layers(model)))
    own = [p.grad.flatten() for p in (layer.lora_A["default"].weight, layer.lora_B["default"].weight)]
    assert found[name] == pytest.approx(float(torch.cat(own).norm()), rel=1e-5)


def test_rows_of_added_tokens_have_a_gradient_of_their_own() -> None:
    model = adapted("llama", PLAIN, new_tokens=(3, 9))
    model(input_ids=torch.tensor([[3, 9, 5]]), labels=torch.tensor([[3, 9, 5]])).loss.backward()
    found = analysis.compute_module_norms(model)
    assert {"model.embed_tokens", "lm_head"} <= set(found)
    assert found["model.embed_tokens"] > 0
    assert set(analysis.analyse(model, TrainState(), PLAIN).modules) == set(found) - {"model.embed_tokens", "lm_head"}


def test_noted_norms_are_kept_beside_their_steps() -> None:
    assert analysis.compute_module_norms(adapted("llama", PLAIN)) == {}  # no gradients exist
    first = TrainState(step=3)
    assert analysis.record_norms(first, 4, {}) is first
    state = analysis.record_norms(TrainState(), 1, {"a": 1.0, "b": 2.0})
    state = analysis.record_norms(state, 5, {"a": 3.0, "c": 4.0})
    assert state.module_norm_steps == (1, 5)
    assert state.module_norms == {"a": (1.0, 3.0), "b": (2.0, 0.0), "c": (0.0, 4.0)}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_updates_are_those_of_the_full_matrices(family: str, method: str) -> None:
    model = adapted(family, METHODS[method])
    found = analysis.analyse(model, TrainState(), METHODS[method])
    expected = moved(model, plain(family))
    assert found.modules.keys() == expected.keys()
    for name, (before, added) in expected.items():
        one = found.modules[name]
        assert one.weight_norm == pytest.approx(float(before.norm()), rel=1e-5), name
        assert one.update_norm == pytest.approx(float(added.norm()), rel=1e-3), name
        assert one.rank == (8 if method == "pissa" else 4)
        if method != "dora":
            values = torch.linalg.svdvals(added)[: one.rank]
            assert one.singular_values == pytest.approx(values.tolist(), rel=1e-3, abs=1e-5)
            shares = values / values.sum()
            entropy = -float((shares * shares.clamp_min(1e-300).log()).sum())
            assert one.effective_rank == pytest.approx(math.exp(entropy), rel=1e-3)


def test_magnitudes_of_dora_count_in_the_update_and_not_in_its_rank() -> None:
    settings = METHODS["dora"]
    model = adapters.attach(plain("llama"), settings, "base", (), 20)
    still = analysis.analyse(model, TrainState(), settings)
    assert all(one.update_norm < 1e-5 * one.weight_norm for one in still.modules.values())
    with torch.no_grad():
        for name, parameter in adapters.trainable_parameters(model):
            if "magnitude" in name:
                parameter.mul_(1.5)
    for one in analysis.analyse(model, TrainState(), settings).modules.values():
        assert one.update_norm == pytest.approx(0.5 * one.weight_norm, rel=1e-4)
        assert (one.effective_rank, *one.singular_values) == (0, 0, 0, 0, 0)


def test_experts_are_judged_together() -> None:
    model = adapted("mixtral", PLAIN)
    found = analysis.analyse(model, TrainState(), PLAIN)
    experts = [one for one in adapters.iterate_factors(model) if one.a.ndim == 3]
    assert experts
    for one in experts:
        module, update = found.modules[one.name], one.update().double()
        assert module.update_norm == pytest.approx(float(update.norm()), rel=1e-4)
        weight = plain("mixtral").get_parameter(one.name).detach()
        assert module.weight_norm == pytest.approx(float(weight.norm()), rel=1e-5)
        each = torch.linalg.svdvals(update)[:, :4]
        assert module.singular_values == pytest.approx(each.square().mean(0).sqrt().tolist(), rel=1e-4)
        assert 1 < module.effective_rank <= 4


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_of_a_base_in_4_bits_the_weights_are_those_it_computes_with(method: str, tmp_path: Path) -> None:
    settings = METHODS[method].model_copy(update={"quantization": "nf4"})
    plain("llama").save_pretrained(tmp_path)
    model = adapters.attach(loading.load(tmp_path, None, settings, torch.device("cpu")), settings, "base", (), 20)
    found = analysis.analyse(model, TrainState(), settings)
    rounded = {name: weights.dense_weight(layer) for name, layer in adapter_format.adapted_layers(model)}
    assert found.modules.keys() == rounded.keys()
    original = plain("llama")
    for name, one in found.modules.items():
        assert one.weight_norm == pytest.approx(float(rounded[name].norm()), rel=1e-5)
        assert one.weight_norm != pytest.approx(float(original.get_submodule(name).weight.detach().norm()), rel=1e-6)
        assert one.update_norm < 1e-5 * one.weight_norm, "a fresh adapter changes nothing"


@pytest.mark.parametrize(
    ("values", "rank"), [([2.0, 2.0, 2.0, 2.0], 4), ([3.0, 0.0, 0.0], 1), ([0.0, 0.0], 0), ([], 0)]
)
def test_effective_rank_counts_directions(values: list[float], rank: float) -> None:
    assert analysis.compute_effective_rank(values) == pytest.approx(rank)


# ------------------------------------------------------------------------------------------------------ during training


def test_an_interrupted_run_has_the_same_analysis(tmp_path: Path) -> None:
    whole = loop_of(tmp_path / "whole", SMALL)
    whole.run()
    paths = RunPaths(tmp_path / "broken")
    first = loop_of(paths.root, SMALL, after_steps(paths, 9))
    with pytest.raises(Exception, match="stopped"):
        first.run()
    again = loop_of(paths.root, SMALL)
    assert 0 < again.state.step < whole.plan.steps
    again.run()
    found = [analysis.analyse(loop.context.model, loop.state, SMALL) for loop in (whole, again)]
    assert found[0] == found[1]
    assert found[0].steps == tuple(range(1, whole.plan.steps + 1))
    assert all(len(one.gradient_norms) == len(found[0].steps) for one in found[0].modules.values())
    assert all(one.update_norm > 0 for one in found[0].modules.values())


def test_an_analysis_comes_back_from_its_file(tmp_path: Path) -> None:
    model = adapted("llama", PLAIN)
    found = analysis.analyse(model, analysis.record_norms(TrainState(), 1, dict.fromkeys(["x"], 1 / 3)), PLAIN)
    found.save(tmp_path / "analysis.json")
    again = AdapterAnalysis.load(tmp_path / "analysis.json")
    assert again == found
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "analysis.json").read_bytes()


# ------------------------------------------------------------------------------------------------------ recommendations

KINDS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")


def module(update: float = 1.0, used: float = 0.7, gradients: tuple[float, ...] = (0.1,) * 30) -> ModuleAnalysis:
    """Return an analysis with rank 16 and an effective rank of `used` * 16."""
    return ModuleAnalysis(
        rank=16,
        parameters=1000,
        gradient_norms=gradients,
        weight_norm=100.0,
        update_norm=update,
        singular_values=(update / 4,) * 16,
        effective_rank=16 * used,
    )


def model_of(**changes: Any) -> dict[str, ModuleAnalysis]:
    """Return the analyses of twelve layers with three modules each. Their updates differ slightly."""
    places = [(layer, kind) for layer in range(12) for kind in KINDS]
    return {f"model.layers.{layer}.{kind}": module(update=1 + 0.05 * layer, **changes) for layer, kind in places}


def advice(modules: dict[str, ModuleAnalysis], settings: Train = Train()) -> tuple[str, ...]:  # noqa: B008 (frozen)
    return analysis.suggest_changes(modules, analysis.find_still_modules(modules), settings)


def test_a_training_that_changed_next_to_nothing_says_so() -> None:
    modules = {name: one.model_copy(update={"update_norm": 0.06}) for name, one in model_of().items()}
    (said,) = advice(modules, Train(learning_rate=2e-4))
    assert said.startswith("train.learning_rate: try 0.001: the update is 0.0006 of a module's weights")


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"model.layers.0.mlp.down_proj": module(gradients=(1e-9,) * 30)},
        {"model.layers.0.mlp.down_proj": module(update=1.25 * 0.2)},
        {"model.layers.0.mlp.down_proj": module(update=1.25 * 5)},
        {"model.layers.0.mlp.down_proj": module(update=1.25 * 1000)},
    ],
    ids=["nothing", "a small gradient", "somewhat less", "more", "much more"],
)
def test_no_module_is_still_where_none_stands_out(changed: dict[str, ModuleAnalysis]) -> None:
    assert analysis.find_still_modules(model_of() | changed) == ()


def test_nothing_is_said_where_nothing_stands_out() -> None:
    assert advice(model_of()) == ()
    widely_spread = {f"model.layers.{n}.q": module(update=10 ** (-n / 6)) for n in range(25)}
    assert analysis.find_still_modules(widely_spread) == (), "a tenth of the median is not special here"


def test_modules_that_barely_moved_are_found_and_named() -> None:
    name = "model.layers.3.self_attn.q_proj"
    modules = model_of() | {name: module(update=0.01)}
    assert analysis.find_still_modules(modules) == (name,)
    (said,) = advice(modules)
    assert said.startswith("train.target_modules: leave out the modules that barely moved, 1 of 36 (model.layers.3")
    assert "2.8% of the trainable parameters" in said
    assert analysis.find_still_modules(model_of() | {name: module(update=0.0)}) == (name,)
    modules = model_of() | {f"model.layers.{n}.self_attn.q_proj": module(update=0.001 + n / 1e5) for n in range(12)}
    assert len(analysis.find_still_modules(modules)) == 12
    assert any("(every self_attn.q_proj)" in said for said in advice(modules))


def test_nothing_learned_is_said_and_nothing_else() -> None:
    modules = {"model.layers.0.q": module(update=0.0), "model.layers.1.q": module(update=0.0)}
    (said,) = advice(modules)
    assert said.startswith("Nothing was learned")
    assert advice({}) == ()


def test_rank_that_is_not_used_is_halved_and_one_that_is_used_up_doubled() -> None:
    (said,) = advice(model_of(used=0.3))
    assert said.startswith("train.rank: 8 may do as well: 36 of 36 modules")
    assert "effective rank 4.8 of 16" in said
    (said,) = advice(model_of(used=0.95))
    assert said.startswith("train.rank: 32 may learn more, with use_rslora")
    assert "use_rslora" not in advice(model_of(used=0.95), Train(use_rslora=True))[0]
    assert advice(model_of(used=0.3), Train(rank=16, adapter="adalora")) == (), "which finds its ranks itself"
