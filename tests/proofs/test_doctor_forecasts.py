"""Proves that `ratchet doctor` reports a machine that is too small for a base, from the config of the base alone."""

import re
from pathlib import Path

import pytest

from doctor_cases import (
    examine,
    seven,  # noqa: F401 (a fixture)
)
from ratchet.config.units import GIB
from ratchet.models.memory import capacity
from ratchet.models.memory.capacity import MemoryCapacity

PACKAGES = ("stages", "models")


def with_memory(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(capacity, "measure_device", lambda _: MemoryCapacity(32 * GIB, int(gib * GIB)))


def test_a_config_alone_is_enough_for_a_forecast(seven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 12)
    well, text = examine(None, None, seven, False)
    assert well
    assert "LlamaForCausalLM, 6,738,415,616 parameters, 224 layers" in text
    assert re.search(r"machine\.micro_batch_size: 8 → [1-7]\n", text)
    assert "for 8 rows of 256 tokens" in text
    assert re.search(rf"advice: [0-9]+ changes? to the defaults for {re.escape(str(seven))}", text)


def test_a_machine_that_is_too_small_for_the_least_is_a_problem(seven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, 4)
    well, text = examine(None, None, seven, False)
    assert not well
    assert "problem: even the smallest settings need" in text
    assert "take a smaller base, a machine with more memory" in text
