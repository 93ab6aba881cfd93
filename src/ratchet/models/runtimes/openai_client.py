"""Client of OpenAI-compatible servers: concurrent chats with retries, and streamed answers.

The client retries transient failures with increasing delays: broken connections, stalls, 429, 5xx, incomplete answers.
A permanent rejection raises an error at once, with the server's message. The key comes from the environment
(RATCHET_ENDPOINT_KEY), is sent only to the configured address (https, or this machine), and appears in no message.
Redirects are not followed and proxies are not used, so request and key go only to that address.

Streams have the fields of chat completion chunks (`delta.content`, `delta.reasoning_content` or `delta.reasoning`,
`finish_reason`, `usage`). A server that returns a whole completion instead is supported too.
"""

import codecs
import json
import math
import os
import queue
import re
import ssl
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import anyio
import httpx2
from anyio.from_thread import start_blocking_portal

from ratchet import http_client
from ratchet.config.machine import EndpointSettings
from ratchet.data.conversation import replace_surrogates
from ratchet.errors import EndpointError, SettingsError
from ratchet.storage.progress import report_progress

MAX_MESSAGE_CHARACTERS = 300

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
MAX_RESPONSE_BYTES = 64 * 2**20
POLL_S = 0.05
"""Seconds between two checks of `stop`."""
MAX_REASON = 80
"""Maximum number of characters of the reason of a failed attempt that is shown as progress."""
KEY_VARIABLE = "RATCHET_ENDPOINT_KEY"
MAX_LISTED_MODELS = 8
OPTIONAL_PARAMETERS = ("logprobs", "seed", "top_p", "stream_options")
"""Parameters that a server may not support; if it rejects one by name, requests are sent without it."""
IDENTITY_KEYS = ("id", "root", "owned_by", "meta")
"""Keys of a server's model entry that identify the model; times and random permissions are left out."""
RefusalT = TypeVar("RefusalT")
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
Message = Mapping[str, Any]
"""`role`, `content`, and other fields that the server reads."""


class IncompleteReplyError(Exception):
    """No complete response arrived; another try may succeed."""


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


@dataclass(frozen=True)
class ChatRequest:
    """One chat to answer."""

    index: int
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
    refusal: str | None = None
    """The server's message if it rejected only this chat (`finish` is then `refused`)."""


def read_reply(body: bytes, tries: int) -> ChatReply:
    """Parse the first choice of a chat completion. Raises MalformedReplyError if the body is not a chat completion."""
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
    values = []
    for token in content:
        value = token.get("logprob") if isinstance(token, dict) else None
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None
        values.append(float(value))
    return math.fsum(values) / len(values)


# Server-sent events of streamed answers (https://html.spec.whatwg.org/#parsing-an-event-stream).
#
# Only the data of events is read. Names, ids, retry times and comments, which keep a connection alive, are ignored.


class LineSplitter:
    """Splits a stream of UTF-8 bytes into lines, which end with CR, LF or CRLF (HTML standard, server-sent events).

    httpx2 also splits at characters such as U+2028, which texts in JSON may contain.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that these bytes complete, without their ends."""
        text = self._rest + self._decoder.decode(data)
        held = "\r" if text.endswith("\r") else ""  # a LF may follow
        *lines, rest = re.split("\r\n|\r|\n", text.removesuffix(held))
        self._rest = rest + held
        return lines

    def close(self) -> str:
        """Return the text after the last line end; empty if there is none."""
        return (self._rest + self._decoder.decode(b"", final=True)).removesuffix("\r")


async def _iterate_lines(response: httpx2.Response) -> AsyncIterator[str]:
    splitter = LineSplitter()
    async for data in response.aiter_bytes():
        for line in splitter.feed(data):
            yield line
    if rest := splitter.close():
        yield rest


class EventParser:
    """Parser of the lines of one stream."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def parse_line(self, line: str) -> str | None:
        """Parse a line without its end. Return the data of the event that it completes; None if it completes none."""
        if not line:
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None


def iterate_event_data(lines: Iterable[str]) -> Iterator[str]:
    """Yield the data of each event from the lines of a stream, without line ends.

    An incomplete last event is yielded too; its data may be invalid.
    """
    parser = EventParser()
    for line in chain(lines, ("",)):
        if (data := parser.parse_line(line)) is not None:
            yield data


@dataclass(frozen=True)
class EndpointResponse:
    """An HTTP response: complete, or the start of a stream."""

    source: httpx2.Response
    """The response; still open if it streams an answer."""
    body: bytes = b""

    @property
    def status(self) -> int:
        return self.source.status_code


async def _read_body(response: httpx2.Response) -> bytes:
    body = b""
    async for block in response.aiter_bytes():
        body += block
        if len(body) > MAX_RESPONSE_BYTES:
            raise IncompleteReplyError(f"the response exceeds {MAX_RESPONSE_BYTES // 2**20} MiB")
    return body


class ChatDelta(NamedTuple):
    """A piece of an answer."""

    text: str
    is_reasoning: bool
    """True if the server marked the piece as reasoning."""


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
            delta = choice.get("delta") if isinstance(choice, dict) else None
            if not isinstance(delta, dict):
                raise MalformedReplyError(f"a choice has no delta: {shorten_for_message(data)}")
            if isinstance(finish := choice.get("finish_reason"), str):
                self._finish = finish
            if isinstance(logprobs := choice.get("logprobs"), dict):
                self._nats += logprobs.get("content") or []
            reasoning = delta.get("reasoning_content") or delta.get("reasoning")
            for is_reasoning, text in ((True, reasoning), (False, delta.get("content"))):
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


async def _read_pieces(response: httpx2.Response) -> AsyncIterator[ChatDelta | ChatReply]:
    """Yield the pieces of a streamed answer, and at the end the whole reply.

    Raises MalformedReplyError if the response is not a stream of an answer.
    """
    if "event-stream" not in response.headers.get("Content-Type", ""):  # the server does not stream
        reply = read_reply(await _read_body(response), 1)
        for text, is_reasoning in ((reply.reasoning, True), (reply.text, False)):
            if text:
                yield ChatDelta(text, is_reasoning)
        yield reply
        return
    builder, parser, read_characters = _ChatReplyBuilder(), EventParser(), 0
    async for line in _iterate_lines(response):
        read_characters += len(line)
        if read_characters > MAX_RESPONSE_BYTES:
            raise MalformedReplyError(f"the response exceeds {MAX_RESPONSE_BYTES // 2**20} MiB")
        data = parser.parse_line(line)
        if data == STREAM_END:
            builder.has_end = True
            break
        for delta in builder.parse_event(data) if data is not None else ():
            yield delta
    else:
        for delta in builder.parse_event(data) if (data := parser.parse_line("")) is not None else ():
            yield delta
    yield builder.reply()


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

    Raises SettingsError if the address is invalid, or the key in the environment has invalid characters.

    Args:
        address: prefix of `/chat/completions`, such as http://127.0.0.1:8000 or https://HOST/v1.
        returns_refusals: if True, a chat that the server rejects (400, 413, 422) gives a reply that reports the
            rejection; if False, the rejection raises an error.
        key_variable: environment variable with the server's key.
    """

    def __init__(
        self,
        address: str,
        settings: EndpointSettings,
        model: str | None = None,
        *,
        returns_refusals: bool = False,
        key_variable: str = KEY_VARIABLE,
    ) -> None:
        if problem := http_client.find_endpoint_problem(address):
            raise SettingsError(f"the endpoint's address {problem}")
        parts = urlsplit(address)
        host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
        port = "" if parts.port is None else f":{parts.port}"
        self.address = f"{parts.scheme}://{host}{port}{parts.path.rstrip('/') or '/v1'}"
        self.notes: list[str] = []
        """Notes for users: parameters that the server does not support."""
        self._settings = settings
        self._returns_refusals = returns_refusals
        self._model = model
        self._key_variable = key_variable
        self._key = os.environ.get(key_variable, "").strip()
        if any(not " " < c < "\x7f" for c in self._key):
            raise SettingsError(
                f"environment variable {key_variable}: contains invalid characters; set it to the server's key"
            )
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
            for _, entries in self._run_requests(iter([None]), self._list_models, stop):
                self._model_info = self._choose_model(entries)
                return self._model_info
            raise EndpointError(f"{self.address}: the request was cancelled")
        return self._model_info

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

        async def answer(client: httpx2.AsyncClient, chat: ChatRequest) -> ChatReply:
            return await self._request(
                client, "/chat/completions", lambda: self._body(model, chat),
                lambda response, tries: read_reply(response.body, tries), self._parse_refusal,
            )  # fmt: skip

        for chat, reply in self._run_requests(iter(chats), answer, stop):
            yield chat.index, reply

    def _run_requests(
        self,
        requests: Iterator[RequestT],
        send: Callable[[httpx2.AsyncClient, RequestT], Awaitable[ResultT]],
        stop: Callable[[], bool],
    ) -> Generator[tuple[RequestT, ResultT], None, None]:
        """Yield requests with their results as they arrive; end early on `stop`. The event loop runs in a thread.

        Raises the first error of a request, after all earlier results.
        """
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(self._open_client()) as client:
            pending: dict[Future[ResultT], RequestT] = {}
            try:
                while not stop():
                    for request in islice(requests, self._settings.max_concurrency - len(pending)):
                        pending[portal.start_task_soon(send, client, request)] = request
                    if not pending:
                        return
                    done, _ = wait(pending, POLL_S, FIRST_COMPLETED)
                    for future in done:
                        if future.exception() is None:
                            yield pending.pop(future), future.result()
                    for future in done & pending.keys():
                        future.result()  # raises
                for future in [future for future in pending if future.done() and future.exception() is None]:
                    yield pending.pop(future), future.result()
            finally:
                for future in pending:
                    future.cancel()

    def _open_client(self) -> httpx2.AsyncClient:
        """Create a client for one connection per request, which trusts the certificates of the system."""
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "ratchet"}
        return httpx2.AsyncClient(
            headers=headers | ({"Authorization": f"Bearer {self._key}"} if self._key else {}),
            timeout=httpx2.Timeout(None, connect=min(CONNECT_TIMEOUT_S, self._settings.timeout_s)),
            limits=httpx2.Limits(max_keepalive_connections=0),
            verify=ssl.create_default_context(),
            trust_env=False,
        )

    def stream(self, chat: ChatRequest) -> Iterator[ChatDelta | ChatReply]:
        """Yield the pieces of one answer, then the whole reply. Requests are retried until the answer starts.

        Raises:
            SettingsError: the server rejects the request.
            EndpointError: the server does not answer, or the stream broke.
        """
        model = self.get_model().name
        pieces: queue.SimpleQueue[ChatDelta | ChatReply | None] = queue.SimpleQueue()

        async def receive() -> None:
            try:
                async for piece in self._stream(model, chat):
                    pieces.put(piece)
            finally:
                pieces.put(None)

        try:
            with start_blocking_portal() as portal:  # an exception, such as GeneratorExit, cancels the request
                future = portal.start_task_soon(receive)
                while (piece := pieces.get()) is not None:
                    yield piece
                future.result()  # raises
        except (IncompleteReplyError, MalformedReplyError) as error:
            raise EndpointError(f"{self.address}: the answer was interrupted: {self._hide_key(str(error))}") from None

    async def _stream(self, model: str, chat: ChatRequest) -> AsyncGenerator[ChatDelta | ChatReply, None]:
        options = {"stream": True, "stream_options": {"include_usage": True}}

        def body() -> dict[str, Any]:
            return {key: value for key, value in {**self._body(model, chat), **options}.items()
                    if key not in self._unsupported}  # fmt: skip

        async with self._open_client() as client, AsyncExitStack() as stack:
            pieces = await self._request(
                client, "/chat/completions", body, lambda response, _: _read_pieces(response.source),
                self._parse_refusal, stack,
            )  # fmt: skip
            if isinstance(pieces, ChatReply):
                yield pieces
                return
            while True:
                with self._limit_time("no piece of the answer arrived for"):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                yield piece

    @contextmanager
    def _limit_time(self, failure: str) -> Iterator[None]:
        """Raise IncompleteReplyError if the block takes more than machine.endpoint.timeout_s, or a connection fails."""
        try:
            with anyio.fail_after(self._settings.timeout_s):
                yield
        except TimeoutError:
            limit = f"{self._settings.timeout_s:g} s (machine.endpoint.timeout_s)"
            raise IncompleteReplyError(f"{failure} {limit}") from None
        except httpx2.HTTPError as error:
            raise IncompleteReplyError(http_client.describe_error(error)) from None

    async def _exchange(
        self, client: httpx2.AsyncClient, path: str, body: Any, stack: AsyncExitStack | None
    ) -> EndpointResponse:
        """Send a request, POST with `body` as JSON, or GET if it is None, and read the response.

        If `stack` is set, a successful response is not read, and stays open until the stack closes. Raises
        IncompleteReplyError: no response within machine.endpoint.timeout_s, or the connection failed.
        """
        if body is None:
            request = client.stream("GET", f"{self.address}{path}")
        else:  # ASCII, so that lone surrogates can be sent
            content = json.dumps(body, allow_nan=False).encode()
            request = client.stream("POST", f"{self.address}{path}", content=content)
        failure = "no complete answer within" if stack is None else "no piece of the answer arrived for"
        with self._limit_time(failure):
            async with AsyncExitStack() as opened:
                response = await opened.enter_async_context(request)
                if stack is not None and response.status_code == httpx2.codes.OK:
                    stack.push_async_callback(opened.pop_all().aclose)
                    return EndpointResponse(response)
                return EndpointResponse(response, await _read_body(response))

    def _parse_refusal(self, response: EndpointResponse, tries: int) -> ChatReply | None:
        """Return the reply for a rejection of this chat only; None if it may concern all chats."""
        if response.status not in (400, 413, 422):
            return None
        text = response.body.decode("utf-8", "replace").lower()
        if any(fragment in text for fragment in CONTEXT_EXCEEDED_TEXTS):  # prompt and answer exceed the context
            return ChatReply("", None, "context", None, None, None, tries)
        if self._returns_refusals:
            message = self._hide_key(f"HTTP {response.status}: {read_error_message(response.body)}")
            return ChatReply("", None, "refused", None, None, None, tries, message)
        return None

    async def _list_models(self, client: httpx2.AsyncClient, _: None) -> list[Mapping[str, Any]] | None:
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

        return await self._request(client, "/models", lambda: None, read, read_missing) or None

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
                meta = entry.get("meta")
                fields = {**(meta if isinstance(meta, dict) else {}), **entry}
                counts = (_valid_token_count(fields.get(name)) for name in CONTEXT_LENGTH_KEYS)
                return ServedModel(str(entry["id"]), identity, next((count for count in counts if count), None))
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

    async def _request(
        self,
        client: httpx2.AsyncClient,
        path: str,
        body: Callable[[], Any],
        parse: Callable[[EndpointResponse, int], ResultT],
        parse_refusal: Callable[[EndpointResponse, int], RefusalT | None],
        stack: AsyncExitStack | None = None,
    ) -> ResultT | RefusalT:
        """Send a request until it succeeds or fails permanently.

        Args:
            body: returns the JSON to send, without the parameters that the server does not support; None: GET.
            parse: parses a response of status 200, given the number of the try.
            parse_refusal: parses a rejection; if it returns None, the rejection is an error.
        """
        for attempt in range(1, self._settings.max_attempts + 1):
            await anyio.sleep(max(0.0, self._not_before_s - time.monotonic()))
            outcome, payload = http_client.PostResult(False, ""), body()
            try:
                response = await self._exchange(client, path, payload, stack)
                while (
                    response.status in (400, 422)
                    and payload
                    and self._drop_unsupported(read_error_message(response.body), payload)
                ):
                    payload = body()
                    response = await self._exchange(client, path, payload, stack)
                if response.status == 200:
                    return parse(response, attempt)
                if (replacement := parse_refusal(response, attempt)) is not None:
                    return replacement
                outcome = self._interpret_error(response)
            except IncompleteReplyError as error:
                outcome = http_client.PostResult(False, str(error))
            except MalformedReplyError as error:
                outcome = http_client.PostResult(False, f"HTTP 200, but {error}")
            reason = self._hide_key(outcome.detail)
            if not outcome.is_retryable:
                raise SettingsError(f"{self.address}{path}: {reason}")
            if outcome.retry_after_s:  # the server asks to wait, so all requests wait
                until_s = time.monotonic() + min(outcome.retry_after_s, http_client.MAX_DELAY_S)
                with self._lock:
                    self._not_before_s = max(self._not_before_s, until_s)
            if attempt < self._settings.max_attempts:
                if self._model_info is None:  # nothing else is shown before the first answer
                    report_progress(f"failed attempts at {self.address} ({reason[:MAX_REASON]})", attempt)
                delay_s = http_client.compute_retry_delay_s(attempt, replace(outcome, retry_after_s=0.0))
                await anyio.sleep(min(delay_s * self._settings.retry_delay_s, http_client.MAX_DELAY_S))
        attempts = http_client.format_attempts(self._settings.max_attempts)
        raise EndpointError(
            f"{self.address}{path}: {reason}; {attempts} (machine.endpoint.max_attempts); check the server"
        )

    def _interpret_error(self, response: EndpointResponse) -> http_client.PostResult:
        outcome = http_client.interpret_status(response.status, response.source.headers.get("Retry-After"))
        if 300 <= response.status < 400:
            return outcome
        is_retryable = outcome.is_retryable or response.status in (408, 425)
        key = f"; the key is read from {self._key_variable}" if response.status in (401, 403) else ""
        detail = f"{outcome.detail}: {read_error_message(response.body)}{key}"
        return replace(outcome, is_retryable=is_retryable, detail=detail)

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

    def _hide_key(self, text: str) -> str:
        """Remove the key from a message, because servers repeat a key that they reject."""
        return text.replace(self._key, "(the key)") if self._key else text


def _abbreviate_names(names: Sequence[str]) -> str:
    shown = ", ".join(shorten_for_message(name) for name in names[:MAX_LISTED_MODELS])
    return f"{shown} and {len(names) - MAX_LISTED_MODELS} more" if len(names) > MAX_LISTED_MODELS else shown
