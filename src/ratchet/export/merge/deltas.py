"""What the adapters of a recipe change together, one parameter at a time."""

from collections.abc import Callable

import torch
from torch import Tensor

from ratchet.export.merge import adapter_layout
from ratchet.export.merge.adapter_layout import ParameterUpdate
from ratchet.export.merge.request import MergeRecipe, require_changed_modules
from ratchet.models.device import Model


class AdapterUpdates:
    """Everything that a recipe's adapters change."""

    def __init__(self, parts: list[tuple[float, dict[str, ParameterUpdate]]]) -> None:
        self._parts = parts

    @classmethod
    def read(cls, recipe: MergeRecipe, plain: Model, another: Callable[[], Model]) -> "AdapterUpdates":
        """Read every adapter of a recipe, and leave out modules that it does not name.

        Args:
            recipe: what is merged.
            plain: the base without data, with a row for each token; it is not changed.
            another: makes the same once more.

        Raises:
            BaseModelError: an adapter is of another base, of a kind that is no change of weights, or does not fit.
            DamagedFileError: an adapter cannot be read, or holds NaN.
            SettingsError: a pattern of `modules` matches nothing.
        """
        parts = []
        for part in recipe.parts:
            found = adapter_layout.read_updates(part.adapter, plain, another(), recipe.card.digest)
            parts.append((part.weight, found))
        require_changed_modules(recipe.modules, {one.module for _, changes in parts for one in changes.values()})
        return cls([(weight, {n: c for n, c in found.items() if recipe.takes(c.module)}) for weight, found in parts])

    @property
    def names(self) -> frozenset[str]:
        """Parameters that are changed."""
        return frozenset(name for _, changes in self._parts for name in changes)

    def applied(self, name: str, value: Tensor) -> Tensor:
        """A parameter with all updates: W + sum of w (W' - W). One adapter of weight 1 gives W' itself.

        Args:
            name: of the parameter.
            value: as the base has it, in float32; it may be changed in place.
        """
        found = [(weight, changes[name]) for weight, changes in self._parts if name in changes]
        if not found:
            return value
        if len(found) == 1 and found[0][0] == 1:
            return found[0][1].applied(value)
        total = torch.zeros_like(value)
        for weight, change in found:
            total.add_(change.applied(value.clone()).sub_(value), alpha=weight)
        return value.add_(total)

    def are_same(self, one: str, other: str) -> bool:
        """Whether two parameters that are one tensor in the base are changed alike, or not at all."""
        for _, changes in self._parts:
            a, b = changes.get(one), changes.get(other)
            if a is not b and (a is None or b is None or not a.is_same(b)):
                return False
        return True
