"""The memory plan before loading is reported once per run. The run is refused if not even one row fits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.models import model_spec
from ratchet.models.memory import capacity
from ratchet.models.memory.capacity import MemoryCapacity
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.model_spec import ModelSpec
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import Journal, JournalEvent, JournalReader
from ratchet.training import memory_monitor
from ratchet.training.memory_monitor import InitialMemoryPlan
from small_loop import SHAPE

SIZE = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 2000, "max_position_embeddings": 4096}
"""Size of the test model. A step of this model needs more memory than the libraries and the loading of the model."""
MACHINE = Machine(device="cpu", micro_batch_size=2)
TRAIN = Train(rank=4, quantization="none")
WORK = MemoryWorkload(rows=32, row_tokens=512, learned_tokens=256, packed=False, device="cpu", validation_rows=32,
            validation_tokens=512, validation_learned_tokens=256)  # fmt: skip
Room = Callable[[int], None]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    """Return a function that sets the available memory of the machine. The memory of this process is fixed at its
    present size: a forecast includes it, and tests that ran before may free theirs at any moment."""
    resident = capacity.resident_bytes()
    monkeypatch.setattr(capacity, "resident_bytes", lambda: resident)

    def available(count: int) -> None:
        monkeypatch.setattr(capacity, "measure_device", lambda _: MemoryCapacity(count, count))

    return available


def begun_with(
    root: Path, base: ModelSpec, machine: Machine = MACHINE, work: MemoryWorkload = WORK
) -> InitialMemoryPlan:
    journal = Journal(root / "journal.jsonl", 1)
    try:
        return memory_monitor.require_memory(RunPaths(root), base, TRAIN, machine, work, journal)
    finally:
        journal.close()


def asked(root: Path, base: ModelSpec, machine: Machine = MACHINE, work: MemoryWorkload = WORK) -> list[JournalEvent]:
    begun_with(root, base, machine, work)
    return list(JournalReader(root / "journal.jsonl").read())


LONG = replace(WORK, rows=4, row_tokens=2048, learned_tokens=64, validation_rows=1, validation_learned_tokens=64)


@pytest.fixture(scope="module")
def wide() -> ModelSpec:
    """Create the spec of a model whose layers need more memory than the activations of short rows."""
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10, "max_position_embeddings": 4096}
    return model_spec.from_config(transformers.LlamaConfig(**SHAPE | size))


SHORT = replace(LONG, rows=1, row_tokens=64, learned_tokens=8, validation_tokens=64, validation_learned_tokens=8,
                device="cuda", ranks=4)  # fmt: skip
SHARED = MACHINE.model_copy(update={"shard_base": True})


def notices(root: Path) -> list[str]:
    return [event.data["text"] for event in JournalReader(root / "journal.jsonl").read() if event.kind == "notice"]
