"""Live view of a run for screens: loss curves, estimated time left, state, and notable events, folded from its journal.

It keeps bounded memory for a journal of any length.
"""

import json
import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from ratchet.config import units
from ratchet.runs import replication_protocol
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent, JournalReader, ReplayFilter
from ratchet.runs.replication_protocol import ReplicationState
from ratchet.runs.restart_policy import describe_cause
from ratchet.runs.status import RATE_WINDOW, RunProgress, describe_ranks
from ratchet.storage import files

POINTS = 256
"""Maximum number of points of a curve."""


class DownsampledCurve:
    """Values by step, ascending, averaged into points. Each point but the last is the mean of equally many values."""

    def __init__(self) -> None:
        self._whole: list[tuple[int, float]] = []
        self._part: list[tuple[int, float]] = []
        self.values_per_point = 1
        """Values that a point stands for."""

    def add(self, step: int, value: float) -> None:
        """Append a value."""
        self._part.append((step, value))
        if len(self._part) < self.values_per_point:
            return
        self._whole.append(_average_points(self._part))
        self._part = []
        if len(self._whole) == POINTS:
            self._whole = [_average_points(self._whole[place : place + 2]) for place in range(0, POINTS, 2)]
            self.values_per_point *= 2

    def points(self) -> list[tuple[int, float]]:
        """Step and value of each point; the step is that of the last value in it."""
        return [*self._whole, _average_points(self._part)] if self._part else list(self._whole)

    def complete_values(self) -> list[float]:
        """Values of the complete points; each stands for `values_per_point` values."""
        return [value for _, value in self._whole]

    def __bool__(self) -> bool:
        return bool(self._whole or self._part)


def _average_points(points: list[tuple[int, float]]) -> tuple[int, float]:
    return points[-1][0], sum(value for _, value in points) / len(points)


# Estimated time left.
#
# The estimate multiplies the steps left by the mean cost of the later half of the steps seen, and adds validations at
# the frequency and cost seen so far. Its range follows from the errors that forecasts by the same rule would have made
# earlier in this run: a varying speed widens it, whatever the reason, and equal steps narrow it.

MIN_STEPS = 3
"""No estimate before this many steps."""
RECENT_SHARE, MIN_RECENT = 0.5, 8
"""The estimate uses this share of the steps, the latest ones, and at least this many."""
CUTS = (0.2, 0.33, 0.5, 0.67, 0.8)
"""Shares of the steps after which a past forecast is evaluated."""
ERROR_WEIGHT, HORIZON_WEIGHT, SPREAD_WEIGHT, FEW_STEPS_WEIGHT = 1.6, 0.2, 1.5, 2.0
"""Weights in the range: errors of past forecasts; a longer horizon than theirs; the standard error over batches of
steps; few steps (an untypical start). Chosen on 42 real and 420 simulated runs so that nine of ten ends are within the
range if steps are of one kind."""
BATCHES = 6
MAX_IDLE_S, MAX_IDLE_STEPS = 60.0, 10.0
"""A wait between two steps counts up to this long plus the time of this many steps. More is a suspended machine, or a
clock that was set."""


_UNITS = (("s", 90.0), ("min", 5400.0), ("h", 129_600.0))
"""Units, and up to how many seconds each is used; beyond the last one, days."""
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


@dataclass(frozen=True)
class RemainingTime:
    """An estimate in seconds, with a range that contains nine of ten ends."""

    low_s: float
    estimate_s: float
    high_s: float

    @property
    def is_precise(self) -> bool:
        """Whether the range is within a tenth of the estimate, so that it needs no mention."""
        return max(self.estimate_s - self.low_s, self.high_s - self.estimate_s) <= 0.1 * self.estimate_s

    def describe(self) -> str:
        """`about 12 min (9-17)`; without the range if the estimate is precise."""
        middle, unit = _round_duration(self.estimate_s)
        if self.is_precise:
            return f"about {middle} {unit}"
        low, high = (_round_duration(seconds, unit)[0] for seconds in (self.low_s, self.high_s))
        return f"about {middle} {unit}" if low == high else f"about {middle} {unit} ({low}-{high})"


def _round_duration(seconds: float, unit: str = "") -> tuple[str, str]:
    """Round a duration to the precision of an estimate. Returns the number and its unit; `unit` fixes the unit."""
    unit = unit or next((name for name, most_s in _UNITS if seconds < most_s), "d")
    count = seconds / _SECONDS[unit]
    if unit == "s":
        return f"{round(count) if count < 20 else 5 * round(count / 5)}", unit
    return f"{count:.1f}" if count < 9.95 and unit != "min" else f"{count:.0f}", unit


class EtaEstimator:
    """Estimates the time left; `update` adds one event. It raises for a damaged event, which the caller skips."""

    def __init__(self) -> None:
        self._costs = DownsampledCurve()
        self._validation_s: list[float] = []
        self._validations: list[int] = []
        self._conditions: tuple[object, ...] = ()
        self._planned, self._step = 0, 0
        self._last_t: float | None = None
        """Time of the last step of this attempt; None: it has done none."""
        self._validated_s = 0.0
        """Time of validations since the last step."""
        self._generated_s = 0.0
        """In a generation: time since the last saved answers."""

    def update(self, event: JournalEvent) -> None:
        """Add one event."""
        data = event.data
        if event.kind == "step":
            self._add_step(event)
        elif event.kind == "generation_progress":
            self._add_answers(event)
        elif event.kind == "step_skipped":
            self._step, self._last_t = int(data["step"]), event.t
        elif event.kind == "validation":
            self._validated_s += float(data["seconds"])
            self._validation_s = [*self._validation_s[-7:], float(data["seconds"])]
            if data["step"] not in self._validations:
                self._validations = [*self._validations[-1:], int(data["step"])]
        elif event.kind == "worker_ready":
            self._planned, self._step = int(data["planned_steps"]), int(data["start_step"])
            self._last_t, self._validated_s, self._generated_s = None, 0.0, 0.0
            conditions = tuple(data.get(name) for name in ("device", "compute_dtype", "ranks", "threads"))
            if conditions != self._conditions:  # the speed differs
                self._conditions, self._costs, self._validation_s = conditions, DownsampledCurve(), []

    def _add_step(self, event: JournalEvent) -> None:
        """Add the time of a step and the time since the previous one: waits for data, copies for checkpoints."""
        step_s, self._step = float(event.data["step_s"]), int(event.data["step"])
        if self._last_t is not None:  # the first step of an attempt includes warm-up
            idle_s = event.t - self._last_t - self._validated_s - step_s
            self._costs.add(self._step, step_s + min(max(0.0, idle_s), MAX_IDLE_S + MAX_IDLE_STEPS * step_s))
        self._last_t, self._validated_s = event.t, 0.0

    def _add_answers(self, event: JournalEvent) -> None:
        """In a generation, steps are answers: several at once, which share the time since the previous ones."""
        before, self._step = self._step, int(event.data["step"])
        self._generated_s += float(event.data["seconds"])
        if (count := self._step - before) > 0:
            for step in range(before + 1, self._step + 1):
                self._costs.add(step, self._generated_s / count)
            self._last_t, self._generated_s = event.t, 0.0

    def estimate(self, now: float) -> RemainingTime | None:
        """Time until the last step and the last validation; None while too little is known. `now` is Unix time.

        Not included: another crash, early stopping, sealing the result, and validations before the first one is done.
        """
        costs, per_point = self._costs.complete_values(), self._costs.values_per_point
        steps = max(0, self._planned - self._step)
        if len(costs) * per_point < MIN_STEPS or not self._planned or self._last_t is None:
            return None
        step_s = _recent_cost(costs, per_point)
        spread = _estimate_spread(costs, per_point, steps, step_s)
        begun_s = min(max(0.0, now - self._last_t - self._validated_s), step_s) if steps else 0.0
        steps_s = max(0.0, steps * step_s - begun_s)
        validations_s = self._remaining_validations_s()
        factor = math.exp(min(spread, 5.0))
        return RemainingTime(
            steps_s / factor + validations_s, steps_s + validations_s, steps_s * factor + validations_s
        )

    def _remaining_validations_s(self) -> float:
        """Time of the validations left: one at the end, and one per interval, if two were seen."""
        if not self._validation_s or self._step >= self._planned:
            return 0.0
        every = self._validations[-1] - (self._validations[-2] if len(self._validations) > 1 else 0)
        left = math.ceil((self._planned - self._validations[-1]) / every) if every > 0 else 1
        return max(0, left) * sum(self._validation_s) / len(self._validation_s)


def _recent_cost(costs: list[float], per_point: int) -> float:
    """Mean cost of the latest steps."""
    count = max(math.ceil(len(costs) * RECENT_SHARE), math.ceil(MIN_RECENT / per_point))
    return _mean(costs[-count:])


def _estimate_spread(costs: list[float], per_point: int, ahead: int, step_s: float) -> float:
    """Half the width of the range, on a logarithmic scale.

    Args:
        costs: of steps, in points that stand for `per_point` steps each.
        per_point: see above.
        ahead: steps left.
        step_s: estimated cost of a step.
    """
    seen = len(costs) * per_point
    errors = []
    for cut in (int(len(costs) * share) for share in CUTS):
        if cut >= 2 and len(costs) > cut:
            errors.append(math.log(max(1e-9, _mean(costs[cut:])) / max(1e-9, _recent_cost(costs[:cut], per_point))))
    error = math.sqrt(_mean([error * error for error in errors])) if errors else 0.2
    count = min(BATCHES, len(costs))
    bounds = [round(place * len(costs) / count) for place in range(count + 1)]
    means = [_mean(costs[start:end]) for start, end in pairwise(bounds)]
    standard = _deviation(means) / math.sqrt(count) / max(1e-9, step_s)
    horizon = 1 + HORIZON_WEIGHT * math.log1p(ahead / seen)
    few = FEW_STEPS_WEIGHT / seen * math.sqrt(ahead / (ahead + seen))
    return math.hypot(ERROR_WEIGHT * error * horizon, SPREAD_WEIGHT * standard, few)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


# Generations.

WINDOW_S = 60.0
"""The speed is averaged over this much recent work."""


@dataclass
class GenerationProgress:
    """Progress of a generation; `update` adds one event. It raises for a damaged event, which the caller skips."""

    finish_counts: Counter[str] = field(default_factory=Counter)
    """Answers by the reason they ended. Answers that were saved just before a crash may be missing."""
    tokens: int = 0
    """Tokens of all answers."""
    speed: DownsampledCurve = field(default_factory=DownsampledCurve)
    """Tokens/s, by answers."""
    live: dict[str, Any] = field(default_factory=dict)
    """Data of the last event `generation_progress`; values are None if the backend does not report them."""
    _step: int = 0
    _recent: deque[tuple[int, int, float]] = field(default_factory=deque)
    """Answers, tokens and seconds of recent events."""

    def update(self, event: JournalEvent) -> None:
        """Add one event."""
        data = event.data
        if event.kind == "worker_ready":
            self._step, self.live = int(data["start_step"]), {}
            self._recent.clear()
        elif event.kind == "generation_progress":
            answers, tokens, seconds = int(data["step"]) - self._step, int(data["tokens"]), float(data["seconds"])
            self._step = int(data["step"])
            self.finish_counts.update({str(name): int(count) for name, count in (data.get("finish") or {}).items()})
            self.tokens += tokens
            self.live = dict(data)
            self._recent.append((answers, tokens, seconds))
            while sum(one[2] for one in self._recent) - self._recent[0][2] > WINDOW_S:
                self._recent.popleft()
            if seconds > 0:
                self.speed.add(self._step, tokens / seconds)

    def _rate(self, index: int) -> float | None:
        seconds = sum(one[2] for one in self._recent)
        return sum(one[index] for one in self._recent) / seconds if seconds > 0 else None

    @property
    def answers_per_s(self) -> float | None:
        """Recent speed of this attempt; None before its first answers."""
        return self._rate(0)

    @property
    def tokens_per_s(self) -> float | None:
        """Recent speed of this attempt in tokens of answers."""
        return self._rate(1)

    def describe_finishes(self) -> list[str]:
        """Answers by the reason they ended, most frequent first: `120 stop`, `3 refused`."""
        return [f"{count:,} {name}" for name, count in self.finish_counts.most_common()]


def get_live_number(live: dict[str, Any], name: str) -> int | None:
    """A number of `GenerationProgress.live`, or None."""
    value = live.get(name)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_generation(paths: RunPaths) -> bool:
    """Whether a run is a generation. A run whose spec cannot be read counts as a training."""
    try:
        found = json.loads(paths.spec.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "generate" in found


# The view.

STRAGGLER_RATIO = 1.25
"""A rank that computes this many times as long as the median rank slows the others down."""
NOTABLE_EVENTS = 20
"""Number of recent notable events that are kept."""
DAMAGE = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError)


@dataclass(frozen=True)
class NotableEvent:
    """An unusual event, as text."""

    t: float
    """Unix time."""
    text: str
    is_urgent: bool
    """Whether a person should see it now."""


@dataclass(frozen=True)
class RankUtilization:
    """How busy one of several ranks was recently."""

    rank: int
    host: str
    """Empty if unknown."""
    busy: float
    """Share of the time in which it computed its own rows; otherwise it waited for other ranks."""
    relative_to_median: float
    """Its busy time over that of the median rank."""

    @property
    def is_straggler(self) -> bool:
        """Whether the other ranks wait for it."""
        return self.relative_to_median > STRAGGLER_RATIO


@dataclass
class ProgressView:
    """Everything a screen shows of a run; `update` adds one event and never fails."""

    progress: RunProgress = field(default_factory=RunProgress)
    eta: EtaEstimator = field(default_factory=EtaEstimator)
    generation: GenerationProgress | None = None
    """Of a generation; None for a training."""
    train: DownsampledCurve = field(default_factory=DownsampledCurve)
    """Training losses, each step once."""
    validation: DownsampledCurve = field(default_factory=DownsampledCurve)
    """Validation losses."""
    gradient_norm: float | None = None
    state: str = "starting"
    """starting, training or answering, waiting (for the next attempt), stopped, failed, finished."""
    device: str = ""
    compute_dtype: str = ""
    began_t: float | None = None
    """Unix time of the first attempt."""
    is_ready: bool = False
    """Whether the current attempt has loaded everything."""
    available_bytes: int = 0
    """Available memory at the time of the forecast."""
    ranks: tuple[RankUtilization, ...] = ()
    system: dict[str, Any] = field(default_factory=dict)
    """Data of the last event `system_metrics`."""
    rollbacks: int = 0
    budget_shrinks: int = 0
    """How often micro-batches were made smaller because memory ran out."""
    notable_events: deque[NotableEvent] = field(default_factory=lambda: deque(maxlen=NOTABLE_EVENTS))
    _hosts: tuple[str, ...] = ()
    _flops_per_token: float | None = None
    _peak_flops_per_s: float | None = None
    _recent: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))
    """Seconds, input tokens and trained tokens of recent steps."""
    _replay: ReplayFilter = field(default_factory=ReplayFilter)

    def update(self, event: JournalEvent) -> None:
        """Add one event. `progress` counts damaged events; the other parts skip them."""
        self.progress.update(event)
        is_new = self._replay.is_new(event)
        generation = self.generation.update if self.generation else _ignore_event
        curves = self._add_to_curves if is_new else _ignore_event
        for fold in (self.eta.update, generation, curves, self._update_figures, self._add_notable):
            try:
                fold(event)
            except DAMAGE:
                continue

    def _add_to_curves(self, event: JournalEvent) -> None:
        data = event.data
        if event.kind == "step":
            self.train.add(int(data["step"]), _require_finite(data["loss"]))
        elif event.kind == "validation":
            self.validation.add(int(data["step"]), _require_finite(data["loss"]))

    def _update_figures(self, event: JournalEvent) -> None:
        data = event.data
        if event.kind == "step":
            self.gradient_norm = _require_finite(data["grad_norm"])
            self._recent.append(
                (_require_finite(data["step_s"]), int(data["input_tokens"]), int(data["trained_tokens"]))
            )
        elif event.kind == "worker_ready":
            self._begin_work(data)
        elif event.kind == "rank_timings":
            self._compare_ranks(data)
        elif event.kind == "system_metrics":
            self.system = dict(data)
        elif event.kind == "memory_forecast":
            self.available_bytes = int(data["available_bytes"])
        elif event.kind == "microbatch_budget":
            self.budget_shrinks += data["action"] == "shrink"
        elif event.kind == "step_skipped":
            self.rollbacks += data["action"] == "roll_back"
        else:
            self._update_state(event)

    def _update_state(self, event: JournalEvent) -> None:
        """Follow the start and end of attempts."""
        if event.kind == "attempt_started":
            self.began_t = event.t if self.began_t is None else self.began_t
            self.state, self.is_ready, self.ranks = "starting", False, ()
            self._recent.clear()
        elif event.kind == "worker_exited":
            self.state = {"Retry": "waiting", "GiveUp": "failed"}.get(str(event.data["decision"]), "stopped")
        elif event.kind in ("interrupted", "finished"):
            self.state = "stopped" if event.kind == "interrupted" else "finished"
        if event.kind in ("worker_exited", "interrupted", "finished"):
            self.is_ready = False

    def _begin_work(self, data: dict[str, Any]) -> None:
        self.state, self.is_ready = "answering" if self.generation else "training", True
        self.device, self.compute_dtype = str(data.get("device", "")), str(data.get("compute_dtype", ""))
        hosts = data.get("hosts") or ()
        self._hosts = tuple(map(str, hosts)) if isinstance(hosts, list | tuple) else ()
        self._recent.clear()
        self._flops_per_token, self._peak_flops_per_s = (
            float(found) if isinstance(found, int | float) and found > 0 else None
            for found in (data.get("flops_per_token"), data.get("peak_flops_per_s"))
        )

    def _compare_ranks(self, data: dict[str, Any]) -> None:
        busy = [float(one) / float(data["seconds"]) for one in data["busy_s"]]
        # Of two ranks, the faster one: compared with the mean of both, neither could be much slower.
        middle = statistics.median_low(busy)
        hosts = (*self._hosts, *[""] * len(busy))
        self.ranks = tuple(
            RankUtilization(rank, host, share, share / middle if middle > 0 else 1.0)
            for rank, (host, share) in enumerate(zip(hosts, busy, strict=False))
        )

    def _add_notable(self, event: JournalEvent) -> None:
        text = describe_notable_event(event)
        if text is not None:
            self.notable_events.append(
                NotableEvent(event.t, text, event.kind in ("alert", "worker_exited", "start_refused", "step_skipped"))
            )

    def _rate(self, index: int) -> float | None:
        seconds = sum(one[0] for one in self._recent)
        return sum(one[index] for one in self._recent) / seconds if seconds > 0 else None

    @property
    def is_working(self) -> bool:
        """Whether the worker has loaded everything and has not ended."""
        return self.state in ("training", "answering")

    @property
    def has_figures(self) -> bool:
        """Whether this attempt has done a step; figures from before a restart belong to steps that are repeated."""
        return bool(self._recent)

    @property
    def input_tokens_per_s(self) -> float | None:
        """Recent speed of this attempt in input tokens/s."""
        return self._rate(1)

    @property
    def trained_tokens_per_s(self) -> float | None:
        """Recent speed of this attempt in trained tokens/s."""
        return self._rate(2)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization between 0 and 1, relative to the peak in the data sheet; None if unknown."""
        rate = self.input_tokens_per_s
        if rate is None or self._flops_per_token is None or self._peak_flops_per_s is None:
            return None
        return rate * self._flops_per_token / self._peak_flops_per_s

    @property
    def stragglers(self) -> list[RankUtilization]:
        """Ranks that the others wait for, slowest first."""
        return sorted((one for one in self.ranks if one.is_straggler), key=lambda one: -one.relative_to_median)


def create_view(paths: RunPaths) -> ProgressView:
    """An empty view for the kind of this run."""
    return ProgressView(generation=GenerationProgress() if is_generation(paths) else None)


def _require_finite(value: Any) -> float:
    """Convert to a finite number. Raises ValueError, TypeError."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} cannot be drawn")
    return number


def _ignore_event(event: JournalEvent) -> None:
    """Used in place of a fold that does not apply."""


_SEALING = re.compile(rf"{re.escape(files.PARTIAL)}step-([0-9]{{8,}})-([0-9]+)")


@dataclass(frozen=True)
class SidecarState:
    """State of a run directory that is not in the journal, at one moment."""

    running: bool = False
    """Whether a process holds the lock of the run."""
    saving: int | None = None
    """Step of the checkpoint that is being written; None: none is."""
    replica: ReplicationState | None = None
    """State of the replica; None: there is no replica, or nothing is known of it."""
    finished: bool = False
    """Whether there is a result. It is not verified, which would take too long twice a second."""


def read_sidecar_state(paths: RunPaths) -> SidecarState:
    """Read the state of a run directory. If it is missing or cannot be read, all fields have their defaults."""
    """Look into a run's directory. One that is not there, or cannot be read, tells nothing."""
    try:
        running = paths.lock().is_held()
        return SidecarState(
            running,
            _find_saving_step(paths) if running else None,
            replication_protocol.read_replication_state(paths),
            paths.result.is_dir(),
        )
    except OSError:
        return SidecarState()


def _find_saving_step(paths: RunPaths) -> int | None:
    """The step that a live process of this machine is saving; leftovers of a dead process do not count."""
    try:
        names = [path.name for path in paths.checkpoints.iterdir()]
    except FileNotFoundError:
        return None
    partial = [match for match in map(_SEALING.fullmatch, names) if match]
    found = [int(match[1]) for match in partial if Path(f"/proc/{match[2]}").exists()]
    return max(found, default=None)


class RunSource(Protocol):
    """A run to display, wherever it is trained."""

    name: str
    view: ProgressView
    sidecar: SidecarState
    new_events: Sequence[JournalEvent]
    """Events that the last `refresh` found; at first all of them."""

    def refresh(self) -> None:
        """Read what is new."""


class LocalRunSource:
    """A run whose directory is on this machine."""

    def __init__(self, paths: RunPaths) -> None:
        self.name = paths.root.name
        self.view, self.sidecar = create_view(paths), SidecarState()
        self.new_events: Sequence[JournalEvent] = ()
        self._paths, self._reader = paths, JournalReader(paths.journal)

    def refresh(self) -> None:
        """See `RunSource.refresh`. A run that was removed has no new events."""
        self.sidecar = read_sidecar_state(self._paths)
        self.new_events = list(self._reader.read())
        for event in self.new_events:
            self.view.update(event)


STEP_ANOMALIES = ("step_skipped", "step_repeated", "gradient_spike", "microbatch_budget", "loss_scale")
"""Events about a step that did not run as usual."""
GENERATE_PHASE = "generate"
"""Phase of the batch budgets of a generation."""
EXTERNAL_DEVICES = {"server": "a server", "llama.cpp": "llama.cpp", "none": ""}
"""Devices of models that run outside torch, with their own number formats."""


def describe_start(event: JournalEvent, unit: str = "step") -> str:
    """Describe `worker_ready`: where an attempt starts and on which device; `unit` is the name of a step."""
    start, planned = event.data["start_step"], event.data["planned_steps"]
    resumed = f"resuming from {unit} {start}" if start else "starting"
    where = describe_device(str(event.data["device"]), str(event.data["compute_dtype"]))
    return f"{resumed}, {planned} {unit}s{where and ' on '}{where}{describe_ranks(event.data)}"


def describe_device(device: str, dtype: str) -> str:
    """Device and number format of a model: `cuda in bfloat16`, `a server`; empty if nothing is computed."""
    return EXTERNAL_DEVICES.get(device, f"{device} in {dtype}")


def describe_forecast(event: JournalEvent) -> str:
    """Describe `memory_forecast`: how much memory the run needs."""
    forecast = event.data["forecast"]
    peak = max((phase["parts"] for phase in forecast["phases"]), key=lambda parts: sum(parts.values()))
    most = ", ".join(
        f"{name} {units.format_bytes(count)}" for name, count in sorted(peak.items(), key=lambda one: -one[1])[:3]
    )
    return (
        f"memory forecast for micro-batches of {forecast['rows']} x {forecast['row_tokens']} tokens: "
        f"{units.format_bytes(sum(peak.values()))} of "
        f"{units.format_bytes(event.data['available_bytes'])} available ({most})"
    )


def describe_anomaly(event: JournalEvent) -> str:
    """Describe one of STEP_ANOMALIES: what was wrong with the step, or how it was handled."""
    data = event.data
    if event.kind == "step_skipped":
        step = data["rollback_step"]
        rollback = "" if step is None else f", rolled back to the weights of step {step}"
        return f"skipped{rollback}: {data['reason']}"
    if event.kind == "step_repeated":
        return f"repeated: {data['reason']}"
    if event.kind == "gradient_spike":
        return (
            f"gradient norm {data['grad_norm']:.3g} is {data['deviations']:.1f} deviations above the median "
            f"{data['median']:.3g}; trained on anyway"
        )
    if event.kind == "loss_scale":
        return f"gradient overflowed in float16; repeated with loss scale {data['loss_scale']:g}"
    tokens = data["budget"]["tokens"]
    limit = "no longer limited" if tokens is None else f"limited to {tokens:,} padded tokens"
    cause = (
        f"{data['failed_tokens']:,} did not fit" if data["action"] == "shrink" else "memory was sufficient for a while"
    )
    name = "batch" if data["phase"] == GENERATE_PHASE else f"micro-batch of {data['phase']}"
    return f"{name} {limit}: {cause}"


def describe_notable_event(event: JournalEvent) -> str | None:
    """One line for an unusual event; None for the usual ones.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: the event lacks a key of its kind.
    """
    data = event.data
    if event.kind in ("notice", "alert"):
        return f"{event.kind}: {data['text']}"
    if event.kind in STEP_ANOMALIES:
        unit = "answer" if data.get("phase") == GENERATE_PHASE else "step"
        return f"{unit} {data['step']}: {describe_anomaly(event)}"
    if event.kind == "worker_exited":
        return f"attempt {event.attempt} died: {describe_cause(data['failure_class'], data['text'])}"
    if event.kind in ("start_refused", "pruned"):
        return f"{event.kind.replace('_', ' ')}: {data['text']}"
    return None
