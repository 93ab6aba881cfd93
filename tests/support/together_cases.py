"""Sweeps that train several trials together: real groups, which are killed."""

import os
import signal
from typing import Literal

import tiny_project
import tiny_sweep
from ratchet.config.sweep import FinalistSettings, PrunerSettings
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.training import TrainReport
from sweep_cases import of_mlflow


def group_processes(layout: ProjectLayout) -> list[int]:
    """Return the processes of training groups of a project."""
    with_group = set(tiny_sweep.processes_of("ratchet.training.group_main"))
    return sorted(with_group & set(tiny_sweep.processes_of(str(layout.root))))


def check_sweep_with_kill(
    project: ProjectLayout, victim: Literal["group", "worker"], trials: int, count: int, finalists: int
) -> None:
    """Run a sweep of `count` trials together, kill its group or one of its workers, and check trials and winner."""
    wanted = tiny_sweep.settings(
        trials=trials, concurrent_trials=count, pruner=PrunerSettings(kind="asha", min_resource_fraction=0.25),
        finalists=FinalistSettings(top_k=finalists, seeds=1),
    )  # fmt: skip
    train = wanted.train.model_copy(update={"epochs": 4.0 if count > 2 else 2.0})
    tiny_project.save(project, wanted.model_copy(update={"train": train}))
    sweep = tiny_sweep.begin(project)
    tiny_sweep.until(lambda: tiny_sweep.steps_done(project.runs) > 4 * count, sweep)
    assert len(list(project.runs.iterdir())) == count
    [group] = group_processes(project)
    workers = tiny_sweep.processes_of(f"ratchet.tuning.sweep_worker {project.root}")
    assert len(workers) == count + 1  # the worker that they belong to
    os.kill(group if victim == "group" else workers[-1], signal.SIGKILL)
    output, _ = sweep.communicate(timeout=tiny_sweep.DEADLINE_S)
    assert sweep.returncode == 0, output
    assert not tiny_sweep.processes_of(str(project.root))
    report = tiny_sweep.report(project)
    assert sum(trial.continues is None for trial in report.trials) == trials
    assert {trial.state for trial in report.trials} <= {"complete", "pruned"}
    grouped = {trial.run_id for trial in report.trials}
    assert all(RunSpec.load(RunPaths(project.runs / str(run_id)).spec).is_grouped for run_id in grouped)
    assert report.final_round is not None
    alone = {run_id for finalist in report.final_round.finalists for run_id in finalist.run_ids}
    assert not alone & grouped
    for run_id in alone:
        assert not RunSpec.load(RunPaths(project.runs / run_id).spec).is_grouped
    exits = [
        event.data["failure_class"]
        for run_id in grouped
        for event in JournalReader(project.runs / str(run_id) / "journal.jsonl").read()
        if event.kind == "worker_exited"
    ]
    assert exits == (["peers"] * len(exits) if victim == "group" else []), exits
    adopted = tiny_project.ratchet(project, "sweep", "--adopt")
    assert adopted.returncode == 0, adopted.stderr
    assert "finds this run already trained" in adopted.stdout
    assert tiny_project.ratchet(project, "train").returncode == 0
    assert TrainReport.load(project.train_report).run_id in alone
    names = {name for (name,) in of_mlflow(project, "select name from runs")}
    newest = {trial.run_id: trial.number for trial in report.trials}
    assert {f"trial {number}" for number in newest.values()} <= names
