"""Parameters and metrics of a run for a tracking server, and the choice of the machine that reports them.

If several machines train a run together, each has a journal with the same steps at slightly different times. Only the
machine of rank 0 reports, so that no step appears several times. Each rendezvous assigns rank 0 again; the event
`worker_ready` records whether this machine has it.
"""

import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ratchet.config.machine import Machine
from ratchet.config.mlflow_environment import has_tracking_server
from ratchet.config.settings import Settings
from ratchet.config.train import PREFERENCE_STATISTICS, Train
from ratchet.runs.callbacks import RunCallback, Status
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.storage import digests
from ratchet.storage.records.base import flatten

METRICS = ("train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_second", "validation/loss")
"""Metrics of every run. `MetricPointExtractor` adds other metrics if their values are known."""

ALWAYS = ("quantization", "adapter", "rank", "alpha", "target_modules", "learning_rate", "epochs", "batch_size", "seed")
"""Training settings that every run reports, for sorting and grouping. Other settings are reported unless they have
their default values."""

SYSTEM = {
    "cpu_percent": ("cpu_utilization_percentage", 1.0),
    "memory_bytes": ("system_memory_usage_megabytes", 1e-6),
    "memory_percent": ("system_memory_usage_percentage", 1.0),
    "disk_used_percent": ("disk_usage_percentage", 1.0),
    "worker_cpu_percent": ("worker_cpu_utilization_percentage", 1.0),
    "worker_memory_bytes": ("worker_memory_usage_megabytes", 1e-6),
}
"""Metric name and factor by key of `system_metrics`. The names and units here, in NETWORK and in GPU are those of
MLflow's system monitor, if it has such a metric."""
NETWORK = {"network_received_bytes": "network_receive_megabytes", "network_sent_bytes": "network_transmit_megabytes"}
GPU = {
    "utilization_percent": ("utilization_percentage", 1.0),
    "memory_bytes": ("memory_usage_megabytes", 1e-6),
    "power_w": ("power_usage_watts", 1.0),
    "temperature_c": ("temperature_celsius", 1.0),
}


class SharedCallback(RunCallback, Protocol):
    """Interface of a callback for a server to which other machines report too. It sends only what the server lacks."""

    def forget(self) -> None:
        """Discard the known state of the server, so that the next call queries it again."""


class LeaderCallback:
    """Callback that passes events on while this machine has rank 0. When the machine gets rank 0, it passes the whole
    journal."""

    is_deferred = True

    def __init__(self, callback: SharedCallback, journal: Path) -> None:
        self.name = callback.name
        self._callback, self._journal = callback, journal
        self._is_own_attempt = False
        """Whether the last attempt belongs to this process."""
        self._is_leader = False
        """Whether this machine has rank 0 in the last attempt that became ready."""

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Process the next events. After an exception, the same events come again, followed by newer events."""
        takes_over = False
        for event in events:
            if event.kind == "attempt_started":
                is_own = event.data.get("pid") == os.getpid()
                # Rank 0 in an attempt of an earlier process does not count: another machine may have got it since.
                self._is_leader = self._is_leader and (self._is_own_attempt or not is_own)
                self._is_own_attempt = is_own
            elif event.kind == "worker_ready":
                self._is_leader = _has_rank_zero(event)
                takes_over = self._is_own_attempt and self._is_leader
        if takes_over:  # this machine gets rank 0 in an attempt of this process
            self._callback.forget()
            events = _read_events(self._journal)
        if self._is_own_attempt and self._is_leader:
            self._callback.on_events(events)

    def on_end(self, status: Status) -> None:
        """Pass the end on. A machine without rank 0 reports nothing, because another machine may continue the run."""
        if not self._is_leader:
            return
        if not self._is_own_attempt:  # this process started no worker: the run was finished before, or did not start
            if status != "FINISHED":
                return
            self._callback.on_events(_read_events(self._journal))
        self._callback.on_end(status)


def wrap_callback(callback: SharedCallback, journal: Path, machine: Machine) -> RunCallback:
    """Wrap the callback in a LeaderCallback if several machines share a tracking server; otherwise return it unchanged.

    The project's own tracking store is not shared.
    """
    return LeaderCallback(callback, journal) if _is_shared(machine) else callback


def should_report(journal: Path, machine: Machine) -> bool:
    """Return whether this machine should report a run that has ended: this machine had rank 0 in the last attempt that
    became ready, or no other machine reports to the same server."""
    ready = [event for event in _read_events(journal) if event.kind == "worker_ready"]
    return not _is_shared(machine) or (bool(ready) and _has_rank_zero(ready[-1]))


def _is_shared(machine: Machine) -> bool:
    return has_tracking_server(machine) and machine.node_range[1] > 1


def _has_rank_zero(ready: JournalEvent) -> bool:
    return bool(ready.data.get("has_rank_zero", True))  # the key is absent if one machine trains alone


def _read_events(journal: Path) -> list[JournalEvent]:
    return list(JournalReader(journal).read())


class MetricPoint(NamedTuple):
    """Value of a metric at a step."""

    key: str
    value: float
    step: int
    t: float


def collect_parameters(spec: RunSpec, settings: Settings) -> dict[str, str]:
    """Collect the parameters of a run by dotted name: settings that determine the result, and that differ from their
    defaults or are in ALWAYS. They never change within a run.

    Other settings are omitted, because equal settings hide the differences between runs (mlflow#3763).
    """
    parameters = {"base.source": settings.base.source, "base.digest": spec.base_digest[: digests.SHORT]}
    parameters |= {"data.digest": spec.data_digest[: digests.SHORT], "recipe_version": str(spec.recipe_version)}
    defaults = _flatten_train(Train())
    reported = {f"train.{name}" for name in ALWAYS}
    return parameters | {
        key: text for key, text in _flatten_train(spec.train).items() if key in reported or defaults.get(key) != text
    }


def _flatten_train(train: Train) -> dict[str, str]:
    flat = flatten({"train": train.model_dump(mode="json")})
    return {key: ",".join(value) if isinstance(value, list) else str(value) for key, value in flat.items()}


class MetricPointExtractor:
    """Extractor of metric points from events, which come in the order of the journal. An event may come again."""

    def __init__(self) -> None:
        self._utilization: dict[int, float] = {}
        """Share of the devices' peak FLOP/s that a speed of one token/s takes, by attempt."""
        self._network = {name: _RelativeCounter() for name in NETWORK}

    def extract(self, event: JournalEvent) -> list[MetricPoint]:
        """Return the points of an event. Unknown values are omitted."""
        if event.kind == "worker_ready":
            flops_per_token, peak = event.data.get("flops_per_token"), event.data.get("peak_flops_per_s")
            if flops_per_token and peak:
                self._utilization[event.attempt] = flops_per_token / peak
        values: dict[str, float | None] = {}
        step = event.data.get("step")
        if event.kind == "validation":
            values["validation/loss"] = event.data["loss"]
            values["validation/token_accuracy"] = event.data.get("token_accuracy")
            values |= _read_statistics("validation", event)
        elif event.kind == "step":
            values = {f"train/{key}": event.data[key] for key in ("loss", "learning_rate", "grad_norm")}
            rate = event.data["input_tokens"] / max(event.data["step_s"], 1e-6)
            values["train/tokens_per_second"] = rate
            values |= _read_statistics("train", event)
            if share := self._utilization.get(event.attempt):
                values["train/mfu"] = rate * share
        elif event.kind == "system_metrics":
            step = event.data["sample"]
            values = {
                f"system/{name}": value for name, value in self._extract_system(event.data, event.attempt).items()
            }
        if step is None:
            return []
        return [MetricPoint(key, value, step, event.t) for key, value in values.items() if value is not None]

    def _extract_system(self, data: dict[str, Any], attempt: int) -> dict[str, float | None]:
        values = {name: _scale(data.get(key), factor) for key, (name, factor) in SYSTEM.items()}
        for key, name in NETWORK.items():
            if (count := data.get(key)) is not None:
                values[name] = self._network[key].since_start(data["sample"], count, attempt) / 1e6
        for gpu in data.get("gpus") or ():
            prefix = f"gpu_{gpu['index']}_"
            values |= {prefix + name: _scale(gpu.get(key), factor) for key, (name, factor) in GPU.items()}
            if gpu.get("memory_bytes") is not None and gpu.get("memory_total_bytes"):
                values[f"{prefix}memory_usage_percentage"] = 100 * gpu["memory_bytes"] / gpu["memory_total_bytes"]
        return values


def _read_statistics(prefix: str, event: JournalEvent) -> dict[str, float | None]:
    """Return the statistics of preference tuning; none for other objectives."""
    return {f"{prefix}/{name}": event.data[name] for name in PREFERENCE_STATISTICS if name in event.data}


class StoredSteps:
    """Steps that a tracker has, by metric. If a step was repeated after a crash, its first value is kept."""

    def __init__(self, steps: Mapping[str, Iterable[int]] | None = None) -> None:
        self._steps = {key: set(known) for key, known in (steps or {}).items()}

    def select_new(self, points: Iterable[MetricPoint]) -> list[MetricPoint]:
        """Return the points that the tracker does not have, the first one for each metric and step."""
        new: dict[tuple[str, int], MetricPoint] = {}
        for point in points:
            if point.step not in self._steps.get(point.key, ()):
                new.setdefault((point.key, point.step), point)
        return list(new.values())

    def add(self, points: Iterable[MetricPoint]) -> None:
        """Record points that the tracker has received."""
        for point in points:
            self._steps.setdefault(point.key, set()).add(point.step)


class _RelativeCounter:
    """Converter of a count since boot into a count since the first sample of the run, which never decreases."""

    def __init__(self) -> None:
        self._samples: list[int] = []
        """Number of the first sample for each offset. A new offset begins with each attempt, because the machine may
        have been rebooted or replaced; what it sent between two attempts is not counted."""
        self._offsets: list[float] = []
        self._last = (0, 0.0, 0)

    def since_start(self, sample: int, count: float, attempt: int) -> float:
        last_sample, last_count, last_attempt = self._last
        if sample > last_sample:
            if not self._samples or attempt != last_attempt or count < last_count:
                total = last_count - self._offsets[-1] if self._samples else 0.0
                self._samples.append(sample)
                self._offsets.append(count - total)
            self._last = (sample, count, attempt)
        return count - self._offsets[max(0, bisect_right(self._samples, sample) - 1)]


def _scale(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def read_final_status(paths: RunPaths) -> Status:
    """Return how a run that is not in training ended, by its result and its journal."""
    kinds = ("attempt_started", "interrupted", "worker_exited")
    decisions = [event.data.get("decision") for event in _read_events(paths.journal) if event.kind in kinds]
    if paths.is_finished():
        return "FINISHED"
    return "FAILED" if decisions and decisions[-1] == "GiveUp" else "KILLED"
