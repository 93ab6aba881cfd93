"""Requirements that a machine must meet before it gets work: `vram=22GB,cuda=12.6,disk=50GB,download=50Mbps`.

The NVIDIA driver is asked about GPUs without torch, in a separate process, because a faulty GPU can hang.

    python -m ratchet.stages.machine_check     prints what `query_gpus` returns, as JSON

The CUDA Driver API (libcuda.so.1) sees what a training would see, so CUDA_VISIBLE_DEVICES applies. NVML gives the
version of the driver.
"""

import ctypes
import difflib
import json
import math
import os
import platform
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from ratchet.config.settings import Settings
from ratchet.config.units import format_bytes, parse_bytes
from ratchet.errors import ReplicaError, SettingsError, UnsuitableMachineError, first_line
from ratchet.models.memory import capacity
from ratchet.runs.replication.store import ReplicaStore, TransferLimits
from ratchet.storage import digests, files
from ratchet.storage.digests import DISTRIBUTION
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record

QUERY_TIMEOUT_S = 60.0
_NAME_BYTES = 96
_COMPUTE_MAJOR, _COMPUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


@dataclass(frozen=True)
class GpuDevice:
    """One that can be used."""

    name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int
    """With a context open, as a training has one."""


@dataclass(frozen=True)
class GpuInventory:
    """All that can be used here."""

    devices: tuple[GpuDevice, ...] = ()
    cuda: str = ""
    """The newest CUDA that the driver can do; empty when there is none."""
    driver: str = ""
    """Version of the driver; empty when it is not known."""
    trouble: str = ""
    """Why there are none."""


def query_gpus(timeout_s: float = QUERY_TIMEOUT_S) -> GpuInventory:
    """Ask, in a process of its own; what cannot be asked is `trouble`."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ratchet.stages.machine_check"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        told = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return GpuInventory(trouble=f"the driver did not answer within {timeout_s:g} s")
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return GpuInventory(trouble=f"asking the driver failed ({last[:200]})")
    return GpuInventory(**(told | {"devices": tuple(GpuDevice(**one) for one in told["devices"])}))


class _CudaDriver:
    """The few calls that are needed. Raises OSError when the library is not there or a call fails."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise OSError("libcuda.so.1 is not there: no NVIDIA driver, or a container without access to it") from None
        self._call("cuInit", 0)

    def version(self) -> str:
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def count(self) -> int:
        number = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def gpu(self, index: int) -> GpuDevice:
        device, name, context = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDeviceGetName", name, _NAME_BYTES, device)
        capability = []
        for attribute in (_COMPUTE_MAJOR, _COMPUTE_MINOR):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
            capability.append(str(value.value))
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self._call("cuCtxSetCurrent", context)
            self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", device)
        return GpuDevice(name.value.decode(errors="replace"), ".".join(capability), total.value, free.value)

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise OSError(f"{name} failed with error {code} of the CUDA driver")


def _driver_version() -> str:
    """The driver's version, from NVML; empty when that is not there."""
    text = ctypes.create_string_buffer(_NAME_BYTES)
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, _NAME_BYTES):
            return ""
    except (OSError, AttributeError):
        return ""
    return text.value.decode(errors="replace")


def _query_in_process() -> GpuInventory:
    """Ask in this process."""
    driver = _driver_version()
    try:
        cuda = _CudaDriver()
        return GpuInventory(tuple(cuda.gpu(index) for index in range(cuda.count())), cuda.version(), driver)
    except (OSError, AttributeError) as error:
        return GpuInventory(driver=driver, trouble=str(error))


OPTION = "--require"

_RATES = {"bps": 1, "kbps": 10**3, "mbps": 10**6, "gbps": 10**9}
"""Bits in a second."""

Amount = float | tuple[int, ...]
"""Bytes, bits in a second or a number; a version as its numbers."""


@dataclass(frozen=True)
class MachineRequirement:
    """One thing that must be there."""

    name: str
    asked: str
    """As it was written."""
    least: Amount


def _parse_size(text: str, where: str) -> Amount:
    return parse_bytes(text, where)


def _parse_rate(text: str, where: str) -> Amount:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bps)", text.strip(), re.IGNORECASE | re.ASCII)
    if found is None or not (rate := float(found[1]) * _RATES[found[2].lower()]):
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


def parse_requirements(text: str) -> tuple[MachineRequirement, ...]:
    """Parse `--require`; the result is in the order of KINDS.

    Raises:
        SettingsError: a name is unknown, occurs twice or has no value, or a value is not valid.
    """
    found: dict[str, MachineRequirement] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if name not in KINDS:
            near = difflib.get_close_matches(name.lower(), KINDS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise SettingsError(f"{OPTION}: found {part.strip()!r}{hint}; expected one of {', '.join(KINDS)}")
        if not sign or not value:
            raise SettingsError(f"{OPTION}: {name} has no value; expected {name}=VALUE, as in vram=22GB,cuda=12.6")
        if name in found:
            raise SettingsError(f"{OPTION}: found {name} twice; expected it once")
        found[name] = MachineRequirement(name, value, KINDS[name](value, f"{OPTION} {name}"))
    return tuple(found[name] for name in KINDS if name in found)


_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_QUOTA_V1, _PERIOD_V1 = (Path("/sys/fs/cgroup/cpu", name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
_TRIAL = b"ratchet\n" * (1 << 16)
"""Half a megabyte."""


def available_cpus(quota: Path = _QUOTA, quota_v1: Path = _QUOTA_V1, period_v1: Path = _PERIOD_V1) -> int:
    """CPUs that this process may use: those it is bound to, or fewer where its container has a quota of their time."""
    bound = len(os.sched_getaffinity(0))
    for paths in ((quota,), (quota_v1, period_v1)):
        try:
            most, period = (float(word) for path in paths for word in path.read_text().split())
        except (OSError, ValueError):  # not this kind of cgroup, or `max`: no quota
            continue
        return min(bound, max(1, math.floor(most / period))) if most > 0 else bound
    return bound


def memory_capacity() -> capacity.MemoryCapacity:
    """Memory of this machine, or of the container if that allows less."""
    return capacity.measure_host()


def disk_free_bytes(folder: Path) -> int:
    """Room for this user on the disk that the folder lies on, or will."""
    return capacity.disk_free_bytes(folder)


def find_disk_fault(folder: Path) -> str:
    """Write a file there, force it to the disk, read it back and remove it; what went wrong, empty if nothing did."""
    trial = folder / f"{files.PARTIAL}admission-{secrets.token_hex(4)}"
    try:
        files.make_directory(folder)
        try:
            files.write_blocks(trial, [[_TRIAL]])
            files.fsync_directory(folder)
            same = trial.read_bytes() == _TRIAL
        finally:
            trial.unlink(missing_ok=True)
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or first_line(error)}"
    return "" if same else f"{folder}: what was written is not what was read back"


# How fast this machine reaches the replica: bytes of nothing are sent there and read back, as checkpoints would be.

SIZES = (1 << 16, 1 << 19, 1 << 22, 1 << 25)
"""Bytes of one try; the next larger one follows when one took less than LONG_ENOUGH_S: up to 32 MiB each way."""
LONG_ENOUGH_S = 1.0


@dataclass(frozen=True)
class TransferSpeed:
    """Bits in a second, both ways. Sending includes what the store does to be sure that all has arrived."""

    upload_bits_s: float
    download_bits_s: float


def measure_transfer_speed(store: ReplicaStore) -> TransferSpeed:
    """Send and fetch content that cannot be compressed, and remove it.

    Raises:
        ReplicaError: the store cannot be reached, or not for long enough.
        SettingsError: it must not be used like this: bucket, credentials, clock.
    """
    store.check()
    upload = download = 0.0
    with tempfile.TemporaryDirectory(prefix="ratchet-speed-") as folder:
        for size in SIZES:
            with _upload_samples(store, Path(folder) / "content", size) as (name, sent_s):
                began_s = time.perf_counter()
                arrived = sum(len(block) for block in store.blocks(name))
                fetched_s = time.perf_counter() - began_s
            upload, download = 8 * size / sent_s, 8 * arrived / fetched_s
            if min(sent_s, fetched_s) >= LONG_ENOUGH_S or max(sent_s, fetched_s) >= 8 * LONG_ENOUGH_S:
                break
    return TransferSpeed(upload, download)


@contextmanager
def _upload_samples(store: ReplicaStore, path: Path, size: int) -> Iterator[tuple[str, float]]:
    """An object of random content for so long; its name, and how long it took to send it."""
    content = os.urandom(size)
    path.write_bytes(content)
    name = f"speed/{socket.gethostname()[:32].lower()}-{secrets.token_hex(8)}"
    began_s = time.perf_counter()
    try:
        store.send(name, path, (digests.hash_bytes(content), size))
        yield name, time.perf_counter() - began_s
    finally:
        store.remove([name])


class RequirementResult(Record):
    """One requirement, and what was found."""

    name: str
    asked: str
    found: str
    ok: bool


class MachineCheckReport(Record):
    """Whether this machine was good enough. It is about a machine at a time, and no stage's out."""

    machine: str
    """Its name."""
    at: str
    """When it was looked at (ISO 8601, UTC)."""
    ratchet: str
    admitted: bool
    findings: tuple[RequirementResult, ...]
    write_problems: tuple[str, ...] = ()
    """Files of the record that could not be written."""


class _Measurement(NamedTuple):
    amount: Amount | None
    """None: there is nothing of the kind."""
    words: str


@dataclass
class MachineProbe:
    """Looks at this machine, at each thing once and only if it is asked for."""

    disk: Path
    """Where runs will lie."""
    measure: Callable[[], TransferSpeed]
    """How fast the network is; raises ReplicaError."""
    ask_gpus: Callable[[], GpuInventory] = query_gpus

    def findings(self, requirements: Sequence[MachineRequirement]) -> tuple[RequirementResult, ...]:
        """Look at everything; one that is not met stops nothing.

        Raises:
            SettingsError: the replica must not be used like this, from any machine.
        """
        self._wanted = {one.name: one.least for one in requirements}
        return tuple(self._finding(one) for one in requirements)

    def _finding(self, one: MachineRequirement) -> RequirementResult:
        look: Callable[[], _Measurement] = getattr(self, f"_{one.name}")
        found = look()
        ok = found.amount is not None and _is_sufficient(found.amount, one.least)
        return RequirementResult(name=one.name, asked=one.asked, found=found.words, ok=ok)

    # each of KINDS has a method of its name

    def _vram(self) -> _Measurement:
        """Free memory of the smallest of the best GPUs, as many as are required."""
        if not self._gpus_seen.devices:
            return self._no_gpu
        ordered = sorted(self._gpus_seen.devices, key=lambda one: one.free_bytes, reverse=True)
        number = self._wanted.get("gpus", 1.0)
        last = ordered[min(len(ordered), int(number) if isinstance(number, float) else 1) - 1]
        return _Measurement(
            last.free_bytes, f"{format_bytes(last.free_bytes)} of {format_bytes(last.total_bytes)} free, {last.name}"
        )

    def _gpus(self) -> _Measurement:
        if not self._gpus_seen.devices:
            return _Measurement(0.0, self._no_gpu.words)
        names = ", ".join(sorted({one.name for one in self._gpus_seen.devices}))
        return _Measurement(float(len(self._gpus_seen.devices)), f"{len(self._gpus_seen.devices)} ({names})")

    def _cuda(self) -> _Measurement:
        return _measure_version(self._gpus_seen.cuda) if self._gpus_seen.cuda else self._no_gpu

    def _driver(self) -> _Measurement:
        return _measure_version(self._gpus_seen.driver) if self._gpus_seen.driver else self._no_gpu

    def _ram(self) -> _Measurement:
        found = memory_capacity()
        return _Measurement(
            found.available_bytes, f"{format_bytes(found.available_bytes)} of {format_bytes(found.total_bytes)} at hand"
        )

    def _cpus(self) -> _Measurement:
        return _Measurement(float(available_cpus()), str(available_cpus()))

    def _disk(self) -> _Measurement:
        if fault := find_disk_fault(self.disk):
            return _Measurement(None, fault)
        free = disk_free_bytes(self.disk)
        return _Measurement(free, f"{format_bytes(free)} free, written and read back")

    def _python(self) -> _Measurement:
        return _measure_version(platform.python_version())

    def _download(self) -> _Measurement:
        return self._rate(lambda measured: measured.download_bits_s)

    def _upload(self) -> _Measurement:
        return self._rate(lambda measured: measured.upload_bits_s)

    def _rate(self, of: Callable[[TransferSpeed], float]) -> _Measurement:
        if isinstance(self._speed, str):
            return _Measurement(None, self._speed)
        return _Measurement(of(self._speed), f"{of(self._speed) / 1e6:,.1f} Mbps")

    @cached_property
    def _speed(self) -> TransferSpeed | str:
        try:
            return self.measure()
        except ReplicaError as error:
            return str(error)

    @cached_property
    def _gpus_seen(self) -> GpuInventory:
        return self.ask_gpus()

    @property
    def _no_gpu(self) -> _Measurement:
        return _Measurement(None, self._gpus_seen.trouble or "no GPU that may be used")


def _measure_version(text: str) -> _Measurement:
    numbers = [part for part in text.split(".") if part.isdecimal()]
    return _Measurement(tuple(map(int, numbers)), text)


def _is_sufficient(found: Amount, least: Amount) -> bool:
    """Versions as versions: 12.10 is newer than 12.6."""
    if isinstance(found, tuple) and isinstance(least, tuple):
        return found >= least
    return not isinstance(found, tuple) and not isinstance(least, tuple) and found >= least


PATIENCE_S, TIMEOUT_S = 30.0, 15.0
"""A machine whose network does not come round within that is not wanted."""


def check_machine(
    layout: ProjectLayout | None, settings: Settings, required: str | None, replica: str | None, target: Path | None
) -> MachineCheckReport:
    """Compare this machine with requirements, before it gets work. Loads no torch.

    Args:
        layout: the project, which keeps the record as experiments/admission.json; None outside one.
        settings: the project's settings, or the defaults.
        required: such as `vram=22GB,cuda=12.6,disk=50GB,download=50Mbps,upload=20Mbps`.
        replica: storage to measure the network with, in place of machine.replica.
        target: another file for the record.

    Raises:
        SettingsError: a requirement is not valid, there is no storage to measure the network with, or it refuses us.
        UnsuitableMachineError: the machine does not meet a requirement; the message has the table.
    """
    if required is None:
        raise SettingsError(f"--replica and --output need {OPTION}, such as {OPTION} disk=50GB")
    asked = parse_requirements(required)
    where = replica or settings.machine.replica
    if where is None and (network := [one.name for one in asked if one.name in ("download", "upload")]):
        raise SettingsError(
            f"{OPTION}: {' and '.join(network)}: nothing to measure against; set machine.replica, or name "
            "a place of storage with --replica URL"
        )
    inspection = MachineProbe(
        layout.runs if layout else Path.cwd(), lambda: measure_transfer_speed(_open_store(where or ""))
    )
    found = MachineCheckReport(
        machine=socket.gethostname(), at=datetime.now(UTC).isoformat(timespec="seconds"), ratchet=version(DISTRIBUTION),
        findings=(findings := inspection.findings(asked)), admitted=all(one.ok for one in findings),
    )  # fmt: skip
    problems = list(_write_records(found, [layout.admission if layout else None, target]))
    found = found.model_copy(update={"write_problems": tuple(problems)})
    if missing := [one.name for one in found.findings if not one.ok]:
        text = format_findings(found)
        raise UnsuitableMachineError(f"{found.machine} is not good enough: {', '.join(missing)}\n{text}")
    return found


def _write_records(found: MachineCheckReport, places: Iterable[Path | None]) -> Iterator[str]:
    """Write the record. A file that cannot be written is reported: the requirement `disk` decides about the disk."""
    for path in places:
        try:
            if path is not None:
                found.save(path)
        except OSError as error:
            yield f"{path}: not written ({error.strerror})"


def _open_store(url: str) -> ReplicaStore:
    return ReplicaStore(url, TransferLimits(retry_timeout_s=PATIENCE_S, timeout_s=TIMEOUT_S), lambda: False)


def format_findings(report: MachineCheckReport) -> str:
    """A table with a row for each requirement."""
    width = max(len(one.asked) for one in report.findings)
    lines = [
        f"  {one.name:<9} {one.asked:>{width}}  {'ok    ' if one.ok else 'NOT OK'}  {one.found}"
        for one in report.findings
    ]
    return "\n".join([*lines, *(f"  {problem}" for problem in report.write_problems)])


if __name__ == "__main__":
    print(json.dumps(asdict(_query_in_process())))
