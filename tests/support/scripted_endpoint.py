"""An OpenAI-compatible server on loopback that returns scripted answers and failures."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

JSON = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """The server's reaction to a request. By default, the server answers with `body`."""

    body: JSON | bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hangs_up: bool = False
    """Whether the server closes the connection without an answer."""
    cut: bool = False
    """Whether the server closes the connection after half of the body."""
    stalls: bool = False
    """Whether the server sends a byte every 20 ms until the test ends."""
    events: tuple[bytes, ...] = ()
    """Server-sent events that replace the body, each in its own write. The connection ends after them."""
    hold_s: float = 0.0
    """Delay in seconds before each event."""
    after: Literal["end", "comments"] = "end"
    """Action after the events. `comments`: the server sends keep-alive comments until the test ends."""


def chat(text: str | None, finish: str = "stop", **more: Any) -> Said:
    """Return a chat completion. `more` adds fields to the message."""
    message = {"role": "assistant", "content": text, **more}
    usage = {"prompt_tokens": 11, "completion_tokens": 5, "total_tokens": 16}
    return Said({"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage})


def event(delta: JSON, **more: Any) -> bytes:
    """Return a chunk of a streamed chat completion. `more` adds fields to its choice."""
    return sse({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **more}]})


def sse(document: JSON | str) -> bytes:
    return f"data: {document if isinstance(document, str) else json.dumps(document)}\n\n".encode()


def streamed(
    *texts: str, reasoning: tuple[str, ...] = (), finish: str = "stop", hold_s: float = 0.0, prompt_tokens: int = 11
) -> Said:
    """Return a complete stream as vLLM sends it: deltas, finish reason, usage, and the mark [DONE]."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(texts) + len(reasoning)}
    events = [event({"role": "assistant", "content": ""})]
    events += [event({"reasoning_content": text}) for text in reasoning]
    events += [event({"content": text}) for text in texts]
    events += [event({}, finish_reason=finish), sse({"choices": [], "usage": usage}), sse("[DONE]")]
    return Said(events=tuple(events), hold_s=hold_s)


def error(status: int, text: str, **headers: str) -> Said:
    return Said({"error": {"message": text, "type": "x"}}, status, headers)


Script = Callable[[JSON, int], Said]
"""Maps a chat request and its number (from 0) to a reaction."""


@dataclass
class Server:
    """The script of the server, and the requests that it received."""

    script: Script
    models: Said
    port: int = 0
    got: list[JSON] = field(default_factory=list)
    """Bodies of the chat requests."""
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    at_once: int = 0
    """Largest number of simultaneous requests."""
    over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    here: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def serving(*names: str) -> Said:
    """Return the list of models."""
    return Said({"object": "list", "data": [{"id": name, "created": 7, "owned_by": "test"} for name in names]})


ONE_MODEL = serving("tiny-judge")


@contextmanager
def served(script: Script, models: Said = ONE_MODEL) -> Iterator[Server]:
    """Run the server until the end of the block."""
    server = Server(script, models)

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.paths.append(self.path)
            _send(self, server.models, server.over)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                number = len(server.got)
                server.got.append(body)
                server.headers.append(dict(self.headers))
                server.paths.append(self.path)
                server.here += 1
                server.at_once = max(server.at_once, server.here)
            try:
                _send(self, server.script(body, number), server.over)
            finally:
                with server.lock:
                    server.here -= 1

        def log_message(self, *about: object) -> None:
            """Disable the log."""

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *about: object) -> None:
            """Ignore the error: some tests disconnect clients on purpose."""

    listening = Quiet(("127.0.0.1", 0), Answers)
    server.port = listening.server_address[1]
    threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.over.set()
        listening.shutdown()
        listening.server_close()


def _send(to: BaseHTTPRequestHandler, said: Said, over: threading.Event) -> None:
    body = said.body if isinstance(said.body, bytes) else json.dumps(said.body).encode()
    if said.hangs_up:
        to.close_connection = True
        return
    to.send_response(said.status)
    if said.events:
        to.send_header("Content-Type", "text/event-stream; charset=utf-8")
        to.end_headers()
        to.close_connection = True
        for one in said.events:
            over.wait(said.hold_s)
            to.wfile.write(one)
            to.wfile.flush()
        while said.after == "comments" and not over.wait(0.02):
            to.wfile.write(b": still here\n\n")
        return
    for name, value in said.headers.items():
        to.send_header(name, value)
    if not said.stalls:
        to.send_header("Content-Length", str(len(body)))
    to.end_headers()
    if said.stalls:
        while not over.wait(0.02):
            to.wfile.write(b" ")
        return
    to.wfile.write(body[: len(body) // 2] if said.cut else body)
    if said.cut:
        to.close_connection = True
