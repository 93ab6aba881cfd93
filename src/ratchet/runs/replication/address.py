"""Where a mirror is, as it may be shown: credentials stand in no message, whoever wrote the text."""

import re
from urllib.parse import urlsplit

from ratchet.errors import SettingsError
from ratchet.redaction import HIDDEN, redacted

LONGEST_TEXT = 300


def shown(url: str) -> str:
    """A URL without user, password, query and fragment."""
    parts = urlsplit(url)
    if "://" not in url:
        return url
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def refuse_secrets(url: str) -> None:
    """Raises SettingsError for a URL that carries a secret: params.yaml is committed, logged and sealed into runs."""
    parts = urlsplit(url) if "://" in url else None
    if parts is None:
        return
    found = "a password" if parts.password is not None else "a query" if parts.query else ""
    if found:
        raise SettingsError(
            f"machine.mirror {shown(url)}: {found} stands in the URL, and settings are kept with the run for everybody "
            "to read; leave it out and give credentials in the environment or in the library's own files"
        )


def scrubbed(text: str) -> str:
    """A library's words in one line, without what they may repeat of URLs and of the environment."""
    text = " ".join(redacted(text).split())
    text = re.sub(r"//[^/@\s]+@", f"//{HIDDEN}@", text)
    text = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", rf"\1?{HIDDEN}", text)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"
