"""Where a mirror is, as it may be shown: credentials stand in no message, whoever wrote the text."""

import errno
import math
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from ratchet.errors import MirrorError, RatchetError, SettingsError
from ratchet.redaction import HIDDEN, redact

LONGEST_TEXT = 300


def strip_credentials(url: str) -> str:
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
            f"machine.mirror {strip_credentials(url)}: {found} stands in the URL, and settings are kept with the run "
            "for everybody to read; leave it out and give credentials in the environment or in the library's own files"
        )


def scrub_text(text: str) -> str:
    """A library's words in one line, without what they may repeat of URLs and of the environment."""
    text = " ".join(redact(text).split())
    text = re.sub(r"//[^/@\s]+@", f"//{HIDDEN}@", text)
    text = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", rf"\1?{HIDDEN}", text)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


# What went wrong with a mirror, who can mend it, and for how long to try again: exponential back-off with full jitter.
#
# Full jitter (each wait drawn between nothing and the doubled bound): M. Brooker, "Exponential Backoff And Jitter",
# AWS
# Architecture Blog, 2015. It spreads the clients that one outage made wait.

T = TypeVar("T")
Kind = Literal["absent", "place", "credentials", "clock", "network"]

POLL_S = 0.2
"""How often a wait asks whether it should end."""
LONG_S = 2.0
"""A call that has no answer for so long is told of where somebody asks why nothing arrives."""

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
"""Codes of S3, status codes, and names of exceptions: boto's, Google's, Azure's, paramiko's."""

BROKEN = (RuntimeError, AttributeError, TypeError, ValueError)
"""What libraries raise from a connection in a state that they did not expect."""

ADVICE: dict[Kind, str] = {
    "absent": "",
    "place": "there is no such bucket, region or folder, or nobody may write it: correct machine.mirror, or make it",
    "credentials": "credentials are missing, wrong, expired, or not allowed to list, read, write and delete there: "
    "give them in the environment or in the library's own files",
    "clock": "this machine's clock is off by more than the service accepts in signatures: set it (NTP)",
    "network": "",
}


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """An error and those it was raised from."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__


def _iterate_error_names(error: BaseException) -> Iterator[str]:
    """What a library calls an error, the most exact name first: the service's code, its status, the class."""
    response: Any = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code", ""))
        yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    for attribute in ("status_code", "status", "code"):
        if isinstance(found := getattr(error, attribute, None), int):
            yield str(found)
    yield type(error).__name__


def classify_error(error: BaseException) -> Kind:
    """What is wrong: nothing of that name is there, the place, the credentials, the clock; all else may pass."""
    if isinstance(error, OSError) and error.errno in (errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP):
        return "place"
    names = [name for one in _iterate_causes(error) for name in _iterate_error_names(one)]
    kinds: tuple[tuple[Kind, set[str]], ...] = (("place", PLACE), ("clock", CLOCK), ("absent", ABSENT))
    for kind, known in (*kinds, ("credentials", CREDENTIALS)):
        if any(name in known for name in names):
            return kind
    return "absent" if isinstance(error, FileNotFoundError) else "network"


def describe_error(error: BaseException) -> str:
    """An error in one line, with the service's code, without secrets."""
    code = next(name for one in reversed(list(_iterate_causes(error))) for name in _iterate_error_names(one) if name)
    strerror = getattr(error, "strerror", None)
    words = str(strerror or error)
    return scrub_text(words if code in words else f"{code}: {words}" if words else code)


class RetryPolicy:
    """Tries again until it works or the time is over. Safe in threads.

    Args:
        shown: the mirror, as messages may name it.
        waits_s: how long a call is tried; the bound of the first wait; the longest bound.
        stopping: asked before each further try.
        reopen: called before a further try where a connection may be what is wrong, or may have old credentials.
    """

    def __init__(
        self,
        shown: str,
        waits_s: tuple[float, float, float],
        stopping: Callable[[], bool],
        reopen: Callable[[], None],
    ) -> None:
        self._shown = shown
        self._patience_s, self._first_s, self._longest_s = waits_s
        self._stopping = stopping
        self._reopen = reopen
        self._under_way: dict[object, tuple[str, float, str]] = {}
        """Of each call: what it does, when it began, and what its last try said."""

    @property
    def trouble(self) -> str:
        """Why something under way has not worked so far, in words; empty when there is nothing to tell."""
        calls = sorted(self._under_way.values(), key=lambda one: one[1])
        for _, _, told in calls:
            if told:
                return told
        for what, began, _ in calls:
            if (spent_s := time.monotonic() - began) > LONG_S:
                return f"{self._shown}: has been asked for {spent_s:.0f} s to {what}"
        return ""

    def trying(self, what: str, strict: bool = False) -> Callable[[Callable[[], T]], T]:
        """`run` for calls that do `what`."""
        return lambda once: self.run(what, once, strict)

    def run(self, what: str, once: Callable[[], T], strict: bool = False) -> T:
        """Call until it returns.

        Args:
            what: is done, as an infinitive.
            once: a try.
            strict: raise SettingsError at once for what the user must mend, instead of waiting for it to be mended.

        Raises:
            FileNotFoundError: nothing of that name is there.
            MirrorError: it has not worked for `patience_s` since it first failed, or there is no more time.
        """
        call = object()
        self._under_way[call] = (what, time.monotonic(), "")
        try:
            return self._run(what, once, strict, call)
        finally:
            del self._under_way[call]

    def _run(self, what: str, once: Callable[[], T], strict: bool, call: object) -> T:
        began, failing_since, tries = time.monotonic(), math.inf, 0
        while True:
            tries += 1
            try:
                return once()
            except RatchetError:
                raise
            except Exception as error:
                kind = classify_error(error)
                if kind == "absent":
                    raise FileNotFoundError(describe_error(error)) from None
                told = f"{self._shown}: cannot {what}: {describe_error(error)}"
                told += f"; {ADVICE[kind]}" if ADVICE[kind] else ""
                self._under_way[call] = (what, began, told)
                if strict and kind != "network":
                    raise SettingsError(f"machine.mirror {told}") from None
                failing_since = min(failing_since, now := time.monotonic())
                spent_s = now - failing_since
                if spent_s >= self._patience_s or not self._wait(tries, self._patience_s - spent_s):
                    raise MirrorError(
                        f"machine.mirror {told} ({tries} {'try' if tries == 1 else 'tries'} in {now - began:.0f} s)"
                    ) from None
                if kind != "network" or isinstance(error, BROKEN):
                    self._reopen()

    def _wait(self, tries: int, left_s: float) -> bool:
        """Whether there may be another try, after a wait."""
        bound_s = min(self._longest_s, self._first_s * 2.0 ** min(tries - 1, 60), left_s)
        until = time.monotonic() + random.uniform(0, bound_s)
        while not self._stopping():
            rest_s = until - time.monotonic()
            if rest_s <= 0:
                return True
            time.sleep(min(rest_s, POLL_S))
        return False
