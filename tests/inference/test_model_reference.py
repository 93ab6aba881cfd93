"""Tests the resolution of --model, and messages for missing models."""

import re
import shutil
from pathlib import Path

import pytest

from generations import SETTINGS, project
from ratchet.errors import InputError
from ratchet.inference import model_reference
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import ChampionFile


@pytest.fixture
def layout(tmp_path: Path) -> ProjectLayout:
    return project(tmp_path / "p")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("base", "base.json.*dvc repro base"),
        ("adapter", "base.json.*dvc repro base"),
        ("merged", "dvc repro export"),
        ("champion", "no champion yet.*ratchet promote"),
        ("v3", "v3: this version was never promoted; promoted versions: none"),
        ("nonsense", "no such model; expected one of: base, adapter"),
        ("http://example.org", "https"),
        (".", "no config"),
    ],
)
def test_a_missing_model_is_refused_with_the_command_that_creates_it(
    name: str, words: str, layout: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(layout.root)
    ChampionFile().save(layout.champion)
    with pytest.raises(InputError, match=re.compile(words, re.DOTALL)):
        model_reference.resolve_model(name, layout, SETTINGS)


def test_a_directory_is_identified_by_its_content(layout: ProjectLayout, tmp_path: Path, chat_directory: Path) -> None:
    other = tmp_path / "elsewhere"
    shutil.copytree(chat_directory, other)
    first = model_reference.resolve_model(str(chat_directory), layout, SETTINGS)
    assert model_reference.resolve_model(str(other), layout, SETTINGS).model == first.model
    config = (other / "generation_config.json").read_text(encoding="utf-8")
    (other / "generation_config.json").write_text(config + " ", encoding="utf-8")
    assert model_reference.resolve_model(str(other), layout, SETTINGS).model != first.model
