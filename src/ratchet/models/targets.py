"""Resolves `train.target_modules` and the rank and alpha patterns to layers of a model, and validates them.

The checks need no weights. They find names without a match, modules that are not linear, ranks that are too large for a
matrix, and adapters that a layer does not support. Names are matched as in peft.
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from ratchet.config.train import Train
from ratchet.errors import SettingsError
from ratchet.models.device import Model
from ratchet.models.model_spec import LayerSpec, ModelSpec, Role, list_layers, list_other_modules

GROUPS: dict[str, tuple[Role, ...]] = {"attention": ("attention",), "mlp": ("mlp",), "all": ("attention", "mlp")}
"""Groups that train.target_modules accepts. Embeddings, norms, routers and the head belong to no group."""

_MIXER_MODEL_TYPES = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Model types in which peft 0.21 rejects an adapter on `out_proj` (tuners_utils, _check_lora_target_modules_mamba)."""


def check(spec: ModelSpec, settings: Train) -> tuple[LayerSpec, ...]:
    """Validate targets, patterns and ranks without weights; return the layers that get an adapter.

    Raises:
        BaseModelError: the model is not a causal language model.
        SettingsError: targets, rank or a pattern of section train do not fit the model.
    """
    spec.require_causal()
    chosen = choose(spec.layers, settings.target_modules, spec.others)
    check_patterns(chosen, settings)
    check_ranks(chosen, settings)
    _check_mixers(spec, chosen)
    return chosen


def choose(
    layers: Sequence[LayerSpec], modules: str | Sequence[str], others: Mapping[str, str] | None = None
) -> tuple[LayerSpec, ...]:
    """Return the layers that `train.target_modules` selects, in model order.

    Args:
        layers: layers of the model (`model_spec.list_layers`).
        modules: a group; or a regular expression that must match a full name; or a list of full names or of their last
            parts (`q_proj`, `self_attn.q_proj`).
        others: classes of the model's other modules (`model_spec.list_other_modules`), for error messages.

    Raises:
        SettingsError: a name, the expression or the group matches nothing, or matches a module that is not linear.
    """
    others = others or {}
    if not isinstance(modules, str):
        names = {layer.name for text in modules for layer in _match_name(text, layers, others)}
        return tuple(layer for layer in layers if layer.name in names)
    if modules in GROUPS:
        chosen = tuple(layer for layer in layers if layer.role in GROUPS[modules])
        return chosen or _raise_empty_group(modules, layers)
    return _match_expression(modules, layers, others)


def layer_rank(layer: LayerSpec, settings: Train) -> int:
    """Return the rank of a layer's adapter, from the first pattern that matches the layer's name, or train.rank."""
    key = _first_matching_key(layer, settings.rank_pattern)
    return settings.rank if key is None else settings.rank_pattern[key]


def layer_alpha(layer: LayerSpec, settings: Train) -> float:
    """Return the alpha of a layer's adapter, from the first pattern that matches the layer's name, or train.alpha."""
    key = _first_matching_key(layer, settings.alpha_pattern)
    return settings.alpha if key is None else settings.alpha_pattern[key]


def check_patterns(chosen: Sequence[LayerSpec], settings: Train) -> None:
    """Raise SettingsError if a key of rank_pattern or alpha_pattern matches no adapted layer."""
    for setting, keys in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern)):
        for key in keys:
            _compile_expression(_pattern_expression(key), f"train.{setting}: {key}")
            if not any(re.match(_pattern_expression(key), layer.name) for layer in chosen):
                raise SettingsError(
                    f"train.{setting}: {key}: no layer with an adapter has a name that ends like this"
                    f"{_suggest_nearest_names(key, chosen, {})}"
                )


def check_ranks(chosen: Sequence[LayerSpec], settings: Train) -> None:
    """Raise SettingsError if a rank exceeds the smaller side of its matrix."""
    for layer in chosen:
        rank, side = layer_rank(layer, settings), min(layer.inputs, layer.outputs)
        if rank > side:
            key = _first_matching_key(layer, settings.rank_pattern)
            setting = "train.rank" if key is None else f"train.rank_pattern.{key}"
            raise SettingsError(
                f"{setting}: {rank}, but {layer.name} is {layer.outputs} x {layer.inputs} and its updates have at most "
                f"rank {side}; set {side} or less, or remove the layer from train.target_modules"
            )


def _check_mixers(spec: ModelSpec, chosen: Sequence[LayerSpec]) -> None:
    model_type = spec.config.model_type
    if model_type in _MIXER_MODEL_TYPES and (
        adapted := [layer for layer in chosen if layer.name.endswith(".out_proj")]
    ):
        raise SettingsError(
            f"train.target_modules: {adapted[0].name}: fused kernels of {model_type} read this weight directly, so "
            "peft rejects an adapter on it; remove out_proj"
        )


def _pattern_expression(key: str) -> str:
    """Return peft's regular expression for a key of a pattern (get_pattern_key)."""
    return rf"(.*\.)?({key})$"


def _first_matching_key(layer: LayerSpec, keys: Iterable[str]) -> str | None:
    return next((key for key in keys if re.match(_pattern_expression(key), layer.name)), None)


def _match_name(text: str, layers: Sequence[LayerSpec], others: Mapping[str, str]) -> list[LayerSpec]:
    matches = [layer for layer in layers if _ends_with(layer.name, text)]
    if matches:
        return matches
    if unsupported := [name for name in others if _ends_with(name, text)]:
        _raise_not_linear(text, unsupported, layers, others)
    raise SettingsError(
        f"train.target_modules: {text}: the model has no module with this "
        f"name{_suggest_nearest_names(text, layers, others)}; groups: {', '.join(GROUPS)}"
    )


def _match_expression(expression: str, layers: Sequence[LayerSpec], others: Mapping[str, str]) -> tuple[LayerSpec, ...]:
    """Return the layers that match. The expression may also match modules that contain layers, but no other modules."""
    pattern = _compile_expression(expression, f"train.target_modules: {expression}")
    matches = tuple(layer for layer in layers if pattern.fullmatch(layer.name))
    containers = (
        {name[:end] for name in (*others, *(layer.name for layer in layers)) for end in _dot_positions(name)}
        if matches
        else set()
    )
    if unsupported := [name for name in others if name not in containers and pattern.fullmatch(name)]:
        _raise_not_linear(expression, unsupported, layers, others)
    if matches:
        return matches
    raise SettingsError(
        f"train.target_modules: {expression}: neither a group ({', '.join(GROUPS)}) nor a regular expression that "
        f"matches the full name of a layer{_suggest_nearest_names(expression, layers, others)}; "
        f"for module names, use a list: [{expression}]"
    )


def _compile_expression(expression: str, key: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise SettingsError(f"{key}: not a regular expression ({error}); correct it, or use a list of names") from None


def _ends_with(name: str, text: str) -> bool:
    return name == text or name.endswith(f".{text}")


def _dot_positions(name: str) -> list[int]:
    return [position for position, character in enumerate(name) if character == "."]


def _raise_empty_group(group: str, layers: Sequence[LayerSpec]) -> NoReturn:
    ungrouped = [layer for layer in layers if layer.role == "other"]
    raise SettingsError(
        f"train.target_modules: {group}: the model has no such layers; use a list of names, such as: "
        f"{_summarize_layers(ungrouped or layers)}"
    )


def _raise_not_linear(
    text: str, unsupported: Sequence[str], layers: Sequence[LayerSpec], others: Mapping[str, str]
) -> NoReturn:
    more_count = f" and {len(unsupported) - 1} more" if len(unsupported) > 1 else ""
    inner_layers = [layer for layer in layers if layer.name.startswith(f"{unsupported[0]}.")]
    advice = (
        f"name its layers: {_summarize_layers(inner_layers)}"
        if inner_layers
        else f"linear layers: {_summarize_layers(layers)}"
    )
    raise SettingsError(
        f"train.target_modules: {text}: {unsupported[0]}{more_count} is of class {others[unsupported[0]]}, not a "
        f"linear layer; {advice}"
    )


def _summarize_layers(layers: Sequence[LayerSpec]) -> str:
    """List the last parts of names with their counts: `q_proj (32), v_proj (32)`."""
    counts = Counter(layer.name.rsplit(".", 1)[-1] for layer in layers)
    return ", ".join(f"{leaf} ({count})" for leaf, count in counts.items())


def _suggest_nearest_names(text: str, layers: Iterable[LayerSpec], others: Mapping[str, str]) -> str:
    """Return a hint such as `; nearest: q_proj, k_proj`. As many last parts of names are compared as the text has."""
    plain = re.sub(r"[^\w.]+", "", text.replace(".*", "").replace(r"\.", ".")).strip(".")
    parts = plain.count(".") + 1
    linear = {".".join(layer.name.split(".")[-parts:]) for layer in layers}
    suffixes = linear | {".".join(name.split(".")[-parts:]) for name in others}
    nearest = difflib.get_close_matches(plain, sorted(suffixes), n=4, cutoff=0.5)
    nearest.sort(key=lambda suffix: suffix not in linear)  # linear layers come first
    return f"; nearest: {', '.join(nearest)}" if nearest else f"; layers: {_summarize_layers(tuple(layers))}"


# Checks of adapter and layer together.
#
# The checks refuse combinations that peft 0.21 does not support (tuners/lora/layer.py ParamWrapper,
# tuners/adalora/model.py, tuners/trainable_tokens), and adapters on embeddings tied to the head. peft only warns of an
# adapter on a tied embedding, but such an adapter cannot be merged.


def check_adapter(spec: ModelSpec, settings: Train, trains_tokens: bool) -> tuple[LayerSpec, ...]:
    """Validate everything that is known without weights; return the layers that get an adapter.

    Args:
        spec: spec of the base.
        settings: section train.
        trains_tokens: whether rows of added tokens are trained.

    Raises:
        BaseModelError: the model is not a causal language model.
        SettingsError: targets, patterns or ranks do not fit the model, or its layers do not support this adapter.
    """
    chosen = check(spec, settings)
    _check_layers(chosen, settings, spec.tied_head)
    if trains_tokens:
        _check_tokens(chosen, spec.layers)
    return chosen


def choose_for_adapter(base: Model, settings: Train, trains_tokens: bool) -> tuple[LayerSpec, ...]:
    """Choose and validate the layers of an existing model: without adapters, in 4 bits or not, on any device.

    Raises:
        SettingsError: targets, ranks or patterns do not fit the model, or its layers do not support this adapter, alone
            or together with trained token rows.
    """
    layers, tied = list_layers(base), has_tied_head(base)
    chosen = choose(layers, settings.target_modules, list_other_modules(base))
    check_patterns(chosen, settings)
    check_ranks(chosen, settings)
    _check_layers(chosen, settings, tied)
    if trains_tokens:
        _check_tokens(chosen, layers)
    return chosen


def sharding_obstacle(settings: Train) -> str | None:
    """Return the reason why the base cannot be sharded with these settings; None if it can."""
    if settings.adapter == "dora" and settings.quantization != "none":
        return "train.adapter: dora reads whole 4-bit matrices, which peft does not support for shards"
    return None


def has_tied_head(base: Model) -> bool:
    """Return True if the output layer and the embedding of a model are one tensor."""
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def _check_layers(chosen: Sequence[LayerSpec], settings: Train, tied_head: bool) -> None:
    for layer in chosen:
        if reason := _adapter_obstacle(layer, settings, tied_head):
            raise SettingsError(f"train.target_modules: {layer.name}: {reason}")


def _check_tokens(chosen: Sequence[LayerSpec], layers: Sequence[LayerSpec]) -> None:
    if adapted := [layer.name for layer in chosen if layer.role in ("embedding", "head")]:
        raise SettingsError(
            f"train.target_modules: {adapted[0]}: its rows of base.added_tokens are trained, and peft supports either "
            "an adapter or trained rows on a layer; remove it from the targets"
        )
    head = next((layer for layer in layers if layer.role == "head"), None)
    if head is not None and head.bias:
        raise SettingsError(
            f"base.added_tokens: {head.name} has a bias, which peft does not support on an output layer with trained "
            "rows; set []"
        )


def _adapter_obstacle(layer: LayerSpec, settings: Train, tied_head: bool) -> str | None:
    """Return the reason why this layer cannot have the adapter of section train; None if it can."""
    if layer.kind == "experts":
        return _experts_obstacle(settings)
    if layer.role in ("embedding", "head") and tied_head:
        return (
            "embedding and output layer of this model are one tensor, and an adapter on one of them could not be "
            "merged; remove it"
        )
    if layer.kind == "embedding":
        return _embedding_obstacle(settings)
    return None


def _experts_obstacle(settings: Train) -> str | None:
    prefix = "is one tensor for all experts, which supports only plain LoRA in peft, "
    if settings.adapter != "lora":
        return f"{prefix}not {settings.adapter}; set adapter: lora, or target_modules: attention"
    if settings.initialization != "zero":
        return f"{prefix}initialized with zero; set initialization: zero, or target_modules: attention"
    if settings.dropout:
        return f"{prefix}without dropout; set dropout: 0, or target_modules: attention"
    return None


def _embedding_obstacle(settings: Train) -> str | None:
    prefix = "is an embedding, which supports only plain LoRA here, "
    if settings.adapter == "dora":
        return f"{prefix}because DoRA's magnitude per column cannot be merged; set adapter: lora"
    if settings.adapter == "adalora":
        return f"{prefix}not adalora; set adapter: lora, or remove it"
    if settings.initialization != "zero":
        return f"{prefix}initialized with zero; set initialization: zero, or remove it"
    return None
