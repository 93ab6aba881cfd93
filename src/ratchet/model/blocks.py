"""Which modules of a model are its decoder layers (blocks): what hidden states go through one after the other."""

from torch import nn

from ratchet.model.device import Model


def body_of(whole: Model) -> Model:
    """What makes hidden states of tokens; the whole model where that cannot be told from its head.

    Args:
        whole: without adapters around it (`get_base_model`).
    """
    body = whole.get_decoder()
    # A plain module is what some classes (ModernBERT) call their decoder: a part of the head.
    return body if any(True for _ in body.children()) else whole


def blocks_of(model: Model) -> tuple[str, nn.ModuleList]:
    """The blocks and their name in the model; none where they cannot be told from other lists of modules.

    Of the decoder's lists whose members have modules in them, they are the one that stands highest. Experts stand
    lower; lists of projections or rotations (Gemma 3n, Granite with sliding windows) have plain members. Where two
    stand equally high (XLM: attentions, feed-forward parts; HRM: stacks run in turn), there is no one after the other.

    Args:
        model: with adapters or without; the name is the one that it has in this model.
    """
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    stacks = _highest(body_of(whole)) or _highest(whole)
    if len(stacks) != 1:
        return "", nn.ModuleList()
    return next(name for name, module in model.named_modules() if module is stacks[0]), stacks[0]


def _highest(module: nn.Module) -> list[nn.ModuleList]:
    """Lists whose members have modules in them, of the highest level that has one."""
    level = [module]
    while level:
        if found := [one for one in level if isinstance(one, nn.ModuleList) and _is_stack(one)]:
            return found
        level = [child for one in level for child in one.children()]
    return []


def _is_stack(modules: nn.ModuleList) -> bool:
    return len(modules) > 0 and all(any(True for _ in one.children()) for one in modules)
