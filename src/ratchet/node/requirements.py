"""What a machine is asked for before it gets work: `vram=22GB,cuda=12.6,disk=50GB,download=50Mbps`."""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass

from ratchet.errors import SettingsError
from ratchet.sizes import bytes_from

OPTION = "--require"

_RATES = {"bps": 1, "kbps": 10**3, "mbps": 10**6, "gbps": 10**9}
"""Bits in a second."""

Amount = float | tuple[int, ...]
"""Bytes, bits in a second or a number; a version as its numbers."""


@dataclass(frozen=True)
class Requirement:
    """One thing that must be there."""

    name: str
    asked: str
    """As it was written."""
    least: Amount


def _size(text: str, where: str) -> Amount:
    return bytes_from(text, where)


def _rate(text: str, where: str) -> Amount:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bps)", text.strip(), re.IGNORECASE | re.ASCII)
    if found is None or not (rate := float(found[1]) * _RATES[found[2].lower()]):
        raise SettingsError(f"{where}: {text!r} is no rate; write 50Mbps (bits in a second), 800kbps or 1Gbps")
    return rate


def _count(text: str, where: str) -> Amount:
    if not re.fullmatch(r"\d{1,6}", text, re.ASCII) or not int(text):
        raise SettingsError(f"{where}: {text!r} is no number of them; write a whole number, 1 or more")
    return float(text)


def _version(text: str, where: str) -> Amount:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6}){0,3}", text, re.ASCII):
        raise SettingsError(f"{where}: {text!r} is no version; write numbers with dots, such as 12.6")
    return tuple(map(int, text.split(".")))


KINDS: dict[str, Callable[[str, str], Amount]] = {
    "vram": _size, "gpus": _count, "cuda": _version, "driver": _version, "ram": _size, "cpus": _count, "disk": _size,
    "python": _version, "download": _rate, "upload": _rate,
}  # fmt: skip
"""Everything that can be asked for, in the order in which it is looked at: what takes long comes last."""


def parse(text: str) -> tuple[Requirement, ...]:
    """What `--require` says, in the order of KINDS.

    Raises:
        SettingsError: a name that is none, given twice or without value, or a value that is none.
    """
    found: dict[str, Requirement] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if name not in KINDS:
            near = difflib.get_close_matches(name.lower(), KINDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingsError(f"{OPTION}: {part.strip()!r}: no such requirement{hint} There are: {', '.join(KINDS)}")
        if not sign or not value:
            raise SettingsError(f"{OPTION}: {name}: how much of it? Write {name}=..., such as vram=22GB,cuda=12.6")
        if name in found:
            raise SettingsError(f"{OPTION}: {name} is there twice; once is enough")
        found[name] = Requirement(name, value, KINDS[name](value, f"{OPTION} {name}"))
    return tuple(found[name] for name in KINDS if name in found)
