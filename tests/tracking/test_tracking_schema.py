"""Tests that an MLflow database of another schema version is refused with the command that migrates it."""

import shutil
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

import tiny_project
from ratchet.errors import EXIT_INPUT, TrackingSchemaError
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.registry import MlflowModelRegistry
from tracking_schema_cases import (
    OLDER,
    content,
    set_version,
)

"""A real one, of MLflow 2: before there were logged models."""


@pytest.fixture(scope="session")
def older_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a database of an older MLflow with MLflow's own migrations up to that version."""
    import sqlalchemy
    from alembic import command
    from mlflow.store.db.utils import _get_alembic_config
    from mlflow.store.tracking.dbmodels.initial_models import Base

    database = tmp_path_factory.mktemp("older") / "mlflow.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{database}")
    Base.metadata.create_all(engine)
    config = _get_alembic_config(str(engine.url))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, OLDER)
    engine.dispose()
    return database


def test_a_newer_schema_is_said_to_be_newer_and_nothing_is_changed(tracked_project: ProjectLayout) -> None:
    database = tracked_project.mlflow_database
    set_version(database, "f00df00df00d")
    before = content(database)
    with pytest.raises(
        TrackingSchemaError, match=r"schema version f00df00df00d, unknown to the installed MLflow .*: a newer MLflow"
    ):
        MlflowTracker(tracked_project, "model").find("run")
    with pytest.raises(TrackingSchemaError, match="Nothing was changed"):
        MlflowModelRegistry(tracked_project, "model").champion()
    assert content(database) == before
    assert TrackingSchemaError.exit_code == EXIT_INPUT


@pytest.mark.long
def test_an_older_schema_is_named_with_the_command_that_migrates_it(
    project: ProjectLayout, older_database: Path
) -> None:
    project.mlruns.mkdir()
    database = project.mlflow_database
    shutil.copyfile(older_database, database)
    before = content(database)
    with pytest.raises(TrackingSchemaError, match=f"schema version {OLDER}, older than") as caught:
        MlflowTracker(project, "model").find("run")
    assert content(database) == before
    line = str(caught.value).partition("`")[2].partition("`")[0]
    assert line == f"cp '{database}' '{database}'.backup && mlflow db upgrade 'sqlite:///{database}'"
    done = subprocess.run(
        ["bash", "-c", line], env=tiny_project.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert content(Path(f"{database}.backup")) == before
    assert MlflowTracker(project, "model").find("run") is None, "it is of use now"


def test_a_database_with_other_tables_is_refused(project: ProjectLayout) -> None:
    project.mlruns.mkdir()
    with closing(sqlite3.connect(project.mlflow_database)) as connection:
        connection.execute("CREATE TABLE notes (text)")
    with pytest.raises(TrackingSchemaError, match="schema version none"):
        MlflowTracker(project, "model").find("run")
