"""Tests the shorter passes of LoRA layers, norms and gated units against those of peft and transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor

import families
from ratchet.config.train import Train
from ratchet.models import adapters, fused_operators, loading, tiled_linear
from ratchet.models.device import Model

FOUR = ("q_proj", "v_proj", "up_proj", "down_proj")


def made(family: str = "llama", dtype: torch.dtype = torch.float32, **settings: object) -> Model:
    chosen = {"rank": 4, "alpha": 12.0, "target_modules": FOUR, "quantization": "none", "dropout": 0.0} | settings
    model = adapters.attach(families.make(family, dtype=dtype), Train(**chosen), "digest").train()  # type: ignore[arg-type]
    torch.manual_seed(5)
    for _, parameter in adapters.trainable_parameters(model):
        parameter.data.normal_(0, 0.1)
    return model


def layers(model: Model) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def shortened(model: Model) -> int:
    return sum("forward" in layer.__dict__ for layer in layers(model))


def as_peft_does(model: Model) -> Model:
    for layer in layers(model):
        layer.__dict__.pop("forward", None)
    return model


def fused(model: Model) -> set[str]:
    """Return the classes of transformers with another forward pass."""
    modules = [module for module in model.modules() if not isinstance(module, LoraLayer)]
    return {type(module).__name__ for module in modules if "forward" in vars(module)}


def as_transformers_does(model: Model) -> Model:
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            vars(module).pop("forward", None)
    return model


def outcome(model: Model, ids: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """Return the logits, and the gradients of the trainable parameters."""
    torch.manual_seed(9)
    model.zero_grad()
    ids = torch.arange(3, 43).view(2, 20) if ids is None else ids
    logits = model(input_ids=ids, use_cache=False).logits
    (logits.float().square().mean()).backward()
    found = [parameter.grad for _, parameter in adapters.trainable_parameters(model)]
    assert all(one is not None for one in found)
    return logits.detach().float(), [one.clone() for one in found if one is not None]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"dropout": 0.3}),
        ("llama", {"use_rslora": True}),
        ("llama", {"rank_pattern": {"q_proj": 2}}),
        ("gpt2", {"target_modules": ("c_attn",)}),
    ],
    ids=["plain", "dropout", "rank-stabilized", "rank pattern", "transposed"],
)
def test_it_computes_what_peft_computes(family: str, changes: dict[str, object]) -> None:
    model = made(family, **changes)
    if family == "gpt2":
        model.eval()  # GPT-2's config has its own dropout
    assert shortened(model) == len(layers(model)) == 2 * (1 if family == "gpt2" else len(FOUR))
    ours, theirs = outcome(model), outcome(as_peft_does(model))
    assert torch.allclose(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert torch.allclose(one, other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "storage", "is_tiled"), [("nf4", "uint8", False), ("fp4", "bfloat16", False), ("nf4", "uint8", True)]
)
def test_in_4_bits_it_computes_what_peft_computes(
    saved_family: Callable[[str], Path], kind: str, storage: str, is_tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_tiled:
        monkeypatch.setattr(tiled_linear, "LARGEST_KEPT_BYTES", 0)
    settings = Train(quantization=kind, quantization_storage=storage, rank=4, target_modules="all")  # type: ignore[arg-type]
    base = loading.load(saved_family("llama"), None, settings, torch.device("cpu"))
    model = adapters.attach(base, settings, "digest").train()
    torch.manual_seed(5)
    for _, parameter in adapters.trainable_parameters(model):
        parameter.data.normal_(0, 0.1)
    assert all(fused_operators.has_fused_backward(layer.get_base_layer(), torch.ones(1)) for layer in layers(model))
    layers(model)[0](torch.ones(2, 3, families.HIDDEN)).clamp_(max=1).sum().backward()
    ours, theirs = outcome(model), outcome(as_peft_does(model))
    assert torch.allclose(ours[0], theirs[0], atol=1e-5, rtol=1e-5)
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert torch.allclose(one, other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"LlamaMLP", "LlamaRMSNorm"}),
        ("qwen3", {"Qwen3MLP", "Qwen3RMSNorm"}),
        ("olmo2", {"Olmo2MLP"}),
        ("gemma2", set()),
        ("gpt2", set()),
    ],
)
def test_only_code_that_equals_llamas_is_replaced(family: str, expected: set[str]) -> None:
    names = ("c_attn",) if family == "gpt2" else FOUR
    assert fused(made(family, target_modules=names)) == expected


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_norms_and_gated_units_have_the_same_bits_and_the_same_gradients(
    family: str, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_operators, "TILE_BYTES", 16 * 1024)
    model = made(family)
    if recomputes:
        adapters.enable_activation_checkpointing(model)
    ids = torch.randint(3, 90, (12, 100), generator=torch.Generator().manual_seed(1))
    for module in model.modules():  # norms begin with ones
        if type(module).__name__.endswith("Norm"):
            module.weight.data.uniform_(0.5, 2)
    ours, theirs = outcome(model, ids), outcome(as_transformers_does(model), ids)
    assert torch.equal(ours[0], theirs[0])
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert torch.allclose(one, other, atol=1e-5 * float(other.abs().max()), rtol=1e-4)


def test_in_16_bits_norms_and_gated_units_differ_by_rounding() -> None:
    model = made(dtype=torch.bfloat16, compute_dtype="bfloat16")
    ours, theirs = outcome(model), outcome(as_transformers_does(model))
    assert torch.equal(ours[0], theirs[0])
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert float((one - other).norm() / other.norm()) < 0.05


@pytest.mark.parametrize("shape", [(0, families.HIDDEN), (1, 0, families.HIDDEN), (1, 3, families.HIDDEN)])
def test_a_block_may_get_no_rows(shape: tuple[int, ...]) -> None:
    block = made().get_base_model().model.layers[0]
    for part in (block.mlp, block.input_layernorm, block.self_attn.q_proj):
        x = torch.randn(shape, requires_grad=True)
        output = part(x)
        output.clamp_(min=-1)  # some models change an output in place
        output.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (*output.shape[:-1], families.HIDDEN) == shape


def test_a_norm_that_learns_has_the_gradient_of_its_weight() -> None:
    norm = made().get_base_model().model.norm
    norm.weight.requires_grad_(True)
    norm(torch.randn(2, 3, families.HIDDEN)).sum().backward()
    assert norm.weight.grad is not None


def test_less_is_kept_for_the_backward_pass() -> None:
    model = made(target_modules="all")
    ours = kept_bytes(model)
    assert ours < 0.9 * kept_bytes(as_transformers_does(model))


def test_in_16_bits_it_differs_by_rounding_and_learns_in_the_type_of_the_adapter() -> None:
    model = made(dtype=torch.bfloat16, compute_dtype="bfloat16")
    ours, theirs = outcome(model), outcome(as_peft_does(model))
    assert float((ours[0] - theirs[0]).std() / theirs[0].std()) < 0.02
    assert {one.dtype for one in ours[1]} == {torch.float32}
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert float((one - other).norm() / other.norm()) < 0.05


def kept_bytes(model: Model) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, without weights."""
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if (pointer := tensor.untyped_storage().data_ptr()) not in own:
            kept[pointer] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=torch.arange(3, 67).view(1, 64), use_cache=False)
    return sum(kept.values())


def test_in_16_bits_no_copy_of_the_input_is_held() -> None:
    model = made(dtype=torch.bfloat16, compute_dtype="bfloat16")
    assert kept_bytes(model) < 0.8 * kept_bytes(as_peft_does(model))


@pytest.mark.parametrize("kind", ["dora", "adalora"])
def test_what_adds_more_than_a_product_keeps_its_own_forward_pass(kind: str) -> None:
    assert shortened(made(adapter=kind, rank=12)) == 0


@pytest.mark.usefixtures("without_kernels")
def test_a_disabled_adapter_adds_nothing() -> None:
    model, ids = made(), torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        with model.disable_adapter():
            without = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(without, families.make("llama")(input_ids=ids, use_cache=False).logits)
        assert not torch.equal(without, model(input_ids=ids, use_cache=False).logits)
