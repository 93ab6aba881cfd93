"""The answer of an OpenAI-compatible server as it is given: one request, read by whoever asks, in pieces.

The fields are those of chat completion chunks (`delta.content`, `delta.reasoning_content` or `delta.reasoning`,
`finish_reason`, `usage`). A server that answers with a whole completion instead is taken at its word.
"""

import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ratchet import http_client
from ratchet.config.machine import EndpointSettings as Patience
from ratchet.errors import EndpointError, SettingsError
from ratchet.models.runtimes import openai_requests
from ratchet.models.runtimes import openai_requests as replies
from ratchet.models.runtimes.openai_requests import (
    CONNECT_S,
    MOST_BYTES,
    ChatReply,
    EndpointResponse,
    IncompleteReplyError,
    MalformedReplyError,
    RequestCancelledError,
    RequestPool,
    RetriableRequest,
    ServerAddress,
    create_connection,
    run_single_request,
    shut_down_socket,
)

LOOK_S = 0.25
"""Between two looks at how long the server has been silent."""


class ChatDelta(NamedTuple):
    """A piece of an answer."""

    text: str
    reasoning: bool
    """The server has set it apart as reasoning."""


class ChatStream:
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

    def exchange(
        self, place: ServerAddress, path: str, body: Any, headers: Mapping[str, str], limit_s: float
    ) -> EndpointResponse:
        """Send the request; of an answer that is none the whole body, of another one nothing: `pieces` reads it.

        Raises:
            IncompleteReplyError: no answer has begun within `limit_s` seconds, or the connection failed.
        """
        self.close()
        self._over, self._late, self._heard_s = threading.Event(), False, time.monotonic()
        one = self._connection = create_connection(place, min(CONNECT_S, limit_s))
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
                return EndpointResponse(response.status, None, b"")
            return EndpointResponse(response.status, response.getheader("Retry-After"), response.read(MOST_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise self._silence(error) from None

    def pieces(self) -> Iterator[ChatDelta | ChatReply]:
        """What comes, and at the end the whole, whose text is what came.

        Raises:
            IncompleteReplyError: it broke off, or nothing came for too long.
            MalformedReplyError: what came is no stream of an answer.
        """
        if self._response is None:
            raise MalformedReplyError("no answer was begun")
        whole = _ChatReplyBuilder()
        try:
            if "event-stream" not in str(self._response.getheader("Content-Type", "")):
                yield from _parse_unstreamed_reply(self._response.read(MOST_BYTES))
                return
            for data in openai_requests.iterate_event_data(self._lines(self._response)):
                if data == openai_requests.DONE:
                    whole.ended = True
                    break
                if data is not None:
                    for delta in whole.take(data):
                        self._heard_s = time.monotonic()
                        yield delta
            yield whole.reply()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, MalformedReplyError) and not self._late:
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
                raise MalformedReplyError(f"more than {MOST_BYTES // 2**20} MiB, which is no answer")
            yield line

    def _watch(self, sock: socket.socket, over: threading.Event) -> None:
        """In a thread: end the connection of a server that has been silent for too long."""
        while not over.wait(LOOK_S):
            if time.monotonic() - self._heard_s > self._silent_s:
                self._late = True
                shut_down_socket(sock)
                return

    def _silence(self, error: Exception) -> IncompleteReplyError:
        if self._late:
            return IncompleteReplyError(
                f"nothing of the answer came for {self._silent_s:g} s (machine.endpoint.answer_s)"
            )
        return IncompleteReplyError(f"{type(error).__name__}: {error}".rstrip(": "))


class _ChatReplyBuilder:
    """What of an answer has come."""

    def __init__(self) -> None:
        self.ended = False
        self._texts: dict[bool, list[str]] = {False: [], True: []}
        self._finish: str | None = None
        self._counts: dict[str, Any] = {}
        self._nats: list[Any] = []

    def take(self, data: str) -> Iterator[ChatDelta]:
        """The pieces of one event. Raises MalformedReplyError."""
        document = replies.read_object(data.encode())
        if "error" in document:  # a server that fails while it answers
            raise MalformedReplyError(f"the server broke off: {replies.read_error_message(data.encode())}")
        if isinstance(usage := document.get("usage"), dict):
            self._counts = usage
        choices = document.get("choices")
        for choice in choices[:1] if isinstance(choices, list) else []:
            yield from self._choice(choice, data)

    def _choice(self, choice: Any, data: str) -> Iterator[ChatDelta]:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict):
            raise MalformedReplyError(f"a choice without delta: {replies.shorten_for_message(data)}")
        if isinstance(finish := choice.get("finish_reason"), str):
            self._finish = finish
        if isinstance(logprobs := choice.get("logprobs"), dict):
            self._nats += logprobs.get("content") or []
        for reasoning, text in (
            (True, delta.get("reasoning_content") or delta.get("reasoning")), (False, delta.get("content")),
        ):  # fmt: skip
            if not isinstance(text, str | None):
                raise MalformedReplyError(f"a delta whose content is no text: {replies.shorten_for_message(data)}")
            if text:
                self._texts[reasoning].append(text)
                yield ChatDelta(text, reasoning)

    def reply(self) -> ChatReply:
        """The whole. Raises MalformedReplyError when it has no end: neither a reason for it nor the sign."""
        if self._finish is None and not self.ended:
            raise MalformedReplyError("the stream ended before the answer did")
        message = {"content": "".join(self._texts[False]), "reasoning_content": "".join(self._texts[True])}
        choice = {"message": message, "finish_reason": self._finish or "stop", "logprobs": {"content": self._nats}}
        return replies.read_reply(json.dumps({"choices": [choice], "usage": self._counts}).encode(), 1)


def _parse_unstreamed_reply(body: bytes) -> Iterator[ChatDelta | ChatReply]:
    """The answer of a server that does not stream."""
    reply = replies.read_reply(body, 1)
    if reply.reasoning:
        yield ChatDelta(reply.reasoning, True)
    if reply.text:
        yield ChatDelta(reply.text, False)
    yield reply


# Models behind OpenAI-compatible servers (vLLM, llama.cpp and others): many chats at once, asked until they answer.
#
# What may end otherwise is tried again, later each time: broken connections, stalls, 429, 5xx, answers that are half
# or
# none. What would be refused again is an error at once, in the server's own words. The key comes from the environment
# (RATCHET_ENDPOINT_KEY), goes to the named address only (https, or this machine), and is in no message.

VARIABLE = "RATCHET_ENDPOINT_KEY"
T = TypeVar("T")
Message = Mapping[str, Any]
"""`role`, `content`, and what else the server reads."""

SHOWN = 8
"""Names of models in a message."""
OPTIONAL = ("logprobs", "seed", "top_p", "stream_options")
"""What a server may not know: where it refuses one of them by name, it is asked without."""
IDENTITY = ("id", "root", "owned_by", "meta")
"""What of a server's entry of a model tells it from others; times and random permissions do not."""


@dataclass(frozen=True)
class SamplingOptions:
    """How an answer is drawn."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: bool = False
    """Ask for the log-probability of each token."""


@dataclass(frozen=True)
class ChatRequest:
    """One chat to be answered."""

    place: int
    """What the caller knows it by."""
    messages: Sequence[Message]
    sampling: SamplingOptions


@dataclass(frozen=True)
class ServedModel:
    """The model that answers."""

    name: str
    identity: Mapping[str, Any]
    """What the server says of it, as JSON; a restart of the same server changes nothing here."""
    context_tokens: int | None = None
    """What prompt and answer may have together; None: it does not say."""


class ChatClient(Protocol):
    """Who answers chats. `OpenAiEndpoint` does."""

    def answers(self, asked: Iterable[ChatRequest], stop: Callable[[], bool]) -> Iterator[tuple[int, ChatReply]]:
        """Place and reply of each, as they come."""
        ...


def _never_stop() -> bool:
    return False


class OpenAiEndpoint:
    """Asks one server.

    Args:
        address: http://127.0.0.1:8000 or https://HOST/v1: what `/chat/completions` is added to.
        patience: how it is asked (machine.endpoint).
        model: its name there; None: the only one that is served.
        refusals: a chat that the server refuses for what it is (400, 413, 422) has a reply that says so; False: that is
            an error.

    Raises:
        SettingsError: the address is none, or the key in the environment could not be sent.
    """

    def __init__(self, address: str, patience: Patience, model: str | None = None, *, refusals: bool = False) -> None:
        self.place = ServerAddress.of(address)
        self.notes: list[str] = []
        """What a reader should know: settings that the server does not take."""
        self._patience = patience
        self._refusals = refusals
        self._model = model
        self._key = _read_api_key()
        self._served: ServedModel | None = None
        self._left_out: set[str] = set()
        self._limit_word = "max_tokens"
        self._lock = threading.Lock()
        self._not_before_s = 0.0
        """Nobody asks before (monotonic clock): the server asked for patience."""

    def served(self, stop: Callable[[], bool] = _never_stop) -> ServedModel:
        """Which model answers; the server is asked once.

        Raises:
            SettingsError: it serves several, or not the wanted one; or it refuses to say, and none was named.
            EndpointError: it does not answer.
        """
        if self._served is None:
            try:
                listed = run_single_request(self._listed, stop)
            except RequestCancelledError:
                raise EndpointError(f"{self.place}: the request was broken off") from None
            self._served = self._choose(listed)
        return self._served

    def ask(
        self, messages: Sequence[Message], sampling: SamplingOptions, stop: Callable[[], bool] = _never_stop
    ) -> ChatReply:
        """One answer. Raises as `answers` does; EndpointError also where `stop` says so."""
        for _, reply in self.answers([ChatRequest(0, messages, sampling)], stop):
            return reply
        raise EndpointError(f"{self.place}: the request was broken off")

    def answers(
        self, asked: Iterable[ChatRequest], stop: Callable[[], bool] = _never_stop
    ) -> Generator[tuple[int, ChatReply], None, None]:
        """Place and reply of each, as they come, so many at once as machine.endpoint.requests says.

        Chats are taken from `asked` as they are sent. Once `stop` says so, or when this is closed, what is on its way
        is broken off and the answers end. Before an error is raised, all that came until then is given.

        Raises:
            SettingsError: the server refuses a request; its words are in the message.
            EndpointError: a request was not answered in as many tries as there are.
        """
        model = self.served(stop).name
        flights: RequestPool[ChatRequest, ChatReply] = RequestPool(lambda one, flight: self._answer(model, one, flight))
        try:
            for one, reply in flights.fly(iter(asked), self._patience.requests, stop):
                yield one.place, reply
        finally:
            flights.break_off()

    def streamed(self, asked: ChatRequest) -> Iterator[ChatDelta | ChatReply]:
        """One answer as it is given, in pieces; the last thing is the whole. Tries are made until it begins: what was
        read is not said again.

        Raises:
            SettingsError: the server refuses the request.
            EndpointError: it does not answer, or the answer broke off.
        """
        model, silent_s = self.served().name, self._patience.answer_s
        listening = ChatStream(silent_s)

        def body() -> dict[str, Any]:
            streaming = {"stream": True, "stream_options": {"include_usage": True}}
            return {key: value for key, value in {**self._body(model, asked), **streaming}.items()
                    if key not in self._left_out}  # fmt: skip

        reading: _ResponseParser[ChatReply | None] = _ResponseParser(lambda got, tries: None, self._refused)
        try:
            if (instead := self._insist("/chat/completions", body, reading, listening)) is not None:
                yield instead
                return
            yield from listening.pieces()
        except (IncompleteReplyError, MalformedReplyError) as error:
            raise EndpointError(f"{self.place}: the answer broke off: {self._hidden(str(error))}") from None
        finally:
            listening.close()

    def _answer(self, model: str, asked: ChatRequest, flight: RetriableRequest) -> ChatReply:
        def read(got: EndpointResponse, tries: int) -> ChatReply:
            return replies.read_reply(got.body, tries)

        reading = _ResponseParser(read, self._refused)
        return self._insist("/chat/completions", lambda: self._body(model, asked), reading, flight)

    def _refused(self, got: EndpointResponse, tries: int) -> ChatReply | None:
        """What a refusal of this chat alone is; None: it may be one of all."""
        if got.status not in (400, 413, 422):
            return None
        if replies.is_context_exceeded(got.body):
            return ChatReply("", None, "context", None, None, None, tries)
        if self._refusals:
            said = self._hidden(f"HTTP {got.status}: {replies.read_error_message(got.body)}")
            return ChatReply("", None, "refused", None, None, None, tries, said)
        return None

    def _listed(self, flight: RetriableRequest) -> list[Mapping[str, Any]] | None:
        """What the server serves; None: it has no such list."""

        def read(got: EndpointResponse, _: int) -> list[Mapping[str, Any]] | None:
            data = replies.read_object(got.body).get("data")
            entries = data if isinstance(data, list) else []
            named: list[Mapping[str, Any]] = [
                one for one in entries
                if isinstance(one, dict) and isinstance(one.get("id"), str) and one["id"].isprintable()
            ]  # fmt: skip
            if not named:
                raise MalformedReplyError(f"no list of models: {replies.read_error_message(got.body)}")
            return named

        def refused(got: EndpointResponse, _: int) -> list[Mapping[str, Any]] | None:
            return [] if got.status in (404, 405) else None

        return self._insist("/models", lambda: None, _ResponseParser(read, refused), flight) or None

    def _choose(self, listed: list[Mapping[str, Any]] | None) -> ServedModel:
        if listed is None:
            if self._model is None:
                raise SettingsError(f"{self.place}: the server does not list its models; name the one that is meant")
            return ServedModel(self._model, {"id": self._model})
        names = [str(one["id"]) for one in listed]
        if self._model is None and len(listed) > 1:
            raise SettingsError(f"{self.place}: serves {_abbreviate_names(names)}; name the one that is meant")
        for one in listed:
            if self._model in (None, one["id"]):
                identity = {key: one[key] for key in IDENTITY if one.get(key) is not None}
                return ServedModel(str(one["id"]), identity, replies.read_context_length(one))
        raise SettingsError(f"{self.place}: serves no model {self._model!r}; there are: {_abbreviate_names(names)}")

    def _body(self, model: str, asked: ChatRequest) -> dict[str, Any]:
        sampling = asked.sampling
        body: dict[str, Any] = {
            "model": model, "messages": [dict(one) for one in asked.messages], "stream": False,
            self._limit_word: sampling.max_tokens, "temperature": sampling.temperature,
        }  # fmt: skip
        if sampling.temperature > 0:  # 1 too: a server's own default may be less
            body["top_p"] = sampling.top_p
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.logprobs:
            body["logprobs"] = True
        return {name: value for name, value in body.items() if name not in self._left_out}

    def _insist(
        self, path: str, body: Callable[[], Any], reading: "_ResponseParser[T]", flight: RetriableRequest | ChatStream
    ) -> T:
        """Ask until there is an answer, or no hope."""
        for number in range(1, self._patience.tries + 1):
            flight.wait(self._not_before_s - time.monotonic())
            answer, sent = http_client.PostResult(False, ""), body()
            try:
                got = flight.exchange(self.place, path, sent, self._headers(), self._patience.answer_s)
                while (
                    got.status in (400, 422) and sent and self._does_without(replies.read_error_message(got.body), sent)
                ):
                    sent = body()
                    got = flight.exchange(self.place, path, sent, self._headers(), self._patience.answer_s)
                if got.status == 200:
                    return reading.read(got, number)
                if (instead := reading.refused(got, number)) is not None:
                    return instead
                answer = self._refusal(got)
            except IncompleteReplyError as error:
                answer = http_client.PostResult(False, str(error))
            except MalformedReplyError as error:
                answer = http_client.PostResult(False, f"HTTP 200, but {error}")
            why = self._hidden(answer.detail)
            if not answer.again:
                raise SettingsError(f"{self.place}{path}: {why}")
            if number < self._patience.tries:
                flight.wait(self._pause_s(number, answer))
        times = http_client.format_tries(self._patience.tries)
        raise EndpointError(f"{self.place}{path}: {why}; {times} (machine.endpoint.tries); see to the server")

    def _refusal(self, got: EndpointResponse) -> http_client.PostResult:
        said = http_client.interpret_status(got.status, got.retry_after)
        if 300 <= got.status < 400:
            return said
        again = said.again or got.status in (408, 425)
        key = f"; the key is read from {VARIABLE}" if got.status in (401, 403) else ""
        return replace(said, again=again, detail=f"{said.detail}: {replies.read_error_message(got.body)}{key}")

    def _pause_s(self, number: int, answer: http_client.PostResult) -> float:
        """Doubled with each try; a server that asks for patience gets it from every request (`_not_before_s`)."""
        if answer.wait_s:
            with self._lock:
                until_s = time.monotonic() + min(answer.wait_s, http_client.LONGEST_WAIT_S)
                self._not_before_s = max(self._not_before_s, until_s)
        own_s = http_client.compute_pause_s(number, replace(answer, wait_s=0.0)) * self._patience.pause_s
        return min(own_s, http_client.LONGEST_WAIT_S)

    def _does_without(self, said: str, sent: Mapping[str, Any]) -> bool:
        """Whether the words of a refusal name something that can be left out or said otherwise; from now on it is."""
        with self._lock:
            if "max_completion_tokens" in said and "max_tokens" in sent:
                self._limit_word = "max_completion_tokens"
                return True
            for name in OPTIONAL:
                if name in sent and name in said:
                    if name not in self._left_out:
                        self._left_out.add(name)
                        self.notes.append(f"{self.place} does not take {name}, so it is asked without")
                    return True
        return False

    def _headers(self) -> dict[str, str]:
        found = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "ratchet"}
        return found | ({"Authorization": f"Bearer {self._key}"} if self._key else {})

    def _hidden(self, text: str) -> str:
        """Servers repeat a key that they refuse."""
        return text.replace(self._key, "(the key)") if self._key else text


@dataclass(frozen=True)
class _ResponseParser(Generic[T]):
    """What is made of answers: of 200, and of refusals; the latter None: it is an error."""

    read: Callable[[EndpointResponse, int], T]
    refused: Callable[[EndpointResponse, int], T | None]


def _read_api_key() -> str:
    """The key in the environment; empty: there is none."""
    key = os.environ.get(VARIABLE, "").strip()
    if any(not " " < c < "\x7f" for c in key):
        raise SettingsError(f"{VARIABLE} (in the environment): holds characters that no key has; set it anew")
    return key


def _abbreviate_names(names: Sequence[str]) -> str:
    shown = ", ".join(replies.shorten_for_message(name) for name in names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown
