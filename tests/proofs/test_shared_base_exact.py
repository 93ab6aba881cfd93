"""Proves rows R9, R14 and R19 for a base that ranks share: sharing changes only the memory."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

import tiny_project
from fork_server import fork_server_context
from ports import free_port
from rank_projects import (
    EVEN,
    PATIENCE_S,
    SLOW,
    STEPS,
    batches,
    events,
    project,
    report,
    settings,
    start,
    train,
    wait_until,
)
from ratchet.config.train import Train
from ratchet.models import adapters, loading
from ratchet.runs.fault_injection.injection import InjectedFault
from ratchet.storage.layout import ProjectLayout
from ratchet.training import analysis, sharding
from ratchet.training.distributed import RankEnvironment, RankGroup
from ratchet.training.train_state import TrainState

PACKAGES = ("training", "models")
PLAIN = tiny_project.TRAIN.model_copy(update={"quantization": "none"})


def shared(train: Train = tiny_project.TRAIN, **machine: Any) -> Any:
    return settings(train, gpus=2, shard_base=True, **machine)


def whole(prepared: Path, root: Path, chosen: Train, **machine: Any) -> ProjectLayout:
    """Run the same training on two ranks that each hold the whole base."""
    layout = project(prepared, root, settings(chosen, gpus=2, shard_base=False, **machine))
    train(layout)
    return layout


@pytest.fixture(scope="module")
def pair(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    return whole(prepared, tmp_path_factory.mktemp("pair") / "project", tiny_project.TRAIN)


@pytest.mark.parametrize(
    ("chosen", "machine"),
    [
        (tiny_project.TRAIN, {}),
        (tiny_project.TRAIN.model_copy(update={"dropout": 0.0}), {}),  # layers have another backward pass
        (PLAIN, {"activation_checkpointing": True}),
        # Two ranks process five rows per step in micro-batches of two rows, so one rank has more work than the other.
        (tiny_project.TRAIN.model_copy(update={"batch_size": 5}), {"micro_batch_size": 2}),
        (PLAIN.model_copy(update={"adapter": "dora"}), {}),
        (PLAIN.model_copy(update={"initialization": "pissa"}), {}),
    ],
)
def test_the_adapter_is_the_same_bit_for_bit(
    prepared: Path, tmp_path: Path, chosen: Train, machine: dict[str, Any]
) -> None:
    apart = whole(prepared, tmp_path / "apart", chosen, **machine)
    layout = project(prepared, tmp_path / "shared", shared(chosen, **machine))
    assert "2 ranks, which share the base" in train(layout)
    assert events(layout, "worker_ready")[-1].data["shares_base"] is True
    assert events(apart, "worker_ready")[-1].data["shares_base"] is False
    assert report(layout).adapter_digest == report(apart).adapter_digest
    assert report(layout).validation_loss == report(apart).validation_loss
    assert (layout.train / "analysis.json").read_bytes() == (apart.train / "analysis.json").read_bytes()


@pytest.mark.parametrize("kind", ["die", "freeze"])
def test_a_rank_that_is_killed_or_stopped_in_the_middle_costs_nothing_but_time(
    prepared: Path, tmp_path: Path, pair: ProjectLayout, kind: Any
) -> None:
    layout = project(prepared, tmp_path / "project", shared(stall_timeout_s=3, checkpoint_every=4))
    train(layout, [InjectedFault(kind=kind, step=9, rank=1, mark=str(tmp_path / "struck"))])
    assert (tmp_path / "struck").exists()
    assert report(layout).adapter_digest == report(pair).adapter_digest
    assert [event.data["failure_class"] for event in events(layout, "worker_exited")] == [
        "killed" if kind == "die" else "stalled"
    ]


def test_memory_that_one_rank_lacks_begins_the_step_again_on_all(prepared: Path, tmp_path: Path) -> None:
    layout = project(prepared, tmp_path / "project", shared())
    train(layout, [InjectedFault(kind="memory", step=5, steps=1, tokens=60, rank=1)])
    told = [event.data for event in events(layout, "microbatch_budget") if event.data["action"] == "shrink"]
    assert {one["step"] for one in told} == {5}
    assert told[0]["rank"] == 1
    assert events(layout, "worker_ready")[-1].data["start_step"] == 4, "what was done is sealed before all begin again"
    assert report(layout).steps == STEPS


def test_a_run_goes_on_with_another_number_of_ranks(prepared: Path, tmp_path: Path, pair: ProjectLayout) -> None:
    """The run uses two ranks that share the base, then one rank with the whole base, then three ranks that share it. A
    checkpoint is independent of the number of ranks."""
    layout = project(prepared, tmp_path / "project", shared(checkpoint_every=1000))
    for machine in ({"gpus": 1}, {"gpus": 3, "shard_base": True}):
        begun = len(events(layout, "step"))
        process = start(layout, [SLOW])
        wait_until(lambda: len(events(layout, "step")) > begun + 3, process)  # noqa: B023 (called at once)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=PATIENCE_S)[1]
        assert process.returncode == 75, said
        tiny_project.save(layout, settings(tiny_project.TRAIN, **machine))
    train(layout)
    assert [event.data["ranks"] for event in events(layout, "worker_ready")] == [2, 1, 3]
    assert batches(layout) == batches(pair)
    assert report(layout).steps == STEPS
    assert report(layout).validation_loss == pytest.approx(report(pair).validation_loss, rel=2e-2)


def test_dora_on_four_bits_is_refused(prepared: Path, tmp_path: Path) -> None:
    chosen = tiny_project.TRAIN.model_copy(update={"adapter": "dora"})
    process = start(project(prepared, tmp_path / "project", shared(chosen)))
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 2, said
    assert "machine.shard_base" in said
    assert "dora" in said


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a mixture-of-experts model that stores its experts in one tensor."""
    path = tmp_path_factory.mktemp("mixture")
    config = MixtralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize(("kind", "world"), [("tiny", 2), ("tiny", 3), ("mixture", 2)])
@pytest.mark.parametrize("quantization", ["nf4", "none"])
def test_each_rank_keeps_its_share(prepared: Path, mixture: Path, kind: str, world: int, quantization: str) -> None:
    base = mixture if kind == "mixture" else ProjectLayout(prepared).base / "model"
    port = free_port()
    with fork_server_context().Pool(world) as pool:
        asked = [pool.apply_async(_beside, (rank, world, port, base, quantization)) for rank in range(world)]
        found = [one.get(PATIENCE_S) for one in asked]
    assert sum(one.kept for one in found) == found[0].total, "together they have all of it, each part once"
    for one in found:
        assert one.kept < 1.1 * one.total / world
        assert one.kept_between == one.kept, "what was gathered is let go"
        assert one.shared == one.whole == found[0].whole


@dataclass(frozen=True)
class Found:
    """Measurements of one rank."""

    total: int
    """Bytes of the frozen matrices of all layers."""
    kept: int
    """Bytes of these matrices that the rank keeps."""
    kept_between: int
    """Bytes that the rank keeps after two passes."""
    whole: tuple[float, ...]
    """Results of a model that is not shared: a loss, its gradient, and the frozen weights."""
    shared: tuple[float, ...]


def _beside(rank: int, world: int, port: int, base: Path, quantization: str) -> Found:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    ranks = RankGroup(RankEnvironment(rank, world, rank, world), cpu, lambda: None, 60)
    chosen = EVEN.model_copy(update={"quantization": quantization})

    def model() -> Any:
        return adapters.attach(loading.load(base, None, chosen, cpu), chosen, "0" * 64)

    whole, shared = model(), model()
    frozen = [one for one in whole.get_base_model().get_decoder().layers.parameters() if not one.requires_grad]
    ranks.run_in_turns(lambda: sharding.shard_base(shared, ranks, cpu))
    kept = _kept_bytes(shared)
    computed = [_computed(one) for one in (whole, shared)]
    between = _kept_bytes(shared)
    dist.destroy_process_group()
    return Found(sum(one.nbytes for one in frozen if one.ndim > 1), kept, between, *computed)


def _kept_bytes(model: Any) -> int:
    """Return the bytes of the shared matrices that this rank keeps."""
    return sum(one.to_local().nbytes for one in model.parameters() if hasattr(one, "to_local"))


def _computed(model: Any) -> tuple[float, ...]:
    for _ in range(2):
        loss = model(input_ids=torch.arange(5).unsqueeze(0)).logits.float().logsumexp(-1).sum()
        loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for _, parameter in adapters.trainable_parameters(model)])
    found = analysis.analyse(model, TrainState(), EVEN)
    return (float(loss), float(gradient.double().sum()), *(one.weight_norm for one in found.modules.values()))
