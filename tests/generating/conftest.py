"""What tests of generations share: a model of random weights, and a disk that nobody waits for."""

import os
from pathlib import Path

import pytest

import generations


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed processes lose nothing that the kernel has."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="session")
def chat_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a small chat model."""
    return generations.chat_directory(tmp_path_factory.mktemp("chat") / "model")
