"""Shared fixtures for tests of stage prepare."""

from pathlib import Path

import pytest

import generations


@pytest.fixture(autouse=True)
def quiet_commands(calm: None) -> None:
    """Commands run in this process, so `calm` resets their signal handlers after the test."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a base once; the tests do not change it."""
    return generations.chat_directory(tmp_path_factory.mktemp("base") / "model")
