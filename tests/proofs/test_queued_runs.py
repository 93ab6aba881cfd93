"""Proves that a job of a killed worker is taken by another worker, here or on another machine, and resumes exactly."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import postgres
import ratchet
import tiny_project
from ratchet.errors import EXIT_INTERRUPTED
from ratchet.runs.job_queue import Job
from ratchet.runs.journal import JournalReader
from ratchet.stages.submit import read_queue, submit
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from resume_cases import steps_after, wait_for

PACKAGES = ("runs", "stages")
CHANGES = {"train.rank": 2, "train.epochs": 20, "prepare.sources": ["data/raw/rows.csv"]}
"""The jobs have other data than the project, and are long enough to be killed before they end, also on a slow
machine."""
LEASE = {"lease_timeout_s": 3.0}


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    with postgres.serve() as started:
        yield started


def make_machine(root: Path, **machine: object) -> ProjectLayout:
    settings = tiny_project.SETTINGS
    settings = settings.model_copy(update={"machine": settings.machine.model_copy(update=LEASE | machine)})
    return tiny_project.prepared(root, settings)


def start_worker(layout: ProjectLayout, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        tiny_project.command("work", *options), cwd=layout.root, env=tiny_project.environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def result_digests(layout: ProjectLayout, job: Job) -> dict[str, str]:
    """Return the SHA-256 of all files of the job's result."""
    result = layout.runs / str(job.run_id) / "result"
    paths = [path for path in sorted(result.rglob("*")) if path.is_file() and path.name != "manifest.json"]
    return {str(path.relative_to(result)): digests.hash_file(path) for path in paths}


def start_steps(layout: ProjectLayout, job: Job) -> list[int]:
    """Return the step after which each attempt of the run began."""
    journal = JournalReader(layout.runs / str(job.run_id) / "journal.jsonl")
    return [event.data["start_step"] for event in journal.read() if event.kind == "worker_ready"]


def the_job(layout: ProjectLayout) -> Job:
    [job] = read_queue(ratchet.Project(layout.root)).jobs
    return job


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the result of a job that no worker left."""
    layout = make_machine(tmp_path_factory.mktemp("reference") / "project")
    submit(ratchet.Project(layout.root), CHANGES)
    done = tiny_project.ratchet(layout, "work", "--exit-when-idle")
    assert "1 job done" in done.stdout, done.stdout + done.stderr
    found = result_digests(layout, the_job(layout))
    assert "adapter/adapter_model.safetensors" in found
    return found


def test_a_job_runs_in_its_workspace_and_its_run_is_in_the_project(tmp_path: Path) -> None:
    layout = tiny_project.prepared(tmp_path / "project")
    before = {path: path.stat().st_mtime_ns for path in (layout.base_card, layout.dataset_card)}
    project = ratchet.Project(layout.root)
    submit(project, {"train.rank": 2, "train.epochs": 1, "prepare.sources": ["data/raw/rows.csv"]})
    submit(project, {"train.epochs": 1, "prepare.sources": ["data/raw/missing.csv"]}, max_attempts=1)
    done = tiny_project.ratchet(layout, "work", "--exit-when-idle", "--on-idle", "touch 'was idle'")
    assert done.returncode == 0, done.stderr + done.stdout
    assert (layout.root / "was idle").exists()
    assert "1 job done, failed attempts at 2" in done.stdout
    first, second = sorted(read_queue(project).jobs, key=lambda job: job.id)
    assert (first.state, first.attempts) == ("done", 1)
    assert [run.name for run in layout.runs.iterdir()] == [first.run_id]
    spec = json.loads((layout.runs / str(first.run_id) / "spec.json").read_bytes())
    assert spec["train"]["rank"] == 2
    assert (second.state, second.run_id) == ("failed", None)
    assert second.note.startswith("base: data/raw/missing.csv: no such file")
    assert second.note.endswith("(experiments/queue/job-2.log)")
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not layout.train.exists()
    assert sorted(path.name for path in layout.queue.iterdir() if "db" not in path.name) == ["job-1.log", "job-2.log"]


def test_a_killed_worker_and_a_stopped_one_lose_nothing(tmp_path: Path, reference: dict[str, str]) -> None:
    layout = make_machine(tmp_path / "project")
    submit(ratchet.Project(layout.root), CHANGES)
    killed = start_worker(layout)
    assert wait_for(layout, killed, steps_after(2))
    killed.kill()  # the kernel sends SIGTERM to its stage, which saves a checkpoint and ends
    killed.communicate()
    stopped = start_worker(layout)
    assert wait_for(layout, stopped, steps_after(5))
    os.kill(stopped.pid, signal.SIGTERM)
    output, _ = stopped.communicate()
    assert stopped.returncode == EXIT_INTERRUPTED, output
    job = the_job(layout)
    assert (job.state, job.attempts) == ("waiting", 1), "the killed attempt counts, the stopped one does not"
    last = tiny_project.ratchet(layout, "work", "--exit-when-idle")
    assert "1 job done" in last.stdout, last.stdout + last.stderr
    assert result_digests(layout, the_job(layout)) == reference
    first, second, third = start_steps(layout, the_job(layout))
    assert 0 == first < second < third
    assert len(list(layout.runs.iterdir())) == 1


def test_another_machine_takes_the_job_of_a_lost_machine(
    tmp_path: Path, server: postgres.Server, reference: dict[str, str]
) -> None:
    shared = {"study_storage": server.database(), "replica": str(tmp_path / "replica"), "replica_interval_s": 0.2}
    first, second = (make_machine(tmp_path / name, **shared) for name in ("first", "second"))
    submit(ratchet.Project(first.root), CHANGES)
    lost = start_worker(first)
    assert wait_for(first, lost, lambda found: sum(event.kind == "replicated" for event in found) > 1)
    session = subprocess.run(["ps", "-o", "pid=", "--ppid", str(lost.pid)], capture_output=True, text=True, check=True)
    family = [lost.pid, *map(int, session.stdout.split())]
    for pid in family:  # with its stage, and the supervisor takes its own worker along
        os.kill(pid, signal.SIGKILL)
    lost.communicate()
    done = tiny_project.ratchet(second, "work", "--exit-when-idle", "3")
    assert "1 job done" in done.stdout, done.stdout + done.stderr
    job = the_job(second)
    assert (job.state, job.attempts) == ("done", 2)
    assert result_digests(second, job) == reference
    assert start_steps(second, job)[-1] > 0, "the checkpoint in the replica"
