"""What a step's time goes into, span by span.

A training that nobody profiles carries `StepSpans`: they measure nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

_UNTIMED: AbstractContextManager[None] = nullcontext()


class StepSpans:
    """The seams at which a step can be measured; nothing is."""

    def of(self, name: str) -> AbstractContextManager[None]:
        """Around work of this name. A span inside another takes its time away from the outer one."""
        return _UNTIMED

    def computes(self, padded_tokens: int) -> None:
        """A micro-batch is about to be computed: sequences x longest."""


@dataclass
class StepTimings:
    """What was measured from one `StepTimer.start` to the next `stop`."""

    seconds: float = 0.0
    """All of it, spans or not."""
    spans: dict[str, float] = field(default_factory=dict)
    """Seconds by name, those of spans inside not counted."""
    micro_batches: int = 0
    padded_tokens: int = 0

    @property
    def rest_s(self) -> float:
        """Seconds outside all spans."""
        return self.seconds - sum(self.spans.values())


class StepTimer(StepSpans):
    """Measures.

    Args:
        device: a GPU works on behind our back; its work is waited for at the border of every span while
            `waits_at_borders`, and always at the ends of a lap.
        clock: monotonic seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._lap, self._begun_s = StepTimings(), 0.0
        self._inner_s: list[float] = []
        """Of each span that is open, the seconds of those inside it."""
        self.waits_at_borders = device.type == "cuda"
        self.marks = False
        """Whether spans are shown in the trace of a torch profiler."""

    def start(self) -> None:
        """Begin a lap; what an earlier one has measured is forgotten."""
        self._settle()
        self._lap, self._inner_s = StepTimings(), []
        self._begun_s = self._clock()

    def stop(self) -> StepTimings:
        """What the lap has measured."""
        self._settle()
        self._lap.seconds = self._clock() - self._begun_s
        return self._lap

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """See `StepSpans.of`; what a failing piece of work took counts too."""
        mark = torch.profiler.record_function(name) if self.marks else _UNTIMED
        with mark:
            begun_s = self._now()
            self._inner_s.append(0.0)
            try:
                yield
            finally:
                spent_s = self._now() - begun_s
                own_s = spent_s - self._inner_s.pop()
                self._lap.spans[name] = self._lap.spans.get(name, 0.0) + own_s
                if self._inner_s:
                    self._inner_s[-1] += spent_s

    def computes(self, padded_tokens: int) -> None:
        """See `StepSpans.computes`."""
        self._lap.micro_batches += 1
        self._lap.padded_tokens += padded_tokens

    def _now(self) -> float:
        if self.waits_at_borders:
            self._settle()
        return self._clock()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
