"""Proves that the forecast finds a setting with which a base fits on several ranks if it does not fit on one rank."""

from pathlib import Path

from transformers import LlamaConfig

from forecast_command_cases import (
    LARGE,
    SETTINGS,
    asked,
    config,  # noqa: F401 (a fixture)
    lines,
)
from ratchet.config import units
from ratchet.config.machine import Machine

PACKAGES = ("stages", "models", "training")


def test_what_fits_and_what_does_not_is_said(config: Path) -> None:
    text = "\n".join(lines(config, memory_bytes=LARGE))
    assert "24.00 GiB available: it fits, " in text
    assert "largest that fits, with the other sizes unchanged: machine.micro_batch_size " in text
    small = "\n".join(lines(config, memory_bytes=units.MIB))
    assert "1.0 MiB available: it does not fit, " in small
    assert "machine.micro_batch_size (not even 1), prepare.max_tokens (not even 1), train.rank (not even 1)" in small
    unknown = "\n".join(lines(config))
    assert "set its memory with --memory" in unknown
    assert "memory of the host: " in unknown


def test_ranks_share_the_base_where_it_would_not_fit_otherwise(tmp_path: Path) -> None:
    LlamaConfig(
        vocab_size=128, hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=8,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    asked_for = Machine(device="cpu", micro_batch_size=1, shard_base=True)
    least = asked(tmp_path, SETTINGS.model_copy(update={"machine": asked_for}), ranks=8)["peak_bytes"]
    found = asked(tmp_path, memory_bytes=least + units.MIB, ranks=8, rows=1)
    assert found["fits"] is True
    assert found["forecast"]["shard_base"] is True
    assert any(note.startswith("Not even one row would fit otherwise: the base is sharded among 8") for note in
               found["forecast"]["notes"])  # fmt: skip
    alone = asked(tmp_path, memory_bytes=least + units.MIB, rows=1)
    assert (alone["fits"], alone["forecast"]["shard_base"]) == (False, False)
    text = "\n".join(lines(tmp_path, memory_bytes=least + units.MIB, ranks=8, rows=1))
    assert "without activation checkpointing, on each of 8 ranks, with a share of the base" in text
