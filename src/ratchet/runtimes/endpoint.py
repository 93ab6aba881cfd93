"""Models behind OpenAI-compatible servers (vLLM, llama.cpp and others): many chats at once, asked until they answer.

What may end otherwise is tried again, later each time: broken connections, stalls, 429, 5xx, answers that are half or
none. What would be refused again is an error at once, in the server's own words. The key comes from the environment
(RATCHET_ENDPOINT_KEY), goes to the named address only (https, or this machine), and is in no message.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from ratchet import posting
from ratchet.config_endpoint import Endpoint as Patience
from ratchet.errors import EndpointError, SettingsError
from ratchet.runtimes import endpoint_reply as replies
from ratchet.runtimes.endpoint_flights import Flight, Flights, single
from ratchet.runtimes.endpoint_reply import Reply, ShapeError
from ratchet.runtimes.endpoint_stream import Delta, Listening
from ratchet.runtimes.endpoint_wire import BrokenOffError, Got, Place, SilentError

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
class Sampling:
    """How an answer is drawn."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    logprobs: bool = False
    """Ask for the log-probability of each token."""


@dataclass(frozen=True)
class Asked:
    """One chat to be answered."""

    place: int
    """What the caller knows it by."""
    messages: Sequence[Message]
    sampling: Sampling


@dataclass(frozen=True)
class Served:
    """The model that answers."""

    name: str
    identity: Mapping[str, Any]
    """What the server says of it, as JSON; a restart of the same server changes nothing here."""
    context_tokens: int | None = None
    """What prompt and answer may have together; None: it does not say."""


class Answers(Protocol):
    """Who answers chats. `Endpoint` does."""

    def answers(self, asked: Iterable[Asked], stop: Callable[[], bool]) -> Iterator[tuple[int, Reply]]:
        """Place and reply of each, as they come."""
        ...


def _never() -> bool:
    return False


class Endpoint:
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
        self.place = Place.of(address)
        self.notes: list[str] = []
        """What a reader should know: settings that the server does not take."""
        self._patience = patience
        self._refusals = refusals
        self._model = model
        self._key = _key()
        self._served: Served | None = None
        self._left_out: set[str] = set()
        self._limit_word = "max_tokens"
        self._lock = threading.Lock()
        self._not_before_s = 0.0
        """Nobody asks before (monotonic clock): the server asked for patience."""

    def served(self, stop: Callable[[], bool] = _never) -> Served:
        """Which model answers; the server is asked once.

        Raises:
            SettingsError: it serves several, or not the wanted one; or it refuses to say, and none was named.
            EndpointError: it does not answer.
        """
        if self._served is None:
            try:
                listed = single(self._listed, stop)
            except BrokenOffError:
                raise EndpointError(f"{self.place}: the request was broken off") from None
            self._served = self._choose(listed)
        return self._served

    def ask(self, messages: Sequence[Message], sampling: Sampling, stop: Callable[[], bool] = _never) -> Reply:
        """One answer. Raises as `answers` does; EndpointError also where `stop` says so."""
        for _, reply in self.answers([Asked(0, messages, sampling)], stop):
            return reply
        raise EndpointError(f"{self.place}: the request was broken off")

    def answers(
        self, asked: Iterable[Asked], stop: Callable[[], bool] = _never
    ) -> Generator[tuple[int, Reply], None, None]:
        """Place and reply of each, as they come, so many at once as machine.endpoint.requests says.

        Chats are taken from `asked` as they are sent. Once `stop` says so, or when this is closed, what is on its way
        is broken off and the answers end. Before an error is raised, all that came until then is given.

        Raises:
            SettingsError: the server refuses a request; its words are in the message.
            EndpointError: a request was not answered in as many tries as there are.
        """
        model = self.served(stop).name
        flights: Flights[Asked, Reply] = Flights(lambda one, flight: self._answer(model, one, flight))
        try:
            for one, reply in flights.fly(iter(asked), self._patience.requests, stop):
                yield one.place, reply
        finally:
            flights.break_off()

    def streamed(self, asked: Asked) -> Iterator[Delta | Reply]:
        """One answer as it is given, in pieces; the last thing is the whole. Tries are made until it begins: what was
        read is not said again.

        Raises:
            SettingsError: the server refuses the request.
            EndpointError: it does not answer, or the answer broke off.
        """
        model, silent_s = self.served().name, self._patience.answer_s
        listening = Listening(silent_s)

        def body() -> dict[str, Any]:
            streaming = {"stream": True, "stream_options": {"include_usage": True}}
            return {key: value for key, value in {**self._body(model, asked), **streaming}.items()
                    if key not in self._left_out}  # fmt: skip

        reading: _Reading[Reply | None] = _Reading(lambda got, tries: None, self._refused)
        try:
            if (instead := self._insist("/chat/completions", body, reading, listening)) is not None:
                yield instead
                return
            yield from listening.pieces()
        except (SilentError, ShapeError) as error:
            raise EndpointError(f"{self.place}: the answer broke off: {self._hidden(str(error))}") from None
        finally:
            listening.close()

    def _answer(self, model: str, asked: Asked, flight: Flight) -> Reply:
        def read(got: Got, tries: int) -> Reply:
            return replies.read_reply(got.body, tries)

        reading = _Reading(read, self._refused)
        return self._insist("/chat/completions", lambda: self._body(model, asked), reading, flight)

    def _refused(self, got: Got, tries: int) -> Reply | None:
        """What a refusal of this chat alone is; None: it may be one of all."""
        if got.status not in (400, 413, 422):
            return None
        if replies.is_too_long(got.body):
            return Reply("", None, "context", None, None, None, tries)
        if self._refusals:
            said = self._hidden(f"HTTP {got.status}: {replies.words(got.body)}")
            return Reply("", None, "refused", None, None, None, tries, said)
        return None

    def _listed(self, flight: Flight) -> list[Mapping[str, Any]] | None:
        """What the server serves; None: it has no such list."""

        def read(got: Got, _: int) -> list[Mapping[str, Any]] | None:
            data = replies.read_object(got.body).get("data")
            entries = data if isinstance(data, list) else []
            named: list[Mapping[str, Any]] = [
                one for one in entries
                if isinstance(one, dict) and isinstance(one.get("id"), str) and one["id"].isprintable()
            ]  # fmt: skip
            if not named:
                raise ShapeError(f"no list of models: {replies.words(got.body)}")
            return named

        def refused(got: Got, _: int) -> list[Mapping[str, Any]] | None:
            return [] if got.status in (404, 405) else None

        return self._insist("/models", lambda: None, _Reading(read, refused), flight) or None

    def _choose(self, listed: list[Mapping[str, Any]] | None) -> Served:
        if listed is None:
            if self._model is None:
                raise SettingsError(f"{self.place}: the server does not list its models; name the one that is meant")
            return Served(self._model, {"id": self._model})
        names = [str(one["id"]) for one in listed]
        if self._model is None and len(listed) > 1:
            raise SettingsError(f"{self.place}: serves {_some(names)}; name the one that is meant")
        for one in listed:
            if self._model in (None, one["id"]):
                identity = {key: one[key] for key in IDENTITY if one.get(key) is not None}
                return Served(str(one["id"]), identity, replies.context_of(one))
        raise SettingsError(f"{self.place}: serves no model {self._model!r}; there are: {_some(names)}")

    def _body(self, model: str, asked: Asked) -> dict[str, Any]:
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

    def _insist(self, path: str, body: Callable[[], Any], reading: "_Reading[T]", flight: Flight | Listening) -> T:
        """Ask until there is an answer, or no hope."""
        for number in range(1, self._patience.tries + 1):
            flight.wait(self._not_before_s - time.monotonic())
            answer, sent = posting.Answer(False, ""), body()
            try:
                got = flight.exchange(self.place, path, sent, self._headers(), self._patience.answer_s)
                while got.status in (400, 422) and sent and self._does_without(replies.words(got.body), sent):
                    sent = body()
                    got = flight.exchange(self.place, path, sent, self._headers(), self._patience.answer_s)
                if got.status == 200:
                    return reading.read(got, number)
                if (instead := reading.refused(got, number)) is not None:
                    return instead
                answer = self._refusal(got)
            except SilentError as error:
                answer = posting.Answer(False, str(error))
            except ShapeError as error:
                answer = posting.Answer(False, f"HTTP 200, but {error}")
            why = self._hidden(answer.detail)
            if not answer.again:
                raise SettingsError(f"{self.place}{path}: {why}")
            if number < self._patience.tries:
                flight.wait(self._pause_s(number, answer))
        times = posting.tried(self._patience.tries)
        raise EndpointError(f"{self.place}{path}: {why}; {times} (machine.endpoint.tries); see to the server")

    def _refusal(self, got: Got) -> posting.Answer:
        said = posting.refusal(got.status, got.retry_after)
        if 300 <= got.status < 400:
            return said
        again = said.again or got.status in (408, 425)
        key = f"; the key is read from {VARIABLE}" if got.status in (401, 403) else ""
        return replace(said, again=again, detail=f"{said.detail}: {replies.words(got.body)}{key}")

    def _pause_s(self, number: int, answer: posting.Answer) -> float:
        """Doubled with each try; a server that asks for patience gets it from every request (`_not_before_s`)."""
        if answer.wait_s:
            with self._lock:
                until_s = time.monotonic() + min(answer.wait_s, posting.LONGEST_WAIT_S)
                self._not_before_s = max(self._not_before_s, until_s)
        own_s = posting.pause_s(number, replace(answer, wait_s=0.0)) * self._patience.pause_s
        return min(own_s, posting.LONGEST_WAIT_S)

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
class _Reading(Generic[T]):
    """What is made of answers: of 200, and of refusals; the latter None: it is an error."""

    read: Callable[[Got, int], T]
    refused: Callable[[Got, int], T | None]


def _key() -> str:
    """The key in the environment; empty: there is none."""
    key = os.environ.get(VARIABLE, "").strip()
    if any(not " " < c < "\x7f" for c in key):
        raise SettingsError(f"{VARIABLE} (in the environment): holds characters that no key has; set it anew")
    return key


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(replies.shown(name) for name in names[:SHOWN])
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown
