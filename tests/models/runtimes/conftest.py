"""Fixtures of the runtime tests."""

from pathlib import Path

import pytest

import tiny_gguf


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model as a GGUF file; tests do not change it."""
    directory = tiny_gguf.directory(tmp_path_factory.mktemp("gguf") / "hf")
    return tiny_gguf.write(directory, directory.parent / "model.gguf")
