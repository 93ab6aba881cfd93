"""Secrets are taken out of what is said: out of logs, journals, lines on standard error, and what MLflow is told.

Two things are known of them: the values of environment variables whose names say that they are one, in the ways in
which a library may write them, and the shapes that providers give to theirs. What is taken out leaves HIDDEN behind.
"""

import base64
import contextlib
import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TextIO, cast
from urllib.parse import quote, unquote

HIDDEN = "(hidden)"
SHORTEST = 6
"""Characters of a value that is taken for a secret: shorter ones stand in too many words."""
LONG_LINE = 16
"""Of a secret of several lines, such as a key, lines from this length on are secrets of their own."""

_SAYS_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK|CONNECTION_?STRING", re.I)
_MAY_BE_SECRET = re.compile(r"(?:^|_)(?:\w*KEY|AUTH\w*|PWD|PASS|SAS|DSN|PAT|COOKIE|JWT|SIGNATURE)(?:_|$)", re.I)
_IS_ABOUT_SECRETS = re.compile(
    r"TOKENIZER|AUTHOR|(?:^|_)(?:FILE|PATH|DIR|FOLDER|HOME|SOCK|NAME|TYPE|MODE|METHOD|PROVIDER|EXPIR\w*|TIMEOUT|COUNT|LIMIT"
    r"|LENGTH|MAX_\w*|SIZE|TTL|SCHEME|REGION|VERSION|ENABLED?|DISABLED?)$",
    re.I,
)
"""A name that says where a secret lies, or how it is used."""
_ORDINARY = {
    "true", "false", "none", "null", "enabled", "disabled", "required", "optional", "default", "always", "never",
    "anonymous", "password", "secret", "token",
}  # fmt: skip


def redact(text: str) -> str:
    """The text without secrets, for whoever may read it. Doing it again changes nothing.

    Cut a text after this, not before: half a secret is not known any more.
    """
    values = _secret_value_pattern(_current_secrets())
    if values is not None:
        text = values.sub(HIDDEN, text)
    return _secret_shape_pattern().sub(_replace_secret, text)


def contains_secret(text: str) -> bool:
    """Whether a text that is kept for everybody to read holds a secret: a password or token in an address, or one
    that is known by its shape. The environment is not asked: what it holds may be an ordinary name elsewhere."""
    return any(found.lastgroup in (None, "k1", "k5") for found in _secret_shape_pattern().finditer(text))


def write_stderr(text: str) -> None:
    """Write it to standard error, without secrets. Never raises: a terminal that is gone is nobody's to mend."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(redact(text))
        sys.stderr.flush()


@contextlib.contextmanager
def redact_stderr() -> Iterator[None]:
    """For this long, nothing that Python writes to standard error has a secret: not what libraries print either."""
    whole = sys.stderr
    shield = cast(TextIO, _RedactingStream(whole))
    sys.stderr = shield
    try:
        yield
    finally:
        if sys.stderr is shield:
            sys.stderr = whole


class _RedactingStream:
    """A stream that writes what is left of a text; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For `sys.excepthook`: as Python does it, without secrets."""
    write_stderr("".join(traceback.format_exception(kind, error, trace)))


def build_secret_free_environment() -> dict[str, str]:
    """The environment of now without what holds secrets, for programs that are not ours."""
    return {
        name: value
        for name, value in os.environ.items()
        if not (_is_secret_variable(name) or _secrets_in_variable(name, value) or contains_secret(value))
    }


def _current_secrets() -> frozenset[str]:
    """Values of now: a library may have set some since the last time."""
    found: set[str] = set()
    for name, value in os.environ.items():
        if _is_secret_variable(name) or "://" in value:
            found.update(_secrets_in_variable(name, value))
    return frozenset(found)


@functools.lru_cache(maxsize=4096)
def _is_secret_variable(name: str) -> bool:
    if _IS_ABOUT_SECRETS.search(name):
        return False
    return bool(_SAYS_SECRET.search(name) or _MAY_BE_SECRET.search(name))


@functools.lru_cache(maxsize=1024)
def _secrets_in_variable(name: str, value: str) -> tuple[str, ...]:
    """What of a variable's value must not be seen."""
    found = []
    if parts := re.match(r"[A-Za-z][\w+.-]*://([^/\s@]*):([^/\s]*)@", value):  # an address of a database, a proxy
        found += [parts[2], unquote(parts[2])]
    if _is_secret_variable(name) and not _is_ordinary(name, value):
        found.append(value)
    return tuple(one for one in found if len(one) >= SHORTEST)


def _is_ordinary(name: str, value: str) -> bool:
    """Whether a value is a word, a number or a place in the file system: hidden, it would be missed in all texts."""
    if value.strip().lower() in _ORDINARY:
        return True
    if value.startswith(("/", "~/", "./", "../")) and ("/" in value[1:].strip("/") or os.path.lexists(value)):
        # Keys of AWS hold slashes too, one may begin with it: a place is one whose first folder is there.
        first = os.path.join(*value.split("/")[:2]) if not value.startswith("/") else "/" + value.split("/")[1]  # noqa: PTH118
        return os.path.lexists(os.path.expanduser(first))  # noqa: PTH111 (Path takes no NUL, a value may hold none too)
    return not _SAYS_SECRET.search(name) and (value.isalpha() or value.replace(".", "").isdigit())


@functools.lru_cache(maxsize=8)
def _secret_value_pattern(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """One expression for all secrets in all ways of writing, the longest first: one may hold another."""
    ways = {way for secret in secrets for way in _spellings(secret)}
    if not ways:
        return None
    return re.compile("|".join(re.escape(way) for way in sorted(ways, key=lambda way: (-len(way), way))))


def _spellings(secret: str) -> Iterator[str]:
    yield secret
    yield quote(secret, safe="")
    yield quote(secret)
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield repr(secret)[1:-1]
    yield base64.b64encode(secret.encode(errors="surrogateescape")).decode().rstrip("=")
    if "\n" in secret:
        yield from (line.strip() for line in secret.splitlines() if len(line.strip()) >= LONG_LINE)


# In each, what stands in the group `k…` is kept.
_SHAPES = (
    # A private key, also one whose end is cut off, also with its line ends written as \n.
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----(?:.{0,20000}?-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|.*\Z)",
    # Addresses: NAME:PASSWORD@ of any scheme; http(s) may have the token alone there.
    r"(?P<k1>\b[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?:[^/\s:@'\"<>]*:[^/\s'\"<>]*|(?<=ttp://)[^/\s:@'\"<>]+|(?<=ttps://)[^/\s:@'\"<>]+)(?=@)",
    r"(?P<k2>https://hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/)[^\s'\"<>()]+",
    r"(?P<k3>https://(?:\w+\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/)[^\s'\"<>()]+",
    r"(?P<k4>https://[\w.-]+\.webhook\.office\.com/)[^\s'\"<>()]+",
    # Parameters of addresses.
    r"(?P<k5>[?&;](?:X-(?:Amz|Goog)-[A-Za-z-]{1,40}|[\w.-]{0,40}?(?i:token|signature|secret|passw(?:or)?d|credential|apikey"
    r"|api[_-]key|accesskeyid|access[_-]key|auth)[\w-]{0,20}|(?i:sig|key|code))=)[^&\s'\"<>#()]+",
    # Headers.
    r"(?P<k6>(?i:\bauthorization)['\"]{0,2}\s{0,3}[:=]\s{0,3}b?['\"]?(?:[A-Za-z]{1,20}\s{1,3})?)[^\s'\",;]+",
    r"(?P<k7>\b(?i:bearer)\s{1,3})(?=[\w.~+/=-]{0,200}\d)[\w.~+/=-]{8,}",
    r"(?P<k8>\b(?i:basic)\s{1,3})(?=[A-Za-z0-9+/]{0,200}\d)[A-Za-z0-9+/]{8,}={0,2}",
    # NAME=VALUE, NAME: VALUE, in the ways of programs, YAML and JSON.
    r"(?P<k9>(?i:passw(?:or)?d|passphrase|(?<![A-Za-z])(?-i:pwd)|secret(?:[_-]?access)?[_-]?key|client[_-]?secret|api[_-]?key"
    r"|access[_-]?key|account[_-]?key|private[_-]?key|session[_-]?token|security[_-]?token|access[_-]?token|refresh[_-]?token"
    r"|auth[_-]?token|bearer[_-]?token|hf[_-]?token|sharedaccesskey|(?<![A-Za-z])secret)['\"]{0,2}\s{0,3}[:=]\s{0,3}b?['\"]?)"
    r"[^\s'\",;&()]{6,}",
    # What providers give out.
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]{0,200}\d)[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|gl(?:pat|ptt|dt)-[\w-]{16,}|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|xox[a-z](?:\.xox[a-z])?-[\w-]{8,}|xapp-[\w-]{10,}"
    r"|AIza[\w-]{30,}|ya29\.[\w-]{16,}|GOCSPX-[\w-]{16,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dapi[0-9a-f]{30,}"
    r"|dckr_pat_[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}|r8_[A-Za-z0-9]{30,}"
    r"|eyJ[\w-]{8,2000}\.[\w-]{8,}(?:\.[\w-]*)?)",
)  # fmt: skip


@functools.cache
def _secret_shape_pattern() -> re.Pattern[str]:
    """Made when it is needed: compiling takes longer than `ratchet --help`."""
    return re.compile("|".join(_SHAPES), re.DOTALL)


def _replace_secret(found: re.Match[str]) -> str:
    return next((kept for kept in found.groups() if kept is not None), "") + HIDDEN
