"""Cases for `ratchet select`: several generations, existing or changed outputs, missing prompts."""

from pathlib import Path

import pytest

import fake_generations as made
from ratchet.cli.main import main
from ratchet.storage.layout import ProjectLayout

PROMPTS = [{"id": f"q{n}", "prompt": f"what is {word}"} for n, word in enumerate(["water", "fire", "earth", "air"])]


@pytest.fixture
def layout(tmp_path: Path) -> ProjectLayout:
    return made.project(tmp_path / "project", made.settings_of())


@pytest.fixture
def answers(layout: ProjectLayout, tmp_path: Path) -> Path:
    asked = made.write_lines(tmp_path / "prompts.jsonl", PROMPTS)
    return made.generation(layout, made.settings_of(), asked, lambda id, _: f"it is {id}", tmp_path / "answers.jsonl")


def ratchet(layout: ProjectLayout, *arguments: Path | str) -> int:
    return main(["--project", str(layout.root), "select", *map(str, arguments)])


def refused(layout: ProjectLayout, capsys: pytest.CaptureFixture[str], *arguments: Path | str) -> str:
    assert ratchet(layout, *arguments) == 2
    return capsys.readouterr().err
