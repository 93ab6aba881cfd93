"""The bytes of a data file: decompressed, and of the kind that its name says.

Compressed data that ends early or does not match its checksum is a DataError: a part is never taken for the whole.
"""

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from ratchet.data.conversation import MalformedRecord
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


def split_endings(name: str) -> tuple[str, str]:
    """Ending of the format and of the compression, in small letters; "" where there is none."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    packed = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    return suffixes[-1] if suffixes else "", packed


@contextmanager
def open_decompressed(path: Path, name: str) -> Iterator[io.BufferedReader]:
    """The file's decompressed bytes, behind a byte order mark; what goes wrong while they are read is a DataError.

    `name` is what the file is called in messages; its ending says what the file should be.
    """
    packed = split_endings(name)[1]
    try:
        with ExitStack() as streams:
            yield _check_content(_open_unpacked(path, name, streams), name)
    except UnicodeDecodeError:
        line, byte = _locate_invalid_utf8(path, name)
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


def _open_unpacked(path: Path, name: str, streams: ExitStack) -> io.BufferedReader:
    """The file's bytes, decompressed; `streams` closes them."""
    stream: io.BufferedReader = streams.enter_context(io.BufferedReader(io.FileIO(path), BLOCK_BYTES))
    if not (packed := split_endings(name)[1]):
        return stream
    if _detect_kind(stream) != COMPRESSIONS[packed]:
        raise DataError(f"{name}: is no {COMPRESSIONS[packed]} file{_describe_actual_kind(stream, name)}")
    return streams.enter_context(io.BufferedReader(_OPENERS[packed](stream), BLOCK_BYTES))


def _check_content(stream: io.BufferedReader, name: str) -> io.BufferedReader:
    """The stream behind a byte order mark, unless it begins as its name does not say."""
    kind = split_endings(name)[0]
    if _detect_kind(stream) != ("Parquet" if kind == ".parquet" else ""):
        expected = {".csv": "CSV", ".tsv": "TSV", ".parquet": "Parquet"}.get(kind, "JSON")
        raise DataError(f"{name}: is no {expected} file{_describe_actual_kind(stream, name)}")
    head = _peek_head(stream)
    for mark, encoding in _BOMS.items():
        if head.startswith(mark):
            raise DataError(f"{name}:1: {encoding}, not UTF-8 (byte order mark at byte 0); convert it with iconv")
    if b"\0" in head[:2]:  # every table and JSON text begins with two characters of ASCII, at least nearly so
        found = "UTF-16 or UTF-32, not UTF-8; convert it with iconv" if head.strip(b"\0") else "no text; copy it again"
        raise DataError(f"{name}:1: begins with NUL bytes: {found}")
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    return stream


def _open_zstandard(stream: IO[bytes]) -> Any:
    # pyarrow's reader tells a file that was cut short; that of the package `zstandard` (0.25) just ends.
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(stream, mode="r"), "zstd")


_OPENERS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda stream: gzip.GzipFile(fileobj=stream, mode="rb"),
    ".bz2": bz2.BZ2File,
    ".xz": lzma.LZMAFile,
    ".zst": _open_zstandard,
}


def _peek_head(stream: io.BufferedReader) -> bytes:
    return stream.peek(_HEAD_BYTES)[:_HEAD_BYTES]


def _detect_kind(stream: io.BufferedReader) -> str:
    """What the first bytes say that the file is; "" for text and anything unknown."""
    head = _peek_head(stream)
    return next((kind for pattern, kind in _KINDS if pattern.match(head)), "")


def _describe_actual_kind(stream: io.BufferedReader, name: str) -> str:
    """The end of a sentence: what a file is that its name does not say, and what to do about it."""
    kind, head = _detect_kind(stream), _peek_head(stream)
    if not head:
        return ": it is empty; copy or download it again"
    stem = name.rsplit("/", 1)[-1]
    stem = stem.rsplit(".", 1)[0] if split_endings(name)[1] else stem
    suffixes = {packed: suffix for suffix, packed in COMPRESSIONS.items()} | {"Parquet": ".parquet"}
    if kind == "Git LFS pointer":
        what = " but a Git LFS pointer; fetch the file itself with git lfs pull"
    elif kind in suffixes and suffixes[kind] == split_endings(name)[1]:
        what = f" but {kind} once more; unpack it"
    elif kind in suffixes:
        what = f" but {kind}; name it {stem.rsplit('.', 1)[0] if kind == 'Parquet' else stem}{suffixes[kind]}"
    elif kind:
        what = f" but {kind}; unpack or convert it, or download it again"
    else:
        what = f": it begins with {head[:16]!r}; name it after what it holds, or download it again"
    return what


def _locate_invalid_utf8(path: Path, name: str) -> tuple[int, int]:
    """Line and byte offset of what is not UTF-8 (what the decoder said counts from the block it had read)."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, line = 0, 1
    with ExitStack() as streams:
        stream = _open_unpacked(path, name, streams)
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


# Records out of files: JSON, JSONL, CSV, TSV and Parquet, plain or compressed, each with the place where it stands.
#
# Everything streams: memory is bounded by the largest record, which may have `MAX_RECORD_BYTES`. A record that cannot
# be
# read is a `Fault`, and reading goes on behind it. A file that is not what its name says, or that is damaged where
# nobody
# can tell where the next record begins, is a DataError.

Fields = dict[str, Any]
Record = tuple[str, Fields] | MalformedRecord
"""Place and fields of one record, or what is wrong with it."""

MAX_RECORD_BYTES = 16 * 2**20
"""Longest record; what is longer is a file with a quote or a bracket too many rather than an example."""

_LARGEST = f"{MAX_RECORD_BYTES // 2**20} MiB"
_BATCH_ROWS = 1024
_SPACE = re.compile(r"[ \t\n\r]*")


def check_ending(name: str) -> None:
    """Refuse a file whose name does not end as one that can be read.

    Raises:
        DataError: it does not; the message names the endings that are known.
    """
    if split_endings(name)[0] not in _FORMATS:
        shown = "".join(split_endings(name)) or "a file without ending"
        known = f"{', '.join(_FORMATS)}, each also with {', '.join(COMPRESSIONS)}"
        raise DataError(f"{name}: cannot read {shown}; known: {known}")


def read_records(path: Path, name: str) -> Iterator[Record]:
    """Every record of one file; `name` is what it is called in places and messages, and says what it holds.

    Raises:
        DataError: the file cannot be read as a whole; the message says where and what to do.
    """
    check_ending(name)
    with open_decompressed(path, name) as stream:
        yield from _FORMATS[split_endings(name)[0]](stream, name)


# ---------------------------------------------------------------------------------------------------------------- JSON


def type_name(value: Any) -> str:
    """What a value is called where people read it."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", int: "a number"}
    return names.get(type(value)) or ("a number" if isinstance(value, float) else type(value).__name__)


def _record_or_fault(where: str, value: Any) -> Record:
    return (
        (where, value)
        if isinstance(value, dict)
        else MalformedRecord(where, f"expected an object, found {type_name(value)}")
    )


def _reject_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _read_jsonl(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    decode = json.JSONDecoder(parse_constant=_reject_constant).raw_decode
    number, begun = 0, False
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            yield MalformedRecord(
                f"{name}:{number}", f"a line of {_skip_line(stream, line):,} bytes; at most {_LARGEST} are read"
            )
        elif text := line.strip(b" \t\r\n").decode():
            where = f"{name}:{number}"
            try:
                value, end = decode(text)
                if end != len(text):
                    raise json.JSONDecodeError("Extra data", text, end)
                record = _record_or_fault(where, value)
            except json.JSONDecodeError as error:
                record = MalformedRecord(where, f"not JSON ({error.msg} at character {error.pos + 1})")
            except (ValueError, RecursionError) as error:  # NaN, a number of thousands of digits, thousands of brackets
                record = MalformedRecord(where, f"not JSON ({error})")
            if not begun and text[0] == "[":
                raise DataError(f"{where}: looks like a JSON array, not an object a line; if it is one, name it .json")
            begun = True
            yield record


def _skip_line(stream: io.BufferedReader, line: bytes) -> int:
    """Skip to the end of a line that is read up to here; its length in bytes."""
    size = len(line)
    while line and not line.endswith(b"\n"):
        line = stream.readline(BLOCK_BYTES)
        size += len(line)
    return size


class _JsonWindow:
    """The part of a JSON text that is looked at, moving along a stream."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream, self._decoder = stream, codecs.getincrementaldecoder("utf-8")()
        self._lines_before = 0
        self.text, self.at, self.ended = "", 0, False

    def line(self, position: int) -> int:
        """Number of the line that a position of `text` is in."""
        return self._lines_before + self.text.count("\n", 0, position) + 1

    def advance(self) -> None:
        """Leave what is read behind; add at least as much as is kept, so that a long value is not tried often."""
        block = self._stream.read(max(BLOCK_BYTES, len(self.text) - self.at))
        self.ended = not block
        self._lines_before = self.line(self.at) - 1
        self.text, self.at = self.text[self.at :] + self._decoder.decode(block, final=self.ended), 0

    def next(self) -> str:
        """The next character that is no white space, "" at the end; it is not taken."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self.advance()

    def take(self, decode: Callable[[str, int], tuple[Any, int]]) -> tuple[Any, int]:
        """The value that begins here, and its length in characters."""
        while True:
            try:
                value, end = decode(self.text, self.at)
            except json.JSONDecodeError:
                if self.ended or len(self.text) - self.at > MAX_RECORD_BYTES:
                    raise
            else:
                if end < len(self.text) or self.ended:  # else it may be the beginning of a longer number
                    length, self.at = end - self.at, end
                    return value, length
            self.advance()


def _read_json(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    window = _JsonWindow(stream)
    try:
        yield from _iterate_elements(window, name)
    except json.JSONDecodeError as error:
        left = len(window.text) - window.at
        reason = f"{error.msg}, or an object over {_LARGEST}" if left > MAX_RECORD_BYTES else error.msg
        raise DataError(f"{name}:{window.line(error.pos)}: not JSON ({reason}); mend the file") from None
    except RecursionError as error:
        raise DataError(f"{name}:{window.line(window.at)}: not JSON ({error}); mend the file") from None


def _iterate_elements(window: _JsonWindow, name: str) -> Iterator[Record]:
    flaws: list[str] = []

    def integer(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:  # Python converts 4300 digits at most
            flaws.append(f"a number of {len(digits):,} digits")
            return 0

    # What is no JSON but can be read to its end is remembered, so that the next record is found.
    decoder = json.JSONDecoder(parse_int=integer, parse_constant=lambda text: flaws.append(f"not JSON ({text})"))

    def decode(text: str, at: int) -> tuple[Any, int]:
        flaws.clear()
        return decoder.raw_decode(text, at)

    if window.next() != "[":
        if window.next():
            value, _ = window.take(decode)
            if window.next():
                hint = "one object a line is JSONL: name the file .jsonl"
                raise DataError(f"{name}:{window.line(window.at)}: not JSON (Extra data); {hint}")
            raise DataError(f"{name}: expected a list of objects, found {type_name(value)}")
        return
    window.at, index = window.at + 1, 0
    more = window.next() != "]"
    while more:
        window.next()
        value, length = window.take(decode)
        where = f"{name}[{index}]"
        if flaws or length > MAX_RECORD_BYTES:
            yield MalformedRecord(
                where, flaws[0] if flaws else f"an object of {length:,} characters; at most {_LARGEST} are read"
            )
        else:
            yield _record_or_fault(where, value)
        index += 1
        separator = window.next()
        if separator not in (",", "]"):
            problem = "Expecting ',' delimiter" if separator else "the list is not closed"
            raise json.JSONDecodeError(problem, window.text, window.at)
        if more := separator == ",":
            window.at += 1
    window.at += 1
    if window.next():
        raise json.JSONDecodeError("Extra data", window.text, window.at)


# -------------------------------------------------------------------------------------------------------------- tables


class _TableLines:
    """Lines of a table for the csv module, counted from where the record at hand began."""

    def __init__(self, text: io.TextIOWrapper, name: str) -> None:
        self._text, self._name = text, name
        self._size, self.first = 0, 1

    def begin(self, line: int) -> None:
        """A new record begins behind this line."""
        self._size, self.first = 0, line + 1

    def __iter__(self) -> "_TableLines":
        return self

    def __next__(self) -> str:
        line = self._text.readline(MAX_RECORD_BYTES + 1)
        self._size += len(line)
        if self._size > MAX_RECORD_BYTES:
            raise DataError(
                f"{self._name}:{self.first}: the record that begins here is over {_LARGEST}; is a quote never closed?"
            )
        if not line:
            raise StopIteration
        return line


def _read_table(stream: io.BufferedReader, name: str, delimiter: str) -> Iterator[Record]:
    csv.field_size_limit(MAX_RECORD_BYTES)  # the default is 128 KiB a cell
    with io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:
        lines = _TableLines(text, name)
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if twice := [column for column in header if header.count(column) > 1]:
                raise DataError(f"{name}:1: column {twice[0]!r} appears twice; rename one")
            lines.begin(reader.line_num)
            for cells in reader:
                if cells:
                    yield _table_record(f"{name}:{lines.first}", header, cells, delimiter)
                lines.begin(reader.line_num)
        except csv.Error as error:
            what = "a quote is opened and never closed" if "end of data" in str(error) else str(error)
            raise DataError(f"{name}:{lines.first}: not valid CSV ({what}); mend the record that begins here") from None


def _table_record(where: str, header: list[str], cells: list[str], delimiter: str) -> Record:
    if len(cells) != len(header):
        separator = "tabs" if delimiter == "\t" else "commas"
        return MalformedRecord(where, f"{len(cells)} cells under {len(header)} columns; quote cells with {separator}")
    if any("\0" in cell for cell in cells):
        return MalformedRecord(where, "holds a NUL character")
    return where, dict(zip(header, cells, strict=True))


def _read_parquet(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with ExitStack() as opened:
        source = _make_seekable(stream, opened)
        try:
            # Without pre_buffer=False a whole row group is held: 180 MiB more for one of 190 MB (pyarrow 25).
            table = pq.ParquetFile(source, buffer_size=BLOCK_BYTES, pre_buffer=False, page_checksum_verification=True)
            names = table.schema_arrow.names
            if twice := [column for column in names if names.count(column) > 1]:
                raise DataError(f"{name}: column {twice[0]!r} appears twice; rename one")
            nested = [field.name for field in table.schema_arrow if pa.types.is_nested(field.type)]
            groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
            row_bytes = sum(group.total_byte_size for group in groups) // (table.metadata.num_rows or 1) + 1
            index = 0
            for batch in table.iter_batches(batch_size=max(1, min(_BATCH_ROWS, 2 * MAX_RECORD_BYTES // row_bytes))):
                for fields in _python_rows(batch, f"{name}[{index}]"):
                    for column in nested:
                        fields[column] = strip_struct_nulls(fields[column])
                    yield f"{name}[{index}]", fields
                    index += 1
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{name}: no sound Parquet ({reason}); write or copy it again") from None


def _make_seekable(stream: io.BufferedReader, opened: ExitStack) -> IO[bytes]:
    """Parquet is read from its end: what is decompressed goes to a temporary file."""
    if isinstance(stream.raw, io.FileIO):
        return stream
    scratch = opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (`open_decompressed` closes it)
    shutil.copyfileobj(stream, scratch, BLOCK_BYTES)
    return scratch


def _python_rows(batch: Any, where: str) -> list[Fields]:
    """Rows of an Arrow batch that begins at `where`."""
    try:
        rows: list[Fields] = batch.to_pylist()
    except UnicodeDecodeError:
        raise DataError(
            f"{where} or one of {len(batch) - 1} rows behind it: text that is not UTF-8; convert it"
        ) from None
    except (ValueError, OverflowError) as error:  # dates that Python has no type for
        raise DataError(f"{where} or one of {len(batch) - 1} rows behind it: {error}; make that column text") from None
    return rows


def strip_struct_nulls(value: Any) -> Any:
    """A nested value without the nulls with which Arrow fills the keys that a struct lacks, below the outermost one."""
    if isinstance(value, list):
        return [strip_struct_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: _strip_nulls(one) if isinstance(one, (dict, list)) else one for key, one in value.items()}
    return value


def _strip_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_strip_nulls(one) for one in value]
    if isinstance(value, dict):
        return {key: _strip_nulls(one) for key, one in value.items() if one is not None}
    return value


_FORMATS: dict[str, Callable[[io.BufferedReader, str], Iterator[Record]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": partial(_read_table, delimiter=","),
    ".tsv": partial(_read_table, delimiter="\t"),
    ".parquet": _read_parquet,
}
