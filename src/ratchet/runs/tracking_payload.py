"""Payload that a tracking server receives for a run, and the choice of the machine that reports it.

If several machines train a run together, each has a journal with the same steps at slightly different times. Only the
machine of rank 0 reports, so that no step appears several times. Each rendezvous decides again which machine that is;
the event `worker_ready` records it.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ratchet.config.machine import Machine
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.runs.callbacks import RunCallback, Status
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.storage import digests


class SharedCallback(RunCallback, Protocol):
    """A callback for a server that other machines report to as well; it sends nothing that is already there."""

    def forget(self) -> None:
        """Query the server's state again at the next use."""


class LeaderCallback:
    """Passes events on while its machine has rank 0, and sends what is missing when it takes over.

    Args:
        callback: receives the events.
        journal: of the run, on this machine.
    """

    is_deferred = True

    def __init__(self, callback: SharedCallback, journal: Path) -> None:
        self.name = callback.name
        self._callback, self._journal = callback, journal
        self._is_own_attempt = False
        """Whether the last attempt belongs to this process."""
        self._is_leader = False
        """Whether this machine has rank 0 in the last attempt that became ready."""

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Take the next events, or the same ones again with newer ones after them."""
        if self._takes_over(events):
            self._callback.forget()
            events = _read_events(self._journal)
        if self._is_own_attempt and self._is_leader:
            self._callback.on_events(events)

    def on_end(self, status: Status) -> None:
        """The supervision has ended. A machine without rank 0 reports nothing, because another may continue the run."""
        if not self._is_leader:
            return
        if not self._is_own_attempt:  # nothing was trained: send what is missing, if the run is finished
            if status != "FINISHED":
                return
            self._callback.on_events(_read_events(self._journal))
        self._callback.on_end(status)

    def _takes_over(self, events: Sequence[JournalEvent]) -> bool:
        """Whether an attempt became ready in which this machine has rank 0."""
        takes_over = False
        for event in events:
            if event.kind == "attempt_started":
                is_own = event.data.get("pid") == os.getpid()
                # Rank 0 in an attempt of an earlier process does not count: another machine may have taken over since.
                self._is_leader = self._is_leader and (self._is_own_attempt or not is_own)
                self._is_own_attempt = is_own
            elif event.kind == "worker_ready":
                self._is_leader = _has_rank_zero(event)
                takes_over = self._is_own_attempt and self._is_leader
        return takes_over


def wrap_callback(callback: SharedCallback, journal: Path, machine: Machine) -> RunCallback:
    """Wrap the callback in a LeaderCallback if several machines share a tracking server; else return it unchanged.

    The project's own tracking store is not shared.
    """
    return LeaderCallback(callback, journal) if _is_shared(machine) else callback


def should_report(journal: Path, machine: Machine) -> bool:
    """Whether this machine should report a run that has ended: it had rank 0 in the last attempt that became ready."""
    ready = [event for event in _read_events(journal) if event.kind == "worker_ready"]
    return not _is_shared(machine) or (bool(ready) and _has_rank_zero(ready[-1]))


def _is_shared(machine: Machine) -> bool:
    return machine.tracking_uri is not None and machine.node_range[1] > 1


def _has_rank_zero(ready: JournalEvent) -> bool:
    return bool(ready.data.get("has_rank_zero", True))  # absent where one machine trains alone


def _read_events(journal: Path) -> list[JournalEvent]:
    return list(JournalReader(journal).read())


# Parameters and metrics.

METRICS = ("train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_second", "validation/loss")
"""Metrics of every run; `MetricPointExtractor` adds others where they are known."""

ALWAYS = ("quantization", "adapter", "rank", "alpha", "target_modules", "learning_rate", "epochs", "batch_size", "seed")
"""Training settings that every run reports, for sorting and grouping. Others are reported unless they have defaults."""

SYSTEM = {
    "cpu_percent": ("cpu_utilization_percentage", 1.0),
    "memory_bytes": ("system_memory_usage_megabytes", 1e-6),
    "memory_percent": ("system_memory_usage_percentage", 1.0),
    "disk_used_percent": ("disk_usage_percentage", 1.0),
    "worker_cpu_percent": ("worker_cpu_utilization_percentage", 1.0),
    "worker_memory_bytes": ("worker_memory_usage_megabytes", 1e-6),
}
"""Values of `system_metrics` under the names and units of MLflow's own system monitor, where it has one."""
NETWORK = {"network_received_bytes": "network_receive_megabytes", "network_sent_bytes": "network_transmit_megabytes"}
GPU = {
    "utilization_percent": ("utilization_percentage", 1.0),
    "memory_bytes": ("memory_usage_megabytes", 1e-6),
    "power_w": ("power_usage_watts", 1.0),
    "temperature_c": ("temperature_celsius", 1.0),
}


class MetricPoint(NamedTuple):
    """One value of a metric."""

    key: str
    value: float
    step: int
    t: float
    """Unix time in seconds."""


def collect_parameters(spec: RunSpec, settings: Settings) -> dict[str, str]:
    """Flat parameters of a run: the settings that determine the result and differ from the defaults. They never change
    within a run.

    A person who compares runs looks for differences; settings that are equal everywhere hide them (mlflow#3763).
    """
    flat = {"base.source": settings.base.source, "base.digest": spec.base_digest[: digests.SHORT]}
    flat |= {"data.digest": spec.data_digest[: digests.SHORT], "recipe_version": str(spec.recipe_version)}
    defaults = _flatten_train(Train())
    reported = {f"train.{name}" for name in ALWAYS}
    return flat | {
        key: text for key, text in _flatten_train(spec.train).items() if key in reported or defaults.get(key) != text
    }


def _flatten_train(train: Train) -> dict[str, str]:
    flat = {}
    for key, value in train.model_dump(mode="json").items():
        for name, leaf in ((f"{key}.{k}", v) for k, v in value.items()) if isinstance(value, dict) else [(key, value)]:
            flat[f"train.{name}"] = ",".join(leaf) if isinstance(leaf, list) else str(leaf)
    return flat


class MetricPointExtractor:
    """Extracts metric points from events, in the order of the journal. An event may be repeated."""

    def __init__(self) -> None:
        self._utilization: dict[int, float] = {}
        """By attempt: the share of the devices' peak FLOP/s that one token/s takes."""
        self._network = {name: _RelativeCounter() for name in NETWORK}

    def extract(self, event: JournalEvent) -> list[MetricPoint]:
        """The points of one event; unknown values are omitted."""
        if event.kind == "worker_ready":
            self._set_utilization(event)
        values: dict[str, float | None] = {}
        step = event.data.get("step")
        if event.kind == "validation":
            values["validation/loss"] = event.data["loss"]
        elif event.kind == "step":
            values = self._extract_step(event)
        elif event.kind == "system_metrics":
            step = event.data["sample"]
            values = {f"system/{name}": value for name, value in self._extract_system(event.data).items()}
        if step is None:
            return []
        return [MetricPoint(key, value, step, event.t) for key, value in values.items() if value is not None]

    def _set_utilization(self, event: JournalEvent) -> None:
        needed, peak = event.data.get("flops_per_token"), event.data.get("peak_flops_per_s")
        if needed and peak:
            self._utilization[event.attempt] = needed / peak

    def _extract_step(self, event: JournalEvent) -> dict[str, float | None]:
        values: dict[str, float | None] = {
            f"train/{key}": event.data[key] for key in ("loss", "learning_rate", "grad_norm")
        }
        rate = event.data["input_tokens"] / max(event.data["step_s"], 1e-6)
        values["train/tokens_per_second"] = rate
        if share := self._utilization.get(event.attempt):
            values["train/mfu"] = rate * share
        return values

    def _extract_system(self, data: dict[str, Any]) -> dict[str, float | None]:
        found = {name: _scale(data.get(key), factor) for key, (name, factor) in SYSTEM.items()}
        for key, name in NETWORK.items():
            if (count := data.get(key)) is not None:
                found[name] = self._network[key].since_start(data["sample"], count) / 1e6
        for gpu in data.get("gpus") or ():
            prefix = f"gpu_{gpu['index']}_"
            found |= {prefix + name: _scale(gpu.get(key), factor) for key, (name, factor) in GPU.items()}
            if gpu.get("memory_bytes") is not None and gpu.get("memory_total_bytes"):
                found[f"{prefix}memory_usage_percentage"] = 100 * gpu["memory_bytes"] / gpu["memory_total_bytes"]
        return found


class _RelativeCounter:
    """Converts a count since boot into one since the first sample of the run. It never decreases."""

    def __init__(self) -> None:
        self._samples: list[int] = []
        """First sample of each offset: the machine was rebooted, or the run moved to another one."""
        self._offsets: list[float] = []
        self._last = (0, 0.0)

    def since_start(self, sample: int, count: float) -> float:
        last_sample, last_count = self._last
        if not self._samples:
            self._samples, self._offsets, self._last = [sample], [count], (sample, count)
        elif sample > last_sample:
            if count < last_count:
                self._samples.append(sample)
                self._offsets.append(self._offsets[-1] - last_count)
            self._last = (sample, count)
        return count - self._offsets[max(0, bisect_right(self._samples, sample) - 1)]


def _scale(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def read_final_status(paths: RunPaths) -> Status:
    """How a run that is not in training ended, by its result and its journal."""
    decisions = [
        e.data.get("decision")
        for e in JournalReader(paths.journal).read()
        if e.kind in ("attempt_started", "interrupted", "worker_exited")
    ]
    if paths.is_finished():
        return "FINISHED"
    return "FAILED" if decisions and decisions[-1] == "GiveUp" else "KILLED"
