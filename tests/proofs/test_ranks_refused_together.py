"""Proves that machines with different data or different library versions are refused before they train together."""

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from ports import free_port
from rank_projects import EVEN, PATIENCE_S, SLOW, events, log, project, settings, start, wait_until
from ranks_refused_cases import (
    ended,
)
from ratchet.config.prepare import SplitSettings
from ratchet.stages import prepare
from ratchet.stages.project import Project

PACKAGES = ("training", "runs")


class Quiet(BaseHTTPRequestHandler):
    """Handler of a service that is unrelated to training."""

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def web_server() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def silent_server() -> Iterator[int]:
    """Run a server that accepts connections and sends no data."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening.getsockname()[1]


def test_a_port_that_another_service_has_is_named_at_once(prepared: Path, tmp_path: Path) -> None:
    with web_server() as port:
        layout = project(prepared, tmp_path / "project", settings(nodes="2", rendezvous=f"127.0.0.1:{port}"))
        code, said = ended(layout)
    assert code == 2, said + log(layout)
    assert f"machine.rendezvous: 127.0.0.1:{port} is used by another service; set a free port" in said


def test_a_port_that_takes_connections_and_never_answers_is_told_when_the_wait_is_over(
    prepared: Path, tmp_path: Path
) -> None:
    with silent_server() as port:
        chosen = settings(nodes="2", rendezvous=f"127.0.0.1:{port}", rendezvous_timeout_s=3)
        code, said = ended(project(prepared, tmp_path / "project", chosen))
    assert code == 75, said
    assert f"2 machines did not meet at 127.0.0.1:{port} within 3 s" in said
    assert "does another service use this port?" in said


def test_a_host_that_is_not_known_is_named(prepared: Path, tmp_path: Path) -> None:
    layout = project(prepared, tmp_path / "project", settings(rendezvous_timeout_s=3))
    place = "no-such-machine.invalid:29400"
    done = tiny_project.ratchet(layout, "train", "--nodes", "2", "--rendezvous", place)
    assert done.returncode == 75, done.stderr
    assert f"2 machines did not meet at {place} within 3 s" in done.stderr
    assert "the host no-such-machine.invalid cannot be resolved" in done.stderr


def test_a_machine_with_other_data_is_refused_and_the_others_go_on(
    prepared: Path, tmp_path: Path, started: list[Any]
) -> None:
    long = EVEN.model_copy(update={"epochs": 30})
    chosen = settings(long, nodes="1:2", rendezvous=f"127.0.0.1:{free_port()}")
    first, second = (project(prepared, tmp_path / name, chosen) for name in ("first", "second"))
    changed = chosen.prepare.model_copy(update={"split": SplitSettings(validation=0.2, test=0.2)})
    shutil.rmtree(second.data)
    prepare.prepare(Project.from_parts(second, chosen.model_copy(update={"prepare": changed})))
    started.append(start(first, [SLOW]))
    wait_until(lambda: len(events(first, "step")) > 1, *started)
    code, said = ended(second)
    assert code == 2, said + log(second)
    assert "would train different things: prepared data (digest): " in said
    assert "Every machine needs the same params.yaml, prepared data, base model and libraries" in said
    done = len(events(first, "step"))
    wait_until(lambda: len(events(first, "step")) > done, *started)
    assert {event.data["ranks"] for event in events(first, "worker_ready")} == {1}


def test_machines_with_other_versions_of_a_library_are_refused_with_both(
    prepared: Path, tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(nodes="2", rendezvous=f"127.0.0.1:{free_port()}")
    first, second = (project(prepared, tmp_path / name, chosen) for name in ("first", "second"))
    started.append(start(first))
    told = tmp_path / "other" / "peft-0.0.1.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.0.1\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(told.parent))
    started.append(start(second))
    said = [process.communicate(timeout=PATIENCE_S)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2], said
    for text in said:
        assert "version of peft: " in text and "0.0.1" in text
