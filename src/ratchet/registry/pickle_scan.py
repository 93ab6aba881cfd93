"""Scans model files from other sources for pickles, and for code that they would run, before any file is loaded.

A pickle is a program, and loading the pickle runs the program. Ratchet never loads a pickle: weights are safetensors,
or are converted with torch's restricted reader, which only builds tensors. This scan is a second line of defense and a
record. picklescan classifies the names of functions. This module chooses the files and parts of archives to scan, by
content as well as by name, because a hidden program is not named `model.pkl`.

A scan cannot prove that a file is harmless, because a list of dangerous functions is never complete.
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
from ratchet.storage.progress import count_bytes
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.export import BaseScan

RECORD = "scan.json"
"""Name of the file with the scan result, next to base.json."""

_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dat", ".data"}
_TORCH_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}
_PICKLE_MAGIC = tuple(bytes([0x80, protocol]) for protocol in range(6))
"""First bytes of pickles since protocol 2 (PEP 307, PEP 3154); earlier protocols have no signature."""
_ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
_NUMPY_MAGIC = b"\x93NUMPY"
_TAR_MAGIC_OFFSET, _TAR_MAGIC = 257, b"ustar"
_HEAD_BYTES = 512
_UNMARKED_BYTES = 2**20
"""Number of bytes that are scanned as a pickle in a file without a signature."""
_UNPACKED_BYTES = 256 * 2**20
"""Number of bytes that are scanned in an archive member or a decompressed file."""
_MAX_DEPTH = 4
"""Maximum depth of archives inside archives; deeper contents are reported as suspicious and not scanned."""

_WINDOW_BITS = {b"\x1f\x8b": 31, b"\x78\x01": 15, b"\x78\x5e": 15, b"\x78\x9c": 15, b"\x78\xda": 15}
"""zlib window bits by the first bytes of a compressed file: gzip (RFC 1952) or zlib (RFC 1950, which joblib writes)."""
_OTHER_COMPRESSION_MAGIC = (b"BZh", b"\xfd7zXZ\x00", b"7z\xbc\xaf\x27\x1c")
_READ_ERRORS = (
    OSError, EOFError, ValueError, LookupError, RuntimeError, AttributeError, TypeError, OverflowError, SyntaxError,
    zlib.error, tarfile.TarError, zipfile.BadZipFile, InvalidMagicError, scanner.GenOpsError,
)  # fmt: skip
"""Exceptions of readers for damaged archives and pickles."""


@dataclass
class _FileScan:
    """Findings in one file."""

    name: str
    has_pickles: bool = False
    suspicious: set[str] = field(default_factory=set)
    dangerous: set[str] = field(default_factory=set)

    def add(self, where: str, result: scanner.ScanResult, only_dangerous: bool = False) -> None:
        """Add picklescan's result for a stream; with `only_dangerous`, only functions that are certainly dangerous."""
        for function in result.globals:
            text = f"{function.module} {function.name}"
            if function.safety == scanner.SafetyLevel.Dangerous and not (only_dangerous and "unknown" in text):
                self.dangerous.add(f"{where}: {text}")
                self.has_pickles = True
            elif function.safety == scanner.SafetyLevel.Suspicious and not only_dangerous:
                self.suspicious.add(f"{where}: {text}")


def scan_directory(directory: Path, card: BaseCard | None = None) -> BaseScan:
    """Scan every file of a directory.

    Args:
        directory: directory of a base model, or of an adapter from another source.
        card: card of the base, if available; messages then name its source.

    Raises:
        BaseModelError: a file contains a pickle that would import a dangerous function.
    """
    logging.getLogger("picklescan").setLevel(logging.CRITICAL)  # it logs each finding, which the record contains
    scans = []
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    with count_bytes("base model scanned for pickles", sum(path.stat().st_size for path in paths)) as add_bytes:
        for path in paths:
            scan = _FileScan(path.relative_to(directory).as_posix())
            with path.open("rb") as stream:
                _scan_stream(scan, scan.name, stream, 0)
            scans.append(scan)
            add_bytes(path.stat().st_size)
    dangerous = [text for scan in scans for text in sorted(scan.dangerous)]
    if dangerous:
        others = f" and {len(dangerous) - 1} similar functions" if len(dangerous) > 1 else ""
        raise BaseModelError(
            f"{card.source if card else directory}: {dangerous[0]}: loading this pickle would run that function"
            f"{others}; no file was loaded. Use a safetensors version of the model, or delete the file"
        )
    return BaseScan(
        files=len(scans),
        pickles=tuple(scan.name for scan in scans if scan.has_pickles),
        suspicious=tuple(text for scan in scans for text in sorted(scan.suspicious)),
        scanner=f"picklescan {version('picklescan')}",
    )


def load_scan(base_output: Path) -> BaseScan | None:
    """Load the scan of stage base from its output directory; None if the base was not scanned."""
    path = base_output / RECORD
    return BaseScan.load(path) if path.exists() else None


def _scan_stream(scan: _FileScan, where: str, stream: IO[bytes], depth: int) -> None:
    """Scan a stream according to its content and name."""
    head = stream.read(_HEAD_BYTES)
    stream.seek(0)
    suffix = PurePosixPath(where.rpartition("!")[2]).suffix.lower()
    try:
        if head[8:9] == b"{" and suffix == ".safetensors":
            return
        if head.startswith(_ZIP_MAGIC) or (
            suffix in _PICKLE_SUFFIXES | {".zip", ".npz"} and zipfile.is_zipfile(stream)
        ):
            _scan_zip(scan, where, stream, depth)
        elif head[_TAR_MAGIC_OFFSET : _TAR_MAGIC_OFFSET + len(_TAR_MAGIC)] == _TAR_MAGIC:
            _scan_tar(scan, where, stream, depth)
        elif head.startswith(_NUMPY_MAGIC):
            stream.seek(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # for headers from Python 2
                result = scanner.scan_numpy(stream, where)
            scan.has_pickles |= bool(result.globals)
            scan.add(where, result)
        elif head.startswith(_OTHER_COMPRESSION_MAGIC):
            scan.suspicious.add(f"{where}: compressed; its content was not scanned")
        elif head[:2] in _WINDOW_BITS and (content := _decompress_head(head[:2], stream)) is not None:
            _scan_member(scan, f"{where}!unpacked", content, depth)
        elif head.startswith(_PICKLE_MAGIC) or suffix in _PICKLE_SUFFIXES:
            stream.seek(0)
            result = scanner.scan_bytes(stream, where, suffix if suffix in _TORCH_SUFFIXES else None)
            scan.has_pickles |= bool(result.globals) or head.startswith(_PICKLE_MAGIC)
            scan.add(where, result)
        else:
            _scan_unmarked(scan, where, stream)
    except _READ_ERRORS as error:
        scan.suspicious.add(f"{where}: cannot be read as the format of its first bytes ({type(error).__name__})")


def _scan_zip(scan: _FileScan, where: str, stream: IO[bytes], depth: int) -> None:
    """Scan every member of an archive, including torch's format and archives that only torch's reader opens."""
    stream.seek(0)
    with RelaxedZipFile(stream, "r") as archive:
        for name in archive.namelist():
            if name.endswith("/"):
                continue
            try:
                with archive.open(name) as member:
                    head = member.read(_HEAD_BYTES)
                    content = head + member.read(_UNMARKED_BYTES if _is_unmarked(head, name) else _UNPACKED_BYTES)
            except _READ_ERRORS as error:
                scan.suspicious.add(f"{where}!{name}: cannot be read ({type(error).__name__})")
                continue
            _scan_member(scan, f"{where}!{name}", content, depth)


def _is_unmarked(head: bytes, name: str) -> bool:
    """Return whether an archive member has no signature of a pickle or an archive, like the values of a tensor."""
    signatures = (*_ZIP_MAGIC, *_PICKLE_MAGIC, *_WINDOW_BITS, _NUMPY_MAGIC)
    return not head.startswith(signatures) and PurePosixPath(name).suffix.lower() not in _PICKLE_SUFFIXES


def _scan_tar(scan: _FileScan, where: str, stream: IO[bytes], depth: int) -> None:
    stream.seek(0)
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is not None:
                _scan_member(scan, f"{where}!{member.name}", content.read(_UNPACKED_BYTES), depth)


def _decompress_head(magic: bytes, stream: IO[bytes]) -> bytes | None:
    """Decompress the beginning of a stream; None if the stream is not compressed despite its first bytes."""
    stream.seek(0)
    try:
        return zlib.decompressobj(_WINDOW_BITS[magic]).decompress(stream.read(_UNPACKED_BYTES), _UNPACKED_BYTES)
    except zlib.error:
        stream.seek(0)
        return None


def _scan_member(scan: _FileScan, where: str, content: bytes, depth: int) -> None:
    """Scan the content of an archive member or of a compressed file."""
    if len(content) >= _UNPACKED_BYTES:
        scan.suspicious.add(f"{where}: only the first {_UNPACKED_BYTES:,} bytes were scanned")
    if depth == _MAX_DEPTH:
        scan.suspicious.add(f"{where}: nested too deeply in archives; its content was not scanned")
        return
    _scan_stream(scan, where, io.BytesIO(content), depth + 1)


def _scan_unmarked(scan: _FileScan, where: str, stream: IO[bytes]) -> None:
    """Scan a file without a signature as a pickle of an early protocol.

    For most files, this fails at once. But a text may begin like a pickle, so only functions that are certainly
    dangerous are added.
    """
    stream.seek(0)
    head = io.BytesIO(stream.read(_UNMARKED_BYTES))
    try:
        scan.add(where, scanner.scan_pickle_bytes(head, where, multiple_pickles=False), only_dangerous=True)
    except _READ_ERRORS:
        return  # not a pickle
