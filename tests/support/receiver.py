"""A real HTTP server on loopback that answers with given statuses and records the requests."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STALLS, HANGS_UP = 0, 1
"""These values replace a status. STALLS: the server sends a byte every 50 ms until the test ends. HANGS_UP: the server
closes the connection."""


@dataclass
class Receiver:
    """A server that sends the given answers in order, repeats the last answer, and records the requests."""

    answers: list[tuple[int, dict[str, str]]]
    port: int = 0
    path: str = "/deploy?token=secret"
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    stall: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.path}"


@contextmanager
def served(*answers: int | tuple[int, dict[str, str]]) -> Iterator[Receiver]:
    """Run the server until the end of the block."""
    receiver = Receiver([a if isinstance(a, tuple) else (a, {}) for a in answers])

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.got.append((self.path, dict(self.headers), body))
            status, headers = receiver.answers[min(len(receiver.got), len(receiver.answers)) - 1]
            if status == STALLS:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n")
                while not receiver.stall.wait(0.05):
                    self.wfile.write(b"x")
                return
            if status == HANGS_UP:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST  # noqa: N815

        def log_message(self, *about: object) -> None:
            """Disable the log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    receiver.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield receiver
    finally:
        receiver.stall.set()
        server.shutdown()
        server.server_close()
