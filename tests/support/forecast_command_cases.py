"""`ratchet forecast` from a config alone and from a project, as text, JSON and page."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from ratchet.cli.forecast import format_forecast
from ratchet.config import units
from ratchet.config.machine import Machine
from ratchet.config.prepare import Prepare
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.stages import forecast as verb
from ratchet.stages.forecast import ForecastOptions

SETTINGS = Settings(
    train=Train(rank=4, alpha=8), prepare=Prepare(max_tokens=64), machine=Machine(device="cpu", micro_batch_size=3)
)
ON_GPU = ForecastOptions(device="cuda")
LARGE = 24 * units.GIB
"""Memory for which the command searches the largest settings. Without this value the command does no search and takes a
tenth of the time."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a config.json without any weights."""
    folder = tmp_path_factory.mktemp("base")
    LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return folder / "config.json"


def asked(config: Path, settings: Settings = SETTINGS, **changes: Any) -> dict[str, Any]:
    report = verb.forecast(None, settings, replace(ON_GPU, base=config, **changes))
    found: dict[str, Any] = json.loads(report.model_dump_json())
    return found


def lines(config: Path, **changes: Any) -> list[str]:
    return format_forecast(verb.forecast(None, SETTINGS, replace(ON_GPU, base=config, **changes))).splitlines()
