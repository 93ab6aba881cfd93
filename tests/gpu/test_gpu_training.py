"""Tests on a GPU: the training loop, kills, memory, loss scaling and ranks."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import group_cases
import rank_projects
import small_loop
import tiny_project
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.errors import InterruptedRunError
from ratchet.models import oom
from ratchet.runs.directory import RunPaths
from ratchet.runs.fault_injection.injection import FaultInjector, InjectedFault
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout
from resume_cases import train_with_kills
from tiny_project import outcome

KILLS = {"cuda": 12, "cpu": 1}
EPOCHS_KILLED = {"cuda": 40, "cpu": 2}
"""Enough steps for all kills: a GPU computes several while a test notices one."""
WIDE = {"hidden_size": 1024, "intermediate_size": 1024, "layers": 1, "heads": 8}
LIMIT_BYTES = 2**25
"""Memory that a step may use in the test of memory that runs out; its largest micro-batch needs several times this."""


def settings(device: torch.device, train: dict[str, Any] | None = None, **machine: Any) -> Settings:
    """Return settings of a project whose matrices are large enough for paged 8-bit states (100,000 elements)."""
    base = tiny_project.SETTINGS.base.model_copy(update={"tiny": tiny_project.TINY.model_copy(update=WIDE)})
    optimizer = "paged_adamw_8bit" if device.type == "cuda" else "adamw_8bit"
    chosen = Train(
        **tiny_project.TRAIN.model_dump() | {"rank": 128, "alpha": 128, "optimizer": optimizer} | (train or {})
    )
    known = tiny_project.MACHINE.model_copy(update={"device": device.type, "max_restarts": 20} | machine)
    return tiny_project.SETTINGS.model_copy(update={"base": base, "train": chosen, "machine": known})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path, device: torch.device) -> ProjectLayout:
    layout = tiny_project.prepared(tmp_path_factory.mktemp("gpu") / "project", settings(device))
    shutil.copyfile(mlflow_template, layout.mlflow_database)
    return layout


def copy(project: ProjectLayout, root: Path, chosen: Settings) -> ProjectLayout:
    shutil.copytree(project.root, root)
    tiny_project.save(ProjectLayout(root), chosen)
    return ProjectLayout(root)


def test_kills_change_nothing_in_4_bits_with_paged_states(
    project: ProjectLayout, tmp_path: Path, device: torch.device
) -> None:
    """Row R28: the bytes of the result are those of a run that was not killed."""
    chosen = settings(device, {"epochs": EPOCHS_KILLED[device.type]})
    whole, killed = (copy(project, tmp_path / name, chosen) for name in ("whole", "killed"))
    done = tiny_project.ratchet(whole, "train")
    assert done.returncode == 0, done.stderr
    train_with_kills(killed, KILLS[device.type], random.Random(7))
    assert outcome(killed) == outcome(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"batching": "packed"}, {"adapter": "dora"}, {"adapter": "adalora", "adalora": {"target_rank": 2}},
        {"initialization": "pissa"}, {"objective": "kto"}, {"optimizer": "adamw_8bit"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "plain",
)  # fmt: skip
def test_a_resumed_loop_is_exact(changes: dict[str, Any], tmp_path: Path, device: torch.device) -> None:
    train = Train(**small_loop.SMALL.model_dump() | {"epochs": 1.5} | changes)
    torch.use_deterministic_algorithms(True)
    try:
        whole = small_loop.loop_of(tmp_path / "whole", train, device=device)
        whole.run()
        part = RunPaths(tmp_path / "part")
        with pytest.raises(InterruptedRunError):
            small_loop.loop_of(part.root, train, small_loop.after_steps(part, 3), device=device).run()
        resumed = small_loop.loop_of(part.root, train, device=device)
        resumed.run()
    finally:
        torch.use_deterministic_algorithms(False)
    expected = small_loop.trained_by(whole)
    assert small_loop.losses(part) == small_loop.losses(RunPaths(tmp_path / "whole"))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in small_loop.trained_by(resumed).items())


def test_memory_that_runs_out_divides_micro_batches(tmp_path: Path, device: torch.device, record: Any) -> None:
    shape = small_loop.SHAPE | {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    train = small_loop.SMALL.model_copy(update={"epochs": 1, "batch_size": 24, "dropout": 0.0})

    def loop(name: str, **more: Any) -> Any:
        return small_loop.loop_of(
            tmp_path / name, train, micro=24, config=transformers.LlamaConfig(**shape), device=device, **more
        )

    loop("whole").run()
    oom.release_memory()
    limited = loop("limited", faults=_memory_faults(device))
    if device.type == "cuda":
        used, total = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction((used + LIMIT_BYTES) / total, device)
    try:
        limited.run()
    finally:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, device)
    events = [e for e in JournalReader(RunPaths(tmp_path / "limited").journal).read() if e.kind == "microbatch_budget"]
    expected, found = (small_loop.losses(RunPaths(tmp_path / name)) for name in ("whole", "limited"))
    record(shrunk=len(events), failed_tokens=[e.data["failed_tokens"] for e in events])
    assert events
    assert found == pytest.approx(expected, rel=1e-3)


def _memory_faults(device: torch.device) -> FaultInjector:
    """Return the injected errors of a CPU, whose memory a test must not exhaust; a GPU raises its own."""
    fault = InjectedFault(kind="memory", phase="train", tokens=200)
    return FaultInjector(() if device.type == "cuda" else (fault,))


def test_an_overflow_in_float16_halves_the_scale(tmp_path: Path, device: torch.device) -> None:
    scaled = small_loop.loop_of(tmp_path, small_loop.SMALL, initial_loss_scale=2.0**126, device=device)
    scaled.run()
    halved = [e for e in JournalReader(RunPaths(tmp_path).journal).read() if e.kind == "loss_scale"]
    assert halved
    assert scaled.state.loss_scale == 2.0 ** (126 - len(halved))


def test_nan_is_noticed_and_rolled_back(tmp_path: Path, device: torch.device) -> None:
    guards = {"on_non_finite": "roll_back", "snapshot_every_steps": 3}
    train = Train(**small_loop.SMALL.model_dump() | {"guards": guards, "epochs": 1.5})
    faults = FaultInjector((InjectedFault(kind="non_finite", step=8, times=0),))
    loop = small_loop.loop_of(tmp_path, train, faults=faults, device=device)
    loop.run()
    skipped = [e for e in JournalReader(RunPaths(tmp_path).journal).read() if e.kind == "step_skipped"]
    assert [event.data["action"] for event in skipped] == ["roll_back"]
    assert all(bool(tensor.isfinite().all()) for tensor in small_loop.trained_by(loop).values())


def test_paged_states_are_paged_after_a_resume(device: torch.device, only_gpu: None) -> None:
    import bitsandbytes

    from ratchet.training import optimizer

    parameter = torch.nn.Parameter(torch.randn(512, 512, device=device))
    own = bitsandbytes.optim.PagedAdamW8bit([parameter])
    parameter.grad = torch.randn_like(parameter)
    own.step()
    tensors, values = optimizer.flatten_state(own)
    saved = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    again = bitsandbytes.optim.PagedAdamW8bit([parameter])
    optimizer.restore(again, saved, values)
    state = again.state[parameter]
    assert state["state1"].is_paged and state["state2"].is_paged
    restored = optimizer.flatten_state(again)[0]
    assert all(torch.equal(restored[name].cpu(), tensor) for name, tensor in saved.items())


def test_runs_of_a_group_learn_what_each_learns_alone(
    project: ProjectLayout, tmp_path: Path, device: torch.device, record: Any
) -> None:
    """They share passes of one base, so only rounding differs."""
    chosen = group_cases.trains(rank=[4, 16], learning_rate=[0.01, 0.003], dropout=[0.1, 0.0], epochs=[0.5, 0.5])
    machine = tiny_project.MACHINE.model_copy(update={"device": device.type})

    def train(name: str, settings: list[Train]) -> list[list[float]]:
        layout = copy(project, tmp_path / name, tiny_project.SETTINGS)
        with group_cases.members(layout, settings, [machine] * len(settings)) as runs:
            assert set(group_cases.train_in_threads(runs, tmp_path / f"{name}.json")) == {0}
            return [group_cases.validation_losses(run.paths) for run in runs]

    try:
        together = train("together", chosen)
        alone = [train(f"alone {number}", [one])[0] for number, one in enumerate(chosen)]
    finally:
        torch.use_deterministic_algorithms(False)
    pairs = [pair for run in zip(together, alone, strict=True) for pair in zip(*run, strict=True)]
    record(largest_difference=max(abs(found - expected) for found, expected in pairs))
    assert [found for found, _ in pairs] == pytest.approx([expected for _, expected in pairs], rel=1e-2)


@pytest.mark.parametrize("shared", [False, True], ids=["DDP", "sharded base"])
def test_two_ranks_learn_what_one_learns(
    shared: bool, project: ProjectLayout, tmp_path: Path, device: torch.device, only_gpu: None
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    train = {"dropout": 0.0}
    one = copy(project, tmp_path / "one", settings(device, train, gpus=1))
    two = copy(project, tmp_path / "two", settings(device, train, gpus=2, shard_base=shared))
    for layout in (one, two):
        rank_projects.train(layout)
    losses = [[e.data["loss"] for e in rank_projects.events(layout, "step")] for layout in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
