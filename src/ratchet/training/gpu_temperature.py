"""Decides whether training must pause because its GPU is too hot (`machine.max_gpu_celsius`), with hysteresis."""

import time
from collections.abc import Callable

import torch

READ_INTERVAL_S = 5.0
"""Seconds between two readings. A call of the driver takes about a millisecond."""
HYSTERESIS_CELSIUS = 5
"""A training that has paused continues when the GPU is this much below the limit."""


class GpuThermometer:
    """Compares the temperature of the GPU of this rank with a limit.

    Args:
        limit: highest temperature in degrees Celsius; None: no limit.
        read: returns the temperature.
        report: reports to the user that the temperature cannot be read, so that the limit has no effect.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        limit: int | None,
        read: Callable[[], int],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit, self._read, self._report, self._clock = limit, read, report, clock
        self._next_s = 0.0
        self.celsius = 0
        """The last reading."""
        self.is_hot = False
        """Whether the GPU was too hot, and has not cooled down yet, at the last reading."""

    @classmethod
    def of_device(cls, device: torch.device, limit: int | None, report: Callable[[str], None]) -> "GpuThermometer":
        """Return the thermometer of a device; without a limit for a CPU, whose temperature is not known."""
        return cls(limit if device.type == "cuda" else None, lambda: int(torch.cuda.temperature(device)), report)

    def update(self) -> bool:
        """Read the temperature if it is time to; return `is_hot`."""
        if self._limit is None or self._clock() < self._next_s:
            return self.is_hot
        self._next_s = self._clock() + READ_INTERVAL_S
        try:
            self.celsius = self._read()
        except Exception as error:  # torch has no common class for errors of NVML and of its AMD counterpart
            self._limit, self.is_hot = None, False
            self._report(f"machine.max_gpu_celsius has no effect: the temperature of the GPU cannot be read ({error})")
            return False
        self.is_hot = self.celsius > self._limit - (HYSTERESIS_CELSIUS if self.is_hot else 0)
        return self.is_hot
