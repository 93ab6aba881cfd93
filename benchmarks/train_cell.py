"""Runs one training of benchmarks/train.py in its own process, with Ratchet or a peer. Reads JSON, prints JSON.

    python benchmarks/train_cell.py '{"who": "trl-packed", "project": DIR}'

`who` is one of CONTENDERS. Every contender trains on the prepared rows of the project (token ids and labels, so that no
contender tokenises) for one epoch. It has the same base in the same types, the adapter that `adapters.attach` draws
from the seed, and the settings and threads of params.yaml. Gradient checkpointing, which TRL enables by default, is off
except for trl-defaults. bfloat16, which TRL enables by default, is off where Ratchet computes in float32. TRL converts
an adapter on a quantised base to bfloat16; except for trl-defaults this is reverted. Trained tokens are counted from
the batches that are computed.

Ratchet's training is a supervised run: supervisor, worker, journal, checkpoints. Its figures are in its journal. For
peers, the loss of the validation rows is computed with Ratchet's code after training, outside of all times.
"""

import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CONTENDERS = (
    "ours", "trl-packed", "trl-padded", "trl-grouped", "trl-defaults", "trainer", "trainer-in-order", "unsloth-packed",
    "trl-dpo",
)  # fmt: skip
NEEDS = {"trl": "trl", "unsloth": "unsloth"}
"""Package that a contender needs, by the first word of its name."""


@dataclass
class Told:
    """Measurements of a contender by step."""

    ended: list[float] = field(default_factory=list)
    """Unix time of the end of each optimizer step in seconds."""
    input_tokens: list[int] = field(default_factory=list)
    """Input tokens of each step, without padding."""
    trained_tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Loss of each step in nats per token; for peers, only the logged losses."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of the training process at the end of each step, including loading."""
    peak_bytes: int = 0
    """Peak memory of the training process during loading and training: resident memory, or memory that torch's
    allocator gave out."""
    validation_loss: float = math.nan

    def as_json(self) -> str:
        return json.dumps(vars(self))


# --------------------------------------------------------------------------------------------------------------- ours


class Meter:
    """Reads the worker's CPU clock, at most some hundredths of a second after each step."""

    name = "meter"

    def __init__(self) -> None:
        self.cpu_s: list[float] = []

    def on_events(self, events: Sequence[Any]) -> None:
        """Read the clock for each step. Steps that arrive together have the same time."""
        if count := sum(event.kind == "step" for event in events):
            self.cpu_s += [max([*self.cpu_s[-1:], _cpu_s_of_worker()])] * count

    def on_end(self, _: str) -> None:
        """Do nothing."""


def _cpu_s_of_worker() -> float:
    """Return the CPU seconds of the only child, in user and system mode (proc(5), stat); 0 if the child has ended."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1]
                return sum(map(int, fields.split()[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def ours(project: Path) -> Told:
    """Train a supervised run, and read its journal."""
    from ratchet.config import params_file
    from ratchet.runs.directory import RunDirectory
    from ratchet.runs.journal import JournalReader
    from ratchet.runs.supervisor import supervise
    from ratchet.storage.layout import ProjectLayout
    from ratchet.training.run_spec import build_launch, build_run_spec

    layout = ProjectLayout(project)
    settings = params_file.load(layout.params)
    run = RunDirectory.open(layout.runs, build_run_spec(layout, settings))
    meter = Meter()
    try:
        supervise(run, build_launch(layout, settings), (meter,), "benchmark")
    finally:
        run.close()
    told = Told(cpu_s=meter.cpu_s)
    for event in JournalReader(run.paths.journal).read():
        if event.kind == "step":
            told.ended.append(event.t)
            told.input_tokens.append(event.data["input_tokens"])
            told.trained_tokens.append(event.data["trained_tokens"])
            told.losses.append(event.data["loss"])
        elif event.kind == "memory_peak" and event.data["phase"] != "evaluation":
            kind = "peak_bytes" if event.data["device"] == "cpu" else "allocated_bytes"
            told.peak_bytes = max(told.peak_bytes, event.data[kind])
        elif event.kind == "validation":
            told.validation_loss = event.data["loss"]
    return told


# -------------------------------------------------------------------------------------------------------------- peers


def peer(who: str, project: Path) -> Told:
    """Train with a Trainer of transformers or TRL."""
    if who.startswith("unsloth"):
        import_module("unsloth")  # unsloth changes classes of transformers and TRL; import it before them
    import torch

    module, name = ("preference_peer", "PairPeer") if who == "trl-dpo" else ("train_peers", "Peer")
    kind = getattr(import_module(module), name)
    with tempfile.TemporaryDirectory(prefix="ratchet-peer-") as folder:
        found = kind(who, project, Path(folder))
        trainer, told = found.trainer, found.told
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        told.peak_bytes = found.peak_bytes()
        told.validation_loss = found.validation_loss()
        return told


def missing(who: str) -> str | None:
    """Return the package that a contender needs, if it is not installed."""
    name = NEEDS.get(who.split("-", maxsplit=1)[0])
    return name if name and find_spec(name) is None else None


def main(arguments: list[str]) -> int:
    """Train, and print the results as the last line."""
    given = json.loads(arguments[0])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    who, project = given["who"], Path(given["project"])
    told = ours(project) if who == "ours" else peer(who, project)
    print(told.as_json())
    return 0


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")
    sys.exit(main(sys.argv[1:]))
