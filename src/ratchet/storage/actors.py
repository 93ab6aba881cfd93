"""The person or service that acts, for ledgers, tags and messages."""

import getpass
import os
import subprocess
from pathlib import Path

from ratchet.storage import html

ACTOR_VARIABLE = "RATCHET_ACTOR"
"""Environment variable with the name of the person or service that acts: promotes, approves, deploys, trains."""


def current_actor(root: Path) -> str:
    """Return the actor: RATCHET_ACTOR, else git's user.email, else the login name, else the numeric user id."""
    if named := clean_line(os.environ.get(ACTOR_VARIABLE, "")):
        return named
    try:
        result = subprocess.run(
            ["git", "config", "user.email"], cwd=root, capture_output=True, text=True, errors="replace", check=False
        )
        if email := clean_line(result.stdout):
            return email
    except OSError:
        pass  # git is not installed
    try:
        return clean_line(getpass.getuser()) or f"user {os.getuid()}"
    except (KeyError, OSError):  # a container without user names
        return f"user {os.getuid()}"


def clean_line(text: str) -> str:
    """Convert a text to one line without characters that terminals or HTML pages interpret."""
    return html.escape_invisible(" ".join(text.split()))
