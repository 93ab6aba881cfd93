"""How much memory a training holds, phase by phase: measured, told to the journal, and compared with the forecast."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ratchet.config import units
from ratchet.models.memory import capacity
from ratchet.runs.journal import Journal
from ratchet.storage.records.model import Phase

TOLD_AGAIN = 1.02
"""A phase that comes again is told again only when it held this many times what it held before."""


@dataclass
class Measured:
    """What one phase has held at most, in bytes."""

    peak_bytes: int = 0
    allocated_bytes: int = 0
    """Of tensors, on a GPU."""
    host_bytes: int = 0
    """Resident memory of the process."""


class Monitor:
    """Divides the time of a worker into phases. One phase at a time; each begins where the one before ends."""

    def __init__(self, journal: Journal, device: torch.device, warnings: Sequence[float]) -> None:
        self.journal = journal
        self.device = device
        self.found: dict[Phase, Measured] = {}
        self._left = sorted(warnings)
        self._phase: Phase | None = None
        self._total_bytes = capacity.of(device).total_bytes
        self._begin("baseline")

    def enter(self, phase: Phase) -> None:
        """The phase before is over, and told; nothing is done when it is the same."""
        if phase != self._phase:
            self.close()
            self._begin(phase)

    def leave(self, phase: Phase) -> None:
        """This phase is over, if it is the one that we are in."""
        if phase == self._phase:
            self.close()

    def close(self) -> None:
        """The last phase is over."""
        if self._phase is None:
            return
        phase, self._phase = self._phase, None
        now, known = self._measure(), self.found.get(phase)
        if known is not None and now.peak_bytes <= TOLD_AGAIN * known.peak_bytes:
            return
        self.found[phase] = now
        self.journal.append(
            "memory", phase=phase, peak_bytes=now.peak_bytes, allocated_bytes=now.allocated_bytes,
            host_bytes=now.host_bytes, device=self.device.type, device_bytes=self._total_bytes,
        )  # fmt: skip
        self._warn(phase, now.peak_bytes)

    def _begin(self, phase: Phase) -> None:
        self._phase = phase
        capacity.forget_peak()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _measure(self) -> Measured:
        host = capacity.peak_resident_bytes()
        if self.device.type != "cuda":
            return Measured(host, 0, host)
        reserved = torch.cuda.max_memory_reserved(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        # Context and libraries' work spaces: what is in use and no tensor's. Of other processes too, if there are any.
        beside = max(0, total - free - torch.cuda.memory_reserved(self.device))
        return Measured(reserved + beside, torch.cuda.max_memory_allocated(self.device), host)

    def _warn(self, phase: Phase, used: int) -> None:
        share = used / self._total_bytes
        passed = [limit for limit in self._left if share >= limit]
        self._left = [limit for limit in self._left if share < limit]
        if passed:
            where = "GPU" if self.device.type == "cuda" else "machine"
            self.journal.append(
                "alert",
                text=f"memory: {share:.0%} of the {where}'s {units.written(self._total_bytes)} are in use in phase "
                f"{phase} (warned of from {max(passed):.0%} on, machine.memory_warnings)",
            )
