"""Cases for `ratchet chaos`: real trainings under real faults, and the table of their results."""

from collections import Counter
from dataclasses import replace

import pytest

import tiny_project
from ratchet.runs.fault_injection.outcome import FaultTrialTimeline
from ratchet.runs.fault_injection.plan import FaultTrial
from ratchet.stages.chaos import FaultTrialResult
from ratchet.storage.layout import ProjectLayout


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    return tiny_project.prepared(tmp_path_factory.mktemp("chaos") / "my project")


def quiet(text: str) -> None:
    """Ignore the message."""


def result(trial: FaultTrial, **changes: object) -> FaultTrialResult:
    seen = FaultTrialTimeline(
        attempts=[[0.0, 4.0], [4.5, 9.0]], steps=[(3.0, 1), (3.5, 2), (8.0, 2), (8.5, 3)], checkpoints=[(3.6, 2)],
        marks=[(4.0, "kill worker")], recoveries_s=[4.0], lost_steps=[1], kinds=Counter(step=4), delivered=1,
    )  # fmt: skip
    return replace(FaultTrialResult(trial, (), (), seen, 9.0, None), **changes)  # type: ignore[arg-type]
