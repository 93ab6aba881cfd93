"""A curve of any length in bounded memory, for small pictures: what is dropped depends on the points alone."""

import json
import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ratchet.runs import event_messages
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent, ReplayFilter
from ratchet.runs.status import RATE_WINDOW, RunProgress

POINTS = 256
"""At most so many are kept."""


class DownsampledCurve:
    """Values by step, ascending. Each point is the mean of as many values as every other, but the last."""

    def __init__(self) -> None:
        self._whole: list[tuple[int, float]] = []
        self._part: list[tuple[int, float]] = []
        self.per = 1
        """Values that a point stands for."""

    def add(self, step: int, value: float) -> None:
        """Go on with one more value."""
        self._part.append((step, value))
        if len(self._part) < self.per:
            return
        self._whole.append(_average_points(self._part))
        self._part = []
        if len(self._whole) == POINTS:
            self._whole = [_average_points(self._whole[place : place + 2]) for place in range(0, POINTS, 2)]
            self.per *= 2

    def points(self) -> list[tuple[int, float]]:
        """Step and value of each point; the step is that of the last value in it."""
        return [*self._whole, _average_points(self._part)] if self._part else list(self._whole)

    def whole(self) -> list[float]:
        """The values of the points that are complete: each stands for `per` values."""
        return [value for _, value in self._whole]

    def __bool__(self) -> bool:
        return bool(self._whole or self._part)


def _average_points(points: list[tuple[int, float]]) -> tuple[int, float]:
    return points[-1][0], sum(value for _, value in points) / len(points)


# How long a run will still take, and how well that is known: a fold over its journal.
#
# The estimate is the mean cost of the later half of the steps seen, for the steps that are left, and validations as
# they
# were so far. Its range is made of what forecasts by the same rule would have erred by in the past of this very run: a
# speed that wanders widens it, whatever the reason, and steps that are all alike narrow it. docs/console.md has how
# often
# it was right.

LEAST_STEPS = 3
"""Nothing is said before so many steps."""
SHARE, LATEST = 0.5, 8
"""The estimate is by this share of the steps, the latest ones, and by so many at least."""
CUTS = (0.2, 0.33, 0.5, 0.67, 0.8)
"""Shares of the steps after which a forecast is looked back upon."""
ERRED, FURTHER, SPREAD, UNSEEN = 1.6, 0.2, 1.5, 2.0
"""Weights in the range: of past forecasts' errors, of looking further ahead than those did, of the standard error by
batches of steps, and of steps that are few (a start that is not typical). Chosen on 42 real and 420 made-up runs so
that nine of ten ends are within the range, where steps are of one kind."""
BATCHES = 6
IDLE_S, IDLE_STEPS = 60.0, 10.0
"""A wait between two steps counts up to this long, and so many steps: the rest is a machine that slept, or a clock."""


_UNITS = (("s", 90.0), ("min", 5400.0), ("h", 129_600.0))
"""Units, and up to how many seconds each is used; beyond the last one, days."""
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True)
class RemainingTime:
    """An estimate in seconds, with the range that nine of ten ends are to be in."""

    low_s: float
    middle_s: float
    high_s: float

    @property
    def is_close(self) -> bool:
        """Whether the range is within a tenth of the estimate: then it needs no mention."""
        return max(self.middle_s - self.low_s, self.high_s - self.middle_s) <= 0.1 * self.middle_s

    def describe(self) -> str:
        """`about 12 min (9-17)`; without the range where it is close."""
        middle, unit = _round_duration(self.middle_s)
        if self.is_close:
            return f"about {middle} {unit}"
        low, high = (_round_duration(seconds, unit)[0] for seconds in (self.low_s, self.high_s))
        return f"about {middle} {unit}" if low == high else f"about {middle} {unit} ({low}-{high})"


def _round_duration(seconds: float, unit: str = "") -> tuple[str, str]:
    """As much of a duration as an estimate may say, and its unit, which may be given."""
    unit = unit or next((name for name, most_s in _UNITS if seconds < most_s), "d")
    count = seconds / _SECONDS[unit]
    if unit == "s":
        return f"{round(count) if count < 20 else 5 * round(count / 5)}", unit
    return f"{count:.1f}" if count < 9.95 and unit != "min" else f"{count:.0f}", unit


class EtaEstimator:
    """Running account; `see` folds one more event in. Events that are damaged raise, and are to be passed over."""

    def __init__(self) -> None:
        self._costs = DownsampledCurve()
        self._validation_s: list[float] = []
        self._validations: list[int] = []
        self._conditions: tuple[object, ...] = ()
        self._planned, self._step = 0, 0
        self._last_t: float | None = None
        """When the last step of this attempt ended; None: it has none."""
        self._first: float | None = None
        """Cost of an attempt's first step, for as long as nothing else is known."""
        self._between_s = 0.0
        """Of validations since the last step."""
        self._unanswered_s = 0.0
        """Of a generation: work since the last answers."""

    def see(self, event: JournalEvent) -> None:
        """Fold one event in."""
        data = event.data
        if event.kind == "step":
            self._cost(event)
        elif event.kind == "answered":
            self._answers(event)
        elif event.kind == "skipped":
            self._step, self._last_t = int(data["step"]), event.t
        elif event.kind == "validation":
            self._between_s += float(data["seconds"])
            self._validation_s = [*self._validation_s[-7:], float(data["seconds"])]
            if data["step"] not in self._validations:
                self._validations = [*self._validations[-1:], int(data["step"])]
        elif event.kind == "ready":
            self._planned, self._step = int(data["planned_steps"]), int(data["start_step"])
            self._last_t, self._between_s, self._unanswered_s = None, 0.0, 0.0
            conditions = tuple(data.get(name) for name in ("device", "compute_dtype", "ranks", "threads"))
            if conditions != self._conditions:  # another speed
                self._conditions, self._costs, self._validation_s = conditions, DownsampledCurve(), []

    def _cost(self, event: JournalEvent) -> None:
        """A step's time, and that between it and the last one: waits for data, copies for checkpoints."""
        step_s, self._step = float(event.data["step_s"]), int(event.data["step"])
        if self._last_t is not None:  # an attempt's first step also warms up
            idle_s = event.t - self._last_t - self._between_s - step_s
            self._costs.add(self._step, step_s + min(max(0.0, idle_s), IDLE_S + IDLE_STEPS * step_s))
        self._last_t, self._between_s = event.t, 0.0

    def _answers(self, event: JournalEvent) -> None:
        """Of a generation, whose steps are answers: several at once, each with its share of the time since the last."""
        before, self._step = self._step, int(event.data["step"])
        self._unanswered_s += float(event.data["seconds"])
        if (count := self._step - before) > 0:
            for step in range(before + 1, self._step + 1):
                self._costs.add(step, self._unanswered_s / count)
            self._last_t, self._unanswered_s = event.t, 0.0

    def left(self, now: float) -> RemainingTime | None:
        """Until the last step and the last validation; None while too little is known. `now` is Unix time.

        Not in it: another death, an early stop, sealing the result, and validations before the first one is over.
        """
        costs, per = self._costs.whole(), self._costs.per
        steps = max(0, self._planned - self._step)
        if len(costs) * per < LEAST_STEPS or not self._planned or self._last_t is None:
            return None
        each_s = _latest_cost(costs, per)
        spread = _estimate_spread(costs, per, steps, each_s)
        begun_s = min(max(0.0, now - self._last_t - self._between_s), each_s) if steps else 0.0
        stepping_s = max(0.0, steps * each_s - begun_s)
        validating_s = self._validating_s()
        around = math.exp(min(spread, 5.0))
        return RemainingTime(
            stepping_s / around + validating_s, stepping_s + validating_s, stepping_s * around + validating_s
        )

    def _validating_s(self) -> float:
        """Of the validations that are left: one at the end, and one every so many steps, as far as that was seen."""
        if not self._validation_s or self._step >= self._planned:
            return 0.0
        every = self._validations[-1] - (self._validations[-2] if len(self._validations) > 1 else 0)
        left = math.ceil((self._planned - self._validations[-1]) / every) if every > 0 else 1
        return max(0, left) * sum(self._validation_s) / len(self._validation_s)


def _latest_cost(costs: list[float], per: int) -> float:
    """What a step costs by the latest of them."""
    count = max(math.ceil(len(costs) * SHARE), math.ceil(LATEST / per))
    return _mean_rate(costs[-count:])


def _estimate_spread(costs: list[float], per: int, ahead: int, each_s: float) -> float:
    """Half the width of the range, as a logarithm.

    Args:
        costs: of steps, in points that stand for `per` of them.
        ahead: steps that are left.
        each_s: the estimate for one.
    """
    seen = len(costs) * per
    errors = []
    for cut in (int(len(costs) * share) for share in CUTS):
        if cut >= 2 and len(costs) > cut:
            errors.append(math.log(max(1e-9, _mean_rate(costs[cut:])) / max(1e-9, _latest_cost(costs[:cut], per))))
    erred = math.sqrt(_mean_rate([error * error for error in errors])) if errors else 0.2
    count = min(BATCHES, len(costs))
    bounds = [round(place * len(costs) / count) for place in range(count + 1)]
    means = [_mean_rate(costs[start:end]) for start, end in pairwise(bounds)]
    standard = _deviation(means) / math.sqrt(count) / max(1e-9, each_s)
    further = 1 + FURTHER * math.log1p(ahead / seen)
    unseen = UNSEEN / seen * math.sqrt(ahead / (ahead + seen))
    return math.hypot(ERRED * erred * further, SPREAD * standard, unseen)


def _mean_rate(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean_rate(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


# Where a generation stands: a fold over its journal, for people.

WINDOW_S = 60.0
"""Over the last so many seconds of work the speed is averaged."""


@dataclass
class GenerationProgress:
    """Running summary; `see` folds one more event in. Events that are damaged raise, and are to be passed over."""

    finishes: Counter[str] = field(default_factory=Counter)
    """Answers by how they ended, as far as the journal tells: what a death came before is not in it."""
    tokens: int = 0
    """Of all answers."""
    speed: DownsampledCurve = field(default_factory=DownsampledCurve)
    """Tokens a second, by answers."""
    live: dict[str, Any] = field(default_factory=dict)
    """Of the last event `answered`: rows, held_tokens, waiting, budget_tokens, held_bytes, forecast_bytes,
    device_bytes, chosen, doubted; None where whoever answers does not say."""
    _step: int = 0
    _recent: deque[tuple[int, int, float]] = field(default_factory=deque)
    """Answers, tokens and seconds between two tellings."""

    def see(self, event: JournalEvent) -> None:
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


def get_live_number(live: dict[str, Any], name: str) -> int | None:
    """A figure of `GenerationProgress.live`."""
    value = live.get(name)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_generation(paths: RunPaths) -> bool:
    """Whether a run directory is that of a generation; one whose spec cannot be read is taken for a training's."""
    try:
        found = json.loads(paths.spec.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "generate" in found


# What a screen shows of a run: a fold over its journal.

STRAGGLES = 1.25
"""A rank that computes so many times as long as the median of ranks holds the others up."""
NEWS = 20
"""The last so many are kept."""
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError)


@dataclass(frozen=True)
class NotableEvent:
    """Something out of the ordinary."""

    t: float
    """Unix time."""
    text: str
    grave: bool
    """Whether a person should see it now."""


@dataclass(frozen=True)
class RankUtilization:
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
class ProgressView:
    """Running summary for people who look; `see` folds one more event in, and none makes it fail."""

    progress: RunProgress = field(default_factory=RunProgress)
    outlook: EtaEstimator = field(default_factory=EtaEstimator)
    answering: GenerationProgress | None = None
    """Of a generation; None: it is a training."""
    train: DownsampledCurve = field(default_factory=DownsampledCurve)
    """Losses of steps, each step once."""
    validation: DownsampledCurve = field(default_factory=DownsampledCurve)
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
    ranks: tuple[RankUtilization, ...] = ()
    system: dict[str, Any] = field(default_factory=dict)
    """The last event `system`, as it was told."""
    rollbacks: int = 0
    shrinks: int = 0
    """Micro-batches made smaller because memory ran out."""
    news: deque[NotableEvent] = field(default_factory=lambda: deque(maxlen=NEWS))
    _hosts: tuple[str, ...] = ()
    _flops_per_token: float | None = None
    _peak_flops_s: float | None = None
    _recent: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    """Of the last steps: seconds, tokens computed, tokens learned from."""
    _replay: ReplayFilter = field(default_factory=ReplayFilter)

    def see(self, event: JournalEvent) -> None:
        """Fold one event in; what is damaged is counted by `progress`, and passed over."""
        self.progress.see(event)
        new = self._replay.new(event)
        answer = self.answering.see if self.answering else _ignore_event
        for fold in (self.outlook.see, answer, self._learn if new else _ignore_event, self._follow, self._tell):
            try:
                fold(event)
            except DAMAGE:
                continue

    def _learn(self, event: JournalEvent) -> None:
        data = event.data
        if event.kind == "step":
            self.train.add(int(data["step"]), _require_finite(data["loss"]))
        elif event.kind == "validation":
            self.validation.add(int(data["step"]), _require_finite(data["loss"]))

    def _follow(self, event: JournalEvent) -> None:
        data = event.data
        if event.kind == "step":
            self.gradient_norm = _require_finite(data["grad_norm"])
            self._recent.append(
                (_require_finite(data["step_s"]), int(data["input_tokens"]), int(data["trained_tokens"]))
            )
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

    def _turn(self, event: JournalEvent) -> None:
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
            RankUtilization(rank, host, share, share / middle if middle > 0 else 1.0)
            for rank, (host, share) in enumerate(zip(hosts, busy, strict=False))
        )

    def _tell(self, event: JournalEvent) -> None:
        text = event_messages.describe_notable_event(event)
        if text is not None:
            self.news.append(NotableEvent(event.t, text, event.kind in ("alert", "died", "refused", "skipped")))

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
    def stragglers(self) -> list[RankUtilization]:
        """Ranks that the others wait for, the slowest first."""
        return sorted((one for one in self.ranks if one.straggles), key=lambda one: -one.relative)


def create_view(paths: RunPaths) -> ProgressView:
    """Those of a run of which nothing was told yet."""
    return ProgressView(answering=GenerationProgress() if is_generation(paths) else None)


def _require_finite(value: Any) -> float:
    """A number that can be drawn. Raises ValueError, TypeError."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} cannot be drawn")
    return number


def _ignore_event(event: JournalEvent) -> None:
    """What was told before."""
