"""Merging a model whose files use names that cannot be followed: loaded as a whole, changed, written.

It takes the memory of the loaded base and of the result; everything else is as in stream.py.
"""

import torch
from torch import Tensor

from ratchet.merging import names
from ratchet.merging.plan import Plan, dtype_of, untie
from ratchet.merging.stored import Values
from ratchet.merging.wanted import Recipe
from ratchet.model import frozen, quantized
from ratchet.model.device import Model


def merged(recipe: Recipe, plan: Plan) -> tuple[dict[str, Tensor], bool]:
    """Every tensor of the merged model, on the CPU, by the name under which transformers writes it.

    Returns:
        The tensors, and whether embeddings and head are one of them.

    Raises:
        BaseModelError, SettingsError: the base cannot be loaded as it was trained against.
    """
    dequantized = recipe.merge_base == "dequantized"
    if dequantized:
        base = quantized.load(recipe.base, recipe.card, recipe.train, recipe.device)
    else:
        base = quantized.load_plain(recipe.base, torch.float32, recipe.device, recipe.card.remote_code)
    plan.model._weight_conversions = base._weight_conversions  # as they were read, so they are written
    values, own = Values(recipe, plan.form), dict(base.named_parameters(remove_duplicate=False))
    held, ties, found = base.state_dict(), dict(plan.model.all_tied_weights_keys), {}
    if any(own[a] is not own[b] or not plan.updates.are_same(a, b) for a, b in ties.items()):
        ties = {}
        untie(plan.model)
    with torch.no_grad():
        for name, place in plan.model.state_dict().items():
            if name in ties:
                continue
            value = _number(base, plan.model, name) if name in own else held[name].clone()
            if not dequantized:
                value = values.as_trained(name, value)
            value = plan.updates.applied(name, value)
            if value.shape != place.shape:
                raise RuntimeError(f"{name}: {tuple(value.shape)}, not {tuple(place.shape)}")
            found[name] = value.to(dtype_of(recipe, value, name in own)).cpu()
    return names.written(plan.model, found), bool(ties)


def _number(base: Model, model: Model, name: str) -> Tensor:
    """A parameter of the loaded base in float32, in memory of its own, laid out as the plain model has it."""
    path, _, leaf = name.rpartition(".")
    if leaf != "weight":
        return base.get_parameter(name).detach().to(torch.float32, copy=True)
    value = frozen.weight_of(base.get_submodule(path)).clone()
    return value.T if isinstance(model.get_submodule(path), frozen.TRANSPOSED) else value
