"""Of several machines that train one run together, the one that shows it in a place which all of them share.

Each has a journal of its own, with the same steps at slightly other times: if all told of them, each step would be
there several times. So only the machine of rank 0 tells. Which one that is, every meeting decides anew, and the event
`ready` says.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ratchet.config.schema import Machine, Settings
from ratchet.config.train import Train
from ratchet.runs.callbacks import RunCallback, Status
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.storage import digests


class SharedCallback(RunCallback, Protocol):
    """Shows a run where others show it too; tells nothing that is there."""

    def forget(self) -> None:
        """Look anew, at the next use, what is there."""


class LeaderCallback:
    """An observer that passes on what it is told while its machine leads, and tells what is missing when it takes over.

    Args:
        observer: is told.
        journal: of the run, on this machine.
    """

    patient = True

    def __init__(self, observer: SharedCallback, journal: Path) -> None:
        self.name = observer.name
        self._observer, self._journal = observer, journal
        self._ours = False
        """Whether the last attempt is one of this process."""
        self._led = False
        """Whether this machine leads in the attempt that was ready last."""

    def see(self, events: Sequence[JournalEvent]) -> None:
        """Take the next events, or the same ones again with newer ones after them."""
        if self._takes_over(events):
            self._observer.forget()
            events = _read_events(self._journal)
        if self._ours and self._led:
            self._observer.see(events)

    def finish(self, status: Status) -> None:
        """The run has ended for now; a machine that does not lead says nothing: it may go on elsewhere."""
        if not self._led:
            return
        if not self._ours:  # nothing was trained: what was missed is sent, if the run is over
            if status != "FINISHED":
                return
            self._observer.see(_read_events(self._journal))
        self._observer.finish(status)

    def _takes_over(self, events: Sequence[JournalEvent]) -> bool:
        """Whether an attempt became ready that this machine leads."""
        taken = False
        for event in events:
            if event.kind == "attempt":
                ours = event.data.get("pid") == os.getpid()
                # What an earlier process led says nothing: others may have taken over since, and be at work.
                self._led = self._led and (self._ours or not ours)
                self._ours = ours
            elif event.kind == "ready":
                self._led = _is_leader(event)
                taken = self._ours and self._led
        return taken


def wrap_callback(observer: SharedCallback, journal: Path, machine: Machine) -> RunCallback:
    """The observer, told by one of the machines only where there are several and a server that they share.

    The project's own store is each machine's own.
    """
    return LeaderCallback(observer, journal) if _is_shared(machine) else observer


def should_report(journal: Path, machine: Machine) -> bool:
    """Whether this machine is the one to tell of a run that has ended: it led when the run was ready last."""
    ready = [event for event in _read_events(journal) if event.kind == "ready"]
    return not _is_shared(machine) or (bool(ready) and _is_leader(ready[-1]))


def _is_shared(machine: Machine) -> bool:
    return machine.tracking is not None and machine.node_range[1] > 1


def _is_leader(ready: JournalEvent) -> bool:
    return bool(ready.data.get("leads", True))  # journals of before had no such word, and one machine


def _read_events(journal: Path) -> list[JournalEvent]:
    return list(JournalReader(journal).read())


# What of a run is shown elsewhere, in MLflow say: told from its spec and its journal.

METRICS = ("train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_second", "validation/loss")
"""What every run tells of its steps; `MetricPointExtractor` has more where it is known."""

ALWAYS = ("quantization", "adapter", "rank", "alpha", "targets", "learning_rate", "epochs", "batch_rows", "seed")
"""Settings of training that runs are sorted and grouped by: shown of each run. Of the others, what is no default."""

SYSTEM = {
    "cpu_percent": ("cpu_utilization_percentage", 1.0),
    "memory_bytes": ("system_memory_usage_megabytes", 1e-6),
    "memory_percent": ("system_memory_usage_percentage", 1.0),
    "disk_used_percent": ("disk_usage_percentage", 1.0),
    "worker_cpu_percent": ("worker_cpu_utilization_percentage", 1.0),
    "worker_memory_bytes": ("worker_memory_usage_megabytes", 1e-6),
}
"""Figures of the event `system`, by the names (and units) that MLflow's own monitor has for them where it has any."""
NETWORK = {"network_received_bytes": "network_receive_megabytes", "network_sent_bytes": "network_transmit_megabytes"}
GPU = {
    "utilization_percent": ("utilization_percentage", 1.0),
    "memory_bytes": ("memory_usage_megabytes", 1e-6),
    "power_w": ("power_usage_watts", 1.0),
    "temperature_c": ("temperature_celsius", 1.0),
}


class MetricPoint(NamedTuple):
    """One figure of one step."""

    key: str
    value: float
    step: int
    t: float
    """Unix time at which it was so, in seconds."""


def collect_parameters(spec: RunSpec, settings: Settings) -> dict[str, str]:
    """Flat and few: what decides the result, and is not as it always is. All of it never changes within a run.

    Whoever compares runs looks for what differs; settings that are the same everywhere hide it (mlflow#3763).
    """
    flat = {"base.source": settings.base.source, "base.digest": spec.base_digest[: digests.SHORT]}
    flat |= {"data.digest": spec.data_digest[: digests.SHORT], "recipe_version": str(spec.recipe_version)}
    usual = _flatten_train(Train())
    told = {f"train.{name}" for name in ALWAYS}
    return flat | {
        key: text for key, text in _flatten_train(spec.train).items() if key in told or usual.get(key) != text
    }


def _flatten_train(train: Train) -> dict[str, str]:
    flat = {}
    for key, value in train.model_dump(mode="json").items():
        for name, leaf in ((f"{key}.{k}", v) for k, v in value.items()) if isinstance(value, dict) else [(key, value)]:
            flat[f"train.{name}"] = ",".join(leaf) if isinstance(leaf, list) else str(leaf)
    return flat


class MetricPointExtractor:
    """The points of a journal's events. Told in their order; those that were told before may be told again."""

    def __init__(self) -> None:
        self._share: dict[int, float] = {}
        """By attempt: which share of what the devices can do a token a second takes."""
        self._network = {name: _RelativeCounter() for name in NETWORK}

    def of(self, event: JournalEvent) -> list[MetricPoint]:
        """The points of one event; a figure that is not known is none."""
        if event.kind == "ready":
            self._ready(event)
        values: dict[str, float | None] = {}
        step = event.data.get("step")
        if event.kind == "validation":
            values["validation/loss"] = event.data["loss"]
        elif event.kind == "step":
            values = self._of_step(event)
        elif event.kind == "system":
            step = event.data["sample"]
            values = {f"system/{name}": value for name, value in self._of_system(event.data).items()}
        if step is None:
            return []
        return [MetricPoint(key, value, step, event.t) for key, value in values.items() if value is not None]

    def _ready(self, event: JournalEvent) -> None:
        needed, peak = event.data.get("flops_per_token"), event.data.get("peak_flops_s")
        if needed and peak:
            self._share[event.attempt] = needed / peak

    def _of_step(self, event: JournalEvent) -> dict[str, float | None]:
        values: dict[str, float | None] = {
            f"train/{key}": event.data[key] for key in ("loss", "learning_rate", "grad_norm")
        }
        rate = event.data["input_tokens"] / max(event.data["step_s"], 1e-6)
        values["train/tokens_per_second"] = rate
        if share := self._share.get(event.attempt):
            values["train/mfu"] = rate * share
        return values

    def _of_system(self, data: dict[str, Any]) -> dict[str, float | None]:
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
    """A count since the machine was started, told as one since the run's first sample: it never goes back."""

    def __init__(self) -> None:
        self._samples: list[int] = []
        """From which on an offset holds: the machine was started again, or the run went on on another one."""
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
    """How a run that nobody trains ended, by its result and its journal."""
    ends = [
        e.data.get("decision") for e in JournalReader(paths.journal).read() if e.kind in ("attempt", "stopped", "died")
    ]
    if paths.is_finished():
        return "FINISHED"
    return "FAILED" if ends and ends[-1] == "GiveUp" else "KILLED"
