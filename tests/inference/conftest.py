"""Fixtures for generations: a model with random weights, projects that use it, low memory, no fsync."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import generations
from generations import SETTINGS, Generation, with_generate
from ratchet.runs.fault_injection.injection import VARIABLE


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable fsync; a killed process loses nothing that the kernel has received."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="session")
def chat_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Hugging Face directory with a small chat model."""
    return generations.chat_directory(tmp_path_factory.mktemp("chat") / "model")


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory, chat_directory: Path) -> Callable[..., Generation]:
    """Return a function that makes a generation in a new project, from prompts or a number of random ones."""

    def made(asked: int | list[str], **settings: object) -> Generation:
        folder = tmp_path_factory.mktemp("generation")
        generations.project(folder / "p")
        prompts = folder / "p.jsonl"
        if isinstance(asked, int):
            generations.write_prompts(prompts, asked)
        else:
            prompts.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in asked), encoding="utf-8")
        return Generation(folder / "p", prompts, with_generate(SETTINGS, **settings), str(chat_directory))

    return made


@pytest.fixture
def limit_tokens(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes batches of more tokens run out of memory."""

    def limit(tokens: int) -> None:
        fault = {"kind": "memory", "phase": "generate", "step": 0, "steps": 0, "tokens": tokens}
        monkeypatch.setenv(VARIABLE, json.dumps([fault]))

    return limit
