"""What the operating system is asked for beyond what Python offers: free space, durability, an exchange of names."""

import ctypes
import errno
import os
import stat
from pathlib import Path

RESERVE_BYTES = 16 * 2**20
"""Left free on a disk, for journals and logs."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def fsync(path: Path, flags: int = os.O_RDONLY) -> None:
    """Make durable what was written to a file, or with O_DIRECTORY the names in a directory."""
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raise OSError (ENOSPC) unless the file system of `directory` has room for so much and RESERVE_BYTES."""
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    if room.f_blocks and free < needed_bytes + RESERVE_BYTES:  # some network file systems tell no size at all
        text = f"{needed_bytes:,} bytes are to be written and {RESERVE_BYTES:,} to stay free, but only {free:,} are"
        raise OSError(errno.ENOSPC, text, str(directory))


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one operation (renameat2 with RENAME_EXCHANGE, Linux 3.15).

    Returns False, having done nothing, where kernel, C library or file system cannot. Raises OSError otherwise.
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


def let_read(path: Path, like: Path) -> None:
    """Let those read a file who may read the directory `like`: safetensors makes files for their owner alone."""
    mode = path.stat().st_mode
    if (wanted := mode | like.stat().st_mode & 0o444) != mode:
        path.chmod(stat.S_IMODE(wanted))


def point(link: Path, target: str, partial: Path) -> None:
    """Let a symbolic link lead to `target`, in one operation: readers find the old target or the new one.

    Args:
        link: made, or replaced if it is a link already.
        target: as it is to be written into the link: relative ones are relative to its folder.
        partial: name in the same folder under which the new link is made.
    """
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    try:
        partial.replace(link)
    except BaseException:
        partial.unlink()
        raise
