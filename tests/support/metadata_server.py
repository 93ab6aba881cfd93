"""An HTTP server on loopback that replaces a cloud's metadata server, and a wait function with a timeout."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PATIENCE_S = 30.0


class MetadataServer:
    """Answers each request with the status and the text that `answer` returns."""

    flavour = ""
    """Value of the header Metadata-Flavor in the answers."""

    def __init__(self) -> None:
        me = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = me.answer(self.command, self.path, self.headers)
                self.send_response(status)
                if me.flavour:
                    self.send_header("Metadata-Flavor", me.flavour)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                with suppress(ConnectionError):  # the client may have timed out
                    self.wfile.write(body.encode())

            def do_PUT(self) -> None:
                self.do_GET()

            def log_message(self, *about: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, method: str, path: str, headers: Message) -> tuple[int, str]:
        raise NotImplementedError

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
