"""Proves that scoring validation rows in a separate process survives failures and interruptions."""

import signal
import subprocess

import pytest

import tiny_project
from ratchet.errors import DamagedFileError
from ratchet.evaluation import validation_scoring
from ratchet.runs.device_lock import DeviceLock
from ratchet.runs.fork_server import ForkServer
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import ValidationJob
from ratchet.tuning import scheduler
from validation_scoring_cases import (
    SETTINGS,
    damage,
    ids,  # noqa: F401 (a fixture)
    launch,
    layout,  # noqa: F401 (a fixture)
    made,  # noqa: F401 (a fixture)
    scorer,
    wait_for,
)

PACKAGES = ("evaluation",)


def test_asking_starts_a_process_once_and_its_failures_come_back_as_they_were(
    layout: ProjectLayout, ids: dict[str, str]
) -> None:
    job = ValidationJob(run_ids=(ids["second"], ids["first"]), metrics=("validation_loss",), rows=6)
    looks: list[int] = []
    with ForkServer() as server:
        found = scheduler.score_runs(layout, SETTINGS, job, server, lambda: looks.append(1), DeviceLock(None))
        assert looks
        assert [one.run_id for one in found] == [ids["second"], ids["first"]]
        assert found == validation_scoring.score_runs(layout, launch([*job.run_ids], rows=6))
        looks.clear()
        assert scheduler.score_runs(layout, SETTINGS, job, server, lambda: looks.append(1), DeviceLock(None)) == found
        assert not looks
        damage(layout, ids["first"])
        with pytest.raises(DamagedFileError, match=r"adapter_model\.safetensors: content differs") as failed:
            scheduler.score_runs(
                layout, SETTINGS, job.model_copy(update={"rows": 7}), server, lambda: None, DeviceLock(None)
            )
    assert "Traceback" not in str(failed.value)


def test_stopped_in_the_midst_it_leaves_nothing_half_written(layout: ProjectLayout, ids: dict[str, str]) -> None:
    asked = launch([*ids.values()], ("token_f1", "validation_loss"), evaluation_batch_size=1)
    with (layout.root / "said").open("wb") as said:
        process = subprocess.Popen(scorer(layout, asked), stdout=said, stderr=said, env=tiny_project.environment())
        wait_for(lambda: list(layout.scores.glob("*.jsonl")) or process.poll() is not None, "the first score")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    assert (layout.root / "said").read_text().splitlines()[-1].startswith("InterruptedRunError: interrupted")
    assert not list(layout.runs.rglob("*validation_scores*"))
