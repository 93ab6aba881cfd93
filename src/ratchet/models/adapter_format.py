"""Reads and writes saved adapters, and exposes an adapter's update as plain tensors: LoRA matrices and token rows."""

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
from safetensors.torch import load_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from ratchet.errors import DamagedFileError
from ratchet.models.base_model import BASE_DIGEST, BaseReference
from ratchet.models.device import Model
from ratchet.models.safetensors_format import encode_header, view_bytes
from ratchet.storage import files

ADAPTER = "default"
"""Name under which peft holds a model's only adapter."""

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"

_PREFIX = "base_model.model."
"""Prefix of every tensor name in a peft checkpoint."""


@dataclass(frozen=True)
class LoraFactors:
    """A layer's update `scale * b @ a` in float32, relative to the base weights as loaded from disk.

    For LoRA and rsLoRA (Hu et al. 2021; Kalajdzievski 2023), `a` and `b` are the two matrices themselves. For PiSSA
    (Meng et al. 2024) the update is B A - B0 A0, stored as [B, -B0] [A; A0]. For AdaLoRA (Zhang et al. 2023) the update
    is B diag(E) A: `a` includes E and has no pruned directions. DoRA's magnitudes are not included.
    """

    name: str
    """Name of the module in the base model; for fused experts, the name of their parameter."""
    layer: Any
    a: Tensor
    """[rank, inputs]; for fused experts [experts, rank, inputs]."""
    b: Tensor
    """[outputs, rank]; for fused experts [experts, outputs, rank]."""
    scale: float

    @property
    def rank(self) -> int:
        """Rank of the update; for experts, the rank of each expert's update."""
        return int(self.a.shape[-2])

    @property
    def transposed(self) -> bool:
        """Whether the weight in memory is [inputs, outputs]: unquantized Conv1D (GPT-2), embeddings, some experts."""
        if isinstance(self.layer, ParamWrapper):
            return not self.layer._did_swap_in_out_features
        return isinstance(self.layer.get_base_layer(), Conv1D | torch.nn.Embedding)

    def update(self) -> Tensor:
        """Return the tensor to add to the base weight, in float32 and in the layout of the base."""
        product = (self.b @ self.a).mul_(self.scale)
        return product.mT if self.transposed else product


def adapted_layers(model: Model) -> Iterator[tuple[str, Any]]:
    """Yield every adapted layer as (name in the base model, peft layer), in module order."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for path, module in base.named_modules():
        if isinstance(module, LoraLayer):
            yield name_in_base(path, module), module


def name_in_base(path: str, layer: Any) -> str:
    """Return the name in the base model of the module (for experts, of the parameter) that a peft layer adapts."""
    plain = ".".join(part for part in path.split(".") if part != "base_layer")
    return f"{plain}.{layer.parameter_name}" if isinstance(layer, ParamWrapper) else plain


def iterate_factors(model: Model) -> Iterator[LoraFactors]:
    """Yield the update of every adapted layer. Do not modify its tensors: they may share memory with the parameters."""
    return (layer_factors(name, layer) for name, layer in adapted_layers(model))


def layer_factors(name: str, layer: Any) -> LoraFactors:
    """Return the update of one peft layer."""
    if isinstance(layer, AdaLoraLayer):
        e = layer.lora_E[ADAPTER].detach().float()
        nonzero = e.flatten() != 0
        a = (layer.lora_A[ADAPTER].detach().float() * e)[nonzero]
        b = layer.lora_B[ADAPTER].detach().float()[:, nonzero]
        scale = layer.scaling[ADAPTER] / float(layer.ranknum[ADAPTER] + 1e-5)  # as peft computes it in every pass
        return LoraFactors(name, layer, a, b, scale)
    if isinstance(layer, Embedding):
        a, b = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
    else:
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    if isinstance(layer, ParamWrapper):  # fused: A [experts * rank, inputs] and B [outputs, rank * experts]
        a = a.reshape(layer.num_experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, layer.num_experts).permute(2, 0, 1)
    a, b, scale = a.detach().float(), b.detach().float(), float(layer.scaling[ADAPTER])
    if (initial := initial_pissa_factors(layer)) is not None:
        a0, b0 = (tensor.to(a.device, torch.float32) for tensor in initial)
        a, b = torch.cat([a, a0]), torch.cat([b, -b0], dim=1)
    return LoraFactors(name, layer, a, b, scale)


def initial_pissa_factors(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Return PiSSA's A0 and B0, whose product was subtracted from the base weight; None for other adapters."""
    factors: tuple[Tensor, Tensor] | None = getattr(layer, "initial_factors", None)
    return factors


def pissa_offset(layer: Any) -> Tensor | None:
    """Return the tensor that PiSSA subtracted from the base weight, [outputs, inputs] in float32; None otherwise."""
    initial = initial_pissa_factors(layer)
    return None if initial is None else scaled_product(layer, *initial)


def scaled_product(layer: Any, a: Tensor, b: Tensor) -> Tensor:
    """Compute scale * b @ a, [outputs, inputs] in float32, on the device of the layer's weight."""
    device = layer.get_base_layer().weight.device
    return float(layer.scaling[ADAPTER]) * (b.to(device, torch.float32) @ a.to(device, torch.float32))


def token_rows(model: Model) -> Iterator[tuple[str, list[int], Tensor]]:
    """Yield each parameter with trained token rows: its name in the base model, the token ids, the rows [ids, width].

    If the embedding is tied to the output head, only the embedding is yielded.
    """
    for path, module in model.get_base_model().named_modules():
        if isinstance(module, TrainableTokensWrapper) and not module.token_adapter.tied_adapter:
            token_adapter = module.token_adapter
            yield (
                f"{path}.weight",
                list(token_adapter.token_indices[ADAPTER]),
                token_adapter.trainable_tokens_delta[ADAPTER].detach(),
            )


# Files.


def save(model: Model, directory: Path, base: BaseReference) -> None:
    """Save the adapter of a model, in training or loaded, in peft's format: a LoRA or DoRA that fits the base on disk.

    PiSSA becomes a LoRA of twice the rank. AdaLoRA becomes a LoRA with one rank per module, without the modules that
    were pruned to rank 0. The same weights give the same bytes on every machine, and plain peft loads them with their
    base: `AutoPeftModelForCausalLM.from_pretrained(directory)`, from the project's directory if the base is not on the
    hub.
    """
    files.make_directory(directory)
    config: LoraConfig = model.peft_config[ADAPTER]
    layers = dict(adapted_layers(model))
    if isinstance(config, AdaLoraConfig) or any(initial_pissa_factors(layer) for layer in layers.values()):
        tensors, overrides = _fold_into_plain_lora(model, config)
    else:
        tensors, overrides = collect_tensors(model), {}
        overrides["target_modules"] = [name for name, layer in layers.items() if not isinstance(layer, ParamWrapper)]
    # The last parts of names (`q_proj`) are sufficient if they match exactly these modules.
    names = sorted(overrides["target_modules"])
    last_parts = {name.rsplit(".", 1)[-1] for name in names}
    module_names = (path for path, _ in model.get_base_model().named_modules() if "base_layer" not in path.split("."))
    matching = sorted(path for path in module_names if path.rsplit(".", 1)[-1] in last_parts)
    overrides["target_modules"] = sorted(last_parts) if matching == names else names
    _write_tensors(directory / WEIGHTS, tensors, {"format": "pt", BASE_DIGEST: base.digest})
    files.write_json(directory / CONFIG, _config_document(config, overrides, base))


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file. The library's own writer puts several metadata in an order that changes from process to
    process."""
    entries = sorted(tensors.items(), key=lambda entry: (-entry[1].dtype.itemsize, entry[0]))
    header = encode_header(((name, tensor.dtype, tensor.shape) for name, tensor in entries), metadata, sort_names=False)
    files.write_blocks(path, [[header], *([view_bytes(tensor.detach().cpu())] for _, tensor in entries)])


def read(directory: Path) -> dict[str, Tensor]:
    """Return the saved tensors by their peft names. Raises DamagedFileError if the file is missing or unreadable."""
    return read_tensors(directory / WEIGHTS)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises DamagedFileError if it is missing, unreadable or empty."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{path}: cannot be read ({error}); train again") from None
    if not tensors:
        raise DamagedFileError(f"{path}: the file contains no tensors; train again")
    return tensors


def collect_tensors(model: Model) -> dict[str, Tensor]:
    """Return the tensors of a LoRA or DoRA adapter by the names under which peft saves them."""
    # Embeddings are not saved, because they are frozen except for rows of new tokens; with save_embedding_layers="auto"
    # peft would look up the base's config on the hub. The state dict is passed in, because peft 0.21 otherwise mistakes
    # one-dimensional biases of the matrices for shards of a matrix, and warns.
    tensors: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=model.state_dict(), save_embedding_layers=False
    )
    return tensors


def exact_name_pattern(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a peft rank or alpha pattern that matches exactly these module names."""
    return {f"^{re.escape(name)}": value for name, value in values.items()}


def _fold_into_plain_lora(model: Model, config: LoraConfig) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors and config overrides of the plain LoRA that is equivalent to a PiSSA or AdaLoRA adapter."""
    all_factors = list(iterate_factors(model))
    updates = [factors for factors in all_factors if factors.rank]
    if not updates:  # peft cannot load an adapter without layers, so save a zero update of rank 1
        first = all_factors[0]
        zero_a, zero_b = first.a.new_zeros(1, first.a.shape[1]), first.b.new_zeros(first.b.shape[0], 1)
        updates = [LoraFactors(first.name, first.layer, zero_a, zero_b, first.scale)]
    tensors = {}
    for factors in updates:
        tensors[f"{_PREFIX}{factors.name}.lora_A.weight"] = factors.a
        tensors[f"{_PREFIX}{factors.name}.lora_B.weight"] = factors.b
    for name, _, rows in token_rows(model):
        module = name.removesuffix(".weight")
        tensors[f"{_PREFIX}{module}.token_adapter.trainable_tokens_delta"] = rows.float()
    rank = max(factors.rank for factors in updates)
    is_rank_stabilized = config.use_rslora
    alphas = {
        factors.name: factors.scale * (math.sqrt(factors.rank) if is_rank_stabilized else factors.rank)
        for factors in updates
    }
    alpha = next(alphas[factors.name] for factors in updates if factors.rank == rank)
    return tensors, {
        "target_modules": [factors.name for factors in updates],
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": is_rank_stabilized,
        "rank_pattern": exact_name_pattern({factors.name: factors.rank for factors in updates if factors.rank != rank}),
        "alpha_pattern": exact_name_pattern({name: value for name, value in alphas.items() if value != alpha}),
    }


def _config_document(config: LoraConfig, overrides: dict[str, Any], base: BaseReference) -> dict[str, Any]:
    """Build adapter_config.json with only the entries of a plain LoRA."""
    plain = LoraConfig(
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base.name,
        revision=base.revision,
        lora_dropout=config.lora_dropout,
        fan_in_fan_out=config.fan_in_fan_out,
        use_dora=config.use_dora,
        trainable_token_indices=config.trainable_token_indices,
        target_parameters=sorted(config.target_parameters) if config.target_parameters else None,
        **{key: getattr(config, key) for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")}
        | overrides,
    )
    # `default=sorted` sorts the sets in peft's config, because their order changes from process to process.
    document: dict[str, Any] = json.loads(json.dumps(plain.to_dict(), default=sorted))
    return document
