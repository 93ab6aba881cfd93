"""What one adapter does to one parameter of the base; sums are computed in float32."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from ratchet.errors import BaseModelError, DamagedFileError, first_line
from ratchet.models import adapter_format, adapters, frozen_weights
from ratchet.models.device import Model


@dataclass(frozen=True)
class ParameterUpdate:
    """What one adapter does to one parameter of the base."""

    module: str
    """Name by which it is chosen: of the module, or of the experts' parameter."""
    leaf: str
    """Name of the parameter in its module."""
    layers: tuple[Any, ...]
    """peft's, outermost first."""
    replacement: Tensor | None
    """The parameter itself, where the adapter holds it in full."""
    turned: bool
    """Whether the parameter is a weight that lies as [inputs, outputs]."""

    def applied(self, value: Tensor) -> Tensor:
        """The changed parameter.

        Args:
            value: as the base has it, in float32; it may be changed in place.
        """
        if self.replacement is not None:
            value = self.replacement.to(value.device, torch.float32, copy=True)
        value = value.T if self.turned else value
        for layer in self.layers:
            value = _apply_layer(layer, self.leaf, value)
        return value.T if self.turned else value

    def is_same(self, other: "ParameterUpdate") -> bool:
        """Whether it makes of the same tensor the same one: then tied parameters may stay tied."""
        return _changed_token_rows(self) is not None and _changed_token_rows(self) == _changed_token_rows(other)


def is_changed_by(layer: Any, leaf: str) -> bool:
    """Whether one of peft's layers changes this parameter of the module that it is around."""
    if isinstance(layer, ParamWrapper):
        return bool(leaf == layer.parameter_name)
    return leaf == "weight" or (leaf == "bias" and has_bias(layer))


def has_bias(layer: Any) -> bool:
    """Whether it adds something to the bias (lora_bias)."""
    if not isinstance(layer, LoraLayer) or adapter_format.ADAPTER not in layer.lora_B:
        return False
    return layer.lora_B[adapter_format.ADAPTER].bias is not None


def _apply_layer(layer: Any, leaf: str, value: Tensor) -> Tensor:
    """A parameter with the update of one of peft's layers, weights as [outputs, inputs]; changed in place."""
    if isinstance(layer, TrainableTokensLayer):
        return _apply_token_rows(layer, value) if leaf == "weight" else value
    if isinstance(layer, ParamWrapper):
        if leaf != layer.parameter_name:
            return value
        update = _move_to_device(adapter_format.layer_factors("", layer), value.device).update()
        return value.add_(update.reshape(value.shape))
    if leaf == "bias":
        bias = layer.lora_B[adapter_format.ADAPTER].bias
        return value.add_(bias.detach().to(value.device, torch.float32), alpha=layer.scaling[adapter_format.ADAPTER])
    return _apply_lora_update(layer, value)


def _apply_lora_update(layer: Any, weight: Tensor) -> Tensor:
    """LoRA, W + s B A (Hu et al. 2021), or DoRA, m (W + s B A) / ||W + s B A|| row by row (Liu et al. 2024)."""
    found = _move_to_device(adapter_format.layer_factors("", layer), weight.device)
    moved = weight.add_((found.b @ found.a).mul_(found.scale))
    if adapter_format.ADAPTER not in layer.lora_magnitude_vector:
        return moved
    magnitude = layer.lora_magnitude_vector[adapter_format.ADAPTER].weight.detach().to(weight.device, torch.float32)
    return moved.mul_((magnitude / torch.linalg.vector_norm(moved, dim=1)).unsqueeze(1))


def _apply_token_rows(layer: TrainableTokensLayer, weight: Tensor) -> Tensor:
    """The weight with the rows of the tokens that have learned."""
    ids = torch.tensor(layer.token_indices[adapter_format.ADAPTER], device=weight.device)
    rows = layer.trainable_tokens_delta[adapter_format.ADAPTER].detach().to(weight.device, torch.float32)
    if isinstance(frozen_weights.unwrap_to_base(layer), nn.Embedding):
        return weight.index_copy_(1, ids, rows.T)
    return weight.index_copy_(0, ids, rows)


def _move_to_device(found: adapter_format.LoraFactors, device: torch.device) -> adapter_format.LoraFactors:
    return adapter_format.LoraFactors(found.name, found.layer, found.a.to(device), found.b.to(device), found.scale)


def _changed_token_rows(change: ParameterUpdate) -> list[int] | None:
    """What stands for the rows that a change sets; None when it does anything else."""
    if change.replacement is not None or not all(isinstance(one, TrainableTokensLayer) for one in change.layers):
        return None
    return [id(layer.trainable_tokens_delta[adapter_format.ADAPTER]) for layer in change.layers]


# Saved adapters put on the base's module graph without its weights: what belongs where is for peft to say.
#
# Each adapter's settings are given to peft with the base on the meta device, and its saved tensors take the places
# that
# peft has made for them. So rank and alpha patterns, rsLoRA's scale, rows of tokens, modules that are trained as a
# whole
# and fused experts mean what they mean to peft. What an adapter brings is held once, as it is stored.

_MOVES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base: what is saved is then no update of the base as its files hold it."""
_ON_THE_WAY = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config",
    "monteclora_config", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
"""Settings of peft's with which a layer computes something else than with a changed weight."""


def read_updates(directory: Path, plain: Model, skeleton: Model, base_digest: str) -> dict[str, ParameterUpdate]:
    """What a saved adapter changes, by name of the parameter.

    Args:
        directory: of the adapter.
        plain: the base without data, with a row for each token.
        skeleton: the same once more; it becomes peft's.
        base_digest: of the base.

    Raises:
        BaseModelError: the adapter is of another base, of a kind that is no change of weights, or does not fit.
        DamagedFileError: it cannot be read, or holds NaN.
    """
    return dict(_collect_updates(directory, plain, _attach_adapter(directory, skeleton, base_digest)))


def _attach_adapter(directory: Path, skeleton: Model, base_digest: str) -> Model:
    """peft's model around a base without data, with the saved tensors in their places."""
    config = _read_lora_config(directory, base_digest)
    saved = adapter_format.read(directory)
    for name, tensor in saved.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DamagedFileError(
                f"{directory / adapter_format.WEIGHTS}: {name} holds NaN or infinite numbers; train again"
            )
    skeleton.name_or_path = config.base_model_name_or_path  # else peft says that it renames it
    try:
        with adapters.suppress_peft_warnings():
            model = get_peft_model(skeleton, config, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise BaseModelError(
            f"{directory}: the adapter does not fit this base model: {' '.join(str(error).split())[:300]}"
        ) from None
    places = _saved_parameters(model, saved)
    for name in sorted(saved.keys() ^ places.keys()):
        raise BaseModelError(
            f"{directory}: the adapter does not fit this base model: {name} has no place in it"
            if name in saved
            else f"{directory}: {adapter_format.CONFIG} names {name}, but {adapter_format.WEIGHTS} does not have it"
        )
    for name, tensor in saved.items():
        if tensor.shape != places[name].shape:
            raise BaseModelError(
                f"{directory}: the adapter does not fit this base model: {name} is {_format_shape(tensor.shape)}, "
                f"its place {_format_shape(places[name].shape)}"
            )
    filled = {id(places[name]): nn.Parameter(tensor, requires_grad=False) for name, tensor in saved.items()}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in filled:
                module._parameters[leaf] = filled[id(parameter)]
    return model


def _saved_parameters(model: Model, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of peft's model by the names under which they are saved; those of the base that are saved, too."""
    places: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=model.state_dict(keep_vars=True), save_embedding_layers=False
    )
    own = dict(model.named_parameters(remove_duplicate=False))
    return places | {name: own[name] for name in saved.keys() - places.keys() if name in own}


def _read_lora_config(directory: Path, base_digest: str) -> LoraConfig:
    """The adapter's settings. Raises as `AdapterUpdates.read`."""
    path = directory / adapter_format.CONFIG
    try:
        document = json.loads(path.read_bytes())
        kind, base = str(document["peft_type"]), str(document["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{path}: cannot be read ({error}); train again") from None
    if base != base_digest:
        raise BaseModelError(
            f"{directory}: the adapter is of base model {base[:12]}, and it is to be merged into {base_digest[:12]}; "
            "bring its own base, or an adapter that was trained on this one"
        )
    if kind != "LORA":
        raise BaseModelError(f"{path}: peft_type {kind}: only LORA can be merged here; save it as an ordinary LoRA")
    begun = str(document.get("init_lora_weights")).lower()
    if begun.startswith(_MOVES_THE_BASE):
        raise BaseModelError(
            f"{path}: init_lora_weights {begun} has changed the base while training, and the files say no more what "
            "was taken off it; save it with path_initial_model_for_weight_conversion"
        )
    if strange := [key for key in _ON_THE_WAY if document.get(key)]:
        raise BaseModelError(f"{path}: {strange[0]}: such an adapter is no change of weights, and cannot be merged")
    try:
        config: LoraConfig = LoraConfig.from_pretrained(str(directory))
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedFileError(f"{path}: peft cannot read it ({first_line(error)}); train again") from None
    return config


def _collect_updates(directory: Path, plain: Model, model: Model) -> Iterator[tuple[str, ParameterUpdate]]:
    """Every parameter of the base that a filled model of peft's changes, and how."""
    for path, target, source in _pair_modules(plain, model.get_base_model()):
        layers = _wrapping_adapters(source)
        within = _innermost_module(source)
        for leaf, parameter in target.named_parameters(recurse=False):
            name = f"{path}.{leaf}".lstrip(".")
            own = getattr(within, leaf)
            chosen = tuple(layer for layer in layers if is_changed_by(layer, leaf))
            replacement = None if own.is_meta else own
            if replacement is not None and replacement.shape != parameter.shape:
                raise BaseModelError(
                    f"{directory}: {name} is {_format_shape(replacement.shape)}, "
                    f"and the base has {_format_shape(parameter.shape)}"
                )
            if chosen or replacement is not None:
                experts = any(isinstance(layer, ParamWrapper) for layer in chosen)
                turned = leaf == "weight" and isinstance(target, frozen_weights.TRANSPOSED)
                yield name, ParameterUpdate(name if experts else path, leaf, chosen, replacement, turned)
        if any(has_bias(layer) for layer in layers) and target.bias is None:
            raise BaseModelError(
                f"{directory}: it has learned a bias for {path} (lora_bias), which has none in this base; a model "
                "with one would be of another class"
            )


def _pair_modules(target: Any, source: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name and module of the plain model, and the same module of the adapted one, adapters around it included."""
    yield name, target, source
    below = _innermost_module(source)
    for child_name, child in target.named_children():
        yield from _pair_modules(child, getattr(below, child_name), f"{name}.{child_name}".lstrip("."))


def _wrapping_adapters(module: Any) -> list[Any]:
    """The adapters around a module, outermost first."""
    found = []
    while (inner := _wrapped_module(module)) is not None:
        if isinstance(module, BaseTunerLayer):
            found.append(module)
        module = inner
    return found


def _innermost_module(module: Any) -> Any:
    while (inner := _wrapped_module(module)) is not None:
        module = inner
    return module


def _wrapped_module(module: Any) -> Any:
    """What is wrapped; of a module that the adapter holds in full its own copy."""
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[adapter_format.ADAPTER]
    return frozen_weights.wrapped_module(module)


def _format_shape(shape: Any) -> str:
    return " x ".join(map(str, shape)) or "a single number"
