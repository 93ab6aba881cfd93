"""Runs one cell of benchmarks/growth.py in its own process: the trainer on generated rows. JSON in and out.

`steps`: samples one training of many steps while it runs. `ranks`: checkpoints by the size of the adapter. `rows`:
seconds until data is ready, then tokens per second, by the number of rows. `make`: writes the rows.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan, TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.data.splits import SPLITS
from ratchet.errors import InterruptedRunError
from ratchet.models import adapters, loading
from ratchet.models.memory import capacity
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, JournalEvent, JournalReader
from ratchet.runs.signals import GracefulShutdown
from ratchet.storage import files
from ratchet.training.context import TrainingContext
from ratchet.training.memory_monitor import MemoryMonitor
from ratchet.training.trainer import TrainingLoop

SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
SHORTEST, LONGEST = 16, 65
"""Range of tokens per row, drawn uniformly; the longest row has one token less than LONGEST."""
VALIDATION_ROWS = 32
BATCH_ROWS = 8
ASKED = 0.5
"""Share of a row that is not trained on."""


class Watched(Journal):
    """Journal that calls a function every few steps, in the training thread."""

    def __init__(self, path: Path, every: int, look: Callable[[int], None]) -> None:
        super().__init__(path, 1)
        self._every, self._look = every, look

    def append(self, kind: str, **data: Any) -> JournalEvent:
        """Append an event. Call the function if the event is a step that is a multiple of `every`."""
        event = super().append(kind, **data)
        if kind == "step" and data["step"] % self._every == 0:
            self._look(data["step"])
        return event


class StopAfter(GracefulShutdown):
    """Requests a stop after this many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    @property
    def is_requested(self) -> bool:
        """Whether all steps are done."""
        return self.left <= 0


def drawn(count: int, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return token ids and labels of this many random rows."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(SHORTEST, LONGEST, count)
    flat = draw.integers(3, SHAPE["vocab_size"], int(lengths.sum())).tolist()
    ends = np.cumsum(lengths).tolist()
    ids = [flat[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
    return ids, [[IGNORE_INDEX] * int(ASKED * len(row)) + row[int(ASKED * len(row)) :] for row in ids]


def make(folder: Path, counts: list[int]) -> dict[str, Any]:
    """Write splits as stage prepare seals them, without texts: one directory per number of rows."""
    for count in counts:
        with files.sealed_directory(folder / f"data-{count}", "data") as scratch:
            _write({"train": count, "validation": VALIDATION_ROWS}, token_files.SplitWriters(scratch))
    return {}


def _write(counts: dict[str, int], writers: token_files.SplitWriters) -> None:
    for seed, split in enumerate(SPLITS):
        ids, labels = drawn(counts.get(split, 0), seed)
        names = [f"{number:016x}" for number in range(len(ids))]
        columns = [names, ["{}"] * len(ids), ids, labels, [None] * len(ids), ["{}"] * len(ids)]
        made = [pa.array(column, field.type) for column, field in zip(columns, token_files.SCHEMA, strict=True)]
        writers.write(split, pa.Table.from_arrays(made, schema=token_files.SCHEMA))
    writers.close()


def settings_of(rows: int, steps: int, rank: int = 8, batching: str = "shuffled") -> Train:
    """Return the settings of a training of this many steps."""
    return Train(
        quantization="none", rank=rank, alpha=16, dropout=0.1, epochs=steps * BATCH_ROWS / rows, batch_size=BATCH_ROWS,
        batching=batching, pack_tokens=2 * LONGEST, learning_rate=0.001, validate_every_steps=100, seed=3,
    )  # fmt: skip


def loop_of(
    root: Path, train: Train, rows: tuple[TokenRows, TokenRows], every: int = 50, stop: GracefulShutdown | None = None,
    look: Callable[[int], None] = lambda _: None,
) -> TrainingLoop:  # fmt: skip
    """Return a loop as a worker creates it. It saves every `every` steps and calls `look` every tenth of `every`
    steps."""
    paths, device = RunPaths(root), torch.device("cpu")
    paths.checkpoints.mkdir(parents=True)
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SHAPE))
    journal = Watched(paths.journal, max(1, every // 10), look)
    plan = BatchPlan(rows[0].lengths, train)
    return TrainingLoop(
        TrainingContext(
            spec=RunSpec(train=train, data_digest="d" * 64, base_digest="b" * 64),
            machine=Machine(device="cpu", threads=1, micro_batch_size=BATCH_ROWS, checkpoint_every=every),
            model=adapters.attach(plain, train, "base", (), plan.steps),
            device=device, train_rows=rows[0], validation_rows=rows[1], paths=paths, journal=journal,
            heartbeat=Heartbeat(None, 0.0, 0.0), shutdown=stop or GracefulShutdown(), environment={}, batch_plan=plan,
            memory_monitor=MemoryMonitor(journal, device, ()), suggest_memory_changes=str,
        )
    )  # fmt: skip


def sealed_bytes(paths: RunPaths) -> tuple[int, int]:
    """Return the bytes of the newest checkpoint: of all files, and of its tensors."""
    newest = paths.checkpoint(max(paths.checkpoint_steps()))
    sizes = {path: path.stat().st_size for path in newest.rglob("*") if path.is_file()}
    return sum(sizes.values()), sum(size for path, size in sizes.items() if path.suffix == ".safetensors")


def over_steps(folder: Path, steps: int, every: int) -> dict[str, Any]:
    """Return samples of one training: resident memory, and sizes on disk."""
    rows = TokenRows.from_lists(*drawn(512, 0)), TokenRows.from_lists(*drawn(VALIDATION_ROWS, 1))
    train, samples = settings_of(512, steps), []

    def look(step: int) -> None:
        paths = loop.context.paths
        whole, tensors = sealed_bytes(paths) if paths.checkpoint_steps() else (0, 0)
        samples.append(
            {
                "step": step, "resident_bytes": capacity.resident_bytes(), "checkpoint_bytes": whole,
                "tensor_bytes": tensors, "journal_bytes": paths.journal.stat().st_size,
            }
        )  # fmt: skip

    loop = loop_of(folder, train, rows, every, look=look)
    loop.run()
    told = [event.data for event in JournalReader(loop.context.paths.journal).read() if event.kind == "step"]
    return {
        "samples": samples,
        "step_s": [one["step_s"] for one in told],
        "tokens": [one["input_tokens"] for one in told],
        "peak_bytes": capacity.peak_resident_bytes(),
    }


def over_ranks(folder: Path, ranks: list[int]) -> dict[str, Any]:
    """Return trainable parameters and bytes of a checkpoint by rank."""
    rows = TokenRows.from_lists(*drawn(64, 0)), TokenRows.from_lists(*drawn(8, 1))
    found = []
    for rank in ranks:
        loop = loop_of(folder / str(rank), settings_of(64, 2, rank), rows, every=1)
        loop.run()
        count = sum(parameter.numel() for _, parameter in adapters.trainable_parameters(loop.context.model))
        whole, tensors = sealed_bytes(loop.context.paths)
        found.append({"rank": rank, "parameters": count, "bytes": whole, "tensor_bytes": tensors})
    return {"ranks": found}


def over_rows(folder: Path, data: Path, steps: int) -> dict[str, Any]:
    """Return the seconds until the first batch of each way of batching is ready, and tokens per second of the training
    afterwards."""
    # this also does the imports, which are not a cost of the data
    validation = token_files.load_rows(data, "validation")
    before, begun = capacity.resident_bytes(), time.perf_counter()
    files.verify_sealed(data, "data")
    verified = time.perf_counter()
    rows = token_files.load_rows(data, "train"), validation
    opened = time.perf_counter()
    found: dict[str, Any] = {"verify_s": verified - begun, "open_s": opened - verified}
    for batching in ("shuffled", "by_length", "packed"):
        begun = time.perf_counter()
        plan = BatchPlan(rows[0].lengths, settings_of(len(rows[0]), steps, batching=batching))
        rows[0].pad(plan.batch(0))
        found[f"{batching}_s"] = time.perf_counter() - begun
    found["resident_bytes"] = capacity.resident_bytes() - before
    stop = StopAfter(steps)
    # one epoch; the training stops early in it
    whole = settings_of(len(rows[0]), max(steps, len(rows[0]) // BATCH_ROWS))

    def count(step: int) -> None:
        stop.left = steps - step

    loop = loop_of(folder, whole, rows, every=10, stop=stop, look=count)
    with suppress(InterruptedRunError):
        loop.run()
    told = [event.data for event in JournalReader(loop.context.paths.journal).read() if event.kind == "step"]
    warm = told[len(told) // 4 :]
    found["tokens_per_s"] = sum(one["input_tokens"] for one in warm) / sum(one["step_s"] for one in warm)
    return found


def main() -> int:
    """Run the action that the first argument (JSON) requests."""
    given = json.loads(sys.argv[1])
    loading.use_threads(1)
    torch.use_deterministic_algorithms(True)
    do = {"make": make, "steps": over_steps, "ranks": over_ranks, "rows": over_rows}[given.pop("do")]
    print(json.dumps(do(**{key: Path(value) if key in ("folder", "data") else value for key, value in given.items()})))
    return 0


if __name__ == "__main__":
    sys.exit(main())
