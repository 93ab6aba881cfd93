"""Proves that a training is planned for the available memory before it begins: with smaller batches, recomputed
activations or a base that ranks share, or by a refusal."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from initial_memory_plan_cases import (
    LONG,
    MACHINE,
    SHARED,
    SHORT,
    SIZE,
    TRAIN,
    Room,
    asked,
    begun_with,
    notices,
    room,  # noqa: F401 (a fixture)
    wide,  # noqa: F401 (a fixture)
)
from ratchet.config.machine import Machine
from ratchet.errors import SettingsError
from ratchet.models import model_spec
from ratchet.models.memory import forecast
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.model_spec import ModelSpec
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import Journal, JournalReader
from ratchet.storage.records.training import MemoryForecast
from ratchet.training import memory_monitor
from ratchet.training.memory_monitor import InitialMemoryPlan
from small_loop import SHAPE

PACKAGES = ("training", "models")
Needs = Callable[[Machine, MemoryWorkload], int]


@pytest.fixture(scope="module")
def deep() -> ModelSpec:
    """Create the spec of a model with so many layers that their stored activations exceed the memory for recomputing
    one layer."""
    return model_spec.from_config(transformers.LlamaConfig(**SHAPE | SIZE | {"num_hidden_layers": 12}))


FRUGAL = MACHINE.model_copy(update={"activation_checkpointing": True})


def between(base: ModelSpec, plain: Machine, frugal: Machine) -> int:
    """Return an amount of memory in which one row fits only if its activations are recomputed."""
    needed = [forecast.forecast(base, TRAIN, one, LONG.single_row()).peak.total_bytes for one in (frugal, plain)]
    assert needed[0] < 0.97 * needed[1]
    return sum(needed) // 2


def test_activations_are_recomputed_when_not_one_row_would_fit(tmp_path: Path, deep: ModelSpec, room: Room) -> None:
    room(between(deep, MACHINE, FRUGAL))
    begun = begun_with(tmp_path, deep, work=LONG)
    assert begun.recompute
    assert MemoryForecast.load(RunPaths(tmp_path).forecast).activation_checkpointing, "what will be held is kept"
    texts = [event.data["text"] for event in JournalReader(tmp_path / "journal.jsonl").read() if event.kind == "notice"]
    assert "a single row would not fit" in texts[0]
    assert begun_with(tmp_path, deep, work=LONG) == begun, "an attempt after it begins alike"


def test_who_wants_none_recomputed_is_refused(tmp_path: Path, deep: ModelSpec, room: Room) -> None:
    room(between(deep, MACHINE, FRUGAL))
    never = MACHINE.model_copy(update={"activation_checkpointing": False})
    with pytest.raises(SettingsError, match=r"machine\.activation_checkpointing: true"):
        asked(tmp_path, deep, never, LONG)


LONGER = replace(SHORT, row_tokens=4096)
BOTH = FRUGAL.model_copy(update={"shard_base": True})


@pytest.fixture(scope="module")
def needs(wide: ModelSpec) -> Needs:
    known: dict[tuple[str, MemoryWorkload], int] = {}

    def peak(machine: Machine, work: MemoryWorkload) -> int:
        key = machine.model_dump_json(), work
        if key not in known:
            known[key] = forecast.forecast(wide, TRAIN, machine, work).peak.total_bytes
        return known[key]

    return peak


def test_where_recomputing_does_it_nothing_is_shared(tmp_path: Path, wide: ModelSpec, room: Room, needs: Needs) -> None:
    assert needs(SHARED, LONGER) < needs(MACHINE, LONGER)
    room(max(needs(FRUGAL, LONGER), needs(SHARED, LONGER)))
    begun = begun_with(tmp_path, wide, work=LONGER)
    assert begun == InitialMemoryPlan(recompute=True)


def test_the_base_is_shared_where_recomputing_does_not_do(
    tmp_path: Path, wide: ModelSpec, room: Room, needs: Needs
) -> None:
    shared, frugal = needs(SHARED, SHORT), needs(FRUGAL, SHORT)
    assert shared < frugal
    room((shared + frugal) // 2)
    begun = begun_with(tmp_path, wide, work=SHORT)
    assert begun == InitialMemoryPlan(shard_base=True)
    kept = MemoryForecast.load(RunPaths(tmp_path).forecast)
    assert (kept.shard_base, kept.activation_checkpointing, kept.ranks) == (True, False, 4)
    assert "the base is sharded among 4 ranks, so its layers are sent" in notices(tmp_path)[0]
    assert begun_with(tmp_path, wide, work=SHORT) == begun, "an attempt after it begins alike"
    assert len(notices(tmp_path)) == 1


def test_where_neither_does_it_alone_both_are_done(tmp_path: Path, wide: ModelSpec, room: Room, needs: Needs) -> None:
    both, either = needs(BOTH, LONGER), min(needs(FRUGAL, LONGER), needs(SHARED, LONGER))
    assert both < either
    room((both + either) // 2)
    assert begun_with(tmp_path, wide, work=LONGER) == InitialMemoryPlan(recompute=True, shard_base=True)
    assert "recomputed" in notices(tmp_path)[0]
    assert "sharded" in notices(tmp_path)[0]


def test_one_rank_has_nobody_to_share_with(tmp_path: Path, wide: ModelSpec, room: Room, needs: Needs) -> None:
    room(needs(SHARED, SHORT))
    with pytest.raises(
        SettingsError, match=r"2 ranks \(machine\.gpus, machine\.nodes\) with machine\.shard_base: true"
    ):
        begun_with(tmp_path, wide, work=replace(SHORT, ranks=1))


def test_who_wants_nothing_shared_is_refused(tmp_path: Path, wide: ModelSpec, room: Room, needs: Needs) -> None:
    room(needs(SHARED, SHORT))
    never = MACHINE.model_copy(update={"shard_base": False})
    with pytest.raises(SettingsError, match=r"machine\.shard_base: true \("):
        begun_with(tmp_path, wide, never, SHORT)


def test_what_cannot_be_shared_is_not(tmp_path: Path, wide: ModelSpec, room: Room, needs: Needs) -> None:
    dora = TRAIN.model_copy(update={"adapter": "dora", "quantization": "nf4"})
    kept = MACHINE.model_copy(update={"activation_checkpointing": False})
    shared = kept.model_copy(update={"shard_base": True})
    needed = [forecast.forecast(wide, dora, machine, SHORT).peak.total_bytes for machine in (shared, kept)]
    assert needed[0] < needed[1]
    room(sum(needed) // 2)
    journal = Journal(tmp_path / "journal.jsonl", 1)
    with pytest.raises(SettingsError, match="even with one row at a time") as refused:
        memory_monitor.require_memory(RunPaths(tmp_path), wide, dora, kept, SHORT, journal)
    journal.close()
    assert "shard_base" not in str(refused.value)
