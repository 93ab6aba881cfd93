"""Creates inputs of benchmarks/distill.py: divided bundled requests, projects, a teacher and its answers.

Rows are divided by the content of their prompt alone: test, validation, and two halves for training. The teacher has
the labels of one half. The students have few labels of the other half, and the prompts of its other rows.
"""

import csv
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import small_project
import torch

from ratchet.cli.generate import format_generation
from ratchet.cli.select_answers import format_selection
from ratchet.config import params_file
from ratchet.config.base import Base, TinyModelSettings
from ratchet.config.generate import Generate
from ratchet.config.machine import Machine
from ratchet.config.prepare import ColumnSettings, Prepare, SourceSettings, SplitSettings
from ratchet.config.select import Select
from ratchet.config.settings import Settings
from ratchet.config.train import DistillSettings, Train
from ratchet.data import splits, token_files
from ratchet.models import adapters, base_model, loading
from ratchet.models.device import Model
from ratchet.runs.directory import RunDirectory
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.signals import GracefulShutdown
from ratchet.stages.base import base
from ratchet.stages.generate import generate
from ratchet.stages.prepare import prepare
from ratchet.stages.project import Project
from ratchet.stages.select_answers import select
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.output_card import card_path
from ratchet.storage.records.base import BaseCard
from ratchet.training import worker
from ratchet.training.run_spec import build_launch, build_run_spec

TEACHER = "models/teacher"
CPU = torch.device("cpu")
HALVES, ORDER = 101, 102
"""Seeds of the hashes of a row's content that select its half, and its position in the order."""
LABELLED, DISTILLED = "labelled.csv", "distilled.jsonl"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


class Request(NamedTuple):
    """A row of the bundled tables."""

    request: str
    intent: str


@dataclass(frozen=True)
class Division:
    """Division of the bundled rows into training data of teacher and students."""

    teachers: list[Request]
    """Rows of the teacher, with labels."""
    labelled: list[Request]
    """Rows of the students, with labels."""
    unlabelled: list[Request]
    """Rows whose prompts the students know. The labels only serve to report how good the teacher's answers are."""
    validation: list[Request]
    test: list[Request]

    @property
    def learned(self) -> list[Request]:
        """All rows whose prompts the bases were trained on."""
        return [*self.teachers, *self.labelled, *self.unlabelled]

    @property
    def judged(self) -> list[Request]:
        """Validation and test rows, which are the same in every project."""
        return [*self.validation, *self.test]


def bundled() -> list[Request]:
    """Return all rows of both bundled tables."""
    folder = small_project.BUNDLED / "raw"
    with (folder / "support.csv").open(newline="", encoding="utf-8") as stream:
        rows = [Request(row["request"], row["intent"]) for row in csv.DictReader(stream)]
    lines = (folder / "support.jsonl").read_text(encoding="utf-8").splitlines()
    return rows + [Request(one["request"], one["intent"]) for one in map(json.loads, lines)]


def divide(rows: Iterable[Request], labelled: int, unlabelled: int, validation: int) -> Division:
    """Divide the rows into parts of these sizes. The order is that of a hash of the prompt."""
    own = {splits.normalize_text(row.request): row for row in rows}
    found: dict[str, list[Request]] = {"train": [], "validation": [], "test": [], "teacher": []}
    for key in sorted(own, key=lambda key: splits.hash_position(key, ORDER)):
        part: str = splits.assign_split(key, SplitSettings())
        if part == "train" and splits.hash_position(key, HALVES) < 0.5:
            part = "teacher"
        found[part].append(own[key])
    students = found["train"][: labelled + unlabelled]
    return Division(
        found["teacher"], students[:labelled], students[labelled:], found["validation"][:validation], found["test"]
    )


def settings_of(tiny: TinyModelSettings, train: Train, tables: Sequence[str] = (LABELLED,)) -> Settings:
    """Return the settings of a new project, without quantisation, so that a merge is exact.

    Args:
        tables: files of data/raw. A CSV file has columns; other files hold messages.
    """
    sources = [
        SourceSettings(files=f"data/raw/{name}", record_schema="columns" if name.endswith(".csv") else "messages")
        for name in tables
    ]
    return Settings(
        base=Base(tiny=tiny),
        prepare=Prepare(
            sources=tuple(sources), columns=ColumnSettings(prompt="request", response="intent"),
            task="labels", max_tokens=96,
        ),
        train=train,
        machine=Machine(device="cpu", threads=1, micro_batch_size=32, checkpoint_every="10 min"),
    )  # fmt: skip


def train_of(
    rate: float, epochs: float, batch_rows: int, seed: int = 0, teacher: DistillSettings | None = None
) -> Train:
    """Return training settings. The checkpoint with the lowest validation loss is used, despite later overfitting."""
    return Train(
        quantization="none", rank=32, alpha=64, learning_rate=rate, epochs=epochs, batch_size=batch_rows, seed=seed,
        validate_every_steps=25, distill=teacher or DistillSettings(),
    )  # fmt: skip


def write(path: Path, rows: Iterable[Request]) -> None:
    """Write a table as CSV."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows([Request._fields, *rows])


def project(folder: Path, settings: Settings, read: Sequence[Request], rows: Sequence[Request]) -> ProjectLayout:
    """Create a project. Its base is trained on the prompts of `read`; its labelled table is `rows`. Other sources must
    exist already. An existing base and existing data are kept."""
    layout = ProjectLayout(folder)
    for place in (layout.raw, layout.text, layout.tasks, layout.experiments, layout.mlruns):
        place.mkdir(parents=True, exist_ok=True)
    for text in (small_project.BUNDLED / "text").iterdir():
        shutil.copyfile(text, layout.text / text.name)
    (folder / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    if not layout.base_card.exists():
        write(layout.raw / LABELLED, read)
        base(Project.from_parts(layout, settings), lambda line: print(f"  {line}", flush=True))
    if not layout.dataset_card.exists():
        write(layout.raw / LABELLED, rows)
        print(prepare(Project.from_parts(layout, settings)), flush=True)
    return layout


def with_base_of(other: ProjectLayout, folder: Path) -> None:
    """Create a project with the base of another one, unless it has a base."""
    if not ProjectLayout(folder).base.exists():
        files.link_tree(other.base, ProjectLayout(folder).base)


def trained(layout: ProjectLayout, settings: Settings) -> Path:
    """Return the adapter of a run. The training uses the worker's own code in this process."""
    run = RunDirectory.open(layout.runs, build_run_spec(layout, settings))
    try:
        if not run.paths.is_finished():
            build_launch(layout, settings).save(run.paths.launch)
            if code := worker.run_worker(run.paths, 1, GracefulShutdown(), Heartbeat(None, 0.0, 0.0)):
                raise SystemExit(f"{run.paths.root}: the worker ended with {code}")
    finally:
        run.close()
    return run.paths.result / "adapter"


def with_adapter(layout: ProjectLayout, settings: Settings, folder: Path) -> Model:
    """Return the base with the adapter merged: the model that would be served."""
    card = BaseCard.load(layout.base_card)
    model = loading.load(base_model.locate(layout, card), card, settings.train, CPU)
    return adapters.load(model, folder).merge_and_unload().eval()


def keep_model(model: Model, layout: ProjectLayout) -> Path:
    """Save the model with its tokenizer as a plain directory of its project, and return the directory."""
    place = layout.root / TEACHER
    model.save_pretrained(place)
    for name in TOKENIZER:
        if (path := layout.tiny_model / name).exists() and not (place / name).exists():
            files.link_or_copy(path, place / name)
    return place


@dataclass(frozen=True)
class Answers:
    """Answers of the teacher to prompts without labels, as a data source."""

    place: Path
    """File that `ratchet select` wrote."""
    asked: int
    """Number of prompts."""
    right: float
    """Share of right answers among all answers."""
    kept: int
    """Number of rows that were kept."""
    kept_right: float
    """Share of right answers among the kept rows."""


def asked(layout: ProjectLayout, model: Path, division: Division, samples: int, agreement: float) -> Answers:
    """Run `ratchet generate` for the students' unlabelled prompts, with several samples per prompt, and `ratchet
    select`. An answer is kept if it is a label of the teacher's training data and enough samples agree on it."""
    prompts, output, place = (layout.root / name for name in ("unlabelled.jsonl", "answers.jsonl", DISTILLED))
    rows = division.unlabelled
    prompts.write_text("".join(json.dumps({"id": n, "prompt": row.request}) + "\n" for n, row in enumerate(rows)))
    known = "|".join(map(re.escape, sorted({row.intent for row in division.teachers})))
    settings = Settings(
        machine=Machine(device="cpu", threads=1),
        generate=Generate(max_new_tokens=16, prompt_column="prompt", samples=samples, temperature=1.0),
        select=Select(answer_format=known, min_agreement=agreement),
    )
    project = Project.from_parts(layout, settings)
    print(format_generation(generate(project, prompts, output, str(model), print)), flush=True)
    print(format_selection(select(project, (output,), place, on_progress=print)), flush=True)
    said = [(int(one["id"]), one["answer"]) for one in _lines(output)]
    kept = [(int(one["id"]), one["messages"][-1]["content"]) for one in _lines(place)]
    right, kept_right = (sum(rows[n].intent == answer for n, answer in some) / len(some) for some in (said, kept))
    return Answers(place, len(rows), right, len(kept), kept_right)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def add_distilled(layout: ProjectLayout, answers: Answers) -> None:
    """Copy the answers and their card into the sources of a project."""
    layout.raw.mkdir(parents=True, exist_ok=True)
    for path in (answers.place, card_path(answers.place)):
        shutil.copyfile(path, layout.raw / path.name)


def rows_in(layout: ProjectLayout) -> int:
    """Return the number of training rows after prepare."""
    return len(token_files.load_rows(layout.data, "train"))
