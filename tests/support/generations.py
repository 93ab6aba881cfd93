"""Generations in a test's own process: a real model of random weights, real files, and no process to wait for."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chat_model
from ratchet.config import params_file
from ratchet.config.generate import Generate
from ratchet.config.schema import Machine, Settings
from ratchet.inference import model_reference, worker
from ratchet.inference.prompts import PromptSource
from ratchet.inference.spec import GenerationPaths, GenerationSpec
from ratchet.runs.directory import Run
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.storage.layout import ProjectLayout
from ratchet.training.stopping import GracefulShutdown

SETTINGS = Settings(
    generate=Generate(max_new_tokens=8, shard_rows=10, window_rows=16),
    machine=Machine(device="cpu", threads=1, retries=5, retry_delay_s=0.0, storage_wait_s=0.0),
)
WORDS = ["what", "is", "water", "and", "wet", "the", "colour", "of", "it", "name", "three"]


def with_generate(settings: Settings = SETTINGS, **changed: Any) -> Settings:
    """The same with other settings of generate."""
    values = settings.generate.model_dump() | changed
    return settings.model_copy(update={"generate": Generate.model_validate(values)})


def project(root: Path, settings: Settings = SETTINGS) -> ProjectLayout:
    """A project without data or base: enough to ask a model that lies somewhere."""
    layout = ProjectLayout(root)
    layout.experiments.mkdir(parents=True)
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    return layout


def project_settings(layout: ProjectLayout, settings: Settings) -> None:
    """Write params.yaml anew."""
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")


def write_prompts(path: Path, count: int) -> Path:
    """Questions of one to twelve words, a JSON line each."""
    draw = random.Random(4)
    with path.open("w", encoding="utf-8") as stream:
        for number in range(count):
            text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 12)))
            stream.write(json.dumps({"id": f"q{number}", "prompt": text}) + "\n")
    return path


class StopAfter(GracefulShutdown):
    """Asks to stop once so many looks were taken."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._left = looks

    @property
    def asked(self) -> bool:
        self._left -= 1
        return self._left < 0


@dataclass
class Generation:
    """One run, worked on as often as a test likes; each time as by a worker of its own."""

    folder: Path
    prompts: Path
    settings: Settings = field(default_factory=lambda: SETTINGS)
    model: str = ""

    def __post_init__(self) -> None:
        self.layout = ProjectLayout(self.folder)
        self.source = PromptSource(self.prompts, self.settings)
        self.meant = model_reference.resolve_model(self.model, self.layout, self.settings)
        self.count, prompts_digest = self.source.measured()
        self.spec = GenerationSpec(
            generate=self.settings.generate.decisive(), prompts_digest=prompts_digest, model=self.meant.model,
            template_digest=self.meant.template_digest,
        )  # fmt: skip

    @contextmanager
    def opened(self) -> Iterator[Run]:
        run = Run.open(self.layout.generations, self.spec)
        try:
            self.meant.start.save(run.paths.launch)
            if not GenerationPaths(run.paths.root).prompts.exists():
                self.source.keep(GenerationPaths(run.paths.root).prompts, self.count)
            yield run
        finally:
            run.close()

    def work(self, stop: GracefulShutdown | None = None) -> int:
        """One worker, from its start to its end; the exit code."""
        with self.opened() as run:
            number = sum(event.kind == "attempt" for event in self.events()) + 1
            run.journal.attempt = number
            run.journal.append("attempt", pid=1, code_version="x")
            return worker.run_worker(run.paths, number, stop or GracefulShutdown(), Heartbeat.private())

    @property
    def paths(self) -> GenerationPaths:
        return GenerationPaths(self.layout.generations / self.spec.run_id)

    def events(self, kind: str | None = None) -> list[JournalEvent]:
        return [e for e in JournalReader(self.paths.root / "journal.jsonl").read() if kind in (None, e.kind)]

    def written(self) -> bytes:
        """The result's records."""
        return (self.paths.result / "answers.jsonl").read_bytes()

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.written().splitlines()]


def chat_directory(folder: Path) -> Path:
    """A model of random weights that has an opinion."""
    chat_model.write_model(folder, seed=3)
    return folder
