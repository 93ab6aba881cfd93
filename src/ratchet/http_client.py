"""Sends POST requests with a deadline, and decides whether and when to retry them.

Redirects are not followed: a redirect would send the body and its signature to another server. An address may contain a
secret in its path, so no message of this module repeats it.
"""

import email.utils
import ipaddress
import random
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import responses as phrases
from urllib.parse import urlsplit

MAX_DELAY_S = 60.0
"""Longest delay between two attempts, in seconds, even if Retry-After asks for a longer delay."""
JITTER = 0.25
"""Maximum random extension of a delay, as a fraction of it, so that many clients do not retry at the same time."""


@dataclass(frozen=True)
class PostResult:
    """Result of one attempt."""

    is_delivered: bool
    detail: str
    is_retryable: bool = True
    """Whether another attempt may succeed: after connection errors, timeouts, HTTP 5xx and 429."""
    retry_after_s: float = 0.0
    """Minimum delay that the server asked for, in seconds."""


def find_address_problem(address: str) -> str | None:
    """Return why an address is not valid, without repeating it; None if it is valid."""
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError:  # its message repeats a part of the address
        return "expected a URL with a valid host and port, such as https://HOST/PATH"
    if parts.scheme not in ("http", "https") or not host or any(c.isspace() for c in address):
        return "expected a URL such as https://HOST/PATH"
    if parts.username is not None or parts.password is not None:
        return "expected a URL without user name and password; the key in the environment signs the request"
    if parts.scheme == "http" and not is_loopback(host):
        return f"expected https, because http to {host} can be read and changed in transit (http is for loopback)"
    return None


def find_endpoint_problem(address: str) -> str | None:
    """Return why an address of a model server is not valid; None if it is valid.

    The address is stored in settings and records, so it must not contain a secret.
    """
    try:
        parts = urlsplit(address)
        if parts.username is not None or parts.password is not None:
            return "expected a URL without user name and password; put the key into RATCHET_ENDPOINT_KEY (environment)"
        if parts.query or parts.fragment:
            return "expected a URL without a query; put the key into RATCHET_ENDPOINT_KEY (environment)"
    except ValueError:
        return "expected a URL with a valid host and port, such as https://HOST/v1"
    if any(not " " < c < "\x7f" for c in address):
        return "expected a URL of printable ASCII characters, such as https://HOST/v1"
    return find_address_problem(address)


def post(address: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> PostResult:
    """Send one request. The deadline covers the whole exchange, even if the server answers slowly, byte by byte.

    Args:
        address: an address in which `find_address_problem` finds no problem.
        body: JSON.
        headers: headers in addition to Content-Type and User-Agent.
        timeout_s: the deadline, in seconds.
    """
    results: list[PostResult] = []
    thread = threading.Thread(target=lambda: results.append(_exchange(address, body, headers, timeout_s)), daemon=True)
    thread.start()
    thread.join(timeout_s)
    return results[0] if results else PostResult(False, f"no answer within {timeout_s:g} s")


def format_attempts(count: int) -> str:
    """Format a number of attempts: `1 attempt`, `3 attempts`."""
    return f"{count} attempt{'' if count == 1 else 's'}"


def compute_retry_delay_s(attempt: int, result: PostResult) -> float:
    """Return the delay before attempt number `attempt`, counted from 0.

    The delay is 1 s before attempt 1 and doubles with each attempt.
    """
    doubled = float(2 ** (attempt - 1)) * (1 + random.random() * JITTER)
    return min(max(doubled, result.retry_after_s), MAX_DELAY_S)


def describe_error(error: Exception) -> str:
    """Describe why a request failed, by the error at the root of an httpx2 error: `ConnectionRefusedError: ...`."""
    cause: BaseException = error
    while (origin := cause.__cause__ or cause.__context__) is not None and not isinstance(origin, BaseExceptionGroup):
        cause = origin
    return f"{type(cause).__name__}: {cause}".rstrip(": ")


def _exchange(address: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> PostResult:
    import httpx2  # imported late, because most commands send nothing

    uses_proxies = not is_loopback(str(urlsplit(address).hostname))
    all_headers = {"Content-Type": "application/json", "User-Agent": "ratchet", **headers}
    try:
        with (
            httpx2.Client(verify=ssl.create_default_context(), trust_env=uses_proxies, timeout=timeout_s) as client,
            client.stream("POST", address, content=body, headers=all_headers) as response,
        ):
            if response.is_success:
                return PostResult(True, f"HTTP {response.status_code}")
            return interpret_status(response.status_code, response.headers.get("Retry-After"))
    except (httpx2.InvalidURL, ValueError):  # their messages may contain the address
        return PostResult(False, "invalid address", is_retryable=False)
    except httpx2.HTTPError as error:
        return PostResult(False, describe_error(error))


def is_loopback(host: str) -> bool:
    """Return whether an address or name is this machine's loopback interface."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def interpret_status(status: int, retry_after: str | None) -> PostResult:
    """Return the result for a failed request: whether a retry may help, and the delay that the server asks for."""
    text = f"HTTP {status} {phrases.get(status, '')}".rstrip()
    if 300 <= status < 400:
        return PostResult(
            False, f"{text}: redirects are not followed; set the address of the target", is_retryable=False
        )
    return PostResult(
        False, text, is_retryable=status >= 500 or status == 429, retry_after_s=_parse_retry_after(retry_after)
    )


def _parse_retry_after(retry_after: str | None) -> float:
    """Parse Retry-After, seconds or a date (RFC 9110, 10.2.3), to seconds; 0 if it is neither."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after.strip())
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0
