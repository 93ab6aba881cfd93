"""Telling one hook of one event: a signed POST, or a program; tried again where that may help.

A webhook's request carries (times in Unix seconds, the key from the environment, never written anywhere):

    X-Ratchet-Event       promote | rollback
    X-Ratchet-Delivery    the event's id: the same in every try, so a receiver knows what it has seen
    X-Ratchet-Timestamp   when this try was sent
    X-Ratchet-Signature   sha256=HMAC-SHA256(key, timestamp + "." + body), hexadecimal; only where there is a key

It is tried again after errors of the connection, 5xx and 429 (Retry-After is honoured), not after other answers: those
will not change. Redirects are not followed: they would take the signature elsewhere. A program is tried again whatever
it ends with.
"""

import email.utils
import hashlib
import hmac
import ipaddress
import json
import os
import random
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from http.client import responses as phrases
from pathlib import Path
from urllib.parse import urlsplit

from ratchet import digest
from ratchet.config_gate import Hook
from ratchet.errors import SettingsError

LONGEST_WAIT_S = 60.0
"""Between two tries, whatever a server asks for."""
JITTER = 0.25
"""Share by which a wait is lengthened at random, so that many senders do not come at once."""

Wait = Callable[[float], None]


@dataclass(frozen=True)
class Outcome:
    """How it went."""

    told: bool
    detail: str
    tries: int


@dataclass(frozen=True)
class _Answer:
    """Of one try."""

    told: bool
    detail: str
    again: bool = True
    wait_s: float = 0.0
    """The server asked for at least so much patience."""


def check(hooks: Sequence[Hook], tell: bool = True) -> None:
    """Raise SettingsError for a hook that could never be told, before anything is promoted.

    Args:
        hooks: of params.yaml.
        tell: they are to be told now; where a key is asked for by name, it must be there.
    """
    for number, hook in enumerate(hooks):
        if hook.webhook is not None and (problem := _problem(hook.webhook)):
            raise SettingsError(f"promote.hooks[{number}].webhook: {problem}")
        if tell and hook.webhook and "key_variable" in hook.model_fields_set and not os.environ.get(hook.key_variable):
            raise SettingsError(
                f"promote.hooks[{number}].key_variable: {hook.key_variable} is not set in the environment, so nothing "
                "could be signed; set it, or leave key_variable out to send unsigned"
            )


def key(hook: Hook) -> str:
    """Names a hook: its address or command. How long it is waited for may change without making it another."""
    return digest.of_json([hook.webhook, list(hook.command)])[: digest.SHORT]


def label(hook: Hook) -> str:
    """A hook for people; path and query of an address are left out, for some services keep a secret there."""
    if hook.webhook is None:
        return f"command {Path(hook.command[0]).name}"
    parts = urlsplit(hook.webhook)
    return f"webhook {parts.scheme}://{parts.netloc}"


def tell(hook: Hook, event: Path, root: Path, wait: Wait = time.sleep) -> Outcome:
    """Tell a hook until it answers, or it is given up. Does not raise for what the other side does.

    Args:
        event: the file whose bytes are sent.
        root: the project; where a command runs.
        wait: called with seconds between two tries.
    """
    answer = _Answer(False, "not tried")
    for number in range(hook.retries + 1):
        if number:
            wait(_pause(number, answer))
        answer = _post(hook, event) if hook.webhook is not None else _run(hook, event, root)
        if answer.told or not answer.again:
            return Outcome(answer.told, answer.detail, number + 1)
    return Outcome(False, answer.detail, hook.retries + 1)


def signature(secret: str, timestamp: str, body: bytes) -> str:
    """What a receiver computes and compares (in constant time, and only for a recent timestamp)."""
    return "sha256=" + hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()


def _pause(number: int, answer: _Answer) -> float:
    doubled = float(2 ** (number - 1)) * (1 + random.random() * JITTER)
    return min(max(doubled, answer.wait_s), LONGEST_WAIT_S)


# --- webhooks ---------------------------------------------------------------------------------------------------------


def _problem(address: str) -> str | None:
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"{error}; write https://HOST/PATH"
    if parts.scheme not in ("http", "https") or not host or any(c.isspace() for c in address):
        return "is no address; write https://HOST/PATH"
    if parts.username is not None or parts.password is not None:
        return "holds a name or password; leave it out, the key in the environment signs what is sent"
    if parts.scheme == "http" and not _is_loopback(host):
        return f"http to {host} could be read and changed on the way; write https (http is for loopback)"
    return None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *about: object) -> None:
        """Follow nothing: the answer stays what it is."""


def _post(hook: Hook, event: Path) -> _Answer:
    """One try, with a deadline for all of it: a server that sends a byte now and then is not waited for."""
    answers: list[_Answer] = []
    trying = threading.Thread(target=lambda: answers.append(_exchange(hook, event)), daemon=True)
    trying.start()
    trying.join(hook.timeout_s)
    return answers[0] if answers else _Answer(False, f"no answer within {hook.timeout_s:g} s")


def _exchange(hook: Hook, event: Path) -> _Answer:
    address = str(hook.webhook)
    opener = urllib.request.build_opener(_NoRedirect)
    if _is_loopback(str(urlsplit(address).hostname)):
        opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
    try:
        with opener.open(_request(hook, event), timeout=hook.timeout_s) as response:
            unsigned = "" if os.environ.get(hook.key_variable) else f", unsigned: {hook.key_variable} is not set"
            return _Answer(True, f"HTTP {response.status}{unsigned}")
    except urllib.error.HTTPError as error:
        with error:
            return _refusal(error.code, error.headers.get("Retry-After"))
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        return _Answer(False, f"{type(reason).__name__}: {reason}".rstrip(": "))


def _request(hook: Hook, event: Path) -> urllib.request.Request:
    body, timestamp = event.read_bytes(), str(int(time.time()))
    content = json.loads(body)
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "ratchet",
        "X-Ratchet-Event": content["action"],
        "X-Ratchet-Delivery": content["id"],
        "X-Ratchet-Timestamp": timestamp,
    }
    if secret := os.environ.get(hook.key_variable):
        headers["X-Ratchet-Signature"] = signature(secret, timestamp, body)
    return urllib.request.Request(str(hook.webhook), body, headers, method="POST")  # noqa: S310 (`check` saw the scheme)


def _refusal(status: int, retry_after: str | None) -> _Answer:
    text = f"HTTP {status} {phrases.get(status, '')}".rstrip()
    if 300 <= status < 400:
        return _Answer(False, f"{text}: redirects are not followed; write the address that it leads to", again=False)
    return _Answer(False, text, again=status >= 500 or status == 429, wait_s=_seconds(retry_after))


def _seconds(retry_after: str | None) -> float:
    """Retry-After: seconds, or a date (RFC 9110, 10.2.3); what is neither asks for nothing."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after.strip())
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


# --- programs ---------------------------------------------------------------------------------------------------------


def _run(hook: Hook, event: Path, root: Path) -> _Answer:
    """One try: the event on standard input, its id in RATCHET_EVENT_ID, what it says into a log beside the event."""
    environment = os.environ | {"RATCHET_EVENT_ID": str(json.loads(event.read_bytes())["id"])}
    log = event.parent / f"{key(hook)}.log"
    with event.open("rb") as stdin, log.open("ab") as out:
        try:
            process = subprocess.Popen(
                hook.command, cwd=root, env=environment, stdin=stdin, stdout=out, stderr=out, start_new_session=True
            )
        except OSError as error:
            return _Answer(False, f"does not start ({error.strerror})", again=False)
        try:
            code = process.wait(hook.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own group: nothing that it started goes on
            process.wait()
            return _Answer(False, f"not done within {hook.timeout_s:g} s; killed")
    return _Answer(code == 0, f"exit code {code}" + (f" (see {log})" if code else ""))
