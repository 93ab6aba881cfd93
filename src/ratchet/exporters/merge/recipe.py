"""Defines a merge: its adapters and their weights, the merged modules, and the weights of the base."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ratchet.config.export import MergeMethod
from ratchet.config.train import Train
from ratchet.errors import SettingsError
from ratchet.storage.records.base import BaseCard

MergeBase = Literal["dequantized", "original"]


@dataclass(frozen=True)
class WeightedAdapter:
    """An adapter of a merge and its weight in the sum."""

    adapter: Path
    """Directory of a saved adapter, as peft writes it."""
    weight: float = 1.0
    """Factor of the adapter's update."""


@dataclass(frozen=True)
class MergeRecipe:
    """All inputs that determine the merged model."""

    base: Path
    """Directory of the base."""
    card: BaseCard
    train: Train
    """Training settings, which define how the base's weights were stored during training."""
    adapters: tuple[WeightedAdapter, ...]
    """At least one adapter."""
    modules: tuple[str, ...]
    """Names or regular expressions of the modules whose updates are merged; empty: all modules."""
    merge_base: MergeBase
    """`dequantized`: the weights that the adapter was trained on; `original`: the weights in the files, in float32."""
    dtype: torch.dtype
    """Data type of the merged weights."""
    device: torch.device
    """Device that computes the merge, one tensor at a time."""
    shard_bytes: int
    """Largest size of a weight file, unless a single tensor is larger."""
    method: MergeMethod = "linear"
    """How the LoRA updates of several adapters are combined. All else (token rows, biases, whole modules) is added."""
    density: float = 0.5
    """Share of the entries of an update that a method other than `linear` keeps."""

    def includes(self, module: str) -> bool:
        """Return whether the update of a module is merged.

        Args:
            module: full name of a module of the base; for fused experts, the name of their parameter.
        """
        return not self.modules or any(matches_module(pattern, module) for pattern in self.modules)


def matches_module(pattern: str, module: str) -> bool:
    """Return whether a pattern is a module's name, the end of its name, or a regular expression for the full name."""
    if module == pattern or module.endswith(f".{pattern}"):
        return True
    return re.fullmatch(pattern, module) is not None


def require_updated_modules(patterns: Iterable[str], updated: Iterable[str]) -> None:
    """Check that every pattern matches a module that an adapter updates.

    Args:
        patterns: names or regular expressions from `export.modules`.
        updated: full names of all modules that an adapter updates.

    Raises:
        SettingsError: a pattern is no regular expression, or matches no updated module; the message then lists the
            closest names.
    """
    names = sorted(updated)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise SettingsError(
                f"export.modules: found {pattern!r}; expected a module name or a regular expression ({error})"
            ) from None
        if not any(matches_module(pattern, name) for name in names):
            depth = pattern.count(".") + 1
            suffixes = sorted({".".join(name.split(".")[-depth:]) for name in names})
            closest = difflib.get_close_matches(pattern, suffixes, n=4, cutoff=0.5)
            hint = f"closest names: {', '.join(closest)}" if closest else f"updated modules: {', '.join(suffixes[:8])}"
            raise SettingsError(f"export.modules: {pattern!r} matches no module that an adapter updates; {hint}")
