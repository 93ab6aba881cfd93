"""HTTP requests to OpenAI-compatible servers, parsing of their replies, and a pool of concurrent requests."""

import http.client
import json
import math
import queue
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from ratchet import http_client
from ratchet.errors import SettingsError

MAX_MESSAGE_CHARACTERS = 300
"""Maximum number of characters of a server's message that is repeated."""

CONTEXT_LENGTH_KEYS = ("max_model_len", "n_ctx", "n_ctx_train")

CONTEXT_EXCEEDED_TEXTS = (
    "context_length_exceeded",
    "exceed_context_size_error",
    "maximum context length",
    "context size",
)
"""Texts in responses to prompts that do not fit: OpenAI and vLLM, llama.cpp, vLLM's message, llama.cpp's message."""


class MalformedReplyError(ValueError):
    """The response is not a valid reply; the message describes it."""


@dataclass(frozen=True)
class ChatReply:
    """A chat reply."""

    text: str
    reasoning: str | None
    """Reasoning that the server separates (`reasoning_content` or `reasoning`); None if it does not."""
    finish: str
    """Finish reason of the server (stop, length, ...); `context`: it rejected the prompt as too long; `refused`: it
    rejected the chat for another reason, see `refusal`."""
    prompt_tokens: int | None
    """Count by the server; None if not reported."""
    tokens: int | None
    """Tokens of answer and reasoning; None if not reported."""
    mean_log_probability: float | None
    """Mean over the tokens with log-probabilities, in nats; None if there are none."""
    tries: int = 1
    """Number of requests that were needed."""
    refusal: str | None = None
    """The server's message if it rejected only this chat (`finish` is then `refused`)."""


def read_reply(body: bytes, tries: int) -> ChatReply:
    """Parse the first choice of a chat completion.

    Raises:
        MalformedReplyError: the body is not a chat completion.
    """
    document = read_object(body)
    choices = document.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise MalformedReplyError(f"the reply has no choices: {_body_excerpt(body)}")
    choice = choices[0]
    message, finish = choice.get("message"), choice.get("finish_reason")
    if not isinstance(message, dict) or not isinstance(finish, str):
        raise MalformedReplyError(f"a choice has no message or finish_reason: {_body_excerpt(body)}")
    text = message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(text, str | None) or not isinstance(reasoning, str | None):
        raise MalformedReplyError(f"the content of a message is not text: {_body_excerpt(body)}")
    usage = document.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return ChatReply(
        text=_replace_surrogates(text or ""),
        reasoning=_replace_surrogates(reasoning) if reasoning else None,
        finish=shorten_for_message(finish),
        prompt_tokens=_valid_token_count(counts.get("prompt_tokens")),
        tokens=_valid_token_count(counts.get("completion_tokens")),
        mean_log_probability=_mean_log_probability(choice.get("logprobs")),
        tries=tries,
    )


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises MalformedReplyError."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise MalformedReplyError(f"invalid or incomplete JSON: {_body_excerpt(body)}") from None
    if not isinstance(document, dict):
        raise MalformedReplyError(f"not a JSON object: {_body_excerpt(body)}")
    return document


def read_error_message(body: bytes) -> str:
    """Return a server's error message, shortened: that of its error object, else the body."""
    try:
        document = read_object(body)
    except MalformedReplyError:
        return shorten_for_message(body.decode("utf-8", "replace")) or "an empty response"
    error = document.get("error", document)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or json.dumps(error)
    return shorten_for_message(error if isinstance(error, str) else json.dumps(error))


def read_context_length(entry: Mapping[str, Any]) -> int | None:
    """Return the context length in a server's entry of a model; vLLM and llama.cpp report it."""
    meta = entry.get("meta")
    fields = {**(meta if isinstance(meta, dict) else {}), **entry}
    return next((count for name in CONTEXT_LENGTH_KEYS if (count := _valid_token_count(fields.get(name)))), None)


def is_context_exceeded(body: bytes) -> bool:
    """Return True if the request was rejected because prompt and answer exceed the model's context."""
    text = body.decode("utf-8", "replace").lower()
    return any(fragment in text for fragment in CONTEXT_EXCEEDED_TEXTS)


def shorten_for_message(text: str) -> str:
    """Make text printable, on one line, and shorten it."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())  # lone surrogates are not printable
    return line if len(line) <= MAX_MESSAGE_CHARACTERS else f"{line[:MAX_MESSAGE_CHARACTERS]}..."


def _body_excerpt(body: bytes) -> str:
    return shorten_for_message(body[: 2 * MAX_MESSAGE_CHARACTERS].decode("utf-8", "replace")) or "an empty response"


def _replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON may contain but UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _valid_token_count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _mean_log_probability(logprobs: Any) -> float | None:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not content:
        return None
    values_or_none = [token.get("logprob") if isinstance(token, dict) else None for token in content]
    values = [float(v) for v in values_or_none if isinstance(v, int | float) and math.isfinite(v)]
    return math.fsum(values) / len(values) if len(values) == len(content) else None


# Server-sent events of streamed answers (https://html.spec.whatwg.org/#parsing-an-event-stream).
#
# Only the data of events is read. Names, ids, retry times and comments, which keep a connection alive, are ignored.

STREAM_END = "[DONE]"
"""Data of the event with which OpenAI-compatible servers end a stream."""


def iterate_event_data(lines: Iterable[bytes]) -> Iterator[str | None]:
    """Yield the data of each event from the lines of a stream (with line ends); None for a comment.

    An incomplete last event is yielded too: its data is then invalid.
    """
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if not line:
            if data:
                yield "\n".join(data)
            data = []
        elif line.startswith(":"):
            yield None
        else:
            name, _, value = line.partition(":")
            if name == "data":
                data.append(value.removeprefix(" "))
    if data:
        yield "\n".join(data)


# One HTTP request with a deadline for the whole response; another thread may cancel it.
#
# `http.client` follows no redirects and uses no proxies: the request and the key go only to the configured address.

CONNECT_TIMEOUT_S = 30.0
"""Connection timeout."""
MAX_RESPONSE_BYTES = 64 * 2**20
"""Maximum size of a response."""


class IncompleteReplyError(Exception):
    """No complete response arrived; another try may succeed."""


class RequestCancelledError(Exception):
    """This process cancelled the request."""


@dataclass(frozen=True)
class EndpointResponse:
    """A complete HTTP response."""

    status: int
    retry_after: str | None
    body: bytes


@dataclass(frozen=True)
class ServerAddress:
    """Address of a server."""

    is_secure: bool
    host: str
    port: int | None
    path: str
    """Prefix of `/chat/completions`."""

    @classmethod
    def parse(cls, address: str) -> "ServerAddress":
        """Parse an address as users write it; the default path is `/v1`.

        Raises:
            SettingsError: the address is invalid, or contains a secret, which the message does not repeat.
        """
        if problem := http_client.find_endpoint_problem(address):
            raise SettingsError(f"the endpoint's address {problem}")
        parts = urlsplit(address)
        path = parts.path.rstrip("/") or "/v1"
        return cls(parts.scheme == "https", str(parts.hostname), parts.port, path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{'https' if self.is_secure else 'http'}://{host}{port}{self.path}"


class HttpExchange:
    """A pending request. One thread runs it; any other may cancel it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._end_reason: str | None = None
        """Why this process ended it: `late` or `stopped`."""

    def run(
        self, address: ServerAddress, path: str, body: Any, headers: Mapping[str, str], limit_s: float
    ) -> EndpointResponse:
        """Send the request and read the whole response. POST with a body (as JSON), GET without (None).

        Raises:
            IncompleteReplyError: no complete response within `limit_s` seconds, or the connection failed.
            RequestCancelledError: `cancel` was called.
        """
        connection = create_connection(address, min(CONNECT_TIMEOUT_S, limit_s))
        timer = threading.Timer(limit_s, self._end, ("late",))
        timer.daemon = True
        timer.start()
        try:
            connection.connect()
            self._set_socket(connection.sock)
            connection.sock.settimeout(limit_s)
            payload = None if body is None else json.dumps(body, ensure_ascii=True, allow_nan=False).encode()
            connection.request("GET" if payload is None else "POST", address.path + path, payload, dict(headers))
            with connection.getresponse() as response:
                content = response.read(MAX_RESPONSE_BYTES + 1)
            self._raise_if_ended(limit_s)  # a response without length looks complete when the socket is shut down
            if len(content) > MAX_RESPONSE_BYTES:
                raise IncompleteReplyError(f"the response exceeds {MAX_RESPONSE_BYTES // 2**20} MiB")
            return EndpointResponse(response.status, response.getheader("Retry-After"), content)
        except (OSError, http.client.HTTPException) as error:
            self._raise_if_ended(limit_s)
            raise IncompleteReplyError(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        finally:
            timer.cancel()
            self._set_socket(None)
            connection.close()

    def cancel(self) -> None:
        """Cancel the request; `run` raises."""
        self._end("stopped")

    def _set_socket(self, sock: socket.socket | None) -> None:
        with self._lock:
            self._socket = sock
            if sock is not None and self._end_reason:
                shut_down_socket(sock)

    def _end(self, reason: str) -> None:
        with self._lock:
            self._end_reason = self._end_reason or reason
            if self._socket is not None:
                shut_down_socket(self._socket)

    def _raise_if_ended(self, limit_s: float) -> None:
        if self._end_reason == "stopped":
            raise RequestCancelledError
        if self._end_reason == "late":
            raise IncompleteReplyError(f"no complete answer within {limit_s:g} s (machine.endpoint.timeout_s)")


def create_connection(address: ServerAddress, timeout_s: float) -> http.client.HTTPConnection:
    """Create a connection object without connecting."""
    if address.is_secure:
        return http.client.HTTPSConnection(
            address.host, address.port, timeout=timeout_s, context=ssl.create_default_context()
        )  # fmt: skip
    return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)


def shut_down_socket(sock: socket.socket) -> None:
    """Wake the thread that reads from the socket. Not with SSL sockets' own method, which drops the reader's state."""
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # already closed


# Concurrent requests: each has its own thread, results arrive in any order, and all can be cancelled.

POLL_S = 0.05
"""Interval between two checks of `stop`."""

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class RetriableRequest:
    """One request with all of its tries; another thread may cancel it."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._exchange: HttpExchange | None = None
        self._lock = threading.Lock()

    def wait(self, seconds: float) -> None:
        """Sleep if `seconds` is positive. Raises RequestCancelledError if the request is cancelled."""
        if self._cancelled.wait(max(0.0, seconds)):
            raise RequestCancelledError

    def exchange(
        self, address: ServerAddress, path: str, body: Any, headers: Mapping[str, str], limit_s: float
    ) -> EndpointResponse:
        """Run one try (see `HttpExchange.run`)."""
        exchange = HttpExchange()
        with self._lock:
            if self._cancelled.is_set():
                raise RequestCancelledError
            self._exchange = exchange
        return exchange.run(address, path, body, headers, limit_s)

    def cancel(self) -> None:
        """Cancel the request; its thread gets RequestCancelledError."""
        with self._lock:
            self._cancelled.set()
            if self._exchange is not None:
                self._exchange.cancel()


class RequestPool(Generic[RequestT, ResultT]):
    """Runs requests concurrently.

    Args:
        answer: processes one request in its thread.
    """

    def __init__(self, answer: Callable[[RequestT, RetriableRequest], ResultT]) -> None:
        self._answer = answer
        self._active: set[RetriableRequest] = set()
        self._results: queue.SimpleQueue[tuple[RetriableRequest, RequestT, ResultT | Exception]] = queue.SimpleQueue()

    def run(
        self, requests: Iterator[RequestT], max_concurrency: int, stop: Callable[[], bool]
    ) -> Iterator[tuple[RequestT, ResultT]]:
        """Yield requests with their results as they arrive, at most `max_concurrency` at once; end early on `stop`.

        Raises:
            Exception: the first error of a request, after all earlier results.
        """
        has_more = True
        while not stop():
            while has_more and len(self._active) < max_concurrency:
                has_more = False
                for request in requests:
                    self._start(request)
                    has_more = True
                    break
            if not self._active:
                return
            try:
                active, request, result = self._results.get(timeout=POLL_S)
            except queue.Empty:
                continue
            self._active.discard(active)
            if isinstance(result, Exception):
                yield from self._drain_results()
                raise result
            yield request, result
        yield from self._drain_results()

    def cancel(self) -> None:
        """Cancel all pending requests."""
        for active in self._active:
            active.cancel()

    def _start(self, request: RequestT) -> None:
        active = RetriableRequest()
        self._active.add(active)
        threading.Thread(target=self._run, args=(active, request), name="endpoint request", daemon=True).start()

    def _run(self, active: RetriableRequest, request: RequestT) -> None:
        try:
            result: ResultT | Exception = self._answer(request, active)
        except Exception as error:  # raised again in `run`
            result = error
        self._results.put((active, request, result))

    def _drain_results(self) -> Iterator[tuple[RequestT, ResultT]]:
        """Yield results that have arrived; errors among them are dropped."""
        while True:
            try:
                active, request, result = self._results.get_nowait()
            except queue.Empty:
                return
            self._active.discard(active)
            if not isinstance(result, Exception):
                yield request, result


def run_single_request(answer: Callable[[RetriableRequest], ResultT], stop: Callable[[], bool]) -> ResultT:
    """Run one request. Raises its error; RequestCancelledError if `stop` returns True."""
    pool: RequestPool[None, ResultT] = RequestPool(lambda _, active: answer(active))
    try:
        for _, result in pool.run(iter([None]), 1, stop):
            return result
        raise RequestCancelledError
    finally:
        pool.cancel()
