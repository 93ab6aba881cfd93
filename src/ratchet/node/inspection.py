"""Each requirement beside what there is."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ratchet.errors import MirrorError
from ratchet.node import gpus, machine, speed
from ratchet.node.requirements import Amount, Requirement
from ratchet.records import Record
from ratchet.sizes import written


class Finding(Record):
    """One requirement, and what was found."""

    name: str
    asked: str
    found: str
    ok: bool


class Admission(Record):
    """Whether this machine was good enough. It is about a machine at a time, and no stage's out."""

    machine: str
    """Its name."""
    at: str
    """When it was looked at (ISO 8601, UTC)."""
    ratchet: str
    admitted: bool
    findings: tuple[Finding, ...]


class _Found(NamedTuple):
    amount: Amount | None
    """None: there is nothing of the kind."""
    words: str


@dataclass
class Inspection:
    """Looks at this machine, at each thing once and only if it is asked for."""

    disk: Path
    """Where runs will lie."""
    measure: Callable[[], speed.Speed]
    """How fast the network is; raises MirrorError."""
    ask_gpus: Callable[[], gpus.Gpus] = gpus.found

    def findings(self, requirements: Sequence[Requirement]) -> tuple[Finding, ...]:
        """Look at everything; one that is not met stops nothing.

        Raises:
            SettingsError: the mirror must not be used like this, from any machine.
        """
        self._wanted = {one.name: one.least for one in requirements}
        return tuple(self._finding(one) for one in requirements)

    def _finding(self, one: Requirement) -> Finding:
        look: Callable[[], _Found] = getattr(self, f"_{one.name}")
        found = look()
        ok = found.amount is not None and _enough(found.amount, one.least)
        return Finding(name=one.name, asked=one.asked, found=found.words, ok=ok)

    # each of KINDS has a method of its name

    def _vram(self) -> _Found:
        """Of the GPU that has least among as many of the best as are asked for."""
        if not self._gpus_seen.devices:
            return self._no_gpu
        ordered = sorted(self._gpus_seen.devices, key=lambda one: one.free_bytes, reverse=True)
        number = self._wanted.get("gpus", 1.0)
        last = ordered[min(len(ordered), int(number) if isinstance(number, float) else 1) - 1]
        return _Found(last.free_bytes, f"{written(last.free_bytes)} of {written(last.total_bytes)} free, {last.name}")

    def _gpus(self) -> _Found:
        if not self._gpus_seen.devices:
            return _Found(0.0, self._no_gpu.words)
        names = ", ".join(sorted({one.name for one in self._gpus_seen.devices}))
        return _Found(float(len(self._gpus_seen.devices)), f"{len(self._gpus_seen.devices)} ({names})")

    def _cuda(self) -> _Found:
        return _version(self._gpus_seen.cuda) if self._gpus_seen.cuda else self._no_gpu

    def _driver(self) -> _Found:
        return _version(self._gpus_seen.driver) if self._gpus_seen.driver else self._no_gpu

    def _ram(self) -> _Found:
        found = machine.memory()
        return _Found(
            found.available_bytes, f"{written(found.available_bytes)} of {written(found.total_bytes)} at hand"
        )

    def _cpus(self) -> _Found:
        return _Found(float(machine.cpus()), str(machine.cpus()))

    def _disk(self) -> _Found:
        if fault := machine.fault_of_disk(self.disk):
            return _Found(None, fault)
        free = machine.disk_free_bytes(self.disk)
        return _Found(free, f"{written(free)} free, written and read back")

    def _python(self) -> _Found:
        return _version(platform.python_version())

    def _download(self) -> _Found:
        return self._rate(lambda measured: measured.download_bits_s)

    def _upload(self) -> _Found:
        return self._rate(lambda measured: measured.upload_bits_s)

    def _rate(self, of: Callable[[speed.Speed], float]) -> _Found:
        if isinstance(self._speed, str):
            return _Found(None, self._speed)
        return _Found(of(self._speed), f"{of(self._speed) / 1e6:,.1f} Mbps")

    @cached_property
    def _speed(self) -> speed.Speed | str:
        try:
            return self.measure()
        except MirrorError as error:
            return str(error)

    @cached_property
    def _gpus_seen(self) -> gpus.Gpus:
        return self.ask_gpus()

    @property
    def _no_gpu(self) -> _Found:
        return _Found(None, self._gpus_seen.trouble or "no GPU that may be used")


def _version(text: str) -> _Found:
    numbers = [part for part in text.split(".") if part.isdecimal()]
    return _Found(tuple(map(int, numbers)), text)


def _enough(found: Amount, least: Amount) -> bool:
    """Versions as versions: 12.10 is newer than 12.6."""
    if isinstance(found, tuple) and isinstance(least, tuple):
        return found >= least
    return not isinstance(found, tuple) and not isinstance(least, tuple) and found >= least
