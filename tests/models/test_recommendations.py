"""Tests the doctor's recommendation rules, fitting to memory, and the 4-bit device test."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from ratchet.config import params_file
from ratchet.config.machine import Machine
from ratchet.config.prepare import Prepare
from ratchet.config.settings import Settings
from ratchet.config.train import EarlyStoppingSettings, Train
from ratchet.config.units import GIB, MIB
from ratchet.models import device, model_spec, recommendations
from ratchet.models.memory import forecast, parameters
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.model_spec import ModelSpec
from ratchet.models.recommendations import MemoryConstraint, RecommendationInputs, RecommendedChange
from ratchet.storage.records.data import DatasetCard, DroppedRows, LengthDistribution

SEVEN: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip
"""Llama 2 7B."""


def plan_of(**changes: Any) -> ModelSpec:
    return model_spec.from_config(LlamaConfig(**SEVEN | changes))


@pytest.fixture(scope="module")
def seven() -> ModelSpec:
    return plan_of()


def card_of(rows: int = 20_000, trained: int = 400_000, **changes: Any) -> DatasetCard:
    lengths = LengthDistribution(
        least=10, median=100, p95=120, greatest=200, total=100 * rows, trained=trained, histogram={96: rows}
    )
    known: dict[str, Any] = {
        "digest": "d", "sources": {}, "base_digest": "b", "task": "text", "rows_in": rows + 200, "rows_out": rows + 200,
        "dropped": {}, "splits": {"train": rows, "validation": 100, "test": 100}, "lengths": {"train": lengths},
        "labels": {},
    }  # fmt: skip
    return DatasetCard(**known | changes)


def asked(settings: Settings, base: ModelSpec | None, data: DatasetCard | None = None) -> dict[str, Any]:
    """Return the values that the rules propose."""
    _, changes = recommendations.apply_rules(RecommendationInputs(settings, "cpu", base, data), recommendations.RULES)
    return {one.key: one.value for one in recommendations.merge_into_proposals(settings, changes)}


def test_a_base_that_predicts_the_answers_well_needs_a_lower_rank(seven: ModelSpec) -> None:
    settings, data = train(rank=1, alpha=2), card_of(trained=9_000_000)

    def propose(loss: float | None) -> list[RecommendedChange]:
        facts = RecommendationInputs(settings, "cpu", seven, data, loss)
        return [change for change in [recommendations.recommend_rank_for_data(facts)] if change]

    assert [change.values["train.rank"] for change in propose(None)] == [4]
    assert [change.values["train.rank"] for change in propose(5.0)] == [4]  # falls quickly, so it says little
    (change,) = propose(0.35)
    assert change.values["train.rank"] == 2
    assert "a loss of 0.35 nats per token: about 4,544,489 bits to learn" in change.reason
    assert propose(0.1) == []


def train(**changes: Any) -> Settings:
    return Settings(train=Train(**changes))


def test_the_defaults_need_no_recommendation(seven: ModelSpec) -> None:
    assert asked(Settings(), None) == {}
    assert asked(Settings(), seven) == {}
    assert asked(Settings(), seven, card_of()) == {}


@pytest.mark.parametrize(
    ("settings", "data", "expected"),
    [
        (train(quantization="fp4"), None, {"train.quantization": "nf4"}),
        (train(target_modules="attention"), None, {"train.target_modules": "all"}),
        (train(target_modules=("q_proj", "v_proj")), None, {"train.target_modules": "all"}),
        (train(target_modules=("q_proj", "up_proj")), None, {}),
        (train(target_modules="mlp"), None, {}),
        (train(target_modules=("qproj",)), None, {"train.target_modules": "all"}),
        (train(alpha=1), None, {"train.alpha": 32.0}),
        (train(alpha=512), None, {"train.alpha": 32.0}),
        (train(alpha=16, rank=64), None, {}),
        (train(alpha=32, rank=256, use_rslora=True), None, {}),
        (train(alpha=512, rank=256, use_rslora=True), None, {"train.alpha": 32.0}),
        (train(learning_rate=1e-2), None, {"train.learning_rate": 2e-4}),
        (train(learning_rate=2e-5), None, {"train.learning_rate": 2e-4}),
        (train(learning_rate=5e-4), None, {}),
        (train(loraplus_lr_ratio=16), None, {}),
        (train(loraplus_lr_ratio=1000), None, {"train.loraplus_lr_ratio": 16.0}),
        (train(optimizer="paged_adamw_8bit"), None, {"train.optimizer": "adamw"}),
        (train(rank=4096, alpha=4096), None, {}),
        (train(rank=5000, alpha=5000), None, {"train.rank": 4096, "train.alpha": 4096.0}),
        (Settings(prepare=Prepare(max_tokens=9000)), None, {"prepare.max_tokens": 4096}),
        (train(batching="packed", pack_tokens=128), None, {"train.pack_tokens": 256}),
        (train(), card_of(rows=600), {"train.batch_size": 16}),
        (train(), card_of(rows=300), {"train.batch_size": 16, "train.epochs": 4.0}),
        (train(batch_size=16, epochs=4), card_of(rows=100), {}),
        (train(batching="packed"), card_of(), {}),
        (train(batching="packed", batch_size=64), card_of(), {"train.batch_size": 32}),
        (train(batching="packed"), card_of(rows=300), {"train.batch_size": 2, "train.epochs": 4.0}),
        (train(epochs=50), card_of(), {"train.epochs": 4.0}),
        (train(epochs=50, early_stopping=EarlyStoppingSettings(patience=3)), card_of(), {}),
        (train(rank=1, alpha=2), card_of(trained=9_000_000), {"train.rank": 4, "train.alpha": 8.0}),
        (train(rank=1, alpha=2), card_of(trained=1_000_000), {}),
        (train(), card_of(dropped={"too_long": DroppedRows(count=5000, examples=())}), {"prepare.max_tokens": 512}),
        (train(), card_of(dropped={"too_long": DroppedRows(count=100, examples=())}), {}),
    ],
    ids=lambda value: "" if not isinstance(value, dict) else ",".join(value) or "silent",
)
def test_rules_apply_only_outside_the_known_range(
    settings: Settings, data: DatasetCard | None, expected: dict[str, Any], seven: ModelSpec
) -> None:
    assert asked(settings, seven, data) == expected


def test_the_rate_follows_the_size_of_the_model() -> None:
    small = plan_of(hidden_size=256, intermediate_size=512, num_hidden_layers=3, vocab_size=2048)
    assert asked(train(learning_rate=2e-3), small) == {}, "found best for such a base"
    assert asked(train(learning_rate=2e-5), small) == {"train.learning_rate": 0.002}
    large = plan_of(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64)
    assert asked(train(learning_rate=1e-3), large) == {"train.learning_rate": 1e-4}


def test_an_adapter_gets_as_many_parameters_as_answer_tokens(seven: ModelSpec) -> None:
    settings = train(rank=2, alpha=4)
    found = asked(settings, seven, card_of(trained=30_000_000))
    changed = params_file.apply_changes(settings, found).train
    assert parameters.count_trainable_parameters(seven, settings.train) < 30_000_000
    assert 30_000_000 <= parameters.count_trainable_parameters(seven, changed) < 60_000_000
    assert changed.alpha / changed.rank == 2


def test_rows_are_grouped_by_length_if_padding_is_large(seven: ModelSpec) -> None:
    spread = card_of().lengths["train"].model_copy(update={"histogram": {32: 16_000, 1024: 4_000}})
    data = card_of(lengths={"train": spread})
    few = Machine(micro_batch_size=16)
    assert asked(Settings(machine=few), seven, data) == {"train.batching": "by_length"}
    assert asked(Settings(machine=Machine(micro_batch_size=1)), seven, data) == {}, "one row at a time fills nothing"


def test_a_key_that_two_rules_change_is_proposed_once_with_both_reasons() -> None:
    changes = [
        RecommendedChange({"train.rank": 64, "train.alpha": 128.0}, "first", "a"),
        RecommendedChange({"train.rank": 32}, "second", "b"),
        RecommendedChange({"train.epochs": 3.0}, "back to what it was", "c"),
    ]
    found = {one.key: one for one in recommendations.merge_into_proposals(Settings(), changes)}
    assert set(found) == {"train.rank", "train.alpha"}
    assert (found["train.rank"].before, found["train.rank"].value) == (16, 32)
    assert (found["train.rank"].reason, found["train.rank"].source) == ("first; second", "a; b")


# ------------------------------------------------------------------------------------------------------------- memory


Needed = Callable[..., int]


@pytest.fixture(scope="module")
def needed() -> Needed:
    """Compute real forecasts for a small model that mostly needs memory for activations; cache them for all tests."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    small = plan_of(num_hidden_layers=4, vocab_size=512, **shape)
    known: dict[str, int] = {}

    def peak(settings: Settings, changes: dict[str, Any] | None = None) -> int:
        settings = params_file.apply_changes(settings, changes or {})
        length, rows = settings.prepare.max_tokens, settings.machine.micro_batch_size
        work = MemoryWorkload(rows, length, length // 2, False, "cuda", rows, length, length // 2)
        if (key := settings.model_dump_json()) not in known:
            known[key] = forecast.forecast(small, settings.train, settings.machine, work).peak.total_bytes
        return known[key]

    return peak


LONG = Settings(prepare=Prepare(max_tokens=2048), machine=Machine(micro_batch_size=8))
ROWS, CHECKPOINTING = "machine.micro_batch_size", "machine.activation_checkpointing"


def fitted(
    needed: Needed, settings: Settings, available_bytes: int
) -> tuple[recommendations.MemoryFit, dict[str, Any]]:
    found = recommendations.fit_to_memory(
        settings, "cuda", MemoryConstraint(available_bytes, needed, settings.prepare.max_tokens)
    )
    return found, {key: value for change in found.changes for key, value in change.values.items()}


def test_what_fits_and_uses_the_memory_is_left_alone(needed: Needed) -> None:
    settings = params_file.apply_changes(LONG, {ROWS: 32})
    count = needed(settings)
    assert fitted(needed, settings, count)[0] == recommendations.MemoryFit(count, (), count, fits=True)


@pytest.mark.parametrize(
    ("before", "proposed"),
    [
        ({}, {ROWS: 2}),
        ({}, {ROWS: 2, CHECKPOINTING: True}),
        (
            {"train.quantization": "none", "train.initialization": "pissa", CHECKPOINTING: True},
            {"train.quantization": "nf4", "train.initialization": "zero", ROWS: 1},
        ),
        ({"train.optimizer": "adamw_8bit", CHECKPOINTING: True}, {ROWS: 1, "prepare.max_tokens": 512}),
    ],
    ids=["fewer rows first", "then activations twice, as many rows as fit", "then four bits", "at last shorter rows"],
)
def test_changes_are_proposed_in_order(before: dict[str, Any], proposed: dict[str, Any], needed: Needed) -> None:
    settings = params_file.apply_changes(LONG, before)
    least = needed(settings, proposed)
    found, values = fitted(
        needed, settings, int(least / recommendations.MEMORY_SHARE) + 10
    )  # the margin is kept, with little to spare
    assert values == proposed
    assert (found.fits, found.needed_bytes, found.reduced_bytes) == (True, needed(settings), least)


def test_a_need_that_no_change_reduces_is_reported(needed: Needed) -> None:
    found, values = fitted(needed, LONG, 100 * MIB)
    assert (found.fits, values) == (False, {})
    assert found.reduced_bytes > 100 * MIB


def test_a_gpu_with_spare_memory_computes_more_rows_without_checkpointing(needed: Needed) -> None:
    settings = params_file.apply_changes(LONG, {CHECKPOINTING: True})
    found, values = fitted(needed, settings, 80 * GIB)
    assert values == {CHECKPOINTING: False, ROWS: Train().batch_size}
    assert found.reduced_bytes == needed(settings, values)


# --------------------------------------------------------------------------------------------------------------- 4 bits


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_work_for_widths_that_models_have(kind: str) -> None:
    assert device.find_four_bit_fault(torch.device("cpu"), [64, 576, 896, 4096, 11008], kind) is None


def test_a_device_that_bitsandbytes_does_not_support_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # Bitsandbytes caches the first device's table for the process.
    monkeypatch.setattr("bitsandbytes.functional.name2qmap", {})
    fault = device.find_four_bit_fault(torch.device("meta"), [64], "nf4")
    assert fault is not None
    assert "meta" in fault


def test_matrices_that_are_read_back_wrongly_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitsandbytes import functional

    right = functional.dequantize_4bit
    monkeypatch.setattr(functional, "dequantize_4bit", lambda *args: right(*args).roll(1, dims=0))
    fault = device.find_four_bit_fault(torch.device("cpu"), [128], "nf4")
    assert fault is not None
    assert "128 inputs wrongly" in fault


# ------------------------------------------------------------------------------------------------------- several ranks


def rung(ranks: int, settings: Settings = LONG) -> list[str]:
    """Return the proposed keys, in order, for a case in which only sharing the base helps."""

    def needed(tried: Settings) -> int:
        return 100 * MIB if tried.machine.shard_base is True else 300 * MIB

    found = recommendations.fit_to_memory(settings, "cuda", MemoryConstraint(200 * MIB, needed, 2048, ranks))
    return [key for change in found.changes for key in change.values]


def test_sharding_is_recommended_before_quantization() -> None:
    assert rung(4) == [CHECKPOINTING, "machine.shard_base"]
    assert rung(1) == [], "one rank has no other to share with"
    dora = params_file.apply_changes(LONG, {"train.adapter": "dora"})
    assert "machine.shard_base" not in rung(4, dora), "peft cannot"
