"""Both storages of studies, for tests that must pass on either one."""

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

import postgres
from ratchet.storage.layout import ProjectLayout
from ratchet.tuning.storage import StudyStorage, open_storage


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str | None:
    """Return the address of a new storage, or None for the SQLite file."""
    if request.param == "sqlite":
        return None
    server: postgres.Server = request.getfixturevalue("postgres_server")
    return server.database()


@pytest.fixture
def storage(project: ProjectLayout, url: str | None) -> Iterator[StudyStorage]:
    opened = open_storage(project, url)
    yield opened
    opened.close()


def asked(app: Any, address: str) -> Any:
    """Return the answer of a WSGI application without a server."""
    answered: list[str] = []
    environment: dict[str, Any] = {
        "REQUEST_METHOD": "GET", "SCRIPT_NAME": "", "PATH_INFO": address, "QUERY_STRING": "", "SERVER_NAME": "x",
        "SERVER_PORT": "80", "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO(),
    }  # fmt: skip
    body = b"".join(app(environment, lambda status, *_: answered.append(status)))
    assert answered == ["200 OK"], (body, environment["wsgi.errors"].getvalue())
    return json.loads(body)
