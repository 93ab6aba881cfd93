"""What the operating system is asked for beyond what Python offers: free space, durability, an exchange of names.

And whether a file can be made where it is wanted, before the work that it is to hold.
"""

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ratchet.errors import SettingsError

RESERVE_BYTES = 16 * 2**20
"""Left free on a disk, for journals and logs."""

PARTIAL = ".partial-"
"""How names of what is being written, or removed, begin: nobody may read it."""

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_CANNOT_EXCHANGE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP}


def fsync(path: Path, flags: int = os.O_RDONLY) -> None:
    """Make durable what was written to a file, or with O_DIRECTORY the names in a directory."""
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Let an OSError say which file it is about: that of a write, on a full disk say, names none by itself."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def require_space(directory: Path, needed_bytes: int) -> None:
    """Raise OSError (ENOSPC) unless the file system of `directory` has room for so much and RESERVE_BYTES."""
    room = os.statvfs(directory)
    free = room.f_bavail * room.f_frsize
    if room.f_blocks and free < needed_bytes + RESERVE_BYTES:  # some network file systems tell no size at all
        text = f"{needed_bytes:,} bytes are to be written and {RESERVE_BYTES:,} to stay free, but only {free:,} are"
        raise OSError(errno.ENOSPC, text, str(directory))


def require_writable(target: Path, said: str) -> None:
    """Try whether a file can be made under a name, in a folder that may be missing too; leaves nothing behind.

    Args:
        target: the file that is wanted; a regular one that is there may be replaced.
        said: by which option it was named, for the message.

    Raises:
        SettingsError: it is a directory, or a link that leads nowhere; its folder cannot be made or takes no file; its
            name, with what is added to it while it is written, is too long.
    """
    try:
        if target.is_symlink() and not target.exists():
            problem = f"is a link that leads to nothing ({target.readlink()}); remove it"
        elif target.is_dir():
            problem = "is a directory; name a file in it"
        elif target.exists() and not target.is_file():
            problem = "is no regular file; name one"
        else:
            _create_and_remove(target)
            return
    except OSError as error:
        folder = f"{error.filename}: " if error.filename in map(str, target.parents) else ""
        problem = f"no file can be made there ({folder}{error.strerror}); name another"
    raise SettingsError(f"{said} {target}: {problem}")


def _create_and_remove(target: Path) -> None:
    """Make an empty file beside the target, with the folders that are missing, and remove them. Raises OSError."""
    made: list[Path] = []
    trial = target.with_name(f"{PARTIAL}{target.name}-{os.getpid():07d}")  # what `files` writes to, of any process
    try:
        for folder in reversed([folder for folder in target.parents if not folder.is_dir()]):
            folder.mkdir()
            made.append(folder)
        os.close(os.open(trial, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
        trial.unlink()
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # somebody else has put something there meanwhile
                folder.rmdir()


def exchange_names(a: Path, b: Path) -> bool:
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


def grant_read(path: Path, like: Path) -> None:
    """Let those read a file who may read the directory `like`: safetensors makes files for their owner alone."""
    mode = path.stat().st_mode
    if (wanted := mode | like.stat().st_mode & 0o444) != mode:
        path.chmod(stat.S_IMODE(wanted))


def point_symlink(link: Path, target: str, partial: Path) -> None:
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
