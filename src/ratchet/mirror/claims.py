"""What a machine writes into a mirror to say that a run is its own, and how long others have seen it stand still."""

import json
import time
from dataclasses import asdict, dataclass
from typing import Literal, Self

from ratchet import digest
from ratchet.mirror.names import RunNames, numbers_of
from ratchet.mirror.store import Store

Key = tuple[int, str]
"""Token and machine: claims are served in this order."""
Origin = tuple[int, int]
"""A token, and how many bytes of the journal that its holder had: what another holder went on from."""
State = Literal["waiting", "holding", "released"]

_GARBAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def now_s() -> float:
    """A clock of this machine that nobody sets, and that goes on while the machine sleeps, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Claim:
    """One machine's claim on a run. It holds no clock reading that another machine would compare with its own."""

    token: int
    node: str
    state: State
    sign: int
    """Grows with each sign of life."""
    since: str
    """When it was made, by its machine's clock, for people."""
    goes_on: Origin | None = None
    """Of a holder: where its journal begins."""
    meeting: str | None = None
    """Where the machines meet that train the run together with this one; None: it trains alone."""

    @property
    def key(self) -> Key:
        return self.token, self.node

    def as_bytes(self) -> bytes:
        return (digest.canonical_json(asdict(self)) + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """None when it is no claim."""
        try:
            raw = json.loads(data)
            token, origin = int(raw.pop("token")), raw.pop("goes_on")
            if raw["state"] not in ("waiting", "holding", "released") or not isinstance(raw["node"], str):
                return None
            return cls(**raw, token=token, goes_on=(int(origin[0]), int(origin[1])) if origin else None)
        except _GARBAGE:
            return None


def key_of(name: str) -> Key | None:
    """Token and machine, from the name of a claim in a mirror; None for a name that is of no claim."""
    token, _, node = name.rsplit("/", 1)[-1].removesuffix(".json").partition("-")
    return (int(token), node) if token.isdigit() and node else None


def keys(store: Store, names: RunNames) -> list[Key]:
    """Of all claims on a run, ascending."""
    return sorted(key for name in store.list(names.folder("claims")) if (key := key_of(name)))


def highest_token(store: Store, names: RunNames, kinds: tuple[str, ...]) -> int:
    """The highest token under which something of these kinds lies in the mirror; 0: nothing."""
    found = [numbers_of(name) for kind in kinds for name in store.list(names.folder(kind))]
    return max((numbers[0] for numbers in found if numbers), default=0)


WRITTEN = ("checkpoints", "result", "journal")
"""Kinds of what a holder leaves."""


class Watch:
    """Remembers since when, by our own clock, contents have been the same."""

    def __init__(self) -> None:
        self._first: dict[str, bytes] = {}
        self._last: dict[str, tuple[bytes, float]] = {}

    def still_for(self, name: str, content: bytes) -> float:
        """Seconds for which it has been the same, as far as we have looked."""
        now = now_s()
        self._first.setdefault(name, content)
        known = self._last.get(name)
        if known is None or known[0] != content:
            known = self._last[name] = (content, now)
        return now - known[1]

    def moved(self, name: str) -> bool:
        """Whether it has changed since we first looked."""
        return name in self._last and self._last[name][0] != self._first[name]

    def last(self, name: str) -> bytes | None:
        """As it was when we looked last."""
        return self._last[name][0] if name in self._last else None


@dataclass(frozen=True)
class Seen:
    """Who has a run, as far as somebody sees who has no claim on it."""

    claim: Claim | None
    """The newest that holds, or held."""
    state: Literal["free", "unsure", "alive"]
    """Free: released, or without a sign of life for a whole lease. Unsure: not looked at for long enough."""


class Onlooker:
    """Looks at the claims on a run, without one of its own.

    Args:
        store: where they are.
        names: of the run.
        lease_s: a claim that stood still for so long has run out.
    """

    def __init__(self, store: Store, names: RunNames, lease_s: float) -> None:
        self._store, self._names, self._lease_s = store, names, lease_s
        self._watch = Watch()

    def look(self) -> Seen:
        """Raises MirrorError."""
        for key in reversed(keys(self._store, self._names)):
            name = self._names.claim(*key)
            content = self._store.read(name) or b""
            claim = Claim.from_bytes(content)
            if claim is None or claim.state == "waiting":
                continue
            still_s = self._watch.still_for(name, content)
            if claim.state == "released" or still_s >= self._lease_s:
                return Seen(claim, "free")
            return Seen(claim, "alive" if self._watch.moved(name) else "unsure")
        return Seen(None, "free")
