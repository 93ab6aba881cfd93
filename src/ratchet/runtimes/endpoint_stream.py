"""The answer of an OpenAI-compatible server as it is given: one request, read by whoever asks, in pieces.

The fields are those of chat completion chunks (`delta.content`, `delta.reasoning_content` or `delta.reasoning`,
`finish_reason`, `usage`). A server that answers with a whole completion instead is taken at its word.
"""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ratchet.runtimes import endpoint_reply as replies
from ratchet.runtimes import event_stream
from ratchet.runtimes.endpoint_reply import Reply, ShapeError
from ratchet.runtimes.endpoint_wire import CONNECT_S, MOST_BYTES, Got, Place, SilentError, shut, toward

LOOK_S = 0.25
"""Between two looks at how long the server has been silent."""


class Delta(NamedTuple):
    """A piece of an answer."""

    text: str
    reasoning: bool
    """The server has set it apart as reasoning."""


class Listening:
    """One request and its answer, piece by piece. Used by one thread.

    Args:
        silent_s: so long the server may say nothing of the answer; signs of life that say nothing do not count.
    """

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._heard_s = time.monotonic()
        self._over = threading.Event()
        self._late = False
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None

    def wait(self, seconds: float) -> None:
        """Sleep, not at all when it is nothing or less."""
        time.sleep(max(0.0, seconds))

    def exchange(self, place: Place, path: str, body: Any, headers: Mapping[str, str], limit_s: float) -> Got:
        """Send the request; of an answer that is none the whole body, of another one nothing: `pieces` reads it.

        Raises:
            SilentError: no answer has begun within `limit_s` seconds, or the connection failed.
        """
        self.close()
        self._over, self._late, self._heard_s = threading.Event(), False, time.monotonic()
        one = self._connection = toward(place, min(CONNECT_S, limit_s))
        try:
            one.connect()
            one.sock.settimeout(limit_s)
            one.request("POST", place.path + path, json.dumps(body).encode(), dict(headers))
            watch = threading.Thread(
                target=self._watch, args=(one.sock, self._over), name="endpoint watch", daemon=True
            )
            watch.start()
            response = self._response = one.getresponse()
            if response.status == http.HTTPStatus.OK:
                return Got(response.status, None, b"")
            return Got(response.status, response.getheader("Retry-After"), response.read(MOST_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise self._silence(error) from None

    def pieces(self) -> Iterator[Delta | Reply]:
        """What comes, and at the end the whole, whose text is what came.

        Raises:
            SilentError: it broke off, or nothing came for too long.
            ShapeError: what came is no stream of an answer.
        """
        if self._response is None:
            raise ShapeError("no answer was begun")
        whole = _Whole()
        try:
            if "event-stream" not in str(self._response.getheader("Content-Type", "")):
                yield from _at_once(self._response.read(MOST_BYTES))
                return
            for data in event_stream.data_of(self._lines(self._response)):
                if data == event_stream.DONE:
                    whole.ended = True
                    break
                if data is not None:
                    for delta in whole.take(data):
                        self._heard_s = time.monotonic()
                        yield delta
            yield whole.reply()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, ShapeError) and not self._late:
                raise
            raise self._silence(error) from None
        finally:
            self.close()

    def close(self) -> None:
        """End it now, wherever it is; a server then stops to answer."""
        self._over.set()
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = None

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        read = 0
        while line := response.readline(MOST_BYTES):
            read += len(line)
            if read > MOST_BYTES:
                raise ShapeError(f"more than {MOST_BYTES // 2**20} MiB, which is no answer")
            yield line

    def _watch(self, sock: socket.socket, over: threading.Event) -> None:
        """In a thread: end the connection of a server that has been silent for too long."""
        while not over.wait(LOOK_S):
            if time.monotonic() - self._heard_s > self._silent_s:
                self._late = True
                shut(sock)
                return

    def _silence(self, error: Exception) -> SilentError:
        if self._late:
            return SilentError(f"nothing of the answer came for {self._silent_s:g} s (machine.endpoint.answer_s)")
        return SilentError(f"{type(error).__name__}: {error}".rstrip(": "))


class _Whole:
    """What of an answer has come."""

    def __init__(self) -> None:
        self.ended = False
        self._texts: dict[bool, list[str]] = {False: [], True: []}
        self._finish: str | None = None
        self._counts: dict[str, Any] = {}
        self._nats: list[Any] = []

    def take(self, data: str) -> Iterator[Delta]:
        """The pieces of one event. Raises ShapeError."""
        document = replies.read_object(data.encode())
        if "error" in document:  # a server that fails while it answers
            raise ShapeError(f"the server broke off: {replies.words(data.encode())}")
        if isinstance(usage := document.get("usage"), dict):
            self._counts = usage
        choices = document.get("choices")
        for choice in choices[:1] if isinstance(choices, list) else []:
            yield from self._choice(choice, data)

    def _choice(self, choice: Any, data: str) -> Iterator[Delta]:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            raise ShapeError(f"a choice without delta: {replies.shown(data)}")
        if isinstance(finish := choice.get("finish_reason"), str):
            self._finish = finish
        if isinstance(logprobs := choice.get("logprobs"), dict):
            self._nats += logprobs.get("content") or []
        for reasoning, text in (
            (True, delta.get("reasoning_content") or delta.get("reasoning")), (False, delta.get("content")),
        ):  # fmt: skip
            if not isinstance(text, str | None):
                raise ShapeError(f"a delta whose content is no text: {replies.shown(data)}")
            if text:
                self._texts[reasoning].append(text)
                yield Delta(text, reasoning)

    def reply(self) -> Reply:
        """The whole. Raises ShapeError when it has no end: neither a reason for it nor the sign."""
        if self._finish is None and not self.ended:
            raise ShapeError("the stream ended before the answer did")
        message = {"content": "".join(self._texts[False]), "reasoning_content": "".join(self._texts[True])}
        choice = {"message": message, "finish_reason": self._finish or "stop", "logprobs": {"content": self._nats}}
        return replies.read_reply(json.dumps({"choices": [choice], "usage": self._counts}).encode(), 1)


def _at_once(body: bytes) -> Iterator[Delta | Reply]:
    """The answer of a server that does not stream."""
    reply = replies.read_reply(body, 1)
    if reply.reasoning:
        yield Delta(reply.reasoning, True)
    if reply.text:
        yield Delta(reply.text, False)
    yield reply
