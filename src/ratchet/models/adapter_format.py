"""What an adapter adds to its base, as plain numbers: the thin matrices of every layer, and rows of tokens."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import AdaLoraConfig, LoraConfig
from peft.tuners.adalora.layer import AdaLoraLayer
from peft.tuners.lora.layer import Embedding, LoraLayer, ParamWrapper
from peft.utils import get_peft_model_state_dict
from peft.utils.other import TrainableTokensWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ratchet.errors import DamagedFileError
from ratchet.models.device import Model
from ratchet.storage import files

ADAPTER = "default"
"""peft's name of the one adapter that a model has."""


@dataclass(frozen=True)
class LoraFactors:
    """A layer's update: scale * b @ a, in float32, relative to the base as it was loaded.

    Of LoRA and rsLoRA (Hu et al. 2021; Kalajdzievski 2023) these are the two matrices themselves. PiSSA's update is
    B A - B0 A0 (Meng et al. 2024), which is [B, -B0] [A; A0]. AdaLoRA's B diag(E) A (Zhang et al. 2023) has E in `a`,
    and only the directions that are left. DoRA's magnitudes are not in it.
    """

    name: str
    """Of the module in the base model; of experts, that of their parameter."""
    layer: Any
    """peft's layer around it."""
    a: Tensor
    """[rank, inputs]; of fused experts [experts, rank, inputs]."""
    b: Tensor
    """[outputs, rank]; of fused experts [experts, outputs, rank]."""
    scale: float

    @property
    def rank(self) -> int:
        """Directions of the update; of experts, of each."""
        return int(self.a.shape[-2])

    @property
    def weight_name(self) -> str:
        """Name of the parameter in the base model."""
        return self.name if isinstance(self.layer, ParamWrapper) else f"{self.name}.weight"

    @property
    def transposed(self) -> bool:
        """Whether the weight in memory is [inputs, outputs]: Conv1D of GPT-2 (not in 4 bits), embeddings, experts."""
        if isinstance(self.layer, ParamWrapper):
            return not self.layer._did_swap_in_out_features
        return isinstance(self.layer.get_base_layer(), Conv1D | torch.nn.Embedding)

    def update(self) -> Tensor:
        """What is added to the weight, in the layout in which the base holds it; float32."""
        full = (self.b @ self.a).mul_(self.scale)
        return full.mT if self.transposed else full


def adapted_layers(model: Model) -> Iterator[tuple[str, Any]]:
    """peft's layers with an adapter and their names in the base model, in the order of its modules."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for path, module in base.named_modules():
        if isinstance(module, LoraLayer):
            yield name_in_base(path, module), module


def name_in_base(path: str, layer: Any) -> str:
    """Name of what a layer of peft adapts, as it is in the base model; of experts, that of their parameter."""
    plain = ".".join(part for part in path.split(".") if part != "base_layer")
    return f"{plain}.{layer.parameter_name}" if isinstance(layer, ParamWrapper) else plain


def iterate_factors(model: Model) -> Iterator[LoraFactors]:
    """The update of every adapted layer, one at a time. The tensors may be the parameters themselves: do not change."""
    return (layer_factors(name, layer) for name, layer in adapted_layers(model))


def layer_factors(name: str, layer: Any) -> LoraFactors:
    """The update of one of peft's layers."""
    if isinstance(layer, AdaLoraLayer):
        return _adalora_factors(name, layer)
    if isinstance(layer, Embedding):
        a, b = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
    elif isinstance(layer, ParamWrapper):
        a, b = _expert_factors(layer)
    else:
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    a, b, scale = a.detach().float(), b.detach().float(), float(layer.scaling[ADAPTER])
    if (first := initial_pissa_factors(layer)) is not None:
        a0, b0 = (tensor.to(a.device, torch.float32) for tensor in first)
        a, b = torch.cat([a, a0]), torch.cat([b, -b0], dim=1)
    return LoraFactors(name, layer, a, b, scale)


def _adalora_factors(name: str, layer: Any) -> LoraFactors:
    e = layer.lora_E[ADAPTER].detach().float()
    kept = e.flatten() != 0
    a = (layer.lora_A[ADAPTER].detach().float() * e)[kept]
    b = layer.lora_B[ADAPTER].detach().float()[:, kept]
    scale = layer.scaling[ADAPTER] / float(layer.ranknum[ADAPTER] + 1e-5)  # as peft computes it in every pass
    return LoraFactors(name, layer, a, b, scale)


def _expert_factors(layer: Any) -> tuple[Tensor, Tensor]:
    """peft keeps the matrices of all experts in two: A as [experts * rank, inputs], B as [outputs, rank * experts]."""
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    experts = layer.num_experts
    return a.reshape(experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, experts).permute(2, 0, 1)


def initial_pissa_factors(layer: Any) -> tuple[Tensor, Tensor] | None:
    """PiSSA's A0 and B0, whose product was taken off the base's weight; None for other adapters."""
    found: tuple[Tensor, Tensor] | None = getattr(layer, "first_factors", None)
    return found


def pissa_offset(layer: Any) -> Tensor | None:
    """What PiSSA took off the weight, [outputs, inputs] in float32: weight and this are the base as it was loaded."""
    first = initial_pissa_factors(layer)
    return None if first is None else scaled_product(layer, *first)


def scaled_product(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """scale * b @ a, [outputs, inputs] in float32, on the device of the layer's weight."""
    device = layer.get_base_layer().weight.device
    return float(layer.scaling[ADAPTER]) * (b.to(device, torch.float32) @ a.to(device, torch.float32))


def token_rows(model: Model) -> Iterator[tuple[str, list[int], Tensor]]:
    """Rows that were learned for tokens: name of the parameter in the base, ids of the tokens, rows [ids, width].

    Of embeddings that share one tensor with the head, only the embedding.
    """
    for path, module in model.get_base_model().named_modules():
        if isinstance(module, TrainableTokensWrapper) and not module.token_adapter.tied_adapter:
            own = module.token_adapter
            yield f"{path}.weight", list(own.token_indices[ADAPTER]), own.trainable_tokens_delta[ADAPTER].detach()


# The form in which every adapter is kept: a LoRA or DoRA of peft's; the files depend on nothing but the weights.

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_PREFIX = "base_model.model."
"""peft's, of every tensor's name."""


def write(model: Model, directory: Path, base_digest: str) -> None:
    """Write the adapter of a model in training, or of a loaded one."""
    files.make_directory(directory)
    own: LoraConfig = model.peft_config[ADAPTER]
    layers = dict(adapted_layers(model))
    if isinstance(own, AdaLoraConfig) or any(initial_pissa_factors(layer) for layer in layers.values()):
        tensors, changes = _fold_into_plain_lora(model, own)
    else:
        tensors, changes = collect_tensors(model), {}
        changes["target_modules"] = [name for name, one in layers.items() if not isinstance(one, ParamWrapper)]
    changes["target_modules"] = _shorten_names(changes["target_modules"], model)
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(ready, directory / WEIGHTS, metadata={"format": "pt"})
    files.write_json(directory / CONFIG, _config_document(own, changes, base_digest))


def read(directory: Path) -> dict[str, Tensor]:
    """The saved tensors, by peft's names. Raises DamagedFileError when there is no readable file of them."""
    try:
        tensors: dict[str, Tensor] = load_file(directory / WEIGHTS)
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{directory / WEIGHTS}: cannot be read ({error}); train again") from None
    if not tensors:
        raise DamagedFileError(f"{directory / WEIGHTS}: holds no tensors; train again")
    return tensors


def collect_tensors(model: Model) -> dict[str, Tensor]:
    """The tensors of a LoRA or DoRA by the names under which peft saves them."""
    # Embeddings are frozen but for the rows of new tokens; "auto" would look for the base's config on the hub. Of a
    # state that it takes itself, peft 0.21 takes every bias of the matrices for a piece of something larger, and warns.
    found: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=model.state_dict(), save_embedding_layers=False
    )
    return found


def exact_name_pattern(values: Mapping[str, Any]) -> dict[str, Any]:
    """A rank or alpha pattern that matches just these names."""
    return {f"^{re.escape(name)}": value for name, value in values.items()}


def _fold_into_plain_lora(model: Model, own: LoraConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and settings of the plain LoRA that does what PiSSA's or AdaLoRA's matrices do."""
    every = list(iterate_factors(model))
    updates = [one for one in every if one.rank] or [_zero_factors(every[0])]
    tensors = {}
    for one in updates:
        tensors[f"{_PREFIX}{one.name}.lora_A.weight"] = one.a
        tensors[f"{_PREFIX}{one.name}.lora_B.weight"] = one.b
    for name, _, rows in token_rows(model):
        module = name.removesuffix(".weight")
        tensors[f"{_PREFIX}{module}.token_adapter.trainable_tokens_delta"] = rows.float()
    rank = max(one.rank for one in updates)
    stabilised = own.use_rslora
    alphas = {one.name: one.scale * (math.sqrt(one.rank) if stabilised else one.rank) for one in updates}
    alpha = next(alphas[one.name] for one in updates if one.rank == rank)
    return tensors, {
        "target_modules": [one.name for one in updates],
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": stabilised,
        "rank_pattern": exact_name_pattern({one.name: one.rank for one in updates if one.rank != rank}),
        "alpha_pattern": exact_name_pattern({name: value for name, value in alphas.items() if value != alpha}),
    }


def _zero_factors(one: LoraFactors) -> LoraFactors:
    """An update of rank 1 that is zero: peft loads no adapter without any layer."""
    a, b = one.a.new_zeros(1, one.a.shape[1]), one.b.new_zeros(one.b.shape[0], 1)
    return LoraFactors(one.name, one.layer, a, b, one.scale)


def _shorten_names(names: list[str], model: Model) -> list[str]:
    """The last parts of the names if those mean just these modules, as people write them; else the names."""
    leaves = {name.rsplit(".", 1)[-1] for name in names}
    plain = (path for path, _ in model.get_base_model().named_modules() if "base_layer" not in path.split("."))
    meant = [path for path in plain if path.rsplit(".", 1)[-1] in leaves]
    return sorted(leaves) if sorted(meant) == sorted(names) else sorted(names)


def _config_document(own: LoraConfig, changes: dict[str, Any], base_digest: str) -> dict[str, Any]:
    """adapter_config.json, of a plain LoRA's entries only."""
    made = LoraConfig(
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base_digest,
        lora_dropout=own.lora_dropout,
        fan_in_fan_out=own.fan_in_fan_out,
        use_dora=own.use_dora,
        trainable_token_indices=own.trainable_token_indices,
        target_parameters=sorted(own.target_parameters) if own.target_parameters else None,
        **{key: getattr(own, key) for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")}
        | changes,
    )
    # peft keeps sets: their order changes from process to process.
    document: dict[str, Any] = json.loads(json.dumps(made.to_dict(), default=sorted))
    return document
