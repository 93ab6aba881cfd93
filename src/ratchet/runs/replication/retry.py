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

from ratchet.errors import RatchetError, ReplicaError, SettingsError
from ratchet.redaction import HIDDEN, redact

T = TypeVar("T")
Kind = Literal["absent", "place", "credentials", "clock", "network"]

LONGEST_TEXT = 300
"""Maximum number of characters that are kept of a library's message."""
POLL_S = 0.2
"""Interval at which a wait checks whether it should end."""
LONG_S = 2.0
"""Duration after which a call without an answer is reported by `RetryPolicy.trouble`."""


def strip_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment."""
    match = re.match(r"([^/]*://)(?:[^/?#]*@)?([^?#]*)", url)
    return match[1] + match[2] if match else url


def scrub_text(text: str) -> str:
    """Return the message of a library in one line, without secrets from URLs and the environment."""
    text = " ".join(redact(text).split())
    text = re.sub(r"//[^/@\s]+@", f"//{HIDDEN}@", text)
    text = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", rf"\1?{HIDDEN}", text)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


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
"""Names of errors by kind (ABSENT, PLACE, CLOCK, CREDENTIALS): codes of S3, HTTP status codes, and names of exceptions
of boto, Google, Azure and paramiko."""

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
    """Yield the names of an error in its library, the most exact first: the service's code, its status, the class."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code", ""))
        yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    for attribute in ("status_code", "status", "code"):
        if isinstance(value := getattr(error, attribute, None), int):
            yield str(value)
    yield type(error).__name__


def classify_error(error: BaseException) -> Kind:
    """Classify an error by its cause: a missing object, the bucket or directory, the credentials, or the clock.

    All other errors are of kind `network`, and may be transient.
    """
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP):
        return "place"
    names = [name for cause in _iterate_causes(error) for name in _iterate_error_names(cause)]
    kinds: tuple[tuple[Kind, set[str]], ...] = (("place", PLACE), ("clock", CLOCK), ("absent", ABSENT))
    for kind, known in (*kinds, ("credentials", CREDENTIALS)):
        if any(name in known for name in names):
            return kind
    return "absent" if isinstance(error, FileNotFoundError) else "network"


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, with the service's code, without secrets."""
    causes = reversed(list(_iterate_causes(error)))
    code = next(name for cause in causes for name in _iterate_error_names(cause) if name)
    strerror = getattr(error, "strerror", None)
    message = str(strerror or error)
    return scrub_text(message if code in message else f"{code}: {message}" if message else code)


class RetryPolicy:
    """Retries a call until it succeeds or its time is over. Thread-safe.

    Args:
        display_url: URL of the replica without credentials, for messages.
        waits_s: three times in seconds: how long a call is retried, the bound of the first wait, and the largest bound.
        stopping: called before each retry; returns whether to stop.
        reopen: called before a retry if the connection may be broken or its credentials may be old.
    """

    def __init__(
        self,
        display_url: str,
        waits_s: tuple[float, float, float],
        stopping: Callable[[], bool],
        reopen: Callable[[], None],
    ) -> None:
        self._display_url = display_url
        self._retry_timeout_s, self._first_s, self._longest_s = waits_s
        self._stopping = stopping
        self._reopen = reopen
        self._calls: dict[object, tuple[str, float, str]] = {}
        """Calls in progress: description, start time, and message of the last error."""

    @property
    def trouble(self) -> str:
        """Last error of a call in progress, or a message about a call without an answer for LONG_S; otherwise empty."""
        calls = sorted(self._calls.values(), key=lambda call: call[1])
        for _, _, message in calls:
            if message:
                return message
        for what, began, _ in calls:
            if (spent_s := time.monotonic() - began) > LONG_S:
                return f"{self._display_url}: no answer for {spent_s:.0f} s ({what})"
        return ""

    def retry(self, what: str, strict: bool = False) -> Callable[[Callable[[], T]], T]:
        """Return a function that passes an attempt to `run` with this description."""
        return lambda attempt: self.run(what, attempt, strict)

    def run(self, what: str, attempt: Callable[[], T], strict: bool = False) -> T:
        """Call `attempt` until it returns.

        Args:
            what: description of the call, as an infinitive.
            attempt: makes one attempt of the call.
            strict: raise SettingsError at once for an error that the user must fix, and do not retry.

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
