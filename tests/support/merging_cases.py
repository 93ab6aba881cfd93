"""Merging shard by shard writes the trained model bit for bit, for every kind of model."""

from pathlib import Path
from typing import Any

import torch

import plain_merge
import small_bases as small
from ratchet.exporters.merge import merger
from ratchet.models import loading

ROUNDING = 1e-4
"""Greatest difference of a logit that float32 sums in another order may make."""


def check(wanted: Any, directory: Path) -> merger.MergeResult:
    """Check that the written model has the bits of a merge in memory, and computes as base + adapter, not as base."""
    found, tensors, model = small.merge(wanted, directory)
    live = small.trained(wanted)
    plain = None
    if wanted.merge_base == "original":
        plain = loading.load_plain(wanted.base, torch.float32, small.CPU)
    for name, expected in plain_merge.merged(live, plain).items():
        assert torch.equal(tensors[name], expected), name
    assert found.is_streamed
    logits = small.logits(model)
    if plain is None:
        assert (small.logits(live) - logits).abs().max() <= ROUNDING
    with live.disable_adapter():
        assert (small.logits(live) - logits).abs().max() > 100 * ROUNDING
    return found
