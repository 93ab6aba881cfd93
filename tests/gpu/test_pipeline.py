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


@pytest.mark.parametrize("command", ["profile", "evaluate"])
def test_commands_of_a_trained_project(command: str, trained: ProjectLayout) -> None:
    done = tiny_project.ratchet(trained, command)
    assert done.returncode == 0, done.stderr


def test_generation_gives_every_prompt_its_answer_again(trained: ProjectLayout, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"my bill number {n}"}) + "\n" for n in range(24)))
    answers = []
    for rows in (1, 8):
        target = tmp_path / f"{rows}.jsonl"
        done = tiny_project.ratchet(
            trained, "generate", "--input", str(prompts), "--output", str(target), "--batch-rows", str(rows)
        )
        assert done.returncode == 0, done.stderr
        answers.append([json.loads(line)["response"] for line in target.read_text().splitlines()])
    assert len(answers[0]) == 24
    assert answers[0] == answers[1]
