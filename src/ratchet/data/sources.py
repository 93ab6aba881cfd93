"""Rows out of JSON, JSONL and CSV files, each with the place where it stands."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config_data import Columns, Prepare
from ratchet.errors import DataError


@dataclass(frozen=True)
class Row:
    """One example as the source gives it; texts are stripped, and may be empty."""

    prompt: str
    response: str
    system: str | None
    where: str
    """file:line (JSON arrays: file[index])."""


def paths(root: Path, settings: Prepare) -> dict[str, Path]:
    """The source files by the name they have in params.yaml.

    Raises:
        DataError: a file is missing, or lies where DVC would not see it change.
    """
    raw = root / "data" / "raw"
    found = {}
    for name in settings.sources:
        path = root / name
        # Compared without following links: data/raw may hold a link to a large file elsewhere.
        if not path.absolute().is_relative_to(raw.absolute()) or ".." in Path(name).parts:
            raise DataError(
                f"params.yaml: prepare.sources: {name} is not below data/raw; DVC would not see it change: "
                "move it there, or put a link to it there"
            )
        if not path.is_file():
            here = sorted(p.relative_to(root).as_posix() for p in raw.rglob("*") if p.is_file()) if raw.is_dir() else []
            raise DataError(f"{name}: no such file; data/raw holds {', '.join(here) or 'nothing'}")
        if path.suffix.lower() not in _READERS:
            raise DataError(
                f"{name}: cannot read {path.suffix or 'a file without ending'}; known: {', '.join(_READERS)}"
            )
        found[name] = path
    return found


def rows(root: Path, settings: Prepare) -> Iterator[Row]:
    """All rows of all sources, in order. Raises DataError at the first one that cannot be read, with its place."""
    for name, path in paths(root, settings).items():
        count = 0
        for where, fields in read(path, name):
            count += 1
            yield _row(fields, where, settings.columns)
        if not count:
            raise DataError(f"{name}: no rows; give it some or take it out of prepare.sources")


def read(path: Path, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Place and fields of each row of one file."""
    try:
        yield from _READERS[path.suffix.lower()](path, name)
    except UnicodeDecodeError:
        line, byte = _undecodable(path)
        raise DataError(f"{name}:{line}: not UTF-8 (byte {byte} of the file); convert it, e.g. with iconv") from None
    except OSError as error:
        raise DataError(f"{name}: cannot be read ({error.strerror})") from None


def _undecodable(path: Path) -> tuple[int, int]:
    """Line and byte offset of what is not UTF-8 (what the decoder says counts from the block it had read)."""
    offset = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return number, offset + error.start
            offset += len(line)
    return 1, 0


def _not_json(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _jsonl(path: Path, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="\n") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                where = f"{name}:{number}"
                try:
                    fields = json.loads(line, parse_constant=_not_json)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{where}: not JSON ({error.msg} at character {error.pos + 1}); mend or remove the line"
                    ) from None
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{where}: not JSON ({error}); mend or remove the line") from None
                yield where, _mapping(fields, where)


def _json(path: Path, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        document = json.loads(text, parse_constant=_not_json) if text.strip() else []
    except json.JSONDecodeError as error:
        hint = "; one object a line is JSONL: name the file .jsonl" if error.msg == "Extra data" else ""
        raise DataError(f"{name}:{error.lineno}: not JSON ({error.msg}){hint}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, NaN, thousands of brackets
        raise DataError(f"{name}: not JSON ({error})") from None
    if not isinstance(document, list):
        raise DataError(f"{name}: expected a list of objects, found {type(document).__name__}")
    for index, fields in enumerate(document):
        where = f"{name}[{index}]"
        yield where, _mapping(fields, where)


def _csv(path: Path, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as stream:
        csv.field_size_limit(max(csv.field_size_limit(), path.stat().st_size + 1))  # the default is 128 KiB a cell
        reader = csv.reader(stream, strict=True)
        try:
            header = next(reader, None)
            if header is None:
                return
            if twice := sorted({column for column in header if header.count(column) > 1}):
                raise DataError(f"{name}:1: column {twice[0]!r} appears twice; rename one")
            for cells in reader:
                where = f"{name}:{reader.line_num}"
                if cells and len(cells) != len(header):
                    raise DataError(f"{where}: {len(cells)} cells under {len(header)} columns; quote cells with commas")
                if cells:
                    yield where, dict(zip(header, cells, strict=True))
        except csv.Error as error:
            raise DataError(f"{name}:{reader.line_num}: not valid CSV ({error})") from None


_READERS: dict[str, Callable[[Path, str], Iterator[tuple[str, Mapping[str, Any]]]]] = {
    ".json": _json,
    ".jsonl": _jsonl,
    ".csv": _csv,
}


def _mapping(fields: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(fields, dict):
        raise DataError(f"{where}: expected an object with columns, found {type(fields).__name__}")
    return fields


def _row(fields: Mapping[str, Any], where: str, columns: Columns) -> Row:
    system = _text(fields, columns.system, "system", where) if columns.system else None
    return Row(
        prompt=_text(fields, columns.prompt, "prompt", where),
        response=_text(fields, columns.response, "response", where),
        system=system or None,
        where=where,
    )


def _text(fields: Mapping[str, Any], column: str, role: str, where: str) -> str:
    if column not in fields:
        raise DataError(
            f"{where}: no column {column!r} (prepare.columns.{role}); found: {', '.join(map(str, fields)) or 'none'}"
        )
    value = fields[column]
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise DataError(f"{where}: column {column!r} holds {type(value).__name__}, expected text")
    text = str(value).strip()
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise DataError(f"{where}: column {column!r} holds half a surrogate pair, which is no text; mend the row")
    return text
