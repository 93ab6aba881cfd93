"""Resolves `train.target_modules` and the rank and alpha patterns to layers of a model, and validates them.

The checks need no weights. They find names without a match, modules that are not linear, ranks that are too large for a
matrix, and adapters that a layer does not support. Names are matched as in peft.
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from ratchet.config.train import Train, find_pattern_key, pattern_expression
from ratchet.errors import SettingsError
from ratchet.models.model_spec import LayerSpec, ModelSpec, Role

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
    for setting, keys in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern)):
        for pattern in keys:
            _compile_expression(pattern_expression(pattern), f"train.{setting}: {pattern}")
            if not any(re.match(pattern_expression(pattern), layer.name) for layer in chosen):
                raise SettingsError(
                    f"train.{setting}: {pattern}: no layer with an adapter has a name that ends like this"
                    f"{_suggest_nearest_names(pattern, chosen, {})}"
                )
    model_type = spec.config.model_type
    for layer in chosen:
        rank, side = layer_rank(layer, settings), min(layer.inputs, layer.outputs)
        if rank > side:
            key = find_pattern_key(layer.name, settings.rank_pattern)
            setting = "train.rank" if key is None else f"train.rank_pattern.{key}"
            raise SettingsError(
                f"{setting}: {rank}, but {layer.name} is {layer.outputs} x {layer.inputs} and its updates have at most "
                f"rank {side}; set {side} or less, or remove the layer from train.target_modules"
            )
        if model_type in _MIXER_MODEL_TYPES and layer.name.endswith(".out_proj"):
            raise SettingsError(
                f"train.target_modules: {layer.name}: fused kernels of {model_type} read this weight directly, so "
                "peft rejects an adapter on it; remove out_proj"
            )
    return chosen


def choose(
    layers: Sequence[LayerSpec], modules: str | Sequence[str], others: Mapping[str, str] | None = None
) -> tuple[LayerSpec, ...]:
    """Return the layers that `train.target_modules` selects, in model order.

    Raises SettingsError if a name, the expression or the group matches nothing, or matches a module that is not linear.

    Args:
        modules: a group; or a regular expression that must match a full name; or a list of full names or of their last
            parts (`q_proj`, `self_attn.q_proj`).
        others: classes of the model's other modules (`model_spec.list_other_modules`), for error messages.
    """
    others = others or {}
    if not isinstance(modules, str):
        names = {layer.name for text in modules for layer in _match_name(text, layers, others)}
        return tuple(layer for layer in layers if layer.name in names)
    if modules in GROUPS:
        if chosen := tuple(layer for layer in layers if layer.role in GROUPS[modules]):
            return chosen
        ungrouped = [layer for layer in layers if layer.role == "other"]
        raise SettingsError(
            f"train.target_modules: {modules}: the model has no such layers; use a list of names, such as: "
            f"{_summarize_layers(ungrouped or layers)}"
        )
    return _match_expression(modules, layers, others)


def layer_rank(layer: LayerSpec, settings: Train) -> int:
    """Return the rank of a layer's adapter, from the first pattern that matches the layer's name, or train.rank."""
    key = find_pattern_key(layer.name, settings.rank_pattern)
    return settings.rank if key is None else settings.rank_pattern[key]


def layer_alpha(layer: LayerSpec, settings: Train) -> float:
    """Return the alpha of a layer's adapter, from the first pattern that matches the layer's name, or train.alpha."""
    key = find_pattern_key(layer.name, settings.alpha_pattern)
    return settings.alpha if key is None else settings.alpha_pattern[key]


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
    named = [name for name in others if pattern.fullmatch(name)]
    names = (*others, *(layer.name for layer in layers))
    if matches:
        named = [name for name in named if not any(other.startswith(f"{name}.") for other in names)]
    if named:
        _raise_not_linear(expression, named, layers, others)
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

    Raises:
        BaseModelError: the model is not a causal language model.
        SettingsError: targets, patterns or ranks do not fit the model, or its layers do not support this adapter.
    """
    chosen = check(spec, settings)
    for layer in chosen:
        if reason := _adapter_obstacle(layer, settings, spec.tied_head):
            raise SettingsError(f"train.target_modules: {layer.name}: {reason}")
    if not trains_tokens:
        return chosen
    if adapted := [layer.name for layer in chosen if layer.role in ("embedding", "head")]:
        raise SettingsError(
            f"train.target_modules: {adapted[0]}: its rows of base.added_tokens are trained, and peft supports either "
            "an adapter or trained rows on a layer; remove it from the targets"
        )
    head = next((layer for layer in spec.layers if layer.role == "head"), None)
    if head is not None and head.bias:
        raise SettingsError(
            f"base.added_tokens: {head.name} has a bias, which peft does not support on an output layer with trained "
            "rows; set []"
        )
    return chosen


def sharding_obstacle(settings: Train) -> str | None:
    """Return the reason why the base cannot be sharded with these settings; None if it can."""
    if settings.adapter == "dora" and settings.quantization != "none":
        return "train.adapter: dora reads whole 4-bit matrices, which peft does not support for shards"
    return None


def _adapter_obstacle(layer: LayerSpec, settings: Train, tied_head: bool) -> str | None:
    """Return the reason why this layer cannot have the adapter of section train; None if it can."""
    if layer.role in ("embedding", "head") and tied_head and layer.kind != "experts":
        return (
            "embedding and output layer of this model are one tensor, and an adapter on one of them could not be "
            "merged; remove it"
        )
    is_plain, is_zero = settings.adapter == "lora", settings.initialization == "zero"
    if layer.kind == "experts":
        prefix = "is one tensor for all experts, which supports only plain LoRA in peft, "
        advice = "target_modules: attention"
        obstacles = [
            (not is_plain, f"not {settings.adapter}; set adapter: lora, or {advice}"),
            (not is_zero, f"initialized with zero; set initialization: zero, or {advice}"),
            (bool(settings.dropout), f"without dropout; set dropout: 0, or {advice}"),
        ]
    elif layer.kind == "embedding":
        prefix = "is an embedding, which supports only plain LoRA here, "
        dora = "because DoRA's magnitude per column cannot be merged; set adapter: lora"
        obstacles = [
            (settings.adapter == "dora", dora),
            (not is_plain, f"not {settings.adapter}; set adapter: lora, or remove it"),
            (not is_zero, "initialized with zero; set initialization: zero, or remove it"),
        ]
    else:
        return None
    return next((f"{prefix}{reason}" for is_obstacle, reason in obstacles if is_obstacle), None)
