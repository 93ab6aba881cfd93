"""Measures rows of benchmarks/chaos.py with the training loop in this process, without a supervisor.

Each trainer is created as in a worker: new model, adapter and data, and the state of the newest checkpoint.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from fingerprints import fingerprint
from killed import percentile
from report_rows import at_least, at_most, count, told
from small_project import rows_of

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.data.batches import BatchPlan
from ratchet.errors import InterruptedRunError
from ratchet.models import adapters, base_model, loading
from ratchet.models.device import Model
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, JournalEvent, JournalReader
from ratchet.runs.signals import GracefulShutdown
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.training import async_checkpoint, checkpoint
from ratchet.training.context import TrainingContext
from ratchet.training.memory_monitor import MemoryMonitor
from ratchet.training.trainer import TrainingLoop

MTBF_S = 30 * 60.0
"""Mean time between failures of row R23: one failure in half an hour."""
BATCHINGS = ("shuffled", "by_length", "packed")
LARGE_RANK = 128
LARGE_EVERY_STEPS = 4
PERCENT_OF_WALL = 1.0


class StopAfter(GracefulShutdown):
    """Requests a stop when the journal has this many more steps than at the start, or after this many seconds."""

    def __init__(self, paths: RunPaths, steps: int | None = None, seconds: float | None = None) -> None:
        super().__init__()
        self._paths, self._limit = paths, None if steps is None else len(steps_of(paths)) + steps
        self._deadline = None if seconds is None else time.monotonic() + seconds

    @property
    def is_requested(self) -> bool:
        late = self._deadline is not None and time.monotonic() > self._deadline
        return late or (self._limit is not None and len(steps_of(self._paths)) >= self._limit)


def events_of(paths: RunPaths, kind: str) -> list[JournalEvent]:
    """Return the events of one kind."""
    return [event for event in JournalReader(paths.journal).read() if event.kind == kind]


def steps_of(paths: RunPaths) -> list[JournalEvent]:
    """Return the logged steps, including repetitions."""
    return events_of(paths, "step")


def quantised(project: ProjectLayout, settings: Settings) -> tuple[Model, RunSpec]:
    """Load the project's base, attach an adapter, and return them with the specification of the run."""
    card = BaseCard.load(project.base_card)
    model = loading.load(base_model.locate(project, card), card, settings.train, torch.device("cpu"))
    spec = RunSpec(train=settings.train, data_digest="0" * 64, base_digest=card.digest)
    return adapters.attach(model, settings.train, card.digest), spec


def large(project: ProjectLayout, settings: Settings) -> tuple[Model, RunSpec]:
    """Return a random model of 512 x 7 with about 110 MB of adapter and optimizer state."""
    torch.manual_seed(0)
    vocabulary = int(max(rows_of(project, "train").input_ids)) + 1
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=512, intermediate_size=1536, num_hidden_layers=7, num_attention_heads=8,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    spec = RunSpec(train=settings.train, data_digest="0" * 64, base_digest="0" * 64)
    return adapters.attach(transformers.AutoModelForCausalLM.from_config(config), settings.train, "0" * 64), spec


def loop_of(
    project: ProjectLayout,
    root: Path,
    settings: Settings,
    make: Callable[[ProjectLayout, Settings], tuple[Model, RunSpec]] = quantised,
    stop: Callable[[RunPaths], GracefulShutdown] = lambda _: GracefulShutdown(),
) -> TrainingLoop:
    """Return a loop in the run directory `root` that starts from its newest checkpoint."""
    paths = RunPaths(root)
    paths.checkpoints.mkdir(parents=True, exist_ok=True)
    model, spec = make(project, settings)
    train, journal, device = rows_of(project, "train"), Journal(paths.journal, 1), torch.device("cpu")
    return TrainingLoop(
        TrainingContext(
            spec=spec,
            machine=settings.machine,
            model=model,
            device=device,
            train_rows=train,
            validation_rows=rows_of(project, "validation"),
            paths=paths,
            journal=journal,
            heartbeat=Heartbeat(None, 0.0, 0.0),
            shutdown=stop(paths),
            environment={"torch": torch.__version__},
            batch_plan=BatchPlan(train.lengths, spec.train),
            memory_monitor=MemoryMonitor(journal, device, ()),
            suggest_memory_changes=str,
        )
    )


def of_loop(loop: TrainingLoop) -> str:
    """Return the fingerprint of the last checkpoint of an ended loop: all state that later steps depend on."""
    sealed = checkpoint.read(loop.context.paths.checkpoint(loop.state.step))
    return fingerprint(
        {**sealed.weights, **sealed.optimizer_tensors}, [sealed.state.to_json(), sealed.optimizer_values]
    )


def changed(settings: Settings, train: dict[str, Any], machine: dict[str, Any]) -> Settings:
    """Return settings with other values in two sections. Section `train` is validated."""
    return settings.model_copy(
        update={
            "train": Train.model_validate(settings.train.model_dump() | train),
            "machine": settings.machine.model_copy(update=machine),
        }
    )


def resumed(project: ProjectLayout, folder: Path, settings: Settings, quick: bool) -> list[Any]:
    """R11: stop and resume after every step (quick: every fourth) of two epochs, for each kind of batching."""
    found = []
    for batching in BATCHINGS:
        rows_a_step = 4 if batching == "packed" else settings.train.batch_size  # there are few packs
        train = {"batching": batching, "pack_tokens": 256, "epochs": 2, "batch_size": rows_a_step}
        own = changed(settings, train, {"checkpoint_every": 1000})
        whole = loop_of(project, folder / "whole", own)
        whole.run()
        paths, starts = RunPaths(folder / "stopped"), 0
        while True:
            starts += 1
            loop = loop_of(project, paths.root, own, stop=lambda paths: StopAfter(paths, steps=4 if quick else 1))
            try:
                loop.run()
            except InterruptedRunError:
                continue
            break
        same_losses = [e.data["loss"] for e in steps_of(paths)] == [
            e.data["loss"] for e in steps_of(whole.context.paths)
        ]
        exact = of_loop(loop) == of_loop(whole) and same_losses
        found.append(count(f"R11 {batching}: inexact in two epochs, {starts} starts", int(not exact)))
        for name in ("whole", "stopped"):
            shutil.rmtree(folder / name)
    return found


def stalls(project: ProjectLayout, folder: Path, settings: Settings, quick: bool) -> list[Any]:
    """R20, R21: measure the cost of a checkpoint for the training and the disk, for a state of about 110 MB."""
    train = {
        "quantization": "none", "rank": LARGE_RANK, "alpha": LARGE_RANK, "batch_size": 8, "epochs": 1,
        "validate_every_steps": 1000,
    }  # fmt: skip
    own = changed(settings, train, {"checkpoint_every": LARGE_EVERY_STEPS, "threads": 2})
    loop = loop_of(project, folder / "large", own, large, lambda paths: StopAfter(paths, 24 if quick else 96))
    _until_stopped(loop)
    saves, steps = events_of(loop.context.paths, "checkpoint_saved"), steps_of(loop.context.paths)
    blocks = [event.data["blocked_s"] for event in saves]
    seconds = statistics.median(event.data["seconds"] for event in saves)
    size = statistics.median(event.data["size_bytes"] for event in saves)
    step_s = statistics.median(event.data["step_s"] for event in steps)
    state = sum(parameter.numel() for _, parameter in adapters.trainable_parameters(loop.context.model)) * 3 * 4
    block = statistics.median(blocks)
    every_s = async_checkpoint.auto_interval_s(block, seconds, 0, 0.0)
    written = statistics.median(event.data["bytes_written"] for event in saves)
    shutil.rmtree(folder / "large")
    return [
        told("R20 state of adapter and optimizer (MB)", state / 1e6),
        told("R20 training blocked by a checkpoint, p50 (ms)", 1000 * block),
        told("R20 training blocked by a checkpoint, p99 (ms)", 1000 * percentile(blocks, 99)),
        at_most("R20 of a step's time, p99", percentile(blocks, 99) / step_s, 1.0),
        told("R20 snapshot (GB/s)", state / 1e9 / block),
        told("R20 a complete save in the background, p50 (s)", seconds),
        told("R20 default interval for these figures (s)", every_s),
        at_most("R20 of wall at the default interval (%)", 100 * block / every_s, PERCENT_OF_WALL),
        at_most("R21 bytes of a checkpoint, of its state", size / state, 1.01),
        told("R21 written per save (MB)", written / 1e6),
        told("R21 linked per save (MB)", (size - written) / 1e6),
    ]


def _until_stopped(loop: TrainingLoop) -> None:
    try:
        loop.run()
    except InterruptedRunError:
        return


def at_default(project: ProjectLayout, folder: Path, settings: Settings, seconds: float) -> list[Any]:
    """R20: measure the blocked time with the default interval in a training of this many seconds; nothing is
    extrapolated."""
    train = {
        "quantization": "none", "rank": LARGE_RANK, "alpha": LARGE_RANK, "batch_size": 8, "epochs": 1000,
        "validate_every_steps": 100_000,
    }  # fmt: skip
    own = changed(settings, train, {"checkpoint_every": "auto", "threads": 2})
    loop = loop_of(project, folder / "default", own, large, lambda paths: StopAfter(paths, seconds=seconds))
    started = time.monotonic()
    _until_stopped(loop)
    wall = time.monotonic() - started
    blocks = [event.data["blocked_s"] for event in events_of(loop.context.paths, "checkpoint_saved")]
    shutil.rmtree(folder / "default")
    return [at_most(f"R20 of {wall:.0f} s, {len(blocks)} checkpoints (%)", 100 * sum(blocks) / wall, PERCENT_OF_WALL)]


def goodput(recovery_s: Sequence[float], measured: Sequence[dict[str, Any]]) -> list[Any]:
    """R23: compute the share of half an hour with one failure that is spent on new steps, from the measurements of this
    module.

    One failure costs the time from the kill to the first new step, and half an interval on average. Between failures,
    checkpoints block the training.
    """
    figures = {row["name"]: row["value"] for row in measured}
    every_s = figures["R20 default interval for these figures (s)"]
    share = figures["R20 of wall at the default interval (%)"] / 100
    lost_s = statistics.median(recovery_s) + every_s / 2
    return [at_least("R23 goodput, one failure in 30 min (computed)", (1 - share) * (1 - lost_s / MTBF_S), 0.95)]


def rows(
    project: ProjectLayout, folder: Path, recovery_s: Sequence[float], quick: bool, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure all rows of this module.

    Args:
        recovery_s: seconds from kills to new steps, measured on real trainings; if empty, goodput is not computed.
    """
    settings = params_file.load(project.params)
    loading.use_threads(1)
    torch.use_deterministic_algorithms(True)
    found = resumed(project, folder, settings, quick)
    say("  stopped and resumed in this process")
    costs = stalls(project, folder, settings, quick)
    say("  checkpoints of a large state measured")
    found += costs
    if not quick:
        found += at_default(project, folder, settings, seconds=180.0)
    return [*found, *(goodput(recovery_s, costs) if recovery_s else [])]
