"""Runs one cell of benchmarks/memory.py in its own process: a training as in a worker. Reads JSON, prints JSON.

Everything is the project's own: forecast, loader, adapter, loop, saver, and the monitor that measures each phase.
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.data.batches import BatchPlan, TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models import adapters, loading, model_spec
from ratchet.models.memory import capacity, forecast
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal
from ratchet.runs.signals import GracefulShutdown
from ratchet.training import memory_monitor
from ratchet.training.context import TrainingContext
from ratchet.training.memory_monitor import MemoryMonitor
from ratchet.training.optimizer import initial_loss_scale
from ratchet.training.trainer import TrainingLoop

STEPS = 3
QUESTION = 0.25
"""Share of a row that is not trained on."""


def rows_of(count: int, tokens: int, vocabulary: int, seed: int) -> TokenRows:
    """Return random rows of equal length."""
    draw = np.random.default_rng(seed)
    ids = [draw.integers(3, vocabulary, tokens).tolist() for _ in range(count)]
    asked = int(QUESTION * tokens)
    return TokenRows.from_lists(ids, [[IGNORE_INDEX] * asked + row[asked:] for row in ids])


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Return forecast and measured bytes by phase."""
    base, work_place = Path(cell["base"]), RunPaths(Path(cell["work"]))
    work_place.checkpoints.mkdir(parents=True)
    device = loading.pick_device("auto")
    rows = cell["rows"]
    train = Train(
        quantization=cell["quantization"], rank=cell["rank"], target_modules=cell["targets"], batch_size=2 * rows,
        compute_dtype=cell["dtype"], validate_every_steps=2, epochs=1,
    )  # fmt: skip
    machine = Machine(
        micro_batch_size=rows, activation_checkpointing=cell["checkpointing"], checkpoint_every=1, threads=1
    )
    loading.use_threads(machine.threads)
    torch.use_deterministic_algorithms(True)
    plan_of_base = model_spec.load(base)
    vocabulary = plan_of_base.config.vocab_size
    learned, checked = (rows_of(n, cell["tokens"], vocabulary, n) for n in (2 * rows * STEPS, rows))
    plan = BatchPlan(learned.lengths, train)
    journal = Journal(work_place.journal, 1)
    monitor = MemoryMonitor(journal, device, ())
    work = memory_monitor.compute_largest_work(plan, learned, checked, machine, device)
    expected = forecast.forecast(plan_of_base, train, machine, work)
    monitor.enter("loaded")
    model = loading.load(base, None, train, device)
    monitor.enter("adapters")
    model = adapters.attach(model, train, "b" * 64, (), plan.steps)
    if machine.activation_checkpointing:
        model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    spec = RunSpec(train=train, data_digest="d" * 64, base_digest="b" * 64)
    scale = initial_loss_scale(loading.pick_dtype(train.compute_dtype, device))
    task = TrainingContext(
        spec=spec, machine=machine, model=model, device=device, train_rows=learned, validation_rows=checked,
        paths=work_place,
        journal=journal, heartbeat=Heartbeat(None, 0.0, 0.0), shutdown=GracefulShutdown(), environment={},
        batch_plan=plan, memory_monitor=monitor,
        suggest_memory_changes=str, initial_loss_scale=scale,
    )  # fmt: skip
    TrainingLoop(task).run()
    gpu = device.type == "cuda"
    measured = {phase: found.allocated_bytes if gpu else found.peak_bytes for phase, found in monitor.peaks.items()}
    return {
        "device": device.type,
        "forecast": {one.phase: one.parts for one in expected.phases},
        "measured": measured,
        "process": {phase: found.peak_bytes for phase, found in monitor.peaks.items()},
        "end_bytes": capacity.resident_bytes(),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)  # as a worker ends: shutting torch down takes seconds, and one of its threads may make the process fail
