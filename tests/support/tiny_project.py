"""A complete project that runs in seconds: real data files, a real tiny base, all stages and processes."""

import atexit
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from ratchet.config import params_file
from ratchet.config.base import Base, TinyModelSettings
from ratchet.config.evaluate import Evaluate, HarnessSettings
from ratchet.config.machine import Machine
from ratchet.config.prepare import ColumnSettings, Prepare
from ratchet.config.settings import Settings
from ratchet.config.train import EarlyStoppingSettings, Train
from ratchet.stages import base, init, prepare
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import ChampionFile
from ratchet.storage.records.training import TrainReport

TINY = TinyModelSettings(
    vocab_size=400, hidden_size=64, intermediate_size=128, layers=2, heads=2, sequence_length=48, batch_size=8,
    steps=6, seed=1,
)  # fmt: skip

TRAIN = Train(
    rank=4, alpha=8, dropout=0.1, epochs=2, batch_size=16, learning_rate=0.01, validate_every_steps=7,
    early_stopping=EarlyStoppingSettings(), seed=3,
)  # fmt: skip

MACHINE = Machine(
    device="cpu", threads=1, micro_batch_size=8, checkpoint_every=2, max_restarts=5, restart_delay_s=0.1,
)  # fmt: skip

SETTINGS = Settings(
    base=Base(tiny=TINY),
    prepare=Prepare(
        sources=("data/raw/rows.csv", "data/raw/rows.jsonl"),
        columns=ColumnSettings(prompt="request", response="intent"),
        task="labels",
        max_tokens=64,
    ),
    train=TRAIN,
    evaluate=Evaluate(max_new_tokens=8, harness=HarnessSettings(tasks=("answers",), limit=10)),
    machine=MACHINE,
)


def write_rows(raw: Path, rows: int = 240) -> None:
    """Write requests with four intents, half as CSV and half as JSON lines."""
    import csv
    import json

    draw = random.Random(5)
    things = {"refund": "money back", "delivery": "parcel", "password": "login", "invoice": "bill"}
    table = []
    for number in range(rows):
        intent = draw.choice(sorted(things))
        polite = draw.choice(["please", "hello,", "hi there,", "can you help:"])
        table.append({"request": f"{polite} my {things[intent]} number {number} is a problem", "intent": intent})
    raw.mkdir(parents=True, exist_ok=True)
    with (raw / "rows.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, ["request", "intent"])
        writer.writeheader()
        writer.writerows(table[: rows // 2])
    lines = "".join(json.dumps(row) + "\n" for row in table[rows // 2 :])
    (raw / "rows.jsonl").write_text(lines, encoding="utf-8")


def write(root: Path, settings: Settings = SETTINGS) -> ProjectLayout:
    """Create a project before any stage has run (no git, no DVC)."""
    layout = ProjectLayout(root)
    write_rows(layout.raw)
    for folder in (layout.text, layout.tasks, layout.experiments, layout.mlruns):
        folder.mkdir(parents=True, exist_ok=True)
    (layout.text / "more.txt").write_text(
        "A parcel, a bill, a login.\nMoney comes back when it can.\n", encoding="utf-8"
    )
    (layout.tasks / "answers.yaml").write_text(init.harness_task_yaml(8), encoding="utf-8")
    (layout.root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    ChampionFile().save(layout.champion)
    save(layout, settings)
    return layout


def save(layout: ProjectLayout, settings: Settings) -> None:
    """Write params.yaml."""
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")


def prepared(root: Path, settings: Settings = SETTINGS) -> ProjectLayout:
    """Create a project with completed stages base and prepare. The stages run once per process for each set of settings
    that they read."""
    seen = (settings.base, settings.prepare, settings.evaluate.harness.tasks, settings.machine.threads)
    key = repr(seen)
    if key not in _PREPARED:
        kept = write(Path(tempfile.mkdtemp(prefix="prepared-")) / "project", settings)
        atexit.register(shutil.rmtree, kept.root.parent, ignore_errors=True)
        base.base(Project.from_parts(kept, settings))
        prepare.prepare(Project.from_parts(kept, settings))
        _PREPARED[key] = kept.root
    shutil.copytree(_PREPARED[key], root, dirs_exist_ok=True)
    layout = ProjectLayout(root)
    save(layout, settings)
    return layout


_PREPARED: dict[str, Path] = {}
"""Projects that no test trains, by the settings that their stages read."""


def adapted(layout: ProjectLayout, settings: Settings = SETTINGS, seed: int = 3, strength: float = 0.2) -> TrainReport:
    """Replace stage train: write an adapter of random numbers, sealed as a run leaves it. Strength 0 gives an untrained
    adapter."""
    import torch

    from ratchet.models import adapters, base_model, loading, vocabulary
    from ratchet.runs.directory import RunSpec
    from ratchet.storage import digests, files
    from ratchet.storage.records.base import BaseCard
    from ratchet.storage.records.data import DatasetCard

    card = BaseCard.load(layout.base_card)
    path = base_model.locate(layout, card)
    model = loading.load(path, card, settings.train, torch.device("cpu"))
    learned = vocabulary.list_new_token_ids(base_model.load_tokenizer(path, None, card.added_tokens), card, model)
    model = adapters.attach(model, settings.train, card.digest, learned)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in adapters.trainable_parameters(model):
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=strength)
    data = DatasetCard.load(layout.dataset_card).digest
    with files.sealed_directory(layout.train, "train") as scratch:
        (scratch / "adapter").mkdir()
        adapters.save(model, scratch / "adapter", base_model.refer_to(card))
        names = sorted(p.name for p in (scratch / "adapter").iterdir())
        report = TrainReport(
            run_id=RunSpec(train=settings.train, data_digest=data, base_digest=card.digest).run_id,
            adapter_digest=digests.hash_tree(scratch / "adapter", names), base_digest=card.digest, data_digest=data,
            steps=7, planned_steps=7, best_step=7, kept_step=7, validation_loss={7: 1.0}, final_train_loss=1.0,
            trained_tokens=70, input_tokens=700, trainable_parameters=10, total_parameters=1000,
        )  # fmt: skip
        report.save(scratch / "train.json")
    return report


def environment() -> dict[str, str]:
    """Return the environment for child processes: the commands of this interpreter come first in PATH, and settings of
    this machine are removed."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "RATCHET_", "DVC_"))}
    return clean | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "DVC_NO_ANALYTICS": "1"}


def ratchet(layout: ProjectLayout, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line and wait until it ends."""
    return subprocess.run(
        command(*arguments), cwd=layout.root, env=environment(), capture_output=True, text=True, check=False
    )


def start_training(layout: ProjectLayout) -> "subprocess.Popen[str]":
    """Start `ratchet train` as a process. Its standard output and standard error go to the same pipe."""
    return subprocess.Popen(
        command("train"),
        cwd=layout.root,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outcome(layout: ProjectLayout) -> dict[str, str]:
    """Return the SHA-256 of all outputs of stage train: adapter, report, weights and optimizer of the best and the last
    checkpoint."""
    from ratchet.storage import digests

    files = [path for path in sorted(layout.train.rglob("*")) if path.is_file()]
    return {path.relative_to(layout.train).as_posix(): digests.hash_file(path) for path in files}


def command(*arguments: str) -> list[str]:
    """Return the command line for a child process."""
    return [sys.executable, "-m", "ratchet", *arguments]
