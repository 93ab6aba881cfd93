"""What a screen shows of a run: a fold over its journal."""

import math
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ratchet.run import telling
from ratchet.run.answering import Answering, is_generation
from ratchet.run.curve import Curve
from ratchet.run.directory import RunPaths
from ratchet.run.journal import Event, Replay
from ratchet.run.outlook import Outlook
from ratchet.run.status import RATE_WINDOW, Progress

STRAGGLES = 1.25
"""A rank that computes so many times as long as the median of ranks holds the others up."""
NEWS = 20
"""The last so many are kept."""
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError)


@dataclass(frozen=True)
class News:
    """Something out of the ordinary."""

    t: float
    """Unix time."""
    text: str
    grave: bool
    """Whether a person should see it now."""


@dataclass(frozen=True)
class RankPace:
    """How busy one of several ranks was, lately."""

    rank: int
    host: str
    """Empty where it is not told."""
    busy: float
    """Share of the time in which it computed on rows of its own; in the rest it waited for others."""
    relative: float
    """Of what the median rank was."""

    @property
    def straggles(self) -> bool:
        """Whether the others wait for it."""
        return self.relative > STRAGGLES


@dataclass
class Vitals:
    """Running summary for people who look; `see` folds one more event in, and none makes it fail."""

    progress: Progress = field(default_factory=Progress)
    outlook: Outlook = field(default_factory=Outlook)
    answering: Answering | None = None
    """Of a generation; None: it is a training."""
    train: Curve = field(default_factory=Curve)
    """Losses of steps, each step once."""
    validation: Curve = field(default_factory=Curve)
    """Losses of validations."""
    gradient_norm: float | None = None
    state: str = "starting"
    """starting, training or answering, waiting (for the next attempt), stopped, failed, finished."""
    device: str = ""
    compute_dtype: str = ""
    began_t: float | None = None
    """Unix time of the first attempt."""
    ready: bool = False
    """Whether the current attempt has loaded everything."""
    available_bytes: int = 0
    """Memory at hand when it was forecast."""
    ranks: tuple[RankPace, ...] = ()
    system: dict[str, Any] = field(default_factory=dict)
    """The last event `system`, as it was told."""
    rollbacks: int = 0
    shrinks: int = 0
    """Micro-batches made smaller because memory ran out."""
    news: deque[News] = field(default_factory=lambda: deque(maxlen=NEWS))
    _hosts: tuple[str, ...] = ()
    _flops_per_token: float | None = None
    _peak_flops_s: float | None = None
    _recent: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    """Of the last steps: seconds, tokens computed, tokens learned from."""
    _replay: Replay = field(default_factory=Replay)

    def see(self, event: Event) -> None:
        """Fold one event in; what is damaged is counted by `progress`, and passed over."""
        self.progress.see(event)
        new = self._replay.new(event)
        answer = self.answering.see if self.answering else _nothing
        for fold in (self.outlook.see, answer, self._learn if new else _nothing, self._follow, self._tell):
            try:
                fold(event)
            except DAMAGE:
                continue

    def _learn(self, event: Event) -> None:
        data = event.data
        if event.kind == "step":
            self.train.add(int(data["step"]), _finite(data["loss"]))
        elif event.kind == "validation":
            self.validation.add(int(data["step"]), _finite(data["loss"]))

    def _follow(self, event: Event) -> None:
        data = event.data
        if event.kind == "step":
            self.gradient_norm = _finite(data["grad_norm"])
            self._recent.append((_finite(data["step_s"]), int(data["input_tokens"]), int(data["trained_tokens"])))
        elif event.kind == "ready":
            self._begin(data)
        elif event.kind == "ranks":
            self._compare(data)
        elif event.kind == "system":
            self.system = dict(data)
        elif event.kind == "forecast":
            self.available_bytes = int(data["available_bytes"])
        elif event.kind == "budget":
            self.shrinks += data["action"] == "shrink"
        elif event.kind == "skipped":
            self.rollbacks += data["action"] == "roll_back"
        else:
            self._turn(event)

    def _turn(self, event: Event) -> None:
        """Of an attempt that begins or ends."""
        if event.kind == "attempt":
            self.began_t = event.t if self.began_t is None else self.began_t
            self.state, self.ready, self.ranks = "starting", False, ()
            self._recent.clear()
        elif event.kind == "died":
            self.state = {"Retry": "waiting", "GiveUp": "failed"}.get(str(event.data["decision"]), "stopped")
        elif event.kind in ("stopped", "finished"):
            self.state = event.kind
        if event.kind in ("died", "stopped", "finished"):
            self.ready = False

    def _begin(self, data: dict[str, Any]) -> None:
        self.state, self.ready = "answering" if self.answering else "training", True
        self.device, self.compute_dtype = str(data.get("device", "")), str(data.get("compute_dtype", ""))
        hosts = data.get("hosts") or ()
        self._hosts = tuple(map(str, hosts)) if isinstance(hosts, list | tuple) else ()
        self._recent.clear()
        self._flops_per_token, self._peak_flops_s = (
            float(found) if isinstance(found, int | float) and found > 0 else None
            for found in (data.get("flops_per_token"), data.get("peak_flops_s"))
        )

    def _compare(self, data: dict[str, Any]) -> None:
        busy = [float(one) / float(data["seconds"]) for one in data["busy_s"]]
        # Of two the faster one: beside the mean of both, no rank of two could be much slower.
        middle = statistics.median_low(busy)
        hosts = (*self._hosts, *[""] * len(busy))
        self.ranks = tuple(
            RankPace(rank, host, share, share / middle if middle > 0 else 1.0)
            for rank, (host, share) in enumerate(zip(hosts, busy, strict=False))
        )

    def _tell(self, event: Event) -> None:
        text = telling.news(event)
        if text is not None:
            self.news.append(News(event.t, text, event.kind in ("alert", "died", "refused", "skipped")))

    def _rate(self, place: int) -> float | None:
        seconds = sum(one[0] for one in self._recent)
        return sum(one[place] for one in self._recent) / seconds if seconds > 0 else None

    @property
    def at_work(self) -> bool:
        """Whether everything is loaded, and nothing has ended it."""
        return self.state in ("training", "answering")

    @property
    def has_figures(self) -> bool:
        """Whether this attempt has done a step: a figure from before a restart belongs to one that is done again."""
        return bool(self._recent)

    @property
    def input_tokens_per_s(self) -> float | None:
        """Recent speed of this attempt in tokens computed a second."""
        return self._rate(1)

    @property
    def trained_tokens_per_s(self) -> float | None:
        """The same in tokens learned from."""
        return self._rate(2)

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation between 0 and 1: of what the data sheet promises; None where it is not known."""
        rate = self.input_tokens_per_s
        if rate is None or self._flops_per_token is None or self._peak_flops_s is None:
            return None
        return rate * self._flops_per_token / self._peak_flops_s

    @property
    def stragglers(self) -> list[RankPace]:
        """Ranks that the others wait for, the slowest first."""
        return sorted((one for one in self.ranks if one.straggles), key=lambda one: -one.relative)


def begun(paths: RunPaths) -> Vitals:
    """Those of a run of which nothing was told yet."""
    return Vitals(answering=Answering() if is_generation(paths) else None)


def _finite(value: Any) -> float:
    """A number that can be drawn. Raises ValueError, TypeError."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} cannot be drawn")
    return number


def _nothing(event: Event) -> None:
    """What was told before."""
