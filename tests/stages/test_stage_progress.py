"""The long parts of each stage report their progress, and the Python API gives it to `on_progress` only."""

from pathlib import Path

import pytest

import ratchet
import tiny_project
from progress_recorder import ProgressRecorder
from ratchet.config.evaluate import Evaluate
from ratchet.stages import base, evaluate, prepare
from ratchet.stages.project import Project
from ratchet.storage.progress import use_reporter

SETTINGS = tiny_project.SETTINGS.model_copy(update={"evaluate": Evaluate(max_new_tokens=4, latency_rows=2)})


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int | None]]:
    """Run stages and return the last report of each task."""
    layout = tiny_project.write(tmp_path_factory.mktemp("progress") / "project", SETTINGS)
    recorder, project = ProgressRecorder(), Project(layout.root)
    with use_reporter(recorder):
        base.base(project)
        prepare.prepare(project)
        tiny_project.adapted(layout, SETTINGS)
        evaluate.evaluate(project)
    return recorder.last_of()


@pytest.mark.parametrize(
    "task",
    [
        "pre-training", "tensors checked for NaN", "base model checked",
        "base sealed", "rows read", "rows compared", "rows written", "data sealed", "data checked",
        "loading the model", "base: likelihoods", "base: answers", "candidate: likelihoods", "candidate: answers",
        "candidate: label scores", "answers one at a time", "evaluation sealed",
    ],
)  # fmt: skip
def test_a_task_is_reported_until_it_is_complete(task: str, states: dict[str, tuple[int, int | None]]) -> None:
    done, total = states[task]
    assert done == total
    assert done > 0


def test_counts_are_those_of_the_data(states: dict[str, tuple[int, int | None]]) -> None:
    assert states["pre-training"] == (6, 6)
    assert states["rows read"] == states["rows written"] == (240, 240)


def test_the_python_api_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    project = ratchet.Project(tiny_project.write(tmp_path / "project").root)
    lines: list[str] = []
    ratchet.base(project, lines.append)
    ratchet.prepare(project)
    assert [line.partition(":")[0] for line in lines if ", loss" in line] == ["pre-training"]
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""
