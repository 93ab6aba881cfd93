"""Proves that a training is planned for the memory there is before it begins: smaller batches, recomputed
activations, a base that ranks share, or a refusal.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from estimate_cases import (
    FRUGAL,
    LONG,
    LONGER,
    MACHINE,
    SHARED,
    SHORT,
    SIZE,
    TRAIN,
    Needs,
    Room,
    asked,
    begun_with,
    needs,  # noqa: F401 (a fixture)
    notices,
    room,  # noqa: F401 (a fixture)
    wide,  # noqa: F401 (a fixture)
)
from ratchet.config import Machine
from ratchet.errors import SettingsError
from ratchet.model import blueprint, forecast
from ratchet.model.blueprint import Blueprint
from ratchet.records_model import MemoryForecast
from ratchet.run.directory import RunPaths
from ratchet.run.journal import Journal, Reader
from ratchet.training import estimate
from ratchet.training.estimate import Beginning
from small_loop import SHAPE

PACKAGES = ("training", "model")


@pytest.fixture(scope="module")
def deep() -> Blueprint:
    """With more blocks to be kept than what one of them takes when it is computed again."""
    return blueprint.of_config(transformers.LlamaConfig(**SHAPE | SIZE | {"num_hidden_layers": 12}))


def between(base: Blueprint, plain: Machine, frugal: Machine) -> int:
    """Memory for which one row suffices only if its activations are recomputed."""
    needed = [forecast.forecast(base, TRAIN, one, LONG.single_row()).peak.total_bytes for one in (frugal, plain)]
    assert needed[0] < 0.97 * needed[1]
    return sum(needed) // 2


def test_activations_are_recomputed_when_not_one_row_would_fit(tmp_path: Path, deep: Blueprint, room: Room) -> None:
    room(between(deep, MACHINE, FRUGAL))
    begun = begun_with(tmp_path, deep, work=LONG)
    assert begun.recompute
    assert MemoryForecast.load(RunPaths(tmp_path).forecast).activation_checkpointing, "what will be held is kept"
    texts = [event.data["text"] for event in Reader(tmp_path / "journal.jsonl").read() if event.kind == "notice"]
    assert "not even one row would fit" in texts[0]
    assert begun_with(tmp_path, deep, work=LONG) == begun, "an attempt after it begins alike"


def test_who_wants_none_recomputed_is_refused(tmp_path: Path, deep: Blueprint, room: Room) -> None:
    room(between(deep, MACHINE, FRUGAL))
    never = MACHINE.model_copy(update={"activation_checkpointing": False})
    with pytest.raises(SettingsError, match=r"machine\.activation_checkpointing: true"):
        asked(tmp_path, deep, never, LONG)


BOTH = FRUGAL.model_copy(update={"shard_base": True})


def test_where_neither_does_it_alone_both_are_done(tmp_path: Path, wide: Blueprint, room: Room, needs: Needs) -> None:
    both, either = needs(BOTH, LONGER), min(needs(FRUGAL, LONGER), needs(SHARED, LONGER))
    assert both < either
    room((both + either) // 2)
    assert begun_with(tmp_path, wide, work=LONGER) == Beginning(recompute=True, shard_base=True)
    assert "recomputed" in notices(tmp_path)[0]
    assert "shared" in notices(tmp_path)[0]


def test_one_rank_has_nobody_to_share_with(tmp_path: Path, wide: Blueprint, room: Room, needs: Needs) -> None:
    room(needs(SHARED, SHORT))
    with pytest.raises(
        SettingsError, match=r"2 ranks \(machine\.gpus, machine\.nodes\) with machine\.shard_base: true"
    ):
        begun_with(tmp_path, wide, work=replace(SHORT, ranks=1))


def test_who_wants_nothing_shared_is_refused(tmp_path: Path, wide: Blueprint, room: Room, needs: Needs) -> None:
    room(needs(SHARED, SHORT))
    never = MACHINE.model_copy(update={"shard_base": False})
    with pytest.raises(SettingsError, match=r"machine\.shard_base: true \("):
        begun_with(tmp_path, wide, never, SHORT)


def test_what_cannot_be_shared_is_not(tmp_path: Path, wide: Blueprint, room: Room, needs: Needs) -> None:
    dora = TRAIN.model_copy(update={"adapter": "dora", "quantization": "nf4"})
    kept = MACHINE.model_copy(update={"activation_checkpointing": False})
    shared = kept.model_copy(update={"shard_base": True})
    needed = [forecast.forecast(wide, dora, machine, SHORT).peak.total_bytes for machine in (shared, kept)]
    assert needed[0] < needed[1]
    room(sum(needed) // 2)
    journal = Journal(tmp_path / "journal.jsonl", 1)
    with pytest.raises(SettingsError, match="even with one row at a time") as refused:
        estimate.require_room(RunPaths(tmp_path), wide, dora, kept, SHORT, journal)
    journal.close()
    assert "shard_base" not in str(refused.value)
