"""Parses module names of a base model into layer number and kind. Imports no torch."""

from typing import NamedTuple


class ModuleLocation(NamedTuple):
    """Position of a module in the model."""

    kind: str
    """Name without indices, such as `self_attn.q_proj`; the whole name outside numbered layers."""
    indices: tuple[int, ...]
    """Layer index, then indices within the layer (experts); empty outside numbered layers."""

    @property
    def layer(self) -> int:
        """Index of the layer, from 0; -1 outside numbered layers."""
        return self.indices[0] if self.indices else -1


def parse_module_name(name: str) -> ModuleLocation:
    """Parse a name: `model.layers.3.mlp.experts.7.w1` has kind `mlp.experts.w1` and indices (3, 7)."""
    parts = name.split(".")
    is_index = [part.isdecimal() for part in parts]
    if not any(is_index):
        return ModuleLocation(name, ())
    within = parts[is_index.index(True) :]
    kind = ".".join(part for part in within if not part.isdecimal())
    return ModuleLocation(kind or name, tuple(int(part) for part in within if part.isdecimal()))
