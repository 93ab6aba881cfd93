"""Client of OpenAI-compatible servers: concurrent chats with retries, and streamed answers.

The client retries transient failures with increasing delays: broken connections, stalls, 429, 5xx, incomplete answers.
A permanent rejection raises an error at once, with the server's message. The key comes from the environment
(RATCHET_ENDPOINT_KEY), is sent only to the configured address (https, or this machine), and appears in no message.
`http.client` follows no redirects and uses no proxies, so request and key go only to that address.

Streams have the fields of chat completion chunks (`delta.content`, `delta.reasoning_content` or `delta.reasoning`,
`finish_reason`, `usage`). A server that returns a whole completion instead is supported too.
"""

import http.client
import json
import math
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import urlsplit

from ratchet import http_client
from ratchet.config.machine import EndpointSettings
from ratchet.data.conversation import replace_surrogates
from ratchet.errors import EndpointError, SettingsError

MAX_MESSAGE_CHARACTERS = 300
"""Maximum number of characters of a server's message that is repeated."""

CONTEXT_LENGTH_KEYS = ("max_model_len", "n_ctx", "n_ctx_train")
"""Keys under which a server's model entry may contain the context length."""

CONTEXT_EXCEEDED_TEXTS = (
    "context_length_exceeded",
    "exceed_context_size_error",
    "maximum context length",
    "context size",
)
"""Texts that identify a response to a prompt that exceeds the context: error codes of OpenAI (vLLM) and llama.cpp, then
parts of the messages of vLLM and llama.cpp."""

STREAM_END = "[DONE]"
"""Data of the event with which OpenAI-compatible servers end a stream."""
CONNECT_TIMEOUT_S = 30.0
"""Maximum time in seconds to connect."""
MAX_RESPONSE_BYTES = 64 * 2**20
"""Maximum size of a response, in bytes."""
POLL_S = 0.05
"""Seconds between two checks of `stop`."""
CLOSE_POLL_S = 0.25
"""Seconds between two checks of how long a server has sent nothing."""
KEY_VARIABLE = "RATCHET_ENDPOINT_KEY"
MAX_LISTED_MODELS = 8
"""Maximum number of models that a message lists."""
OPTIONAL_PARAMETERS = ("logprobs", "seed", "top_p", "stream_options")
"""Parameters that a server may not support; if it rejects one by name, requests are sent without it."""
IDENTITY_KEYS = ("id", "root", "owned_by", "meta")
"""Keys of a server's model entry that identify the model; times and random permissions are left out."""
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
Message = Mapping[str, Any]
"""`role`, `content`, and other fields that the server reads."""


class MalformedReplyError(ValueError):
    """The response is not a valid reply; the message describes it."""


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling parameters of an answer."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: bool = False
    """Request the log-probability of each token."""


@dataclass(frozen=True)
class ChatRequest:
    """One chat to answer."""

    index: int
    """Identifies the chat for the caller."""
    messages: Sequence[Message]
    sampling: SamplingOptions


@dataclass(frozen=True)
class ChatReply:
    """A chat reply."""

    text: str
    reasoning: str | None
    """Reasoning that the server returns separately (`reasoning_content` or `reasoning`); None if there is none."""
    finish: str
    """Finish reason of the server (stop, length, ...); `context` if it rejected the prompt as too long; `refused` if it
    rejected the chat for another reason (see `refusal`)."""
    prompt_tokens: int | None
    """Number of prompt tokens, counted by the server; None if not reported."""
    tokens: int | None
    """Number of tokens of answer and reasoning; None if not reported."""
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
        text=replace_surrogates(text or ""),
        reasoning=replace_surrogates(reasoning) if reasoning else None,
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
    """Return the message of a server's error object, else the body, shortened."""
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


def iterate_event_data(lines: Iterable[bytes]) -> Iterator[str | None]:
    """Yield the data of each event from the lines of a stream (with line ends); None for a comment.

    An incomplete last event is yielded too; its data may be invalid.
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
        """Why this process ended the request: `late` or `stopped`."""

    def run(
        self, address: ServerAddress, path: str, body: Any, headers: Mapping[str, str], limit_s: float
    ) -> EndpointResponse:
        """Send the request and read the whole response. The method is POST if `body` (sent as JSON) is set, else GET.

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
    """Wake the thread that reads from the socket.

    The shutdown method of SSL sockets is not used, because it drops the reader's state.
    """
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        return  # already closed


# Concurrent requests: each has its own thread, results arrive in any order, and all can be cancelled.


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
        """Yield results that have arrived; drop errors among them."""
        while True:
            try:
                active, request, result = self._results.get_nowait()
            except queue.Empty:
                return
            self._active.discard(active)
            if not isinstance(result, Exception):
                yield request, result


def run_single_request(answer: Callable[[RetriableRequest], ResultT], stop: Callable[[], bool]) -> ResultT:
    """Run one request and return its result.

    Raises the error of the request, or RequestCancelledError if `stop` returns True.
    """
    pool: RequestPool[None, ResultT] = RequestPool(lambda _, active: answer(active))
    try:
        for _, result in pool.run(iter([None]), 1, stop):
            return result
        raise RequestCancelledError
    finally:
        pool.cancel()


class ChatDelta(NamedTuple):
    """A piece of an answer."""

    text: str
    is_reasoning: bool
    """True if the server marked the piece as reasoning."""


class ChatStream:
    """One request and its streamed answer. Used by one thread.

    Args:
        silent_s: maximum time without a piece of the answer; keep-alive comments are not pieces.
    """

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._last_delta_s = time.monotonic()
        self._closed = threading.Event()
        self._is_timed_out = False
        self._connection: http.client.HTTPConnection | None = None
        self._response: http.client.HTTPResponse | None = None

    def wait(self, seconds: float) -> None:
        """Sleep if `seconds` is positive."""
        time.sleep(max(0.0, seconds))

    def exchange(
        self, address: ServerAddress, path: str, body: Any, headers: Mapping[str, str], limit_s: float
    ) -> EndpointResponse:
        """Send the request and wait until the response starts.

        The body of an error response is returned; `pieces` reads the body of an answer.

        Raises:
            IncompleteReplyError: no response started within `limit_s` seconds, or the connection failed.
        """
        self.close()
        self._closed, self._is_timed_out, self._last_delta_s = threading.Event(), False, time.monotonic()
        connection = self._connection = create_connection(address, min(CONNECT_TIMEOUT_S, limit_s))
        try:
            connection.connect()
            connection.sock.settimeout(limit_s)
            connection.request("POST", address.path + path, json.dumps(body).encode(), dict(headers))
            watcher = threading.Thread(
                target=self._watch_silence, args=(connection.sock, self._closed), name="endpoint watch", daemon=True
            )
            watcher.start()
            response = self._response = connection.getresponse()
            if response.status == http.HTTPStatus.OK:
                return EndpointResponse(response.status, None, b"")
            return EndpointResponse(
                response.status, response.getheader("Retry-After"), response.read(MAX_RESPONSE_BYTES)
            )
        except (OSError, http.client.HTTPException) as error:
            raise self._describe_error(error) from None

    def pieces(self) -> Iterator[ChatDelta | ChatReply]:
        """Yield the pieces of the answer, and at the end the whole reply.

        Raises:
            IncompleteReplyError: the stream broke, or no piece arrived for too long.
            MalformedReplyError: the response is not a stream of an answer.
        """
        if self._response is None:
            raise MalformedReplyError("no request was sent")
        builder = _ChatReplyBuilder()
        try:
            if "event-stream" not in str(self._response.getheader("Content-Type", "")):
                yield from _parse_unstreamed_reply(self._response.read(MAX_RESPONSE_BYTES))
                return
            for data in iterate_event_data(self._lines(self._response)):
                if data == STREAM_END:
                    builder.has_end = True
                    break
                if data is not None:
                    for delta in builder.parse_event(data):
                        self._last_delta_s = time.monotonic()
                        yield delta
            yield builder.reply()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, MalformedReplyError) and not self._is_timed_out:
                raise
            raise self._describe_error(error) from None
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection in any state; the server then stops generating."""
        self._closed.set()
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = None

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        read_bytes = 0
        while line := response.readline(MAX_RESPONSE_BYTES):
            read_bytes += len(line)
            if read_bytes > MAX_RESPONSE_BYTES:
                raise MalformedReplyError(f"the response exceeds {MAX_RESPONSE_BYTES // 2**20} MiB")
            yield line

    def _watch_silence(self, sock: socket.socket, closed: threading.Event) -> None:
        """Shut down the connection when the server has been silent for too long (runs in a thread)."""
        while not closed.wait(CLOSE_POLL_S):
            if time.monotonic() - self._last_delta_s > self._silent_s:
                self._is_timed_out = True
                shut_down_socket(sock)
                return

    def _describe_error(self, error: Exception) -> IncompleteReplyError:
        if self._is_timed_out:
            return IncompleteReplyError(
                f"no piece of the answer arrived for {self._silent_s:g} s (machine.endpoint.timeout_s)"
            )
        return IncompleteReplyError(f"{type(error).__name__}: {error}".rstrip(": "))


class _ChatReplyBuilder:
    """Collects a streamed answer."""

    def __init__(self) -> None:
        self.has_end = False
        self._texts: dict[bool, list[str]] = {False: [], True: []}
        self._finish: str | None = None
        self._counts: dict[str, Any] = {}
        self._nats: list[Any] = []

    def parse_event(self, data: str) -> Iterator[ChatDelta]:
        """Yield the pieces of one event. Raises MalformedReplyError."""
        document = read_object(data.encode())
        if "error" in document:  # the server failed while answering
            raise MalformedReplyError(f"the server failed: {read_error_message(data.encode())}")
        if isinstance(usage := document.get("usage"), dict):
            self._counts = usage
        choices = document.get("choices")
        for choice in choices[:1] if isinstance(choices, list) else []:
            yield from self._parse_choice(choice, data)

    def _parse_choice(self, choice: Any, data: str) -> Iterator[ChatDelta]:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            raise MalformedReplyError(f"a choice has no delta: {shorten_for_message(data)}")
        if isinstance(finish := choice.get("finish_reason"), str):
            self._finish = finish
        if isinstance(logprobs := choice.get("logprobs"), dict):
            self._nats += logprobs.get("content") or []
        for is_reasoning, text in (
            (True, delta.get("reasoning_content") or delta.get("reasoning")), (False, delta.get("content")),
        ):  # fmt: skip
            if not isinstance(text, str | None):
                raise MalformedReplyError(f"the content of a delta is not text: {shorten_for_message(data)}")
            if text:
                self._texts[is_reasoning].append(text)
                yield ChatDelta(text, is_reasoning)

    def reply(self) -> ChatReply:
        """Return the whole reply. Raises MalformedReplyError if the stream had neither a finish reason nor an end."""
        if self._finish is None and not self.has_end:
            raise MalformedReplyError("the stream ended before the answer")
        message = {"content": "".join(self._texts[False]), "reasoning_content": "".join(self._texts[True])}
        choice = {"message": message, "finish_reason": self._finish or "stop", "logprobs": {"content": self._nats}}
        return read_reply(json.dumps({"choices": [choice], "usage": self._counts}).encode(), 1)


def _parse_unstreamed_reply(body: bytes) -> Iterator[ChatDelta | ChatReply]:
    """Yield the pieces of an answer from a server that does not stream."""
    reply = read_reply(body, 1)
    if reply.reasoning:
        yield ChatDelta(reply.reasoning, True)
    if reply.text:
        yield ChatDelta(reply.text, False)
    yield reply


# The client.


@dataclass(frozen=True)
class ServedModel:
    """The model that a server serves."""

    name: str
    identity: Mapping[str, Any]
    """The server's description of the model, as JSON; the same server gives it again after a restart."""
    context_tokens: int | None = None
    """Maximum tokens of prompt and answer together; None if not reported."""


def _never_stop() -> bool:
    return False


class OpenAiEndpoint:
    """Client of one server.

    Args:
        address: prefix of `/chat/completions`, such as http://127.0.0.1:8000 or https://HOST/v1.
        settings: section machine.endpoint.
        model: the model's name on the server; None: the only model that the server serves.
        returns_refusals: if True, a chat that the server rejects (400, 413, 422) gives a reply that reports the
            rejection; if False, the rejection raises an error.

    Raises:
        SettingsError: the address is invalid, or the key in the environment has invalid characters.
    """

    def __init__(
        self, address: str, settings: EndpointSettings, model: str | None = None, *, returns_refusals: bool = False
    ) -> None:
        self.address = ServerAddress.parse(address)
        self.notes: list[str] = []
        """Notes for users: parameters that the server does not support."""
        self._settings = settings
        self._returns_refusals = returns_refusals
        self._model = model
        self._key = _read_api_key()
        self._model_info: ServedModel | None = None
        self._unsupported: set[str] = set()
        self._max_tokens_name = "max_tokens"
        self._lock = threading.Lock()
        self._not_before_s = 0.0
        """No request is sent before this time (monotonic clock), because the server asked to wait."""

    def get_model(self, stop: Callable[[], bool] = _never_stop) -> ServedModel:
        """Return the model that answers; the server is queried once.

        Raises:
            SettingsError: the server does not serve the configured model; or no model is configured, and the server
                serves several models or does not list its models.
            EndpointError: the server does not answer.
        """
        if self._model_info is None:
            try:
                entries = run_single_request(self._list_models, stop)
            except RequestCancelledError:
                raise EndpointError(f"{self.address}: the request was cancelled") from None
            self._model_info = self._choose_model(entries)
        return self._model_info

    def ask(
        self, messages: Sequence[Message], sampling: SamplingOptions, stop: Callable[[], bool] = _never_stop
    ) -> ChatReply:
        """Answer one chat. Raises like `answers`; also EndpointError if `stop` returns True."""
        for _, reply in self.answers([ChatRequest(0, messages, sampling)], stop):
            return reply
        raise EndpointError(f"{self.address}: the request was cancelled")

    def answers(
        self, chats: Iterable[ChatRequest], stop: Callable[[], bool] = _never_stop
    ) -> Generator[tuple[int, ChatReply], None, None]:
        """Yield index and reply of each chat as they arrive, with up to machine.endpoint.max_concurrency requests.

        Chats are taken from `chats` as they are sent. When `stop` returns True, or the generator is closed, pending
        requests are cancelled. Before an error is raised, all earlier replies are yielded.

        Raises:
            SettingsError: the server rejects a request; the message has its reason.
            EndpointError: a request failed in all tries.
        """
        model = self.get_model(stop).name
        pool: RequestPool[ChatRequest, ChatReply] = RequestPool(
            lambda chat, request: self._answer(model, chat, request)
        )
        try:
            for chat, reply in pool.run(iter(chats), self._settings.max_concurrency, stop):
                yield chat.index, reply
        finally:
            pool.cancel()

    def stream(self, chat: ChatRequest) -> Iterator[ChatDelta | ChatReply]:
        """Yield the pieces of one answer, then the whole reply. Requests are retried until the answer starts.

        Raises:
            SettingsError: the server rejects the request.
            EndpointError: the server does not answer, or the stream broke.
        """
        model, silent_s = self.get_model().name, self._settings.timeout_s
        chat_stream = ChatStream(silent_s)

        def body() -> dict[str, Any]:
            streaming = {"stream": True, "stream_options": {"include_usage": True}}
            return {key: value for key, value in {**self._body(model, chat), **streaming}.items()
                    if key not in self._unsupported}  # fmt: skip

        parser: _ResponseParser[ChatReply | None] = _ResponseParser(lambda response, tries: None, self._parse_refusal)
        try:
            if (replacement := self._request_with_retries("/chat/completions", body, parser, chat_stream)) is not None:
                yield replacement
                return
            yield from chat_stream.pieces()
        except (IncompleteReplyError, MalformedReplyError) as error:
            raise EndpointError(f"{self.address}: the answer was interrupted: {self._hide_key(str(error))}") from None
        finally:
            chat_stream.close()

    def _answer(self, model: str, chat: ChatRequest, request: RetriableRequest) -> ChatReply:
        def read(response: EndpointResponse, tries: int) -> ChatReply:
            return read_reply(response.body, tries)

        parser = _ResponseParser(read, self._parse_refusal)
        return self._request_with_retries("/chat/completions", lambda: self._body(model, chat), parser, request)

    def _parse_refusal(self, response: EndpointResponse, tries: int) -> ChatReply | None:
        """Return the reply for a rejection of this chat only; None if it may concern all chats."""
        if response.status not in (400, 413, 422):
            return None
        if is_context_exceeded(response.body):
            return ChatReply("", None, "context", None, None, None, tries)
        if self._returns_refusals:
            message = self._hide_key(f"HTTP {response.status}: {read_error_message(response.body)}")
            return ChatReply("", None, "refused", None, None, None, tries, message)
        return None

    def _list_models(self, request: RetriableRequest) -> list[Mapping[str, Any]] | None:
        """List the server's models; None if the server does not list them."""

        def read(response: EndpointResponse, _: int) -> list[Mapping[str, Any]] | None:
            data = read_object(response.body).get("data")
            entries = data if isinstance(data, list) else []
            models: list[Mapping[str, Any]] = [
                entry for entry in entries
                if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry["id"].isprintable()
            ]  # fmt: skip
            if not models:
                raise MalformedReplyError(f"not a list of models: {read_error_message(response.body)}")
            return models

        def read_missing(response: EndpointResponse, _: int) -> list[Mapping[str, Any]] | None:
            return [] if response.status in (404, 405) else None

        return self._request_with_retries("/models", lambda: None, _ResponseParser(read, read_missing), request) or None

    def _choose_model(self, entries: list[Mapping[str, Any]] | None) -> ServedModel:
        if entries is None:
            if self._model is None:
                raise SettingsError(f"{self.address}: the server does not list its models; set the model's name")
            return ServedModel(self._model, {"id": self._model})
        names = [str(entry["id"]) for entry in entries]
        if self._model is None and len(entries) > 1:
            raise SettingsError(f"{self.address}: serves {_abbreviate_names(names)}; set the name of one of them")
        for entry in entries:
            if self._model in (None, entry["id"]):
                identity = {key: entry[key] for key in IDENTITY_KEYS if entry.get(key) is not None}
                return ServedModel(str(entry["id"]), identity, read_context_length(entry))
        raise SettingsError(f"{self.address}: does not serve {self._model!r}; it serves: {_abbreviate_names(names)}")

    def _body(self, model: str, chat: ChatRequest) -> dict[str, Any]:
        sampling = chat.sampling
        body: dict[str, Any] = {
            "model": model, "messages": [dict(entry) for entry in chat.messages], "stream": False,
            self._max_tokens_name: sampling.max_tokens, "temperature": sampling.temperature,
        }  # fmt: skip
        if sampling.temperature > 0:  # sent even if it is 1, because a server's default may be less
            body["top_p"] = sampling.top_p
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.logprobs:
            body["logprobs"] = True
        return {name: value for name, value in body.items() if name not in self._unsupported}

    def _request_with_retries(
        self,
        path: str,
        body: Callable[[], Any],
        parser: "_ResponseParser[ResultT]",
        request: RetriableRequest | ChatStream,
    ) -> ResultT:
        """Send a request until it succeeds or fails permanently."""
        for attempt in range(1, self._settings.max_attempts + 1):
            request.wait(self._not_before_s - time.monotonic())
            outcome, payload = http_client.PostResult(False, ""), body()
            try:
                response = request.exchange(self.address, path, payload, self._headers(), self._settings.timeout_s)
                while (
                    response.status in (400, 422)
                    and payload
                    and self._drop_unsupported(read_error_message(response.body), payload)
                ):
                    payload = body()
                    response = request.exchange(self.address, path, payload, self._headers(), self._settings.timeout_s)
                if response.status == 200:
                    return parser.parse(response, attempt)
                if (replacement := parser.parse_refusal(response, attempt)) is not None:
                    return replacement
                outcome = self._interpret_error(response)
            except IncompleteReplyError as error:
                outcome = http_client.PostResult(False, str(error))
            except MalformedReplyError as error:
                outcome = http_client.PostResult(False, f"HTTP 200, but {error}")
            reason = self._hide_key(outcome.detail)
            if not outcome.is_retryable:
                raise SettingsError(f"{self.address}{path}: {reason}")
            if attempt < self._settings.max_attempts:
                request.wait(self._pause_s(attempt, outcome))
        attempts = http_client.format_attempts(self._settings.max_attempts)
        raise EndpointError(
            f"{self.address}{path}: {reason}; {attempts} (machine.endpoint.max_attempts); check the server"
        )

    def _interpret_error(self, response: EndpointResponse) -> http_client.PostResult:
        outcome = http_client.interpret_status(response.status, response.retry_after)
        if 300 <= response.status < 400:
            return outcome
        is_retryable = outcome.is_retryable or response.status in (408, 425)
        key = f"; the key is read from {KEY_VARIABLE}" if response.status in (401, 403) else ""
        detail = f"{outcome.detail}: {read_error_message(response.body)}{key}"
        return replace(outcome, is_retryable=is_retryable, detail=detail)

    def _pause_s(self, attempt: int, outcome: http_client.PostResult) -> float:
        """Return the delay, doubled with each try. If the server asks to wait, all requests wait (`_not_before_s`)."""
        if outcome.retry_after_s:
            with self._lock:
                until_s = time.monotonic() + min(outcome.retry_after_s, http_client.MAX_DELAY_S)
                self._not_before_s = max(self._not_before_s, until_s)
        backoff_s = (
            http_client.compute_retry_delay_s(attempt, replace(outcome, retry_after_s=0.0))
            * self._settings.retry_delay_s
        )
        return min(backoff_s, http_client.MAX_DELAY_S)

    def _drop_unsupported(self, message: str, payload: Mapping[str, Any]) -> bool:
        """Omit or rename the parameter that a rejection names, in all later requests; return whether there is one."""
        with self._lock:
            if "max_completion_tokens" in message and "max_tokens" in payload:
                self._max_tokens_name = "max_completion_tokens"
                return True
            for name in OPTIONAL_PARAMETERS:
                if name in payload and name in message:
                    if name not in self._unsupported:
                        self._unsupported.add(name)
                        self.notes.append(f"{self.address} does not support {name}; requests are sent without it")
                    return True
        return False

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "ratchet"}
        return headers | ({"Authorization": f"Bearer {self._key}"} if self._key else {})

    def _hide_key(self, text: str) -> str:
        """Remove the key from a message, because servers repeat a key that they reject."""
        return text.replace(self._key, "(the key)") if self._key else text


@dataclass(frozen=True)
class _ResponseParser(Generic[ResultT]):
    """Functions that parse a response of status 200 and a rejection.

    If `parse_refusal` returns None, the rejection is an error.
    """

    parse: Callable[[EndpointResponse, int], ResultT]
    parse_refusal: Callable[[EndpointResponse, int], ResultT | None]


def _read_api_key() -> str:
    """Return the key in the environment; empty if there is none."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if any(not " " < c < "\x7f" for c in key):
        raise SettingsError(
            f"environment variable {KEY_VARIABLE}: contains invalid characters; set it to the server's key"
        )
    return key


def _abbreviate_names(names: Sequence[str]) -> str:
    shown = ", ".join(shorten_for_message(name) for name in names[:MAX_LISTED_MODELS])
    return f"{shown} and {len(names) - MAX_LISTED_MODELS} more" if len(names) > MAX_LISTED_MODELS else shown
