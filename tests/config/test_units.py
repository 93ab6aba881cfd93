"""Tests texts of durations and sizes."""

import pytest

from ratchet.config.units import format_bytes, format_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (0.44, "0.4 s"), (3.0, "3 s"), (9.96, "10 s"), (42.2, "42 s"), (59.6, "1 min"), (61, "1 min 1 s"),
     (3599.4, "59 min 59 s"), (3599.6, "1 h"), (11_520, "3 h 12 min"), (100_000, "1 d 3 h"), (190_800, "2 d 5 h")],
)  # fmt: skip
def test_durations_have_at_most_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.00 GiB"),
     (7 << 50, "7,340,032.00 GiB")],
)  # fmt: skip
def test_sizes_are_powers_of_1024(count: int, text: str) -> None:
    assert format_bytes(count) == text
