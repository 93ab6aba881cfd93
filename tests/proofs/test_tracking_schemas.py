"""Proves that a training runs to its end if the MLflow database has another schema version, and that the database does
not change."""

import shutil
from pathlib import Path

import tiny_project
from ratchet.errors import EXIT_INPUT
from tracking_schema_cases import (
    OLDER,
    content,
    set_version,
)

PACKAGES = ("tracking", "reports")


def test_training_goes_on_and_the_verbs_say_what_to_do(tmp_path: Path, mlflow_template: Path) -> None:
    train = tiny_project.TRAIN.model_copy(update={"epochs": 0.5})
    layout = tiny_project.prepared(tmp_path / "project", tiny_project.SETTINGS.model_copy(update={"train": train}))
    shutil.copyfile(mlflow_template, layout.mlflow_database)
    set_version(layout.mlflow_database, OLDER)
    before = content(layout.mlflow_database)
    done = tiny_project.ratchet(layout, "train")
    assert done.returncode == 0, done.stderr
    assert layout.train_report.exists()
    assert done.stderr.count("mlflow db upgrade") >= 1
    shown = tiny_project.ratchet(layout, "ui", "--port", "5999")
    assert shown.returncode == EXIT_INPUT, shown.stderr
    assert "mlflow db upgrade" in shown.stderr
    assert "Traceback" not in done.stderr + shown.stderr
    assert content(layout.mlflow_database) == before
