"""An MLflow database with another schema version."""

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path

OLDER = "0584bdc529eb"
"""A real schema version of MLflow 2, which had no logged models."""


def set_version(database: Path, version: str) -> None:
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (version,))
        connection.commit()


def content(database: Path) -> str:
    return hashlib.sha256(database.read_bytes()).hexdigest()
