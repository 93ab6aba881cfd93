"""Prometheus time series of a run, folded from its journal.

Counters cover the whole run, on every machine and in all attempts. They are folded from the first event of the journal,
so a restart does not reset them. Units are base units; times are Unix seconds.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from ratchet.config.machine import Machine
from ratchet.runs.callbacks import Status
from ratchet.runs.journal import JournalEvent
from ratchet.runs.progress_view import ProgressView
from ratchet.runs.restart_policy import FailureClass
from ratchet.runs.status import RunProgress


class PrometheusMetric(NamedTuple):
    """Definition of a metric."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Labels in addition to `run`, which all metrics have."""


class PrometheusSample(NamedTuple):
    """A value of a metric."""

    name: str
    labels: dict[str, str]
    value: float


STATES = ("starting", "training", "waiting", "stopped", "failed", "finished")
VERDICTS = ("PROMOTE", "HOLD", "REJECT", "INVALID")
STEP_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
STEP_SECONDS = "ratchet_step_duration_seconds"


def _gauge(text: str, *labels: str) -> PrometheusMetric:
    return PrometheusMetric("gauge", text, labels)


def _counter(text: str, *labels: str) -> PrometheusMetric:
    return PrometheusMetric("counter", text, labels)


METRICS: dict[str, PrometheusMetric] = {
    "ratchet_run_info": _gauge(
        "Always 1; its labels describe the run", "project", "code_version", "device", "compute_dtype"
    ),
    "ratchet_run_state": _gauge(f"1 for the current state of the run: {', '.join(STATES)}", "state"),
    "ratchet_run_start_timestamp_seconds": _gauge("When the first attempt began"),
    "ratchet_last_event_timestamp_seconds": _gauge("Time of the last event, such as a step"),
    "ratchet_ranks": _gauge("Processes that train the run together"),
    "ratchet_planned_steps": _gauge("Optimizer steps of the whole run"),
    "ratchet_step": _gauge("Current optimizer step; decreases when an attempt fails"),
    "ratchet_remaining_seconds": _gauge("Estimated time left, from the speed of recent steps"),
    "ratchet_steps_total": _counter("Optimizer steps computed, including repeated ones"),
    "ratchet_lost_steps_total": _counter(
        "Steps after the last checkpoint when an attempt ended, which are computed again"
    ),
    STEP_SECONDS: PrometheusMetric("histogram", "Time of an optimizer step"),
    "ratchet_validation_seconds_total": _counter("Time spent in validations"),
    "ratchet_trained_tokens_total": _counter("Answer tokens trained on, in all steps computed"),
    "ratchet_input_tokens_total": _counter("Input tokens, in all steps computed"),
    "ratchet_train_loss": _gauge("Loss of the last step, in nats per answer token"),
    "ratchet_learning_rate": _gauge("Learning rate of the last step"),
    "ratchet_gradient_norm": _gauge("L2 norm of the last step's gradient, before clipping"),
    "ratchet_validation_loss": _gauge("Loss of the last validation, in nats per answer token"),
    "ratchet_best_validation_loss": _gauge("Lowest validation loss so far"),
    "ratchet_memory_peak_bytes": _gauge("Peak memory of a phase of training", "phase"),
    "ratchet_memory_forecast_bytes": _gauge("Forecast peak memory of a phase", "phase"),
    "ratchet_memory_available_bytes": _gauge("Available memory at the time of the forecast"),
    "ratchet_memory_device_bytes": _gauge("Memory of the device: of the GPU, or of the machine"),
    "ratchet_worker_cpus_used": _gauge("CPUs that the worker and its children used in the last sample"),
    "ratchet_worker_resident_memory_bytes": _gauge("Memory of the worker and its children"),
    "ratchet_checkpoints_total": _counter("Checkpoints saved"),
    "ratchet_checkpoint_step": _gauge("Step of the newest checkpoint"),
    "ratchet_checkpoint_timestamp_seconds": _gauge("Time when the newest checkpoint was saved"),
    "ratchet_checkpoint_size_bytes": _gauge("Size of the newest checkpoint"),
    "ratchet_checkpoint_written_bytes_total": _counter("Bytes written for checkpoints, without hard-linked files"),
    "ratchet_checkpoint_blocked_seconds_total": _counter("Time that training was blocked by checkpoints"),
    "ratchet_replica_step": _gauge("Step of the newest checkpoint in the replica"),
    "ratchet_replica_oldest_unsent_timestamp_seconds": _gauge(
        "Time when the oldest checkpoint or result was saved that the replica lacks; absent if it is complete"
    ),
    "ratchet_replica_sent_bytes_total": _counter("Bytes of checkpoints and the result sent to the replica"),
    "ratchet_attempts_total": _counter("Attempts started"),
    "ratchet_failures_total": _counter("Attempts that ended without a result, by failure class", "class"),
    "ratchet_skipped_steps_total": _counter(
        "Steps that were skipped (skip) or led back to earlier weights (roll_back)", "action"
    ),
    "ratchet_repeated_steps_total": _counter("Steps computed a second time because of their loss or gradient"),
    "ratchet_gradient_spikes_total": _counter("Steps with an unusually large gradient that were trained on"),
    "ratchet_memory_shrinks_total": _counter("Micro-batches made smaller because memory ran out", "phase"),
    "ratchet_micro_batch_limit_tokens": _gauge(
        "Largest micro-batch in tokens after memory ran out; absent without a limit", "phase"
    ),
    "ratchet_alerts_total": _counter("Alerts in the journal: storage, memory, stalls, preemption notices"),
    "ratchet_gate_verdict": _gauge(f"1 for the gate's decision: {', '.join(VERDICTS)}", "verdict"),
    "ratchet_gate_timestamp_seconds": _gauge("When the gate decided"),
}  # fmt: skip
"""All metrics. The values of the gate come from a file (tracking/prometheus.py), because another process decides."""


class PrometheusSeries:
    """Series of a run; `update` adds an event, `samples` returns the current values. Not thread-safe."""

    def __init__(self, machine: Machine) -> None:
        self._view = ProgressView()
        self._has_replica = machine.replica is not None
        self._is_sender = machine.node_range[1] == 1
        """Whether this machine sends to the replica. If several machines train the run, only one of them sends; its
        journal has `replicated` events."""
        self._final_state = ""
        self._gauges: dict[str, float] = {}
        self._used: dict[str, float] = {}
        """Values that describe the current worker."""
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._buckets = [0] * (len(STEP_BOUNDS_S) + 1)
        self._step_s = 0.0
        self._deaths: Counter[str] = Counter(dict.fromkeys(get_args(FailureClass), 0))
        self._skipped: Counter[str] = Counter({"skip": 0, "roll_back": 0})
        self._shrinks: Counter[str] = Counter({"train": 0, "validation": 0})
        self._unsent: dict[int, float] = {}
        """Time of each artifact that is not in the replica, by step."""

    @property
    def progress(self) -> RunProgress:
        """Progress of the run."""
        return self._view.progress

    def update(self, event: JournalEvent) -> None:
        """Add one event; an event that lacks a key of its kind is ignored."""
        self._view.update(event)
        try:
            self._fold(event.kind, event.data, event.t)
        except (KeyError, TypeError, ValueError, AttributeError):
            return  # `RunProgress` counts the damaged event

    def end(self, status: Status) -> None:
        """Record the end of the supervision."""
        self._final_state = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}[status]

    def _fold(self, kind: str, data: dict[str, Any], t: float) -> None:
        if kind in ("attempt_started", "worker_exited", "interrupted", "finished"):  # no worker, or a new one
            self._used = {}
        if kind == "step":
            seconds = data["step_s"]
            self._gauges["ratchet_gradient_norm"] = data["grad_norm"]
            self._counts["ratchet_steps_total"] += 1
            self._counts["ratchet_trained_tokens_total"] += data["trained_tokens"]
            self._counts["ratchet_input_tokens_total"] += data["input_tokens"]
            self._buckets[bisect_left(STEP_BOUNDS_S, seconds)] += 1
            self._step_s += seconds
        elif kind == "worker_ready":
            self._gauges["ratchet_ranks"] = data.get("ranks", 1)
        elif kind == "worker_exited":
            self._deaths[data["failure_class"]] += 1
        elif kind == "finished":
            self._unsent.setdefault(data["step"], t)
        elif kind == "validation":
            self._counts["ratchet_validation_seconds_total"] += data["seconds"]
        elif kind == "step_skipped":
            self._skipped[data["action"]] += 1
        elif kind == "microbatch_budget":
            self._shrinks[data["phase"]] += data["action"] == "shrink"
        elif kind == "checkpoint_saved":
            self._unsent.setdefault(data["step"], t)
            self._gauges["ratchet_checkpoint_size_bytes"] = data["size_bytes"]
            self._counts["ratchet_checkpoint_blocked_seconds_total"] += data.get("blocked_s", data["seconds"])
        elif kind == "replicated":
            self._is_sender = True
            self._counts["ratchet_replica_sent_bytes_total"] += data["bytes_sent"]
            sent_step, is_result = data["step"], data["artifact"] == "result"
            self._unsent = {step: at for step, at in self._unsent.items() if step > sent_step and not is_result}
        elif kind == "memory_forecast":
            self._gauges["ratchet_memory_available_bytes"] = data["available_bytes"]
        elif kind == "system_metrics":
            self._used = {
                "ratchet_worker_cpus_used": data["worker_cpu_percent"] / 100,
                "ratchet_worker_resident_memory_bytes": data["worker_memory_bytes"],
            }

    def step_durations(self) -> tuple[list[tuple[str, float]], float]:
        """Return the histogram: upper bounds in seconds, the number of steps up to each, and the total in seconds."""
        cumulative, total = [], 0
        for bound, count in zip((*map(str, STEP_BOUNDS_S), "+Inf"), self._buckets, strict=True):
            total += count
            cumulative.append((bound, float(total)))
        return cumulative, self._step_s

    def samples(self) -> Iterator[PrometheusSample]:
        """Yield every current value except the histogram."""
        view = self._view
        info = {"code_version": self.progress.code_version, "device": view.device, "compute_dtype": view.compute_dtype}
        yield PrometheusSample("ratchet_run_info", info, 1.0)
        for state in STATES:
            is_current = state == (self._final_state or view.state)
            yield PrometheusSample("ratchet_run_state", {"state": state}, float(is_current))
        for name, value in self._unlabelled():
            if isinstance(value, int | float):  # a damaged journal may contain anything
                yield PrometheusSample(name, {}, float(value))
        for name, label, counts in self._labelled():
            for label_value, count in counts.items():
                yield PrometheusSample(name, {label: label_value}, float(count))

    def _unlabelled(self) -> Iterator[tuple[str, float | None]]:
        progress = self.progress
        yield "ratchet_run_start_timestamp_seconds", self._view.began_t
        yield "ratchet_last_event_timestamp_seconds", progress.last_t or None
        yield "ratchet_planned_steps", progress.planned_steps or None
        yield "ratchet_step", progress.step
        yield "ratchet_remaining_seconds", progress.remaining_s
        yield "ratchet_train_loss", progress.loss
        yield "ratchet_learning_rate", progress.learning_rate
        yield "ratchet_validation_loss", progress.validation_loss
        yield "ratchet_best_validation_loss", progress.best_loss
        yield "ratchet_memory_device_bytes", progress.memory.device_bytes or None
        yield "ratchet_lost_steps_total", progress.lost_steps
        yield "ratchet_checkpoints_total", progress.checkpoint_costs.count
        yield "ratchet_checkpoint_written_bytes_total", progress.checkpoint_costs.bytes_written
        yield "ratchet_attempts_total", progress.attempts
        yield "ratchet_repeated_steps_total", progress.repeats
        yield "ratchet_gradient_spikes_total", progress.spikes
        yield "ratchet_alerts_total", len(progress.alerts)
        if progress.checkpoint_t is not None:
            yield "ratchet_checkpoint_step", progress.checkpoint_step
            yield "ratchet_checkpoint_timestamp_seconds", progress.checkpoint_t
        if self._has_replica:
            yield "ratchet_replica_step", progress.replicated_step
            yield "ratchet_replica_sent_bytes_total", self._counts["ratchet_replica_sent_bytes_total"]
        if self._has_replica and self._is_sender:
            yield "ratchet_replica_oldest_unsent_timestamp_seconds", min(self._unsent.values(), default=None)
        for name in (
            "ratchet_steps_total", "ratchet_trained_tokens_total", "ratchet_input_tokens_total",
            "ratchet_validation_seconds_total", "ratchet_checkpoint_blocked_seconds_total",
        ):  # fmt: skip
            yield name, self._counts[name]
        yield from self._gauges.items()
        yield from self._used.items()

    def _labelled(self) -> Iterator[tuple[str, str, dict[str, int]]]:
        progress = self.progress
        limits = {phase: tokens for phase, (tokens, _) in progress.budgets.items() if tokens is not None}
        yield "ratchet_memory_peak_bytes", "phase", progress.memory.peaks
        yield "ratchet_memory_forecast_bytes", "phase", progress.memory.forecast
        yield "ratchet_failures_total", "class", self._deaths
        yield "ratchet_skipped_steps_total", "action", self._skipped
        yield "ratchet_memory_shrinks_total", "phase", self._shrinks
        yield "ratchet_micro_batch_limit_tokens", "phase", limits
