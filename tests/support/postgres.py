"""A real Postgres for tests: a cluster in a temporary directory, on loopback, that is removed afterwards."""

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
    """A database cluster. `stop` and `start` simulate a machine that restarts."""

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
        """Return the address of a database in the form of `machine.study_storage`."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def database(self) -> str:
        """Create an empty database and return its address."""
        name = next(self._names)
        self.run(f"CREATE DATABASE {name}")
        return self.url(name)

    def run(self, command: str, database: str = "postgres") -> None:
        """Execute SQL as the superuser."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(command.encode())

    def make(self) -> None:
        """Create the cluster. The cluster trusts all connections, because it listens only on loopback and only for some
        minutes."""
        data = ["-D", str(self._folder / "data"), "-U", USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        done = subprocess.run(
            [self._binaries / "initdb", *data], user=self._owner, cwd=self._folder, capture_output=True, check=False
        )
        assert done.returncode == 0, done.stderr.decode()

    def start(self) -> None:
        """Start the server and wait until it answers."""
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
        """Stop the server at once and cut all connections. SIGQUIT is Postgres' mode `immediate`, which corresponds to
        a crash of the machine."""
        if self._process is not None:
            self._process.send_signal(3)
            self._process.wait(START_S)
            self._process = None


@contextmanager
def serve() -> Iterator[Server]:
    """Start an empty server. If Postgres is not installed, the test is skipped; in CI, the test fails."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Postgres here (apt-get install postgresql)")
    binaries = (found[-1] if found else Path(str(on_path))).parent
    owner = "postgres" if os.geteuid() == 0 else None  # initdb does not run as root
    # The directory is not below tmp_path, which other users cannot enter. It is in memory if there is space, because a
    # cluster has thousands of small files.
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
