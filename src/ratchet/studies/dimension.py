"""One free setting of a search space, without the library that searches it."""

from dataclasses import dataclass
from typing import Any, Literal

STEP_TOLERANCE = 1e-9
"""Of floating point, in steps."""


@dataclass(frozen=True)
class Dimension:
    """Values that one setting may be given."""

    name: str
    """Dotted key, such as `train.rank`."""
    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    """Both inclusive; whole numbers where kind is int. Read only for ranges."""
    log: bool = False
    step: float | None = None
    choices: tuple[Any, ...] = ()
    """None, booleans, numbers, texts, or tuples of texts. Read only where kind is choice."""

    @property
    def points(self) -> int | None:
        """How many values there are; None where they are not counted."""
        if self.kind == "choice":
            return len(self.choices)
        if self.kind == "int":
            return int((self.high - self.low) // int(self.step or 1)) + 1
        return None if self.step is None else int((self.high - self.low) / self.step + STEP_TOLERANCE) + 1

    def holds(self, value: Any) -> bool:
        """Whether this is one of the values."""
        if self.kind == "choice":
            return any(value == one and type(value) is type(one) for one in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        if self.kind == "int" and value != int(value):
            return False
        if self.step is None:
            return True
        steps = (value - self.low) / self.step
        return abs(steps - round(steps)) < STEP_TOLERANCE
