"""A proxy that simulates a faulty network in front of an HTTP server: errors, resets, stalls, lost answers, altered
bytes, outages."""

import http.client
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

PIECE_BYTES = 4096
HOLD_S = 0.02

Kind = Literal["status", "reset", "stall", "lost", "flip-sent", "flip-read", "truncate", "slow"]


@dataclass(frozen=True)
class Request:
    """A request of a client."""

    method: str
    target: str
    headers: dict[str, str] = field(repr=False)
    """Names are in lower case."""

    @property
    def body_bytes(self) -> int:
        return int(self.headers.get("content-length", 0))


def any_request(_: Request) -> bool:
    """Match every request."""
    return True


@dataclass
class Fault:
    """A kind of fault, the requests that it affects, and the number of times that it occurs.

    Kinds:
        status: the proxy answers with `status` and S3's error `code`; the request does not reach the server.
        reset: the proxy cuts the connection after `bytes` of the request's body.
        stall: the proxy stops reading and writing after `bytes` of the request's body.
        lost: the server executes the request, and the proxy cuts the connection before the answer.
        flip-sent, flip-read: the proxy changes one bit of the request's body or of the answer's body.
        truncate: the proxy sends half of the answer's body and then ends the connection.
        slow: the proxy transfers bodies at `bytes_s` bytes per second.
    """

    kind: Kind
    times: int | None = 1
    """None means until `heal` is called."""
    where: Callable[[Request], bool] = any_request
    status: int = 503
    code: str = "SlowDown"
    bytes: int = 0
    bytes_s: float = 1024.0


class FaultyProxy:
    """Listens on `endpoint` and accepts one request per connection. `seen` has all requests with a received head,
    except those during outages."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        # The receive buffer is small, so that a client notices a slow reader.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * PIECE_BYTES)
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.down = False
        """Whether there is an outage: the proxy resets each connection at once."""
        self.refused = 0
        """Number of connections during outages."""
        self.struck = 0
        """Number of faults that occurred."""
        self.seen: list[Request] = []
        self.opaque_tags = False
        """Whether the proxy answers like a service whose ETags are not MD5 sums (for example, with KMS encryption)."""
        self.ignores_conditions = False
        """Whether the proxy removes conditions from requests, like a service without conditional writes."""
        threading.Thread(target=self._accept, daemon=True).start()

    def inject(self, *faults: Fault) -> None:
        """Add faults. For each request, the first fault that matches and has occurrences left is applied."""
        with self._lock:
            self._faults += faults

    def heal(self) -> None:
        """End all faults and outages."""
        with self._lock:
            self._faults.clear()
        self.down = False

    def close(self) -> None:
        """Close the listening socket and end all waits."""
        self._over.set()
        self._socket.close()

    def sent_bytes(self, method: str = "PUT") -> int:
        """Return the sum of the body sizes that clients announced in requests of this method."""
        return sum(request.body_bytes for request in self.seen if request.method == method)

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            if self.down:
                self.refused += 1
                _cut(client)
            else:
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError, http.client.HTTPException):
            head, rest = _head(client)
            if not head:
                return
            request = _parsed(head)
            with self._lock:
                self.seen.append(request)
                fault = next((f for f in self._faults if (f.times is None or f.times > 0) and f.where(request)), None)
                if fault is not None:
                    self.struck += 1
                    fault.times = None if fault.times is None else fault.times - 1
            if request.headers.get("expect", "").lower() == "100-continue":
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._answer(client, request, rest, fault)

    def _answer(self, client: socket.socket, request: Request, rest: bytes, fault: Fault | None) -> None:
        kind = fault.kind if fault is not None else ""
        if fault is not None and fault.kind in ("reset", "stall"):
            self._receive(client, rest, min(fault.bytes, request.body_bytes), None)
            if fault.kind == "stall":
                self._hold(client)
            _cut(client)
            return
        pace = fault.bytes_s if fault is not None and fault.kind == "slow" else None
        body = self._receive(client, rest, request.body_bytes, pace)
        if self.down:
            _cut(client)
            return
        if kind == "flip-sent":
            body = _flipped(body)
        if fault is not None and fault.kind == "status":
            status, headers, content = fault.status, {"Content-Type": "application/xml"}, _error(fault.code)
        else:
            status, headers, content = self._forward(request, body)
        if kind == "lost" or self.down:
            _cut(client)
            return
        self._reply(client, request, (status, headers, _flipped(content) if kind == "flip-read" else content), fault)

    def _forward(self, request: Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=60)
        try:
            connection.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                if name not in ("connection", "expect") and not (self.ignores_conditions and name.startswith("if-")):
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            headers = dict(answer.getheaders())
            if self.opaque_tags:
                headers = {name: '"opaque"' if name.lower() == "etag" else value for name, value in headers.items()}
            return answer.status, headers, answer.read()
        finally:
            connection.close()

    def _reply(
        self, client: socket.socket, request: Request, answer: tuple[int, dict[str, str], bytes], fault: Fault | None
    ) -> None:
        status, headers, content = answer
        own = {"content-length", "connection", "transfer-encoding"}
        length = next((v for k, v in headers.items() if k.lower() == "content-length"), "0")
        lines = [f"HTTP/1.1 {status} {http.client.responses.get(status, 'Unknown')}"]
        lines += [f"{name}: {value}" for name, value in headers.items() if name.lower() not in own]
        if status != 204:
            lines.append(f"Content-Length: {length if request.method == 'HEAD' else len(content)}")
        client.sendall(("\r\n".join([*lines, "Connection: close"]) + "\r\n\r\n").encode("latin-1"))
        if request.method == "HEAD":
            return
        kept = content[: len(content) // 2] if fault is not None and fault.kind == "truncate" else content
        pace = fault.bytes_s if fault is not None and fault.kind == "slow" else None
        for start in range(0, len(kept), PIECE_BYTES):
            client.sendall(piece := kept[start : start + PIECE_BYTES])
            self._rest(len(piece), pace)
            if self.down:
                _cut(client)
                return

    def _receive(self, client: socket.socket, rest: bytes, wanted: int, pace: float | None) -> bytes:
        parts = [rest[:wanted]]
        left = wanted - len(parts[0])
        while left > 0 and not self._over.is_set():
            piece = client.recv(min(left, PIECE_BYTES if pace else 1 << 16))
            if not piece:
                raise ConnectionError("the client has gone")
            parts.append(piece)
            left -= len(piece)
            self._rest(len(piece), pace)
            if self.down:
                _cut(client)
                raise ConnectionError("an outage")
        return b"".join(parts)

    def _rest(self, sent: int, pace: float | None) -> None:
        if pace is not None and sent:
            self._over.wait(sent / pace)

    def _hold(self, client: socket.socket) -> None:
        """Wait without an answer until the client disconnects. The client's bytes stay in the kernel's buffers, which
        fill up."""
        while not self._over.is_set() and self._faults:
            time.sleep(HOLD_S)
            state = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0]
            if state != 1:  # TCP_ESTABLISHED
                return


def _head(client: socket.socket) -> tuple[bytes, bytes]:
    """Return the head of a request, and the part of its body that arrived with the head."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = client.recv(1 << 16)
        if not piece:
            return b"", b""
        received += piece
    head, _, rest = received.partition(b"\r\n\r\n")
    return head, rest


def _parsed(head: bytes) -> Request:
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ")
    pairs = (line.split(":", 1) for line in lines)
    return Request(method, target, {name.strip().lower(): value.strip() for name, value in pairs})


def _cut(client: socket.socket) -> None:
    """Reset the connection instead of closing it normally."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def _flipped(content: bytes) -> bytes:
    if not content:
        return content
    at = random.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def _error(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}, says the test</Message></Error>'.encode()


@contextmanager
def before(port: int) -> Iterator[FaultyProxy]:
    """Start a proxy in front of a server on loopback. The proxy stops at the end of the block."""
    proxy = FaultyProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()
