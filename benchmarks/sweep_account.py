"""Counts trained tokens, times and values of searches for benchmarks/sweep.py."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ratchet.runs.journal import JournalReader, ReplayFilter


@dataclass(frozen=True)
class Take:
    """A training, or one attempt of it."""

    begun: float
    ended: float
    """Unix times in seconds: start of the trainer, and its last event."""
    tokens: int
    value: float
    """Lowest validation loss of the training up to its end, in nats per token; infinite without a validation."""
    finished: bool
    """Whether the training was completed."""
    first_step_ended: float = math.inf
    """Unix time of the end of the first step in seconds; infinite without a step."""


@dataclass(frozen=True)
class Reached:
    """Cost until the target was reached."""

    tokens: float
    seconds: float


@dataclass(frozen=True)
class Search:
    """The trainings of a search, in order."""

    begun: float
    """Unix time of the command in seconds."""
    takes: Sequence[Take]

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """Return a search that `asdict` wrote."""
        return cls(given["begun"], [Take(**take) for take in given["takes"]])

    @property
    def tokens(self) -> int:
        """Trained tokens of all trainings."""
        return sum(take.tokens for take in self.takes)

    @property
    def seconds(self) -> float:
        """Seconds from the command to the last event of any training."""
        return max(take.ended for take in self.takes) - self.begun

    @property
    def best(self) -> float:
        """Lowest validation loss of a completed training."""
        return min((take.value for take in self.takes if take.finished), default=math.inf)

    def best_within(self, tokens: int) -> float:
        """Return the lowest validation loss of a training that was completed before this many tokens were trained."""
        spent, best = 0, math.inf
        for take in self.takes:
            spent += take.tokens
            if take.finished and spent <= tokens:
                best = min(best, take.value)
        return best

    def until(self, target: float) -> Reached:
        """Return the cost until the first complete training with this value or better. Infinite if there is none."""
        ended = min((take.ended for take in self.takes if take.finished and take.value <= target), default=math.inf)
        if math.isinf(ended):
            return Reached(math.inf, math.inf)
        return Reached(sum(take.tokens for take in self.takes if take.ended <= ended), ended - self.begun)

    def pauses(self) -> list[float]:
        """Return the seconds from the last event of each training to the end of the next one's first step."""
        return [
            after.first_step_ended - before.ended
            for before, after in itertools.pairwise(self.takes)
            if math.isfinite(after.first_step_ended)
        ]


def read_turns(kept: Path | None) -> list[dict[str, Any]]:
    """Return the finished turns in a file; none without a file."""
    done = kept.read_text(encoding="utf-8").splitlines() if kept and kept.exists() else []
    return [json.loads(line) for line in done]


def keep_turn(kept: Path | None, turn: Mapping[str, Any]) -> None:
    """Append a finished turn to a file, if there is one."""
    if kept:
        with kept.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(turn) + "\n")


def takes(journal: Path) -> list[Take]:
    """Return the attempts in a run's journal. Repeated tokens count once."""
    found: list[Take] = []
    replay, begun, ended, tokens, value, finished = ReplayFilter(), 0.0, 0.0, 0, math.inf, False
    stepped = math.inf
    for event in JournalReader(journal).read():
        if event.kind == "attempt_started":
            if begun:
                found.append(Take(begun, ended, tokens, value, finished, stepped))
            begun, tokens, finished, stepped = event.t, 0, False, math.inf
        ended = event.t
        if event.kind == "step":
            stepped = min(stepped, event.t)
        if replay.is_new(event):
            tokens += int(event.data["trained_tokens"]) if event.kind == "step" else 0
            value = min(value, float(event.data["loss"])) if event.kind == "validation" else value
        finished = finished or event.kind == "finished"
    return [*found, Take(begun, ended, tokens, value, finished, stepped)] if begun else found
