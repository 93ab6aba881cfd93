"""Files on disk: atomic files, sealed directories, disk operations that Python lacks, and file locks.

Use this module for every file that must survive a crash. A sealed directory is complete or absent: it is written under
a temporary name, every file and folder is fsynced, the manifest (SHA-256 and size of each file) is written last, and
one rename publishes the directory. `verify_sealed` checks all of its contents. The order follows T. S. Pillai et al.,
"All File Systems Are Not Created Equal" (OSDI 2014): a file is not renamed before its contents are durable, and an old
file is not removed before the rename that replaces it is durable.

Fault injection replaces `before`, which is called before each operation that changes a disk. The replacement may raise
OSError, wait, or kill the process (runs/fault_injection/injection.py).
"""

import ctypes
import errno
import fcntl
import glob
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ratchet.errors import DamagedFileError, LockHeldError, SettingsError
from ratchet.storage import digests
from ratchet.storage.progress import count_bytes

COPY_BLOCK_BYTES = 4 * 2**20
"""Number of bytes that are copied at once."""
RESERVE_BYTES = 16 * 2**20
"""Number of bytes that stay free on a disk, for journals and logs."""

PARTIAL = ".partial-"
"""Prefix of files that are being written or removed; readers ignore them."""

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
FOREIGN = "registered_model_meta"
"""File that MLflow adds to the folder of a model version. The manifest does not list this file."""
DISPLACED = ".displaced-"
"""Prefix of a directory that is being replaced, on file systems that cannot exchange two names atomically."""

Operation = Literal["mkdir", "write", "fsync", "link", "rename", "unlink"]
Entry = tuple[str, int]
"""SHA-256 and size in bytes of a file."""
Block = Iterable[bytes | memoryview]
"""Pieces of data that one call writes."""

LOCK_POLL_S = 0.05

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def _do_nothing(*arguments: object) -> None:
    """Do nothing; the default hook."""


before: Callable[[Operation, Path], None] = _do_nothing
"""Hook that is called with the next operation and its path (for a rename, the new name). Tests replace it."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a sealed directory: `files` maps relative names to (SHA-256, size in bytes)."""

    kind: str
    files: dict[str, Entry]

    @property
    def digest(self) -> str:
        """Digest of the names and contents of the files."""
        return digests.hash_files(self.file_digests)

    @property
    def file_digests(self) -> dict[str, str]:
        """SHA-256 of each file by name."""
        return {name: sha for name, (sha, _) in self.files.items()}

    @property
    def size_bytes(self) -> int:
        """Total size of the files."""
        return sum(size for _, size in self.files.values())


def fsync_directory(path: Path) -> None:
    """Sync the names in a directory to the disk."""
    before("fsync", path)
    fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def make_directory(path: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        before("mkdir", folder)
        folder.mkdir(exist_ok=True)
        fsync_directory(folder.parent)


def _sync(_path: Path, descriptor: int) -> None:
    os.fsync(descriptor)


@contextmanager
def sync_in_background() -> Iterator[Callable[[Path, int], None]]:
    """Yield a function for `write_blocks` that fsyncs a file in a thread while the caller writes the next file.

    All files are durable at the end. At most one file waits, so that the disk does not fall behind.

    Raises:
        OSError: an fsync failed; raised by the next call or at the end.
    """
    from concurrent.futures import Future, ThreadPoolExecutor  # 20 ms, which most commands do not need

    def sync_and_close(path: Path, descriptor: int) -> None:
        try:
            with name_file_in_errors(path):
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    with ThreadPoolExecutor(1, "fsync") as pool:
        pending: list[Future[None]] = []

        def sync(path: Path, descriptor: int) -> None:
            while pending:
                pending.pop().result()
            pending.append(pool.submit(sync_and_close, path, os.dup(descriptor)))

        yield sync
        while pending:
            pending.pop().result()


def write_blocks(
    path: Path,
    blocks: Iterable[Block],
    on_block: Callable[[], None] = _do_nothing,
    sync: Callable[[Path, int], None] = _sync,
) -> None:
    """Write a file and fsync it; `on_block` is called after each block. The caller makes its name durable when it seals
    or renames it.

    An existing file is overwritten in place, so it must not be sealed.

    Args:
        sync: gets the path and an open descriptor of the written file, and makes its contents durable.
    """
    before("write", path)
    with name_file_in_errors(path), path.open("wb") as stream:
        for block in blocks:
            before("write", path)
            stream.writelines(block)
            stream.flush()
            on_block()
        before("fsync", path)
        sync(path, stream.fileno())


def read_blocks(path: Path, on_bytes: Callable[[int], None]) -> Iterator[list[bytes]]:
    """Read a file in blocks, for a copy by `write_blocks`; `on_bytes` gets the size of each block that was written."""
    with path.open("rb") as stream:
        while block := stream.read(COPY_BLOCK_BYTES):
            yield [block]
            on_bytes(len(block))


def _remove_tree(root: Path) -> None:
    """Remove a file, or a folder with its contents. Links are removed; their targets stay."""
    if not root.is_dir() or root.is_symlink():
        before("unlink", root)
        root.unlink()
        return
    for path in list(root.iterdir()):
        _remove_tree(path)
    before("unlink", root)
    root.rmdir()


def _clear(path: Path, error: BaseException) -> None:
    """Remove the partial output of a failed writer; if that fails too, add a note to the error."""
    try:
        if os.path.lexists(path):
            _remove_tree(path)
    except OSError as second:
        error.add_note(f"{path} could not be removed; the next start removes it: {second}")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file atomically: after a crash it has either the old or the new content."""
    data = content.encode() if isinstance(content, str) else content
    make_directory(path.parent)
    partial = path.parent / f"{PARTIAL}{path.name}-{os.getpid()}"
    try:
        write_blocks(partial, [[data]])
        before("rename", path)
        partial.replace(path)
    except BaseException as error:
        _clear(partial, error)
        raise
    fsync_directory(path.parent)


def json_bytes(value: Any) -> bytes:
    """Format a value as indented JSON with sorted keys and without NaN; equal values give equal bytes."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object without NaN. Raises DamagedFileError for other content, and if the file cannot be read."""
    try:
        value = json.loads(path.read_bytes(), parse_constant=reject_constant)
    except OSError as error:
        raise DamagedFileError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: invalid JSON ({error})") from None
    if not isinstance(value, dict):
        raise DamagedFileError(f"{path}: found {type(value).__name__}; expected a JSON object")
    return value


def reject_constant(constant: str) -> Any:
    """Refuse NaN and Infinity, which Python's JSON reader accepts and RFC 8259 does not: a `parse_constant`."""
    raise ValueError(f"{constant} is not valid JSON")


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON (`json_bytes`), atomically."""
    write_atomic(path, json_bytes(value))


def _list_files(root: Path) -> list[str]:
    ignored = (root / MANIFEST, root / FOREIGN)  # manifests in subfolders are listed
    paths = (path for path in root.rglob("*") if path.is_file() and path not in ignored)
    return sorted(path.relative_to(root).as_posix() for path in paths)


@contextmanager
def sealed_directory(target: Path, kind: str, known: Mapping[str, Entry] | None = None) -> Iterator[Path]:
    """Yield a scratch directory. On success it is sealed and published as `target`; on an error it is removed.

    An existing `target` is replaced: readers see the old directory or the new one (on file systems that cannot exchange
    two names, there is briefly none; see `publish_directory`). For `kind` and `known` see `seal_directory`; the caller
    may fill `known` inside the context.
    """
    make_directory(target.parent)
    for prefix in (PARTIAL, DISPLACED):  # leftovers of killed processes that wrote `target`
        for path in target.parent.glob(f"{prefix}{glob.escape(target.name)}-*"):
            pid = path.name.removeprefix(f"{prefix}{target.name}-").removeprefix("doomed-")
            if pid.isdigit() and (pid == str(os.getpid()) or not Path(f"/proc/{pid}").exists()):
                _remove_or_restore(path)
    scratch = target.parent / f"{PARTIAL}{target.name}-{os.getpid()}"
    try:
        before("mkdir", scratch)
        scratch.mkdir()
        yield scratch
        seal_directory(scratch, kind, known)
        publish_directory(scratch, target)
    except BaseException as error:
        _clear(scratch, error)
        raise


def seal_directory(directory: Path, kind: str, known: Mapping[str, Entry] | None = None) -> Manifest:
    """Fsync every file and folder below `directory`, then write and return the manifest.

    `kind` is the kind of the contents, for `verify_sealed`. `known` has SHA-256 and size, by name, of files that are
    already durable and need not be read again, such as links to sealed files.
    """
    entries: dict[str, Entry] = {}
    names = _list_files(directory)
    new_bytes = sum((directory / name).stat().st_size for name in names if known is None or name not in known)
    with count_bytes(f"{kind} sealed", new_bytes) as add_bytes:
        for name in names:
            path = directory / name
            if known is not None and name in known:
                entries[name] = known[name]
            else:
                before("fsync", path)
                grant_read(path, like=directory)
                fsync(path)
                entries[name] = (digests.hash_file(path, add_bytes), path.stat().st_size)
    for folder in sorted((path for path in directory.rglob("*") if path.is_dir()), reverse=True):
        fsync_directory(folder)
    listed = {name: {"sha256": sha, "bytes": size} for name, (sha, size) in entries.items()}
    write_json(directory / MANIFEST, {"format": MANIFEST_FORMAT, "kind": kind, "files": listed})
    return Manifest(kind, entries)


def publish_directory(scratch: Path, target: Path) -> None:
    """Rename a sealed scratch directory to its final name, durably. An existing directory is replaced.

    If the file system supports it, both names are exchanged atomically (`exchange_names`). Otherwise the old directory
    is renamed first; after a crash in between, the next writer (or `remove_partials`) restores it.
    """
    if not os.path.lexists(target):
        before("rename", target)
        scratch.rename(target)
        fsync_directory(target.parent)
        return
    before("rename", target)
    old = scratch
    if not exchange_names(scratch, target):
        old = target.parent / f"{DISPLACED}{target.name}-{os.getpid()}"
        target.rename(old)
        try:
            before("rename", target)
            scratch.rename(target)
        except BaseException:
            old.rename(target)
            raise
    fsync_directory(target.parent)  # otherwise a crash could undo the exchange, but not the removal
    _remove_tree(old)


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of a sealed directory, without checking its files. Raises DamagedFileError."""
    path = directory / MANIFEST
    try:
        raw = json.loads(content := path.read_bytes())
        if (number := raw["format"]) != MANIFEST_FORMAT:
            raise DamagedFileError(
                f"{path}: found manifest format {number}; expected {MANIFEST_FORMAT}; use the version that wrote it"
            )
        if content != json_bytes(raw):
            raise ValueError("its bytes were changed")
        entries = {name: (str(e["sha256"]), int(e["bytes"])) for name, e in raw["files"].items()}
        return Manifest(str(raw["kind"]), entries)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedFileError(
            f"{directory}: not sealed (no {MANIFEST}), so it was never finished; create it again"
        ) from None
    except OSError as error:
        raise DamagedFileError(f"{path}: cannot be read ({error.strerror}); create the directory again") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFileError(f"{path}: invalid manifest ({error}); create the directory again") from None


def verify_sealed(directory: Path, kind: str | None = None) -> Manifest:
    """Check all contents of a sealed directory against its manifest.

    Raises:
        DamagedFileError: a file is missing, unreadable, changed, or not in the manifest. The message names the first
            such file.
    """
    manifest = read_manifest(directory)
    if kind is not None and manifest.kind != kind:
        raise DamagedFileError(f"{directory}: found a sealed {manifest.kind!r}; expected {kind!r}")
    if extra := sorted(set(_list_files(directory)) - set(manifest.files)):
        names = str(directory / extra[0]) + (f" and {len(extra) - 1} more" if extra[1:] else "")
        cause = " (a cache file of `datasets.map`)" if Path(extra[0]).match("cache-*.arrow") else ""
        raise DamagedFileError(f"{names}: not in the manifest{cause}; remove it, or create the directory again")
    with count_bytes(f"{manifest.kind} checked", manifest.size_bytes) as add_bytes:
        for name, (sha, size) in manifest.files.items():
            _verify_file(directory / name, sha, size, add_bytes)
    return manifest


def _verify_file(path: Path, sha: str, size: int, on_bytes: Callable[[int], None]) -> None:
    """Check a file against its entry in the manifest. Raises DamagedFileError."""
    try:
        if not path.is_file():
            raise DamagedFileError(f"{path}: missing, but listed in the manifest")
        if path.stat().st_size != size:
            raise DamagedFileError(f"{path}: found {path.stat().st_size} bytes; expected {size} (manifest)")
        if digests.hash_file(path, on_bytes) != sha:
            raise DamagedFileError(f"{path}: content differs from the manifest (SHA-256)")
    except OSError as error:  # for example a bad sector
        raise DamagedFileError(f"{path}: cannot be read ({error.strerror})") from None


def link_file(source: Path, target: Path) -> bool:
    """Create a hard link to a sealed file. Return False if the file system does not support it.

    The caller must have checked that the source is undamaged.
    """
    before("link", target)
    try:
        os.link(source, target)
    except OSError:  # another file system, no hard links, too many links; any other error recurs in the caller's copy
        return False
    return True


def link_or_copy(source: Path, target: Path) -> None:
    """Create a hard link to a sealed file, or a durable copy if links are not possible."""
    make_directory(target.parent)
    if os.path.lexists(target):
        _remove_tree(target)  # it may be a link to a sealed file, which a copy would overwrite
    if link_file(source, target):
        return
    before("write", target)
    shutil.copyfile(source, target)
    before("fsync", target)
    fsync(target)


def link_tree(source: Path, target: Path) -> None:
    """Link or copy every file below `source`, its manifest included."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            link_or_copy(path, target / path.relative_to(source))


def remove_sealed(directory: Path) -> None:
    """Remove a sealed directory. The directory is renamed first, so a crash never leaves a part of it under its
    name."""
    doomed = directory.parent / f"{PARTIAL}{directory.name}-doomed-{os.getpid()}"
    if doomed.exists():
        _remove_tree(doomed)
    before("rename", doomed)
    directory.rename(doomed)
    fsync_directory(directory.parent)
    _remove_tree(doomed)


def remove_partials(directory: Path) -> None:
    """Remove or restore the leftovers of killed writers. The caller must hold the lock of the directory."""
    for prefix in (PARTIAL, DISPLACED):
        for path in list(directory.glob(f"{prefix}*")):
            _remove_or_restore(path)


def _remove_or_restore(leftover: Path) -> None:
    """Restore a displaced directory if its replacement is missing; remove any other leftover."""
    if leftover.name.startswith(DISPLACED):
        target = leftover.parent / leftover.name.removeprefix(DISPLACED).rsplit("-", 1)[0]
        if not target.exists():
            before("rename", target)
            leftover.rename(target)
            fsync_directory(leftover.parent)
            return
    _remove_tree(leftover)


def fsync(path: Path, flags: int = os.O_RDONLY) -> None:
    """Sync a file to the disk; with O_DIRECTORY, sync the names in a directory."""
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file name to an OSError that has none, such as the error of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raise OSError (ENOSPC) unless the file system of `directory` has `needed_bytes` and RESERVE_BYTES free."""
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if stats.f_blocks and free < needed_bytes + RESERVE_BYTES:  # some network file systems report no size
        text = f"needs {needed_bytes:,} bytes and {RESERVE_BYTES:,} more in reserve, but only {free:,} are free"
        raise OSError(errno.ENOSPC, text, str(directory))


def require_writable(target: Path, option: str) -> None:
    """Check that a file can be created or replaced, in a folder that need not exist. Leaves no file or folder behind.

    The message names the command-line option.

    Raises:
        SettingsError: the target is a directory or a broken link, its folder cannot be created or written, or its name
            (with the prefix for partial files) is too long.
    """
    try:
        if target.is_symlink() and not target.exists():
            problem = f"found a broken link to {target.readlink()}; remove it"
        elif target.is_dir():
            problem = "found a directory; name a file in it"
        elif target.exists() and not target.is_file():
            problem = "expected a regular file; choose another name"
        else:
            created: list[Path] = []
            # The name is as long as any partial name in this module.
            probe = target.with_name(f"{PARTIAL}{target.name}-{os.getpid():07d}")
            try:
                for folder in reversed([parent for parent in target.parents if not parent.is_dir()]):
                    folder.mkdir()
                    created.append(folder)
                os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
                probe.unlink()
                return
            finally:
                for folder in reversed(created):
                    with suppress(OSError):  # another process has created a file in it
                        folder.rmdir()
    except OSError as error:
        where = f"{error.filename}: " if error.filename in map(str, target.parents) else ""
        problem = f"cannot be created ({where}{error.strerror}); choose another name"
    raise SettingsError(f"{option} {target}: {problem}")


def exchange_names(a: Path, b: Path) -> bool:
    """Exchange two names atomically (renameat2 with RENAME_EXCHANGE, Linux 3.15).

    Returns False without a change if kernel, C library or file system do not support it. Raises OSError for other
    failures.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(b))


def grant_read(path: Path, like: Path) -> None:
    """Give a file the read permissions of the directory `like`: safetensors creates files for their owner only."""
    mode = path.stat().st_mode
    if (new_mode := mode | like.stat().st_mode & 0o444) != mode:
        path.chmod(stat.S_IMODE(new_mode))


def point_symlink(link: Path, target: str, partial: Path) -> None:
    """Create or replace a symbolic link atomically: readers find the old target or the new one.

    `target` is relative to the folder of the link; `partial` is a temporary name in the same folder.
    """
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    try:
        partial.replace(link)
    except BaseException:
        partial.unlink()
        raise


class FileLock:
    """An exclusive advisory lock (flock) on a file; `subject` names the protected object in messages.

    The kernel releases the lock when its holder ends, so a leftover lock file has no effect. A child process that
    inherits the descriptor holds the lock too, until it ends.
    """

    def __init__(self, path: Path, subject: str) -> None:
        self.path = path
        self.subject = subject
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        """Descriptor to pass to a child process."""
        if self._fd is None:
            raise RuntimeError(f"lock {self.path} is not held")
        return self._fd

    def acquire(self, wait_s: float = 0.0) -> "FileLock":
        """Acquire the lock; wait up to `wait_s` seconds. Raises LockHeldError with the process id of the holder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # A process that asks `is_held` has a shared lock for a moment, so one refusal is not enough.
        deadline = time.monotonic() + max(wait_s, 2 * LOCK_POLL_S)
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(LOCK_POLL_S)
                    continue
            holder = os.pread(fd, 64, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise LockHeldError(
                f"{self.subject} is in use by process {holder}; wait for it, or stop it (kill {holder}) and repeat"
            )
        self._fd = fd
        with suppress(OSError):  # the content is only for the message above; a full disk must not prevent locking
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return self

    def is_held(self) -> bool:
        """Return whether a process holds the lock. The exclusive lock is not acquired; a shared lock is, for a
        moment."""
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
        """Release the lock in this process. Child processes that inherited the lock keep it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "FileLock":
        return self if self._fd is not None else self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
