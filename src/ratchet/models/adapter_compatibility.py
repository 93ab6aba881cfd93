"""What adapters cannot do on some layers: refused with the reason, before a weight is loaded.

The reasons are peft's (0.21, tuners/lora/layer.py ParamWrapper, tuners/adalora/model.py, tuners/trainable_tokens), but
for embeddings that the head shares: there peft warns, and what came out could not be merged.
"""

from collections.abc import Sequence

from ratchet.config.train import Train
from ratchet.errors import SettingsError
from ratchet.models import targets
from ratchet.models.device import Model
from ratchet.models.model_spec import Blueprint, Layer, layers_of, others_of


def check(blueprint: Blueprint, settings: Train, learns_tokens: bool) -> tuple[Layer, ...]:
    """The layers that will have an adapter, after all has been looked at that can be known without weights.

    Args:
        blueprint: of the base.
        settings: section train.
        learns_tokens: whether rows of added tokens learn, too.

    Raises:
        BaseModelError: the model is no causal language model.
        SettingsError: see `choose`.
    """
    chosen = targets.check(blueprint, settings)
    _check_layers(chosen, settings, blueprint.tied_head)
    if learns_tokens:
        _check_tokens(chosen, blueprint.layers)
    return chosen


def choose(base: Model, settings: Train, learns_tokens: bool) -> tuple[Layer, ...]:
    """The same for a model that is there, without adapters, on any device, in 4 bits or not.

    Raises:
        SettingsError: targets, ranks or patterns do not fit the model, or its layers not this kind of adapter, or not
            beside rows of tokens that learn.
    """
    layers, tied = layers_of(base), is_tied(base)
    chosen = targets.choose(layers, settings.targets, others_of(base))
    targets.check_patterns(chosen, settings)
    targets.check_ranks(chosen, settings)
    _check_layers(chosen, settings, tied)
    if learns_tokens:
        _check_tokens(chosen, layers)
    return chosen


def unshareable(settings: Train) -> str | None:
    """Why ranks cannot share a base that is trained so; None when they can."""
    if settings.adapter == "dora" and settings.quantization != "none":
        return "train.adapter: dora reads 4-bit matrices itself, and peft cannot do that of shares"
    return None


def is_tied(base: Model) -> bool:
    """Whether output layer and embedding of a model are one tensor."""
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    return head is not None and embedding is not None and head.weight is embedding.weight


def _check_layers(chosen: Sequence[Layer], settings: Train, tied_head: bool) -> None:
    for layer in chosen:
        if reason := _reason(layer, settings, tied_head):
            raise SettingsError(f"train.targets: {layer.name}: {reason}")


def _check_tokens(chosen: Sequence[Layer], layers: Sequence[Layer]) -> None:
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


def _reason(layer: Layer, settings: Train, tied_head: bool) -> str | None:
    """Why this layer cannot have such an adapter; None when it can."""
    if layer.kind == "experts":
        return _reason_of_experts(settings)
    if layer.role in ("embedding", "head") and tied_head:
        return (
            "embedding and output layer of this model are one tensor, and an adapter on one of them could not be "
            "merged; leave it out"
        )
    if layer.kind == "embedding":
        return _reason_of_embedding(settings)
    return None


def _reason_of_experts(settings: Train) -> str | None:
    begin = "is one tensor for all experts, on which peft puts plain LoRA only, "
    if settings.adapter != "lora":
        return f"{begin}no {settings.adapter}; set adapter: lora, or targets: attention"
    if settings.initialization != "zero":
        return f"{begin}that begins at zero; set initialization: zero, or targets: attention"
    if settings.dropout:
        return f"{begin}without dropout; set dropout: 0, or targets: attention"
    return None


def _reason_of_embedding(settings: Train) -> str | None:
    begin = "is an embedding, on which peft puts plain LoRA only, "
    if settings.adapter == "dora":
        return f"{begin}or DoRA with a magnitude for each column, which cannot be merged here; set adapter: lora"
    if settings.adapter == "adalora":
        return f"{begin}no adalora; set adapter: lora, or leave it out"
    if settings.initialization != "zero":
        return f"{begin}that begins at zero; set initialization: zero, or leave it out"
    return None
