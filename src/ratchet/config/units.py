"""Amounts of memory for people, and back: GiB and MiB, powers of 1,024, as GPUs and `free -h` give them."""

import re

from ratchet.errors import SettingsError

KIB, MIB, GIB = 2**10, 2**20, 2**30

_UNITS = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 2**40,
}  # fmt: skip


def choose_unit(most: int) -> tuple[int, str]:
    """The unit in which a table whose largest amount is `most` is written: its bytes and its name."""
    return (GIB, "GiB") if most >= GIB else (MIB, "MiB")


def format_bytes(count: float) -> str:
    """`1.23 GiB`, `512.0 MiB`, `3.0 KiB`, `12 bytes`."""
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if abs(count) >= unit:
            return f"{count / unit:,.{digits}f} {name}"
    return f"{count:.0f} bytes"


def parse_bytes(text: str, where: str) -> int:
    """An amount of memory as it is written: `24GiB`, `24 GB` (powers of 1,000), `24564MiB`.

    Args:
        text: number and unit.
        where: the option or key, for the message.

    Raises:
        SettingsError: it is none, or not even one byte.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE | re.ASCII)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        hint = f" ({found[1]}GiB?)" if found else f" ({text.strip()}GiB?)" if text.strip().isdecimal() else ""
        raise SettingsError(f"{where}: {text!r} is no amount of memory{hint}; write 24GiB, 24GB or 24564MiB")
    count = int(float(found[1]) * unit)
    if count < 1:
        raise SettingsError(f"{where}: {text!r} is nothing; write what the device has, such as 24GiB")
    return count
