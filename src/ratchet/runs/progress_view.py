"""Live view of a run for screens: loss curves, estimated time left, state, and notable events, folded from its journal.

`ProgressView` is the view, and a `RunSource` keeps it up to date. A view needs bounded memory for a journal of any
length.

The estimate of the time left multiplies the number of steps left by the mean cost of the later half of the steps so
far. It adds validations at the frequency and cost so far. The range of the estimate follows from the errors that
forecasts by the same rule would have made earlier in this run. So a varying speed widens the range, whatever its cause,
and equal steps narrow the range.
"""

import json
import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
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
from ratchet.runs.status import RunProgress, describe_ranks
from ratchet.storage import files

POINTS = 256  # of a curve, at most

MIN_STEPS = 3  # for an estimate of the time left
RECENT_SHARE, MIN_RECENT = 0.5, 8
"""Share of the steps so far that the estimate uses, and minimum number of steps that it uses. It uses the latest
steps."""
CUTS = (0.2, 0.33, 0.5, 0.67, 0.8)
"""Points for evaluating past forecasts, as shares of the steps so far. At each point, the forecast from the earlier
steps is compared with the mean cost of the later steps."""
ERROR_WEIGHT, HORIZON_WEIGHT, SPREAD_WEIGHT, FEW_STEPS_WEIGHT = 1.6, 0.2, 1.5, 2.0
"""Weights of the causes that widen the range of the estimate, in order: the errors of past forecasts; a horizon that is
longer than that of past forecasts; the standard error over batches of steps; a small number of steps, because the start
may be untypical. The weights were chosen on 42 real and 420 simulated runs. With them, the range contains the actual
end of nine of ten runs if all steps are of one kind."""
BATCHES = 6
"""Maximum number of batches of steps from which the standard error is computed."""
MAX_IDLE_S, MAX_IDLE_STEPS = 60.0, 10.0
"""A wait between two steps counts at most as this time plus the time of this number of steps. A longer wait means that
the machine was suspended or that its clock was set."""

WINDOW_S = 60.0
"""Minimum duration of the recent work over which the speed of a generation is averaged."""

STRAGGLER_RATIO = 1.25
"""A rank that computes this many times as long as the median rank slows the others down."""
NOTABLE_EVENTS = 20  # that are kept

STEP_ANOMALIES = ("step_skipped", "step_repeated", "gradient_spike", "microbatch_budget", "loss_scale")
GENERATE_PHASE = "generate"
EXTERNAL_DEVICES = {"server": "a server", "llama.cpp": "llama.cpp", "none": ""}
"""Devices of models that run outside torch and have their own number formats, with their descriptions."""

DAMAGE = (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError)

_UNITS = (("s", 90.0), ("min", 5400.0), ("h", 129_600.0))
"""Units of time, each with the number of seconds below which it is used; longer times are in days."""
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}

_SEALING = re.compile(rf"{re.escape(files.PARTIAL)}step-([0-9]{{8,}})-([0-9]+)")
"""Temporary name of a checkpoint: step, and id of the process that writes it."""


class DownsampledCurve:
    """Curve of values by ascending step, averaged into points. All points but the last average equally many values."""

    def __init__(self) -> None:
        self._complete: list[tuple[int, float]] = []
        self._pending: list[tuple[int, float]] = []
        """Values of the last, incomplete point."""
        self.values_per_point = 1
        """Number of values in a complete point."""

    def add(self, step: int, value: float) -> None:
        """Append a value."""
        self._pending.append((step, value))
        if len(self._pending) < self.values_per_point:
            return
        self._complete.append(_average_points(self._pending))
        self._pending = []
        if len(self._complete) == POINTS:
            self._complete = [_average_points(self._complete[start : start + 2]) for start in range(0, POINTS, 2)]
            self.values_per_point *= 2

    def points(self) -> list[tuple[int, float]]:
        """Return the points. A point is the step of its last value and the mean of its values."""
        return [*self._complete, _average_points(self._pending)] if self._pending else list(self._complete)

    def complete_values(self) -> list[float]:
        """Return the means of the complete points, each over `values_per_point` values."""
        return [value for _, value in self._complete]

    def __bool__(self) -> bool:
        return bool(self._complete or self._pending)


def _average_points(points: list[tuple[int, float]]) -> tuple[int, float]:
    return points[-1][0], statistics.fmean(value for _, value in points)


@dataclass(frozen=True)
class RemainingTime:
    """Estimate of the time left in seconds, with a range that contains the actual end in nine of ten runs."""

    low_s: float
    estimate_s: float
    high_s: float

    @property
    def is_precise(self) -> bool:
        """Whether the range is within a tenth of the estimate, so that it need not be shown."""
        return max(self.estimate_s - self.low_s, self.high_s - self.estimate_s) <= 0.1 * self.estimate_s

    def describe(self) -> str:
        """Return text such as `about 12 min (9-17)`; without the range if the estimate is precise."""
        middle, unit = _round_duration(self.estimate_s)
        if self.is_precise:
            return f"about {middle} {unit}"
        low, high = (_round_duration(seconds, unit)[0] for seconds in (self.low_s, self.high_s))
        return f"about {middle} {unit}" if low == high else f"about {middle} {unit} ({low}-{high})"


def _round_duration(seconds: float, unit: str = "") -> tuple[str, str]:
    """Round a duration to the precision of an estimate. Return the number and its unit. `unit` prescribes the unit."""
    unit = unit or next((name for name, most_s in _UNITS if seconds < most_s), "d")
    count = seconds / _SECONDS[unit]
    if unit == "s":
        return f"{round(count) if count < 20 else 5 * round(count / 5)}", unit
    return f"{count:.1f}" if count < 9.95 and unit != "min" else f"{count:.0f}", unit


class EtaEstimator:
    """Estimator of the time left; `update` adds one event. It raises one of DAMAGE for a damaged event."""

    def __init__(self) -> None:
        self._costs = DownsampledCurve()
        self._validation_s: list[float] = []
        self._validations: list[int] = []
        self._conditions: tuple[object, ...] = ()
        self._planned, self._step = 0, 0
        self._last_t: float | None = None
        """Time of the last step of this attempt; None before its first step."""
        self._validated_s = 0.0
        """Duration of validations since the last step."""
        self._generated_s = 0.0
        """In a generation: duration of the work since the last saved answers."""

    def update(self, event: JournalEvent) -> None:
        """Add one event."""
        data = event.data
        if event.kind == "step":
            # The cost of a step is its duration, and the wait since the previous step (for data, for checkpoints).
            step_s, self._step = float(data["step_s"]), int(data["step"])
            if self._last_t is not None:  # the first step of an attempt includes warm-up
                idle_s = event.t - self._last_t - self._validated_s - step_s
                self._costs.add(self._step, step_s + min(max(0.0, idle_s), MAX_IDLE_S + MAX_IDLE_STEPS * step_s))
            self._last_t, self._validated_s = event.t, 0.0
        elif event.kind == "generation_progress":
            # Answers are the steps of a generation. Answers that were saved together share their time evenly.
            last_step, self._step = self._step, int(data["step"])
            self._generated_s += float(data["seconds"])
            if (count := self._step - last_step) > 0:
                for step in range(last_step + 1, self._step + 1):
                    self._costs.add(step, self._generated_s / count)
                self._last_t, self._generated_s = event.t, 0.0
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
            if conditions != self._conditions:  # the earlier costs no longer apply
                self._conditions, self._costs, self._validation_s = conditions, DownsampledCurve(), []

    def estimate(self, now: float) -> RemainingTime | None:
        """Estimate the time to the last step and validation; None while too little is known. `now` is Unix time.

        Not included: crashes, early stopping, sealing of the result, and validations if none is done yet.
        """
        costs, per_point = self._costs.complete_values(), self._costs.values_per_point
        steps = max(0, self._planned - self._step)
        if len(costs) * per_point < MIN_STEPS or not self._planned or self._last_t is None:
            return None
        step_s = _recent_cost(costs, per_point)
        spread = _estimate_spread(costs, per_point, steps, step_s)
        begun_s = min(max(0.0, now - self._last_t - self._validated_s), step_s) if steps else 0.0
        steps_s = max(0.0, steps * step_s - begun_s)
        validations_s = 0.0
        if self._validation_s and steps:
            # One validation per interval is left, and one at the end. The interval is the number of steps between the
            # last two validations, or before the only validation so far.
            interval = self._validations[-1] - (self._validations[-2] if len(self._validations) > 1 else 0)
            count = math.ceil((self._planned - self._validations[-1]) / interval) if interval > 0 else 1
            validations_s = max(0, count) * statistics.fmean(self._validation_s)
        factor = math.exp(min(spread, 5.0))
        return RemainingTime(
            steps_s / factor + validations_s, steps_s + validations_s, steps_s * factor + validations_s
        )


def _recent_cost(costs: list[float], per_point: int) -> float:
    """Return the mean cost of the latest steps."""
    count = max(math.ceil(len(costs) * RECENT_SHARE), math.ceil(MIN_RECENT / per_point))
    return statistics.fmean(costs[-count:])


def _estimate_spread(costs: list[float], per_point: int, ahead: int, step_s: float) -> float:
    """Return half the width of the range, on a logarithmic scale, with `ahead` steps left of an estimated `step_s`.
    `costs` are mean costs of a step in seconds, each over `per_point` steps."""
    steps = len(costs) * per_point
    errors = []
    for cut in (int(len(costs) * share) for share in CUTS):
        if cut >= 2 and len(costs) > cut:
            errors.append(
                math.log(max(1e-9, statistics.fmean(costs[cut:])) / max(1e-9, _recent_cost(costs[:cut], per_point)))
            )
    error = math.sqrt(statistics.fmean(error * error for error in errors)) if errors else 0.2
    count = min(BATCHES, len(costs))
    bounds = [round(index * len(costs) / count) for index in range(count + 1)]
    means = [statistics.fmean(costs[start:end]) for start, end in pairwise(bounds)]
    standard_error = (statistics.stdev(means) if count > 1 else 0.0) / math.sqrt(count) / max(1e-9, step_s)
    horizon = 1 + HORIZON_WEIGHT * math.log1p(ahead / steps)
    few_steps = FEW_STEPS_WEIGHT / steps * math.sqrt(ahead / (ahead + steps))
    return math.hypot(ERROR_WEIGHT * error * horizon, SPREAD_WEIGHT * standard_error, few_steps)


@dataclass
class GenerationProgress:
    """Progress of a generation; `update` adds one event. It raises one of DAMAGE for a damaged event."""

    finish_counts: Counter[str] = field(default_factory=Counter)
    """Number of answers by the reason for their end. Answers saved just before a crash may be missing."""
    tokens: int = 0
    live: dict[str, Any] = field(default_factory=dict)
    """Data of the last event `generation_progress`. A value is None if the backend does not report it."""
    _step: int = 0
    _recent: deque[tuple[int, int, float]] = field(default_factory=deque)
    """Answers, tokens and seconds of each recent event."""

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
            while sum(entry[2] for entry in self._recent) - self._recent[0][2] > WINDOW_S:
                self._recent.popleft()

    @property
    def answers_per_s(self) -> float | None:
        """Recent speed of this attempt in answers/s; None before its first answers."""
        seconds = sum(entry[2] for entry in self._recent)
        return sum(entry[0] for entry in self._recent) / seconds if seconds > 0 else None

    @property
    def tokens_per_s(self) -> float | None:
        """Recent speed of this attempt in answer tokens/s; None before its first answers."""
        seconds = sum(entry[2] for entry in self._recent)
        return sum(entry[1] for entry in self._recent) / seconds if seconds > 0 else None

    def describe_finishes(self) -> list[str]:
        """Describe the number of answers by the reason for their end, most frequent first: `120 stop`, `3 refused`."""
        return [f"{count:,} {name}" for name, count in self.finish_counts.most_common()]


def get_live_number(live: dict[str, Any], name: str) -> int | None:
    """Return a number from `GenerationProgress.live`; None if it is missing or not a number."""
    value = live.get(name)
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_generation(paths: RunPaths) -> bool:
    """Return whether a run is a generation. If its spec cannot be read, it counts as a training."""
    try:
        spec = json.loads(paths.spec.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(spec, dict) and "generate" in spec


@dataclass(frozen=True)
class NotableEvent:
    """An unusual event, as text."""

    t: float
    text: str
    is_urgent: bool
    """Whether a person should see it now."""


@dataclass(frozen=True)
class RankUtilization:
    """Recent utilization of one of several ranks."""

    rank: int
    host: str
    """Name of the rank's machine; empty if unknown."""
    busy: float
    """Share of the time in which the rank computed its own rows. In the rest, it waited for other ranks."""
    relative_to_median: float
    """Ratio of the busy time of this rank to that of the median rank."""

    @property
    def is_straggler(self) -> bool:
        """Whether the other ranks wait for this rank."""
        return self.relative_to_median > STRAGGLER_RATIO


@dataclass
class ProgressView:
    """Everything that a screen shows of a run; `update` adds one event and never raises."""

    progress: RunProgress = field(default_factory=RunProgress)
    eta: EtaEstimator = field(default_factory=EtaEstimator)
    generation: GenerationProgress | None = None
    train: DownsampledCurve = field(default_factory=DownsampledCurve)
    validation: DownsampledCurve = field(default_factory=DownsampledCurve)
    gradient_norm: float | None = None
    state: str = "starting"
    """One of: starting, training or answering, waiting (for the next attempt), stopped, failed, finished."""
    device: str = ""
    compute_dtype: str = ""
    began_t: float | None = None
    is_ready: bool = False
    """Whether the current attempt has loaded everything."""
    available_bytes: int = 0
    ranks: tuple[RankUtilization, ...] = ()
    system: dict[str, Any] = field(default_factory=dict)
    rollbacks: int = 0
    budget_shrinks: int = 0
    """Number of times that micro-batches were made smaller because memory ran out."""
    notable_events: deque[NotableEvent] = field(default_factory=lambda: deque(maxlen=NOTABLE_EVENTS))
    _hosts: tuple[str, ...] = ()
    _flops_per_token: float | None = None
    _peak_flops_per_s: float | None = None
    _replay: ReplayFilter = field(default_factory=ReplayFilter)

    def update(self, event: JournalEvent) -> None:
        """Add one event. `progress` counts damaged events; the other parts skip them."""
        self.progress.update(event)
        updates = [self.eta.update, self._update_figures, self._update_state, self._add_notable]
        if self.generation is not None:
            updates.append(self.generation.update)
        if self._replay.is_new(event):
            updates.append(self._add_to_curves)
        for update in updates:
            with suppress(*DAMAGE):
                update(event)

    def _add_to_curves(self, event: JournalEvent) -> None:
        curve = {"step": self.train, "validation": self.validation}.get(event.kind)
        if curve is not None:
            curve.add(int(event.data["step"]), _require_finite(event.data["loss"]))

    def _update_figures(self, event: JournalEvent) -> None:
        data = event.data
        if event.kind == "step":
            self.gradient_norm = _require_finite(data["grad_norm"])
        elif event.kind == "rank_timings":
            busy = [float(busy_s) / float(data["seconds"]) for busy_s in data["busy_s"]]
            # With two ranks, this is the share of the faster rank. The mean of both ranks would be a poor reference: no
            # rank can be much slower than the mean.
            median = statistics.median_low(busy)
            hosts = (*self._hosts, *[""] * len(busy))
            self.ranks = tuple(
                RankUtilization(rank, host, share, share / median if median > 0 else 1.0)
                for rank, (host, share) in enumerate(zip(hosts, busy, strict=False))
            )
        elif event.kind == "system_metrics":
            self.system = dict(data)
        elif event.kind == "memory_forecast":
            self.available_bytes = int(data["available_bytes"])
        elif event.kind == "microbatch_budget":
            self.budget_shrinks += data["action"] == "shrink"
        elif event.kind == "step_skipped":
            self.rollbacks += data["action"] == "roll_back"

    def _update_state(self, event: JournalEvent) -> None:
        """Follow the start and end of attempts."""
        data = event.data
        if event.kind == "attempt_started":
            self.began_t = event.t if self.began_t is None else self.began_t
            self.state, self.is_ready, self.ranks = "starting", False, ()
        elif event.kind == "worker_ready":
            self.state, self.is_ready = "answering" if self.generation else "training", True
            self.device, self.compute_dtype = str(data.get("device", "")), str(data.get("compute_dtype", ""))
            hosts = data.get("hosts") or ()
            self._hosts = tuple(map(str, hosts)) if isinstance(hosts, list | tuple) else ()
            self._flops_per_token, self._peak_flops_per_s = (
                float(value) if isinstance(value, int | float) and value > 0 else None
                for value in (data.get("flops_per_token"), data.get("peak_flops_per_s"))
            )
        elif event.kind in ("worker_exited", "interrupted", "finished"):
            self.is_ready = False
            if event.kind == "worker_exited":
                self.state = {"Retry": "waiting", "GiveUp": "failed"}.get(str(data["decision"]), "stopped")
            else:
                self.state = "stopped" if event.kind == "interrupted" else "finished"

    def _add_notable(self, event: JournalEvent) -> None:
        text = describe_notable_event(event)
        if text is not None:
            is_urgent = event.kind in ("alert", "worker_exited", "start_refused", "step_skipped")
            self.notable_events.append(NotableEvent(event.t, text, is_urgent))

    @property
    def is_working(self) -> bool:
        """Whether the worker has loaded everything and has not ended."""
        return self.state in ("training", "answering")

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization between 0 and 1, relative to the peak in the data sheet; None if unknown."""
        rate = self.progress.tokens_per_s
        if rate is None or self._flops_per_token is None or self._peak_flops_per_s is None:
            return None
        return rate * self._flops_per_token / self._peak_flops_per_s

    @property
    def stragglers(self) -> list[RankUtilization]:
        """Ranks that the others wait for, slowest first."""
        return sorted((rank for rank in self.ranks if rank.is_straggler), key=lambda rank: -rank.relative_to_median)


def create_view(paths: RunPaths) -> ProgressView:
    """Create an empty view for the kind of this run."""
    return ProgressView(generation=GenerationProgress() if is_generation(paths) else None)


def _require_finite(value: Any) -> float:
    """Convert to a finite number. Raises ValueError, TypeError."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} cannot be drawn")
    return number


@dataclass(frozen=True)
class SidecarState:
    """State of a run directory at one moment, as far as it is not in the journal."""

    running: bool = False
    """Whether a process holds the lock of the run."""
    saving: int | None = None
    """Step of the checkpoint that is being written, if any."""
    replica: ReplicationState | None = None
    """State of the replica; None if there is no replica or its state is unknown."""
    finished: bool = False
    """Whether there is a result. It is not verified, because that would take too long twice a second."""


def read_sidecar_state(paths: RunPaths) -> SidecarState:
    """Read the state of a run directory. All fields have their defaults if it is missing or cannot be read."""
    try:
        running = paths.lock().is_held()
        return SidecarState(
            running,
            _find_saving_step(paths.checkpoints) if running else None,
            replication_protocol.read_replication_state(paths),
            paths.result.is_dir(),
        )
    except OSError:
        return SidecarState()


def _find_saving_step(checkpoints: Path) -> int | None:
    """Return the step that a live process of this machine is saving. Leftovers of dead processes do not count."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.is_dir() else []
    partial = [match for match in map(_SEALING.fullmatch, names) if match]
    return max((int(match[1]) for match in partial if Path(f"/proc/{match[2]}").exists()), default=None)


class RunSource(Protocol):
    """Interface of a run to display, on this machine or elsewhere."""

    name: str
    view: ProgressView
    sidecar: SidecarState
    new_events: Sequence[JournalEvent]
    """Events that the last `refresh` read. The first call reads all events."""

    def refresh(self) -> None:
        """Read new events and the present state of the run directory."""


class LocalRunSource:
    """Source for a run directory on this machine."""

    def __init__(self, paths: RunPaths) -> None:
        self.name = paths.root.name
        self.view, self.sidecar = create_view(paths), SidecarState()
        self.new_events: Sequence[JournalEvent] = ()
        self._paths, self._reader = paths, JournalReader(paths.journal)

    def refresh(self) -> None:
        """Read new events and the present state of the run directory. A run that was removed has no new events."""
        self.sidecar = read_sidecar_state(self._paths)
        self.new_events = list(self._reader.read())
        for event in self.new_events:
            self.view.update(event)


def describe_start(event: JournalEvent, unit: str = "step") -> str:
    """Describe `worker_ready`: where an attempt starts and on which device; `unit` is the name of a step."""
    start, planned = event.data["start_step"], event.data["planned_steps"]
    resumed = f"resuming from {unit} {start}" if start else "starting"
    where = describe_device(str(event.data["device"]), str(event.data["compute_dtype"]))
    return f"{resumed}, {planned} {unit}s{where and ' on '}{where}{describe_ranks(event.data)}"


def describe_device(device: str, dtype: str) -> str:
    """Describe device and number format of a model: `cuda in bfloat16`, `a server`; empty if nothing is computed."""
    return EXTERNAL_DEVICES.get(device, f"{device} in {dtype}")


def describe_forecast(event: JournalEvent) -> str:
    """Describe `memory_forecast`: how much memory the run needs."""
    forecast = event.data["forecast"]
    peak = max((phase["parts"] for phase in forecast["phases"]), key=lambda parts: sum(parts.values()))
    largest = ", ".join(
        f"{name} {units.format_bytes(count)}" for name, count in sorted(peak.items(), key=lambda part: -part[1])[:3]
    )
    return (
        f"memory forecast for micro-batches of {forecast['rows']} x {forecast['row_tokens']} tokens: "
        f"{units.format_bytes(sum(peak.values()))} of "
        f"{units.format_bytes(event.data['available_bytes'])} available ({largest})"
    )


def describe_anomaly(event: JournalEvent) -> str:
    """Describe one of STEP_ANOMALIES: the problem of the step, or how it was handled."""
    data = event.data
    if event.kind == "step_skipped":
        step = data["rollback_step"]
        rollback = "" if step is None else f", rolled back to the weights of step {step}"
        return f"skipped{rollback}: {data['reason']}"
    if event.kind == "step_repeated":
        return f"repeated: {data['reason']}"
    if event.kind == "gradient_spike":
        norms = data.get("modules", {})
        modules = max(norms, key=lambda name: norms[name], default="")
        return (
            f"gradient norm {data['grad_norm']:.3g} is {data['deviations']:.1f} deviations above the median "
            f"{data['median']:.3g}{modules and f', largest in {modules}'}; trained on anyway"
        )
    if event.kind == "loss_scale":
        return f"gradient overflowed in float16; repeated with loss scale {data['loss_scale']:g}"
    tokens = data["budget"]["tokens"]
    limit = "no longer limited" if tokens is None else f"limited to {tokens:,} padded tokens"
    fault = "would soon not fit" if data.get("is_early") else "did not fit"
    cause = f"{data['failed_tokens']:,} {fault}" if data["action"] == "shrink" else "memory was sufficient for a while"
    name = "batch" if data["phase"] == GENERATE_PHASE else f"micro-batch of {data['phase']}"
    return f"{name} {limit}: {cause}"


def describe_notable_event(event: JournalEvent) -> str | None:
    """Describe an unusual event in one line; None for a usual event. Raises KeyError, TypeError, ValueError,
    AttributeError if the event lacks a key of its kind."""
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
