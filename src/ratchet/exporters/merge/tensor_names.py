"""Maps tensors in a model's files to parameters of the model, and back to the names in files.

transformers renames tensors while loading (checkpoints with another prefix, names of old versions) and combines some of
them (experts that are stored one by one become one tensor). This module uses the functions of transformers' own loader
and writer (core_model_loading) on meta tensors; the plan then checks that the loader can read what would be written.
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

ReadTensor = Callable[[str, str], Tensor]
"""Reads a stored tensor, given its name and the name of the (first) parameter that it belongs to."""


class UnknownNamesError(BaseModelError):
    """The names in the files cannot be mapped to parameters; the model must be merged in memory as a whole."""


@dataclass(frozen=True)
class TensorGroup:
    """Stored tensors and the parameters that they form together: usually one tensor and one parameter."""

    first_parameter: str
    """Name of the parameter, or of the first of several."""
    stored: tuple[tuple[str, str], ...]
    """For each stored tensor: the converter's pattern that its name matched, and its name in the files."""
    converter: Any = field(default=None, compare=False)
    """transformers' converter, if values are combined or split."""

    def parameters(self, model: Model, read: ReadTensor) -> dict[str, Tensor]:
        """Compute the model's parameters by name.

        Args:
            model: the model, on any device.
            read: called for each stored tensor when it is needed.
        """
        if self.converter is None:
            return {self.first_parameter: read(self.stored[0][1], self.first_parameter)}
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.stored:
            converter.add_tensor(
                self.first_parameter, name, pattern, lambda name=name: read(name, self.first_parameter)
            )
        converted = converter.convert(self.first_parameter, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in converted.items()}


def group_tensors(model: Model, stored: Iterable[str]) -> list[TensorGroup]:
    """Group stored tensors by parameter, in transformers' loading order.

    Also records the conversions in the model, so that `convert_to_stored` can revert them.

    Args:
        model: the model, on the meta device.
        stored: names of the tensors in the files. Names without a parameter in the model are ignored.

    Raises:
        UnknownNamesError: two tensors map to the same parameter.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    parameters, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, TensorGroup] = {}
    for name in sorted(stored, key=dot_natural_key):
        parameter, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if parameter not in parameters and name in parameters:
            parameter, pattern = rename_source_key(name, [], [], prefix, parameters)
        if parameter not in parameters:
            continue
        group = groups.get(parameter)
        if group is not None and (pattern is None or group.converter is not by_pattern[pattern]):
            raise UnknownNamesError(f"{name} and {group.stored[0][1]} both map to parameter {parameter}")
        group = group or TensorGroup(parameter, (), by_pattern[pattern] if pattern is not None else None)
        groups[parameter] = replace(group, stored=(*group.stored, (pattern or name, name)))
    model._weight_conversions = [one for one in mapping if one.was_used()]  # transformers' loader does the same
    return list(groups.values())


def meta_tensor_reader(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]) -> ReadTensor:
    """Create a reader that returns meta tensors of these shapes, in the type of their parameter."""
    return lambda name, parameter: torch.empty(shapes[name], dtype=dtypes[parameter], device="meta")


def convert_to_stored(model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the parameters of whole groups to the tensors and names that transformers writes."""
    converted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return converted


def stored_names(model: Model, tensors: dict[str, Tensor]) -> dict[str, str] | None:
    """Map each parameter to its name in transformers' files; None if writing does more than rename."""
    if any(isinstance(one, WeightConverter) for one in model._weight_conversions):
        return None
    names = {id(tensor): name for name, tensor in convert_to_stored(model, tensors).items()}
    return {name: names[id(tensor)] for name, tensor in tensors.items()}
