"""Metrics, plots, remotes and experiments of DVC, with real DVC."""

import csv
import json
import shutil
import subprocess
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

import machines
import tiny_project
from ratchet.evaluation.metrics import CalibrationBin, ConfusionMatrix
from ratchet.quality_gate import test_sets
from ratchet.reports import dvc_files
from ratchet.runs.directory import RunDirectory, RunSpec
from ratchet.runs.journal import Journal
from ratchet.stages import init
from ratchet.stages.train import _open_run
from ratchet.storage import files
from ratchet.storage.digests import revision_tags
from ratchet.storage.layout import EXPERIMENT_WORKSPACES, ProjectLayout

TEMPLATE: dict[str, Any] = yaml.safe_load(Path(init.__file__).with_name("dvc_template.yaml").read_text())
TABLE = ConfusionMatrix(("bill, late", "refund"), ((3, 1, 0), (0, 2, 2)))
BINS = [CalibrationBin(0.31, 0.25, 4), CalibrationBin(0.83, 0.75, 4)]


def run(root: Path, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        arguments, cwd=root, env=tiny_project.environment() | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write_outputs(layout: ProjectLayout, losses: list[float]) -> None:
    """Write the outputs of all stages as far as DVC's commands read them."""
    journal = layout.root / "journal.jsonl"
    journal.unlink(missing_ok=True)
    with closing(Journal(journal, attempt=1)) as events:
        for step, loss in enumerate(losses, start=1):
            events.append("step", step=step, loss=loss)
        events.append("step", step=1, loss=losses[0])  # again, after a kill
        events.append("validation", step=len(losses), loss=losses[-1])
    test = {"accuracy": 1 / losses[-1], "macro_f1": 0.5, "answer_loss": losses[-1], "calibration_error": 0.1}
    figures: dict[str, dict[str, float | str]] = {
        "base": {"base_parameters": 1000},
        "data": {"training_rows": 90, "dropped_rows": 2},
        "train": {"validation_loss": losses[-1], "training_loss": losses[-1], "steps": len(losses)},
        "export": {"merged_model_bytes": 4096},
        "evaluate": {**dvc_files.select_test_figures(test | {"perplexity": 9.0}, ())},
        "gate": {"decision": "PROMOTE"},
    }
    for stage, values in figures.items():
        with files.sealed_directory(layout.experiments / stage, stage) as scratch:
            dvc_files.write_metrics(scratch, values)
            if stage == "train":
                dvc_files.write_loss_curves(journal, scratch)
            if stage == "evaluate":
                dvc_files.write_label_plots(scratch, TABLE, BINS)
    files.write_atomic(layout.gate_page, "<html></html>")
    journal.unlink()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> ProjectLayout:
    """Create a project with two commits, whose trainings differ in their losses."""
    folder = tmp_path_factory.mktemp("dvc")
    tiny_project.write_rows(folder, 200)
    init.init(folder / "project", folder / "rows.jsonl", prompt="request", response="intent")
    layout = ProjectLayout(folder / "project")
    for name, value in (("user.name", "tests"), ("user.email", "tests@localhost")):
        run(layout.root, "git", "config", name, value)
    for losses in ([4.0, 2.0], [4.0, 2.0, 1.25]):
        write_outputs(layout, losses)
        run(layout.root, "dvc", "commit", "-q", "-f")
        run(layout.root, "git", "add", "-A")
        run(layout.root, "git", "commit", "-q", "-m", f"{len(losses)} steps")
    return layout


def test_metrics_of_two_commits(project: ProjectLayout) -> None:
    found = json.loads(run(project.root, "dvc", "metrics", "diff", "HEAD~1", "--json"))
    assert found["experiments/train/metrics.json"] == {
        "steps": {"old": 2, "new": 3, "diff": 1},
        "training_loss": {"old": 2.0, "new": 1.25, "diff": -0.75},
        "validation_loss": {"old": 2.0, "new": 1.25, "diff": -0.75},
    }
    assert found["experiments/evaluate/metrics.json"]["test_accuracy"] == pytest.approx(
        {"old": 0.5, "new": 0.8, "diff": 0.3}
    )
    shown = run(project.root, "dvc", "metrics", "show")
    assert "PROMOTE" in shown


def test_the_table_of_experiments_has_at_most_twelve_figures_with_plain_names(project: ProjectLayout) -> None:
    header, *rows = csv.reader(run(project.root, "dvc", "exp", "show", "--csv").splitlines())
    figures = header[header.index("Executor") + 1 if "Executor" in header else 0 :]
    names = [name for stage in TEMPLATE["metrics"] for name in json.loads((project.root / stage).read_bytes())]
    assert len(names) == 12
    assert set(names) <= set(figures), "no name is that of two files, so DVC shows no path"
    assert rows[0][header.index("decision")] == "PROMOTE"


def test_plots_of_two_commits(project: ProjectLayout, tmp_path: Path) -> None:
    shown = json.loads(run(project.root, "dvc", "plots", "diff", "HEAD~1", "--json", "-o", str(tmp_path)))
    assert "errors" not in shown
    points = {name: plot[0]["content"]["data"]["values"] for name, plot in shown["data"].items()}
    tables = "experiments/evaluate/plots"
    assert set(points) == {"loss", f"{tables}/confusion.csv", f"{tables}/calibration.csv"}
    curve = [
        (point["filename"], point["step"], float(point["loss"]))
        for point in points["loss"]
        if point["rev"] == "workspace"
    ]
    assert curve == [
        ("training.csv", "1", 4.0), ("training.csv", "2", 2.0), ("training.csv", "3", 1.25),
        ("validation.csv", "3", 1.25),
    ]  # fmt: skip
    pairs = [
        (point["actual"], point["predicted"])
        for point in points[f"{tables}/confusion.csv"]
        if point["rev"] == "workspace"
    ]
    assert pairs == [
        *[("bill, late", "bill, late")] * 3, ("bill, late", "refund"), *[("refund", "refund")] * 2,
        *[("refund", "(something else)")] * 2,
    ]  # fmt: skip


def test_long_curves_are_averaged_and_a_task_without_labels_has_empty_tables(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "journal.jsonl", attempt=1)) as journal:
        for step in range(1, 1201):
            journal.append("step", step=step, loss=float(step))
    dvc_files.write_loss_curves(tmp_path / "journal.jsonl", tmp_path)
    dvc_files.write_label_plots(tmp_path, None, ())
    rows = list(csv.DictReader((tmp_path / "plots" / "training.csv").read_text().splitlines()))
    assert (len(rows), rows[0], rows[-1]) == (400, {"step": "3", "loss": "2.0"}, {"step": "1200", "loss": "1199.0"})
    for name, header in (
        ("validation", "step,loss"), ("confusion", "actual,predicted"), ("calibration", "confidence,accuracy,rows"),
    ):  # fmt: skip
        assert (tmp_path / "plots" / f"{name}.csv").read_text() == f"{header}\n"


def test_figures_that_are_not_numbers_are_left_out_and_chosen_metrics_come_first(tmp_path: Path) -> None:
    dvc_files.write_metrics(tmp_path, {"loss": float("nan"), "steps": 3, "decision": "HOLD"})
    assert json.loads((tmp_path / "metrics.json").read_bytes()) == {"decision": "HOLD", "steps": 3}
    values = dict.fromkeys(("rouge", "accuracy", "macro_f1", "answer_loss", "calibration_error"), 0.5)
    assert list(dvc_files.select_test_figures(values, ("rouge", "bleu"))) == [
        "test_rouge", "test_accuracy", "test_macro_f1", "test_answer_loss"
    ]  # fmt: skip


def test_every_stage_has_its_file_of_metrics_in_its_output() -> None:
    outs = [out for stage in TEMPLATE["stages"].values() for out in stage["outs"]]
    outputs = [out if isinstance(out, str) else next(iter(out)) for out in outs]
    assert [f"{out}/metrics.json" for out in outputs if not out.endswith(".html")] == TEMPLATE["metrics"]


@pytest.mark.parametrize("kind", ["folder", pytest.param("s3", marks=pytest.mark.long)])
def test_a_clone_that_pulls_has_nothing_to_do(
    project: ProjectLayout, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    url, environment = str(tmp_path / "remote"), {}
    if kind == "s3":
        server = request.getfixturevalue("s3")
        empty = tmp_path / "aws"
        empty.touch()  # DVC refuses os.devnull
        files_of_aws = dict.fromkeys(("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"), str(empty))
        url, environment = f"s3://{server.bucket()}/dvc", server.environment() | files_of_aws
    source = tmp_path / "source"
    shutil.copytree(project.root, source)
    run(source, "dvc", "remote", "add", "-q", "-d", "store", url)
    run(source, "git", "commit", "-qam", "remote")
    run(source, "dvc", "push", **environment)
    clone = ProjectLayout(tmp_path / "clone")
    run(tmp_path, "git", "clone", "-q", str(source), str(clone.root))
    run(clone.root, "dvc", "pull", **environment)
    for stage in ("base", "data", "train", "export", "evaluate", "gate"):
        files.verify_sealed(clone.experiments / stage)
    shown = run(clone.root, "dvc", "repro", **environment)
    assert "Running" not in shown
    assert "Data and pipelines are up to date." in shown
    assert run(clone.root, "git", "status", "--short") == ""


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProjectLayout:
    """Create the temporary workspace of an experiment: a copy of a repository whose project is in a subdirectory."""
    repository = tmp_path / "repository"
    for root in (repository, repository / EXPERIMENT_WORKSPACES / "tmp1"):
        (root / ".dvc").mkdir(parents=True, exist_ok=True)
        (root / "models" / "support" / "experiments").mkdir(parents=True)
    monkeypatch.setenv("DVC_ROOT", str(repository))
    monkeypatch.delenv("RATCHET_RUNS", raising=False)
    return ProjectLayout(repository / EXPERIMENT_WORKSPACES / "tmp1" / "models" / "support")


def test_an_experiment_shares_what_must_outlive_its_workspace(workspace: ProjectLayout, tmp_path: Path) -> None:
    project = ProjectLayout(tmp_path / "repository" / "models" / "support")
    assert (workspace.is_temporary, project.is_temporary) == (True, False)
    shared = ("runs", "profiles", "generations", "scores", "sweeps", "mlflow_database", "models", "test_set_uses_lock")
    for name in shared:
        assert getattr(workspace, name) == getattr(project, name), name
    assert workspace.name == "support"
    for name in ("base", "data", "train", "evaluate", "gate", "champion", "params", "test_set_uses"):
        assert getattr(workspace, name).is_relative_to(workspace.root), name


def test_test_rows_that_experiments_used_count_in_the_project_and_in_other_experiments(
    workspace: ProjectLayout, tmp_path: Path
) -> None:
    project = ProjectLayout(tmp_path / "repository" / "models" / "support")
    test_sets.record_test_set_use(project, "set", "a", "run-a")
    test_sets.record_test_set_use(workspace, "set", "b", "run-b")
    shutil.rmtree(workspace.root)  # as DVC does
    (tmp_path / "repository" / EXPERIMENT_WORKSPACES / "tmp2" / ".dvc").mkdir(parents=True)
    other = ProjectLayout(tmp_path / "repository" / EXPERIMENT_WORKSPACES / "tmp2" / "models" / "support")
    assert test_sets.count_models(other, "set", "c") == 2, "b and c: the file of the project is in git, here without it"
    assert test_sets.count_models(project, "set", "c") == 3
    test_sets.record_test_set_use(project, "set", "c", "run-c")
    project.experiment_uses.unlink()
    assert [use.model for use in test_sets.read_test_set_uses(project)] == ["a", "b", "c"]


def test_an_experiment_waits_for_a_run_that_another_one_trains(
    workspace: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ratchet.runs.directory.LOCK_WAIT_S", 0.1)
    messages: list[str] = []
    monkeypatch.setattr("ratchet.stages.train.print_message", messages.append)
    spec = RunSpec(train=tiny_project.TRAIN, data_digest="d" * 64, base_digest="b" * 64)
    first = _open_run(workspace, spec)
    opened: list[RunDirectory] = []
    waiting = threading.Thread(target=lambda: opened.append(_open_run(workspace, spec)), daemon=True)
    waiting.start()
    machines.wait_until(lambda: bool(messages))
    assert messages == [f"run {spec.run_id}: another process trains it; this experiment waits for its result"]
    assert not opened
    first.close()
    waiting.join()
    assert opened[0].paths.root.parent == tmp_path / "repository" / "models" / "support" / "experiments" / "runs"
    opened[0].close()


def test_mlflow_names_the_experiment_of_dvc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DVC_EXP_NAME", "rank-8")
    assert revision_tags(tmp_path) == {"dvc.experiment": "rank-8"}
