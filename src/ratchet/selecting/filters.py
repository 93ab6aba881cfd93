"""What answers must be like, each by itself and among the samples of their prompt; everything left out is counted.

The vote is self-consistency (Wang et al. 2022, arXiv 2203.11171): of the samples of a prompt those are right, probably,
whose final answer most of them give. Comparing with a reference is rejection sampling (Yuan et al. 2023, arXiv
2308.01825; Zelikman et al. 2022, arXiv 2203.14465).
"""

import json
import re
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from ratchet import digest
from ratchet.config_select import FORMATS, Select
from ratchet.data.splits import normalised
from ratchet.data.turns import flaw
from ratchet.errors import SettingsError
from ratchet.records_select import Filter
from ratchet.selecting.answers import Answered, Asked

NAMES = (
    "finish", "unfit", "length", "format", "probability", "final", "reference", "agreement", "minority", "reward",
    "not_chosen", "duplicate", "near_duplicate",
)  # fmt: skip
"""Filters in their order."""

EXAMPLES = 3
LONGEST_DETAIL = 100
"""Characters of an example."""

LONGEST_S = 20.0
"""Time that a regular expression may take for one answer: with nested repetition it can run for years."""


class Tally:
    """How many answers each filter left out, and the first few of them."""

    def __init__(self) -> None:
        self.answers = 0
        self._dropped: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {name: [] for name in NAMES}

    def drop(self, name: str, id: str, sample: int, detail: str = "") -> None:
        """Book an answer that is left out."""
        self._dropped[name] += 1
        if len(self._examples[name]) < EXAMPLES:
            text = f"{id}, sample {sample}" + (f": {' '.join(detail.split())}" if detail else "")
            self._examples[name].append(text if len(text) <= LONGEST_DETAIL else text[: LONGEST_DETAIL - 3] + "...")

    @property
    def filters(self) -> tuple[Filter, ...]:
        """All of them, in their order."""
        left, found = self.answers, []
        for name in NAMES:
            left -= self._dropped[name]
            found.append(
                Filter(name=name, dropped=self._dropped[name], left=left, examples=tuple(self._examples[name]))
            )
        return tuple(found)


class Kept(NamedTuple):
    """An answer that is left, and the share of its prompt's samples that say the same."""

    answered: Answered
    agreement: float


class Filters:
    """The filters that look at one prompt at a time.

    Args:
        settings: section select.
        labels: of each output, its generate.labels.
        tally: where what is left out is counted.
    """

    def __init__(self, settings: Select, labels: Sequence[Sequence[str]], tally: Tally) -> None:
        self._settings, self._tally = settings, tally
        self._labels = [frozenset(one) for one in labels]
        named = settings.format if settings.format not in FORMATS else None
        self._format = re.compile(named) if named else None
        self._final = re.compile(settings.final) if settings.final else None
        self.without_reference = 0
        self.with_reference = 0

    def left(self, asked: Asked) -> list[Kept]:
        """The answers to a prompt that pass, in their order.

        Raises:
            SettingsError: a regular expression takes too long.
        """
        self._tally.answers += len(asked.answers)
        reference = asked.prompt.reference
        wanted = None if reference is None else (self._final_of(reference) or self._key(reference))
        if self._settings.reference == "match":
            self.without_reference += wanted is None
            self.with_reference += wanted is not None
        found: list[tuple[Answered, str]] = []
        for one in asked.answers:
            reason, detail, final = self._judged(one)
            if not reason and self._settings.reference == "match" and wanted not in (None, final):
                reason, detail = "reference", f"{final!r} is not {wanted!r}"
            if reason:
                self._tally.drop(reason, asked.prompt.id, one.sample, detail)
            else:
                found.append((one, final))
        return self._voted(asked, found)

    def _judged(self, one: Answered) -> tuple[str, str, str]:
        """The filter that leaves an answer out, or "", with what was found; and its final answer."""
        settings, text = self._settings, one.answer
        if one.finish not in settings.finishes:
            return "finish", one.finish, ""
        if problem := flaw(text) or flaw(one.reasoning or ""):
            return "unfit", problem, ""
        if len(text) < settings.min_characters or len(text) > (settings.max_characters or len(text)):
            return "length", f"{len(text):,} characters", ""
        if not self._is_formed(one):
            return "format", text, ""
        least = settings.min_probability
        if least is not None and (one.probability is None or one.probability < least):
            return "probability", "not known" if one.probability is None else f"{one.probability:.4f}", ""
        final = self._final_of(text)
        return ("final", text, "") if final is None else ("", "", final)

    def _is_formed(self, one: Answered) -> bool:
        if self._settings.format == "labels":
            return one.answer in self._labels[one.teacher]
        if self._settings.format == "json":
            return _parsed(one.answer) is not None
        if self._format is None:
            return True
        with _limited("format", self._format.pattern):
            return self._format.fullmatch(one.answer) is not None

    def _final_of(self, text: str) -> str | None:
        """What answers are compared by; None where there is no final answer."""
        if self._final is None:
            return self._key(text)
        with _limited("final", self._final.pattern):
            found = deque(self._final.finditer(text), maxlen=1)
        if not found:
            return None
        last = found[0][1] if self._final.groups else found[0][0]
        return None if last is None else self._key(last)

    def _key(self, text: str) -> str:
        parsed = _parsed(text) if self._settings.format == "json" else None
        return parsed or normalised(text)

    def _voted(self, asked: Asked, found: Sequence[tuple[Answered, str]]) -> list[Kept]:
        total = len(asked.answers)
        votes = Counter(final for _, final in found)
        least = self._settings.agreement
        kept = [Kept(one, round(votes[final] / total, 4)) for one, final in found]
        if least is None or not found:
            return kept
        _, winner = min(((-votes[final], *likeliest(one)), final) for one, final in found)
        enough = votes[winner] >= least * total - 1e-9
        left = []
        for one, (answered, final) in zip(kept, found, strict=True):
            if enough and final == winner:
                left.append(one)
            else:
                said = f"{votes[final]} of {total} say {final!r}"
                self._tally.drop("minority" if enough else "agreement", asked.prompt.id, answered.sample, said)
        return left


def likeliest(one: Answered) -> tuple[float, int, int]:
    """A key that sorts the likeliest answer first; of equal ones the earlier sample."""
    return (float("inf") if one.nats is None else -one.nats), one.teacher, one.sample


def _parsed(text: str) -> str | None:
    """JSON written in one way; None for what is none (RFC 8259 knows no NaN)."""
    try:
        return digest.canonical_json(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@contextmanager
def _limited(name: str, pattern: str) -> Iterator[None]:
    """Break a regular expression off that takes too long: matching looks for signals now and then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise SettingsError(
            f"select.{name}: {pattern!r} takes more than {LONGEST_S:g} s on one answer; write it without a repetition "
            "inside a repetition"
        )

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
