"""Creates a project that trains in seconds, for several benchmarks: bundled requests, two thin layers, prepared data.

benchmarks/chaos.py with `--project DIR` uses another project's settings, base and data instead. It links that project's
files and does not write to them.
"""

import csv
import shutil
from itertools import islice
from pathlib import Path

from ratchet.config import params_file
from ratchet.config.base import Base, TinyModelSettings
from ratchet.config.machine import Machine
from ratchet.config.prepare import ColumnSettings, Prepare, SourceSettings
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.data import token_files
from ratchet.data.batches import TokenRows
from ratchet.data.splits import SplitName
from ratchet.runs.directory import RunDirectory, RunPaths
from ratchet.runs.fork_server import ForkServer
from ratchet.runs.supervisor import supervise
from ratchet.stages.base import base
from ratchet.stages.prepare import prepare
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import ChampionFile
from ratchet.training.run_spec import build_launch, build_run_spec

BUNDLED = Path(__file__).parents[1] / "data"
ROWS = 300
"""Rows of the bundled table. With batches of 16, an epoch has about 14 steps, so short runs reach their second
epoch."""

SETTINGS = Settings(
    base=Base(
        tiny=TinyModelSettings(
            vocab_size=600, hidden_size=64, intermediate_size=128, layers=2, heads=2, sequence_length=48,
            batch_size=8, steps=10,
        )
    ),
    prepare=Prepare(
        sources=(SourceSettings(files="data/raw/support.csv"),),
        columns=ColumnSettings(prompt="request", response="intent"),
        task="labels", max_tokens=96,
    ),
    train=Train(
        rank=8, alpha=16, dropout=0.1, epochs=2, batch_size=16, learning_rate=0.01, validate_every_steps=8, seed=3,
    ),
    machine=Machine(device="cpu", threads=1, micro_batch_size=8, checkpoint_every=2, max_restarts=5,
        restart_delay_s=0.1),
)  # fmt: skip


def build(folder: Path, rows: int = ROWS, settings: Settings = SETTINGS) -> ProjectLayout:
    """Create a project with this many rows of the bundled table, and run stages base and prepare."""
    layout = ProjectLayout(folder)
    for place in (layout.raw, layout.text, layout.tasks, layout.experiments, layout.mlruns):
        place.mkdir(parents=True, exist_ok=True)
    with (BUNDLED / "raw" / "support.csv").open(newline="", encoding="utf-8") as stream:
        table = list(islice(csv.reader(stream), rows + 1))
    with (layout.raw / "support.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(table)
    for text in (BUNDLED / "text").iterdir():
        shutil.copyfile(text, layout.text / text.name)
    run_first_stages(layout, settings)
    return layout


def run_first_stages(layout: ProjectLayout, settings: Settings) -> None:
    """Write the other files of a project that has its data, and run stages base and prepare."""
    (layout.root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    ChampionFile().save(layout.champion)
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    base(Project.from_parts(layout, settings))
    prepare(Project.from_parts(layout, settings))


def train_supervised(layout: ProjectLayout, settings: Settings, server: ForkServer | None = None) -> RunPaths:
    """Train a run with its supervisor and without callbacks; return its paths. `server` starts the worker."""
    run = RunDirectory.open(layout.runs, build_run_spec(layout, settings))
    try:
        supervise(run, build_launch(layout, settings), (), "benchmark", server=server)
    finally:
        run.close()
    return run.paths


def linked(source: ProjectLayout, folder: Path, settings: Settings) -> ProjectLayout:
    """Create a project that links the base and data of another one, with other settings of training and machine.
    Nothing is computed again."""
    layout = ProjectLayout(folder)
    for place in (layout.text, layout.tasks, layout.mlruns):
        place.mkdir(parents=True, exist_ok=True)
    files.link_tree(source.base, layout.base)
    files.link_tree(source.data, layout.data)
    (folder / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    ChampionFile().save(layout.champion)
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    return layout


def rows_of(layout: ProjectLayout, split: SplitName) -> TokenRows:
    """Load a prepared split into memory."""
    return token_files.load_rows(layout.data, split)
