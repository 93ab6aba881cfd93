"""A network with latency: requests reach the server some seconds late, and answers return without a delay."""

import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

REQUEST = re.compile(rb"(?:GET|POST|PUT|PATCH|DELETE) (\S+) HTTP/1\.1\r\n")


class SlowProxy:
    """A proxy on loopback in front of a server on loopback."""

    def __init__(self, port: int, latency_s: float) -> None:
        self.latency_s = latency_s
        self.passed: list[str] = []
        """Paths of the forwarded requests, in order."""
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._closed = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def count(self, ending: str) -> int:
        """Return the number of forwarded requests whose paths end with `ending`."""
        return sum(path.partition("?")[0].endswith(ending) for path in self.passed)

    def close(self) -> None:
        """Accept no new connections."""
        self._closed.set()
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with suppress(OSError), client, socket.create_connection(("127.0.0.1", self._port)) as server:
            waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()
            threading.Thread(target=self._let_through, args=(waiting, server), daemon=True).start()
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()
            while data := client.recv(1 << 16):
                waiting.put((time.monotonic() + self.latency_s, data))
            waiting.put((time.monotonic() + self.latency_s, b""))
            self._closed.wait()

    def _let_through(self, waiting: "queue.Queue[tuple[float, bytes]]", server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                due, data = waiting.get()
                self._closed.wait(max(0.0, due - time.monotonic()))
                if not data:
                    server.shutdown(socket.SHUT_WR)
                    return
                self.passed += [path.decode() for path in REQUEST.findall(data)]
                server.sendall(data)

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_WR)


@contextmanager
def slow(port: int, latency_s: float) -> Iterator[SlowProxy]:
    """Run a proxy in front of the server at this port."""
    proxy = SlowProxy(port, latency_s)
    try:
        yield proxy
    finally:
        proxy.close()
