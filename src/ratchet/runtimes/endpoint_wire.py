"""One request to a server and its whole answer, with a deadline for all of it; another thread may break it off.

By `http.client`, which follows no redirects and knows no proxies: what is sent, and the key, go to the address that was
named and nowhere else.
"""

import http.client
import json
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ratchet import posting
from ratchet.errors import SettingsError

CONNECT_S = 30.0
"""Longest wait for a connection."""
MOST_BYTES = 64 * 2**20
"""Of an answer; more is none."""


class SilentError(Exception):
    """No whole answer came; another try may help."""


class BrokenOffError(Exception):
    """The request was broken off by us."""


@dataclass(frozen=True)
class Got:
    """An answer of a server, whole."""

    status: int
    retry_after: str | None
    body: bytes


@dataclass(frozen=True)
class Place:
    """Where a server is."""

    secure: bool
    host: str
    port: int | None
    path: str
    """What `/chat/completions` is added to."""

    @classmethod
    def of(cls, address: str) -> "Place":
        """From an address as people write it; `/v1` where it has no path.

        Raises:
            SettingsError: nothing could be sent there, or a secret would stand in it; the message repeats none.
        """
        if problem := posting.fault_of_endpoint(address):
            raise SettingsError(f"the endpoint's address {problem}")
        parts = urlsplit(address)
        path = parts.path.rstrip("/") or "/v1"
        return cls(parts.scheme == "https", str(parts.hostname), parts.port, path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{'https' if self.secure else 'http'}://{host}{port}{self.path}"


class Exchange:
    """A request on its way. One thread runs it, any other may break it off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._ended: str | None = None
        """Why it was ended by us: `late` or `stopped`."""

    def run(self, place: Place, path: str, body: Any, headers: Mapping[str, str], limit_s: float) -> Got:
        """Send it and read the whole answer. POST with a body (as JSON), GET without (None).

        Raises:
            SilentError: no whole answer within `limit_s` seconds, or the connection failed.
            BrokenOffError: `break_off` was called.
        """
        connection = toward(place, min(CONNECT_S, limit_s))
        timer = threading.Timer(limit_s, self._end, ("late",))
        timer.daemon = True
        timer.start()
        try:
            connection.connect()
            self._holds(connection.sock)
            connection.sock.settimeout(limit_s)
            sent = None if body is None else json.dumps(body, ensure_ascii=True, allow_nan=False).encode()
            connection.request("GET" if sent is None else "POST", place.path + path, sent, dict(headers))
            with connection.getresponse() as response:
                content = response.read(MOST_BYTES + 1)
            self._check(limit_s)  # an answer that ends with its connection looks whole when we end that
            if len(content) > MOST_BYTES:
                raise SilentError(f"an answer of more than {MOST_BYTES // 2**20} MiB, which is none")
            return Got(response.status, response.getheader("Retry-After"), content)
        except (OSError, http.client.HTTPException) as error:
            self._check(limit_s)
            raise SilentError(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        finally:
            timer.cancel()
            self._holds(None)
            connection.close()

    def break_off(self) -> None:
        """End it now; `run` raises."""
        self._end("stopped")

    def _holds(self, sock: socket.socket | None) -> None:
        with self._lock:
            self._socket = sock
            if sock is not None and self._ended:
                shut(sock)

    def _end(self, why: str) -> None:
        with self._lock:
            self._ended = self._ended or why
            if self._socket is not None:
                shut(self._socket)

    def _check(self, limit_s: float) -> None:
        if self._ended == "stopped":
            raise BrokenOffError
        if self._ended == "late":
            raise SilentError(f"no whole answer within {limit_s:g} s (machine.endpoint.answer_s)")


def toward(place: Place, timeout_s: float) -> http.client.HTTPConnection:
    """One that is not made yet."""
    if place.secure:
        return http.client.HTTPSConnection(
            place.host, place.port, timeout=timeout_s, context=ssl.create_default_context()
        )  # fmt: skip
    return http.client.HTTPConnection(place.host, place.port, timeout=timeout_s)


def shut(sock: socket.socket) -> None:
    """Wake whoever reads from it. Not the method of SSL sockets, which takes the state away under their reader."""
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already
