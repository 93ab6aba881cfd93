"""Stores Optuna's journal of all studies in one file that survives kill -9, a full disk and a torn last line.

With Optuna's own backend for such a file, one torn line makes the whole study unreadable, and the lock of a killed
process remains for 30 s. Here the lock ends with its process, and each line has a checksum under the key `ratchet`.
Optuna's replay ignores this key, so Optuna's own backend and optuna-dashboard can read the file. They write lines
without the key (for example a note in the dashboard). Such a line is accepted if it is an operation of a journal.

A killed writer leaves a torn last line. Readers ignore this line, and the next writer cuts it off. A crash cannot
damage an earlier line. If an earlier line is damaged all the same, all processes stop with an error until the file is
repaired (`repair`).
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
"""Format of lines; a newer Ratchet writes a higher one."""
APPEND_WAIT_S = 30.0
"""Maximum number of seconds to wait while another process appends. An append takes milliseconds, unless its process was
stopped."""
_OPERATIONS = range(11)
"""Codes of operations in Optuna 5.0."""
_SEAL = re.compile(rb',"ratchet":"(\d{1,9})-([0-9a-f]{8})"\}\n\Z')
_SEAL_INSIDE = re.compile(rb'"ratchet":"\d{1,9}-[0-9a-f]{8}"\}[^\n]')
_SEAL_BYTES = 64
"""Number of bytes at the end of a line in which its seal (format and checksum) is searched; no seal is longer."""


def make_study_lock(path: Path) -> FileLock:
    """Return the lock of `StudyStorage.locked`. (Names that end in `.lock` belong to Optuna's own backend.)"""
    return FileLock(path.with_name(f"{path.name}.exclusive"), f"the studies of {path}")


def _make_append_lock(path: Path) -> FileLock:
    return FileLock(path.with_name(f"{path.name}.append"), f"{path} (another process appends a line)")


def encode_operation(log: dict[str, Any]) -> bytes:
    """Return an operation as a line: Optuna's JSON, with a seal (format, and CRC-32 of this JSON) as the last entry."""
    body = json.dumps(log, separators=(",", ":")).encode()
    return b'%s,"ratchet":"%d-%08x"}\n' % (body[:-1], FORMAT, zlib.crc32(body))


def _decode_operation(line: bytes) -> dict[str, Any]:
    """Return the operation of a line. Raises ValueError with the problem of the line."""
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
    """Valid lines of a part of the file, and the reason why the reading stopped."""

    end: int
    """Offset of the end of the last valid line."""
    logs: list[dict[str, Any]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Offset of each valid line."""
    damage: str = ""
    """Problem of the line at `end`; empty if the line is torn or missing."""
    newer: int = 0
    """Format of the line at `end` if a newer Ratchet wrote it; otherwise 0."""


def _scan_lines(data: bytes, start: int) -> _JournalScan:
    """Read the lines of `data`, which begins at offset `start` of the file, up to the first invalid line."""
    scan = _JournalScan(start)
    at = 0
    while (newline := data.find(b"\n", at)) >= 0:
        line = data[at : newline + 1]
        seal = _SEAL.search(line, max(0, len(line) - _SEAL_BYTES))
        if seal and int(seal[1]) > FORMAT:
            scan.newer = int(seal[1])
            break
        try:
            log = _decode_operation(line)
        except ValueError as error:
            if newline + 1 < len(data):  # a power loss may leave an invalid last line: it is torn, not damaged
                scan.damage = str(error)
            break
        scan.logs.append(log)
        scan.starts.append(start + at)
        at = newline + 1
        scan.end = start + at
    # A seal inside of the last line shows that the end of this line and the start of the next line were lost.
    if not scan.damage and _SEAL_INSIDE.search(data, at):
        scan.damage = "it is two lines in one"
    return scan


def _raise_scan_error(path: Path, number: int, scan: _JournalScan) -> None:
    """Raise DamagedFileError if a scan stopped at line `number`, unless this line is the last one and is torn."""
    if scan.newer:
        raise DamagedFileError(
            f"{path}:{number}: written by a newer version of Ratchet (format {scan.newer}, this one knows {FORMAT}); "
            "update Ratchet on this machine"
        )
    if scan.damage:
        raise DamagedFileError(
            f"{path}:{number}: line is damaged: {scan.damage}. Stop all workers and run `ratchet sweep --repair`; it "
            "keeps the lines before it. Trials of the lines after it are proposed again, and completed runs are "
            "reused, so that nothing is trained twice"
        )


def _save_removed_bytes(path: Path, reason: str, data: bytes) -> Path:
    """Write bytes that will be removed from the journal to a new file in its directory, and return its path."""
    number = 1
    while (copy := path.with_name(f"{path.name}.{reason}-{number}")).exists():
        number += 1
    files.write_atomic(copy, data)
    return copy


class StudyJournalBackend(BaseJournalBackend):
    """Backend of Optuna's JournalStorage, which calls it from one thread at a time.

    All methods may raise:
        StorageError: the disk fails or is full, or the file was replaced, removed or cut while this process had it
            open.
        DamagedFileError: a line before the last one is damaged, or a newer Ratchet wrote a line.
        LockHeldError: another process has held the lock for appending for APPEND_WAIT_S.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts = array("Q")
        self._end = 0
        try:
            files.make_directory(path.parent)
            # Keep the file open, so that a file that replaces it cannot get the same inode number.
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            files.fsync_directory(path.parent)
        except OSError as error:
            raise self._storage_error(error) from error

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_logs(self, log_number_from: int) -> list[dict[str, Any]]:
        """Return the operations from this number on, without a torn last line."""
        return self._read(log_number_from, is_locked=False)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write operations durably.

        If a write fails, the file is left unchanged, or with a torn last line. If only the fsync fails, the operations
        stay in the file, because other processes may have read them.
        """
        lines = b"".join(map(encode_operation, logs))
        with self._append_lock():
            self._read(len(self._starts), is_locked=True)
            with self._convert_os_errors():
                if (size := os.fstat(self._fd).st_size) > self._end:
                    self._cut_tail(size)
            self._write(lines)

    def _read(self, number: int, is_locked: bool) -> list[dict[str, Any]]:
        """Read the operations from this number on; `is_locked`: this process holds the lock for appending."""
        known = min(number, len(self._starts))
        start = self._starts[known] if known < len(self._starts) else self._end
        scan = _scan_lines(self._bytes_from(start), start)
        if scan.damage and not is_locked:
            # Another process may have replaced a torn line by a new one during the read: read again without writers.
            with self._append_lock():
                scan = _scan_lines(self._bytes_from(start), start)
        del self._starts[known:]
        self._starts.extend(scan.starts)
        self._end = scan.end
        _raise_scan_error(self.path, len(self._starts) + 1, scan)
        return scan.logs[number - known :]

    def _bytes_from(self, start: int) -> bytes:
        with self._convert_os_errors():
            opened = os.fstat(self._fd)
            try:
                current = self.path.stat()
            except FileNotFoundError:
                current = None
            if current is None or (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino):
                raise StorageError(
                    f"{self.path}: was {'replaced' if current else 'removed'} while this process used it (by a repair, "
                    "a backup or a user); the file is now another journal: stop this process and start it again"
                )
            if opened.st_size < start:
                raise StorageError(
                    f"{self.path}: was cut to {opened.st_size:,} bytes after this process had read {start:,}; the "
                    "state of this process does not match the file: stop it and start it again"
                )
            blocks = []
            while start < opened.st_size and (block := os.pread(self._fd, opened.st_size - start, start)):
                blocks.append(block)
                start += len(block)
            return b"".join(blocks)

    def _cut_tail(self, size: int) -> None:
        """Cut off the torn line of a writer that died. No reader has accepted it."""
        copy = _save_removed_bytes(self.path, "torn", os.pread(self._fd, size - self._end, self._end))
        os.ftruncate(self._fd, self._end)
        os.fsync(self._fd)
        print_message(
            f"{self.path}: the last line was torn when its writer died; its {size - self._end} bytes are in "
            f"{copy.name}, and the journal continues after the line before it"
        )

    def _write(self, lines: bytes) -> None:
        count = 0
        try:
            files.before("write", self.path)
            while count < len(lines):
                count += os.write(self._fd, lines[count:])
        except OSError as error:
            failure = self._storage_error(error, "; the lines were not stored")
            try:
                # If the file is longer, a dashboard has written after the incomplete line, which is then damaged.
                if count and os.fstat(self._fd).st_size == self._end + count:
                    os.ftruncate(self._fd, self._end)
            except OSError as second:
                failure.add_note(f"its end has {count} bytes of a torn line, which the next writer cuts off: {second}")
            raise failure from error
        with self._convert_os_errors():  # if this fails, the complete lines stay: other processes may have read them
            files.before("fsync", self.path)
            os.fsync(self._fd)

    @contextmanager
    def _append_lock(self) -> Iterator[None]:
        """Hold the lock for appending, so that no other process of Ratchet appends."""
        with self._convert_os_errors():
            lock = _make_append_lock(self.path).acquire(APPEND_WAIT_S)
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _convert_os_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self._storage_error(error) from error

    def _storage_error(self, error: OSError, state: str = "") -> StorageError:
        cause = error.strerror or error
        return StorageError(f"{self.path}: {cause}{state}; free space or fix the disk, then run the same command again")


def repair(path: Path) -> str:
    """Cut a journal at its first damaged line, and write the rest to another file.

    No worker should run. A worker that still runs detects that its file was replaced.

    Returns:
        A description of the result for the user.

    Raises:
        LockHeldError: another process holds the storage.
        DamagedFileError: a newer Ratchet wrote a line.
        StorageError: the disk fails or is full.
    """
    if not path.exists():
        return f"{path}: no such file; nothing to repair"
    with make_study_lock(path).acquire(), _make_append_lock(path).acquire():
        try:
            data = path.read_bytes()
            scan = _scan_lines(data, 0)
            kept = len(scan.logs)
            if scan.newer:
                _raise_scan_error(path, kept + 1, scan)
            if scan.end == len(data):
                return f"{path}: {kept} lines, none damaged"
            copy = _save_removed_bytes(path, "damaged", data[scan.end :])
            files.write_atomic(path, data[: scan.end])
        except OSError as error:
            raise StorageError(f"{path}: not repaired: {error.strerror or error}; nothing was changed") from error
    lost = data[scan.end :].count(b"\n")
    problem = f"line {kept + 1} is damaged ({scan.damage})" if scan.damage else "the last line is torn"
    return (
        f"{path}: {problem}; lines kept: {kept}, set aside in {copy.name}: {lost or 1}. Trials of the latter are "
        "proposed again, and completed runs are reused, so that nothing is trained twice"
    )
