"""One request to a server and its whole answer, with a deadline for all of it; another thread may break it off.

By `http.client`, which follows no redirects and knows no proxies: what is sent, and the key, go to the address that was
named and nowhere else.
"""

import http.client
import json
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from ratchet import http_client
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
        if problem := http_client.fault_of_endpoint(address):
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


# Requests in flight: each in a thread of its own, results as they come, all of them broken off when told so.

LOOK_S = 0.05
"""Between two looks at whether to stop."""

A = TypeVar("A")
T = TypeVar("T")


class Flight:
    """One request through all of its tries; another thread may break it off."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._exchange: Exchange | None = None
        self._lock = threading.Lock()

    def wait(self, seconds: float) -> None:
        """Sleep, not at all when it is nothing or less. Raises BrokenOffError when it was broken off."""
        if self._over.wait(max(0.0, seconds)):
            raise BrokenOffError

    def exchange(self, place: Place, path: str, body: Any, headers: Mapping[str, str], limit_s: float) -> Got:
        """One try (see Exchange.run)."""
        one = Exchange()
        with self._lock:
            if self._over.is_set():
                raise BrokenOffError
            self._exchange = one
        return one.run(place, path, body, headers, limit_s)

    def break_off(self) -> None:
        """End it now; its thread meets BrokenOffError."""
        with self._lock:
            self._over.set()
            if self._exchange is not None:
                self._exchange.break_off()


class Flights(Generic[A, T]):
    """Many of them.

    Args:
        answer: what is done for each, in its thread.
    """

    def __init__(self, answer: Callable[[A, Flight], T]) -> None:
        self._answer = answer
        self._up: set[Flight] = set()
        self._landed: queue.SimpleQueue[tuple[Flight, A, T | Exception]] = queue.SimpleQueue()

    def fly(self, asked: Iterator[A], most: int, stop: Callable[[], bool]) -> Iterator[tuple[A, T]]:
        """What was asked, and its answer, as they come, `most` at once; ends early when `stop` says so.

        Raises:
            Exception: the first that an answer met, behind all that had come until then.
        """
        left = True
        while not stop():
            while left and len(self._up) < most:
                left = False
                for one in asked:
                    self._start(one)
                    left = True
                    break
            if not self._up:
                return
            try:
                flight, one, found = self._landed.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            self._up.discard(flight)
            if isinstance(found, Exception):
                yield from self._arrived()
                raise found
            yield one, found
        yield from self._arrived()

    def break_off(self) -> None:
        """End all that are still on their way."""
        for flight in self._up:
            flight.break_off()

    def _start(self, one: A) -> None:
        flight = Flight()
        self._up.add(flight)
        threading.Thread(target=self._run, args=(flight, one), name="endpoint request", daemon=True).start()

    def _run(self, flight: Flight, one: A) -> None:
        try:
            found: T | Exception = self._answer(one, flight)
        except Exception as error:  # raised again where answers are taken
            found = error
        self._landed.put((flight, one, found))

    def _arrived(self) -> Iterator[tuple[A, T]]:
        """Answers that are there already; errors beside them are told by whoever asks again."""
        while True:
            try:
                flight, one, found = self._landed.get_nowait()
            except queue.Empty:
                return
            self._up.discard(flight)
            if not isinstance(found, Exception):
                yield one, found


def single(answer: Callable[[Flight], T], stop: Callable[[], bool]) -> T:
    """One request. Raises what it met; BrokenOffError where `stop` says so."""
    flights: Flights[None, T] = Flights(lambda _, flight: answer(flight))
    try:
        for _, found in flights.fly(iter([None]), 1, stop):
            return found
        raise BrokenOffError
    finally:
        flights.break_off()
