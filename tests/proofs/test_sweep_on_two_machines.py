"""Proves the README's sentence "every trial is accounted for" for two machines and a PostgreSQL server that
restarts."""

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import postgres
import tiny_project
import tiny_sweep
from ratchet.storage.layout import RUNS_VARIABLE, ProjectLayout
from ratchet.storage.records.sweep import SweepReport

PACKAGES = ("tuning", "stages")


@pytest.fixture(scope="module")
def server() -> Iterator[postgres.Server]:
    with postgres.serve() as running:
        yield running


def machine(template: ProjectLayout, root: Path) -> ProjectLayout:
    shutil.copytree(template.root, root)
    return ProjectLayout(root)


def test_a_machine_is_lost_the_server_restarts_and_another_machine_ends_the_sweep(
    server: postgres.Server, tmp_path: Path, mlflow_template: Path
) -> None:
    chosen = tiny_sweep.settings(trials=4)
    chosen = chosen.model_copy(
        update={"machine": chosen.machine.model_copy(update={"study_storage": server.database()})}
    )
    template = tiny_project.prepared(tmp_path / "template", chosen)
    shutil.copyfile(mlflow_template, template.mlflow_database)
    first, second = machine(template, tmp_path / "first"), machine(template, tmp_path / "second")
    lost = tiny_sweep.begin(first, extra={RUNS_VARIABLE: str(tmp_path / "runs of the first")})
    staying = tiny_sweep.begin(second)
    tiny_sweep.until(lambda: tiny_sweep.steps_done(tmp_path / "runs of the first") > 2, lost)
    tiny_sweep.kill_all(first, lost)
    tiny_sweep.until(lambda: tiny_sweep.steps_done(second.runs) > 8, staying)
    server.stop()
    server.start()
    output, _ = staying.communicate(timeout=tiny_sweep.DEADLINE_S)
    assert staying.returncode == 0, output
    found = tiny_sweep.report(second)
    assert found.storage == "postgres"
    assert sum(trial.continues is None for trial in found.trials) == 4
    assert {trial.state for trial in found.trials} <= {"complete", "pruned"}
    assert max(len(trial.executions) for trial in found.trials) > 1, "nobody took up what the lost machine had"
    _the_lost_machine_comes_back(first, found)
    with sqlite3.connect(second.mlflow_database) as connection:
        parents = connection.execute("select status from runs where name = 'sweep'").fetchall()
    assert parents == [("FINISHED",)]


def _the_lost_machine_comes_back(first: ProjectLayout, found: SweepReport) -> None:
    """Check that the lost machine returns and finds all trials done."""
    again = tiny_project.ratchet(first, "sweep")
    assert again.returncode == 0, again.stdout + again.stderr
    assert tiny_sweep.told(tiny_sweep.report(first).trials) == tiny_sweep.told(found.trials)
