"""Every kind of adapter in the training loop: learns, and goes on after an interruption as if there had been none."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import snapshots
from ratchet.config_train import Train
from ratchet.errors import DamagedError, InterruptedRunError, SettingsError
from ratchet.model import adapter, quantized
from ratchet.run.directory import RunPaths
from ratchet.run.journal import Journal
from ratchet.training import checkpoint, optimizer, snapshot
from ratchet.training.loop import Loop
from ratchet.training.state import Snapshot
from small_loop import SHAPE, SMALL, StopAfterSteps, loop_of, losses

CPU = torch.device("cpu")
GPT2 = {
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "n_positions": 64,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
}
WIDE = SHAPE | {"hidden_size": 64, "intermediate_size": 128}
"""bitsandbytes reads narrower matrices wrongly on some CPUs."""
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**WIDE),
    "tied": lambda: transformers.LlamaConfig(**WIDE, tie_word_embeddings=True),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
}
METHODS: dict[str, dict[str, Any]] = {
    "rslora": {"rank_stabilized": True, "rank_pattern": {r".*\.0\..*": 2}, "alpha": 64, "learning_rate": 0.03},
    "loraplus": {"rate_ratio": 4.0, "weight_decay": 0.1},
    "dora": {"adapter": "dora", "weight_decay": 0.1},
    "pissa": {"initialization": "pissa"},
    "adalora": {
        "adapter": "adalora",
        "rank": 6,
        "alpha": 32,
        "adalora": {"target_rank": 2, "every_steps": 3},
        "learning_rate": 0.05,  # singular values begin at zero, beside small vectors
    },
    "loraplus-8bit": {"rate_ratio": 4.0, "optimizer": "adamw_8bit", "rank": 16},
}


def settings(method: str, quantization: str = "none") -> Train:
    return Train.model_validate(SMALL.model_dump() | METHODS[method] | {"quantization": quantization})


def loop(root: Path, train: Train, family: str, stop: int | None = None, tokens: tuple[int, ...] = ()) -> Loop:
    """A loop as a fresh process makes it; the base in 4 bits if the settings say so."""
    stopping = None if stop is None else StopAfterSteps(RunPaths(root), stop)
    if train.quantization == "none" and not tokens:
        return loop_of(root, train, stopping, config=CONFIGS[family]())
    directory = root.parent / f"base-{family}"
    if not directory.exists():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(CONFIGS[family]()).save_pretrained(directory)
    # The task of another loop, of which no step is done: only its rows, plan and settings are wanted.
    task = loop_of(root.parent / "unused", settings("rslora"), config=CONFIGS["llama"]()).task
    RunPaths(root).checkpoints.mkdir(parents=True, exist_ok=True)
    journal = Journal(RunPaths(root).journal, 1)
    base = quantized.load(directory, None, train, CPU)
    return Loop(
        replace(
            task, spec=task.spec.model_copy(update={"train": train}), paths=RunPaths(root), journal=journal,
            model=adapter.attach(base, train, "base", tokens, task.plan.steps), stop=stopping or task.stop,
        )
    )  # fmt: skip


def state_of(done: Loop) -> Snapshot:
    return snapshot.take(done.state, done.task.model, done.learner.optimizer)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


CASES = [
    ("rslora", "llama", "none"), ("loraplus", "llama", "none"), ("loraplus-8bit", "llama", "none"),
    ("dora", "llama", "nf4"), ("dora", "gpt2", "none"), ("pissa", "tied", "none"), ("pissa", "gpt2", "none"),
    ("adalora", "tied", "nf4"), ("adalora", "llama", "none"), ("adalora", "gpt2", "nf4"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "family", "quantization"), CASES, ids=map("-".join, CASES))
def test_it_learns_and_is_resumed_exactly(tmp_path: Path, method: str, family: str, quantization: str) -> None:
    train = settings(method, quantization)
    whole = loop(tmp_path / "whole", train, family)
    whole.run()
    found = losses(whole.task.paths)
    assert sum(found[-5:]) < sum(found[:5])
    for stop in (11, 9):  # 11 steps: while AdaLoRA cuts ranks; 20: after the last cut
        with pytest.raises(InterruptedRunError):
            loop(tmp_path / "parts", train, family, stop).run()
    parts = loop(tmp_path / "parts", train, family)
    assert parts.state.step == 20
    parts.run()
    assert losses(parts.task.paths) == found
    one, other = state_of(whole), state_of(parts)
    assert snapshots.equal(one, other)
    assert same(one.extra, other.extra)
    assert bool(one.extra) == (method in ("pissa", "adalora"))
    adapter.save(whole.task.model, tmp_path / "a", "base")
    adapter.save(parts.task.model, tmp_path / "b", "base")
    assert snapshots.contents(tmp_path / "a") == snapshots.contents(tmp_path / "b")


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_rows_of_new_tokens_are_resumed_exactly(tmp_path: Path, family: str) -> None:
    train = settings("pissa")
    whole = loop(tmp_path / "a", train, family, tokens=(5, 63))
    whole.run()
    with pytest.raises(InterruptedRunError):
        loop(tmp_path / "b", train, family, 9, (5, 63)).run()
    parts = loop(tmp_path / "b", train, family, tokens=(5, 63))
    parts.run()
    assert snapshots.equal(state_of(whole), state_of(parts))
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"base-{family}")
    for name, ids, rows in adapter.token_rows(parts.task.model):
        assert ids == [5, 63]
        assert (rows - before.get_parameter(name)[ids]).abs().amax(dim=1).min() > 1e-4


def test_a_checkpoint_of_another_kind_of_adapter_is_refused_with_its_place(tmp_path: Path) -> None:
    done = loop(tmp_path / "a", settings("pissa"), "llama")
    done.run()
    model = loop(tmp_path / "b", settings("loraplus"), "llama").task.model
    path = done.task.paths.checkpoint(done.state.step)
    with pytest.raises(DamagedError, match=rf"step-{done.state.step:08d}: holds first matrices of other layers"):
        checkpoint.load_weights(path, model)


# --------------------------------------------------------------------------------------------- groups of the optimizer


def groups(method: str, **changes: Any) -> dict[str, tuple[float, float, float]]:
    """Rate, its ratio and weight decay of what learns, by the part of its name that says what it is."""
    train = Train.model_validate(settings(method).model_dump() | {"weight_decay": 0.1} | changes)
    plain = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    model = adapter.attach(plain, train, "base", [3])
    of = {id(p): (g["lr"], g["rate_ratio"], g["weight_decay"]) for g in made(model, train) for p in g["params"]}
    kinds = ("lora_A", "lora_B", "magnitude", "trainable_tokens", "lora_E")
    found = {(kind, of.pop(id(p))) for name, p in adapter.trainable(model) for kind in kinds if kind in name}
    assert not of
    assert len(found) == len(dict(found))
    return dict(found)


def made(model: Any, train: Train) -> list[dict[str, Any]]:
    built: list[dict[str, Any]] = optimizer.build(model, train, CPU).param_groups
    return built


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_b_learns_faster_and_only_matrices_decay(kind: str) -> None:
    assert groups("dora", rate_ratio=8.0, optimizer=kind) == {
        "lora_A": (0.01, 1.0, 0.1),
        "lora_B": (0.08, 8.0, 0.1),
        "magnitude": (0.01, 1.0, 0.0),
        "trainable_tokens": (0.01, 1.0, 0.0),
    }


def test_without_a_ratio_all_matrices_are_one_group() -> None:
    assert {*groups("adalora").values()} == {(0.05, 1.0, 0.1), (0.05, 1.0, 0.0)}
    plain = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    assert len(made(adapter.attach(plain, SMALL, "base"), SMALL)) == 1


def test_adamw_in_float16_is_refused_for_it_would_divide_by_zero() -> None:
    train = settings("loraplus").model_copy(update={"adapter_dtype": "float16"})
    with pytest.raises(SettingsError, match=r"train\.adapter_dtype: float16, but adamw .* set float32, or optimizer"):
        optimizer.build(torch.nn.Linear(2, 2), train, CPU)
