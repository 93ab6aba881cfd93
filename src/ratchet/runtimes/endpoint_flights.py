"""Requests in flight: each in a thread of its own, results as they come, all of them broken off when told so."""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from ratchet.runtimes.endpoint_wire import BrokenOffError, Exchange, Got, Place

LOOK_S = 0.05
"""Between two looks at whether to stop."""

A = TypeVar("A")
T = TypeVar("T")


class Flight:
    """One request through all of its tries; another thread may break it off."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._exchange: Exchange | None = None
        self._lock = threading.Lock()

    def wait(self, seconds: float) -> None:
        """Sleep, not at all when it is nothing or less. Raises BrokenOffError when it was broken off."""
        if self._over.wait(max(0.0, seconds)):
            raise BrokenOffError

    def exchange(self, place: Place, path: str, body: Any, headers: Mapping[str, str], limit_s: float) -> Got:
        """One try (see Exchange.run)."""
        one = Exchange()
        with self._lock:
            if self._over.is_set():
                raise BrokenOffError
            self._exchange = one
        return one.run(place, path, body, headers, limit_s)

    def break_off(self) -> None:
        """End it now; its thread meets BrokenOffError."""
        with self._lock:
            self._over.set()
            if self._exchange is not None:
                self._exchange.break_off()


class Flights(Generic[A, T]):
    """Many of them.

    Args:
        answer: what is done for each, in its thread.
    """

    def __init__(self, answer: Callable[[A, Flight], T]) -> None:
        self._answer = answer
        self._up: set[Flight] = set()
        self._landed: queue.SimpleQueue[tuple[Flight, A, T | Exception]] = queue.SimpleQueue()

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
        flight = Flight()
        self._up.add(flight)
        threading.Thread(target=self._run, args=(flight, one), name="endpoint request", daemon=True).start()

    def _run(self, flight: Flight, one: A) -> None:
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


def single(answer: Callable[[Flight], T], stop: Callable[[], bool]) -> T:
    """One request. Raises what it met; BrokenOffError where `stop` says so."""
    flights: Flights[None, T] = Flights(lambda _, flight: answer(flight))
    try:
        for _, found in flights.fly(iter([None]), 1, stop):
            return found
        raise BrokenOffError
    finally:
        flights.break_off()
