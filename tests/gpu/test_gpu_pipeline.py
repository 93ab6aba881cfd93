"""Test on a GPU: a project from training to answers, with each format that is exported."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_project
from ratchet.config.export import Export, GgufSettings
from ratchet.storage.layout import ProjectLayout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> ProjectLayout:
    export = Export(task_rows=12, parity_rows=8, merge_base="dequantized", gguf=GgufSettings(types=("f32", "q8_0")))
    machine = tiny_project.MACHINE.model_copy(update={"device": device.type})
    settings = tiny_project.SETTINGS.model_copy(update={"export": export, "machine": machine})
    layout = tiny_project.prepared(tmp_path_factory.mktemp("pipeline") / "project", settings)
    done = tiny_project.ratchet(layout, "train")
    assert done.returncode == 0, done.stderr
    return layout


def test_exported_models_answer_as_the_trained_one(trained: ProjectLayout, record: Any) -> None:
    done = tiny_project.ratchet(trained, "export", "--json")
    assert done.returncode == 0, done.stderr
    artifacts = json.loads(done.stdout)["artifacts"]
    record(formats=", ".join(artifact["name"] for artifact in artifacts))
    assert {artifact["name"] for artifact in artifacts} >= {"hf", "gguf/f32", "gguf/q8_0"}


@pytest.mark.parametrize("command", [("train", "--profile", "12"), ("evaluate",)], ids=" ".join)
def test_commands_of_a_trained_project(command: tuple[str, ...], trained: ProjectLayout) -> None:
    done = tiny_project.ratchet(trained, *command)
    assert done.returncode == 0, done.stderr


def test_an_answer_does_not_depend_on_the_other_prompts(trained: ProjectLayout, tmp_path: Path) -> None:
    answers = []
    for count in (24, 5):
        prompts, target = tmp_path / f"prompts-{count}.jsonl", tmp_path / f"{count}.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"my bill number {n}"}) + "\n" for n in range(count)))
        done = tiny_project.ratchet(
            trained, "generate", str(prompts), "--output", str(target), "--set", "generate.max_new_tokens=12"
        )
        assert done.returncode == 0, done.stderr
        answers.append([json.loads(line)["answer"] for line in target.read_text().splitlines()])
    assert len(answers[0]) == 24
    assert answers[0][:5] == answers[1]
