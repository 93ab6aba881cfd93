"""Operations on disks beyond Python's: free space, fsync, atomic exchange of two names, checks of output paths."""

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ratchet.errors import SettingsError

RESERVE_BYTES = 16 * 2**20
"""Space to leave free on a disk, for journals and logs."""

PARTIAL = ".partial-"
"""Prefix of files that are being written or removed; readers ignore them."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def fsync(path: Path, flags: int = os.O_RDONLY) -> None:
    """Sync a file, or with O_DIRECTORY the names in a directory, to the disk."""
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file name to an OSError that has none, such as that of a write to a full disk."""
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
    """Check that a file can be created, in a folder that may not exist yet. Leaves nothing behind.

    Args:
        target: the file. A regular file of that name may be replaced.
        option: the command-line option that names it, for the message.

    Raises:
        SettingsError: it is a directory or a broken link, its folder cannot be created or written, or its name (with
            the prefix for partial files) is too long.
    """
    try:
        if target.is_symlink() and not target.exists():
            problem = f"found a broken link to {target.readlink()}; remove it"
        elif target.is_dir():
            problem = "found a directory; name a file in it"
        elif target.exists() and not target.is_file():
            problem = "expected a regular file; choose another name"
        else:
            _create_and_remove(target)
            return
    except OSError as error:
        folder = f"{error.filename}: " if error.filename in map(str, target.parents) else ""
        problem = f"cannot be created ({folder}{error.strerror}); choose another name"
    raise SettingsError(f"{option} {target}: {problem}")


def _create_and_remove(target: Path) -> None:
    """Create an empty file next to the target, with missing folders, and remove both. Raises OSError."""
    created: list[Path] = []
    probe = target.with_name(f"{PARTIAL}{target.name}-{os.getpid():07d}")  # as long as any partial name of `files`
    try:
        for folder in reversed([folder for folder in target.parents if not folder.is_dir()]):
            folder.mkdir()
            created.append(folder)
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
        probe.unlink()
    finally:
        for folder in reversed(created):
            with suppress(OSError):  # another process has created a file in it
                folder.rmdir()


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
    """Point a symbolic link to `target` atomically: readers find the old target or the new one.

    Args:
        link: the link, created or replaced.
        target: the text of the link; relative to its folder.
        partial: temporary name in the same folder.
    """
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    try:
        partial.replace(link)
    except BaseException:
        partial.unlink()
        raise
