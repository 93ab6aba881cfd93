"""Proves that the ranks of one machine load a base without holding it several times in memory."""

from typing import Any, Literal

import pytest
from transformers import LlamaConfig

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.models import model_spec
from ratchet.models.memory import forecast
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.storage.records.training import UNSHARDED, MemoryForecast

PACKAGES = ("models",)
SHARED = Machine(shard_base=True)
HIDDEN, INNER, LAYERS, VOCABULARY = 256, 704, 40, 1000
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=False,
)  # fmt: skip
MATRICES = [(HIDDEN, HIDDEN), (HIDDEN // 2, HIDDEN), (HIDDEN // 2, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN),
            (INNER, HIDDEN), (HIDDEN, INNER)]  # fmt: skip
"""Shapes [outputs, inputs] of a layer's matrices: q, k, v, o, gate, up, down."""
Device = Literal["cpu", "cuda"]


def found(machine: Machine, ranks: int, device: Device = "cuda", **train: Any) -> MemoryForecast:
    settings = Train(**{"rank": 4, "quantization": "none", "compute_dtype": "float32"} | train)
    work = MemoryWorkload(1, 48, 24, packed=False, device=device, validation_rows=1, validation_tokens=48, ranks=ranks)
    return forecast.forecast(model_spec.from_config(CONFIG), settings, machine, work)


def sizes(ranks: int, quantization: str) -> tuple[int, int]:
    """Return the bytes of a layer's matrices and the bytes of one rank's share. The share is rounded up to whole rows,
    or to whole bytes for packed weights."""
    if quantization == "none":
        return sum(4 * o * i for o, i in MATRICES), sum(4 * -(-o // ranks) * i for o, i in MATRICES)
    return sum(o * i // 2 for o, i in MATRICES), sum(-(-o * i // 2 // ranks) for o, i in MATRICES)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_rank_keeps_its_share_of_the_layers_and_three_whole_ones(ranks: int, quantization: Any) -> None:
    apart = found(Machine(shard_base=False), ranks, quantization=quantization)
    shared = found(SHARED, ranks, quantization=quantization)
    whole, own = sizes(ranks, quantization)
    for phase in ("first_step", "steady", "evaluation"):
        before, after = apart.phase_memory(phase).parts, shared.phase_memory(phase).parts
        saved = before["weights"] - after["weights"]
        assert saved == pytest.approx(LAYERS * (whole - own), abs=LAYERS * len(MATRICES) * 512)
        assert after["gathered layers"] == pytest.approx(3 * ranks * own, rel=1e-3)
        same = before.keys() - {"weights"}
        assert {name: after[name] for name in same} == {name: before[name] for name in same}
    assert (shared.shard_base, apart.shard_base) == (True, False)


def test_on_a_gpu_it_is_whole_in_the_memory_of_the_host_only() -> None:
    apart, shared = found(Machine(), 4), found(SHARED, 4)
    whole, own = sizes(4, "none")
    outside = 2 * 4 * VOCABULARY * HIDDEN  # embedding and output layer
    assert set(shared.phase_memory("loaded").parts) == {"CUDA context"}
    assert shared.phase_memory("adapters").parts["weights"] == pytest.approx(LAYERS * own + outside, rel=0.01)
    assert shared.phase_memory("adapters").parts["gathered layers"] == pytest.approx(whole, rel=0.01)
    assert shared.host_bytes - apart.host_bytes > 0.95 * LAYERS * whole


def test_on_a_cpu_it_is_loaded_whole_by_one_rank_at_a_time() -> None:
    apart, shared = found(Machine(), 4, "cpu"), found(SHARED, 4, "cpu")
    whole, own = sizes(4, "none")
    parts = shared.phase_memory("loaded").parts
    assert parts[UNSHARDED] == LAYERS * (whole - own)
    assert parts["weights"] + parts[UNSHARDED] == apart.phase_memory("loaded").parts["weights"]
    assert UNSHARDED not in shared.phase_memory("first_step").parts
    loaded = shared.phase_memory("loaded").total_bytes
    assert shared.peak.phase == "loaded"
    assert shared.needed_bytes(1) == loaded
    assert shared.needed_bytes(4) == max(
        loaded - parts[UNSHARDED] + parts[UNSHARDED] // 4, *(one.total_bytes for one in shared.phases[3:])
    )


def test_nothing_is_shared_by_one_rank_and_auto_is_taken_for_false() -> None:
    assert found(SHARED, 1).phases == found(Machine(), 1).phases == found(Machine(shard_base=False), 1).phases
    assert found(Machine(), 2).phases == found(Machine(shard_base=False), 2).phases


def test_what_travels_is_told() -> None:
    whole, _ = sizes(2, "none")
    text = " ".join(found(SHARED, 2).notes)
    assert f"{LAYERS * whole / 2**20:.1f} MiB of it per micro-batch" in text  # two transfers of half a layer each
