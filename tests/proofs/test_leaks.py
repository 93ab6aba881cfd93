"""Proves that the proof of memory growth can fail: it detects a leak of one loss per step."""

from pathlib import Path
from typing import Any

import torch

from growth_cases import (
    held_at,
)

PACKAGES = ("training",)


def test_a_leak_of_one_loss_a_step_would_be_found(tmp_path: Path) -> None:
    kept: list[Any] = []
    earlier, later = held_at(tmp_path, (60, 560), lambda step: kept.append([torch.tensor(step["loss"])]))
    assert len(kept) == 561
    assert [text.split()[1] for text in earlier.leaked(later)] == ["tensors", "objects"]
