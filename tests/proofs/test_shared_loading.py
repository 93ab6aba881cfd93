"""Proves that ranks of one machine load a base without needing its memory several times."""

from ratchet.config import Machine
from ratchet.records_model import UNSHARDED
from shared_base_cases import (
    LAYERS,
    SHARED,
    found,
    sizes,
)

PACKAGES = ("model",)


def test_on_a_cpu_it_is_loaded_whole_by_one_rank_at_a_time() -> None:
    apart, shared = found(Machine(), 4, "cpu"), found(SHARED, 4, "cpu")
    whole, own = sizes(4, "none")
    parts = shared.of("loaded").parts
    assert parts[UNSHARDED] == LAYERS * (whole - own)
    assert parts["weights"] + parts[UNSHARDED] == apart.of("loaded").parts["weights"]
    assert UNSHARDED not in shared.of("first_step").parts
    loaded = shared.of("loaded").total_bytes
    assert shared.peak.phase == "loaded"
    assert shared.needed_bytes(1) == loaded
    assert shared.needed_bytes(4) == max(
        loaded - parts[UNSHARDED] + parts[UNSHARDED] // 4, *(one.total_bytes for one in shared.phases[3:])
    )


def test_nothing_is_shared_by_one_rank_and_auto_is_taken_for_false() -> None:
    assert found(SHARED, 1).phases == found(Machine(), 1).phases == found(Machine(shard_base=False), 1).phases
    assert found(Machine(), 2).phases == found(Machine(shard_base=False), 2).phases
