"""A real Prometheus for tests: on loopback, in a temporary directory that is removed afterwards."""

import json
import os
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ports import free_port

START_S = 120.0
PATIENCE_S = 300.0


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`. If the program is not installed, the test is skipped; in CI, the
    test fails."""
    found = shutil.which(name)
    if found is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no {name} here (apt-get install prometheus)")
    return found


class Server:
    """A running server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def ask(self, what: str, **parameters: object) -> Any:
        """Return the data of an API answer. Raises AssertionError with the error message of Prometheus."""
        query = urllib.parse.urlencode({name: str(value) for name, value in parameters.items()})
        try:
            with urllib.request.urlopen(f"{self._url}/{what}?{query}", timeout=30) as reply:  # noqa: S310
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def now(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the value of each series."""
        return [(one["metric"], float(one["value"][1])) for one in self.ask("query", query=expression)["result"]]

    def since(self, began: float, expression: str) -> list[tuple[dict[str, str], list[float]]]:
        """Return the labels and the values of each series since a Unix time, at intervals of one second."""
        found = self.ask("query_range", query=expression, start=began, end=time.time(), step=1)["result"]
        return [(one["metric"], [float(value) for _, value in one["values"]]) for one in found]

    def wait(self, expression: str, meanwhile: Callable[[], None] = lambda: None) -> list[tuple[dict[str, str], float]]:
        """Wait until the expression returns a series, and return the result."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not (found := self.now(expression)):
            assert time.monotonic() < deadline_s, f"{expression} returns nothing; {self.ask('targets')}"
            meanwhile()
            time.sleep(0.2)
        return found


@contextmanager
def serve(folder: Path, targets: dict[str, Sequence[str]], rules: str = "groups: []") -> Iterator[Server]:
    """Run a server that scrapes its targets every second.

    Args:
        folder: directory for its files.
        targets: addresses by job, as HOST:PORT or HOST:PORT/PATH.
        rules: alert rules, which are evaluated every second.
    """
    binary, port = program("prometheus"), free_port()
    folder.mkdir(parents=True)
    (folder / "rules.yml").write_text(rules, encoding="utf-8")
    jobs = [
        {"job_name": f"{job}-{n}", "metrics_path": f"/{path or 'metrics'}", "static_configs": [{"targets": [address]}]}
        for job, addresses in targets.items()
        for n, (address, _, path) in enumerate(one.partition("/") for one in addresses)
    ]
    often = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config = {"global": often, "rule_files": ["rules.yml"], "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [
        binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    log = folder / "log"
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True)
    try:
        deadline_s = time.monotonic() + START_S
        while not _is_ready(port):
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text(errors="replace")
            time.sleep(0.1)
        yield Server(port)
    finally:
        process.terminate()
        process.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
