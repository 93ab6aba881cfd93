"""The training loop alone, on a small random model and its own rows. It takes tenths of a second and needs no project
and no other process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.data.batches import BatchPlan, TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models import adapters
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, JournalEvent, JournalReader
from ratchet.runs.signals import GracefulShutdown
from ratchet.training.context import TrainingContext
from ratchet.training.memory_monitor import MemoryMonitor
from ratchet.training.trainer import TrainingLoop

ROWS = 48
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SMALL = Train(
    quantization="none", rank=4, alpha=8, dropout=0.1, epochs=2.5, batch_size=5, pack_tokens=40, learning_rate=0.01,
    validate_every_steps=4, seed=3,
)  # fmt: skip


def random_rows(count: int, seed: int) -> TokenRows:
    draw = np.random.default_rng(seed)
    ids = [draw.integers(3, 64, length).tolist() for length in draw.integers(3, 24, count)]
    return TokenRows.from_lists(ids, [[IGNORE_INDEX] * (len(row) // 2) + row[len(row) // 2 :] for row in ids])


def loop_of(
    root: Path, train: Train, stop: GracefulShutdown | None = None, micro: int = 4, config: object = None, **more: Any
) -> TrainingLoop:
    """Create a loop as a new process does: new model and data, and the state of the newest checkpoint in `root`."""
    paths, device = RunPaths(root), more.pop("device", torch.device("cpu"))
    paths.checkpoints.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(config or transformers.LlamaConfig(**SHAPE)).to(device)
    rows, journal = more.pop("train_rows", random_rows(ROWS, seed=1)), Journal(paths.journal, 1)
    validation_rows = random_rows(6, seed=2)
    if train.objective == "kto":  # a third of the answers is desirable
        rows, validation_rows = (replace(r, is_desirable=np.arange(len(r)) % 3 == 0) for r in (rows, validation_rows))
    plan = BatchPlan(rows.lengths, train)
    return TrainingLoop(
        TrainingContext(
            spec=RunSpec(train=train, data_digest="d" * 64, base_digest="b" * 64),
            machine=Machine(device=device.type, micro_batch_size=micro, checkpoint_every=2),
            model=adapters.attach(plain, train, "base", (), plan.steps),
            device=device,
            train_rows=rows,
            validation_rows=validation_rows,
            paths=paths,
            journal=journal,
            heartbeat=Heartbeat(None, 0.0, 0.0),
            shutdown=stop or GracefulShutdown(),
            environment={"torch": torch.__version__},
            batch_plan=plan,
            memory_monitor=MemoryMonitor(journal, device, ()),
            suggest_memory_changes=lambda tokens: f"take less than {tokens} tokens",
            **more,
        )
    )


def after_steps(paths: RunPaths, count: int) -> GracefulShutdown:
    """Return a shutdown that requests a stop when the journal has `count` steps."""
    return StopAfterSteps(paths, count - len(steps(paths)))


def trained_by(loop: TrainingLoop) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in adapters.trainable_parameters(loop.context.model)}


def steps(run: RunPaths) -> list[JournalEvent]:
    return [event for event in JournalReader(run.journal).read() if event.kind == "step"]


def losses(run: RunPaths) -> list[float]:
    return [event.data["loss"] for event in steps(run)]


class StopAfterSteps(GracefulShutdown):
    """Requests a stop when the journal has `count` more steps than at creation."""

    def __init__(self, paths: RunPaths, count: int) -> None:
        super().__init__()
        self._paths, self._limit = paths, len(steps(paths)) + count

    @property
    def is_requested(self) -> bool:
        return len(steps(self._paths)) >= self._limit
