"""How much of a batch is computed at once, and how that changes when memory runs out: a value, no torch.

A budget is a function of what happened to it (failures and good steps, in order) and of nothing else. So a run that is
replayed from its journal comes to the same micro-batches, and to the same rounding of sums.
"""

from dataclasses import dataclass, replace

SHRINK = 0.8
"""Of the padded tokens that did not fit, at the first failure in a step; each further one in the same step halves."""
GROW = 1.25
GROW_AFTER_STEPS = 50
"""Good steps before a shrunk budget is tried a little larger; doubled each time that the larger one fails."""
LONGEST_WAIT_STEPS = 10_000


@dataclass(frozen=True)
class Budget:
    """The largest micro-batch, in padded tokens (rows x longest); a single row is computed whatever its length."""

    tokens: int | None = None
    """None: as many as `machine.micro_batch_rows` rows have."""
    failed_tokens: int = 0
    """The micro-batch that did not fit when the budget was last made smaller."""
    good_steps: int = 0
    """Steps since the budget last changed."""
    wait_steps: int = GROW_AFTER_STEPS
    """Good steps before it grows."""
    grown: bool = False
    """Whether the last change made it larger: a failure then doubles the wait."""

    def shrunk(self, failed_tokens: int, repeated: bool) -> "Budget":
        """After a micro-batch of `failed_tokens` padded tokens did not fit; `repeated`: not the first in this step.

        The result is smaller than what failed and never larger than before, so failures end at single rows. Those
        cannot be divided: that one row does not fit is for the caller to see.

        Raises:
            ValueError: `failed_tokens` is not positive.
        """
        if failed_tokens < 1:
            raise ValueError(f"a micro-batch has at least one token, not {failed_tokens}")
        before = failed_tokens if self.tokens is None else min(self.tokens, failed_tokens)
        tokens = before // 2 if repeated else min(before, int(SHRINK * failed_tokens))
        wait = min(LONGEST_WAIT_STEPS, 2 * self.wait_steps) if self.grown else self.wait_steps
        return Budget(max(1, tokens), failed_tokens, wait_steps=wait)

    def after_good_step(self) -> "Budget":
        """After a step that fitted; grows when it is time, and to no limit (None) rather than up to what failed.

        What did not fit once is tried again, for the want may have been another process's. If it was not, that costs
        one repeated micro-batch each time, and the wait between the times doubles.
        """
        good_steps = self.good_steps + 1
        if self.tokens is None or good_steps < self.wait_steps:
            return replace(self, good_steps=good_steps)
        larger = max(self.tokens + 1, int(GROW * self.tokens))
        return replace(self, tokens=larger if larger < self.failed_tokens else None, good_steps=0, grown=True)
