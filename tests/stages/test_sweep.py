"""Tests of `ratchet sweep`: stop and resume of a real sweep, refused search spaces, and `--report` and `--adopt`."""

import json
import os
import signal
from typing import Any

import pytest

import logged_points
import ratchet
import tiny_project
import tiny_sweep
from ratchet.cli.main import main
from ratchet.config.sweep import PrunerSettings, SweepParameter
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout
from sweep_cases import (
    begin_slow,
    of_mlflow,
    project,  # noqa: F401 (a fixture)
    request,
    stop_worker,
    template,  # noqa: F401 (a fixture)
)


def test_a_stopped_sweep_seals_its_trial_and_continues_with_it(project: ProjectLayout) -> None:
    wanted = tiny_sweep.settings(trials=1, pruner=PrunerSettings(kind="none"))
    changed = {"loggers": ("mlflow", "json_lines"), "replica": "/a/folder/that/is/not/there"}  # no replica of trials
    machine = wanted.machine.model_copy(update=changed)
    tiny_project.save(project, wanted.model_copy(update={"machine": machine}))
    sweep = tiny_sweep.begin(project)
    tiny_sweep.until(lambda: tiny_sweep.steps_done(project.runs) > 2, sweep)
    sweep.send_signal(signal.SIGTERM)
    output, _ = sweep.communicate(timeout=tiny_sweep.DEADLINE_S)
    assert sweep.returncode == 75, output
    assert "run it again to resume" in output
    assert output.count("trials are not copied there") == 1
    assert not tiny_sweep.processes_of(str(project.root))
    [trial] = tiny_sweep.report(project).trials
    assert trial.state == "running"
    assert of_mlflow(project, "select status from runs where name = 'sweep'") == [("KILLED",)]
    steps = tiny_sweep.steps_done(project.runs)
    done = tiny_project.ratchet(project, "sweep")
    assert done.returncode == 0, done.stderr
    first = tiny_sweep.report(project).trials[0]
    assert (first.state, first.run_id, len(first.executions)) == ("complete", trial.run_id, 2)
    events = list(JournalReader(project.runs / str(trial.run_id) / "journal.jsonl").read())
    [restart] = [event for event in events if event.kind == "worker_ready" and event.attempt == 2]
    assert restart.data["start_step"] == steps, "it did not go on from where it was stopped"
    run = RunPaths(project.runs / str(trial.run_id))
    assert logged_points.read("json_lines", run) == logged_points.read_mlflow(project, run)
    logged = json.loads((run.loggers / "json_lines" / "run.json").read_bytes())
    assert (logged["name"], logged["group"]) == ("trial 0", "sweep")


@pytest.mark.long
def test_a_request_has_its_effect_once_although_the_worker_is_killed_before(project: ProjectLayout) -> None:
    sweep = begin_slow(project, trials=2)
    [worker] = tiny_sweep.processes_of(f"ratchet.tuning.sweep_worker {project.root}")
    stop_worker(project, worker)  # it cannot read the requests
    opened = ratchet.Project(project.root)
    assert ratchet.control_trial(opened, "stop", 0).trial.decision == "stopped"
    assert ratchet.control_trial(opened, "clone", 0, {"train.learning_rate": 0.2}).request.by
    os.kill(worker, signal.SIGKILL)
    output, _ = sweep.communicate(timeout=tiny_sweep.DEADLINE_S)
    assert sweep.returncode == 0, output
    report = tiny_sweep.report(project)
    assert [trial.state for trial in report.trials] == ["pruned", "complete", "complete"]
    stopped, clone, other = report.trials
    assert (stopped.cause, stopped.decision, len(stopped.executions)) == ("stopped", "stopped", 2)
    assert stopped.reason.startswith("stopped by ")
    assert 0 < stopped.cost.steps < stopped.cost.planned_steps
    assert stopped.checkpoints
    journal = JournalReader(project.runs / str(stopped.run_id) / "journal.jsonl")
    assert sum(event.kind == "attempt_started" for event in journal.read()) == 1, "it was trained after the request"
    assert clone.values == {**stopped.values, "train.learning_rate": 0.2}  # outside of the space
    assert (clone.request, other.request) == (report.requests[1], None)
    assert report.planned_trials == 3
    tags = dict(of_mlflow(project, "select key, value from tags join runs using (run_uuid) where name = 'trial 1'"))
    assert tags["ratchet.trial_clone"].startswith("clone of trial 0 of study sweep, requested by ")
    assert tags["ratchet.trial_commands"] == "ratchet sweep --clone 1 --set KEY=VALUE"
    assert "is complete; expected" in request(project, "--stop", "1", code=2)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"space": {"train.learnin_rate": SweepParameter(low=1, high=2)}},
            ["sweep.space.train.learnin_rate", "learning_rate"],
        ),
        ({"space": {"machine.threads": SweepParameter(low=1, high=2)}}, ["sweep.space.machine.threads", "machine"]),
        (
            {"space": {"prepare.max_tokens": SweepParameter(low=8, high=9)}},
            ["sweep.space.prepare.max_tokens", "prepare"],
        ),
    ],
)
def test_an_invalid_space_is_refused_before_anything_is_trained(
    project: ProjectLayout, change: dict[str, Any], says: list[str], calm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_project.save(project, tiny_sweep.settings(**change))
    assert main(["--project", str(project.root), "sweep"]) == 2
    message = capsys.readouterr().err
    assert all(text in message for text in says), message
    assert "Traceback" not in message
    assert not project.runs.exists()


def test_a_file_in_place_of_the_runs_is_refused_before_anything_is_trained(
    project: ProjectLayout, calm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_project.save(project, tiny_sweep.settings())
    project.runs.write_bytes(b"")
    assert main(["--project", str(project.root), "sweep"]) == 2
    assert "move the file away that is in the place of a directory" in capsys.readouterr().err
    assert not project.sweeps.exists()


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (("--report", "--workers", "3"), "--workers: found with --report, which starts no trials; give it to a"),
        (("--adopt", "--fork"), "--fork: found with --adopt"),
        (("--stop", "0", "--engine", "ray"), "--engine: found with --stop"),
        (("--clone", "0", "--warm", "--chaos", "1"), "--chaos: found with --clone"),
    ],
)
def test_options_of_a_search_are_refused_where_no_trial_starts(
    project: ProjectLayout, options: tuple[str, ...], refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--project", str(project.root), "sweep", *options]) == 2
    assert refused in capsys.readouterr().err


def test_report_and_adopt_start_no_study(
    project: ProjectLayout, calm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for asked in ("--report", "--adopt"):
        assert main(["--project", str(project.root), "sweep", asked]) == 2
        assert "no study sweep" in capsys.readouterr().err
    assert not project.runs.exists()
