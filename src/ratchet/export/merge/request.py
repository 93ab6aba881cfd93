"""What is to be merged: which adapters, with which weights, into which form of the base."""

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ratchet.config.train import Train
from ratchet.errors import SettingsError
from ratchet.storage.records.base import BaseCard

MergeBase = Literal["dequantized", "original"]


@dataclass(frozen=True)
class WeightedAdapter:
    """One adapter of several."""

    adapter: Path
    """Directory of a saved adapter, as peft writes it."""
    weight: float = 1.0
    """Its update is multiplied by this."""


@dataclass(frozen=True)
class MergeRecipe:
    """Everything that decides what the merged model is."""

    base: Path
    """Directory of the base."""
    card: BaseCard
    train: Train
    """Says how the base's weights were held while the adapter learned."""
    parts: tuple[WeightedAdapter, ...]
    modules: tuple[str, ...]
    """Names or regular expressions of modules whose updates are merged; empty: all."""
    merge_base: MergeBase
    """`dequantized`: the weights that were trained against; `original`: those of the files, in float32."""
    dtype: torch.dtype
    """Of the merged weights."""
    device: torch.device
    """Where numbers are computed; one tensor at a time is there."""
    shard_bytes: int
    """Size that no file of weights exceeds, unless a single tensor does."""

    @property
    def is_plain(self) -> bool:
        """Whether one adapter is merged as it is: the sum is then the trained one to the last bit."""
        return len(self.parts) == 1 and self.parts[0].weight == 1

    def takes(self, module: str) -> bool:
        """Whether the update of a module is merged.

        Args:
            module: full name of a module of the base; of fused experts, that of their parameter.
        """
        return not self.modules or any(matches_module(pattern, module) for pattern in self.modules)


def matches_module(pattern: str, module: str) -> bool:
    """Whether a pattern means a module: it is its name, the end of it, or a regular expression of the whole name."""
    if module == pattern or module.endswith(f".{pattern}"):
        return True
    return re.fullmatch(pattern, module) is not None


def validate_recipe(recipe: MergeRecipe) -> None:
    """Raises SettingsError when the recipe itself makes no sense, whatever base and adapters are."""
    if not recipe.parts:
        raise SettingsError("export: no adapter is named, so there is nothing to merge")
    for part in recipe.parts:
        if not math.isfinite(part.weight):
            raise SettingsError(f"export: {part.adapter} has weight {part.weight}; give a number")
    for pattern in recipe.modules:
        try:
            re.compile(pattern)
        except re.error as error:
            raise SettingsError(
                f"export.modules: {pattern}: neither a name nor a regular expression ({error}); mend it"
            ) from None


def require_changed_modules(patterns: Iterable[str], updated: Iterable[str]) -> None:
    """Raises SettingsError, with the nearest names, when a pattern means no module that an adapter has changed."""
    names = sorted(updated)
    for pattern in patterns:
        if not any(matches_module(pattern, name) for name in names):
            parts = pattern.count(".") + 1
            ends = sorted({".".join(name.split(".")[-parts:]) for name in names})
            near = difflib.get_close_matches(pattern, ends, n=4, cutoff=0.5)
            told = f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(ends[:8])}"
            raise SettingsError(f"export.modules: {pattern}: no module with an update has this name; {told}")
