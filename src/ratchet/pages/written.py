"""Puts a page where somebody wants it."""

from pathlib import Path

from ratchet import files
from ratchet.errors import SettingsError


def write(target: Path, text: str) -> None:
    """Write a page, complete or not at all, making the folder that it lies in.

    Raises:
        SettingsError: it cannot lie there: a folder is in its place, or a file in that of its folder.
    """
    try:
        files.make_directory(target.parent)
        files.write_atomic(target, text)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise SettingsError(
            f"--output {target}: cannot be written ({error.filename or target}: {error.strerror}); name a file in a "
            "folder that is there or can be made"
        ) from None
