"""Proves the README's sentence "Exports are tested before they ship" for deployments: a real server answers like the
measured model."""

import os
import shutil
from pathlib import Path

import pytest

from ratchet.errors import ChampionError, DamagedFileError
from ratchet.registry.deployment.smoke_test import run_smoke_test
from ratchet.storage.records.export import ExportArtifact
from smoke_cases import (
    export,  # noqa: F401 (a fixture)
    nothing_left,  # noqa: F401 (a fixture)
    verified,  # noqa: F401 (a fixture)
)

PACKAGES = ("registry", "models")


@pytest.mark.parametrize("form", ["gguf/f32", "hf", "onnx/fp32"])
def test_the_model_that_was_measured_answers_as_it_was(
    export: Path, verified: dict[str, ExportArtifact], form: str
) -> None:
    assert run_smoke_test(export / "one", verified[form], has_dated_prompts=False) == "3 of 3 answers as verified"


def test_files_that_cannot_be_opened(export: Path, verified: dict[str, ExportArtifact], tmp_path: Path) -> None:
    shutil.copytree(export / "one", tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "gguf" / "model-f32.gguf", 4000)
    with pytest.raises(DamagedFileError, match=r"model-f32\.gguf"):
        run_smoke_test(tmp_path / "cut", verified["gguf/f32"], has_dated_prompts=False)
    os.truncate(tmp_path / "cut" / "onnx" / "fp32" / "model.onnx", 100)
    with pytest.raises(ChampionError, match=r"fp32: loading or answering failed \("):
        run_smoke_test(tmp_path / "cut", verified["onnx/fp32"], has_dated_prompts=False)
    (tmp_path / "cut" / "hf" / "model.safetensors").unlink()
    with pytest.raises(ChampionError, match=r"hf: loading or answering failed \(OSError: .*model\.safetensors"):
        run_smoke_test(tmp_path / "cut", verified["hf"], has_dated_prompts=False)
