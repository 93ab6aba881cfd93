"""Cases for `ratchet generate` as a process: kills, existing outputs and messages."""

from pathlib import Path

import pytest

import generations
from ratchet.storage.layout import ProjectLayout

COUNT = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generations.chat_directory(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generations.write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", COUNT)


@pytest.fixture
def layout(tmp_path: Path) -> ProjectLayout:
    return generations.project(tmp_path / "my project", generations.with_generate(temperature=0.8))
