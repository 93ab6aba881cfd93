"""Look through files that come from elsewhere for pickles, and for what those would run, before any is opened.

A pickle is a program: opening one as such runs it. Ratchet never does (weights are safetensors, or are converted by
torch's reader that builds tensors and runs nothing); this is the second wall, and the record of what lay there.
picklescan judges the names of functions; which files, and which parts of archives, are looked at is decided here, by
content as well as by name: whoever hides a program does not call it `model.pkl`.

What it cannot show: that a file is harmless. A list of dangerous functions is never complete.
"""

import io
import logging
import tarfile
import warnings
import zipfile
import zlib
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import IO

from picklescan import scanner
from picklescan.relaxed_zipfile import RelaxedZipFile
from picklescan.torch import InvalidMagicError

from ratchet.errors import BaseModelError
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.export import BaseScan

RECORD = "scan.json"
"""Beside base.json: what was found when the base came in."""

_BY_NAME = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dat", ".data"}
_TORCH = {".bin", ".pt", ".pth", ".ckpt"}
_PICKLE = tuple(bytes([0x80, protocol]) for protocol in range(6))
"""How pickles of protocol 2 and later begin (PEP 307, PEP 3154); earlier ones have no sign of their own."""
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_NUMPY = b"\x93NUMPY"
_TAR_AT, _TAR = 257, b"ustar"
_HEAD_BYTES = 512
_TRIED_BYTES = 2**20
"""Of a file that has no sign of a pickle: so much is tried as one."""
_UNPACKED_BYTES = 256 * 2**20
"""Of a part of an archive, or of a compressed file: so much is looked at."""
_DEEPEST = 4
"""Archives in archives."""

_WINDOW_BITS = {b"\x1f\x8b": 31, b"\x78\x01": 15, b"\x78\x5e": 15, b"\x78\x9c": 15, b"\x78\xda": 15}
"""zlib's setting for what a compressed file begins with: gzip (RFC 1952), zlib (RFC 1950; joblib writes it)."""
_OTHER_PACKERS = (b"BZh", b"\xfd7zXZ\x00", b"7z\xbc\xaf\x27\x1c")
_UNREADABLE = (
    OSError, EOFError, ValueError, LookupError, RuntimeError, AttributeError, TypeError, OverflowError, SyntaxError,
    zlib.error, tarfile.TarError, zipfile.BadZipFile, InvalidMagicError, scanner.GenOpsError,
)  # fmt: skip
"""What the readers of damaged archives and pickles raise."""


@dataclass
class _FileScan:
    """What was seen of one file so far."""

    name: str
    pickles: bool = False
    suspicious: set[str] = field(default_factory=set)
    dangerous: set[str] = field(default_factory=set)

    def take(self, where: str, result: scanner.ScanResult, only_danger: bool = False) -> None:
        """Take over what picklescan says of a stream; with `only_danger`, what it surely says alone."""
        for one in result.globals:
            text = f"{one.module} {one.name}"
            if one.safety == scanner.SafetyLevel.Dangerous and not (only_danger and "unknown" in text):
                self.dangerous.add(f"{where}: {text}")
                self.pickles = True
            elif one.safety == scanner.SafetyLevel.Suspicious and not only_danger:
                self.suspicious.add(f"{where}: {text}")


def scan_directory(directory: Path, card: BaseCard | None = None) -> BaseScan:
    """Look through every file of a directory.

    Args:
        directory: of a base model, or of an adapter that somebody else trained.
        card: the base's, where there is one already; it names the source in messages.

    Raises:
        BaseModelError: a file holds a pickle that would import something dangerous.
    """
    logging.getLogger("picklescan").setLevel(logging.CRITICAL)  # it prints what is said here, file by file
    found = [_scan_file(path, directory) for path in sorted(directory.rglob("*")) if path.is_file()]
    bad = [text for one in found for text in sorted(one.dangerous)]
    if bad:
        more = f", and {len(bad) - 1} more of the kind" if len(bad) > 1 else ""
        raise BaseModelError(
            f"{card.source if card else directory}: {bad[0]}: opening this file as a pickle would run that{more}; "
            "nothing was opened. Take the model from where it is published as safetensors, or remove the file"
        )
    return BaseScan(
        files=len(found),
        pickles=tuple(one.name for one in found if one.pickles),
        suspicious=tuple(text for one in found for text in sorted(one.suspicious)),
        scanner=f"picklescan {version('picklescan')}",
    )


def load_scan(layout_base: Path) -> BaseScan | None:
    """What stage base found, by its output directory; None where nothing came in, or an earlier version wrote it."""
    path = layout_base / RECORD
    return BaseScan.load(path) if path.exists() else None


def _scan_file(path: Path, directory: Path) -> _FileScan:
    found = _FileScan(path.relative_to(directory).as_posix())
    with path.open("rb") as stream:
        _scan_stream(found, found.name, stream, 0)
    return found


def _scan_stream(found: _FileScan, where: str, stream: IO[bytes], depth: int) -> None:
    """Look at one stream, by its content and its name."""
    head = stream.read(_HEAD_BYTES)
    stream.seek(0)
    suffix = PurePosixPath(where.rpartition("!")[2]).suffix.lower()
    try:
        if head[8:9] == b"{" and suffix == ".safetensors":
            return
        if head.startswith(_ZIP) or (suffix in _BY_NAME | {".zip", ".npz"} and zipfile.is_zipfile(stream)):
            _scan_zip(found, where, stream, depth)
        elif head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR:
            _scan_tar(found, where, stream, depth)
        elif head.startswith(_NUMPY):
            _scan_array(found, where, stream)
        elif head.startswith(_OTHER_PACKERS):
            found.suspicious.add(f"{where}: compressed, and not looked into")
        elif head[:2] in _WINDOW_BITS and (content := _decompress_head(head[:2], stream)) is not None:
            _scan_part(found, f"{where}!unpacked", content, depth)
        elif head.startswith(_PICKLE) or suffix in _BY_NAME:
            _scan_pickle(found, where, stream, suffix)
        else:
            _scan_unmarked(found, where, stream)
    except _UNREADABLE as error:
        found.suspicious.add(f"{where}: cannot be read as what it begins like ({type(error).__name__})")


def _scan_pickle(found: _FileScan, where: str, stream: IO[bytes], suffix: str) -> None:
    stream.seek(0)
    result = scanner.scan_bytes(stream, where, suffix if suffix in _TORCH else None)
    stream.seek(0)
    found.pickles |= bool(result.globals) or stream.read(2).startswith(_PICKLE)
    found.take(where, result)


def _scan_array(found: _FileScan, where: str, stream: IO[bytes]) -> None:
    stream.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers that Python 2 wrote
        result = scanner.scan_numpy(stream, where)
    found.pickles |= bool(result.globals)
    found.take(where, result)


def _scan_zip(found: _FileScan, where: str, stream: IO[bytes], depth: int) -> None:
    """Every file of an archive, torch's own format included; also of archives that only torch's reader would open."""
    stream.seek(0)
    with RelaxedZipFile(stream, "r") as archive:
        for name in archive.namelist():
            if name.endswith("/"):
                continue
            try:
                with archive.open(name) as member:
                    head = member.read(_HEAD_BYTES)
                    content = head + member.read(_TRIED_BYTES if _is_plain(head, name) else _UNPACKED_BYTES)
            except _UNREADABLE as error:
                found.suspicious.add(f"{where}!{name}: cannot be read ({type(error).__name__})")
                continue
            _scan_part(found, f"{where}!{name}", content, depth)


def _is_plain(head: bytes, name: str) -> bool:
    """Whether a part of an archive has no sign of a pickle or an archive: such as the numbers of a tensor."""
    signs = (*_ZIP, *_PICKLE, *_WINDOW_BITS, _NUMPY)
    return not head.startswith(signs) and PurePosixPath(name).suffix.lower() not in _BY_NAME


def _scan_tar(found: _FileScan, where: str, stream: IO[bytes], depth: int) -> None:
    stream.seek(0)
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                _scan_part(found, f"{where}!{member.name}", content.read(_UNPACKED_BYTES), depth)


def _decompress_head(sign: bytes, stream: IO[bytes]) -> bytes | None:
    """The beginning of a compressed stream; None when it only begins like one."""
    stream.seek(0)
    try:
        return zlib.decompressobj(_WINDOW_BITS[sign]).decompress(stream.read(_UNPACKED_BYTES), _UNPACKED_BYTES)
    except zlib.error:
        stream.seek(0)
        return None


def _scan_part(found: _FileScan, where: str, content: bytes, depth: int) -> None:
    """Look at what was inside something else."""
    if len(content) >= _UNPACKED_BYTES:
        found.suspicious.add(f"{where}: longer than the {_UNPACKED_BYTES:,} bytes that were looked at")
    if depth == _DEEPEST:
        found.suspicious.add(f"{where}: archives in archives, and not looked into")
        return
    _scan_stream(found, where, io.BytesIO(content), depth + 1)


def _scan_unmarked(found: _FileScan, where: str, stream: IO[bytes]) -> None:
    """A file without any sign: early protocols have none. Only what is surely dangerous counts; most files fail at once
    as pickles, and a text may begin like one."""
    stream.seek(0)
    start = io.BytesIO(stream.read(_TRIED_BYTES))
    try:
        found.take(where, scanner.scan_pickle_bytes(start, where, multiple_pickles=False), only_danger=True)
    except _UNREADABLE:
        return  # no pickle, as expected
