"""Which stored tensors make which parameters of a model, and under which names these are written again.

transformers renames tensors while it loads them (checkpoints with another prefix, names of old versions) and puts some
together (experts that are stored one by one become one tensor). Both is looked up where its own loader and writer look
it up (core_model_loading), on tensors without data, and what would be written is then read back by its loader.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from ratchet.errors import BaseModelError
from ratchet.models.device import Model

Read = Callable[[str, str], Tensor]
"""Gives a stored tensor: its name, and the name of the (first) parameter that it goes into."""


class UnknownNamesError(BaseModelError):
    """The names of the files cannot be followed; the model must be merged as a whole."""


@dataclass(frozen=True)
class TensorGroup:
    """Stored tensors, and the parameters that they become together: mostly one and one."""

    first: str
    """The parameter, or the first of them."""
    stored: tuple[tuple[str, str], ...]
    """Of each tensor: the pattern of the converter that it matched, and its name in the files."""
    converter: Any = field(default=None, compare=False)
    """transformers' own, when numbers are put together or taken apart."""

    def parameters(self, model: Model, read: Read) -> dict[str, Tensor]:
        """The tensors of the model by name.

        Args:
            model: that the parameters belong to, on any device.
            read: called for each stored tensor when it is needed.
        """
        if self.converter is None:
            return {self.first: read(self.stored[0][1], self.first)}
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.stored:
            converter.add_tensor(self.first, name, pattern, lambda name=name: read(name, self.first))
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def group_tensors(model: Model, stored: Iterable[str]) -> list[TensorGroup]:
    """Every group of the model, in the order in which transformers loads them. Notes on it how names are reverted.

    Args:
        model: on the meta device.
        stored: names of the tensors in the files. Those that the model has no place for are left out.

    Raises:
        UnknownNamesError: two tensors are for one place.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    places, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, TensorGroup] = {}
    for name in sorted(stored, key=dot_natural_key):
        place, pattern = rename_source_key(name, renamings, converters, prefix, places)
        if place not in places and name in places:
            place, pattern = rename_source_key(name, [], [], prefix, places)
        if place not in places:
            continue
        group = found.get(place)
        if group is not None and (pattern is None or group.converter is not by_pattern[pattern]):
            raise UnknownNamesError(f"{name} and {group.stored[0][1]} are both for {place}")
        begun = group or TensorGroup(place, (), by_pattern[pattern] if pattern is not None else None)
        found[place] = replace(begun, stored=(*begun.stored, (pattern or name, name)))
    model._weight_conversions = [one for one in mapping if one.was_used()]  # as its loader notes it for its writer
    return list(found.values())


def meta_tensor_reader(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]) -> Read:
    """A reader that gives tensors of these shapes on the meta device, in the type of the parameter they are for."""
    return lambda name, place: torch.empty(shapes[name], dtype=dtypes[place], device="meta")


def convert_to_stored(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of whole groups as transformers writes them: under the names, and in the pieces, of its files."""
    made: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return made


def stored_names(model: Model, tensors: dict[str, Tensor]) -> dict[str, str] | None:
    """The name of each parameter in transformers' files; None where writing does more than to rename."""
    if any(isinstance(one, WeightConverter) for one in model._weight_conversions):
        return None
    made = {id(tensor): name for name, tensor in convert_to_stored(model, tensors).items()}
    return {name: made[id(tensor)] for name, tensor in tensors.items()}
