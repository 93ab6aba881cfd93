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
from ratchet.models.model_spec import Blueprint, Layer, Role

GROUPS: dict[str, tuple[Role, ...]] = {"attention": ("attention",), "mlp": ("mlp",), "all": ("attention", "mlp")}
"""What train.targets may say instead of names. Embeddings, norms, routers and the head are in none of them."""

_WITH_MIXERS = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Model types in which peft 0.21 puts no adapter on `out_proj` (tuners_utils, _check_lora_target_modules_mamba)."""


def check(blueprint: Blueprint, settings: Train) -> tuple[Layer, ...]:
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
    layers: Sequence[Layer], wanted: str | Sequence[str], others: Mapping[str, str] | None = None
) -> tuple[Layer, ...]:
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
        named = {layer.name for text in wanted for layer in _named(text, layers, others)}
        return tuple(layer for layer in layers if layer.name in named)
    if wanted in GROUPS:
        chosen = tuple(layer for layer in layers if layer.role in GROUPS[wanted])
        return chosen or _refuse_group(wanted, layers)
    return _matched(wanted, layers, others)


def rank_of(layer: Layer, settings: Train) -> int:
    """The rank of one layer's adapter: that of the first pattern that matches its name, else train.rank."""
    key = _pattern(layer, settings.rank_pattern)
    return settings.rank if key is None else settings.rank_pattern[key]


def alpha_of(layer: Layer, settings: Train) -> float:
    """The same for alpha."""
    key = _pattern(layer, settings.alpha_pattern)
    return settings.alpha if key is None else settings.alpha_pattern[key]


def check_patterns(chosen: Sequence[Layer], settings: Train) -> None:
    """Raises SettingsError when a key of rank_pattern or alpha_pattern matches no layer that has an adapter."""
    for knob, keys in (("rank_pattern", settings.rank_pattern), ("alpha_pattern", settings.alpha_pattern)):
        for key in keys:
            _compiled(_ending(key), f"train.{knob}: {key}")
            if not any(re.match(_ending(key), layer.name) for layer in chosen):
                raise SettingsError(
                    f"train.{knob}: {key}: no layer with an adapter has a name that ends so{_nearest(key, chosen, {})}"
                )


def check_ranks(chosen: Sequence[Layer], settings: Train) -> None:
    """Raises SettingsError when a rank is above the smaller side of its matrix: no update of that rank exists."""
    for layer in chosen:
        rank, side = rank_of(layer, settings), min(layer.inputs, layer.outputs)
        if rank > side:
            key = _pattern(layer, settings.rank_pattern)
            knob = "train.rank" if key is None else f"train.rank_pattern.{key}"
            raise SettingsError(
                f"{knob}: {rank}, but {layer.name} is {layer.outputs} x {layer.inputs} and has no rank above {side}; "
                f"set {side} or less, or leave the layer out of train.targets"
            )


def _check_mixers(blueprint: Blueprint, chosen: Sequence[Layer]) -> None:
    kind = blueprint.config.model_type
    if kind in _WITH_MIXERS and (taken := [x for x in chosen if x.name.endswith(".out_proj")]):
        raise SettingsError(
            f"train.targets: {taken[0].name}: fused kernels of {kind} read its weight past any adapter, and peft "
            "refuses one there; leave out_proj out"
        )


def _ending(key: str) -> str:
    """peft's own expression for the keys of patterns (get_pattern_key)."""
    return rf"(.*\.)?({key})$"


def _pattern(layer: Layer, keys: Iterable[str]) -> str | None:
    return next((key for key in keys if re.match(_ending(key), layer.name)), None)


def _named(text: str, layers: Sequence[Layer], others: Mapping[str, str]) -> list[Layer]:
    found = [layer for layer in layers if _ends_with(layer.name, text)]
    if found:
        return found
    if wrong := [name for name in others if _ends_with(name, text)]:
        _refuse_other(text, wrong, layers, others)
    raise SettingsError(
        f"train.targets: {text}: no module of the model has this name{_nearest(text, layers, others)}; "
        f"groups: {', '.join(GROUPS)}"
    )


def _matched(expression: str, layers: Sequence[Layer], others: Mapping[str, str]) -> tuple[Layer, ...]:
    """What a regular expression finds. Containers of layers may match too; other modules that end a branch may not."""
    pattern = _compiled(expression, f"train.targets: {expression}")
    found = tuple(layer for layer in layers if pattern.fullmatch(layer.name))
    holding = {name[:end] for name in (*others, *(x.name for x in layers)) for end in _dots(name)} if found else set()
    if wrong := [name for name in others if name not in holding and pattern.fullmatch(name)]:
        _refuse_other(expression, wrong, layers, others)
    if found:
        return found
    raise SettingsError(
        f"train.targets: {expression}: neither a group ({', '.join(GROUPS)}) nor a regular expression that matches the "
        f"full name of a layer{_nearest(expression, layers, others)}; for names, give a list: [{expression}]"
    )


def _compiled(expression: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise SettingsError(f"{where}: not a regular expression ({error}); mend it, or give names in a list") from None


def _ends_with(name: str, text: str) -> bool:
    return name == text or name.endswith(f".{text}")


def _dots(name: str) -> list[int]:
    return [place for place, letter in enumerate(name) if letter == "."]


def _refuse_group(group: str, layers: Sequence[Layer]) -> NoReturn:
    rest = [layer for layer in layers if layer.role == "other"]
    raise SettingsError(
        f"train.targets: {group}: the model has no such layers; name some in a list instead: {_summary(rest or layers)}"
    )


def _refuse_other(text: str, wrong: Sequence[str], layers: Sequence[Layer], others: Mapping[str, str]) -> NoReturn:
    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    inside = [layer for layer in layers if layer.name.startswith(f"{wrong[0]}.")]
    todo = f"name what is in it: {_summary(inside)}" if inside else f"linear are: {_summary(layers)}"
    raise SettingsError(
        f"train.targets: {text}: {wrong[0]}{more} is of class {others[wrong[0]]}, not a linear layer; {todo}"
    )


def _summary(layers: Sequence[Layer]) -> str:
    """Each leaf name once, with how many layers have it: `q_proj (32), v_proj (32)`."""
    counts = Counter(layer.name.rsplit(".", 1)[-1] for layer in layers)
    return ", ".join(f"{leaf} ({count})" for leaf, count in counts.items())


def _nearest(text: str, layers: Iterable[Layer], others: Mapping[str, str]) -> str:
    """`; nearest: q_proj, k_proj`, of the ends of all names that have as many parts as the text."""
    plain = re.sub(r"[^\w.]+", "", text.replace(".*", "").replace(r"\.", ".")).strip(".")
    parts = plain.count(".") + 1
    linear = {".".join(layer.name.split(".")[-parts:]) for layer in layers}
    ends = linear | {".".join(name.split(".")[-parts:]) for name in others}
    near = difflib.get_close_matches(plain, sorted(ends), n=4, cutoff=0.5)
    near.sort(key=lambda end: end not in linear)  # what would do comes first
    return f"; nearest: {', '.join(near)}" if near else f"; layers: {_summary(tuple(layers))}"
