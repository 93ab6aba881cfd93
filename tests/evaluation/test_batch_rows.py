"""Tests that the batch size depends only on machine and model."""

from itertools import pairwise
from typing import Any

import pytest
from transformers import AutoConfig, GPT2Config, LlamaConfig, MambaConfig

import families
from ratchet.evaluation import scorer
from ratchet.models.memory import capacity
from ratchet.models.memory.capacity import MemoryCapacity


def make(layers: int = 2) -> Any:
    return families.make("llama", vocab_size=500, num_key_value_heads=4, num_hidden_layers=layers)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the total memory of the machine; the free memory is invalid and must not matter."""

    def of(total_bytes: int) -> None:
        monkeypatch.setattr(capacity, "measure_device", lambda device: MemoryCapacity(total_bytes, -1))

    return of


def test_a_number_in_the_settings_is_used() -> None:
    assert scorer.choose_batch_rows(7, make(), 10**9, 500) == 7


def test_auto_is_a_power_of_two_that_grows_with_the_machine_and_shrinks_with_the_rows(machine: Any) -> None:
    model = make()
    found = {}
    for mebibytes in (1, 4, 16, 64, 4096):
        machine(mebibytes * 2**20)
        found[mebibytes] = [scorer.choose_batch_rows("auto", model, tokens, 500) for tokens in (16, 128, 1024)]
    assert all(rows in {1, 2, 4, 8, 16, 32, 64} for row in found.values() for rows in row)
    assert all(row == sorted(row, reverse=True) for row in found.values())
    assert found[4096] == [64, 64, 64]
    every = list(found.values())
    assert all(a <= b for less, more in pairwise(every) for a, b in zip(less, more, strict=True))
    assert len({row[2] for row in every}) > 2
    machine(0)
    assert scorer.choose_batch_rows("auto", model, 1024, 500) == 1


def test_weights_leave_less_memory_for_rows(machine: Any) -> None:
    small, large = make(1), make(60)
    weights = sum(p.nbytes for p in large.parameters())
    machine(weights + 2**20)
    assert scorer.choose_batch_rows("auto", large, 8, 500) < scorer.choose_batch_rows("auto", small, 8, 500)


@pytest.mark.parametrize(
    "config",
    [GPT2Config(), MambaConfig(), LlamaConfig(), AutoConfig.for_model("gemma3_text")],
    ids=["gpt2", "mamba", "llama", "gemma3"],
)
def test_every_kind_of_config_has_a_bound(config: Any) -> None:
    assert scorer.estimate_row_bytes(config, 64, 1000) < scorer.estimate_row_bytes(config, 128, 1000)
    assert scorer.estimate_row_bytes(config, 64, 1000) < scorer.estimate_row_bytes(config, 64, 2000)
