"""`ratchet doctor --require`: is this machine good enough, before it gets work? For orchestrators, without torch."""

import socket
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from ratchet.config import Settings
from ratchet.errors import SettingsError, UnfitError
from ratchet.layout import Layout
from ratchet.mirror.store import Store, Terms
from ratchet.node import requirements, speed
from ratchet.node.inspection import Admission, Finding, Inspection
from ratchet.version import DISTRIBUTION

PATIENCE_S, TIMEOUT_S = 30.0, 15.0
"""A machine whose network does not come round within that is not wanted."""


def admission(
    layout: Layout | None, settings: Settings, required: str | None, mirror: str | None, target: Path | None
) -> str:
    """The verb; returns the table.

    Args:
        layout: of the project, which keeps the record as experiments/admission.json; None outside of one.
        settings: of the project, or those of a new one.
        required: such as `vram=22GB,cuda=12.6,disk=50GB,download=50Mbps,upload=20Mbps`; None is refused.
        mirror: what the network is measured against instead of machine.mirror.
        target: a file for the record, too.

    Raises:
        SettingsError: a requirement that is none, nothing to measure the network against, a mirror that nobody may use.
        UnfitError: the machine is not good enough; the table is in the message, the record is written.
    """
    if required is None:
        raise SettingsError(
            f"--mirror and --json go with {requirements.OPTION}, such as {requirements.OPTION} disk=50GB"
        )
    asked = requirements.parse(required)
    where = mirror or settings.machine.mirror
    if where is None and (network := [one.name for one in asked if one.name in ("download", "upload")]):
        raise SettingsError(
            f"{requirements.OPTION}: {' and '.join(network)}: nothing to measure against; set machine.mirror, or name "
            "a place of storage with --mirror URL"
        )
    inspection = Inspection(layout.runs if layout else Path.cwd(), lambda: speed.measure(_store(where or "")))
    found = Admission(
        machine=socket.gethostname(), at=datetime.now(UTC).isoformat(timespec="seconds"), ratchet=version(DISTRIBUTION),
        findings=(findings := inspection.findings(asked)), admitted=all(one.ok for one in findings),
    )  # fmt: skip
    text = "\n".join([_table(found.findings), *_recorded(found, [layout.admission if layout else None, target])])
    if missing := [one.name for one in found.findings if not one.ok]:
        raise UnfitError(f"{found.machine} is not good enough: {', '.join(missing)}\n{text}")
    return f"{found.machine} is admitted\n{text}"


def _recorded(found: Admission, places: Iterable[Path | None]) -> Iterator[str]:
    """Write the record; what cannot be written is told: a machine with a bad disk is refused, and not for that."""
    for path in places:
        try:
            if path is not None:
                found.save(path)
        except OSError as error:
            yield f"  {path}: not written ({error.strerror})"


def _store(url: str) -> Store:
    return Store(url, Terms(patience_s=PATIENCE_S, timeout_s=TIMEOUT_S), lambda: False)


def _table(findings: tuple[Finding, ...]) -> str:
    width = max(len(one.asked) for one in findings)
    lines = (
        f"  {one.name:<9} {one.asked:>{width}}  {'ok    ' if one.ok else 'NOT OK'}  {one.found}" for one in findings
    )
    return "\n".join(lines)
