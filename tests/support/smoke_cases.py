"""Fixtures for real servers that load the files of a release."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from chat_model import QUESTIONS, TOKENS, probes_of_hf, write_model
from promoted_models import artifact
from ratchet.exporters import onnx
from ratchet.exporters.gguf import writer
from ratchet.models.runtimes import llama_server
from ratchet.storage.records.export import ExportArtifact


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a tiny model to hf/, gguf/model-f32.gguf and onnx/fp32/, and a second model to hf/ and gguf/."""
    root = tmp_path_factory.mktemp("export")
    for name, seed in (("one", 1), ("other", 2)):
        (root / name / "gguf").mkdir(parents=True)
        write_model(root / name / "hf", seed)
        writer.write_gguf(root / name / "hf", root / name / "gguf" / "model-f32.gguf", "f32", lambda *_: None)
    (root / "one" / "onnx" / "fp32").mkdir(parents=True)
    onnx.write_onnx(root / "one" / "hf", root / "one" / "onnx" / "fp32", "fp32", lambda *_: None)
    return root


@pytest.fixture(scope="module")
def verified(export: Path) -> dict[str, ExportArtifact]:
    """Return the formats of the first model with their answers."""
    with llama_server.open_runtime(export / "one" / "gguf" / "model-f32.gguf", 1, 128, "f16") as runtime:
        asked = runtime.probes(QUESTIONS, TOKENS)
    return {
        "gguf/f32": artifact(export / "one", "gguf/f32", asked),
        "hf": artifact(export / "one", "hf", probes_of_hf(export / "one" / "hf")),
        "onnx/fp32": artifact(export / "one", "onnx/fp32", probes_of_hf(export / "one" / "hf")),
    }


def children() -> list[str]:
    """Return the ids of this process's Ratchet children. The fork server of the tests is excluded, because it runs
    until the end."""
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    lines = {number: Path(f"/proc/{number}/cmdline").read_bytes() for number in found}
    return [number for number, line in lines.items() if b"ratchet" in line and b"forkserver" not in line]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = set(children())  # tests share these servers
    yield
    assert set(children()) <= before
