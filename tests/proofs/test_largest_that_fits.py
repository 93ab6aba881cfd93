"""Proves that the largest micro-batch of the forecast fits, and that a micro-batch with one more row does not."""

from dataclasses import replace

import pytest

import families
from forecast_cases import (
    GPU,
    find_largest_sizes,
    of,
)
from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.models import model_spec
from ratchet.models.memory import forecast, meta_model
from ratchet.models.memory.forecast import MemoryWorkload

PACKAGES = ("models", "stages")


@pytest.mark.parametrize(
    ("family", "layers", "checkpointing"),
    [
        ("llama", 6, False),
        ("llama", 6, True),
        ("gpt2", 5, False),
        ("mistral", 5, False),
        ("gemma2", 9, True),  # two alternating kinds of blocks, and one extra block
        ("mixtral", 5, True),
    ],
)
def test_three_and_four_periods_stand_for_all_blocks(
    family: str, layers: int, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(activation_checkpointing=checkpointing)
    targets = "attention" if family == "mixtral" else "all"
    short = of(family, machine=machine, layers=layers, target_modules=targets)
    monkeypatch.setitem(meta_model.PERIODS_OF_SHORT_AND_LONG, "cuda", (98, 99))
    assert short.phases == of(family, machine=machine, layers=layers, target_modules=targets).phases


def test_the_largest_that_fits_fits_and_one_more_does_not() -> None:
    plan = model_spec.from_config(families.FAMILIES["llama"](num_hidden_layers=6, max_position_embeddings=4096))
    settings, work = Train(rank=2, batch_size=64), replace(GPU, row_tokens=512, learned_tokens=256)
    available = forecast.forecast(plan, settings, Machine(), work).peak.total_bytes + 12 * 2**20
    found = find_largest_sizes(plan, settings, Machine(), work, available)

    def need(changed: MemoryWorkload, train: Train = settings) -> int:
        return forecast.forecast(plan, train, Machine(), changed).peak.total_bytes

    rows, tokens, rank = found.micro_batch_size, found.row_tokens, found.rank
    assert rows and tokens and rank and 2 < rows < 64 and 512 < tokens < 4096
    assert need(replace(work, rows=rows)) <= available < need(replace(work, rows=rows + 1))
    longer = int(1.02 * tokens)
    assert need(replace(work, row_tokens=tokens, learned_tokens=tokens // 2)) <= available
    assert available < need(replace(work, row_tokens=longer, learned_tokens=longer // 2))
    assert need(work, settings.model_copy(update={"rank": rank})) <= available
    assert rank == 32 or available < need(work, settings.model_copy(update={"rank": rank + 1}))
