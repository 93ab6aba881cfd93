"""A run as Prometheus is told of it: series by name, folded from its journal.

Counters count what was done since the run began, on whichever machine and in however many attempts: they are folded
from the first event on, so a restart never sets them back. Units are base units; times are Unix seconds.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

from ratchet.config.schema import Machine
from ratchet.runs.callbacks import Status
from ratchet.runs.journal import JournalEvent
from ratchet.runs.restart_policy import FailureClass
from ratchet.runs.status import RunProgress


class PrometheusMetric(NamedTuple):
    """What a name means."""

    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Beside `run`, which all have."""


class PrometheusSample(NamedTuple):
    """One figure."""

    name: str
    labels: dict[str, str]
    value: float


STATES = ("starting", "training", "waiting", "stopped", "failed", "finished")
VERDICTS = ("PROMOTE", "HOLD", "REJECT", "INVALID")
STEP_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
STEP_SECONDS = "ratchet_step_duration_seconds"

METRICS: dict[str, PrometheusMetric] = {
    "ratchet_run_info": PrometheusMetric(
        "gauge", "1; labels say what is trained where", ("project", "code_version", "device", "compute_dtype")
    ),
    "ratchet_run_state": PrometheusMetric(
        "gauge", f"1 for the state that the run is in: {', '.join(STATES)}", ("state",)
    ),
    "ratchet_run_start_timestamp_seconds": PrometheusMetric("gauge", "When the first attempt began"),
    "ratchet_last_event_timestamp_seconds": PrometheusMetric("gauge", "When something happened last, a step say"),
    "ratchet_ranks": PrometheusMetric("gauge", "Processes that train the run together"),
    "ratchet_planned_steps": PrometheusMetric("gauge", "Optimizer steps of the whole run"),
    "ratchet_step": PrometheusMetric("gauge", "Optimizer step that the run is at; it goes back when an attempt dies"),
    "ratchet_remaining_seconds": PrometheusMetric(
        "gauge", "Estimate of the time left, from the speed of the last steps"
    ),
    "ratchet_steps_total": PrometheusMetric("counter", "Optimizer steps computed, those that were done again included"),
    "ratchet_steps_done_again_total": PrometheusMetric(
        "counter", "Steps since the last checkpoint when an attempt ended"
    ),
    STEP_SECONDS: PrometheusMetric("histogram", "Time of an optimizer step"),
    "ratchet_validation_seconds_total": PrometheusMetric("counter", "Time spent in validations"),
    "ratchet_trained_tokens_total": PrometheusMetric("counter", "Answer tokens learned from, in all steps computed"),
    "ratchet_input_tokens_total": PrometheusMetric("counter", "Tokens computed, in all steps computed"),
    "ratchet_train_loss": PrometheusMetric("gauge", "Loss of the last step, in nats per answer token"),
    "ratchet_learning_rate": PrometheusMetric("gauge", "Learning rate of the last step"),
    "ratchet_gradient_norm": PrometheusMetric("gauge", "L2 norm of the last step's gradient, before clipping"),
    "ratchet_validation_loss": PrometheusMetric("gauge", "Loss of the last validation, in nats per answer token"),
    "ratchet_best_validation_loss": PrometheusMetric("gauge", "The lowest so far"),
    "ratchet_memory_peak_bytes": PrometheusMetric("gauge", "Most that a phase of training has held", ("phase",)),
    "ratchet_memory_forecast_bytes": PrometheusMetric("gauge", "Most that a phase was forecast to hold", ("phase",)),
    "ratchet_memory_available_bytes": PrometheusMetric("gauge", "Memory at hand when the run was forecast"),
    "ratchet_memory_device_bytes": PrometheusMetric("gauge", "Memory of the device: of the GPU, or of the machine"),
    "ratchet_worker_cpus_used": PrometheusMetric(
        "gauge", "CPUs that the worker kept busy of late, its children counted"
    ),
    "ratchet_worker_resident_memory_bytes": PrometheusMetric("gauge", "Memory of the worker and its children"),
    "ratchet_checkpoints_total": PrometheusMetric("counter", "Checkpoints sealed"),
    "ratchet_checkpoint_step": PrometheusMetric("gauge", "Step of the newest checkpoint"),
    "ratchet_checkpoint_timestamp_seconds": PrometheusMetric("gauge", "When the newest checkpoint was sealed"),
    "ratchet_checkpoint_size_bytes": PrometheusMetric("gauge", "Size of the newest checkpoint"),
    "ratchet_checkpoint_written_bytes_total": PrometheusMetric(
        "counter", "Bytes written for checkpoints (linked ones are not)"
    ),
    "ratchet_checkpoint_blocked_seconds_total": PrometheusMetric(
        "counter", "Time that training stood still for checkpoints"
    ),
    "ratchet_mirror_step": PrometheusMetric("gauge", "Step of the newest checkpoint that is durable in the mirror"),
    "ratchet_mirror_oldest_unsent_timestamp_seconds": PrometheusMetric(
        "gauge", "When the oldest checkpoint, or the result, was sealed that the mirror lacks; absent when it has all"
    ),
    "ratchet_mirror_sent_bytes_total": PrometheusMetric(
        "counter", "Bytes of checkpoints and the result sent to the mirror"
    ),
    "ratchet_attempts_total": PrometheusMetric("counter", "Attempts begun"),
    "ratchet_deaths_total": PrometheusMetric("counter", "Attempts that ended without a result, by cause", ("class",)),
    "ratchet_skipped_steps_total": PrometheusMetric(
        "counter", "Steps that were left out (skip) or that led back to earlier weights (roll_back)", ("action",)
    ),
    "ratchet_repeated_steps_total": PrometheusMetric(
        "counter", "Steps computed a second time because of a loss or gradient"
    ),
    "ratchet_gradient_spikes_total": PrometheusMetric(
        "counter", "Steps with an unusually large gradient, learned from"
    ),
    "ratchet_memory_shrinks_total": PrometheusMetric(
        "counter", "Micro-batches made smaller because memory ran out", ("phase",)
    ),
    "ratchet_micro_batch_limit_tokens": PrometheusMetric(
        "gauge", "Most tokens computed at once, since memory ran out; absent where there is no limit", ("phase",)
    ),
    "ratchet_alerts_total": PrometheusMetric(
        "counter", "Alerts in the journal: storage, memory, stalls, notices of spot nodes"
    ),
    "ratchet_gate_verdict": PrometheusMetric(
        "gauge", f"1 for the gate's decision: {', '.join(VERDICTS)}", ("verdict",)
    ),
    "ratchet_gate_timestamp_seconds": PrometheusMetric("gauge", "When the gate decided"),
}
"""Every name. Those of the gate come from a file of its own (tracking/prometheus.py), for it is another process."""


class PrometheusSeries:
    """The fold; `see` takes one event, `samples` says where the run stands. Not for several threads at once.

    Args:
        machine: says whether the run has a mirror, and whether other machines may be those who send to it.
    """

    def __init__(self, machine: Machine) -> None:
        self.progress = RunProgress()
        self._mirrored = machine.mirror is not None
        self._sends = machine.node_range[1] == 1
        """Of several machines one sends: which, its journal says."""
        self._state = "starting"
        self._info: dict[str, str] = {"code_version": "", "device": "", "compute_dtype": ""}
        self._began_t: float | None = None
        self._gauges: dict[str, float] = {}
        self._used: dict[str, float] = {}
        """By the worker of now."""
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._buckets = [0] * (len(STEP_BOUNDS_S) + 1)
        self._step_s = 0.0
        self._deaths: Counter[str] = Counter(dict.fromkeys(get_args(FailureClass), 0))
        self._skipped: Counter[str] = Counter({"skip": 0, "roll_back": 0})
        self._shrinks: Counter[str] = Counter({"train": 0, "validation": 0})
        self._unsent: dict[int, float] = {}
        """When what the mirror lacks was sealed, by step."""

    def see(self, event: JournalEvent) -> None:
        """Take one event; one that lacks what its kind has is passed over."""
        self.progress.see(event)
        try:
            self._fold(event.kind, event.data, event.t)
        except (KeyError, TypeError, ValueError, AttributeError):
            return  # `Progress` counts it

    def end(self, status: Status) -> None:
        """The run has ended for now."""
        self._state = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "stopped"}[status]

    def _fold(self, kind: str, data: dict[str, Any], t: float) -> None:
        if kind == "step":
            self._step(data)
        elif kind in ("attempt", "ready", "died", "stopped", "finished"):
            self._begin_or_end(kind, data, t)
        elif kind == "validation":
            self._counts["ratchet_validation_seconds_total"] += data["seconds"]
        elif kind == "skipped":
            self._skipped[data["action"]] += 1
        elif kind == "budget":
            self._shrinks[data["phase"]] += data["action"] == "shrink"
        elif kind == "checkpoint":
            self._unsent.setdefault(data["step"], t)
            self._gauges["ratchet_checkpoint_size_bytes"] = data["size_bytes"]
            self._counts["ratchet_checkpoint_blocked_seconds_total"] += data.get("block_s", data["seconds"])
        elif kind == "mirror":
            self._sends = True
            self._counts["ratchet_mirror_sent_bytes_total"] += data["bytes_sent"]
            done, is_result = data["step"], data["what"] == "result"
            self._unsent = {step: at for step, at in self._unsent.items() if step > done and not is_result}
        elif kind == "forecast":
            self._gauges["ratchet_memory_available_bytes"] = data["available_bytes"]
        elif kind == "system":
            self._used = {
                "ratchet_worker_cpus_used": data["worker_cpu_percent"] / 100,
                "ratchet_worker_resident_memory_bytes": data["worker_memory_bytes"],
            }

    def _step(self, data: dict[str, Any]) -> None:
        seconds = data["step_s"]
        self._gauges["ratchet_gradient_norm"] = data["grad_norm"]
        self._counts["ratchet_steps_total"] += 1
        self._counts["ratchet_trained_tokens_total"] += data["trained_tokens"]
        self._counts["ratchet_input_tokens_total"] += data["input_tokens"]
        place = next((n for n, bound in enumerate(STEP_BOUNDS_S) if seconds <= bound), len(STEP_BOUNDS_S))
        self._buckets[place] += 1
        self._step_s += seconds

    def _begin_or_end(self, kind: str, data: dict[str, Any], t: float) -> None:
        if kind != "ready":  # another worker, or none
            self._used = {}
        if kind == "attempt":
            self._began_t = t if self._began_t is None else self._began_t
            self._state, self._info["code_version"] = "starting", str(data.get("code_version", ""))
        elif kind == "ready":
            self._state = "training"
            self._info |= {name: str(data.get(name, "")) for name in ("device", "compute_dtype")}
            self._gauges["ratchet_ranks"] = data.get("ranks", 1)
        elif kind == "died":
            self._deaths[data["class"]] += 1
            self._state = {"Retry": "waiting", "GiveUp": "failed"}.get(data["decision"], "stopped")
        elif kind == "stopped":
            self._state = "stopped"
        else:
            self._state = "finished"
            self._unsent.setdefault(data["step"], t)

    def step_durations(self) -> tuple[list[tuple[str, float]], float]:
        """The histogram: upper bounds in seconds with the number of steps up to each, and the sum of seconds."""
        found, so_far = [], 0
        for bound, count in zip((*map(str, STEP_BOUNDS_S), "+Inf"), self._buckets, strict=True):
            so_far += count
            found.append((bound, float(so_far)))
        return found, self._step_s

    def samples(self) -> Iterator[PrometheusSample]:
        """Every figure that there is now, but the histogram."""
        yield PrometheusSample("ratchet_run_info", self._info, 1.0)
        for state in STATES:
            yield PrometheusSample("ratchet_run_state", {"state": state}, float(state == self._state))
        for name, value in self._plain():
            if isinstance(value, int | float):  # a damaged journal may hold anything
                yield PrometheusSample(name, {}, float(value))
        for name, label, counts in self._labelled():
            for one, count in counts.items():
                yield PrometheusSample(name, {label: one}, float(count))

    def _plain(self) -> Iterator[tuple[str, float | None]]:
        p = self.progress
        yield "ratchet_run_start_timestamp_seconds", self._began_t
        yield "ratchet_last_event_timestamp_seconds", p.last_t or None
        yield "ratchet_planned_steps", p.planned_steps or None
        yield "ratchet_step", p.step
        yield "ratchet_remaining_seconds", p.remaining_s
        yield "ratchet_train_loss", p.loss
        yield "ratchet_learning_rate", p.learning_rate
        yield "ratchet_validation_loss", p.validation_loss
        yield "ratchet_best_validation_loss", p.best_loss
        yield "ratchet_memory_device_bytes", p.memory.device_bytes or None
        yield "ratchet_steps_done_again_total", p.lost_steps
        yield "ratchet_checkpoints_total", p.saves.count
        yield "ratchet_checkpoint_written_bytes_total", p.saves.bytes_written
        yield "ratchet_attempts_total", p.attempts
        yield "ratchet_repeated_steps_total", p.repeats
        yield "ratchet_gradient_spikes_total", p.spikes
        yield "ratchet_alerts_total", len(p.alerts)
        if p.checkpoint_t is not None:
            yield "ratchet_checkpoint_step", p.checkpoint_step
            yield "ratchet_checkpoint_timestamp_seconds", p.checkpoint_t
        if self._mirrored:
            yield "ratchet_mirror_step", p.mirrored_step
            yield "ratchet_mirror_sent_bytes_total", self._counts["ratchet_mirror_sent_bytes_total"]
        if self._mirrored and self._sends:
            yield "ratchet_mirror_oldest_unsent_timestamp_seconds", min(self._unsent.values(), default=None)
        for name in (
            "ratchet_steps_total", "ratchet_trained_tokens_total", "ratchet_input_tokens_total",
            "ratchet_validation_seconds_total", "ratchet_checkpoint_blocked_seconds_total",
        ):  # fmt: skip
            yield name, self._counts[name]
        yield from self._gauges.items()
        yield from self._used.items()

    def _labelled(self) -> Iterator[tuple[str, str, dict[str, int]]]:
        p = self.progress
        limits = {phase: tokens for phase, (tokens, _) in p.budgets.items() if tokens is not None}
        yield "ratchet_memory_peak_bytes", "phase", p.memory.peaks
        yield "ratchet_memory_forecast_bytes", "phase", p.memory.forecast
        yield "ratchet_deaths_total", "class", self._deaths
        yield "ratchet_skipped_steps_total", "action", self._skipped
        yield "ratchet_memory_shrinks_total", "phase", self._shrinks
        yield "ratchet_micro_batch_limit_tokens", "phase", limits
