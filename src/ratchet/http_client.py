"""One POST, with a deadline for all of it; what its answer means, and whether another try may help.

Redirects are not followed: they would take what is sent, and its signature, elsewhere. Addresses may hold secrets in
their path, so no text that comes from here names one.
"""

import email.utils
import ipaddress
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, InvalidURL
from http.client import responses as phrases
from urllib.parse import urlsplit

LONGEST_WAIT_S = 60.0
"""Between two tries, whatever a server asks for."""
JITTER = 0.25
"""Share by which a wait is lengthened at random, so that many senders do not come at once."""


@dataclass(frozen=True)
class PostResult:
    """Of one try."""

    told: bool
    detail: str
    again: bool = True
    """Whether another try may end otherwise: after errors of the connection, 5xx and 429."""
    wait_s: float = 0.0
    """The server asked for at least so much patience."""


def find_address_problem(address: str) -> str | None:
    """What is wrong with an address, without repeating it; None: nothing."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:  # whose text repeats a part of it
        return "has no host and port that could be; write https://HOST/PATH"
    if parts.scheme not in ("http", "https") or not host or any(c.isspace() for c in address):
        return "is no address; write https://HOST/PATH"
    if parts.username is not None or parts.password is not None:
        return "holds a name or password; leave it out, the key in the environment signs what is sent"
    if parts.scheme == "http" and not _is_loopback(host):
        return f"http to {host} could be read and changed on the way; write https (http is for loopback)"
    return None


def find_endpoint_problem(address: str) -> str | None:
    """The same of a server of models, whose address stands in settings and records: no secret may be in it."""
    try:
        parts = urlsplit(address)
        if parts.username is not None or parts.password is not None:
            return "holds a name or password; leave it out, the key belongs into RATCHET_ENDPOINT_KEY (environment)"
        if parts.query or parts.fragment:
            return "holds a query; leave it out, the key belongs into RATCHET_ENDPOINT_KEY (environment)"
    except ValueError:
        return "has no host and port that could be; write https://HOST/v1"
    if any(not " " < c < "\x7f" for c in address):
        return "holds characters that no address has; write https://HOST/v1"
    return find_address_problem(address)


def post(address: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> PostResult:
    """One try, with a deadline for all of it: a server that sends a byte now and then is not waited for.

    Args:
        address: one that has no `find_address_problem`.
        body: JSON.
        headers: beside those that say so.
        timeout_s: the deadline.
    """
    answers: list[PostResult] = []
    trying = threading.Thread(target=lambda: answers.append(_exchange(address, body, headers, timeout_s)), daemon=True)
    trying.start()
    trying.join(timeout_s)
    return answers[0] if answers else PostResult(False, f"no answer within {timeout_s:g} s")


def format_tries(times: int) -> str:
    """`1 try`, `3 tries`."""
    return f"{times} tr{'y' if times == 1 else 'ies'}"


def compute_pause_s(number: int, answer: PostResult) -> float:
    """How long to wait before try `number` (the first is 0) after this answer: doubled each time, from 1 s on."""
    doubled = float(2 ** (number - 1)) * (1 + random.random() * JITTER)
    return min(max(doubled, answer.wait_s), LONGEST_WAIT_S)


class _RedirectBlocker(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *about: object) -> None:
        """Follow nothing: the answer stays what it is."""


def _exchange(address: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> PostResult:
    opener = urllib.request.build_opener(_RedirectBlocker)
    if _is_loopback(str(urlsplit(address).hostname)):
        opener = urllib.request.build_opener(_RedirectBlocker, urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(  # noqa: S310 (`find_address_problem` saw the scheme)
            address, body, {"Content-Type": "application/json", "User-Agent": "ratchet", **headers}, method="POST"
        )
        with opener.open(request, timeout=timeout_s) as response:
            return PostResult(True, f"HTTP {response.status}")
    except urllib.error.HTTPError as error:
        with error:
            return interpret_status(error.code, error.headers.get("Retry-After"))
    except (InvalidURL, ValueError):  # whose texts may hold the address
        return PostResult(False, "no address that a request could be sent to", again=False)
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return PostResult(False, f"{type(reason).__name__}: {reason}".rstrip(": "))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interpret_status(status: int, retry_after: str | None) -> PostResult:
    """What a status means that is no 200: whether another try may help, and how long the server wants it to wait."""
    text = f"HTTP {status} {phrases.get(status, '')}".rstrip()
    if 300 <= status < 400:
        return PostResult(False, f"{text}: redirects are not followed; write the address that it leads to", again=False)
    return PostResult(False, text, again=status >= 500 or status == 429, wait_s=_parse_retry_after(retry_after))


def _parse_retry_after(retry_after: str | None) -> float:
    """Retry-After: seconds, or a date (RFC 9110, 10.2.3); what is neither asks for nothing."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after.strip())
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0
