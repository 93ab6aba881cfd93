"""Tests every kind of adapter on tiny models of the real classes: initial update zero, training, merging into the
base."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import families
from ratchet.config.train import Train
from ratchet.errors import BaseModelError, DamagedFileError, SettingsError
from ratchet.models import adapters, base_model, loading, model_spec, targets
from ratchet.models.base_model import BaseReference
from ratchet.models.device import Model

CPU = torch.device("cpu")
IDS = torch.randint(3, families.VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(5))
STEPS = 12

METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "rank_pattern": {r"layers\.0.*|h\.0.*": 2}, "alpha_pattern": {r".*1\..*": 3}},
    "dora": {"adapter": "dora", "dropout": 0.1},
    "pissa": {"initialization": "pissa"},
    "rspissa": {"initialization": "pissa", "use_rslora": True},
    "gaussian": {"initialization": "gaussian"},
    "orthogonal": {"initialization": "orthogonal", "adapter": "dora"},
    "adalora": {"adapter": "adalora", "rank": 6, "adalora": {"target_rank": 2, "every_steps": 2}},
}
BASES = ["llama", "llama-tied", "gpt2"]


def settings(method: str = "lora", quantization: str = "none", **changes: Any) -> Train:
    given = {"quantization": quantization, "rank": 4, "alpha": 6, "dropout": 0.0} | METHODS[method] | changes
    return Train.model_validate(given)


@pytest.fixture
def made(saved_family: Callable[[str], Path]) -> Callable[[str, Train], Model]:
    """Return a function that makes the same base again, in 4 bits if the settings require it."""

    def make(family: str, train: Train) -> Model:
        if train.quantization == "none":
            return families.make(family)
        return loading.load(saved_family(family), None, train, CPU)

    return make


def logits(model: Model) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


def learn(model: Model, train: Train, steps: int = STEPS) -> list[float]:
    """Do some optimizer steps on one batch; return the losses."""
    model.train()
    optimizer = torch.optim.AdamW([p for _, p in adapters.trainable_parameters(model)], lr=0.02)
    losses = []
    for step in range(1, steps + 1):
        torch.manual_seed(step)
        predicted = model(input_ids=IDS, use_cache=False).logits[:, :-1].float()
        loss = nn.functional.cross_entropy(predicted.flatten(0, 1), IDS[:, 1:].flatten())
        loss.backward()
        if (penalty := adapters.orthogonality_penalty(model)) is not None:
            (train.adalora.orth_reg_weight * penalty).backward()
        optimizer.step()
        adapters.update_rank_allocation(model, step, steps)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


CASES = [(m, b, q) for m in METHODS for b in BASES for q in ("none", "nf4") if not ("pissa" in m and q == "nf4")]


@pytest.mark.parametrize(("method", "family", "quantization"), CASES, ids=map("-".join, CASES))
def test_it_begins_as_the_base_learns_and_is_saved_as_a_lora_that_fits_the_plain_base(
    made: Callable[[str, Train], Model], tmp_path: Path, method: str, family: str, quantization: str
) -> None:
    train = settings(method, quantization)
    model = adapters.attach(made(family, train), train, "digest", steps=STEPS)
    before = logits(model)
    torch.testing.assert_close(before, logits(made(family, train)), rtol=0, atol=1e-5)
    assert {p.dtype for _, p in adapters.trainable_parameters(model)} == {torch.float32}
    losses = learn(model, train)
    assert losses[-1] < losses[0] - 0.01
    after = logits(model)
    for name in ("a", "b"):
        adapters.save(model, tmp_path / name, BaseReference("digest"))
    loaded = adapters.load(made(family, train), tmp_path / "a")
    torch.testing.assert_close(logits(loaded), after, rtol=0, atol=1e-5)
    assert (after - before).abs().max() > 1e-3
    assert not list(adapters.trainable_parameters(loaded))
    adapters.save(loaded, tmp_path / "again", BaseReference("digest"))
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "again")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_bytes())
    assert (config["peft_type"], config["use_dora"]) == ("LORA", train.adapter == "dora")
    assert base_model.read_base_digest(tmp_path / "a") == "digest"
    assert config["target_modules"] == sorted(config["target_modules"])


def contents(folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    return found


# ------------------------------------------------------------------------------------------- adapter weights as numbers


def with_factors_added(family: str, model: Model) -> Model:
    """Return the plain base with the adapter's update in its weights, computed from factors and token_rows alone."""
    base = families.make(family)
    with torch.no_grad():
        for one in adapters.iterate_factors(model):
            weight = base.get_parameter(one.name if one.a.ndim == 3 else f"{one.name}.weight")
            update = one.update()
            assert (one.a.dtype, one.b.dtype, update.shape) == (torch.float32, torch.float32, weight.shape)
            weight.add_(update)
        for name, ids, rows in adapters.token_rows(model):
            base.get_parameter(name)[ids] = rows
    return base


EMBEDDINGS = {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}
ADDED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lora": ("llama", "lora", {}),
    "rslora": ("gpt2", "rslora", {}),
    "pissa": ("llama", "pissa", {}),
    "rspissa": ("gpt2", "rspissa", {"rank_pattern": {"c_attn": 2}}),
    "adalora": ("llama", "adalora", {}),
    "adalora-conv1d": ("gpt2", "adalora", {}),
    "embedding": ("llama", "lora", EMBEDDINGS),
    "experts": ("mixtral", "lora", {"rank_pattern": {"experts.gate_up_proj": 3}}),
    "one of experts": (
        "qwen3-moe",
        "rslora",
        {"target_modules": ["down_proj"], "rank_pattern": {}, "alpha_pattern": {}},
    ),
}
NEW = [int(IDS[0, 3]), 94]
ROWS = [
    (f, m, {}, NEW) for f in ("llama", "llama-tied", "gpt2", "gemma3", "bloom") for m in ("lora", "pissa", "adalora")
]


@pytest.mark.parametrize(
    ("family", "method", "changes", "new"),
    [(*case, []) for case in ADDED.values()] + ROWS,
    ids=[*ADDED, *(f"rows-{family}-{method}" for family, method, *_ in ROWS)],
)
def test_factors_and_rows_of_new_tokens_are_what_is_added_to_the_base(
    tmp_path: Path, family: str, method: str, changes: dict[str, Any], new: list[int]
) -> None:
    train = settings(method, **changes)
    model = adapters.attach(families.make(family), train, "digest", new, STEPS)
    begun = {name: rows.clone() for name, _, rows in adapters.token_rows(model)}
    assert len(begun) == (0 if not new else 1 if model_spec.has_tied_head(families.make(family)) else 2)
    learn(model, train)
    for name, ids, rows in adapters.token_rows(model):
        assert ids == new
        assert (rows - begun[name]).abs().amax(dim=1).min() > 1e-4  # every row changed
    adapters.save(model, tmp_path, BaseReference("digest"))
    loaded = adapters.load(families.make(family), tmp_path)
    for found in (loaded, with_factors_added(family, model), with_factors_added(family, loaded)):
        torch.testing.assert_close(logits(found), logits(model), rtol=0, atol=1e-5)


def test_patterns_give_modules_a_rank_and_alpha_of_their_own() -> None:
    train = settings(rank_pattern={"q_proj": 2, r"layers\.1\..*": 3}, alpha_pattern={"o_proj": 12})
    model = adapters.attach(families.make("llama"), train, "digest")
    found = {one.name: (one.rank, one.scale) for one in adapters.iterate_factors(model)}
    assert found["model.layers.1.self_attn.q_proj"] == (2, 3.0)  # the first matching pattern applies
    assert found["model.layers.1.self_attn.v_proj"] == (3, 2.0)
    assert found["model.layers.0.self_attn.v_proj"] == (4, 1.5)
    assert found["model.layers.0.self_attn.o_proj"] == (4, 3.0)


@pytest.mark.parametrize("method", ["lora", "gaussian", "orthogonal", "pissa"])
def test_the_seed_alone_decides_how_an_adapter_begins(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "EXACT_SVD_MAX_SIZE", 8)  # larger weights are decomposed by a randomized method
    first, again, other = (
        adapters.attach(families.make("llama"), settings(method, seed=seed), "digest") for seed in (1, 1, 2)
    )
    torch.testing.assert_close(logits(first), logits(families.make("llama")), rtol=0, atol=1e-5)
    own, same, others = (
        [p.detach() for _, p in adapters.trainable_parameters(model)] + list(adapters.extra_tensors(model).values())
        for model in (first, again, other)
    )
    assert all(map(torch.equal, own, same))
    assert not all(map(torch.equal, own, others))


# --------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("method", ["lora", "dora", "pissa", "adalora"])
def test_adapters_have_the_configured_dtype_on_a_16_bit_base(tmp_path: Path, method: str, wanted: str) -> None:
    base = families.make("llama", dtype=torch.bfloat16)
    plain = logits(base)
    optimizer = "adamw_8bit" if wanted == "float16" else "adamw"  # torch's AdamW is refused with float16
    train = settings(method, adapter_dtype=wanted, optimizer=optimizer)
    model = adapters.attach(base, train, "digest", [94], STEPS)
    assert {p.dtype for _, p in adapters.trainable_parameters(model)} == {getattr(torch, wanted)}
    frozen = {p.dtype for n, p in model.named_parameters() if not p.requires_grad and "ranknum" not in n}
    assert frozen == {torch.bfloat16}
    torch.testing.assert_close(logits(model), plain, rtol=0, atol=0.02 if method == "pissa" else 0.0)
    if wanted != "float16":  # AdamW cannot compute in float16
        losses = learn(model, train)
        assert losses[-1] < losses[0]
    adapters.save(model, tmp_path, BaseReference("digest"))
    loaded = adapters.load(families.make("llama", dtype=torch.bfloat16), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=0.05)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_can_be_attached_to_a_model_without_weights(family: str, method: str) -> None:
    train = settings(method)
    model = adapters.attach(model_spec.from_config(families.FAMILIES[family]()).model(torch.bfloat16), train, "x", [94])
    real = adapters.attach(families.make(family), train, "x", [94])
    assert all(parameter.is_meta for parameter in model.parameters())
    found, expected = ({n: (p.shape, p.dtype) for n, p in adapters.trainable_parameters(one)} for one in (model, real))
    assert found == expected


# ------------------------------------------------------------------------------------------------------------- refusals

REFUSED: dict[str, tuple[str, dict[str, Any], Sequence[int], str]] = {
    "pattern": ("llama", {"rank_pattern": {"x_proj": 2}}, (), r"train\.rank_pattern: x_proj: no layer with an"),
    "dropout of experts": (
        "mixtral", {"dropout": 0.1}, (),
        r"mlp\.experts\.gate_up_proj: is one tensor for all experts, .* without dropout; set dropout: 0",
    ),
    "dora of experts": ("mixtral", {"adapter": "dora"}, (), r"experts\..*only plain LoRA in peft, not dora; set "
    "adapter: lora"),
    "adalora of experts": (
        "mixtral", {"adapter": "adalora", "rank": 9}, (), r"experts\..*only plain LoRA in peft, not adalora; set "
        "adapter: lora"
    ),
    "pissa of experts": (
        "mixtral", {"initialization": "pissa"}, (), r"experts\..*initialized with zero; set initialization: zero, or "
        "target_modules"
    ),
    "tied head": ("llama-tied", {"target_modules": ["lm_head"]}, (), r"lm_head: embedding and output layer .* remove "
    "it"),
    "dora of embedding": (
        "llama", {"target_modules": ["embed_tokens"], "adapter": "dora"}, (), r"embed_tokens: is an embedding, .* DoRA"
    ),
    "adalora of embedding": (
        "llama", {"target_modules": ["embed_tokens"], "adapter": "adalora", "rank": 9}, (), r"an embedding, .* not "
        "adalora"
    ),
    "pissa of embedding": (
        "llama", {"target_modules": ["embed_tokens"], "initialization": "pissa"}, (), r"an embedding, .* initialized "
        "with zero"
    ),
    "tokens and adapter": (
        "llama", {"target_modules": ["lm_head"]}, [94], r"target_modules: lm_head: its rows of base\.added_tokens are "
        "trained"
    ),
    "tokens and bias": ("gpt-j", {"target_modules": ["q_proj"]}, [94], r"base\.added_tokens: lm_head has a bias, which "
    "peft"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_peft_does_not_support_is_refused_before_anything_loads(case: str) -> None:
    family, changes, tokens, message = REFUSED[case]
    train = settings(**changes)
    plan = model_spec.from_config(families.FAMILIES[family]())
    with pytest.raises(SettingsError, match=message):
        targets.check_adapter(plan, train, bool(tokens))
    with pytest.raises(SettingsError, match=message):
        adapters.attach(plan.model(torch.float32), train, "digest", tokens)


def test_names_that_peft_would_take_for_experts_are_refused() -> None:
    """In a Qwen3-MoE whose first layer is dense, peft takes that layer's gate_proj for the experts of other layers."""
    base = families.make("qwen3-moe", mlp_only_layers=[0])
    with pytest.raises(
        SettingsError, match=r"mlp\.\w+_proj: peft interprets this name as an expert of a qwen3_moe model .* remove it"
    ):
        adapters.attach(base, settings(target_modules=["mlp.gate_proj", "mlp.up_proj"]), "digest")


def saved(tmp_path: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    model = adapters.attach(families.make("llama"), settings(), "digest")
    adapters.save(model, tmp_path, BaseReference("digest"))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    return tmp_path


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(KEY), r"no matching tensor for .*layers\.0\.self_attn\.q_proj\.lora_B\.weight"),
        (lambda tensors: tensors.update({"base_model.model.x.lora_A.weight": torch.ones(1)}), r"\.x\.lora_A\.weight"),
        (lambda tensors: tensors.update({KEY: torch.ones(32, 5)}), "does not fit this base model: .*size mismatch"),
    ],
    ids=["missing", "too many", "shape"],
)
def test_an_adapter_that_does_not_fit_is_not_half_loaded(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    with pytest.raises(BaseModelError, match=message):
        adapters.load(families.make("llama"), saved(tmp_path, change))


def test_an_adapter_of_another_base_or_with_a_damaged_file_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, lambda tensors: None)
    with pytest.raises(BaseModelError, match="does not fit this base model"):
        adapters.load(families.make("gpt2"), folder)
    (folder / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(DamagedFileError, match=r"adapter_model\.safetensors: cannot be read .* train again"):
        adapters.load(families.make("llama"), folder)


# ---------------------------------------------------------------------------------------------------------------- PiSSA


def test_pissa_takes_the_principal_singular_vectors_off_the_weight() -> None:
    plain = families.make("llama").get_parameter("model.layers.0.self_attn.q_proj.weight")
    model = adapters.attach(families.make("llama"), settings("pissa"), "digest")
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    values = torch.linalg.svdvals(plain)
    left = torch.linalg.svdvals(layer.get_base_layer().weight)
    torch.testing.assert_close(left[: len(values) - 4], values[4:], rtol=1e-4, atol=1e-6)
    taken = adapters.pissa_offset(layer)
    assert taken is not None
    torch.testing.assert_close(layer.get_base_layer().weight + taken, plain, rtol=0, atol=1e-6)
    update = next(
        one for one in adapters.iterate_factors(model) if one.name.endswith("layers.0.self_attn.q_proj")
    ).update()
    assert update.abs().max() < 1e-6  # nothing has been trained


def test_a_base_is_put_right_for_first_matrices_that_another_machine_found() -> None:
    """Singular vectors may differ in sign or by a rotation in a plane; the residual then differs as well."""
    model, elsewhere = (
        adapters.attach(families.make("gpt2"), settings("pissa", seed=1, rank=4), "digest") for _ in range(2)
    )
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))[0]
    found = adapters.extra_tensors(elsewhere)
    turned = {
        name: (turn.T @ tensor if name.endswith("/a") else tensor @ turn) * 1.01 for name, tensor in found.items()
    }
    adapters.restore_extra(model, turned)
    weights = dict(adapters.trainable_parameters(model))
    with torch.no_grad():
        for one in adapters.iterate_factors(elsewhere):
            weights[f"base_model.model.{one.name}.lora_A.default.weight"].copy_(turned[f"pissa/{one.name}/a"])
            weights[f"base_model.model.{one.name}.lora_B.default.weight"].copy_(turned[f"pissa/{one.name}/b"])
    torch.testing.assert_close(logits(model), logits(families.make("gpt2")), rtol=0, atol=1e-5)
    learn(model, settings("pissa"))
    torch.testing.assert_close(logits(with_factors_added("gpt2", model)), logits(model), rtol=0, atol=1e-5)
    turned["pissa/transformer.h.9/a"] = torch.ones(1)
    with pytest.raises(
        DamagedFileError, match=r"to other layers than this model adapts, e\.g\. pissa/transformer\.h\.9/a"
    ):
        adapters.restore_extra(model, turned)


# -------------------------------------------------------------------------------------------------------------- AdaLoRA


def adalora(steps: int, **changes: Any) -> tuple[Model, Train]:
    train = settings(
        "adalora", adalora={"target_rank": 2, "every_steps": 2, "warmup_ratio": 0.2, "final_ratio": 0.4} | changes
    )
    return adapters.attach(families.make("llama"), train, "digest", steps=steps), train


def ranks(model: Model) -> list[int]:
    return [one.rank for one in adapters.iterate_factors(model)]


def test_adalora_cuts_ranks_down_to_the_budget_and_its_allocation_is_of_one_model() -> None:
    model, train = adalora(20)
    learn(model, train, 20)
    found = ranks(model)
    assert sum(found) == 2 * len(found)
    assert len(set(found)) > 1  # allocated by importance, not evenly
    tensors = adapters.extra_tensors(model)
    assert tensors
    other = adapters.attach(families.make("llama", num_hidden_layers=1), train, "digest", steps=20)
    with pytest.raises(
        DamagedFileError, match=r"allocation belongs to other matrices than this model .* e\.g\. rank_mask/model\.l"
    ):
        adapters.restore_extra(other, tensors)
    plain = adapters.attach(families.make("llama"), settings(), "digest")
    with pytest.raises(DamagedFileError, match="allocation belongs to other matrices"):
        adapters.restore_extra(plain, tensors)


def test_ranks_become_final_even_if_the_step_that_decides_is_left_out() -> None:
    model, _ = adalora(20)
    for step in (5, 13, 14):  # step 12 would decide
        adapters.update_rank_allocation(stepped(model), step, 20)
    assert sum(ranks(model)) == 2 * len(ranks(model))


def stepped(model: Model) -> Model:
    """Compute a gradient, and set all singular values to nonzero numbers."""
    model.train()
    model(input_ids=IDS).logits.square().mean().backward()
    with torch.no_grad():
        for number, (name, parameter) in enumerate(adapters.trainable_parameters(model)):
            if "lora_E" in name:
                parameter.copy_(torch.linspace(0.1, 1, 6).unsqueeze(1) + number / 100)
    return model


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_training_of_few_steps_has_a_budget_too(steps: int) -> None:
    model, train = adalora(steps)
    learn(model, train, steps)
    assert sum(ranks(model)) <= 2 * len(ranks(model))


def test_a_schedule_for_other_steps_than_are_trained_is_our_mistake() -> None:
    model, _ = adalora(20)
    with pytest.raises(RuntimeError, match="attached for 20 steps, but the training has 30"):
        adapters.update_rank_allocation(model, 1, 30)


def test_the_penalty_is_the_mean_distance_from_orthogonal() -> None:
    model, _ = adalora(20)
    with torch.no_grad():
        for name, parameter in adapters.trainable_parameters(model):
            if "lora_E" not in name:
                parameter.zero_()
                parameter.fill_diagonal_(1.0)
    found = adapters.orthogonality_penalty(model)
    assert found is not None
    assert float(found.detach()) == 0.0
    with torch.no_grad():
        next(p for name, p in adapters.trainable_parameters(model) if "lora_A" in name)[0, 0] = 3.0
    again = adapters.orthogonality_penalty(model)
    assert again is not None
    assert float(again.detach()) == pytest.approx(8.0 / 28)  # |9 - 1| in one of 14 matrices of 2 numbers
    assert adapters.orthogonality_penalty(adapters.attach(families.make("llama"), settings(), "digest")) is None


def test_an_adapter_that_has_not_learned_can_be_saved(tmp_path: Path) -> None:
    model, _ = adalora(20)
    assert set(ranks(model)) == {0}
    adapters.save(model, tmp_path, BaseReference("digest"))
    torch.testing.assert_close(logits(adapters.load(families.make("llama"), tmp_path)), logits(families.make("llama")))
