"""Counts, times, sizes and exit codes as text.

GiB and MiB are powers of 1,024 (as `free -h` shows them), GB and MB powers of 1,000.
"""

import re
import signal
from datetime import UTC, datetime

from ratchet.errors import SettingsError

KIB, MIB, GIB = 2**10, 2**20, 2**30

_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
}  # fmt: skip


def choose_unit(largest_bytes: int) -> tuple[int, str]:
    """Return the unit for a table whose largest size is `largest_bytes`: its size in bytes, and its name."""
    return (GIB, "GiB") if largest_bytes >= GIB else (MIB, "MiB")


def format_count(number: int, noun: str) -> str:
    """Format a number with a noun: `1 row`, `2,000 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def format_bytes(count: float) -> str:
    """Format a size: `1.23 GiB`, `512.0 MiB`, `3.0 KiB`, `12 bytes`."""
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if abs(count) >= unit:
            return f"{count / unit:,.{digits}f} {name}"
    return f"{count:.0f} bytes"


def format_duration(seconds: float) -> str:
    """Format seconds: `3.2 s`, `42 s`, `4 min 10 s`, `3 h 12 min`, `2 d 5 h`."""
    total = round(seconds)
    if total < 10:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    for size, name, smaller, unit in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if total >= size:
            rest = total % size // smaller
            return f"{total // size:,} {name}" + (f" {rest} {unit}" if rest else "")
    return f"{total} s"


def format_exit_code(code: int) -> str:
    """Format an exit code as subprocess returns it: `exit code 1`, `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"  # real-time signals have no names


def describe_failure(errors: str, code: int) -> str:
    """Return the last line that a process wrote on standard error; its exit code if it wrote none."""
    return (errors.strip().splitlines() or [format_exit_code(code)])[-1]


def utc_timestamp() -> str:
    """Return the current time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def parse_bytes(text: str, where: str) -> int:
    """Parse a size such as `24GiB`, `24 GB` or `24564MiB`.

    Args:
        text: a number and a unit.
        where: the option or setting that holds the text, for messages.

    Raises:
        SettingsError: the text is not a size, or is less than one byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE | re.ASCII)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        number = match[1] if match else text.strip() if text.strip().isdecimal() else None
        hint = f" (did you mean {number}GiB?)" if number else ""
        raise SettingsError(f"{where}: found {text!r}; expected a size such as 24GiB, 24GB or 24564MiB{hint}")
    count = int(float(match[1]) * unit)
    if count < 1:
        raise SettingsError(f"{where}: found {text!r}; expected at least one byte, such as 24GiB")
    return count
