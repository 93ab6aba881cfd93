"""Proves that the memory of a training with a teacher was forecast."""

from ratchet.runs.directory import newest
from ratchet.storage.layout import Layout
from ratchet.storage.records.training import MemoryForecast
from taught_projects_cases import (
    project,  # noqa: F401 (a fixture)
    reference,  # noqa: F401 (a fixture)
    with_one,  # noqa: F401 (a fixture)
)

PACKAGES = ("training", "models")


def test_what_it_takes_was_foreseen(reference: tuple[Layout, dict[str, str]]) -> None:
    layout, _ = reference
    parts = MemoryForecast.load(newest(layout.runs).forecast).of("steady").parts
    held = sum(path.stat().st_size for path in (layout.root / "teacher").glob("*.safetensors"))
    assert 0.9 * held < parts["teacher"] < 1.3 * held
