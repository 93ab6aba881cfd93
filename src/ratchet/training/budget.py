"""How much of a batch is computed at once, and how that changes when memory runs out: a value, no torch."""

from dataclasses import dataclass

SHRINK = 0.8
"""Of the padded tokens that did not fit, at the first failure in a step; each further one in the same step halves."""
GROW = 1.25
GROW_AFTER_STEPS = 50
"""Good steps before a shrunk budget is tried a little larger; doubled each time that the larger one fails."""


@dataclass(frozen=True)
class Budget:
    """The largest micro-batch, in padded tokens (rows x longest); a single row is computed whatever its length."""

    tokens: int | None = None
    """None: as many as `machine.micro_batch_rows` rows have."""
    failed_tokens: int = 0
    """The smallest micro-batch that did not fit when the budget was last made smaller."""
    good_steps: int = 0
    """Steps since the budget last changed."""
    wait_steps: int = GROW_AFTER_STEPS
    """Good steps before it grows."""
    grown: bool = False
    """Whether the last change made it larger: a failure then doubles the wait."""

    def shrunk(self, failed_tokens: int, repeated: bool) -> "Budget":
        """After a micro-batch of `failed_tokens` padded tokens did not fit; `repeated`: not the first in this step."""
        raise NotImplementedError

    def after_good_step(self) -> "Budget":
        """After a step that fitted; grows when it is time, and to no limit (None) rather than up to what failed."""
        raise NotImplementedError
