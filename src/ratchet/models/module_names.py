"""What a module's name in the base model says about where it stands. Names only: no torch."""

from typing import NamedTuple


class ModuleLocation(NamedTuple):
    """Where a module stands."""

    kind: str
    """What it is in every layer, such as `self_attn.q_proj`; the whole name where there are no layers."""
    numbers: tuple[int, ...]
    """Of its layer, then of what is numbered within (experts); empty where there are no layers."""

    @property
    def layer(self) -> int:
        """Number of the layer, from 0; -1 outside all layers."""
        return self.numbers[0] if self.numbers else -1


def parse_module_name(name: str) -> ModuleLocation:
    """`model.layers.3.mlp.experts.7.w1` is a `mlp.experts.w1` at (3, 7)."""
    parts = name.split(".")
    numbered = [part.isdecimal() for part in parts]
    if not any(numbered):
        return ModuleLocation(name, ())
    within = parts[numbered.index(True) :]
    kind = ".".join(part for part in within if not part.isdecimal())
    return ModuleLocation(kind or name, tuple(int(part) for part in within if part.isdecimal()))
