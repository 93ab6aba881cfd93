"""Runs one training of benchmarks/train.py in its own process, with Ratchet or a peer. Reads JSON, prints JSON.

    python benchmarks/train_cell.py '{"who": "trl-packed", "project": DIR, "begun": UNIX TIME}'

`who` is one of CONTENDERS. Every contender learns from the prepared rows of the project (token ids and labels, so that
nobody tokenises), has the same base in the same types, the adapter that `adapters.attach` draws from the seed, the
settings and threads of params.yaml, and goes through the rows once an epoch. Gradient checkpointing is off for all
(TRL turns it on), and so is bfloat16 where we compute in float32 (TRL turns it on); TRL makes an adapter on a quantised
base bfloat16, and here it is turned back. What is learned from is counted from the batches that are computed.

Ours is a supervised run: supervisor, worker, journal, checkpoints. Its figures stand in its journal.
After training, and outside of all times, peers are asked for the loss of the validation rows as we compute it.
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
)  # fmt: skip
NEEDS = {"trl": "trl", "unsloth": "unsloth"}
"""Library that a contender takes, by the first word of its name."""


@dataclass
class Told:
    """Measurements of a contender by step."""

    ended: list[float] = field(default_factory=list)
    """Unix time of the end of each optimizer step."""
    input_tokens: list[int] = field(default_factory=list)
    """Of each step, without padding."""
    trained_tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of each step, in nats per token; empty where nobody asked."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds that the training process had taken at the end of each step, the time to load included."""
    peak_bytes: int = 0
    """Most that the training process held while it loaded and trained: resident, or what torch's allocator gave out."""
    validation_loss: float = math.nan

    def as_json(self) -> str:
        return json.dumps(vars(self))


# --------------------------------------------------------------------------------------------------------------- ours


class Meter:
    """Reader of the worker's CPU clock, at most some hundredths of a second after each step."""

    name = "meter"

    def __init__(self) -> None:
        self.cpu_s: list[float] = []

    def on_events(self, events: Sequence[Any]) -> None:
        """Read the clock for each step. Steps that arrive together have the same time."""
        if count := sum(event.kind == "step" for event in events):
            self.cpu_s += [max([*self.cpu_s[-1:], _cpu_s_of_worker()])] * count

    def on_end(self, _: str) -> None:
        """Nothing is left to do."""


def _cpu_s_of_worker() -> float:
    """CPU seconds of the only child, in user and system mode (proc(5), stat); 0 when it is gone."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text(encoding="ascii").split():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1]
                return sum(map(int, fields.split()[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def ours(project: Path) -> Told:
    """A supervised run, read from its journal."""
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
    """Training by a Trainer of transformers or TRL."""
    if who.startswith("unsloth"):
        import_module("unsloth")  # it changes classes of transformers and TRL, and has to come before them
    import torch
    from train_peers import Peer

    with tempfile.TemporaryDirectory(prefix="ratchet-peer-") as folder:
        found = Peer(who, project, Path(folder))
        trainer, told = found.trainer, found.told
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        told.peak_bytes = found.peak_bytes()
        told.validation_loss = found.validation_loss()
        return told


def missing(who: str) -> str | None:
    """The library without which there is no such contender here, if it is not installed."""
    name = NEEDS.get(who.split("-", maxsplit=1)[0])
    return name if name and find_spec(name) is None else None


def main(arguments: list[str]) -> int:
    """Train, and print what came of it as the last line."""
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
