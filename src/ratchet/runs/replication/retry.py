"""Retries of a replica's storage calls: classification of errors, back-off, and messages without credentials.

Waits use exponential back-off with full jitter: each wait is drawn between 0 and a bound that doubles (M. Brooker,
"Exponential Backoff And Jitter", AWS Architecture Blog, 2015). This spreads the retries of clients after an outage.
"""

import errno
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from ratchet.errors import RatchetError, ReplicaError, SettingsError
from ratchet.redaction import HIDDEN, redact

LONGEST_TEXT = 300


def strip_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment."""
    parts = urlsplit(url)
    if "://" not in url:
        return url
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def refuse_secrets(url: str) -> None:
    """Raise SettingsError for a URL with a secret, because params.yaml is committed, logged and stored in runs."""
    parts = urlsplit(url) if "://" in url else None
    if parts is None:
        return
    found = "a password" if parts.password is not None else "a query" if parts.query else ""
    if found:
        raise SettingsError(
            f"machine.replica {strip_credentials(url)}: found {found} in the URL, which is stored with the run "
            "in plain text; remove it and set credentials in the environment or in the library's own files"
        )


def scrub_text(text: str) -> str:
    """Return the message of a library in one line, without secrets from URLs and the environment."""
    text = " ".join(redact(text).split())
    text = re.sub(r"//[^/@\s]+@", f"//{HIDDEN}@", text)
    text = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", rf"\1?{HIDDEN}", text)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


T = TypeVar("T")
Kind = Literal["absent", "place", "credentials", "clock", "network"]

POLL_S = 0.2
"""Interval at which a wait checks whether it should end."""
LONG_S = 2.0
"""Duration after which a call without an answer is reported by `RetryPolicy.trouble`."""

ABSENT = {"NoSuchKey", "NoSuchUpload", "NoSuchVersion", "404"}
PLACE = {
    "NoSuchBucket", "InvalidBucketName", "PermanentRedirect", "AuthorizationHeaderMalformed", "NoRegionError",
    "InvalidRegionError", "InvalidEndpointURLError", "NotADirectoryError", "IsADirectoryError",
    "FileExistsError", "NotImplementedError",
}  # fmt: skip
CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}
CREDENTIALS = {
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "ExpiredTokenException", "InvalidToken",
    "TokenRefreshRequired", "AccessDenied", "AllAccessDisabled", "AccountProblem", "NotSignedUp", "InvalidSecurity",
    "401", "403", "PermissionError", "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
    "TokenRetrievalError", "ProfileNotFound", "DefaultCredentialsError", "RefreshError", "ClientAuthenticationError",
    "AuthenticationException", "BadHostKeyException",
}  # fmt: skip
"""Error codes of S3, HTTP status codes, and names of exceptions of boto, Google, Azure and paramiko."""

BROKEN = (RuntimeError, AttributeError, TypeError, ValueError)
"""Exceptions that libraries raise from a connection in an unexpected state."""

ADVICE: dict[Kind, str] = {
    "absent": "",
    "place": "the bucket, region or directory does not exist or is not writable: correct machine.replica, or create it",
    "credentials": "credentials are missing, wrong, expired, or lack permission to list, read, write and delete: "
    "set them in the environment or in the library's own files",
    "clock": "this machine's clock differs by more than the service accepts: set it (NTP)",
    "network": "",
}


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and the errors that caused it."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _iterate_error_names(error: BaseException) -> Iterator[str]:
    """Yield a library's names of an error, the most exact first: the service's code, its status, the class."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code", ""))
        yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    for attribute in ("status_code", "status", "code"):
        if isinstance(found := getattr(error, attribute, None), int):
            yield str(found)
    yield type(error).__name__


def classify_error(error: BaseException) -> Kind:
    """Classify an error: missing object, bucket or directory, credentials, clock; every other error may be
    transient."""
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP):
        return "place"
    names = [name for one in _iterate_causes(error) for name in _iterate_error_names(one)]
    kinds: tuple[tuple[Kind, set[str]], ...] = (("place", PLACE), ("clock", CLOCK), ("absent", ABSENT))
    for kind, known in (*kinds, ("credentials", CREDENTIALS)):
        if any(name in known for name in names):
            return kind
    return "absent" if isinstance(error, FileNotFoundError) else "network"


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, with the service's code, without secrets."""
    code = next(name for one in reversed(list(_iterate_causes(error))) for name in _iterate_error_names(one) if name)
    strerror = getattr(error, "strerror", None)
    words = str(strerror or error)
    return scrub_text(words if code in words else f"{code}: {words}" if words else code)


class RetryPolicy:
    """Retries a call until it succeeds or its time is over. Thread-safe.

    Args:
        display_url: URL of the replica without credentials, for messages.
        waits_s: how long a call is retried, the bound of the first wait, and the largest bound.
        stopping: called before each retry; returns whether to stop.
        reopen: called before a retry if the connection may be broken or its credentials may be old.
    """

    def __init__(
        self,
        shown: str,
        waits_s: tuple[float, float, float],
        stopping: Callable[[], bool],
        reopen: Callable[[], None],
    ) -> None:
        self._display_url = shown
        self._retry_timeout_s, self._first_s, self._longest_s = waits_s
        self._stopping = stopping
        self._reopen = reopen
        self._calls: dict[object, tuple[str, float, str]] = {}
        """Calls in progress: description, start time, and message of the last error."""

    @property
    def trouble(self) -> str:
        """Last error of a call in progress; empty if there is none."""
        calls = sorted(self._calls.values(), key=lambda one: one[1])
        for _, _, message in calls:
            if message:
                return message
        for what, began, _ in calls:
            if (spent_s := time.monotonic() - began) > LONG_S:
                return f"{self._display_url}: no answer for {spent_s:.0f} s ({what})"
        return ""

    def retry(self, what: str, strict: bool = False) -> Callable[[Callable[[], T]], T]:
        """Return `run` with a fixed description."""
        return lambda attempt: self.run(what, attempt, strict)

    def run(self, what: str, attempt: Callable[[], T], strict: bool = False) -> T:
        """Call until it returns.

        Args:
            what: description of the call, as an infinitive.
            attempt: makes one attempt.
            strict: raise SettingsError at once for an error that the user must fix, instead of retrying.

        Raises:
            FileNotFoundError: the object does not exist.
            ReplicaError: the call failed for `retry_timeout_s` after its first failure, or `stopping` returned True.
        """
        call = object()
        self._calls[call] = (what, time.monotonic(), "")
        try:
            return self._run(what, attempt, strict, call)
        finally:
            del self._calls[call]

    def _run(self, what: str, attempt: Callable[[], T], strict: bool, call: object) -> T:
        began, failing_since, tries = time.monotonic(), math.inf, 0
        while True:
            tries += 1
            try:
                return attempt()
            except RatchetError:
                raise
            except Exception as error:
                kind = classify_error(error)
                if kind == "absent":
                    raise FileNotFoundError(describe_error(error)) from None
                message = f"{self._display_url}: cannot {what}: {describe_error(error)}"
                message += f"; {ADVICE[kind]}" if ADVICE[kind] else ""
                self._calls[call] = (what, began, message)
                if strict and kind != "network":
                    raise SettingsError(f"machine.replica {message}") from None
                failing_since = min(failing_since, now := time.monotonic())
                spent_s = now - failing_since
                if spent_s >= self._retry_timeout_s or not self._wait(tries, self._retry_timeout_s - spent_s):
                    raise ReplicaError(
                        f"machine.replica {message} ({tries} {'try' if tries == 1 else 'tries'} in {now - began:.0f} s)"
                    ) from None
                if kind != "network" or isinstance(error, BROKEN):
                    self._reopen()

    def _wait(self, tries: int, left_s: float) -> bool:
        """Wait before a retry. Returns False if `stopping` returned True."""
        bound_s = min(self._longest_s, self._first_s * 2.0 ** min(tries - 1, 60), left_s)
        until = time.monotonic() + random.uniform(0, bound_s)
        while not self._stopping():
            rest_s = until - time.monotonic()
            if rest_s <= 0:
                return True
            time.sleep(min(rest_s, POLL_S))
        return False
