"""Optuna's journal of all studies in one file that survives kill -9, a full disk and a torn last line.

Optuna's own backend for such a file loses the whole study to one torn line, and keeps the lock of a killed process for
30 s. Here the lock ends with its process, and each line has a checksum under the key `ratchet`, which Optuna's replay
ignores: its own backend and optuna-dashboard can read the file. They write lines without that key (a note made in the
dashboard), which are accepted if they are operations of a journal.

A line is complete or does not count: a killed writer leaves a line without an end, which no reader accepts and the next
writer cuts off. A crash cannot damage an earlier line; such damage stops all processes until `repair`.
"""

import json
import os
import re
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.storages.journal import BaseJournalBackend

from ratchet.errors import DamagedFileError, StorageError
from ratchet.runs.log import print_message
from ratchet.storage import files
from ratchet.storage.files import FileLock

FORMAT = 1
"""Of lines; a higher one was written by a newer Ratchet."""
APPEND_WAIT_S = 30.0  # an append takes milliseconds; who waits longer waits for a process that was stopped
_OPERATIONS = range(11)  # codes of Optuna 5.0
_SEAL = re.compile(rb',"ratchet":"(\d{1,9})-([0-9a-f]{8})"\}\n\Z')
_SEAL_INSIDE = re.compile(rb'"ratchet":"\d{1,9}-[0-9a-f]{8}"\}[^\n]')
_SEAL_BYTES = 64  # more than a seal can have


def make_study_lock(path: Path) -> FileLock:
    """The lock of `StudyStorage.locked`. (Names that end in `.lock` belong to Optuna's own backend.)"""
    return FileLock(path.with_name(f"{path.name}.exclusive"), f"the studies of {path}")


def _make_append_lock(path: Path) -> FileLock:
    return FileLock(path.with_name(f"{path.name}.append"), f"{path} (another process appends a line)")


def encode_operation(log: dict[str, Any]) -> bytes:
    """An operation as a line: Optuna's JSON, closed by format and CRC-32 of what Optuna would have written."""
    body = json.dumps(log, separators=(",", ":")).encode()
    return b'%s,"ratchet":"%d-%08x"}\n' % (body[:-1], FORMAT, zlib.crc32(body))


def _decode_operation(line: bytes) -> dict[str, Any]:
    """The operation of a line. Raises ValueError saying what is wrong with it."""
    if seal := _SEAL.search(line, max(0, len(line) - _SEAL_BYTES)):
        body = line[: seal.start()] + b"}"
        if zlib.crc32(body) != int(seal[2], 16):
            raise ValueError("its checksum does not match its content")
        log = json.loads(body)
    else:
        try:
            log = json.loads(line)
        except ValueError:
            raise ValueError("it is not valid JSON") from None
        if isinstance(log, dict) and "ratchet" in log:
            raise ValueError("its checksum cannot be read")
    if not (isinstance(log, dict) and log.get("op_code") in _OPERATIONS and isinstance(log.get("worker_id"), str)):
        raise ValueError("it is not an operation of the installed version of Optuna")
    return log


@dataclass
class _JournalScan:
    """Good lines of a stretch of the file, and what stopped the reading."""

    end: int
    """Offset behind the last good line."""
    logs: list[dict[str, Any]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    damage: str = ""
    """What is wrong with the line at `end`, where that is no torn tail."""
    newer: int = 0
    """Its format, where a newer Ratchet wrote it."""


def _scan_lines(data: bytes, start: int) -> _JournalScan:
    """Read lines of `data`, which begins at offset `start` of the file, up to the first bad one."""
    found = _JournalScan(start)
    at = 0
    while (newline := data.find(b"\n", at)) >= 0:
        line = data[at : newline + 1]
        seal = _SEAL.search(line, max(0, len(line) - _SEAL_BYTES))
        if seal and int(seal[1]) > FORMAT:
            found.newer = int(seal[1])
            break
        try:
            log = _decode_operation(line)
        except ValueError as error:
            if newline + 1 < len(data):  # a last line that is bad is what a power loss left of it
                found.damage = str(error)
            break
        found.logs.append(log)
        found.starts.append(start + at)
        at = newline + 1
        found.end = start + at
    if not found.damage and _SEAL_INSIDE.search(
        data, at
    ):  # not a last line: two lines that lost the bytes between them
        found.damage = "it is two lines in one"
    return found


def _raise_scan_error(path: Path, number: int, found: _JournalScan) -> None:
    """Raise DamagedFileError for what stopped a scan at line `number`, unless it is a torn tail."""
    if found.newer:
        raise DamagedFileError(
            f"{path}:{number}: written by a newer version of Ratchet (format {found.newer}, this one knows {FORMAT}); "
            "update Ratchet on this machine"
        )
    if found.damage:
        raise DamagedFileError(
            f"{path}:{number}: line is damaged: {found.damage}. Stop all workers and run `ratchet sweep --repair`; "
            "it keeps what stands before. Trials that stand behind are proposed again, and their runs are "
            "found again by their contents, so that nothing is trained twice"
        )


def _save_removed_bytes(path: Path, why: str, data: bytes) -> Path:
    """Write bytes that will be cut from the journal into a new file in its directory."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    files.write_atomic(aside, data)
    return aside


class StudyJournalBackend(BaseJournalBackend):
    """One process's view of the file; JournalStorage asks it from one thread at a time.

    Methods raise StorageError when the disk takes or gives nothing, or the file was replaced, removed or cut while
    this process had it open; DamagedFileError for damage before the last line and for lines of a newer Ratchet;
    LockHeldError when another process has been appending for APPEND_WAIT_S.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts = array("Q")
        self._end = 0
        try:
            files.make_directory(path.parent)
            # Kept open: an inode that is in use is not given to a file that takes this one's place.
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            files.fsync_directory(path.parent)
        except OSError as error:
            raise self._storage_error(error) from error

    def close(self) -> None:
        """Let go of the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """Whole good operations from this number on; what is torn at the end is left out."""
        return self._read(log_number_from, alone=False)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write operations, durably, or leave the file as it was."""
        lines = b"".join(map(encode_operation, logs))
        with self._alone():
            self._read(len(self._starts), alone=True)
            with self._disk():
                if (size := os.fstat(self._fd).st_size) > self._end:
                    self._cut_tail(size)
            self._write(lines)

    def _read(self, number: int, alone: bool) -> list[dict[str, Any]]:
        known = min(number, len(self._starts))
        start = self._starts[known] if known < len(self._starts) else self._end
        found = _scan_lines(self._bytes_from(start), start)
        if found.damage and not alone:
            # A torn tail may have been cut, and a line written in its place, while this was read.
            with self._alone():
                found = _scan_lines(self._bytes_from(start), start)
        del self._starts[known:]
        self._starts.extend(found.starts)
        self._end = found.end
        _raise_scan_error(self.path, len(self._starts) + 1, found)
        return found.logs[number - known :]

    def _bytes_from(self, start: int) -> bytes:
        with self._disk():
            ours = os.fstat(self._fd)
            try:
                there = self.path.stat()
            except FileNotFoundError:
                there = None
            if there is None or (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino):
                raise StorageError(
                    f"{self.path}: was {'replaced' if there else 'removed'} while this process used it (by a repair, a "
                    "backup, or hand); the file is now another journal: stop this process and start it again"
                )
            if ours.st_size < start:
                raise StorageError(
                    f"{self.path}: was cut to {ours.st_size:,} bytes while this process had read {start:,}; "
                    "its state does not match the file: stop it and start it again"
                )
            blocks = []
            while start < ours.st_size and (block := os.pread(self._fd, ours.st_size - start, start)):
                blocks.append(block)
                start += len(block)
            return b"".join(blocks)

    def _cut_tail(self, size: int) -> None:
        """Take off what a writer that died left of its line. No reader ever accepted it."""
        aside = _save_removed_bytes(self.path, "torn", os.pread(self._fd, size - self._end, self._end))
        os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)
        print_message(
            f"{self.path}: the last line was torn when its writer died; its {size - self._end} bytes are in "
            f"{aside.name}, and the journal continues after the line before it"
        )

    def _write(self, lines: bytes) -> None:
        written = 0
        try:
            files.before("write", self.path)
            while written < len(lines):
                written += os.write(self._fd, lines[written:])
        except OSError as error:
            failure = self._storage_error(error, "; nothing of what was to be written stays in it")
            try:
                # If it is longer than that, a dashboard wrote behind it; then the line stays, and is damage.
                if written and os.fstat(self._fd).st_size == self._end + written:
                    os.ftruncate(self._fd, self._end)
            except OSError as second:
                failure.add_note(f"{written} bytes of a line are left at its end, for the next writer to cut: {second}")
            raise failure from error
        with self._disk():  # readers may have taken the line: it is whole, and stays even if this fails
            files.before("fsync", self.path)
            os.fsync(self._fd)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process of Ratchet appends during the block."""
        with self._disk():
            lock = _make_append_lock(self.path).acquire(APPEND_WAIT_S)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._storage_error(error) from error

    def _storage_error(self, error: OSError, state: str = "") -> StorageError:
        cause = error.strerror or error
        return StorageError(f"{self.path}: {cause}{state}; free space or fix the disk, then run the same command again")


def repair(path: Path) -> str:
    """Cut a journal at its first damaged line, and write the rest into another file. Returns a sentence about it.

    The caller has made sure that no worker runs; one that does notices that its file was replaced. Raises LockHeldError
    when another process holds the storage, DamagedFileError for lines of a newer Ratchet, StorageError for a bad disk.
    """
    if not path.exists():
        return f"{path}: no such file; nothing to repair"
    with make_study_lock(path).acquire(), _make_append_lock(path).acquire():
        try:
            data = path.read_bytes()
            found = _scan_lines(data, 0)
            kept = len(found.logs)
            if found.newer:
                _raise_scan_error(path, kept + 1, found)
            if found.end == len(data):
                return f"{path}: {kept} lines, none damaged"
            aside = _save_removed_bytes(path, "damaged", data[found.end :])
            files.write_atomic(path, data[: found.end])
        except OSError as error:
            raise StorageError(f"{path}: not repaired: {error.strerror or error}; nothing was changed") from error
    lost = data[found.end :].count(b"\n")
    what = f"line {kept + 1} is damaged ({found.damage})" if found.damage else "the last line is torn"
    return (
        f"{path}: {what}; lines kept: {kept}, set aside in {aside.name}: {lost or 1}. Trials that stood there are "
        "proposed again; their runs are found again by their contents, so that nothing is trained twice"
    )
