"""Tests the memory forecast: exact calculations, and extrapolation to long models against a full trace."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import families
from forecast_cases import CPU, GPU, find_largest_sizes, llama, of
from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.errors import SettingsError
from ratchet.models import adapters, loading, model_spec
from ratchet.models.memory import forecast, meta_model
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.models.memory.parameters import list_unique_tensors
from ratchet.storage.records.training import PHASES
from ratchet.training import optimizer

GIB = 2**30
FRUGAL = Machine(activation_checkpointing=True)


def test_blocks_that_differ_by_their_adapters_do_not_stand_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = {r"model\.layers\.4\.mlp\.up_proj": 16}
    short = of("llama", layers=6, rank_pattern=pattern)
    monkeypatch.setitem(meta_model.PERIODS_OF_SHORT_AND_LONG, "cuda", (98, 99))
    whole = of("llama", layers=6, rank_pattern=pattern)
    assert short.phases == whole.phases != of("llama", layers=6).phases


@pytest.mark.parametrize(
    ("shape", "learn", "parameters", "limit"),
    [
        ((4096, 11_008, 32), 39_976_960, 6_738_415_616, 10),
        ((5120, 13_824, 40), 62_586_880, 13_015_864_320, 18),
    ],
    ids=["7B", "13B"],
)
def test_qlora_of_2048_tokens_fits_where_it_is_known_to(
    shape: tuple[int, int, int], learn: int, parameters: int, limit: int
) -> None:
    """The expected numbers of parameters are those of Llama 2's authors and of peft."""
    work = MemoryWorkload(1, 2048, 2047, False, "cuda", 1, 2048, 2047)
    found = forecast.forecast(llama(*shape), Train(rank=16), FRUGAL, work)
    assert (found.trainable_parameters, found.total_parameters) == (learn, parameters + learn)
    stored = found.phase_memory("adapters").parts
    assert stored["weights"] + stored["quantization constants"] > 0.53 * found.total_parameters  # plus embeddings
    assert found.phase_memory("loaded").total_bytes < found.peak.total_bytes < limit * GIB
    assert found.peak.phase == "steady"


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("rank", [2, 48])
def test_weights_adapters_and_optimizer_are_those_that_torch_holds(rank: int, kind: Any, tmp_path: Any) -> None:
    """The tensors have 48 x 128 elements, more than bitsandbytes keeps in 32 bits."""
    families.make("llama", hidden_size=128, intermediate_size=128).save_pretrained(tmp_path)
    settings = Train(rank=rank, optimizer=kind, compute_dtype="float32")
    base = loading.load(tmp_path, None, settings, torch.device("cpu"))
    weights = sum(rounded(tensor) for tensor in list_unique_tensors(base))
    model = adapters.attach(base, settings, "digest")
    parameters = [parameter for _, parameter in adapters.trainable_parameters(model)]
    own = optimizer.build(model, settings, torch.device("cpu"))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    own.step()
    found = forecast.forecast(model_spec.load(tmp_path), settings, Machine(), CPU).phase_memory("steady").parts
    assert found["weights"] + found["quantization constants"] == weights
    assert found["adapters"] == sum(map(rounded, parameters))
    names = ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
    states = [tensor for state in own.state.values() for name, tensor in state.items() if name in names]
    assert found["optimizer"] == sum(map(rounded, states)) > 0


def rounded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64


def test_phases_come_in_order_and_hold_what_they_should() -> None:
    found = of("llama", CPU)
    assert tuple(one.phase for one in found.phases) == PHASES
    assert set(found.phase_memory("baseline").parts) == {"libraries"}
    assert {"weights", "quantization constants", "adapters"} < set(found.phase_memory("adapters").parts)
    assert "optimizer" not in found.phase_memory("first_step").parts
    assert {"optimizer", "snapshots", "gradients"} < set(found.phase_memory("steady").parts)
    assert "gradients" not in found.phase_memory("evaluation").parts
    assert found.host_bytes == found.peak.total_bytes
    assert found.phase_memory("first_step").total_bytes <= found.phase_memory("steady").total_bytes


def test_a_gpu_has_a_context_no_snapshots_and_notes_on_assumptions() -> None:
    found = of("llama", GPU)
    assert set(found.phase_memory("baseline").parts) == {"CUDA context"}
    assert "snapshots" not in found.phase_memory("steady").parts
    assert found.host_bytes > 0
    assert any("CUDA context" in note for note in found.notes)


def test_more_work_needs_more_and_frugal_settings_less() -> None:
    long = replace(GPU, rows=4, row_tokens=1024, learned_tokens=1000)

    def peak(work: MemoryWorkload = long, machine: Machine | None = None, **train: Any) -> int:
        return of("llama", work, machine, layers=4, **train).peak.total_bytes

    most = peak()
    assert most < peak(replace(long, rows=8))
    assert most < peak(replace(long, row_tokens=2048))
    assert most < peak(rank=16)
    assert most < peak(attention="eager")
    assert most < peak(adapter="dora")
    assert most > peak(machine=FRUGAL)


@pytest.mark.parametrize(("kind", "times"), [("lora", 1), ("dora", 1), ("adalora", 4)])
@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_every_adapter_has_a_forecast(kind: Any, times: int, quantization: Any) -> None:
    found = of("llama", CPU, adapter=kind, quantization=quantization, rank=8, adalora={"target_rank": 4})
    adapters = found.phase_memory("adapters").parts["adapters"]
    assert adapters == pytest.approx(times * found.trainable_parameters * 4, rel=0.1)


def test_pissa_keeps_what_its_adapters_began_as() -> None:
    plain, pissa = (of("llama", CPU, quantization="none", initialization=begin) for begin in ("zero", "pissa"))
    assert pissa.phase_memory("adapters").parts["adapters"] == 2 * plain.phase_memory("adapters").parts["adapters"]


def test_settings_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"train\.target_modules: qproj"):
        of("llama", target_modules=("qproj",))
    with pytest.raises(SettingsError, match=r"train\.rank: 64"):
        of("llama", rank=64)


def test_where_nothing_fits_nothing_is_the_largest() -> None:
    plan = model_spec.from_config(families.FAMILIES["llama"]())
    assert find_largest_sizes(plan, Train(rank=2), Machine(), GPU, 1) == forecast.LargestFittingSizes(None, None, None)
    everything = find_largest_sizes(plan, Train(rank=2, batch_size=8), Machine(), GPU, 2**40)
    assert everything == forecast.LargestFittingSizes(8, families.POSITIONS, families.HIDDEN // 2)


# ------------------------------------------------------------------------------------------------------- several ranks


def test_a_rank_computes_its_part_of_a_step_and_no_more() -> None:
    work = MemoryWorkload(8, 48, 24, packed=False, device="cuda")
    assert [work.on_ranks(ranks, 1, 16).rows for ranks in (1, 2, 3, 16, 17)] == [8, 8, 6, 1, 1]


def test_gradients_are_counted_at_the_start_only_with_several_micro_batches_per_rank() -> None:
    plan = model_spec.from_config(families.FAMILIES["llama"](max_position_embeddings=2048))

    def gradients(ranks: int) -> int:
        work = MemoryWorkload(2, 1024, 512, packed=False, device="cuda", ranks=ranks)
        parts = forecast.forecast(plan, Train(rank=4, batch_size=8), Machine(), work).phase_memory("first_step").parts
        assert parts["activations"] > 0, "the peak is in the middle of the step"
        return parts.get("gradients", 0)

    assert gradients(1) == gradients(2) > gradients(4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_learns_is_known_in_its_order_also_of_layers_that_are_left_out(family: str) -> None:
    settings = Train(rank=4, rank_pattern={r"layers\.(0|3)\.mlp\.up_proj": 8} if family == "gemma2" else {})
    plan = model_spec.from_config(families.FAMILIES[family](num_hidden_layers=11))
    # For CPUs, models of so few layers are traced completely.
    few, all_layers = (meta_model.build(plan, settings, torch.float32, device) for device in ("cuda", "cpu"))  # type: ignore[arg-type]
    assert [one.shape for one in few.trainable_parameters()] == [one.shape for one in all_layers.trainable_parameters()]
