"""What the answer of an OpenAI-compatible server says: a reply, words of refusal, or nothing that could be read."""

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

LONGEST_WORDS = 300
"""Characters of a server's words that are repeated."""

CONTEXT = ("max_model_len", "n_ctx", "n_ctx_train")

TOO_LONG = ("context_length_exceeded", "exceed_context_size_error", "maximum context length", "context size")
"""What servers say of a prompt that does not fit: OpenAI and vLLM, llama.cpp, vLLM's words, llama.cpp's."""


class MalformedReplyError(ValueError):
    """What came is no answer; the text names what it was."""


@dataclass(frozen=True)
class ChatReply:
    """What a model said."""

    text: str
    reasoning: str | None
    """Set apart by the server (`reasoning_content` or `reasoning`); None: it sets none apart."""
    finish: str
    """As the server says (stop, length, ...); `context`: it refused the prompt as too long for the model; `refused`:
    for another reason, see `refusal`."""
    prompt_tokens: int | None
    """As the server counts; None: it does not say."""
    tokens: int | None
    """Of the answer and its reasoning; None: the server does not say."""
    mean_log_probability: float | None
    """Of the tokens that the server gave log-probabilities for, in nats; None: none."""
    tries: int = 1
    """Requests that it took."""
    refusal: str | None = None
    """The server's words, where it answers others and not this chat (`finish` is then `refused`)."""


def read_reply(body: bytes, tries: int) -> ChatReply:
    """The first choice of a chat completion.

    Raises:
        MalformedReplyError: it is none.
    """
    document = read_object(body)
    choices = document.get("choices")
    if not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
        raise MalformedReplyError(f"no choices in it: {_body_excerpt(body)}")
    choice = choices[0]
    message, finish = choice.get("message"), choice.get("finish_reason")
    if not isinstance(message, dict) or not isinstance(finish, str):
        raise MalformedReplyError(f"a choice without message or finish_reason: {_body_excerpt(body)}")
    text = message.get("content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(text, str | None) or not isinstance(reasoning, str | None):
        raise MalformedReplyError(f"a message whose content is no text: {_body_excerpt(body)}")
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
    """An answer that is a JSON object. Raises MalformedReplyError."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise MalformedReplyError(f"no JSON, or half of it: {_body_excerpt(body)}") from None
    if not isinstance(document, dict):
        raise MalformedReplyError(f"no JSON object: {_body_excerpt(body)}")
    return document


def read_error_message(body: bytes) -> str:
    """What a server says is wrong, shortened: the message of its error, else the body as it is."""
    try:
        document = read_object(body)
    except MalformedReplyError:
        return shorten_for_message(body.decode("utf-8", "replace")) or "nothing"
    error = document.get("error", document)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or json.dumps(error)
    return shorten_for_message(error if isinstance(error, str) else json.dumps(error))


def read_context_length(entry: Mapping[str, Any]) -> int | None:
    """Tokens that prompt and answer may have together, by a server's entry of a model: vLLM and llama.cpp say it."""
    meta = entry.get("meta")
    known = {**(meta if isinstance(meta, dict) else {}), **entry}
    return next((count for name in CONTEXT if (count := _valid_token_count(known.get(name)))), None)


def is_context_exceeded(body: bytes) -> bool:
    """Whether it is refused because the model's context does not hold prompt and answer."""
    text = body.decode("utf-8", "replace").lower()
    return any(known in text for known in TOO_LONG)


def shorten_for_message(text: str) -> str:
    """Printable, on one line, shortened."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())  # nor halves of surrogate pairs
    return line if len(line) <= LONGEST_WORDS else f"{line[:LONGEST_WORDS]}..."


def _body_excerpt(body: bytes) -> str:
    return shorten_for_message(body[: 2 * LONGEST_WORDS].decode("utf-8", "replace")) or "nothing at all"


def _replace_surrogates(text: str) -> str:
    """Without halves of surrogate pairs, which JSON may hold and no file in UTF-8 can."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _valid_token_count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _mean_log_probability(logprobs: Any) -> float | None:
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not content:
        return None
    found = [one.get("logprob") if isinstance(one, dict) else None for one in content]
    values = [float(v) for v in found if isinstance(v, int | float) and math.isfinite(v)]
    return math.fsum(values) / len(values) if len(values) == len(content) else None


# Server-sent events, as servers of models stream their answers (https://html.spec.whatwg.org/#parsing-an-event-
# stream).
#
# Only what such servers send is read: the data of events. Names, ids and waits of events are passed over, and so are
# comments, which keep a connection alive.

DONE = "[DONE]"
"""What OpenAI-compatible servers end a stream with."""


def iterate_event_data(lines: Iterable[bytes]) -> Iterator[str | None]:
    """The data of each event, from the lines of a stream, with their ends; None for a comment: nothing but a sign.

    An event that the stream breaks off in is given too: what it lacks shows itself in its data.
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


# One request to a server and its whole answer, with a deadline for all of it; another thread may break it off.
#
# By `http.client`, which follows no redirects and knows no proxies: what is sent, and the key, go to the address that
# was
# named and nowhere else.

CONNECT_S = 30.0
"""Longest wait for a connection."""
MOST_BYTES = 64 * 2**20
"""Of an answer; more is none."""


class IncompleteReplyError(Exception):
    """No whole answer came; another try may help."""


class RequestCancelledError(Exception):
    """The request was broken off by us."""


@dataclass(frozen=True)
class EndpointResponse:
    """An answer of a server, whole."""

    status: int
    retry_after: str | None
    body: bytes


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is."""

    secure: bool
    host: str
    port: int | None
    path: str
    """What `/chat/completions` is added to."""

    @classmethod
    def of(cls, address: str) -> "ServerAddress":
        """From an address as people write it; `/v1` where it has no path.

        Raises:
            SettingsError: nothing could be sent there, or a secret would stand in it; the message repeats none.
        """
        if problem := http_client.find_endpoint_problem(address):
            raise SettingsError(f"the endpoint's address {problem}")
        parts = urlsplit(address)
        path = parts.path.rstrip("/") or "/v1"
        return cls(parts.scheme == "https", str(parts.hostname), parts.port, path)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"{'https' if self.secure else 'http'}://{host}{port}{self.path}"


class HttpExchange:
    """A request on its way. One thread runs it, any other may break it off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._ended: str | None = None
        """Why it was ended by us: `late` or `stopped`."""

    def run(
        self, place: ServerAddress, path: str, body: Any, headers: Mapping[str, str], limit_s: float
    ) -> EndpointResponse:
        """Send it and read the whole answer. POST with a body (as JSON), GET without (None).

        Raises:
            IncompleteReplyError: no whole answer within `limit_s` seconds, or the connection failed.
            RequestCancelledError: `break_off` was called.
        """
        connection = create_connection(place, min(CONNECT_S, limit_s))
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
                raise IncompleteReplyError(f"an answer of more than {MOST_BYTES // 2**20} MiB, which is none")
            return EndpointResponse(response.status, response.getheader("Retry-After"), content)
        except (OSError, http.client.HTTPException) as error:
            self._check(limit_s)
            raise IncompleteReplyError(f"{type(error).__name__}: {error}".rstrip(": ")) from None
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
                shut_down_socket(sock)

    def _end(self, why: str) -> None:
        with self._lock:
            self._ended = self._ended or why
            if self._socket is not None:
                shut_down_socket(self._socket)

    def _check(self, limit_s: float) -> None:
        if self._ended == "stopped":
            raise RequestCancelledError
        if self._ended == "late":
            raise IncompleteReplyError(f"no whole answer within {limit_s:g} s (machine.endpoint.answer_s)")


def create_connection(place: ServerAddress, timeout_s: float) -> http.client.HTTPConnection:
    """One that is not made yet."""
    if place.secure:
        return http.client.HTTPSConnection(
            place.host, place.port, timeout=timeout_s, context=ssl.create_default_context()
        )  # fmt: skip
    return http.client.HTTPConnection(place.host, place.port, timeout=timeout_s)


def shut_down_socket(sock: socket.socket) -> None:
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


class RetriableRequest:
    """One request through all of its tries; another thread may break it off."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._exchange: HttpExchange | None = None
        self._lock = threading.Lock()

    def wait(self, seconds: float) -> None:
        """Sleep, not at all when it is nothing or less. Raises RequestCancelledError when it was broken off."""
        if self._over.wait(max(0.0, seconds)):
            raise RequestCancelledError

    def exchange(
        self, place: ServerAddress, path: str, body: Any, headers: Mapping[str, str], limit_s: float
    ) -> EndpointResponse:
        """One try (see Exchange.run)."""
        one = HttpExchange()
        with self._lock:
            if self._over.is_set():
                raise RequestCancelledError
            self._exchange = one
        return one.run(place, path, body, headers, limit_s)

    def break_off(self) -> None:
        """End it now; its thread meets RequestCancelledError."""
        with self._lock:
            self._over.set()
            if self._exchange is not None:
                self._exchange.break_off()


class RequestPool(Generic[A, T]):
    """Many of them.

    Args:
        answer: what is done for each, in its thread.
    """

    def __init__(self, answer: Callable[[A, RetriableRequest], T]) -> None:
        self._answer = answer
        self._up: set[RetriableRequest] = set()
        self._landed: queue.SimpleQueue[tuple[RetriableRequest, A, T | Exception]] = queue.SimpleQueue()

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
        flight = RetriableRequest()
        self._up.add(flight)
        threading.Thread(target=self._run, args=(flight, one), name="endpoint request", daemon=True).start()

    def _run(self, flight: RetriableRequest, one: A) -> None:
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


def run_single_request(answer: Callable[[RetriableRequest], T], stop: Callable[[], bool]) -> T:
    """One request. Raises what it met; RequestCancelledError where `stop` says so."""
    flights: RequestPool[None, T] = RequestPool(lambda _, flight: answer(flight))
    try:
        for _, found in flights.fly(iter([None]), 1, stop):
            return found
        raise RequestCancelledError
    finally:
        flights.break_off()
