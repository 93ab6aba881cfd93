"""The shard-by-shard merge writes the trained model bit for bit, for each kind of model."""

from pathlib import Path
from typing import Any

import torch

import plain_merge
import small_bases as small
from ratchet.exporters.merge import merger
from ratchet.models import loading

ROUNDING = 1e-4
"""Largest difference of a logit that a different order of float32 sums may cause."""


def check(wanted: Any, directory: Path) -> merger.MergeResult:
    """Check that the written model equals a merge in memory bit for bit, and that it computes base + adapter rather
    than the base."""
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
