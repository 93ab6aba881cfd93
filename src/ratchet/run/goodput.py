"""Which share of the time a run has made progress in: a fold over its journal.

Goodput is the time spent in steps and validations that count, each of them once, over the time since the run began.
What is lost are start-ups, waits for a machine, steps done again, and training that stood still for checkpoints.
"""

from dataclasses import dataclass, field

from ratchet.run.journal import Event


@dataclass
class Goodput:
    """Running account; `see` folds one more event in."""

    began_t: float | None = None
    """Unix time of the first attempt."""
    last_t: float = 0.0
    steps: dict[int, float] = field(default_factory=dict)
    """Seconds of each step that counts: the last time that it was done."""
    validations: dict[int, float] = field(default_factory=dict)
    done_again_s: float = 0.0
    """Spent in steps and validations that had to be done again."""
    _over: bool = False

    def see(self, event: Event) -> None:
        """Fold one event in; one that lacks what its kind has says nothing."""
        if event.kind == "attempt" and self.began_t is None:
            self.began_t = event.t
        if event.kind in ("attempt", "finished"):
            self._over = event.kind == "finished"
        if not self._over or event.kind == "finished":  # what is told of a finished run takes none of its time
            self.last_t = max(self.last_t, event.t)
        kind = {"step": (self.steps, "step_s"), "validation": (self.validations, "seconds")}.get(event.kind)
        if kind is None:
            return
        counted, key = kind
        step, seconds = event.data.get("step"), event.data.get(key)
        if isinstance(step, int) and isinstance(seconds, int | float):
            self.done_again_s += counted.get(step, 0.0)
            counted[step] = float(seconds)

    @property
    def useful_s(self) -> float:
        """Spent in what counts."""
        return sum(self.steps.values()) + sum(self.validations.values())

    def wall_s(self, now_t: float | None = None) -> float:
        """Since the run began, until its last event, or until `now_t` of a run that goes on."""
        until = self.last_t if now_t is None else now_t
        return max(0.0, until - self.began_t) if self.began_t is not None else 0.0

    def share(self, now_t: float | None = None) -> float | None:
        """Goodput between 0 and 1; None before anything was done."""
        wall = self.wall_s(now_t)
        return min(1.0, self.useful_s / wall) if wall else None
