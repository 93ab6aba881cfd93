"""Text on HTML pages, and the files of pages. The package reports renders the pages.

An existing file is overwritten only if it is a page of Ratchet.
"""

import re
from pathlib import Path

from ratchet.errors import SettingsError
from ratchet.storage import files

NONE = "\u2013"
"""Text of an empty cell."""

ENDING = ".html"

# Characters that are invisible, or change the reading direction of the rest of the page. Joiners (200c, 200d) change
# the look of emoji and of letters of some scripts, and are invisible next to other characters.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164"
    r"\ud800-\udfff\ufdd0-\ufdef\ufeff\uffa0\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
    r"|(?<![\u0590-\u1fff\u2190-\U0010ffff])[\u200c\u200d]|[\u200c\u200d](?![\u0590-\u1fff\u2190-\U0010ffff])"
)


def escape_invisible(text: str) -> str:
    """Replace characters that are invisible or change the reading direction by \\uXXXX, above 0xffff by \\UXXXXXXXX."""

    def escape(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"

    return _INVISIBLE.sub(escape, text.replace("\r\n", "\n"))


def format_percentage(part: float, whole: float) -> str:
    """Format a share as a percentage. Only exact values are shown as 0 % and 100 %, others as < 0.1 % and > 99.9 %."""
    if not whole:
        return NONE
    share = part / whole
    if 0 < share < 0.0005:
        return "<\u00a00.1\u00a0%"
    if 0.9995 <= share < 1:
        return ">\u00a099.9\u00a0%"
    return f"{share:.1%}".replace("%", "\u00a0%")


OPENING = (
    b'<!DOCTYPE html>\n<html lang="en-GB"><head><meta charset="utf-8" />'
    b'<meta name="viewport" content="width=device-width, initial-scale=1" />'
    b'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
)
"""First bytes of every page, independent of its kind and version."""


def require_writable_target(target: Path) -> None:
    """Check that a page can be written to this path, before expensive work starts.

    Raises:
        SettingsError: the path is a folder or a file that is not a page, its name does not end in .html, or its folder
            cannot be created.
    """
    message = f"--output {target}: cannot be written"
    if target.suffix.lower() != ENDING:
        raise SettingsError(f"{message} (the name of a page must end in {ENDING}); choose such a name")
    files.require_writable(target, "--output")
    if target.is_file():
        with target.open("rb") as stream:
            if stream.read(len(OPENING)) != OPENING:
                raise SettingsError(
                    f"{message} (the existing file is not a page of `ratchet`); choose another name, or remove the file"
                )


def write(target: Path, text: str) -> None:
    """Write a page atomically, and create its folder if it is missing.

    Raises:
        SettingsError: the path is not writable; see `require_writable_target`.
    """
    require_writable_target(target)
    try:
        files.write_atomic(target, text)
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise SettingsError(
            f"--output {target}: cannot be written ({error.filename or target}: {error.strerror}); choose a file in a "
            "folder that exists or can be created"
        ) from None
