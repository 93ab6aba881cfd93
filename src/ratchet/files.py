"""Atomic files, sealed directories and locks: the only code that renames or fsyncs.

A sealed directory is complete or absent: it is written aside, every file and folder is fsynced, the
manifest (SHA-256 and size of each file) is written last, and one rename publishes it. `verify` reads it all
back. The order of operations follows T. S. Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014).
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ratchet import digest
from ratchet.errors import BusyError, DamagedError

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
PARTIAL = ".partial-"
LOCK_POLL_S = 0.05


@dataclass(frozen=True)
class Manifest:
    """What a sealed directory holds: `files` maps relative names to (SHA-256, size in bytes)."""

    kind: str
    files: dict[str, tuple[str, int]]

    @property
    def digest(self) -> str:
        """Fingerprint of names and contents."""
        return digest.of_files({name: sha for name, (sha, _) in self.files.items()})

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of the files."""
        return sum(size for _, size in self.files.values())


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`: after a crash either the old or the new bytes are there, never a mixture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f"{PARTIAL}{path.name}-{os.getpid()}"
    try:
        with partial.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write JSON for people and machines: sorted, indented, NaN refused, atomic."""
    write_atomic(path, json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _walk(root: Path) -> list[str]:
    own = root / MANIFEST  # those of sealed directories inside are ordinary files of this one
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and p != own)


@contextmanager
def sealed_directory(target: Path, kind: str) -> Iterator[Path]:
    """Yield a scratch directory; on a clean exit seal it and publish it as `target`, on an error leave no trace.

    An existing `target` is replaced: readers see the old one, for an instant none, or the new one.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_orphans(target)
    scratch = target.parent / f"{PARTIAL}{target.name}-{os.getpid()}"
    scratch.mkdir()
    try:
        yield scratch
        seal(scratch, kind)
        publish(scratch, target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _remove_orphans(target: Path) -> None:
    """Delete what processes that were killed left of earlier attempts at `target`."""
    for path in target.parent.glob(f"{PARTIAL}{target.name}-*"):
        pid = path.name.rsplit("-", 1)[-1]
        if pid == str(os.getpid()) or not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def seal(directory: Path, kind: str) -> Manifest:
    """Fsync every file and folder below `directory`, then write the manifest; returns it."""
    entries: dict[str, tuple[str, int]] = {}
    for name in _walk(directory):
        path = directory / name
        _fsync_file(path)
        entries[name] = (digest.of_file(path), path.stat().st_size)
    for folder in sorted((p for p in directory.rglob("*") if p.is_dir()), reverse=True):
        fsync_directory(folder)
    listed = {name: {"sha256": sha, "bytes": size} for name, (sha, size) in entries.items()}
    write_json(directory / MANIFEST, {"format": MANIFEST_FORMAT, "kind": kind, "files": listed})
    return Manifest(kind, entries)


def publish(scratch: Path, target: Path) -> None:
    """Rename a sealed scratch directory to its final name and make the name durable."""
    if target.exists():
        old = target.parent / f"{PARTIAL}{target.name}-old-{os.getpid()}"
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        scratch.rename(target)
        shutil.rmtree(old)
    else:
        scratch.rename(target)
    fsync_directory(target.parent)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a sealed directory, without checking the files. Raises DamagedError when there is none."""
    path = directory / MANIFEST
    try:
        raw = json.loads(path.read_bytes())
        found = raw["format"]
        if found != MANIFEST_FORMAT:
            raise DamagedError(
                f"{path}: manifest format {found}, this version reads {MANIFEST_FORMAT}; use the version that wrote it"
            )
        entries = {name: (str(e["sha256"]), int(e["bytes"])) for name, e in raw["files"].items()}
        return Manifest(str(raw["kind"]), entries)
    except FileNotFoundError:
        raise DamagedError(f"{directory}: not sealed (no {MANIFEST}); it was never finished, make it again") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path}: unreadable manifest ({error}); make the directory again") from None


def verify(directory: Path, kind: str | None = None) -> Manifest:
    """Check every byte of a sealed directory against its manifest.

    Raises:
        DamagedError: naming the first file that is missing, of another size or of another content, or a file
            that the manifest does not name.
    """
    manifest = read_manifest(directory)
    if kind is not None and manifest.kind != kind:
        raise DamagedError(f"{directory}: sealed as {manifest.kind!r}, expected {kind!r}")
    extra = sorted(set(_walk(directory)) - set(manifest.files))
    if extra:
        raise DamagedError(f"{directory / extra[0]}: not named in the manifest; remove it or make the directory again")
    for name, (sha, size) in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise DamagedError(f"{path}: missing although the manifest names it")
        if path.stat().st_size != size:
            raise DamagedError(f"{path}: {path.stat().st_size} bytes, the manifest says {size}")
        if digest.of_file(path) != sha:
            raise DamagedError(f"{path}: content differs from the manifest (SHA-256)")
    return manifest


def link_or_copy(source: Path, target: Path) -> None:
    """Put sealed (never again written) files elsewhere without using space twice; copy across file systems."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # copying over it would write into the sealed file that it may be a link to
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def link_tree(source: Path, target: Path) -> None:
    """`link_or_copy` for every file below `source`, its manifest included."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            link_or_copy(path, target / path.relative_to(source))


def remove_sealed(directory: Path) -> None:
    """Remove a sealed directory: renamed aside first, so that a crash never leaves half of it under its name."""
    doomed = directory.parent / f"{PARTIAL}{directory.name}-doomed-{os.getpid()}"
    directory.rename(doomed)
    shutil.rmtree(doomed)


def remove_partials(directory: Path) -> None:
    """Delete what writers that died left behind. Only for whoever holds the directory's lock."""
    for path in directory.glob(f"{PARTIAL}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Lock:
    """An exclusive advisory lock (flock) that dies with its holders: a stale lock file locks nothing.

    The descriptor may be inherited by a child, which then holds the lock too until it ends.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        self.what = what
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """The open descriptor, to pass to a child process."""
        if self._fd is None:
            raise RuntimeError(f"lock {self.path} is not held")
        return self._fd

    def acquire(self, wait_s: float = 0.0) -> "Lock":
        """Take the lock, trying for `wait_s` seconds. Raises BusyError naming the holder's process id."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_s
        while not _try_lock(fd):
            if time.monotonic() >= deadline:
                holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise BusyError(
                    f"{self.what} is in use by process {holder}; wait for it, or stop it (kill {holder}) and repeat"
                )
            time.sleep(LOCK_POLL_S)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd
        return self

    def held_elsewhere(self) -> bool:
        """Whether some process holds the lock now (asked without taking it)."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        finally:
            os.close(fd)

    def release(self) -> None:
        """Give the lock back (children that inherited it keep it)."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "Lock":
        return self if self._fd is not None else self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
