"""A server for the tests of mirrors, and the environment in which clients find it."""

from collections.abc import Iterator
from pathlib import Path

import faulty_proxy
import pytest
import s3_server
from behind_proxy import Mirror
from faulty_proxy import FaultyProxy
from s3_server import S3Server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with s3_server.serve() as server:
        yield server


@pytest.fixture
def s3_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server, in the environment of this process."""
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def proxy(s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A bad network between this process and the server; nothing goes wrong yet."""
    with faulty_proxy.before(s3_environment.port) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", between.endpoint)
        yield between


@pytest.fixture
def mirror(s3: S3Server, proxy: FaultyProxy, tmp_path: Path) -> Mirror:
    """A bucket behind that network."""
    return Mirror(s3, proxy, tmp_path)
