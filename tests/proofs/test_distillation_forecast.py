"""Proves that the memory forecast covers a training with a teacher."""

from distilled_project_cases import (
    project,  # noqa: F401 (a fixture)
    reference,  # noqa: F401 (a fixture)
    with_one,  # noqa: F401 (a fixture)
)
from ratchet.runs.directory import find_newest_run
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.training import MemoryForecast

PACKAGES = ("training", "models")


def test_what_it_takes_was_foreseen(reference: tuple[ProjectLayout, dict[str, str]]) -> None:
    layout, _ = reference
    parts = MemoryForecast.load(find_newest_run(layout.runs).forecast).phase_memory("steady").parts
    held = sum(path.stat().st_size for path in (layout.root / "teacher").glob("*.safetensors"))
    assert 0.9 * held < parts["teacher"] < 1.3 * held
