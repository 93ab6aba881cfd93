"""Writes HTML pages, and overwrites only files that are pages of ratchet."""

from pathlib import Path

from ratchet.errors import SettingsError
from ratchet.storage import disk, files, html

ENDING = ".html"
OPENING = html.document("", "").partition("style-src")[0].encode()
"""First bytes of every page, whatever its kind or version."""


def require_writable_target(target: Path) -> None:
    """Check that a page can be written to this path, before expensive work starts.

    Raises:
        SettingsError: The path is a folder or a file that is not a page, its name does not end in .html, or the folder
            cannot be created.
    """
    message = f"--output {target}: cannot be written"
    if target.suffix.lower() != ENDING:
        raise SettingsError(f"{message} (the name of a page must end in {ENDING}); choose such a name")
    disk.require_writable(target, "--output")
    if target.is_file() and not _is_page(target):
        raise SettingsError(
            f"{message} (the existing file is not a page of `ratchet`); choose another name, or remove the file"
        )


def write(target: Path, text: str) -> None:
    """Write a page atomically. Creates its folder.

    Raises:
        SettingsError: The path is not writable, see `require_writable_target`.
    """
    require_writable_target(target)
    try:
        files.make_directory(target.parent)
        files.write_atomic(target, text)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise SettingsError(
            f"--output {target}: cannot be written ({error.filename or target}: {error.strerror}); choose a file in a "
            "folder that exists or can be created"
        ) from None


def _is_page(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(OPENING)) == OPENING
