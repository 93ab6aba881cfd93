"""Who promotes, and what people may write beside it."""

import getpass
import os
import subprocess
from pathlib import Path

from ratchet.errors import SettingsError
from ratchet.storage import html

VARIABLE = "RATCHET_ACTOR"
"""Environment variable that says who promotes, such as a service's name and the person behind it."""

LONGEST_REASON = 2000
"""Characters: it is kept in MLflow's tags, which have a limit."""


def who(root: Path) -> str:
    """RATCHET_ACTOR, else git's user.email, else the login name; in a container without names, the user's number."""
    if named := _plain(os.environ.get(VARIABLE, "")):
        return named
    try:
        asked = subprocess.run(
            ["git", "config", "user.email"], cwd=root, capture_output=True, text=True, errors="replace", check=False
        )
        if email := _plain(asked.stdout):
            return email
    except OSError:
        pass  # no git here: the login name says who, too
    try:
        return _plain(getpass.getuser()) or f"user {os.getuid()}"
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def reason(text: str | None) -> str | None:
    """A reason as it is kept: one line. Raises SettingsError for one that says nothing, or too much."""
    if text is None:
        return None
    said = _plain(text)
    if not said:
        raise SettingsError("--reason: is empty; say in a sentence why")
    if len(said) > LONGEST_REASON:
        raise SettingsError(f"--reason: {len(said):,} characters; say it in at most {LONGEST_REASON:,}")
    return said


def _plain(text: str) -> str:
    """One line without characters that a terminal or a page would obey."""
    return html.visible(" ".join(text.split()))
