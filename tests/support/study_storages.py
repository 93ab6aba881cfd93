"""Both storages of studies, for every test that is about either."""

from collections.abc import Iterator

import pytest

import postgres
from ratchet.layout import Layout
from ratchet.studies.storage import Storage, open_storage


@pytest.fixture(params=["journal", "postgres"])
def url(request: pytest.FixtureRequest) -> str | None:
    """Where the studies are kept: a place that nobody has used."""
    if request.param == "journal":
        return None
    server: postgres.Server = request.getfixturevalue("postgres_server")
    return server.database()


@pytest.fixture
def storage(project: Layout, url: str | None) -> Iterator[Storage]:
    opened = open_storage(project, url)
    yield opened
    opened.close()
