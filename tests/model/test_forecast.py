"""The forecast of a training: exact where arithmetic is, the same for long models as a trace of all their blocks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import families
from forecast_cases import (
    CPU,
    GPU,
    llama,
    of,
)
from ratchet.config import Machine
from ratchet.config_train import Train
from ratchet.errors import SettingsError
from ratchet.model import adapter, blueprint, forecast, largest, quantized, replica
from ratchet.model.forecast import Work
from ratchet.model.storage import tensors_of
from ratchet.records_model import PHASES
from ratchet.training import optimizer

GIB = 2**30
FRUGAL = Machine(activation_checkpointing=True)


def test_blocks_that_differ_by_their_adapters_do_not_stand_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = {r"model\.layers\.4\.mlp\.up_proj": 16}
    short = of("llama", layers=6, rank_pattern=pattern)
    monkeypatch.setitem(replica.SHORT_AND_LONG, "cuda", (98, 99))
    whole = of("llama", layers=6, rank_pattern=pattern)
    assert short.phases == whole.phases != of("llama", layers=6).phases


def test_parameters_of_llama_2_are_those_that_its_paper_and_peft_count() -> None:
    settings = Train(rank=16, targets=("q_proj", "v_proj"))
    found = forecast.forecast(llama(4096, 11_008, 32), settings, FRUGAL, GPU)
    assert (found.trainable_parameters, found.total_parameters) == (8_388_608, 6_746_804_224)


@pytest.mark.parametrize(
    ("shape", "limit"), [((4096, 11_008, 32), 10), ((5120, 13_824, 40), 18)], ids=["7B", "13B"]
)  # fmt: skip
def test_qlora_of_2048_tokens_fits_where_it_is_known_to(shape: tuple[int, int, int], limit: int) -> None:
    work = Work(1, 2048, 2047, False, "cuda", 1, 2048, 2047)
    found = forecast.forecast(llama(*shape), Train(rank=16), FRUGAL, work)
    stored = found.of("adapters").parts
    assert stored["weights"] + stored["constants of quantisation"] > 0.53 * found.total_parameters  # and embeddings
    assert found.of("loaded").total_bytes < found.peak.total_bytes < limit * GIB
    assert found.peak.phase == "steady"


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("rank", [2, 48])
def test_weights_adapters_and_optimizer_are_those_that_torch_holds(rank: int, kind: Any, tmp_path: Any) -> None:
    """48 x 128 elements are more than bitsandbytes keeps in 32 bits."""
    families.make("llama", hidden_size=128, intermediate_size=128).save_pretrained(tmp_path)
    settings = Train(rank=rank, optimizer=kind, compute_dtype="float32")
    base = quantized.load(tmp_path, None, settings, torch.device("cpu"))
    weights = sum(rounded(tensor) for tensor in tensors_of(base))
    model = adapter.attach(base, settings, "digest")
    parameters = [parameter for _, parameter in adapter.trainable(model)]
    own = optimizer.build(model, settings, torch.device("cpu"))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    own.step()
    found = forecast.forecast(blueprint.load(tmp_path), settings, Machine(), CPU).of("steady").parts
    assert found["weights"] + found["constants of quantisation"] == weights
    assert found["adapters"] == sum(map(rounded, parameters))
    states = [
        tensor
        for state in own.state.values()
        for name, tensor in state.items()
        if name in ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
    ]
    assert found["optimizer"] == sum(map(rounded, states)) > 0


def rounded(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64


def test_phases_come_in_order_and_hold_what_they_should() -> None:
    found = of("llama", CPU)
    assert tuple(one.phase for one in found.phases) == PHASES
    assert set(found.of("baseline").parts) == {"libraries"}
    assert {"weights", "constants of quantisation", "adapters"} < set(found.of("adapters").parts)
    assert "optimizer" not in found.of("first_step").parts
    assert {"optimizer", "snapshots", "gradients"} < set(found.of("steady").parts)
    assert "gradients" not in found.of("evaluation").parts
    assert found.host_bytes == found.peak.total_bytes
    assert found.of("first_step").total_bytes <= found.of("steady").total_bytes


def test_a_gpu_has_a_context_and_no_snapshots_and_says_what_was_assumed() -> None:
    found = of("llama", GPU)
    assert set(found.of("baseline").parts) == {"CUDA context"}
    assert "snapshots" not in found.of("steady").parts
    assert found.host_bytes > 0
    assert any("CUDA context" in note for note in found.notes)


def peak(family: str = "llama", work: Work = GPU, machine: Machine | None = None, **train: Any) -> int:
    return of(family, work, machine, **train).peak.total_bytes


def test_more_work_needs_more_and_frugal_settings_less() -> None:
    long = replace(GPU, rows=4, row_tokens=1024, learned_tokens=1000)
    most = peak(work=long, layers=4)
    assert most < peak(work=replace(long, rows=8), layers=4)
    assert most < peak(work=replace(long, row_tokens=2048), layers=4)
    assert most < peak(work=long, layers=4, rank=16)
    assert most < peak(work=long, layers=4, attention="eager")
    assert most < peak(work=long, layers=4, adapter="dora")
    assert most > peak(work=long, layers=4, machine=FRUGAL)


@pytest.mark.parametrize("adapter_kind", ["lora", "dora", "adalora"])
@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_every_adapter_has_a_forecast(adapter_kind: Any, quantization: Any) -> None:
    settings = {"adapter": adapter_kind, "quantization": quantization, "rank": 8, "adalora": {"target_rank": 4}}
    found = of("llama", CPU, **settings)
    learned = found.trainable_parameters * 4
    times = {"lora": 1, "dora": 1, "adalora": 4}[adapter_kind]
    assert found.of("adapters").parts["adapters"] == pytest.approx(times * learned, rel=0.1)


def test_pissa_keeps_what_its_adapters_began_as() -> None:
    plain, pissa = (
        of("llama", CPU, quantization="none", initialization=begin).of("adapters").parts["adapters"]
        for begin in ("zero", "pissa")
    )
    assert pissa == 2 * plain


def test_settings_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"train\.targets: qproj"):
        of("llama", targets=("qproj",))
    with pytest.raises(SettingsError, match=r"train\.rank: 64"):
        of("llama", rank=64)


def test_where_nothing_fits_nothing_is_the_largest() -> None:
    plan = blueprint.of_config(families.FAMILIES["llama"]())
    assert largest.find(plan, Train(rank=2), Machine(), GPU, 1) == largest.Largest(None, None, None)
    everything = largest.find(plan, Train(rank=2, batch_rows=8), Machine(), GPU, 2**40)
    assert everything == largest.Largest(8, families.POSITIONS, families.HIDDEN // 2)
