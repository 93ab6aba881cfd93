"""Checks whether a machine meets requirements before it gets work: `vram=22GB,cuda=12.6,disk=50GB,download=50Mbps`."""

import difflib
import math
import os
import platform
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from ratchet.config.extras import DISTRIBUTION
from ratchet.config.settings import Settings
from ratchet.config.units import format_bytes, parse_bytes
from ratchet.errors import ReplicaError, SettingsError, UnsuitableMachineError, first_line
from ratchet.models.memory import capacity
from ratchet.runs.gpus import GpuInventory, GpuReading, query_gpus
from ratchet.runs.replication.remote_status import parse_replica_option
from ratchet.runs.replication.store import ReplicaStore, TransferLimits
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record

OPTION = "--require"
RETRY_TIMEOUT_S, REQUEST_TIMEOUT_S = 30.0, 15.0
"""Timeouts of all attempts and of one request to the replica. A machine whose network needs longer is not suitable."""
SIZES = (1 << 16, 1 << 19, 1 << 22, 1 << 25)
"""Sizes of the test transfers in bytes; each size is uploaded, then downloaded. The next size follows only if a
transfer was shorter than MIN_TRANSFER_S and none took eight times as long."""
MIN_TRANSFER_S = 1.0
"""Duration from which the speed of a transfer can be measured."""

_RATES = {"bps": 1, "kbps": 10**3, "mbps": 10**6, "gbps": 10**9}
"""Bits per second in each unit."""
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_CPU_QUOTA_V1, _CPU_PERIOD_V1 = (Path("/sys/fs/cgroup/cpu", name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
_TEST_CONTENT = b"ratchet\n" * (1 << 16)
"""Content of the file that tests the disk: half a megabyte."""

Amount = float | tuple[int, ...]
"""A number of bytes, a number of bits per second, or a count; for a version, the tuple of its numbers."""


@dataclass(frozen=True)
class TransferSpeed:
    """Bits per second in both directions. The time of an upload includes the store's confirmation."""

    upload_bits_s: float
    download_bits_s: float


@dataclass(frozen=True)
class MachineRequirement:
    """One requirement of `--require`."""

    name: str
    asked: str
    """The value as the user wrote it."""
    minimum: Amount


class RequirementResult(Record):
    """One requirement, and the measured value."""

    name: str
    asked: str
    found: str
    ok: bool


class MachineCheckReport(Record):
    """Result of a check. The result is about one machine at one time, so it is not an output of a stage."""

    machine: str
    """Host name."""
    at: str
    """Time of the check (ISO 8601, UTC)."""
    ratchet: str
    admitted: bool
    findings: tuple[RequirementResult, ...]
    write_problems: tuple[str, ...] = ()
    """Messages about the files to which this report could not be written."""


def check_machine(
    layout: ProjectLayout | None, settings: Settings, required: str | None, replica: str | None, target: Path | None
) -> MachineCheckReport:
    """Compare this machine with requirements, before it gets work. Loads no torch.

    Args:
        layout: the project, whose experiments/admission.json receives the report; None outside a project.
        settings: the project's settings, or the defaults.
        required: such as `vram=22GB,cuda=12.6,disk=50GB,download=50Mbps,upload=20Mbps`.
        replica: storage to measure the network with, in place of machine.replica.
        target: a further file for the report.

    Raises:
        SettingsError: a requirement is not valid, there is no storage to measure the network with, or the storage
            refuses access.
        UnsuitableMachineError: the machine does not meet a requirement; the message has the table.
    """
    if required is None:
        raise SettingsError(f"--replica and --output need {OPTION}, such as {OPTION} disk=50GB")
    requirements = parse_requirements(required)
    url = parse_replica_option(replica) if replica else settings.machine.replica
    network = [requirement.name for requirement in requirements if requirement.name in ("download", "upload")]
    if url is None and network:
        raise SettingsError(
            f"{OPTION}: {' and '.join(network)}: nothing to measure against; set machine.replica, or name "
            "a place of storage with --replica URL"
        )
    probe = MachineProbe(layout.runs if layout else Path.cwd(), lambda: measure_transfer_speed(_open_store(url or "")))
    findings = probe.findings(requirements)
    report = MachineCheckReport(
        machine=socket.gethostname(), at=datetime.now(UTC).isoformat(timespec="seconds"), ratchet=version(DISTRIBUTION),
        findings=findings, admitted=all(finding.ok for finding in findings),
    )  # fmt: skip
    problems = list(_write_records(report, [layout.admission if layout else None, target]))
    report = report.model_copy(update={"write_problems": tuple(problems)})
    if missing := [finding.name for finding in report.findings if not finding.ok]:
        text = format_findings(report)
        raise UnsuitableMachineError(f"{report.machine} is not good enough: {', '.join(missing)}\n{text}", report)
    return report


def format_findings(report: MachineCheckReport) -> str:
    """Format a table with a row for each requirement."""
    width = max(len(finding.asked) for finding in report.findings)
    lines = [
        f"  {finding.name:<9} {finding.asked:>{width}}  {'ok    ' if finding.ok else 'NOT OK'}  {finding.found}"
        for finding in report.findings
    ]
    return "\n".join([*lines, *(f"  {problem}" for problem in report.write_problems)])


def _write_records(report: MachineCheckReport, paths: Iterable[Path | None]) -> Iterator[str]:
    """Write the report; yield a message for each file that cannot be written.

    An unwritable file does not change the result of the check: the requirement `disk` tests the disk.
    """
    for path in paths:
        try:
            if path is not None:
                report.save(path)
        except OSError as error:
            yield f"{path}: not written ({error.strerror})"


def _open_store(url: str) -> ReplicaStore:
    limits = TransferLimits(retry_timeout_s=RETRY_TIMEOUT_S, timeout_s=REQUEST_TIMEOUT_S)
    return ReplicaStore(url, limits, lambda: False)


# Requirements.


def parse_requirements(text: str) -> tuple[MachineRequirement, ...]:
    """Parse `--require`; the result is in the order of KINDS.

    Raises:
        SettingsError: a name is unknown, occurs twice or has no value, or a value is not valid.
    """
    requirements: dict[str, MachineRequirement] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if name not in KINDS:
            similar = difflib.get_close_matches(name.lower(), KINDS, n=1)
            hint = f" (did you mean {similar[0]}?)" if similar else ""
            raise SettingsError(f"{OPTION}: found {part.strip()!r}{hint}; expected one of {', '.join(KINDS)}")
        if not sign or not value:
            raise SettingsError(f"{OPTION}: {name} has no value; expected {name}=VALUE, as in vram=22GB,cuda=12.6")
        if name in requirements:
            raise SettingsError(f"{OPTION}: found {name} twice; expected it once")
        requirements[name] = MachineRequirement(name, value, KINDS[name](value, f"{OPTION} {name}"))
    return tuple(requirements[name] for name in KINDS if name in requirements)


def _parse_size(text: str, where: str) -> Amount:
    return parse_bytes(text, where)


def _parse_rate(text: str, where: str) -> Amount:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bps)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or not (rate := float(match[1]) * _RATES[match[2].lower()]):
        raise SettingsError(f"{where}: found {text!r}; expected bits per second, such as 800kbps, 50Mbps or 1Gbps")
    return rate


def _parse_count(text: str, where: str) -> Amount:
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or not int(text):
        raise SettingsError(f"{where}: found {text!r}; expected a whole number, 1 or more")
    return float(text)


def _parse_version(text: str, where: str) -> Amount:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6}){0,3}", text, re.ASCII):
        raise SettingsError(f"{where}: found {text!r}; expected a version: numbers with dots, such as 12.6")
    return tuple(map(int, text.split(".")))


KINDS: dict[str, Callable[[str, str], Amount]] = {
    "vram": _parse_size, "gpus": _parse_count, "cuda": _parse_version, "driver": _parse_version,
    "ram": _parse_size, "cpus": _parse_count, "disk": _parse_size,
    "python": _parse_version, "download": _parse_rate, "upload": _parse_rate,
}  # fmt: skip
"""All requirements, in the order in which they are checked: slow checks come last."""


# CPUs, disk and network.


def available_cpus(quota: Path = _CPU_QUOTA, quota_v1: Path = _CPU_QUOTA_V1, period_v1: Path = _CPU_PERIOD_V1) -> int:
    """Count the CPUs that this process may use: those of its affinity mask, or fewer by the quota of its container."""
    bound = len(os.sched_getaffinity(0))
    for paths in ((quota,), (quota_v1, period_v1)):
        try:
            allowed, period = (float(word) for path in paths for word in path.read_text().split())
        except (OSError, ValueError):  # not this version of cgroups, or `max`: no quota
            continue
        return min(bound, max(1, math.floor(allowed / period))) if allowed > 0 else bound
    return bound


def find_disk_fault(folder: Path) -> str:
    """Write a file, force it to the disk, read it back and remove it. Returns the problem; empty if there is none."""
    path = folder / f"{files.PARTIAL}admission-{secrets.token_hex(4)}"
    try:
        files.make_directory(folder)
        try:
            files.write_blocks(path, [[_TEST_CONTENT]])
            files.fsync_directory(folder)
            is_same = path.read_bytes() == _TEST_CONTENT
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or first_line(error)}"
    return "" if is_same else f"{folder}: the bytes read back differ from the bytes written"


def measure_transfer_speed(store: ReplicaStore) -> TransferSpeed:
    """Upload random bytes to a replica as checkpoints are uploaded, download them again, and remove them.

    Raises:
        ReplicaError: the store cannot be reached, or stops answering during the measurement.
        SettingsError: the store cannot be used with these settings: bucket, credentials or clock.
    """
    store.check()
    upload = download = 0.0
    with tempfile.TemporaryDirectory(prefix="ratchet-speed-") as folder:
        for size in SIZES:
            with _upload_sample(store, Path(folder) / "content", size) as (name, upload_s):
                began_s = time.perf_counter()
                received = sum(len(block) for block in store.blocks(name))
                download_s = time.perf_counter() - began_s
            upload, download = 8 * size / upload_s, 8 * received / download_s
            if min(upload_s, download_s) >= MIN_TRANSFER_S or max(upload_s, download_s) >= 8 * MIN_TRANSFER_S:
                break
    return TransferSpeed(upload, download)


@contextmanager
def _upload_sample(store: ReplicaStore, path: Path, size: int) -> Iterator[tuple[str, float]]:
    """Upload random bytes and remove the object after the block. Yields its name and the duration of the upload."""
    content = os.urandom(size)
    path.write_bytes(content)
    name = f"speed/{socket.gethostname()[:32].lower()}-{secrets.token_hex(8)}"
    began_s = time.perf_counter()
    try:
        store.send(name, path, (digests.hash_bytes(content), size))
        yield name, time.perf_counter() - began_s
    finally:
        store.remove([name])


# The comparison.


class _Measurement(NamedTuple):
    amount: Amount | None
    """None: the machine has nothing of this kind, or the measurement failed."""
    text: str


@dataclass
class MachineProbe:
    """Measures the required properties of this machine, each of them once."""

    disk: Path
    """Directory for runs."""
    measure: Callable[[], TransferSpeed]
    """Measures the network; raises ReplicaError."""
    list_gpus: Callable[[], GpuInventory] = query_gpus

    def findings(self, requirements: Sequence[MachineRequirement]) -> tuple[RequirementResult, ...]:
        """Check every requirement, also after one that is not met.

        Raises:
            SettingsError: the replica's settings are wrong, which is not a fault of this machine.
        """
        self._minimums = {requirement.name: requirement.minimum for requirement in requirements}
        return tuple(self._finding(requirement) for requirement in requirements)

    def _finding(self, requirement: MachineRequirement) -> RequirementResult:
        measure: Callable[[], _Measurement] = getattr(self, f"_{requirement.name}")
        measured = measure()
        ok = measured.amount is not None and _is_sufficient(measured.amount, requirement.minimum)
        return RequirementResult(name=requirement.name, asked=requirement.asked, found=measured.text, ok=ok)

    # Each of KINDS has a method of the same name with an underscore.

    def _vram(self) -> _Measurement:
        """Select the required number of GPUs with the most free memory; return the least free memory of these."""
        if not self._gpus_with_memory:
            return self._no_gpu
        by_free_memory = sorted(self._gpus_with_memory, key=lambda device: device.free_bytes or 0, reverse=True)
        count = self._minimums.get("gpus", 1.0)
        least_free = by_free_memory[min(len(by_free_memory), int(count) if isinstance(count, float) else 1) - 1]
        free, total = least_free.free_bytes or 0, least_free.total_bytes or 0
        return _Measurement(free, f"{format_bytes(free)} of {format_bytes(total)} free, {least_free.name}")

    def _gpus(self) -> _Measurement:
        devices = self._gpus_with_memory
        if not devices:
            return _Measurement(0.0, self._no_gpu.text)
        names = ", ".join(sorted({device.name or "?" for device in devices}))
        return _Measurement(float(len(devices)), f"{len(devices)} ({names})")

    def _cuda(self) -> _Measurement:
        return _measure_version(self._inventory.cuda) if self._inventory.cuda else self._no_gpu

    def _driver(self) -> _Measurement:
        return _measure_version(self._inventory.driver) if self._inventory.driver else self._no_gpu

    def _ram(self) -> _Measurement:
        host = capacity.measure_host()
        return _Measurement(
            host.available_bytes, f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} available"
        )

    def _cpus(self) -> _Measurement:
        return _Measurement(float(available_cpus()), str(available_cpus()))

    def _disk(self) -> _Measurement:
        if fault := find_disk_fault(self.disk):
            return _Measurement(None, fault)
        free = capacity.disk_free_bytes(self.disk)
        return _Measurement(free, f"{format_bytes(free)} free, written and read back")

    def _python(self) -> _Measurement:
        return _measure_version(platform.python_version())

    def _download(self) -> _Measurement:
        return self._rate(lambda speed: speed.download_bits_s)

    def _upload(self) -> _Measurement:
        return self._rate(lambda speed: speed.upload_bits_s)

    def _rate(self, select: Callable[[TransferSpeed], float]) -> _Measurement:
        if isinstance(self._speed, str):
            return _Measurement(None, self._speed)
        return _Measurement(select(self._speed), f"{select(self._speed) / 1e6:,.1f} Mbps")

    @cached_property
    def _speed(self) -> TransferSpeed | str:
        try:
            return self.measure()
        except ReplicaError as error:
            return str(error)

    @cached_property
    def _inventory(self) -> GpuInventory:
        return self.list_gpus()

    @property
    def _gpus_with_memory(self) -> list[GpuReading]:
        """GPUs that work: a lost GPU does not tell its memory."""
        return [device for device in self._inventory.devices if device.free_bytes is not None]

    @property
    def _no_gpu(self) -> _Measurement:
        return _Measurement(None, self._inventory.problem or "no usable GPU")


def _measure_version(text: str) -> _Measurement:
    numbers = [part for part in text.split(".") if part.isdecimal()]
    return _Measurement(tuple(map(int, numbers)), text)


def _is_sufficient(measured: Amount, minimum: Amount) -> bool:
    """Compare versions number by number: 12.10 is newer than 12.6."""
    if isinstance(measured, tuple) and isinstance(minimum, tuple):
        return measured >= minimum
    return not isinstance(measured, tuple) and not isinstance(minimum, tuple) and measured >= minimum
