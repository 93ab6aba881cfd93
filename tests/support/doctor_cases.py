"""Cases for `ratchet doctor`: a real small project, a 7B model with only its config, and a directory outside any
project."""

import json
from pathlib import Path

import pytest

from ratchet.cli.doctor import format_examination
from ratchet.config.settings import Settings
from ratchet.stages.doctor import doctor
from ratchet.storage.layout import ProjectLayout

LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture
def seven(tmp_path: Path) -> Path:
    path = tmp_path / "llama-2-7b.json"
    path.write_text(json.dumps(LLAMA_2_7B))
    return path


def examine(
    layout: ProjectLayout | None, settings: Settings | None, base: Path | None = None, write: bool = False
) -> tuple[bool, str]:
    """Return whether a run can start on this machine, and the text of `ratchet doctor`."""
    report = doctor(layout, settings, base, write)
    return not report.problems, format_examination(report)
