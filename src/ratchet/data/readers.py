"""Reads records from JSON, JSONL, CSV, TSV and Parquet files, plain or compressed, each with its position in the file.

Files are streamed: memory is bounded by the largest record, which may have `MAX_RECORD_BYTES`. A record that cannot be
read is yielded as a `MalformedRecord`, and reading continues with the next record. A `DataError` is raised if the next
record cannot be found: the content does not match the file's ending, or compressed data is truncated or corrupt.
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
from ratchet.storage.files import reject_constant

Fields = dict[str, Any]
Record = tuple[str, Fields] | MalformedRecord
"""Position (`file:line` or `file[index]`) and fields of one record, or the error of a record that cannot be read."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "Zstandard"}
"""File endings of compressed files, with the name of the compression."""
BLOCK_BYTES = 2**20
"""Number of bytes per read."""
MAX_RECORD_BYTES = 16 * 2**20
"""Size limit of a record: in bytes for JSONL, in characters for JSON, CSV and TSV. A larger record is more likely an
unclosed quote or bracket than an example."""
_MAX_RECORD_TEXT = f"{MAX_RECORD_BYTES // 2**20} MiB"
_BATCH_ROWS = 1024
_SPACE = re.compile(r"[ \t\n\r]*")
_HEAD_BYTES = 512
_DECOMPRESSION_ERRORS = (zlib.error, lzma.LZMAError, gzip.BadGzipFile)

# First bytes of formats that often have a wrong file ending. `BZh` and `PAR1` alone could also begin a text.
_SIGNATURES = [
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


def check_ending(name: str) -> None:
    """Raise DataError if a file's ending is not one of the supported formats."""
    if split_endings(name)[0] not in _RECORD_READERS:
        ending = "".join(split_endings(name)) or "a file without ending"
        supported = f"{', '.join(_RECORD_READERS)}, each also with {', '.join(COMPRESSIONS)}"
        raise DataError(f"{name}: cannot read {ending}; supported: {supported}")


def read_records(path: Path, name: str) -> Iterator[Record]:
    """Yield every record of one file; the ending of `name` determines the format, and positions begin with it.

    Raises DataError if the file as a whole cannot be read.
    """
    check_ending(name)
    with open_decompressed(path, name) as stream:
        yield from _RECORD_READERS[split_endings(name)[0]](stream, name)


# ----- Decompression and check of the content


def split_endings(name: str) -> tuple[str, str]:
    """Return the lower-case endings of the format and of the compression; "" if the name has none."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    return suffixes[-1] if suffixes else "", compression


@contextmanager
def open_decompressed(path: Path, name: str) -> Iterator[io.BufferedReader]:
    """Open a file as a stream of decompressed bytes, positioned after a byte order mark.

    The ending of `name` determines the expected format and compression. Raises DataError, also for errors inside the
    `with` block, if the file cannot be read or decompressed, has another format, or is not UTF-8.
    """
    kind, compression = split_endings(name)
    try:
        with ExitStack() as streams:
            stream = _open_unpacked(path, name, streams)
            if _detect_kind(stream) != ("Parquet" if kind == ".parquet" else ""):
                expected = {".csv": "CSV", ".tsv": "TSV", ".parquet": "Parquet"}.get(kind, "JSON")
                raise DataError(f"{name}: not a valid {expected} file{_describe_actual_kind(stream, name)}")
            head = _peek_head(stream)
            if encoding := next((encoding for mark, encoding in _BOMS.items() if head.startswith(mark)), None):
                raise DataError(f"{name}:1: {encoding}, not UTF-8 (byte order mark at byte 0); convert it with iconv")
            if b"\0" in head[:2]:  # almost every table and JSON text begins with two ASCII characters
                is_wide = head.strip(b"\0")
                cause = "UTF-16 or UTF-32, not UTF-8; convert it with iconv" if is_wide else "not text; copy it again"
                raise DataError(f"{name}:1: begins with NUL bytes: {cause}")
            if head.startswith(codecs.BOM_UTF8):
                stream.read(len(codecs.BOM_UTF8))
            yield stream
    except UnicodeDecodeError:
        line, byte = _locate_invalid_utf8(path, name)
        text = "decompressed text" if compression else "file"
        raise DataError(f"{name}:{line}: not UTF-8 (byte {byte} of the {text}); convert it, e.g. with iconv") from None
    except (OSError, EOFError, *_DECOMPRESSION_ERRORS) as error:
        reason = f"cannot be read ({getattr(error, 'strerror', None) or error})"
        if isinstance(error, EOFError):
            reason = f"the {COMPRESSIONS[compression]} data is truncated; copy or download it again"
        elif compression and not getattr(error, "errno", None):
            reason = f"the {COMPRESSIONS[compression]} data is corrupt ({error}); copy or download it again"
        raise DataError(f"{name}: {reason}") from None


def _open_unpacked(path: Path, name: str, streams: ExitStack) -> io.BufferedReader:
    """Open the decompressed bytes of a file; `streams` closes them."""
    stream: io.BufferedReader = streams.enter_context(io.BufferedReader(io.FileIO(path), BLOCK_BYTES))
    if not (compression := split_endings(name)[1]):
        return stream
    if _detect_kind(stream) != COMPRESSIONS[compression]:
        raise DataError(f"{name}: not a valid {COMPRESSIONS[compression]} file{_describe_actual_kind(stream, name)}")
    return streams.enter_context(io.BufferedReader(_OPENERS[compression](stream), BLOCK_BYTES))


def _open_zstandard(stream: IO[bytes]) -> Any:
    # pyarrow's reader detects a truncated file; the reader of the package `zstandard` (0.25) does not.
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
    """Return the format that the first bytes indicate; "" for text and unknown formats."""
    head = _peek_head(stream)
    return next((kind for pattern, kind in _SIGNATURES if pattern.match(head)), "")


def _describe_actual_kind(stream: io.BufferedReader, name: str) -> str:
    """Return the end of an error message: the actual format of the file, and advice."""
    kind, head = _detect_kind(stream), _peek_head(stream)
    if not head:
        return ": the file is empty; copy or download it again"
    if kind == "Git LFS pointer":
        return " but a Git LFS pointer; fetch the file itself with git lfs pull"
    compression = split_endings(name)[1]
    suffixes = {compression: suffix for suffix, compression in COMPRESSIONS.items()} | {"Parquet": ".parquet"}
    if kind in suffixes and suffixes[kind] == compression:
        return f" but compressed twice with {kind}; decompress it once"
    if kind in suffixes:
        stem = name.rsplit("/", 1)[-1].removesuffix(Path(name).suffix if compression else "")
        return f" but {kind}; name it {stem.rsplit('.', 1)[0] if kind == 'Parquet' else stem}{suffixes[kind]}"
    if kind:
        return f" but {kind}; unpack or convert it, or download it again"
    return f": it begins with {head[:16]!r}; give it the ending of its format, or download it again"


def _locate_invalid_utf8(path: Path, name: str) -> tuple[int, int]:
    """Return line and byte offset of the first bytes that are not UTF-8.

    The decoder's own error has an offset in the current block only.
    """
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


# ----- JSON

_TOO_DEEP = "lists or objects are nested too deeply"


def type_name(value: Any) -> str:
    """Return the name of a value's JSON type, for messages."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", int: "a number"}
    return names.get(type(value)) or ("a number" if isinstance(value, float) else type(value).__name__)


def _require_object(where: str, value: Any) -> Record:
    return (
        (where, value)
        if isinstance(value, dict)
        else MalformedRecord(where, f"expected an object, found {type_name(value)}")
    )


def _read_jsonl(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    decode = json.JSONDecoder(parse_constant=reject_constant).raw_decode
    number, seen_first_value = 0, False
    while line := stream.readline(MAX_RECORD_BYTES + 1):
        number += 1
        if len(line) > MAX_RECORD_BYTES:
            size = len(line)
            while line and not line.endswith(b"\n"):
                line = stream.readline(BLOCK_BYTES)
                size += len(line)
            detail = f"the line has {size:,} bytes; the limit is {_MAX_RECORD_TEXT}"
            yield MalformedRecord(f"{name}:{number}", detail)
        elif text := line.strip(b" \t\r\n").decode():
            where = f"{name}:{number}"
            try:
                value, end = decode(text)
                if end != len(text):
                    raise json.JSONDecodeError("Extra data", text, end)
                record = _require_object(where, value)
            except json.JSONDecodeError as error:
                record = MalformedRecord(where, f"not JSON ({error.msg} at character {error.pos + 1})")
            except RecursionError:
                record = MalformedRecord(where, _TOO_DEEP)
            except ValueError as error:  # NaN, or thousands of digits
                record = MalformedRecord(where, f"not JSON ({error})")
            if not seen_first_value and text[0] == "[":
                raise DataError(
                    f"{where}: looks like a JSON array; expected one object per line; name a file with an array .json"
                )
            seen_first_value = True
            yield record


class _JsonWindow:
    """A window of decoded text that moves along a stream of JSON."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream, self._decoder = stream, codecs.getincrementaldecoder("utf-8")()
        self._lines_before = 0
        self.text, self.position, self.at_end = "", 0, False

    def line(self, position: int) -> int:
        """Return the line number of a position in `text`."""
        return self._lines_before + self.text.count("\n", 0, position) + 1

    def advance(self) -> None:
        """Drop the text before `position` and read more text.

        At least as much is read as remains, so that a long value is decoded only a few times.
        """
        block = self._stream.read(max(BLOCK_BYTES, len(self.text) - self.position))
        self.at_end = not block
        self._lines_before = self.line(self.position) - 1
        self.text, self.position = self.text[self.position :] + self._decoder.decode(block, final=self.at_end), 0

    def peek_character(self) -> str:
        """Skip white space and return the next character without consuming it; "" at the end."""
        while True:
            self.position = _SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]  # the pattern matches an empty string too
            if self.position < len(self.text) or self.at_end:
                return self.text[self.position : self.position + 1]
            self.advance()

    def read_value(self, decode: Callable[[str, int], tuple[Any, int]]) -> tuple[Any, int]:
        """Decode the value at `position`; return it with its length in characters."""
        while True:
            try:
                value, end = decode(self.text, self.position)
            except json.JSONDecodeError:
                if self.at_end or len(self.text) - self.position > MAX_RECORD_BYTES:
                    raise
            else:
                if end < len(self.text) or self.at_end:  # otherwise it may be the beginning of a longer number
                    length, self.position = end - self.position, end
                    return value, length
            self.advance()


def _read_json(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    window = _JsonWindow(stream)
    try:
        yield from _iterate_elements(window, name)
    except json.JSONDecodeError as error:
        remaining = len(window.text) - window.position
        reason = f"{error.msg}, or an object over {_MAX_RECORD_TEXT}" if remaining > MAX_RECORD_BYTES else error.msg
        raise DataError(f"{name}:{window.line(error.pos)}: not JSON ({reason}); fix the file") from None
    except RecursionError:
        raise DataError(f"{name}:{window.line(window.position)}: {_TOO_DEEP}; fix the file") from None


def _iterate_elements(window: _JsonWindow, name: str) -> Iterator[Record]:
    problems: list[str] = []

    def integer(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:  # Python converts at most 4300 digits
            problems.append(f"a number of {len(digits):,} digits")
            return 0

    # Invalid JSON with a known end is noted in `problems` instead of raised, so that the next record can be found.
    decoder = json.JSONDecoder(parse_int=integer, parse_constant=lambda text: problems.append(f"not JSON ({text})"))

    def decode(text: str, position: int) -> tuple[Any, int]:
        problems.clear()
        return decoder.raw_decode(text, position)

    if window.peek_character() != "[":
        if window.peek_character():
            value, _ = window.read_value(decode)
            if window.peek_character():
                hint = "a file with one object per line is JSONL: name it .jsonl"
                raise DataError(f"{name}:{window.line(window.position)}: not JSON (Extra data); {hint}")
            raise DataError(f"{name}: expected a list of objects, found {type_name(value)}")
        return
    window.position, index = window.position + 1, 0
    has_more = window.peek_character() != "]"
    while has_more:
        window.peek_character()
        value, length = window.read_value(decode)
        where = f"{name}[{index}]"
        if problems or length > MAX_RECORD_BYTES:
            yield MalformedRecord(
                where,
                problems[0] if problems else f"the object has {length:,} characters; the limit is {_MAX_RECORD_TEXT}",
            )
        else:
            yield _require_object(where, value)
        index += 1
        separator = window.peek_character()
        if separator not in (",", "]"):
            problem = "Expecting ',' delimiter" if separator else "the list is not closed"
            raise json.JSONDecodeError(problem, window.text, window.position)
        if has_more := separator == ",":
            window.position += 1
    window.position += 1
    if window.peek_character():
        raise json.JSONDecodeError("Extra data", window.text, window.position)


# ----- CSV, TSV and Parquet


def _read_table(stream: io.BufferedReader, name: str, delimiter: str) -> Iterator[Record]:
    csv.field_size_limit(MAX_RECORD_BYTES)  # the default is 128 KiB per cell
    record_line, size = 1, 0  # first line and length of the current record

    def lines(text: io.TextIOWrapper) -> Iterator[str]:
        nonlocal size
        while line := text.readline(MAX_RECORD_BYTES + 1):
            size += len(line)
            if size > MAX_RECORD_BYTES:
                raise DataError(
                    f"{name}:{record_line}: the record that begins here is over {_MAX_RECORD_TEXT}; "
                    "check for an unclosed quote"
                )
            yield line

    with io.TextIOWrapper(stream, encoding="utf-8", newline="") as text:
        reader = csv.reader(lines(text), delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if duplicates := [column for column in header if header.count(column) > 1]:
                raise DataError(f"{name}:1: column {duplicates[0]!r} appears twice; rename one")
            record_line, size = reader.line_num + 1, 0
            for cells in reader:
                where = f"{name}:{record_line}"
                if cells and len(cells) != len(header):
                    separator = "tabs" if delimiter == "\t" else "commas"
                    yield MalformedRecord(
                        where, f"{len(cells)} cells under {len(header)} columns; quote cells with {separator}"
                    )
                elif any("\0" in cell for cell in cells):
                    yield MalformedRecord(where, "holds a NUL character")
                elif cells:
                    yield where, dict(zip(header, cells, strict=True))
                record_line, size = reader.line_num + 1, 0
        except csv.Error as error:
            reason = "a quote is opened and never closed" if "end of data" in str(error) else str(error)
            raise DataError(
                f"{name}:{record_line}: not valid CSV ({reason}); fix the record that begins here"
            ) from None


def _read_parquet(stream: io.BufferedReader, name: str) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with tempfile.TemporaryFile() as scratch:
        source: IO[bytes] = stream
        if not isinstance(stream.raw, io.FileIO):  # Parquet needs a seekable stream, which decompressed data is not.
            shutil.copyfileobj(stream, scratch, BLOCK_BYTES)
            source = scratch
        index = 0
        try:
            # By default (pre_buffer=True) pyarrow buffers a complete row group: 180 MiB for one of 190 MB (pyarrow 25).
            table = pq.ParquetFile(source, buffer_size=BLOCK_BYTES, pre_buffer=False, page_checksum_verification=True)
            names = table.schema_arrow.names
            if duplicates := [column for column in names if names.count(column) > 1]:
                raise DataError(f"{name}: column {duplicates[0]!r} appears twice; rename one")
            nested = [field.name for field in table.schema_arrow if pa.types.is_nested(field.type)]
            groups = [table.metadata.row_group(number) for number in range(table.num_row_groups)]
            row_bytes = sum(group.total_byte_size for group in groups) // (table.metadata.num_rows or 1) + 1
            for batch in table.iter_batches(batch_size=max(1, min(_BATCH_ROWS, 2 * MAX_RECORD_BYTES // row_bytes))):
                for fields in _python_rows(batch, f"{name}[{index}]"):
                    for column in nested:
                        fields[column] = strip_struct_nulls(fields[column])
                    yield f"{name}[{index}]", fields
                    index += 1
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"{name}: the Parquet data is corrupt ({reason}); write or copy it again") from None


def _python_rows(batch: Any, where: str) -> list[Fields]:
    """Convert an Arrow batch that begins at `where` to Python rows."""
    try:
        rows: list[Fields] = batch.to_pylist()
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, or dates that no Python type can hold
        is_text = isinstance(error, UnicodeDecodeError)
        reason = "text that is not UTF-8; convert it" if is_text else f"{error}; make that column text"
        raise DataError(f"{where} or one of the next {len(batch) - 1} rows: {reason}") from None
    return rows


def strip_struct_nulls(value: Any, is_outermost: bool = True) -> Any:
    """Return a value without the nulls that Arrow adds for missing struct keys; nulls of the outermost level stay."""
    if isinstance(value, list):
        return [strip_struct_nulls(item, is_outermost) for item in value]
    if isinstance(value, dict):
        items = ((key, item) for key, item in value.items() if is_outermost or item is not None)
        return {key: strip_struct_nulls(item, is_outermost=False) for key, item in items}
    return value


_RECORD_READERS: dict[str, Callable[[io.BufferedReader, str], Iterator[Record]]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": partial(_read_table, delimiter=","),
    ".tsv": partial(_read_table, delimiter="\t"),
    ".parquet": _read_parquet,
}
