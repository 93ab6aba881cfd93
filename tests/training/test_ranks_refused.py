"""What is wrong between machines: one message that says what, where and what to do, and an exit code."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_project
from rank_projects import PATIENCE_S, events, log, project, settings, start
from ratchet.layout import Layout


class Quiet(BaseHTTPRequestHandler):
    """Of a service that has nothing to do with training."""

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
    """Takes connections, and says nothing."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield listening.getsockname()[1]


def ended(layout: Layout) -> tuple[int, str]:
    """Exit code and words of a training that cannot begin."""
    process = start(layout)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert not layout.train.exists()
    assert not events(layout, "step")
    return process.returncode, said


def test_a_port_that_another_service_has_is_named_at_once(prepared: Path, tmp_path: Path) -> None:
    with web_server() as port:
        layout = project(prepared, tmp_path / "project", settings(nodes="2", rendezvous=f"127.0.0.1:{port}"))
        code, said = ended(layout)
    assert code == 2, said + log(layout)
    assert f"machine.rendezvous 127.0.0.1:{port}: another service has this port; take one that is free" in said


def test_a_port_that_takes_connections_and_never_answers_is_told_when_the_wait_is_over(
    prepared: Path, tmp_path: Path
) -> None:
    with silent_server() as port:
        chosen = settings(nodes="2", rendezvous=f"127.0.0.1:{port}", rendezvous_wait_s=3)
        code, said = ended(project(prepared, tmp_path / "project", chosen))
    assert code == 75, said
    assert f"2 machines did not meet at 127.0.0.1:{port} within 3 s" in said
    assert "does another service have this port?" in said


def test_a_host_that_is_not_known_is_named(prepared: Path, tmp_path: Path) -> None:
    layout = project(prepared, tmp_path / "project", settings(rendezvous_wait_s=3))
    place = "no-such-machine.invalid:29400"
    done = tiny_project.ratchet(layout, "train", "--nodes", "2", "--rendezvous", place)
    assert done.returncode == 75, done.stderr
    assert f"2 machines did not meet at {place} within 3 s" in done.stderr
    assert "the host no-such-machine.invalid cannot be resolved" in done.stderr


def test_options_that_cannot_be_are_refused(prepared: Path, tmp_path: Path) -> None:
    layout = project(prepared, tmp_path / "project", settings())
    done = tiny_project.ratchet(layout, "train", "--nodes", "3:2", "--rendezvous", "somewhere")
    assert done.returncode == 2
    assert "--nodes: found '3:2': '3:2' is no number of machines" in done.stderr
    assert "--rendezvous: found 'somewhere': 'somewhere' is no place to meet" in done.stderr
    assert not layout.runs.exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: without one, ranks are processes on the CPU")
def test_more_ranks_than_gpus_are_refused_with_both_numbers(prepared: Path, tmp_path: Path) -> None:
    there = torch.cuda.device_count()
    chosen = settings(device="cuda", gpus=there + 1)
    code, said = ended(project(prepared, tmp_path / "project", chosen))
    assert code == 2, said
    assert f"machine.gpus: found {there + 1}, and this machine has {there} that may be used" in said
