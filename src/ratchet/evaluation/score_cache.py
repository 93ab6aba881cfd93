"""Scores that survive a kill: what was asked and what came of it, a JSON line each, appended and never rewritten."""

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ratchet.errors import StorageError
from ratchet.storage import digests, disk, files

JSON = Any
"""What JSON can hold, and floats that it cannot: NaN and the infinities."""

_HEAD, _MIDDLE = b'{"sha256":"', b'",'
_BODY = len(_HEAD) + 64 + len(_MIDDLE)
_ODD = "\0float"
"""The one key of an object that stands for a float which JSON has no word for."""


class ScoreStore:
    """Results by key, in a file that is made at the first write; without one, nothing is kept.

    A line is durable before its result is used, and holds a digest of its own: one that a kill cut off or a disk
    damaged counts as never written, and costs only itself. Two processes may use one file: lines are appended by single
    writes, and what one of them does not know of it computes for itself.
    """

    def __init__(self, path: Path | None) -> None:
        """Read what is there. Raises StorageError when `path` is no file."""
        self.path = path
        self._lines: dict[str, tuple[int, int]] = {}
        if path is not None:
            self._read(path)

    def take(self, key: str, make: Callable[[], JSON]) -> JSON:
        """What is stored under `key`; else what `make` gives, stored before it is returned.

        Either way it is what JSON makes of it: tuples are lists, keys of objects texts. Floats are exact, NaN and
        infinities as well.

        Raises:
            OSError: the disk takes nothing; what was stored before is not touched. Or what `make` raises.
            ValueError, TypeError: `make` gave what JSON cannot hold.
        """
        if (place := self._lines.get(key)) is not None and self.path is not None:
            found = _opened(_bytes_at(self.path, *place))
            if found is not None and found[0] == key:
                return found[1]
        body = _body(key, make())
        if self.path is not None:
            self._lines[key] = _append(self.path, _HEAD + digests.of_bytes(body).encode() + _MIDDLE + body)
        return _value(body)[1]

    def get(self, key: str) -> JSON | None:
        """What is stored under `key`; None: nothing is."""
        if (place := self._lines.get(key)) is None or self.path is None:
            return None
        found = _opened(_bytes_at(self.path, *place))
        return found[1] if found is not None and found[0] == key else None

    def _read(self, path: Path) -> None:
        """Remember where each whole line is; of two with one key, the first."""
        try:
            stream = path.open("rb")
        except FileNotFoundError:
            return
        except IsADirectoryError:
            raise StorageError(f"{path}: is a directory, where scores are to be kept; remove it") from None
        with stream:
            place = 0
            for line in stream:
                if (found := _opened(line.rstrip(b"\n"))) is not None:
                    self._lines.setdefault(found[0], (place, len(line.rstrip(b"\n"))))
                place += len(line)


def _body(key: str, value: JSON) -> bytes:
    """The line from its key on. ASCII: texts of a data set may hold what UTF-8 cannot (half a surrogate pair)."""
    return json.dumps({"key": key, "value": _plain(value)}, allow_nan=False, separators=(",", ":")).encode()[1:]


def _opened(line: bytes) -> tuple[str, JSON] | None:
    """Key and value of a line; None when it is not as it was written."""
    sha, body = line[len(_HEAD) : _BODY - len(_MIDDLE)], line[_BODY:]
    if not line.startswith(_HEAD) or sha != digests.of_bytes(body).encode():
        return None
    return _value(body)


def _value(body: bytes) -> tuple[str, JSON]:
    read = json.loads(b"{" + body, object_hook=_odd)
    return str(read["key"]), read["value"]


def _plain(value: JSON) -> JSON:
    if isinstance(value, float) and not math.isfinite(value):
        return {_ODD: repr(value)}
    if isinstance(value, dict):
        if _ODD in value:
            raise ValueError(f"an object to be stored has the key {_ODD!r}")
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value


def _odd(found: dict[str, Any]) -> Any:
    return float(found[_ODD]) if _ODD in found else found


def _bytes_at(path: Path, place: int, length: int) -> bytes:
    """Empty when the file has gone."""
    try:
        with path.open("rb") as stream:
            stream.seek(place)
            return stream.read(length)
    except FileNotFoundError:
        return b""


def _append(path: Path, line: bytes) -> tuple[int, int]:
    """Write a line durably; its place and length. Raises OSError, with the path, when the disk does not take it."""
    try:
        new = not path.exists()
        files.make_directory(path.parent)
        files.before("write", path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            end = _write(fd, line + b"\n")
        finally:
            os.close(fd)
        files.before("fsync", path)
        disk.fsync(path)
        if new:
            files.fsync_directory(path.parent)
    except OSError as error:
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error
    return end - len(line) - 1, len(line)


def _write(fd: int, data: bytes) -> int:
    """Append; where it ends. A line that was cut off before this one is closed first."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        data = b"\n" + data
    while data:  # a disk that is nearly full takes a part, and says at the next call what is wrong
        data = data[os.write(fd, data) :]
    return os.lseek(fd, 0, os.SEEK_CUR)
