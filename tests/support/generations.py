"""Generations inside the test process: a real model with random weights and real files, but no worker process."""

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
from ratchet.config.machine import Machine
from ratchet.config.settings import Settings
from ratchet.inference import model_reference, worker
from ratchet.inference.prompts import PromptSource
from ratchet.inference.spec import GenerationPaths, GenerationSpec
from ratchet.runs.directory import RunDirectory
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.signals import GracefulShutdown
from ratchet.storage.layout import ProjectLayout

SETTINGS = Settings(
    generate=Generate(max_new_tokens=8, shard_rows=10, window_rows=16),
    machine=Machine(device="cpu", threads=1, max_restarts=5, restart_delay_s=0.0, storage_timeout_s=0.0),
)
WORDS = ["what", "is", "water", "and", "wet", "the", "colour", "of", "it", "name", "three"]


def with_generate(settings: Settings = SETTINGS, **changed: Any) -> Settings:
    """Return settings with changes in section generate."""
    values = settings.generate.model_dump() | changed
    return settings.model_copy(update={"generate": Generate.model_validate(values)})


def project(root: Path, settings: Settings = SETTINGS) -> ProjectLayout:
    """Create a project without data or base, which suffices to run a model from a directory."""
    layout = ProjectLayout(root)
    layout.experiments.mkdir(parents=True)
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    return layout


def project_settings(layout: ProjectLayout, settings: Settings) -> None:
    """Rewrite params.yaml."""
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")


def write_prompts(path: Path, count: int) -> Path:
    """Write prompts of one to twelve words, one JSON line each."""
    draw = random.Random(4)
    with path.open("w", encoding="utf-8") as stream:
        for number in range(count):
            text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 12)))
            stream.write(json.dumps({"id": f"q{number}", "prompt": text}) + "\n")
    return path


class StopAfter(GracefulShutdown):
    """Requests a stop after `checks` checks."""

    def __init__(self, checks: int) -> None:
        super().__init__()
        self._left = checks

    @property
    def is_requested(self) -> bool:
        self._left -= 1
        return self._left < 0


@dataclass
class Generation:
    """A generation whose worker a test can run any number of times in its own process."""

    folder: Path
    prompts: Path
    settings: Settings = field(default_factory=lambda: SETTINGS)
    model: str = ""

    def __post_init__(self) -> None:
        self.layout = ProjectLayout(self.folder)
        self.source = PromptSource(self.prompts, self.settings)
        self.reference = model_reference.resolve_model(self.model, self.layout, self.settings)
        self.count, prompts_digest = self.source.measure()
        self.spec = GenerationSpec(
            generate=self.settings.generate.answer_settings(), prompts_digest=prompts_digest,
            model=self.reference.model, template_digest=self.reference.template_digest,
        )  # fmt: skip

    @contextmanager
    def open_run(self) -> Iterator[RunDirectory]:
        run = RunDirectory.open(self.layout.generations, self.spec)
        try:
            self.reference.start.save(run.paths.launch)
            if not GenerationPaths(run.paths.root).prompts.exists():
                self.source.seal(GenerationPaths(run.paths.root).prompts, self.count)
            yield run
        finally:
            run.close()

    def work(self, stop: GracefulShutdown | None = None) -> int:
        """Run one worker to its end; return the exit code."""
        with self.open_run() as run:
            number = sum(event.kind == "attempt_started" for event in self.events()) + 1
            run.journal.attempt = number
            run.journal.append("attempt_started", pid=1, code_version="x")
            return worker.run_worker(run.paths, number, stop or GracefulShutdown(), Heartbeat(None, 0.0, 0.0))

    @property
    def paths(self) -> GenerationPaths:
        return GenerationPaths(self.layout.generations / self.spec.run_id)

    def events(self, kind: str | None = None) -> list[JournalEvent]:
        return [e for e in JournalReader(self.paths.root / "journal.jsonl").read() if kind in (None, e.kind)]

    def written(self) -> bytes:
        """Return the bytes of the sealed result."""
        return (self.paths.result / "answers.jsonl").read_bytes()

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.written().splitlines()]


def chat_directory(folder: Path) -> Path:
    """Write a model with random weights and known answers."""
    chat_model.write_model(folder, seed=3)
    return folder
