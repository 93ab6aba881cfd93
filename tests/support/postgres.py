"""A real Postgres for tests: a cluster of its own in a temporary folder, on loopback, gone afterwards."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import psycopg
import pytest

USER = "ratchet"
START_S = 60.0
MEMORY = Path("/dev/shm")  # noqa: S108
ROOM_BYTES = 2**30


class Server:
    """A cluster that runs; `stop` and `start` are what a machine that is started again does to it."""

    def __init__(self, binaries: Path, folder: Path, owner: str | None) -> None:
        self._binaries = binaries
        self._folder = folder
        self._owner = owner
        self._names = (f"test_{number}" for number in count())
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def url(self, database: str = "postgres", user: str = USER) -> str:
        """Address of a database, as it stands in `machine.study_storage`."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def database(self) -> str:
        """Make an empty database. Returns its address."""
        name = next(self._names)
        self.run(f"CREATE DATABASE {name}")
        return self.url(name)

    def run(self, command: str, database: str = "postgres") -> None:
        """Execute SQL as the owner of everything."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(command.encode())

    def make(self) -> None:
        """Make the cluster. Whoever connects is trusted: it is on loopback, for minutes."""
        data = ["-D", str(self._folder / "data"), "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        done = subprocess.run(
            [self._binaries / "initdb", *data], user=self._owner, cwd=self._folder, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()

    def start(self) -> None:
        """Run the server; returns when it answers."""
        settings = [
            "fsync=off",
            "listen_addresses=127.0.0.1",
            f"port={self.port}",
            f"unix_socket_directories={self._folder}",
        ]
        command = [self._binaries / "postgres", "-D", self._folder / "data", *(x for s in settings for x in ("-c", s))]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(command, user=self._owner, cwd=self._folder, stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.url(), connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                told = (self._folder / "log").read_text(errors="replace")
                assert self._process.poll() is None and time.monotonic() < deadline, told
                time.sleep(0.05)

    def stop(self) -> None:
        """End it at once, with all its connections (`immediate`: as if the machine had died)."""
        if self._process is not None:
            self._process.send_signal(3)
            self._process.wait(START_S)
            self._process = None


@contextmanager
def serve() -> Iterator[Server]:
    """A server with nothing in it. Skips the test where Postgres is not installed; fails it there when CI is set."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Postgres here (apt-get install postgresql)")
    binaries = (found[-1] if found else Path(str(on_path))).parent
    owner = "postgres" if os.geteuid() == 0 else None  # initdb refuses root
    # Not below tmp_path, which only we may enter; in memory where there is room: a cluster is thousands of small files.
    in_memory = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM_BYTES
    folder = Path(tempfile.mkdtemp(prefix="ratchet-postgres-", dir=MEMORY if in_memory else None))
    server = Server(binaries, folder, owner)
    try:
        if owner is not None:
            os.chown(folder, pwd.getpwnam(owner).pw_uid, -1)
        server.make()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)
