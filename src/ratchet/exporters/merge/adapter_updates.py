"""Reads saved adapters and applies their updates to parameters of the base, in float32.

peft builds its layers around the base's module graph on the meta device, without the base's weights. Then the saved
tensors replace peft's empty parameters. So rank and alpha patterns, rsLoRA scaling, trained token rows, fully trained
modules and fused experts have exactly peft's meaning. Each adapter tensor is in memory once, in its stored type.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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

from ratchet.config.export import MergeMethod
from ratchet.errors import BaseModelError, DamagedFileError, SettingsError, first_line
from ratchet.exporters.merge.combination import combine_updates
from ratchet.exporters.merge.recipe import MergeRecipe, require_updated_modules
from ratchet.models import adapter_format, adapters, base_model, weights
from ratchet.models.device import Model

_BASE_CHANGING_INITIALIZATIONS = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""LoRA initializations that change the base in memory, so that the saved adapter is no update of the base's files."""
_FORWARD_CHANGING_SETTINGS = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "megatron_config",
    "monteclora_config", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
"""peft settings whose layers compute results that no changed weight reproduces."""


class AdapterUpdates:
    """The combined updates of all adapters of a recipe."""

    def __init__(
        self,
        weighted_updates: list[tuple[float, dict[str, "ParameterUpdate"]]],
        method: MergeMethod = "linear",
        density: float = 0.5,
    ) -> None:
        self._weighted_updates = weighted_updates
        self._method: MergeMethod = method
        self._density = density

    @classmethod
    def read(cls, recipe: MergeRecipe, base: Model, make_base: Callable[[], Model]) -> "AdapterUpdates":
        """Read every adapter of a recipe, and drop updates of modules that the recipe does not include.

        Args:
            recipe: the merge.
            base: the base on the meta device, with one row per token; it stays unchanged.
            make_base: builds another model of the same kind, which peft then wraps.

        Raises:
            BaseModelError: an adapter belongs to another base, is not a change of weights, or does not fit.
            DamagedFileError: an adapter cannot be read, or contains NaN.
            SettingsError: a pattern of `export.modules` matches nothing.
        """
        weighted = [
            (
                part.weight,
                dict(
                    _collect_updates(part.adapter, base, _attach_adapter(part.adapter, make_base(), recipe.card.digest))
                ),
            )
            for part in recipe.adapters
        ]
        modules = {update.module for _, updates in weighted for update in updates.values()}
        require_updated_modules(recipe.modules, modules)
        if recipe.method != "linear":
            _require_plain_lora(recipe.method, [updates for _, updates in weighted])
        return cls(
            [
                (weight, {name: update for name, update in updates.items() if recipe.includes(update.module)})
                for weight, updates in weighted
            ],
            recipe.method,
            recipe.density,
        )

    @property
    def names(self) -> frozenset[str]:
        """Names of the updated parameters."""
        return frozenset(name for _, updates in self._weighted_updates for name in updates)

    def apply(self, name: str, value: Tensor) -> Tensor:
        """Return a parameter with all updates: W + sum of w (W' - W). With one adapter of weight 1, the result is W'.

        LoRA updates of matrices are combined by the method of the recipe.

        Args:
            name: name of the parameter.
            value: the base's value in float32; it may be changed in place.
        """
        weighted = [(weight, updates[name]) for weight, updates in self._weighted_updates if name in updates]
        if not weighted:
            return value
        if len(weighted) == 1 and weighted[0][0] == 1 and self._method == "linear":
            return weighted[0][1].apply(value)
        if self._method != "linear" and all(update.is_lora_matrix for _, update in weighted):
            updates = [update.lora_update(value.device) for _, update in weighted]
            factors = [weight for weight, _ in weighted]
            return value.add_(combine_updates(name, updates, factors, self._method, self._density))
        total = torch.zeros_like(value)
        for weight, update in weighted:
            total.add_(update.apply(value.clone()).sub_(value), alpha=weight)
        return value.add_(total)

    def are_same(self, first: str, second: str) -> bool:
        """Return whether two tied parameters receive the same updates, or none, so that they may stay tied."""
        for _, updates in self._weighted_updates:
            a, b = updates.get(first), updates.get(second)
            if a is not b and (a is None or b is None or not a.is_same(b)):
                return False
        return True


@dataclass(frozen=True)
class ParameterUpdate:
    """The update of one parameter of the base by one adapter."""

    module: str
    """Name that `export.modules` matches: the name of the module, or of the experts' parameter."""
    leaf: str
    """Name of the parameter within its module."""
    layers: tuple[Any, ...]
    """peft layers, outermost first."""
    replacement: Tensor | None
    """The complete new parameter, if the adapter stores one; otherwise None."""
    is_transposed: bool
    """Whether the parameter is a weight stored as [inputs, outputs]."""

    def apply(self, value: Tensor) -> Tensor:
        """Return the updated parameter.

        Args:
            value: the base's value in float32; it may be changed in place.
        """
        if self.replacement is not None:
            value = self.replacement.to(value.device, torch.float32, copy=True)
        value = value.T if self.is_transposed else value
        for layer in self.layers:
            value = _apply_layer(layer, self.leaf, value)
        return value.T if self.is_transposed else value

    @property
    def is_lora_matrix(self) -> bool:
        """Whether the update is s B A alone, of a linear layer's weight."""
        return (
            self.replacement is None
            and len(self.layers) == 1
            and self.leaf == "weight"
            and is_linear_lora(self.layers[0])
        )

    def lora_update(self, device: torch.device) -> Tensor:
        """Return s B A in the layout of the parameter; only if `is_lora_matrix`."""
        factors = _layer_factors(self.layers[0], device)
        update = (factors.b @ factors.a).mul_(factors.scale)
        return update.T.contiguous() if self.is_transposed else update

    def is_same(self, other: "ParameterUpdate") -> bool:
        """Return whether both updates give the same result for equal tensors, so that tied parameters may stay tied."""
        rows: list[list[int]] = []
        for update in (self, other):
            if update.replacement is not None:
                return False
            if not all(isinstance(layer, TrainableTokensLayer) for layer in update.layers):
                return False
            rows.append([id(layer.trainable_tokens_delta[adapter_format.ADAPTER]) for layer in update.layers])
        return rows[0] == rows[1]


def is_linear_lora(layer: Any) -> bool:
    """Return whether a peft layer is LoRA around a linear layer: not of an embedding, and not of experts."""
    if not isinstance(layer, LoraLayer) or isinstance(layer, ParamWrapper):
        return False
    return not isinstance(weights.unwrap_to_base(layer), nn.Embedding)


def _require_plain_lora(method: MergeMethod, updates_by_adapter: list[dict[str, ParameterUpdate]]) -> None:
    """Raise SettingsError for DoRA, whose update of a row is no sum, so that entries cannot be dropped."""
    for updates in updates_by_adapter:
        for name, update in updates.items():
            for layer in update.layers:
                if isinstance(layer, LoraLayer) and adapter_format.ADAPTER in layer.lora_magnitude_vector:
                    raise SettingsError(
                        f"export.merge_method: found {method}, but the adapter of {name} is DoRA; expected linear, or "
                        "adapters trained with train.adapter lora"
                    )


# Applying updates.


def _apply_layer(layer: Any, leaf: str, value: Tensor) -> Tensor:
    """Apply one peft layer to a parameter in place; weights are [outputs, inputs]."""
    if isinstance(layer, TrainableTokensLayer):
        return _apply_token_rows(layer, value) if leaf == "weight" else value
    if isinstance(layer, ParamWrapper):
        if leaf != layer.parameter_name:
            return value
        update = _layer_factors(layer, value.device).update()
        return value.add_(update.reshape(value.shape))
    if leaf == "bias":
        bias = layer.lora_B[adapter_format.ADAPTER].bias
        return value.add_(bias.detach().to(value.device, torch.float32), alpha=layer.scaling[adapter_format.ADAPTER])
    return _apply_lora(layer, value)


def _apply_lora(layer: Any, weight: Tensor) -> Tensor:
    """Apply LoRA, W + s B A (Hu et al. 2021), or DoRA, m (W + s B A) / ||W + s B A|| row by row (Liu et al. 2024)."""
    factors = _layer_factors(layer, weight.device)
    updated = weight.add_((factors.b @ factors.a).mul_(factors.scale))
    if adapter_format.ADAPTER not in layer.lora_magnitude_vector:
        return updated
    magnitude = layer.lora_magnitude_vector[adapter_format.ADAPTER].weight.detach().to(weight.device, torch.float32)
    return updated.mul_((magnitude / torch.linalg.vector_norm(updated, dim=1)).unsqueeze(1))


def _apply_token_rows(layer: TrainableTokensLayer, weight: Tensor) -> Tensor:
    """Replace the rows of the trained tokens."""
    ids = torch.tensor(layer.token_indices[adapter_format.ADAPTER], device=weight.device)
    rows = layer.trainable_tokens_delta[adapter_format.ADAPTER].detach().to(weight.device, torch.float32)
    if isinstance(weights.unwrap_to_base(layer), nn.Embedding):
        return weight.index_copy_(1, ids, rows.T)
    return weight.index_copy_(0, ids, rows)


def _layer_factors(layer: Any, device: torch.device) -> adapter_format.LoraFactors:
    factors = adapter_format.layer_factors("", layer)
    return replace(factors, a=factors.a.to(device), b=factors.b.to(device))


# Reading an adapter.


def _attach_adapter(directory: Path, meta_base: Model, base_digest: str) -> Model:
    """Build peft's model around a base on the meta device, with the saved tensors as its parameters."""
    config = _read_lora_config(directory, base_digest)
    saved = adapter_format.read(directory)
    for name, tensor in saved.items():
        if not bool(torch.isfinite(tensor).all()):
            raise DamagedFileError(
                f"{directory / adapter_format.WEIGHTS}: {name} contains NaN or infinity; train the adapter again"
            )
    meta_base.name_or_path = config.base_model_name_or_path  # otherwise peft warns that it renames the base
    try:
        with adapters.suppress_peft_warnings():
            model = get_peft_model(meta_base, config, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise BaseModelError(
            f"{directory}: the adapter does not fit this base model: {' '.join(str(error).split())[:300]}"
        ) from None
    parameters: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=model.state_dict(keep_vars=True), save_embedding_layers=False
    )
    by_name = dict(model.named_parameters(remove_duplicate=False))  # parameters of the base may be saved, too
    parameters |= {name: by_name[name] for name in saved.keys() - parameters.keys() if name in by_name}
    for name in sorted(saved.keys() ^ parameters.keys()):
        raise BaseModelError(
            f"{directory}: the adapter does not fit this base model: the model has no parameter {name}"
            if name in saved
            else f"{directory}: {adapter_format.CONFIG} requires {name}, but {adapter_format.WEIGHTS} lacks it"
        )
    for name, tensor in saved.items():
        if tensor.shape != parameters[name].shape:
            raise BaseModelError(
                f"{directory}: the adapter does not fit this base model: {name}: found "
                f"{_format_shape(tensor.shape)}; expected {_format_shape(parameters[name].shape)}"
            )
    filled = {id(parameters[name]): nn.Parameter(tensor, requires_grad=False) for name, tensor in saved.items()}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in filled:
                module._parameters[leaf] = filled[id(parameter)]
    return model


def _read_lora_config(directory: Path, base_digest: str) -> LoraConfig:
    """Read and check an adapter's settings."""
    path = directory / adapter_format.CONFIG
    try:
        document = json.loads(path.read_bytes())
        kind = str(document["peft_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(f"{path}: cannot be read ({error}); train the adapter again") from None
    if (base := base_model.read_base_digest(directory)) != base_digest:
        raise BaseModelError(
            f"{directory}: the adapter was trained on base model {base[:12]}, but the merge uses {base_digest[:12]}; "
            "use the adapter's own base, or an adapter that was trained on this one"
        )
    if kind != "LORA":
        raise BaseModelError(f"{path}: peft_type: found {kind}; only LORA can be merged; save the adapter as LoRA")
    initialization = str(document.get("init_lora_weights")).lower()
    if initialization.startswith(_BASE_CHANGING_INITIALIZATIONS):
        raise BaseModelError(
            f"{path}: init_lora_weights: {initialization} changed the base during training, and the files do not "
            "contain that change; save the adapter with path_initial_model_for_weight_conversion"
        )
    if unmergeable := [key for key in _FORWARD_CHANGING_SETTINGS if document.get(key)]:
        raise BaseModelError(
            f"{path}: {unmergeable[0]}: such an adapter is not a change of weights and cannot be merged"
        )
    try:
        config: LoraConfig = LoraConfig.from_pretrained(str(directory))
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedFileError(f"{path}: peft cannot read it ({first_line(error)}); train the adapter again") from None
    return config


def _collect_updates(directory: Path, base: Model, adapted: Model) -> Iterator[tuple[str, ParameterUpdate]]:
    """Yield name and update of every parameter of the base that the adapted model changes."""
    for path, target, source in _pair_modules(base, adapted.get_base_model()):
        layers = _wrapping_layers(source)
        innermost = _innermost_module(source)
        for leaf, parameter in target.named_parameters(recurse=False):
            name = f"{path}.{leaf}".lstrip(".")
            stored = getattr(innermost, leaf)
            changing = tuple(layer for layer in layers if _changes_parameter(layer, leaf))
            replacement = None if stored.is_meta else stored
            if replacement is not None and replacement.shape != parameter.shape:
                raise BaseModelError(
                    f"{directory}: {name}: found {_format_shape(replacement.shape)}; the base has "
                    f"{_format_shape(parameter.shape)}"
                )
            if changing or replacement is not None:
                has_experts = any(isinstance(layer, ParamWrapper) for layer in changing)
                is_transposed = leaf == "weight" and isinstance(target, weights.TRANSPOSED)
                yield name, ParameterUpdate(name if has_experts else path, leaf, changing, replacement, is_transposed)
        if any(_has_bias(layer) for layer in layers) and target.bias is None:
            raise BaseModelError(
                f"{directory}: the adapter has a bias for {path} (lora_bias), but that module of the base has none; a "
                "merged model with this bias would need another model class"
            )


def _changes_parameter(layer: Any, leaf: str) -> bool:
    """Return whether a peft layer changes this parameter of the module that it wraps."""
    if isinstance(layer, ParamWrapper):
        return bool(leaf == layer.parameter_name)
    return leaf == "weight" or (leaf == "bias" and _has_bias(layer))


def _has_bias(layer: Any) -> bool:
    """Return whether a peft layer adds to the bias (lora_bias)."""
    if not isinstance(layer, LoraLayer) or adapter_format.ADAPTER not in layer.lora_B:
        return False
    return layer.lora_B[adapter_format.ADAPTER].bias is not None


def _pair_modules(target: Any, source: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each module, the module in the plain model, and the wrapped module in the adapted model."""
    yield name, target, source
    innermost = _innermost_module(source)
    for child_name, child in target.named_children():
        yield from _pair_modules(child, getattr(innermost, child_name), f"{name}.{child_name}".lstrip("."))


def _wrapping_layers(module: Any) -> list[Any]:
    """Return the peft layers around a module, outermost first."""
    layers = []
    while (inner := _wrapped_module(module)) is not None:
        if isinstance(module, BaseTunerLayer):
            layers.append(module)
        module = inner
    return layers


def _innermost_module(module: Any) -> Any:
    while (inner := _wrapped_module(module)) is not None:
        module = inner
    return module


def _wrapped_module(module: Any) -> Any:
    """Return the module inside a wrapper; for a fully trained module, the adapter's copy. None without a wrapper."""
    if isinstance(module, ModulesToSaveWrapper):
        return module.modules_to_save[adapter_format.ADAPTER]
    return weights.wrapped_module(module)


def _format_shape(shape: Any) -> str:
    return " x ".join(map(str, shape)) or "a single number"
