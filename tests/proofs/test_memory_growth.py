"""Proves that memory does not grow during a long training."""

from pathlib import Path

from growth_cases import (
    held_at,
)

PACKAGES = ("training",)


def test_two_thousand_steps_leave_nothing_behind(tmp_path: Path) -> None:
    earlier, later = held_at(tmp_path, (550, 1990))
    assert earlier.leaked(later) == []
