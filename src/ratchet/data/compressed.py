"""The bytes of a data file: decompressed, and of the kind that its name says.

Compressed data that ends early or does not match its checksum is a DataError: a part is never taken for the whole.
"""

import bz2
import codecs
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from ratchet.errors import DataError

COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
"""Endings of compressed files, and what they hold."""

BLOCK_BYTES = 2**20
"""Bytes read at a time."""

_HEAD_BYTES = 512
_DAMAGED = (zlib.error, lzma.LZMAError, gzip.BadGzipFile)

# First bytes of what is often found under another name. `BZh` and `PAR1` alone could begin a text.
_KINDS = [
    (re.compile(pattern, re.DOTALL | re.IGNORECASE), kind)
    for pattern, kind in (
        (rb"\x1f\x8b", "gzip"),
        (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "bzip2"),
        (rb"\xfd7zXZ\x00", "xz"),
        (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "Zstandard"),
        (rb"PAR1[\x00-\x1f]", "Parquet"),
        (rb"PK(\x03\x04|\x05\x06)", "zip (or Excel)"),
        (rb"7z\xbc\xaf\x27\x1c", "7z"),
        (rb".{257}ustar", "tar"),
        (rb"%PDF-", "PDF"),
        (rb"ARROW1\x00\x00", "Arrow"),
        (rb"SQLite format 3\x00", "SQLite"),
        (rb"\s*<(!doctype html|html|\?xml)", "HTML or XML"),
        (rb"version https://git-lfs", "Git LFS pointer"),
    )
]
_BOMS = {codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32", codecs.BOM_UTF16_LE: "UTF-16",
         codecs.BOM_UTF16_BE: "UTF-16"}  # fmt: skip


def endings(name: str) -> tuple[str, str]:
    """Ending of the format and of the compression, in small letters; "" where there is none."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    return suffixes[-1] if suffixes else "", packed


@contextmanager
def opened(path: Path, name: str) -> Iterator[io.BufferedReader]:
    """The file's decompressed bytes, behind a byte order mark; what goes wrong while they are read is a DataError.

    `name` is what the file is called in messages; its ending says what the file should be.
    """
    packed = endings(name)[1]
    try:
        with ExitStack() as streams:
            yield _checked(_unpacked(path, name, streams), name)
    except UnicodeDecodeError:
        line, byte = _undecodable(path, name)
        text = "decompressed text" if packed else "file"
        raise DataError(f"{name}:{line}: not UTF-8 (byte {byte} of the {text}); convert it, e.g. with iconv") from None
    except EOFError:
        raise DataError(f"{name}: {COMPRESSIONS[packed]} data that ends early; copy or download it again") from None
    except (OSError, *_DAMAGED) as error:
        if packed and not getattr(error, "errno", None):
            raise DataError(
                f"{name}: damaged {COMPRESSIONS[packed]} data ({error}); copy or download it again"
            ) from None
        raise DataError(f"{name}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _unpacked(path: Path, name: str, streams: ExitStack) -> io.BufferedReader:
    """The file's bytes, decompressed; `streams` closes them."""
    stream: io.BufferedReader = streams.enter_context(io.BufferedReader(io.FileIO(path), BLOCK_BYTES))
    if not (packed := endings(name)[1]):
        return stream
    if _kind(stream) != COMPRESSIONS[packed]:
        raise DataError(f"{name}: is no {COMPRESSIONS[packed]} file{_instead(stream, name)}")
    return streams.enter_context(io.BufferedReader(_OPENERS[packed](stream), BLOCK_BYTES))


def _checked(stream: io.BufferedReader, name: str) -> io.BufferedReader:
    """The stream behind a byte order mark, unless it begins as its name does not say."""
    kind = endings(name)[0]
    if _kind(stream) != ("Parquet" if kind == ".parquet" else ""):
        expected = {".csv": "CSV", ".tsv": "TSV", ".parquet": "Parquet"}.get(kind, "JSON")
        raise DataError(f"{name}: is no {expected} file{_instead(stream, name)}")
    head = _head(stream)
    for mark, encoding in _BOMS.items():
        if head.startswith(mark):
            raise DataError(f"{name}:1: {encoding}, not UTF-8 (byte order mark at byte 0); convert it with iconv")
    if b"\0" in head[:2]:  # every table and JSON text begins with two characters of ASCII, at least nearly so
        found = "UTF-16 or UTF-32, not UTF-8; convert it with iconv" if head.strip(b"\0") else "no text; copy it again"
        raise DataError(f"{name}:1: begins with NUL bytes: {found}")
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    return stream


def _zstandard(stream: IO[bytes]) -> Any:
    # pyarrow's reader tells a file that was cut short; that of the package `zstandard` (0.25) just ends.
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd")


_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=stream, mode="rb"),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _zstandard,
}


def _head(stream: io.BufferedReader) -> bytes:
    return stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]


def _kind(stream: io.BufferedReader) -> str:
    """What the first bytes say that the file is; "" for text and anything unknown."""
    head = _head(stream)
    return next((kind for pattern, kind in _KINDS if pattern.match(head)), "")


def _instead(stream: io.BufferedReader, name: str) -> str:
    """The end of a sentence: what a file is that its name does not say, and what to do about it."""
    kind, head = _kind(stream), _head(stream)
    if not head:
        return ": it is empty; copy or download it again"
    stem = name.rsplit("/", 1)[-1]
    stem = stem.rsplit(".", 1)[0] if endings(name)[1] else stem
    suffixes = {packed: suffix for suffix, packed in COMPRESSIONS.items()} | {"Parquet": ".parquet"}
    if kind == "Git LFS pointer":
        what = " but a Git LFS pointer; fetch the file itself with git lfs pull"
    elif kind in suffixes and suffixes[kind] == endings(name)[1]:
        what = f" but {kind} once more; unpack it"
    elif kind in suffixes:
        what = f" but {kind}; name it {stem.rsplit('.', 1)[0] if kind == 'Parquet' else stem}{suffixes[kind]}"
    elif kind:
        what = f" but {kind}; unpack or convert it, or download it again"
    else:
        what = f": it begins with {head[:16]!r}; name it after what it holds, or download it again"
    return what


def _undecodable(path: Path, name: str) -> tuple[int, int]:
    """Line and byte offset of what is not UTF-8 (what the decoder said counts from the block it had read)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, line = 0, 1
    with ExitStack() as streams:
        stream = _unpacked(path, name, streams)
        while True:
            block = stream.read(BLOCK_BYTES)
            pending = decoder.getstate()[0]
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return line + (pending + block).count(b"\n", 0, error.start), offset - len(pending) + error.start
            if not block:
                return line, offset
            offset, line = offset + len(block), line + block.count(b"\n")
