"""`ratchet train` and those who are told of it: a webhook's server and Prometheus's port, both real."""

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from ratchet.layout import Layout
from ratchet.run.directory import newest
from ratchet.services.webhook import VARIABLE
from receiver import STALLS, Receiver, served

TOKEN = "T0PLANTED-xyzzy"  # noqa: S105
HANG = {"kind": "hang", "step": 6, "mark": "hung"}
NEVER_FINITE = [{"kind": "non_finite", "step": step, "times": 0} for step in range(2, 13)]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    train = tiny_project.TRAIN.model_copy(update={"epochs": 1.0})
    settings = tiny_project.SETTINGS.model_copy(update={"train": train})
    return tiny_project.prepared(tmp_path_factory.mktemp("observed") / "project", settings)


def project(template: Layout, root: Path, **machine: Any) -> Layout:
    from ratchet import params

    shutil.copytree(template.root, root)
    settings = params.load(root / "params.yaml")
    changed = settings.machine.model_copy(update={"tracking_grace_s": 60.0, **machine})
    layout = Layout(root)
    tiny_project.save(layout, settings.model_copy(update={"machine": changed}))
    return layout


def train(layout: Layout, address: str, *faults: dict[str, object]) -> "subprocess.CompletedProcess[str]":
    environment = tiny_project.environment() | {VARIABLE: address, "RATCHET_FAULTS": json.dumps(faults)}
    return subprocess.run(
        tiny_project.command("train"), cwd=layout.root, env=environment, capture_output=True, text=True, check=False
    )


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(body) for _, _, body in receiver.got]


def holding(root: Path, secret: str) -> list[Path]:
    """Files in which the secret stands."""
    return [path for path in root.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_a_stall_and_the_end_reach_the_webhook_whose_address_is_kept_nowhere(template: Layout, tmp_path: Path) -> None:
    layout = project(template, tmp_path / "project", stall_s=2.0)
    with served(500, 200) as receiver:
        receiver.path = f"/services/{TOKEN}"
        done = train(layout, receiver.url, HANG)
        assert done.returncode == 0, done.stdout + done.stderr
        first, again, finished = bodies(receiver)
        assert first == again
        assert (first["event"], finished["event"]) == ("stalled", "finished")
        assert "no sign of life" in first["text"] and "it is started again" in first["text"]
        run = newest(layout.runs)
        assert run is not None
        assert finished["run"] == run.root.name
        assert finished["step"] == finished["planned_steps"] > 0
        assert train(layout, receiver.url).returncode == 0, "trained before: no news"
        assert len(receiver.got) == 3
    assert holding(tmp_path, TOKEN) == []
    assert TOKEN not in done.stdout + done.stderr


def test_a_failure_is_told_and_a_server_that_stalls_holds_nobody_up(template: Layout, tmp_path: Path) -> None:
    layout = project(template, tmp_path / "project", webhook_wait_s=1.0, retries=0)
    with served(STALLS) as receiver:
        receiver.path = f"/services/{TOKEN}"
        done = train(layout, receiver.url, *NEVER_FINITE)
        assert done.returncode == 1, done.stdout + done.stderr
        [body] = bodies(receiver)
    assert body["event"] == "failed"
    assert "diverged" in body["detail"]
    assert "ratchet: webhook: nobody was told of `failed` (no answer within 1 s; 1 try)" in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    assert holding(tmp_path, TOKEN) == []


@pytest.mark.parametrize("what", ["a port that is taken", "an address that is none", "no folder for the file"])
def test_what_cannot_be_is_said_before_anything_is_begun(what: str, template: Layout, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        machine: dict[str, Any] = {
            "a port that is taken": {"metrics_port": port},
            "an address that is none": {},
            "no folder for the file": {"metrics_file": str(tmp_path / "nowhere" / "run.prom")},
        }[what]
        layout = project(template, tmp_path / "project", **machine)
        done = train(layout, f"http://example.org/{TOKEN}" if what == "an address that is none" else "")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and TOKEN not in done.stderr
    said = {"a port that is taken": f"machine.metrics_port: {port} of 127.0.0.1 is taken",
            "an address that is none": f"{VARIABLE} (in the environment): http to example.org could be read",
            "no folder for the file": "machine.metrics_file: "}[what]  # fmt: skip
    assert done.stderr.startswith(f"ratchet train: {said}")
    assert not layout.runs.exists() or list(layout.runs.iterdir()) == []
