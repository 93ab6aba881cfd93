"""Shared fixtures for tests of stage prepare."""

from pathlib import Path

import pytest

import generations


@pytest.fixture(autouse=True)
def quiet_commands(calm: None) -> None:
    """Commands run in this process: their signal handlers end with the test."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that is made once; tests leave it as it is."""
    return generations.chat_directory(tmp_path_factory.mktemp("base") / "model")
