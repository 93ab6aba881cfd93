"""Tests of the trainer in this process: invariants of batches, micro-batches, validation and early stopping."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
import transformers
from pydantic import ValidationError
from safetensors.torch import load_file

import tiny_project
from ratchet.config.machine import Machine
from ratchet.config.settings import Settings
from ratchet.config.train import EarlyStoppingSettings, Train
from ratchet.data import token_files
from ratchet.errors import EXIT_INPUT, EXIT_OK, InterruptedRunError, SettingsError
from ratchet.models import base_model, loading
from ratchet.models.loss import answer_nll, pad_rows
from ratchet.runs.directory import RunDirectory, RunPaths, TrainingLaunchSpec
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import JournalReader
from ratchet.runs.signals import GracefulShutdown
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.training import TrainReport
from ratchet.training import optimizer
from ratchet.training.run_spec import build_run_spec
from ratchet.training.worker import run_worker
from small_loop import ROWS, SHAPE, SMALL, StopAfterSteps, after_steps, loop_of, losses, random_rows, steps, trained_by

TrainHere = Callable[..., RunPaths]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    return tiny_project.prepared(tmp_path_factory.mktemp("loop") / "project")


@pytest.fixture
def train_here(project: ProjectLayout, tmp_path: Path) -> TrainHere:
    """Return a function that trains in this process with changed settings, checks the exit code, and returns the
    run."""

    def run_it(machine: dict[str, object] | None = None, expected: int = EXIT_OK, **changes: object) -> RunPaths:
        settings = tiny_project.SETTINGS.model_copy(
            update={
                "train": Train.model_validate(tiny_project.TRAIN.model_dump() | changes),
                "machine": Machine.model_validate(tiny_project.MACHINE.model_dump() | (machine or {})),
            }
        )
        run = opened(project, settings, tmp_path / f"runs{len(list(tmp_path.iterdir()))}")
        assert run_worker(run.paths, 1, GracefulShutdown(), Heartbeat(None, 0.0, 0.0)) == expected
        run.close()
        return run.paths

    return run_it


def opened(project: ProjectLayout, settings: Settings, runs: Path) -> RunDirectory:
    base = BaseCard.load(project.base_card)
    run = RunDirectory.open(runs, build_run_spec(project, settings))
    TrainingLaunchSpec(
        machine=settings.machine,
        base_path=str(base_model.locate(project, base)),
        data_path=str(project.data),
        base=base,
    ).save(run.paths.launch)
    return run


def last_weights(run: RunPaths) -> dict[str, torch.Tensor]:
    return dict(load_file(run.result / "checkpoints" / "last" / "trainable.safetensors"))


def test_training_lowers_the_loss_and_touches_nothing_but_the_adapter(
    project: ProjectLayout, train_here: TrainHere
) -> None:
    before = base_model.fingerprint(project.tiny_model)
    run = train_here(epochs=8, rank=32, alpha=64, dropout=0.0)
    found = losses(run)
    assert sum(found[-5:]) < 0.95 * sum(found[:5])
    assert base_model.fingerprint(project.tiny_model) == before


def test_the_micro_batch_changes_memory_and_not_what_is_learned(train_here: TrainHere) -> None:
    whole = losses(train_here(machine={"micro_batch_size": 16}, dropout=0.0))
    split = losses(train_here(machine={"micro_batch_size": 3}, dropout=0.0))
    assert len(whole) == len(split)
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(whole, split, strict=True))


@pytest.mark.long
def test_validating_and_recomputing_activations_do_not_change_what_is_learned(train_here: TrainHere) -> None:
    """Random numbers used by a validation and a repacked 4-bit layout must not affect training."""
    once = last_weights(train_here(validate_every_steps=1000, final_checkpoint="last"))
    for other in (
        train_here(validate_every_steps=1, final_checkpoint="last"),
        train_here(machine={"activation_checkpointing": True}, validate_every_steps=1000, final_checkpoint="last"),
    ):
        found = last_weights(other)
        assert all(torch.equal(once[name], found[name]) for name in once)


def test_early_stopping_counts_validations_without_enough_improvement(train_here: TrainHere) -> None:
    stopping = EarlyStoppingSettings(patience=2, threshold=100.0).model_dump()
    paths = train_here(validate_every_steps=3, early_stopping=stopping)
    report = TrainReport.load(paths.result / "train.json")
    assert report.steps == 9  # the first validation is an improvement; two more do not improve by 100 nats
    losses = {
        event.data["step"]: event.data["loss"]
        for event in JournalReader(paths.journal).read()
        if event.kind == "validation"
    }
    assert list(losses) == [3, 6, 9]
    assert report.kept_step == report.best_step == min(losses, key=lambda step: losses[step]) > 3
    assert report.planned_steps > report.steps


def test_the_adapter_is_that_of_the_best_validation(train_here: TrainHere) -> None:
    run = train_here(validate_every_steps=2, epochs=4, learning_rate=0.2, schedule="constant")
    report = TrainReport.load(run.result / "train.json")
    assert report.validation_loss[report.best_step] == min(report.validation_loss.values())
    best = load_file(run.result / "checkpoints" / "best" / "trainable.safetensors")
    kept = load_file(run.result / "adapter" / "adapter_model.safetensors")
    assert report.kept_step == report.best_step
    assert {t.sum().item() for t in best.values()} == {t.sum().item() for t in kept.values()}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rank": 64}, marks=pytest.mark.long),
        {"optimizer": "adamw_8bit", "rank": 64},  # 64 x 64 elements: large enough for 8-bit optimizer states
        pytest.param({"initialization": "eva"}, marks=pytest.mark.long),
        pytest.param({"initialization": "loftq"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_resumed_run_equals_an_uninterrupted_one(
    train_here: TrainHere, project: ProjectLayout, tmp_path: Path, changes: dict[str, object]
) -> None:
    whole = train_here(**changes)
    train = Train.model_validate(tiny_project.TRAIN.model_dump() | changes)
    run = opened(project, tiny_project.SETTINGS.model_copy(update={"train": train}), tmp_path / "stopped")
    for attempt in range(1, 5):
        run_worker(run.paths, attempt, StopAfterSteps(run.paths, 5), Heartbeat(None, 0.0, 0.0))
    assert run_worker(run.paths, 5, GracefulShutdown(), Heartbeat(None, 0.0, 0.0)) == EXIT_OK
    run.close()
    assert {e.attempt for e in steps(run.paths)} == {1, 2, 3, 4, 5}
    for part in ("trainable", "optimizer"):
        a, b = (load_file(p.result / "checkpoints" / "last" / f"{part}.safetensors") for p in (whole, run.paths))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    assert losses(run.paths) == losses(whole)
    assert (run.paths.result / "train.json").read_bytes() == (whole.result / "train.json").read_bytes()


def failure(run: RunPaths) -> str:
    return next(str(e.data["text"]) for e in JournalReader(run.journal).read() if e.kind == "worker_error")


def test_target_that_the_model_lacks_is_refused_with_those_it_has(train_here: TrainHere) -> None:
    text = failure(train_here(target_modules=["q_prj"], expected=EXIT_INPUT))
    assert "train.target_modules" in text
    assert "q_proj" in text


def test_a_base_that_changed_since_it_was_pinned_is_refused(project: ProjectLayout, tmp_path: Path) -> None:
    run = opened(project, tiny_project.SETTINGS, tmp_path / "runs")
    launch = TrainingLaunchSpec.load(run.paths.launch)
    wrong = launch.base.model_copy(update={"files": launch.base.files | {"config.json": "0" * 64}})
    launch.model_copy(update={"base": wrong}).save(run.paths.launch)
    assert run_worker(run.paths, 1, GracefulShutdown(), Heartbeat(None, 0.0, 0.0)) == EXIT_INPUT
    run.close()
    assert "config.json: changed since the base was pinned" in failure(run.paths)


def test_loss_is_that_of_the_whole_logits(project: ProjectLayout) -> None:
    """Computing logits only at trained positions saves memory and does not change the loss."""
    model = loading.load_plain(project.tiny_model, torch.float32, torch.device("cpu"))
    rows = token_files.open_split(project.data, "train").select(range(5))
    ids = pad_rows(rows["input_ids"][:], 0, model.device)
    labels = pad_rows(rows["labels"][:], -100, model.device)
    with torch.no_grad():
        ours = answer_nll(model, ids, labels)
        logits = model(input_ids=ids).logits[:, :-1]
        theirs = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="none"
        )
    assert torch.allclose(ours.flatten(), theirs, atol=1e-6)
    assert (ours.flatten()[labels[:, 1:].flatten() == -100] == 0).all()


def make_peer(name: str, settings: Train, steps: int, warmup: int) -> list[float]:
    """Return the rates after the warm-up from the scheduler of transformers or torch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=settings.learning_rate)
    left, floor = steps - warmup, settings.final_learning_rate_share
    cooldown = math.ceil(settings.cooldown_ratio * steps)
    scheduler = {
        "cosine": lambda: transformers.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, 0, left, min_lr=floor * settings.learning_rate
        ),
        "linear": lambda: transformers.get_polynomial_decay_schedule_with_warmup(
            optimizer, 0, left, lr_end=floor * settings.learning_rate, power=1.0
        ),
        "polynomial": lambda: transformers.get_polynomial_decay_schedule_with_warmup(
            optimizer, 0, left, lr_end=floor * settings.learning_rate, power=settings.polynomial_power
        ),
        "constant": lambda: transformers.get_constant_schedule(optimizer),
        "exponential": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, floor ** (1 / left)),
        "warmup_stable_decay": lambda: transformers.get_wsd_schedule(
            optimizer, 0, cooldown, num_training_steps=left, decay_type="1-sqrt", min_lr_ratio=floor
        ),
    }[name]()
    rates = []
    for _ in range(left):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("floor", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("name", get_args(Train.model_fields["schedule"].annotation))
def test_learning_rate_warms_up_to_the_peak_and_then_follows_the_schedule_of_transformers(
    name: str, floor: float
) -> None:
    values = {"schedule": name, "final_learning_rate_share": floor, "learning_rate": 0.5, "warmup_ratio": 0.1}
    if name == "exponential" and floor == 0:
        with pytest.raises(ValidationError, match="final_learning_rate_share: found 0, which an exponential decay"):
            Train.model_validate(values)
        return
    settings = Train.model_validate(values)
    rates = [optimizer.compute_learning_rate(step, 100, settings) for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 * (k + 1) for k in range(10)])
    assert rates[10:] == pytest.approx(make_peer(name, settings, 100, 10))
    in_steps = settings.model_copy(update={"warmup_steps": 10, "warmup_ratio": 0.5})
    assert [optimizer.compute_learning_rate(step, 100, in_steps) for step in range(100)] == rates


def test_a_warm_up_or_cooldown_longer_than_the_training_is_cut() -> None:
    settings = Train(learning_rate=1.0, schedule="warmup_stable_decay", warmup_steps=8, cooldown_ratio=1.0)
    rates = [optimizer.compute_learning_rate(step, 10, settings) for step in range(10)]
    assert rates == pytest.approx([*(k / 8 for k in range(1, 9)), 1.0, 1 - math.sqrt(0.5)])
    assert optimizer.compute_learning_rate(3, 5, settings) == 0.5


def test_validations_may_come_after_a_share_of_an_epoch(tmp_path: Path) -> None:
    train = SMALL.model_copy(update={"validate_every_epochs": 0.5, "epochs": 2.0, "dropout": 0.0})
    loop = loop_of(tmp_path / "share", train)
    loop.run()
    assert list(loop.state.validation_loss) == [5, 10, 15, 20]  # an epoch has 9.6 steps
    once = loop_of(tmp_path / "once", train.model_copy(update={"validate_every_epochs": 7.0}))
    once.run()
    assert list(once.state.validation_loss) == [20]
    assert losses(once.context.paths) == losses(loop.context.paths)


def test_paged_optimizer_needs_a_gpu() -> None:
    with pytest.raises(SettingsError, match="needs a GPU"):
        optimizer.build(torch.nn.Linear(2, 2), Train(optimizer="paged_adamw_8bit"), torch.device("cpu"))


# The tests below run the loop without a project, on a small random model and random rows.


@pytest.mark.parametrize("batching", ["shuffled", "by_length", "packed"])
def test_a_loop_that_is_stopped_twice_ends_as_one_that_was_not(batching: str, tmp_path: Path) -> None:
    train = SMALL.model_copy(update={"batching": batching})
    whole = loop_of(tmp_path / "whole", train)
    whole.run()
    paths = RunPaths(tmp_path / "stopped")
    for count in (3, 7):
        with pytest.raises(InterruptedRunError):
            loop_of(paths.root, train, after_steps(paths, count)).run()
    resumed = loop_of(paths.root, train)
    assert resumed.state.step == 7
    assert resumed.run() == whole.state
    assert whole.state.step == whole.plan.steps > 7
    assert losses(paths) == losses(whole.context.paths)
    a, b = trained_by(resumed), trained_by(whole)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_one_step_of_all_rows_is_the_same_for_every_batching(tmp_path: Path) -> None:
    """All batchings give the same loss, gradient norm and token counts."""
    found = {}
    for batching in ("shuffled", "by_length", "packed"):
        train = SMALL.model_copy(update={"batching": batching, "batch_size": ROWS, "epochs": 1.0, "dropout": 0.0})
        loop = loop_of(tmp_path / batching, train)
        assert loop.run().step == 1
        (event,) = steps(loop.context.paths)
        found[batching] = event.data
    for batching in ("by_length", "packed"):
        for name in ("loss", "grad_norm"):
            assert math.isclose(found[batching][name], found["shuffled"][name], rel_tol=1e-4)
    rows = random_rows(ROWS, seed=1)
    assert {data["input_tokens"] for data in found.values()} == {int(rows.lengths.sum())}
    assert {data["trained_tokens"] for data in found.values()} == {rows.count_trained(range(ROWS))}


def test_packs_lose_no_token_and_their_micro_batches_do_not_change_what_is_learned(tmp_path: Path) -> None:
    train = SMALL.model_copy(update={"batching": "packed", "dropout": 0.0, "epochs": 2.0})
    one, all_at_once = (loop_of(tmp_path / str(micro), train, micro=micro) for micro in (1, 16))
    one.run()
    state, rows = all_at_once.run(), all_at_once.context.train_rows
    assert all_at_once.plan.sequences < 0.6 * ROWS
    assert state.input_tokens == 2 * int(rows.lengths.sum())  # padding is not counted
    assert state.trained_tokens == 2 * rows.count_trained(range(ROWS))
    pairs = zip(losses(one.context.paths), losses(all_at_once.context.paths), strict=True)
    assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in pairs)


def test_a_model_that_mixes_the_rows_of_a_pack_learns_nothing(tmp_path: Path) -> None:
    config = transformers.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"], block_multiple_of=16)
    train = SMALL.model_copy(update={"batching": "packed"})
    loop = loop_of(tmp_path / "packed", train, config=config)
    before = trained_by(loop)
    with pytest.raises(SettingsError, match=r"train\.batching: packed, but this model mixes the rows"):
        loop.run()
    assert steps(loop.context.paths) == []
    assert all(torch.equal(before[name], after) for name, after in trained_by(loop).items())
    by_length = loop_of(tmp_path / "by_length", train.model_copy(update={"batching": "by_length"}), config=config)
    assert by_length.run().step == by_length.plan.steps
