"""Removal of secrets from logs, journals, standard error and data for MLflow.

A secret is recognized in two ways: as the value of an environment variable whose name suggests a secret (in every
spelling that a library may use), and by the formats of well-known providers. HIDDEN replaces each secret.
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
MIN_SECRET_CHARACTERS = 6
"""Minimum length of a secret value, in characters. Shorter values are not replaced: they occur in too many words."""
SETTING_PREFIX = "RATCHET__"
"""Begin of the environment variables that contain a setting (`RATCHET__TRAIN__RANK=8`). No setting contains a secret,
though the names of some (tokens) look like it."""
MIN_LINE_CHARACTERS = 16
"""Minimum length, in characters, of a line that is a secret on its own, in a secret of several lines such as a key."""

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|WEBHOOK|CONNECTION_?STRING", re.I)
_LIKELY_SECRET_NAME = re.compile(r"(?:^|_)(?:\w*KEY|AUTH\w*|PWD|PASS|SAS|DSN|PAT|COOKIE|JWT|SIGNATURE)(?:_|$)", re.I)
_HARMLESS_NAME = re.compile(
    r"TOKENIZER|AUTHOR|(?:^|_)(?:FILE|PATH|DIR|FOLDER|HOME|SOCK|NAME|TYPE|MODE|METHOD|PROVIDER|EXPIR\w*|TIMEOUT|COUNT|LIMIT"
    r"|LENGTH|MAX_\w*|SIZE|TTL|SCHEME|REGION|VERSION|ENABLED?|DISABLED?)$",
    re.I,
)
"""Names of variables that do not contain a secret, only its location or its use."""
_ORDINARY_VALUES = {
    "true", "false", "none", "null", "enabled", "disabled", "required", "optional", "default", "always", "never",
    "anonymous", "password", "secret", "token",
}  # fmt: skip


def redact(text: str) -> str:
    """Return the text with its secrets replaced by HIDDEN. Idempotent.

    Redact a text before you truncate it: half a secret is not recognized.
    """
    values = _secret_value_pattern(_current_secrets())
    if values is not None:
        text = values.sub(HIDDEN, text)
    return _secret_format_pattern().sub(_replace_secret, text)


def contains_secret(text: str) -> bool:
    """Return whether a text contains a private key, a password or token in an address, or a provider's secret format.

    Values of environment variables are not considered, because they may be ordinary words elsewhere.
    """
    return any(match.lastgroup in (None, "k1", "k5") for match in _secret_format_pattern().finditer(text))


def write_stderr(text: str) -> None:
    """Write text to standard error without its secrets. Errors are ignored, such as a closed terminal."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(redact(text))
        sys.stderr.flush()


@contextlib.contextmanager
def redact_stderr() -> Iterator[None]:
    """Redact everything that Python, including libraries, writes to standard error in this context."""
    original = sys.stderr
    redacting = cast(TextIO, _RedactingStream(original))
    sys.stderr = redacting
    try:
        yield
    finally:
        if sys.stderr is redacting:
            sys.stderr = original


class _RedactingStream:
    """A stream that redacts text before it writes it; all other calls go to the original stream."""

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
    """Print a traceback as Python does, without secrets; for `sys.excepthook`."""
    write_stderr("".join(traceback.format_exception(kind, error, trace)))


def build_secret_free_environment() -> dict[str, str]:
    """Return the current environment without variables that contain secrets, for programs of the user."""
    return {
        name: value
        for name, value in os.environ.items()
        if not (_is_secret_variable(name) or _secrets_in_variable(name, value) or contains_secret(value))
    }


def _current_secrets() -> frozenset[str]:
    """Return the secrets in the environment. The environment is read each time, because a library may set variables."""
    secrets: set[str] = set()
    for name, value in os.environ.items():
        if _is_secret_variable(name) or "://" in value:
            secrets.update(_secrets_in_variable(name, value))
    return frozenset(secrets)


@functools.lru_cache(maxsize=4096)
def _is_secret_variable(name: str) -> bool:
    if _HARMLESS_NAME.search(name) or name.startswith(SETTING_PREFIX):
        return False
    return bool(_SECRET_NAME.search(name) or _LIKELY_SECRET_NAME.search(name))


@functools.lru_cache(maxsize=1024)
def _secrets_in_variable(name: str, value: str) -> tuple[str, ...]:
    """Return the parts of a variable's value that are secret."""
    secrets = []
    if parts := re.match(r"[A-Za-z][\w+.-]*://([^/\s@]*):([^/\s]*)@", value):  # an address of a database, a proxy
        secrets += [parts[2], unquote(parts[2])]
    if _is_secret_variable(name) and not _is_ordinary(name, value):
        secrets.append(value)
    return tuple(secret for secret in secrets if len(secret) >= MIN_SECRET_CHARACTERS)


def _is_ordinary(name: str, value: str) -> bool:
    """Return whether a value is an ordinary word, number or path, so that replacing it would damage ordinary text."""
    if value.strip().lower() in _ORDINARY_VALUES:
        return True
    if value.startswith(("/", "~/", "./", "../")) and ("/" in value[1:].strip("/") or os.path.lexists(value)):
        # AWS keys contain slashes and may start with a slash, so a value is a path only if its first folder exists.
        first = os.path.join(*value.split("/")[:2]) if not value.startswith("/") else "/" + value.split("/")[1]  # noqa: PTH118
        return os.path.lexists(os.path.expanduser(first))  # noqa: PTH111 (Path rejects NUL, which a value may contain)
    return not _SECRET_NAME.search(name) and (value.isalpha() or value.replace(".", "").isdigit())


@functools.lru_cache(maxsize=8)
def _secret_value_pattern(secrets: frozenset[str]) -> re.Pattern[str] | None:
    """Return a pattern for all spellings of all secrets, the longest first because a secret may contain another."""
    spellings = {spelling for secret in secrets for spelling in _spell_secret(secret)}
    if not spellings:
        return None
    return re.compile("|".join(map(re.escape, sorted(spellings, key=lambda text: (-len(text), text)))))


def _spell_secret(secret: str) -> Iterator[str]:
    """Yield the secret as it appears in URLs, JSON, repr and base64."""
    yield secret
    yield quote(secret, safe="")
    yield quote(secret)
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    yield repr(secret)[1:-1]
    yield base64.b64encode(secret.encode(errors="surrogateescape")).decode().rstrip("=")
    if "\n" in secret:
        yield from (line.strip() for line in secret.splitlines() if len(line.strip()) >= MIN_LINE_CHARACTERS)


# `redact` keeps the text of the groups `k…` and replaces the rest.
_FORMATS = (
    # A private key, also if its end is missing or its line ends are written as \n.
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----(?:.{0,20000}?-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|.*\Z)",
    # URLs: NAME:PASSWORD@ in any scheme; http(s) also TOKEN@.
    r"(?P<k1>\b[A-Za-z][A-Za-z0-9+.-]{0,30}://)(?:[^/\s:@'\"<>]*:[^/\s'\"<>]*|(?<=ttp://)[^/\s:@'\"<>]+|(?<=ttps://)[^/\s:@'\"<>]+)(?=@)",
    r"(?P<k2>https://hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/)[^\s'\"<>()]+",
    r"(?P<k3>https://(?:\w+\.)?discord(?:app)?\.com/api/(?:v\d+/)?webhooks/)[^\s'\"<>()]+",
    r"(?P<k4>https://[\w.-]+\.webhook\.office\.com/)[^\s'\"<>()]+",
    # Query parameters.
    r"(?P<k5>[?&;](?:X-(?:Amz|Goog)-[A-Za-z-]{1,40}|[\w.-]{0,40}?(?i:token|signature|secret|passw(?:or)?d|credential|apikey"
    r"|api[_-]key|accesskeyid|access[_-]key|auth)[\w-]{0,20}|(?i:sig|key|code))=)[^&\s'\"<>#()]+",
    # Headers.
    r"(?P<k6>(?i:\bauthorization)['\"]{0,2}\s{0,3}[:=]\s{0,3}b?['\"]?(?:[A-Za-z]{1,20}\s{1,3})?)[^\s'\",;]+",
    r"(?P<k7>\b(?i:bearer)\s{1,3})(?=[\w.~+/=-]{0,200}\d)[\w.~+/=-]{8,}",
    r"(?P<k8>\b(?i:basic)\s{1,3})(?=[A-Za-z0-9+/]{0,200}\d)[A-Za-z0-9+/]{8,}={0,2}",
    # NAME=VALUE and NAME: VALUE, as in programs, YAML and JSON.
    r"(?P<k9>(?i:passw(?:or)?d|passphrase|(?<![A-Za-z])(?-i:pwd)|secret(?:[_-]?access)?[_-]?key|client[_-]?secret|api[_-]?key"
    r"|access[_-]?key|account[_-]?key|private[_-]?key|session[_-]?token|security[_-]?token|access[_-]?token|refresh[_-]?token"
    r"|auth[_-]?token|bearer[_-]?token|hf[_-]?token|sharedaccesskey|(?<![A-Za-z])secret)['\"]{0,2}\s{0,3}[:=]\s{0,3}b?['\"]?)"
    r"[^\s'\",;&()]{6,}",
    # Formats of providers.
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-(?=[\w-]{0,200}\d)[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
    r"|gl(?:pat|ptt|dt)-[\w-]{16,}|(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}|xox[a-z](?:\.xox[a-z])?-[\w-]{8,}|xapp-[\w-]{10,}"
    r"|AIza[\w-]{30,}|ya29\.[\w-]{16,}|GOCSPX-[\w-]{16,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|dapi[0-9a-f]{30,}"
    r"|dckr_pat_[\w-]{16,}|SG\.[\w-]{16,}\.[\w-]{16,}|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}|r8_[A-Za-z0-9]{30,}"
    r"|eyJ[\w-]{8,2000}\.[\w-]{8,}(?:\.[\w-]*)?)",
)  # fmt: skip


@functools.cache
def _secret_format_pattern() -> re.Pattern[str]:
    """Compile the pattern on first use, because compiling takes longer than `ratchet --help`."""
    return re.compile("|".join(_FORMATS), re.DOTALL)


def _replace_secret(match: re.Match[str]) -> str:
    return next((prefix for prefix in match.groups() if prefix is not None), "") + HIDDEN
