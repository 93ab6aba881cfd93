"""Proves row R1 for each kind of adapter: the adapter learns, and a resumed training gives the same bytes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import snapshots
from adapters_cases import (
    loop,
    settings,
    state_of,
)
from ratchet.errors import InterruptedRunError
from ratchet.models import adapters
from ratchet.models.base_model import BaseReference
from small_loop import losses

PACKAGES = ("training", "models")


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
    found = losses(whole.context.paths)
    assert sum(found[-5:]) < sum(found[:5])
    for stop in (11, 9):  # at step 11 AdaLoRA still reduces ranks; step 20 is after the last reduction
        with pytest.raises(InterruptedRunError):
            loop(tmp_path / "parts", train, family, stop).run()
    parts = loop(tmp_path / "parts", train, family)
    assert parts.state.step == 20
    parts.run()
    assert losses(parts.context.paths) == found
    one, other = state_of(whole), state_of(parts)
    assert snapshots.equal(one, other)
    assert same(one.adapter_tensors, other.adapter_tensors)
    assert bool(one.adapter_tensors) == (method in ("pissa", "adalora"))
    adapters.save(whole.context.model, tmp_path / "a", BaseReference("base"))
    adapters.save(parts.context.model, tmp_path / "b", BaseReference("base"))
    assert snapshots.contents(tmp_path / "a") == snapshots.contents(tmp_path / "b")
