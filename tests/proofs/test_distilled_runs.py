"""Proves row R1 for distillation: a run with a teacher ends with the same bytes after kills, on one rank and on several
ranks."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

import rank_projects
import tiny_project
import tiny_sweep
from distilled_project_cases import (
    distill_settings,
    project,  # noqa: F401 (a fixture)
    reference,  # noqa: F401 (a fixture)
    told,
    with_one,  # noqa: F401 (a fixture)
    with_teacher,
)
from doctor_cases import examine
from rank_projects import PATIENCE_S, SLOW, events, report, train
from ratchet.config.sweep import PrunerSettings, SweepParameter
from ratchet.runs.directory import find_newest_run
from ratchet.runs.fault_injection.injectors import find_worker
from ratchet.storage.layout import ProjectLayout
from ratchet.tuning import search_space
from tiny_project import outcome

PACKAGES = ("training", "tuning", "models")
KILLS = 2


def test_padding_is_told_once_when_training_begins(project: ProjectLayout) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(project.root / "teacher")
    model.resize_token_embeddings(512, mean_resizing=False)
    model.save_pretrained(project.root / "teacher")
    with_teacher(project)
    train(project)
    assert sum("512 rows (teacher)" in event.data["text"] for event in events(project, "notice")) == 1


def test_temperature_and_top_k_may_be_searched(project: ProjectLayout) -> None:
    assert search_space.find_searchable_setting("train.distill.top_k").kind == "int"
    space = {
        "train.distill.temperature": SweepParameter(low=1.0, high=3.0),
        "train.distill.top_k": SweepParameter(low=2, high=40, log=True),
    }
    chosen = tiny_sweep.settings(space=space, trials=3, pruner=PrunerSettings(kind="none"))
    train = chosen.train.model_copy(update={"distill": distill_settings(top_k=8).distill})
    tiny_project.save(project, chosen.model_copy(update={"train": train}))
    done = tiny_project.ratchet(project, "sweep")
    assert done.returncode == 0, done.stderr
    trials = tiny_sweep.report(project).trials
    assert [trial.state for trial in trials] == ["complete"] * 3
    assert len({trial.adapter_digest for trial in trials}) == 3


def start(layout: ProjectLayout) -> "subprocess.Popen[str]":
    return rank_projects.start(layout, [SLOW])


def steps(layout: ProjectLayout) -> int:
    return len(events(layout, "step"))


@pytest.fixture
def started(project: ProjectLayout) -> Iterator["subprocess.Popen[str]"]:
    with_teacher(project)
    process = start(project)
    yield process
    process.kill()
    process.communicate()


def kill_worker(layout: ProjectLayout, process: "subprocess.Popen[str]") -> None:
    """Kill the worker after one or two more steps."""
    done = steps(layout) + 1
    rank_projects.wait_until(lambda: steps(layout) > done, process)
    pid = find_worker(process.pid, layout.root)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_killed_workers_change_nothing(
    project: ProjectLayout, reference: tuple[ProjectLayout, dict[str, str]], started: "subprocess.Popen[str]"
) -> None:
    for _ in range(KILLS):
        kill_worker(project, started)
    _, complained = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 0, complained
    assert len(events(project, "worker_exited")) == KILLS
    assert outcome(project) == reference[1]
    assert find_newest_run(project.runs).root.name == find_newest_run(reference[0].runs).root.name


def test_a_teacher_that_changes_under_a_run_is_refused_at_its_restart(
    project: ProjectLayout, started: "subprocess.Popen[str]"
) -> None:
    rank_projects.wait_until(lambda: steps(project) > 0, started)
    weights = project.root / "teacher" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    kill_worker(project, started)
    _, complained = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 2
    assert "model.safetensors: changed since the start of this run" in complained


def test_each_rank_has_its_teacher_whether_they_share_the_base_or_not(project: ProjectLayout, tmp_path: Path) -> None:
    apart = ProjectLayout(tmp_path / "apart")
    shutil.copytree(project.root, apart.root)
    for layout, shares in ((project, True), (apart, False)):
        with_teacher(layout, {"gpus": 2, "shard_base": shares})
        train(layout)
        assert events(layout, "worker_ready")[-1].data["shares_base"] is shares
    assert report(project).adapter_digest == report(apart).adapter_digest
    assert report(project).validation_loss == report(apart).validation_loss


def test_distill_computes_nothing_for_an_online_teacher(project: ProjectLayout) -> None:
    settings = with_teacher(project)
    said = told(project, settings)
    assert "runs during training" in said
    assert "nothing to compute now" in said
    assert not project.distill.exists()
    done = tiny_project.ratchet(project, "distill", "--forecast")
    assert done.returncode == 0, done.stderr
    assert "without the teacher" in done.stdout
    with_teacher(project, mode="offline", top_k=8)
    assert tiny_project.ratchet(project, "distill").returncode == 0
    assert "it is not used" in told(project, settings)


def test_forecast_and_doctor_count_it(project: ProjectLayout) -> None:
    with_teacher(project)
    done = tiny_project.ratchet(project, "forecast")
    assert done.returncode == 0, done.stderr
    assert "teacher" in done.stdout.split("in all")[0]
    assert "The teacher runs during training" in done.stdout
    _, text = examine(project, with_teacher(project), None, False)
    assert "so its memory is counted" in text
    shutil.rmtree(project.root / "teacher")
    good, text = examine(project, with_teacher(project), None, False)
    assert (good, "teacher: no such directory" in text) == (False, True)


def cut_weights(project: ProjectLayout) -> None:
    path = project.root / "teacher" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def test_training_says_why_it_is_refused(project: ProjectLayout) -> None:
    cut_weights(project)
    with_teacher(project)
    done = tiny_project.ratchet(project, "train")
    assert done.returncode == 2
    assert "model.safetensors" in done.stderr
