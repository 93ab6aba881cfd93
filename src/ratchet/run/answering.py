"""Where a generation stands: a fold over its journal, for people."""

import json
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from ratchet.run.curve import Curve
from ratchet.run.directory import RunPaths
from ratchet.run.journal import Event

WINDOW_S = 60.0
"""Over the last so many seconds of work the speed is averaged."""


@dataclass
class Answering:
    """Running summary; `see` folds one more event in. Events that are damaged raise, and are to be passed over."""

    finishes: Counter[str] = field(default_factory=Counter)
    """Answers by how they ended, as far as the journal tells: what a death came before is not in it."""
    tokens: int = 0
    """Of all answers."""
    speed: Curve = field(default_factory=Curve)
    """Tokens a second, by answers."""
    live: dict[str, Any] = field(default_factory=dict)
    """Of the last event `answered`: rows, held_tokens, waiting, budget_tokens, held_bytes, forecast_bytes,
    device_bytes, chosen, doubted; None where whoever answers does not say."""
    _step: int = 0
    _recent: deque[tuple[int, int, float]] = field(default_factory=deque)
    """Answers, tokens and seconds between two tellings."""

    def see(self, event: Event) -> None:
        """Fold one event in."""
        data = event.data
        if event.kind == "ready":
            self._step, self.live = int(data["start_step"]), {}
            self._recent.clear()
        elif event.kind == "answered":
            answers, tokens, seconds = int(data["step"]) - self._step, int(data["tokens"]), float(data["seconds"])
            self._step = int(data["step"])
            self.finishes.update({str(name): int(count) for name, count in (data.get("finish") or {}).items()})
            self.tokens += tokens
            self.live = dict(data)
            self._recent.append((answers, tokens, seconds))
            while sum(one[2] for one in self._recent) - self._recent[0][2] > WINDOW_S:
                self._recent.popleft()
            if seconds > 0:
                self.speed.add(self._step, tokens / seconds)

    def _rate(self, place: int) -> float | None:
        seconds = sum(one[2] for one in self._recent)
        return sum(one[place] for one in self._recent) / seconds if seconds > 0 else None

    @property
    def answers_per_s(self) -> float | None:
        """Recent speed of this attempt; None before its first answers."""
        return self._rate(0)

    @property
    def tokens_per_s(self) -> float | None:
        """The same in tokens of answers."""
        return self._rate(1)

    def ends(self) -> list[str]:
        """How answers ended, the most frequent first: `120 stop`, `3 refused`."""
        return [f"{count:,} {name}" for name, count in self.finishes.most_common()]


def number(live: dict[str, Any], name: str) -> int | None:
    """A figure of `Answering.live`."""
    value = live.get(name)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_generation(paths: RunPaths) -> bool:
    """Whether a run directory is that of a generation; one whose spec cannot be read is taken for a training's."""
    try:
        found = json.loads(paths.spec.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "generate" in found
