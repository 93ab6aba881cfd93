"""Records learning curves of complete trainings, over ranks and learning rates, for benchmarks/sweep_curves.py.

    python benchmarks/curves_record.py TASK OUTPUT [--data DIR] [--part I/N]

Tasks: `support` (the bundled requests), `banking77` (needs DIR/banking77_train.csv) and `gsm8k` (needs
DIR/gsm8k_train.jsonl; its first rows). All trainings of a task use the same small base, data and seed, one thread and
alpha = 2 x rank. Each is validated 20 times. OUTPUT gets a JSON line for each training; those that it has already are
not trained again, and several processes may each record a part.
"""

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from small_project import BUNDLED, run_first_stages, train_supervised

from ratchet.config.base import Base, TinyModelSettings
from ratchet.config.machine import Machine
from ratchet.config.prepare import ColumnSettings, Prepare, SourceSettings, SplitSettings
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard

RANKS = (4, 8, 16, 32, 64)
RATES = tuple(10 ** (-4 + 0.25 * i) for i in range(9))
"""Learning rates from 1e-4 to 1e-2."""
VALIDATIONS = 20
BATCH_ROWS = 32


class Task(NamedTuple):
    """Data of a task, and the lengths of its trainings."""

    file: str | None
    """File below the folder of data; None: the bundled requests."""
    columns: ColumnSettings
    lines: int | None
    """Number of lines used; None: all."""
    max_tokens: int


TASKS = {
    "support": Task(None, ColumnSettings(prompt="request", response="intent"), None, 128),
    "banking77": Task("banking77_train.csv", ColumnSettings(prompt="text", response="category"), 4000, 128),
    "gsm8k": Task("gsm8k_train.jsonl", ColumnSettings(prompt="question", response="answer"), 1500, 256),
}
BASE = Base(
    tiny=TinyModelSettings(vocab_size=1024, hidden_size=128, intermediate_size=256, layers=2, heads=2, steps=200)
)


def copy_rows(folder: Path, task: Task, data: Path) -> Prepare:
    """Copy the rows of a task into a project; return its section prepare."""
    shutil.copytree(BUNDLED, folder / "data")
    names = ["data/raw/support.csv", "data/raw/support.jsonl"]
    if task.file is not None:
        names = [f"data/raw/{task.file}"]
        with (data / task.file).open(encoding="utf-8") as source, (folder / names[0]).open("w", encoding="utf-8") as to:
            to.writelines(islice(source, task.lines))
    return Prepare(
        sources=tuple(SourceSettings(files=name) for name in names), columns=task.columns, max_tokens=task.max_tokens,
        too_long="drop", split=SplitSettings(validation=0.05), limits={},
    )  # fmt: skip


def build(folder: Path, task: Task, data: Path) -> tuple[ProjectLayout, Settings]:
    """Create a project with base and data; return it with settings that validate `VALIDATIONS` times."""
    layout = ProjectLayout(folder)
    for place in (layout.experiments, layout.mlruns):
        place.mkdir(parents=True)
    settings = Settings(
        base=BASE,
        prepare=copy_rows(folder, task, data),
        train=Train(epochs=1, batch_size=BATCH_ROWS),
        machine=Machine(device="cpu", threads=1, micro_batch_size=BATCH_ROWS),
    )
    run_first_stages(layout, settings)
    steps = DatasetCard.load(layout.dataset_card).splits["train"] / BATCH_ROWS
    train = settings.train.model_copy(update={"validate_every_steps": max(1, math.floor(steps / VALIDATIONS))})
    return layout, settings.model_copy(update={"train": train})


def record(layout: ProjectLayout, settings: Settings, rank: int, rate: float) -> dict[str, object]:
    """Train one cell; return its values, and its validation losses by share of the training."""
    train = settings.train.model_copy(update={"rank": rank, "alpha": 2.0 * rank, "learning_rate": rate})
    settings = settings.model_copy(update={"train": train})
    paths = train_supervised(layout, settings)
    events = list(JournalReader(paths.journal).read())
    planned = next(event.data["planned_steps"] for event in events if event.kind == "worker_ready")
    losses = [(e.data["step"] / planned, e.data["loss"]) for e in events if e.kind == "validation"]
    shutil.rmtree(paths.root)
    return {
        "rank": rank, "learning_rate": rate,
        "shares": [round(share, 4) for share, _ in losses], "losses": [round(loss, 5) for _, loss in losses],
    }  # fmt: skip


def main() -> int:
    """Record what is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("output", type=Path)
    parser.add_argument("--data", type=Path, default=Path(), metavar="DIR", help="folder with the task's file")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="record every Nth training, from the Ith")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    lines = given.output.read_text(encoding="utf-8").splitlines() if given.output.exists() else []
    known = {(line["rank"], line["learning_rate"]) for line in map(json.loads, lines)}
    cells = [(rank, rate) for rank in RANKS for rate in RATES][part - 1 :: parts]
    if not (missing := [cell for cell in cells if cell not in known]):
        return 0
    with tempfile.TemporaryDirectory(prefix="ratchet-curves-") as folder:
        layout, settings = build(Path(folder), TASKS[given.task], given.data)
        for rank, rate in missing:
            line = record(layout, settings, rank, rate)
            print(f"{given.task} rank {rank} rate {rate:.2e}: {min(line['losses'])}", flush=True)  # type: ignore[call-overload]
            with given.output.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
