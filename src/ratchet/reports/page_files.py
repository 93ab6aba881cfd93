"""Puts a page where somebody wants it, and takes the place of nothing but pages."""

from pathlib import Path

from ratchet.errors import SettingsError
from ratchet.storage import disk, files, html

ENDING = ".html"
OPENING = html.document("", "").partition("style-src")[0].encode()
"""How every page begins, whatever its kind and whichever version wrote it."""


def require_writable_target(target: Path) -> None:
    """See that a page may be written there, before time is spent on it.

    Raises:
        SettingsError: a folder is there, or a file that is no page; the name does not end in .html; or nothing can be
            made there.
    """
    said = f"--output {target}: cannot be written"
    if target.suffix.lower() != ENDING:
        raise SettingsError(f"{said} (a page is a file whose name ends in {ENDING}); name such a file")
    disk.require_writable(target, "--output")
    if target.is_file() and not _is_page(target):
        raise SettingsError(f"{said} (the file that is there is no page of `ratchet`); name another, or remove it")


def write(target: Path, text: str) -> None:
    """Write a page, complete or not at all, making the folder that it lies in.

    Raises:
        SettingsError: it cannot lie there, see `require_writable_target`.
    """
    require_writable_target(target)
    try:
        files.make_directory(target.parent)
        files.write_atomic(target, text)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise SettingsError(
            f"--output {target}: cannot be written ({error.filename or target}: {error.strerror}); name a file in a "
            "folder that is there or can be made"
        ) from None


def _is_page(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(OPENING)) == OPENING
