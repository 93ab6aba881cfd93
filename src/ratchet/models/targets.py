"""Which layers get an adapter, and of which rank: `train.targets` and the patterns, against what a model really has.

Everything is checked here, before a weight is loaded: names that match nothing, modules that are not linear, ranks that
no matrix of the shape has. Names are matched as peft matches them.
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
"""What train.targets may say instead of names. Embeddings, norms, routers and the head are in none of them."""

_WITH_MIXERS = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Model types in which peft 0.21 puts no adapter on `out_proj` (tuners_utils, _check_lora_target_modules_mamba)."""


def check(blueprint: ModelSpec, settings: Train) -> tuple[LayerSpec, ...]:
    """The layers that will have an adapter, after everything that can be known without weights has been looked at.

    Raises:
        BaseModelError: the model is no causal language model.
        SettingsError: targets, rank or a pattern of section train do not fit the model.
    """
    blueprint.require_causal()
    chosen = choose(blueprint.layers, settings.targets, blueprint.others)
    check_patterns(chosen, settings)
    check_ranks(chosen, settings)
    _check_mixers(blueprint, chosen)
    return chosen


def choose(
    layers: Sequence[LayerSpec], wanted: str | Sequence[str], others: Mapping[str, str] | None = None
) -> tuple[LayerSpec, ...]:
    """The layers that `train.targets` means, in the order of the model.

    Args:
        layers: of the model, as `blueprint.layers_of` lists them.
        wanted: a group; else a regular expression that must match a full name; or a list of full names or their ends
            (`q_proj`, `self_attn.q_proj`).
        others: the model's other modules and their classes (`blueprint.others_of`), which the message may then name.

    Raises:
        SettingsError: a name, the expression or the group matches nothing, or what it matches is not linear.
    """
    others = others or {}
    if not isinstance(wanted, str):
        named = {layer.name for text in wanted for layer in _match_name(text, layers, others)}
        return tuple(layer for layer in layers if layer.name in named)
    if wanted in GROUPS:
        chosen = tuple(layer for layer in layers if layer.role in GROUPS[wanted])
        return chosen or _raise_unknown_group(wanted, layers)
    return _match_expression(wanted, layers, others)


def layer_rank(layer: LayerSpec, settings: Train) -> int:
    """The rank of one layer's adapter: that of the first pattern that matches its name, else train.rank."""
    key = _first_matching_key(layer, settings.rank_pattern)
    return settings.rank if key is None else settings.rank_pattern[key]


def layer_alpha(layer: LayerSpec, settings: Train) -> float:
    """The same for alpha."""
    key = _first_matching_key(layer, settings.alpha_pattern)
    return settings.alpha if key is None else settings.alpha_pattern[key]


def check_patterns(chosen: Sequence[LayerSpec], settings: Train) -> None:
    """Raises SettingsError when a key of rank_pattern or alpha_pattern matches no layer that has an adapter."""
    for knob, keys in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern)):
        for key in keys:
            _compile_expression(_pattern_expression(key), f"train.{knob}: {key}")
            if not any(re.match(_pattern_expression(key), layer.name) for layer in chosen):
                raise SettingsError(
                    f"train.{knob}: {key}: no layer with an adapter has a name that ends so"
                    f"{_suggest_nearest_names(key, chosen, {})}"
                )


def check_ranks(chosen: Sequence[LayerSpec], settings: Train) -> None:
    """Raises SettingsError when a rank is above the smaller side of its matrix: no update of that rank exists."""
    for layer in chosen:
        rank, side = layer_rank(layer, settings), min(layer.inputs, layer.outputs)
        if rank > side:
            key = _first_matching_key(layer, settings.rank_pattern)
            knob = "train.rank" if key is None else f"train.rank_pattern.{key}"
            raise SettingsError(
                f"{knob}: {rank}, but {layer.name} is {layer.outputs} x {layer.inputs} and has no rank above {side}; "
                f"set {side} or less, or leave the layer out of train.targets"
            )


def _check_mixers(blueprint: ModelSpec, chosen: Sequence[LayerSpec]) -> None:
    kind = blueprint.config.model_type
    if kind in _WITH_MIXERS and (taken := [x for x in chosen if x.name.endswith(".out_proj")]):
        raise SettingsError(
            f"train.targets: {taken[0].name}: fused kernels of {kind} read its weight past any adapter, and peft "
            "refuses one there; leave out_proj out"
        )


def _pattern_expression(key: str) -> str:
    """peft's own expression for the keys of patterns (get_pattern_key)."""
    return rf"(.*\.)?({key})$"


def _first_matching_key(layer: LayerSpec, keys: Iterable[str]) -> str | None:
    return next((key for key in keys if re.match(_pattern_expression(key), layer.name)), None)


def _match_name(text: str, layers: Sequence[LayerSpec], others: Mapping[str, str]) -> list[LayerSpec]:
    found = [layer for layer in layers if _ends_with(layer.name, text)]
    if found:
        return found
    if wrong := [name for name in others if _ends_with(name, text)]:
        _raise_unmatched_target(text, wrong, layers, others)
    raise SettingsError(
        f"train.targets: {text}: no module of the model has this name{_suggest_nearest_names(text, layers, others)}; "
        f"groups: {', '.join(GROUPS)}"
    )


def _match_expression(expression: str, layers: Sequence[LayerSpec], others: Mapping[str, str]) -> tuple[LayerSpec, ...]:
    """What a regular expression finds. Containers of layers may match too; other modules that end a branch may not."""
    pattern = _compile_expression(expression, f"train.targets: {expression}")
    found = tuple(layer for layer in layers if pattern.fullmatch(layer.name))
    holding = (
        {name[:end] for name in (*others, *(x.name for x in layers)) for end in _dot_positions(name)}
        if found
        else set()
    )
    if wrong := [name for name in others if name not in holding and pattern.fullmatch(name)]:
        _raise_unmatched_target(expression, wrong, layers, others)
    if found:
        return found
    raise SettingsError(
        f"train.targets: {expression}: neither a group ({', '.join(GROUPS)}) nor a regular expression that matches the "
        f"full name of a layer{_suggest_nearest_names(expression, layers, others)}; "
        f"for names, give a list: [{expression}]"
    )


def _compile_expression(expression: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise SettingsError(f"{where}: not a regular expression ({error}); mend it, or give names in a list") from None


def _ends_with(name: str, text: str) -> bool:
    return name == text or name.endswith(f".{text}")


def _dot_positions(name: str) -> list[int]:
    return [place for place, letter in enumerate(name) if letter == "."]


def _raise_unknown_group(group: str, layers: Sequence[LayerSpec]) -> NoReturn:
    rest = [layer for layer in layers if layer.role == "other"]
    raise SettingsError(
        f"train.targets: {group}: the model has no such layers; name some in a list instead: "
        f"{_summarize_layers(rest or layers)}"
    )


def _raise_unmatched_target(
    text: str, wrong: Sequence[str], layers: Sequence[LayerSpec], others: Mapping[str, str]
) -> NoReturn:
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    inside = [layer for layer in layers if layer.name.startswith(f"{wrong[0]}.")]
    todo = f"name what is in it: {_summarize_layers(inside)}" if inside else f"linear are: {_summarize_layers(layers)}"
    raise SettingsError(
        f"train.targets: {text}: {wrong[0]}{more} is of class {others[wrong[0]]}, not a linear layer; {todo}"
    )


def _summarize_layers(layers: Sequence[LayerSpec]) -> str:
    """Each leaf name once, with how many layers have it: `q_proj (32), v_proj (32)`."""
    counts = Counter(layer.name.rsplit(".", 1)[-1] for layer in layers)
    return ", ".join(f"{leaf} ({count})" for leaf, count in counts.items())


def _suggest_nearest_names(text: str, layers: Iterable[LayerSpec], others: Mapping[str, str]) -> str:
    """`; nearest: q_proj, k_proj`, of the ends of all names that have as many parts as the text."""
    plain = re.sub(r"[^\w.]+", "", text.replace(".*", "").replace(r"\.", ".")).strip(".")
    parts = plain.count(".") + 1
    linear = {".".join(layer.name.split(".")[-parts:]) for layer in layers}
    ends = linear | {".".join(name.split(".")[-parts:]) for name in others}
    near = difflib.get_close_matches(plain, sorted(ends), n=4, cutoff=0.5)
    near.sort(key=lambda end: end not in linear)  # what would do comes first
    return f"; nearest: {', '.join(near)}" if near else f"; layers: {_summarize_layers(tuple(layers))}"


# What adapters cannot do on some layers: refused with the reason, before a weight is loaded.
#
# The reasons are peft's (0.21, tuners/lora/layer.py ParamWrapper, tuners/adalora/model.py, tuners/trainable_tokens),
# but
# for embeddings that the head shares: there peft warns, and what came out could not be merged.


def check_adapter(blueprint: ModelSpec, settings: Train, learns_tokens: bool) -> tuple[LayerSpec, ...]:
    """The layers that will have an adapter, after all has been looked at that can be known without weights.

    Args:
        blueprint: of the base.
        settings: section train.
        learns_tokens: whether rows of added tokens learn, too.

    Raises:
        BaseModelError: the model is no causal language model.
        SettingsError: see `choose`.
    """
    chosen = check(blueprint, settings)
    _check_layers(chosen, settings, blueprint.tied_head)
    if learns_tokens:
        _check_tokens(chosen, blueprint.layers)
    return chosen


def choose_for_adapter(base: Model, settings: Train, learns_tokens: bool) -> tuple[LayerSpec, ...]:
    """The same for a model that is there, without adapters, on any device, in 4 bits or not.

    Raises:
        SettingsError: targets, ranks or patterns do not fit the model, or its layers not this kind of adapter, or not
            beside rows of tokens that learn.
    """
    layers, tied = list_layers(base), has_tied_head(base)
    chosen = choose(layers, settings.targets, list_other_modules(base))
    check_patterns(chosen, settings)
    check_ranks(chosen, settings)
    _check_layers(chosen, settings, tied)
    if learns_tokens:
        _check_tokens(chosen, layers)
    return chosen


def sharding_obstacle(settings: Train) -> str | None:
    """Why ranks cannot share a base that is trained so; None when they can."""
    if settings.adapter == "dora" and settings.quantization != "none":
        return "train.adapter: dora reads 4-bit matrices itself, and peft cannot do that of shares"
    return None


def has_tied_head(base: Model) -> bool:
    """Whether output layer and embedding of a model are one tensor."""
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def _check_layers(chosen: Sequence[LayerSpec], settings: Train, tied_head: bool) -> None:
    for layer in chosen:
        if reason := _adapter_obstacle(layer, settings, tied_head):
            raise SettingsError(f"train.targets: {layer.name}: {reason}")


def _check_tokens(chosen: Sequence[LayerSpec], layers: Sequence[LayerSpec]) -> None:
    if taken := [layer.name for layer in chosen if layer.role in ("embedding", "head")]:
        raise SettingsError(
            f"train.targets: {taken[0]}: rows of base.added_tokens are learned there, and peft allows one or the other "
            "on a layer; leave it out of the targets"
        )
    head = next((layer for layer in layers if layer.role == "head"), None)
    if head is not None and head.bias:
        raise SettingsError(
            f"base.added_tokens: {head.name} has a bias, which peft leaves out of an output layer with learned rows; "
            "this model cannot learn new tokens: set []"
        )


def _adapter_obstacle(layer: LayerSpec, settings: Train, tied_head: bool) -> str | None:
    """Why this layer cannot have such an adapter; None when it can."""
    if layer.kind == "experts":
        return _experts_obstacle(settings)
    if layer.role in ("embedding", "head") and tied_head:
        return (
            "embedding and output layer of this model are one tensor, and an adapter on one of them could not be "
            "merged; leave it out"
        )
    if layer.kind == "embedding":
        return _embedding_obstacle(settings)
    return None


def _experts_obstacle(settings: Train) -> str | None:
    begin = "is one tensor for all experts, on which peft puts plain LoRA only, "
    if settings.adapter != "lora":
        return f"{begin}no {settings.adapter}; set adapter: lora, or targets: attention"
    if settings.initialization != "zero":
        return f"{begin}that begins at zero; set initialization: zero, or targets: attention"
    if settings.dropout:
        return f"{begin}without dropout; set dropout: 0, or targets: attention"
    return None


def _embedding_obstacle(settings: Train) -> str | None:
    begin = "is an embedding, on which peft puts plain LoRA only, "
    if settings.adapter == "dora":
        return f"{begin}or DoRA with a magnitude for each column, which cannot be merged here; set adapter: lora"
    if settings.adapter == "adalora":
        return f"{begin}no adalora; set adapter: lora, or leave it out"
    if settings.initialization != "zero":
        return f"{begin}that begins at zero; set initialization: zero, or leave it out"
    return None
