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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from ratchet.config.extras import DISTRIBUTION
from ratchet.config.settings import Settings
from ratchet.config.units import format_bytes, parse_bytes, utc_timestamp
from ratchet.errors import ReplicaError, SettingsError, UnsuitableMachineError, first_line
from ratchet.models.memory import capacity
from ratchet.runs.gpus import GpuInventory, query_gpus
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

Amount = tuple[float, ...]
"""A number of bytes, a number of bits per second, or a count; for a version, its numbers: 12.10 is newer than 12.6."""
Measurement = tuple[Amount | None, str]
"""A measured amount and its text. The amount is None if the machine has nothing of this kind or the measurement
failed."""


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
    limits = TransferLimits(retry_timeout_s=RETRY_TIMEOUT_S, timeout_s=REQUEST_TIMEOUT_S)
    findings = check_requirements(
        requirements,
        layout.runs if layout else Path.cwd(),
        lambda: measure_transfer_speed(ReplicaStore(url or "", limits, lambda: False)),
    )
    report = MachineCheckReport(
        machine=socket.gethostname(), at=utc_timestamp(), ratchet=version(DISTRIBUTION),
        findings=findings, admitted=all(finding.ok for finding in findings),
    )  # fmt: skip
    problems = []
    for path in (layout.admission if layout else None, target):
        try:
            if path is not None:
                report.save(path)
        except OSError as error:  # no reason to refuse the machine: the requirement `disk` tests the disk
            problems.append(f"{path}: not written ({error.strerror})")
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
    return (parse_bytes(text, where),)


def _parse_rate(text: str, where: str) -> Amount:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bps)", text.strip(), re.IGNORECASE | re.ASCII)
    if match is None or not (rate := float(match[1]) * _RATES[match[2].lower()]):
        raise SettingsError(f"{where}: found {text!r}; expected bits per second, such as 800kbps, 50Mbps or 1Gbps")
    return (rate,)


def _parse_count(text: str, where: str) -> Amount:
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or not int(text):
        raise SettingsError(f"{where}: found {text!r}; expected a whole number, 1 or more")
    return (int(text),)


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
        path = Path(folder) / "content"
        for size in SIZES:
            content = os.urandom(size)
            path.write_bytes(content)
            name = f"speed/{socket.gethostname()[:32].lower()}-{secrets.token_hex(8)}"
            try:
                began_s = time.perf_counter()
                store.send(name, path, (digests.hash_bytes(content), size))
                sent_s = time.perf_counter()
                received = sum(len(block) for block in store.blocks(name))
                upload_s, download_s = sent_s - began_s, time.perf_counter() - sent_s
            finally:
                store.remove([name])
            upload, download = 8 * size / upload_s, 8 * received / download_s
            if min(upload_s, download_s) >= MIN_TRANSFER_S or max(upload_s, download_s) >= 8 * MIN_TRANSFER_S:
                break
    return TransferSpeed(upload, download)


def check_requirements(
    requirements: Sequence[MachineRequirement],
    disk: Path,
    measure_network: Callable[[], TransferSpeed],
    list_gpus: Callable[[], GpuInventory] = query_gpus,
) -> tuple[RequirementResult, ...]:
    """Check every requirement, also after one that is not met. GPUs, disk and network are tested only if required.

    Args:
        requirements: parsed requirements.
        disk: directory for runs.
        measure_network: measures the network; may raise ReplicaError, and then the network does not count.
        list_gpus: lists the GPUs.

    Raises:
        SettingsError: the replica's settings are wrong, which is not a fault of this machine.
    """
    required = {one.name: one for one in requirements}
    host = capacity.measure_host()
    ram = f"{format_bytes(host.available_bytes)} of {format_bytes(host.total_bytes)} available"
    measured: dict[str, Measurement] = {
        "ram": ((host.available_bytes,), ram),
        "cpus": _parse_measured_version(str(available_cpus())),
        "python": _parse_measured_version(platform.python_version()),
    }
    if required.keys() & {"vram", "gpus", "cuda", "driver"}:
        measured |= _measure_gpus(list_gpus(), int(required["gpus"].minimum[0]) if "gpus" in required else 1)
    if "disk" in required:
        fault, free = find_disk_fault(disk), capacity.disk_free_bytes(disk)
        measured["disk"] = (None, fault) if fault else ((free,), f"{format_bytes(free)} free, written and read back")
    if required.keys() & {"download", "upload"}:
        try:
            speed = measure_network()
        except ReplicaError as error:
            measured |= dict.fromkeys(("download", "upload"), (None, str(error)))
        else:
            for name, rate in (("download", speed.download_bits_s), ("upload", speed.upload_bits_s)):
                measured[name] = (rate,), f"{rate / 1e6:,.1f} Mbps"
    results = []
    for one in requirements:
        amount, text = measured[one.name]
        ok = amount is not None and amount >= one.minimum
        results.append(RequirementResult(name=one.name, asked=one.asked, found=text, ok=ok))
    return tuple(results)


def _measure_gpus(inventory: GpuInventory, required_count: int) -> dict[str, Measurement]:
    missing: Measurement = None, inventory.problem or "no usable GPU"
    measured = {
        "cuda": _parse_measured_version(inventory.cuda) if inventory.cuda else missing,
        "driver": _parse_measured_version(inventory.driver) if inventory.driver else missing,
    }
    working = [device for device in inventory.devices if device.free_bytes is not None]  # a lost GPU has no value
    if not working:
        return measured | {"gpus": missing, "vram": missing}
    names = ", ".join(sorted({device.name or "?" for device in working}))
    # The least free memory among the required number of GPUs, those with the most free memory.
    by_free_memory = sorted(working, key=lambda device: device.free_bytes or 0, reverse=True)
    least_free = by_free_memory[min(len(working), required_count) - 1]
    free, total = least_free.free_bytes or 0, least_free.total_bytes or 0
    return measured | {
        "gpus": ((len(working),), f"{len(working)} ({names})"),
        "vram": ((free,), f"{format_bytes(free)} of {format_bytes(total)} free, {least_free.name}"),
    }


def _parse_measured_version(text: str) -> Measurement:
    return tuple(int(part) for part in text.split(".") if part.isdecimal()), text
