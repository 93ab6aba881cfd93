"""Times the parts of a training step, span by span.

Without the profiler a training uses `StepSpans`, which measures nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

_UNTIMED: AbstractContextManager[None] = nullcontext()


class StepSpans:
    """Places at which a step can be measured; this class measures nothing."""

    def measure(self, name: str) -> AbstractContextManager[None]:
        """Wrap work of this name. The time of an inner span does not count for the outer one."""
        return _UNTIMED

    def count_micro_batch(self, padded_tokens: int) -> None:
        """Count a micro-batch that is about to be computed, of so many tokens (sequences x longest)."""


@dataclass
class StepTimings:
    """Measurements between `StepTimer.start` and the next `stop`."""

    seconds: float = 0.0
    """Total, inside and outside of spans."""
    spans: dict[str, float] = field(default_factory=dict)
    """Seconds by name, without those of inner spans."""
    micro_batches: int = 0
    padded_tokens: int = 0

    @property
    def rest_s(self) -> float:
        """Seconds outside all spans."""
        return self.seconds - sum(self.spans.values())


class StepTimer(StepSpans):
    """Measures spans.

    Args:
        device: a GPU works asynchronously. It is waited for at the edge of every span while `synchronizes_spans`, and
            always at `start` and `stop`.
        clock: monotonic seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._timings, self._started_s = StepTimings(), 0.0
        self._inner_s: list[float] = []
        """For each open span, the seconds of the spans inside it."""
        self.synchronizes_spans = device.type == "cuda"
        self.marks_spans = False
        """Whether spans appear in the trace of a torch profiler."""

    def start(self) -> None:
        """Start a measurement; drop the previous one."""
        self._synchronize()
        self._timings, self._inner_s = StepTimings(), []
        self._started_s = self._clock()

    def stop(self) -> StepTimings:
        """Return what was measured since `start`."""
        self._synchronize()
        self._timings.seconds = self._clock() - self._started_s
        return self._timings

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """See `StepSpans.measure`; the time of work that fails counts too."""
        mark = torch.profiler.record_function(name) if self.marks_spans else _UNTIMED
        with mark:
            started_s = self._now()
            self._inner_s.append(0.0)
            try:
                yield
            finally:
                spent_s = self._now() - started_s
                own_s = spent_s - self._inner_s.pop()
                self._timings.spans[name] = self._timings.spans.get(name, 0.0) + own_s
                if self._inner_s:
                    self._inner_s[-1] += spent_s

    def count_micro_batch(self, padded_tokens: int) -> None:
        """See `StepSpans.count_micro_batch`."""
        self._timings.micro_batches += 1
        self._timings.padded_tokens += padded_tokens

    def _now(self) -> float:
        if self.synchronizes_spans:
            self._synchronize()
        return self._clock()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
