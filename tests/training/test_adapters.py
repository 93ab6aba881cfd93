"""Tests of adapters in the training loop: exact resume with new tokens, refused checkpoints, and optimizer groups."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import snapshots
from adapters_cases import (
    CONFIGS,
    CPU,
    loop,
    settings,
    state_of,
)
from ratchet.config.train import Train
from ratchet.errors import DamagedFileError, InterruptedRunError, SettingsError
from ratchet.models import adapters
from ratchet.training import checkpoint, optimizer
from small_loop import SMALL


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
    for name, ids, rows in adapters.token_rows(parts.context.model):
        assert ids == [5, 63]
        assert (rows - before.get_parameter(name)[ids]).abs().amax(dim=1).min() > 1e-4


def test_a_checkpoint_of_another_kind_of_adapter_is_refused_with_its_place(tmp_path: Path) -> None:
    done = loop(tmp_path / "a", settings("pissa"), "llama")
    done.run()
    model = loop(tmp_path / "b", settings("loraplus"), "llama").context.model
    path = done.context.paths.checkpoint(done.state.step)
    with pytest.raises(DamagedFileError, match=rf"step-{done.state.step:08d}: PiSSA matrices belong to other layers"):
        checkpoint.load_weights(path, model)


def groups(method: str, **changes: Any) -> dict[str, tuple[float, float, float]]:
    """Return learning rate, LoRA+ ratio and weight decay of the trainable parameters, by kind of parameter (lora_A,
    lora_B, ...)."""
    train = Train.model_validate(settings(method).model_dump() | {"weight_decay": 0.1} | changes)
    plain = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    model = adapters.attach(plain, train, "base", [3])
    of = {id(p): (g["lr"], g["loraplus_lr_ratio"], g["weight_decay"]) for g in made(model, train) for p in g["params"]}
    kinds = ("lora_A", "lora_B", "magnitude", "trainable_tokens", "lora_E")
    found = {
        (kind, of.pop(id(p))) for name, p in adapters.trainable_parameters(model) for kind in kinds if kind in name
    }
    assert not of
    assert len(found) == len(dict(found))
    return dict(found)


def made(model: Any, train: Train) -> list[dict[str, Any]]:
    built: list[dict[str, Any]] = optimizer.build(model, train, CPU).param_groups
    return built


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_b_learns_faster_and_only_matrices_decay(kind: str) -> None:
    assert groups("dora", loraplus_lr_ratio=8.0, optimizer=kind) == {
        "lora_A": (0.01, 1.0, 0.1),
        "lora_B": (0.08, 8.0, 0.1),
        "magnitude": (0.01, 1.0, 0.0),
        "trainable_tokens": (0.01, 1.0, 0.0),
    }


def test_without_a_ratio_all_matrices_are_one_group() -> None:
    assert {*groups("adalora").values()} == {(0.05, 1.0, 0.1), (0.05, 1.0, 0.0)}
    plain = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    assert len(made(adapters.attach(plain, SMALL, "base"), SMALL)) == 1


def test_adamw_in_float16_is_refused_for_it_would_divide_by_zero() -> None:
    train = settings("loraplus").model_copy(update={"adapter_dtype": "float16"})
    with pytest.raises(
        SettingsError, match=r"train\.adapter_dtype: found float16, but adamw .* set float32, or train\.optimizer"
    ):
        optimizer.build(torch.nn.Linear(2, 2), train, CPU)
