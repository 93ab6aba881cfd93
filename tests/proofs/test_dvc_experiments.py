"""Proves that queued experiments of DVC lose nothing: two at a time, killed, and queued again, with real DVC."""

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from ratchet.config import params_file
from ratchet.config.export import Export
from ratchet.config.gate import AtLeastRule, Gate
from ratchet.runs.directory import list_runs
from ratchet.runs.journal import JournalReader
from ratchet.storage import files
from ratchet.storage.layout import EXPERIMENT_WORKSPACES, ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.training import TrainReport

PACKAGES = ("stages", "storage", "cli")
DEADLINE_S = 900
GATE = Gate(rules=(AtLeastRule(rule="at_least", metric="perplexity", value=1e9),))


def run(layout: ProjectLayout, *arguments: str) -> str:
    done = subprocess.run(
        arguments, cwd=layout.root, env=tiny_project.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def queue(layout: ProjectLayout, name: str, *arguments: str) -> None:
    run(layout, "dvc", "exp", "run", "-q", "--queue", "-n", name, *arguments)


def start(layout: ProjectLayout, *arguments: str) -> None:
    """Start the workers of the queue. They inherit the standard streams, so a pipe would stay open until they end."""
    subprocess.run(
        ["dvc", "queue", "start", *arguments], cwd=layout.root, env=tiny_project.environment(), check=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def states(layout: ProjectLayout) -> dict[str, str]:
    """Return the state of each queued experiment by name."""
    lines = run(layout, "dvc", "queue", "status").splitlines()
    return {words[1]: words[-1] for line in lines if len(words := line.split()) == 5 and words[0] != "Task"}


def wait(layout: ProjectLayout, name: str, is_true: Callable[[], bool]) -> None:
    """Wait until something is true of an experiment. On a failure, show the output of the experiment."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline, run(layout, "dvc", "queue", "logs", name)
        time.sleep(1)


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProjectLayout]:
    """Create a project in which no stage has run."""
    monkeypatch.setenv("SHELL", "/bin/sh")  # on Debian, this shell stays between dvc and the command of a stage
    tiny_project.write_rows(tmp_path, 400)
    data = str(tmp_path / "rows.jsonl")
    arguments = ("init", str(tmp_path / "project"), "--data", data, "--prompt", "request", "--response", "intent")
    subprocess.run(tiny_project.command(*arguments), env=tiny_project.environment(), check=True, capture_output=True)
    layout = ProjectLayout(tmp_path / "project")
    settings, small = params_file.load(layout.params), tiny_project.SETTINGS
    parts = {"base": small.base, "train": small.train, "machine": small.machine, "gate": GATE, "export": Export()}
    evaluate = settings.evaluate.model_copy(update={"max_new_tokens": 8, "generation_rows": 16})
    tiny_project.save(layout, settings.model_copy(update={**parts, "evaluate": evaluate}))
    for name, value in (("user.name", "tests"), ("user.email", "tests@localhost")):
        run(layout, "git", "config", name, value)
    run(layout, "git", "add", "-A")
    run(layout, "git", "commit", "-qm", "settings")
    yield layout
    run(layout, "dvc", "queue", "stop", "--kill")


def test_two_experiments_at_a_time_in_a_project_where_nothing_has_run(layout: ProjectLayout) -> None:
    for rank in (2, 8):
        queue(layout, f"rank-{rank}", "-S", f"train.rank={rank}", "-S", "train.learning_rate=0.00001")
    start(layout, "-j", "2")
    for rank in (2, 8):
        wait(layout, f"rank-{rank}", lambda name=f"rank-{rank}": states(layout)[name] in ("Success", "Failed"))  # type: ignore[misc]
    assert states(layout) == {"rank-2": "Success", "rank-8": "Success"}
    assert not list((layout.root / EXPERIMENT_WORKSPACES).glob("tmp*"))

    assert len(list_runs(layout.runs)) == 2
    for paths in list_runs(layout.runs):
        files.verify_sealed(paths.result)
    assert mlflow_runs(layout) == {"rank-2": ("FINISHED", "2"), "rank-8": ("FINISHED", "8")}
    uses = base.read_lines(layout.experiment_uses)
    assert len({use["model"] for use in uses if "model" in use}) == 2  # other lines are rows of the test set

    shown = json.loads(run(layout, "dvc", "exp", "show", "--json"))
    figures = {
        one["name"]: [value for file in one["revs"][0]["data"]["metrics"].values() for value in file["data"]]
        for one in shown[1]["experiments"]
    }
    assert set(figures) == {"rank-2", "rank-8"}
    assert all(len(names) == len(set(names)) == 12 for names in figures.values())

    run(layout, "dvc", "exp", "apply", "rank-8")
    assert params_file.load(layout.params).train.learning_rate == 1e-5
    assert "Running" not in run(layout, "dvc", "repro")
    assert tiny_project.ratchet(layout, "gate", "--check").returncode == 0
    assert "3 of 50" not in tiny_project.ratchet(layout, "evaluate").stdout, "no model counts twice"


def test_an_experiment_that_is_killed_and_queued_again_resumes(layout: ProjectLayout) -> None:
    # At this rate the loss falls slowly, so that early stopping does not end the training before it is killed.
    values = ("-S", "train.rank=3", "-S", "train.epochs=60", "-S", "train.learning_rate=0.00001", "train")

    def steps() -> list[tuple[int, int]]:
        """Return attempt and number of each step of the run."""
        found = list_runs(layout.runs)
        events = JournalReader(found[0].journal).read() if found and found[0].journal.exists() else ()
        return [(event.attempt, event.data["step"]) for event in events if event.kind == "step"]

    for attempt, force in ((1, ()), (2, ("--force",))):
        name, already = f"killed-{attempt}", len(steps())
        queue(layout, name, *values)
        start(layout)
        wait(layout, name, lambda already=already: len(steps()) > already + 5)  # type: ignore[misc]
        run(layout, "dvc", "queue", "kill", *force, name)
        wait(layout, name, lambda name=name: states(layout)[name] == "Failed")  # type: ignore[misc]
    queue(layout, "complete", *values)
    start(layout)
    wait(layout, "complete", lambda: states(layout)["complete"] in ("Success", "Failed"))
    assert states(layout)["complete"] == "Success"
    (paths,) = list_runs(layout.runs)
    report = TrainReport.load(paths.result / "train.json")
    assert {attempt for attempt, _ in steps()} == {1, 2, 3}
    assert [step for _, step in steps()] == list(range(1, report.steps + 1)), "no step is lost, none is repeated"


def mlflow_runs(layout: ProjectLayout) -> dict[str, tuple[str, str]]:
    """Return status and rank of each run in the project's MLflow, by the name of the experiment in DVC."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{layout.mlflow_database}", f"sqlite:///{layout.mlflow_database}")
    experiment: Any = client.get_experiment_by_name(params_file.load(layout.params).promote.model_name)
    return {
        run.data.tags["dvc.experiment"]: (run.info.status, run.data.params["train.rank"])
        for run in client.search_runs([experiment.experiment_id])
    }
