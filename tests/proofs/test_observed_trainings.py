"""Proves the README's sentence "Monitoring cannot disturb a run" for webhooks: a stalled server does not slow down a
training."""

import json
import re
from pathlib import Path
from typing import Any

from callback_cases import (
    TOKEN,
    project,
    template,  # noqa: F401 (a fixture)
    train,
)
from ratchet.runs.directory import find_newest_run
from ratchet.storage.layout import ProjectLayout
from receiver import STALLS, Receiver, served

PACKAGES = ("stages", "reports", "runs")
HANG = {"kind": "hang", "step": 6, "mark": "hung"}
NEVER_FINITE = [{"kind": "non_finite", "step": step, "times": 0} for step in range(2, 13)]


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(body) for _, _, body in receiver.got]


def holding(root: Path, secret: str) -> list[Path]:
    """Return the files that contain the secret."""
    return [path for path in root.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def test_a_stall_and_the_end_reach_the_webhook_whose_address_is_kept_nowhere(
    template: ProjectLayout, tmp_path: Path
) -> None:
    layout = project(template, tmp_path / "project", stall_timeout_s=2.0)
    with served(500, 200) as receiver:
        receiver.path = f"/services/{TOKEN}"
        done = train(layout, receiver.url, HANG)
        assert done.returncode == 0, done.stdout + done.stderr
        first, again, finished = bodies(receiver)
        assert first == again
        assert (first["event"], finished["event"]) == ("stalled", "finished")
        assert "no heartbeat" in first["text"] and "restarting" in first["text"]
        run = find_newest_run(layout.runs)
        assert run is not None
        assert finished["run"] == run.root.name
        assert finished["step"] == finished["planned_steps"] > 0
        assert train(layout, receiver.url).returncode == 0, "trained before: no news"
        assert len(receiver.got) == 3
    assert holding(tmp_path, TOKEN) == []
    assert TOKEN not in done.stdout + done.stderr


def test_a_failure_is_told_and_a_server_that_stalls_holds_nobody_up(template: ProjectLayout, tmp_path: Path) -> None:
    layout = project(template, tmp_path / "project", max_restarts=0)
    with served(STALLS) as receiver:
        receiver.path = f"/services/{TOKEN}"
        done = train(layout, receiver.url, *NEVER_FINITE)
        assert done.returncode == 1, done.stdout + done.stderr
        body, again = bodies(receiver)
    assert body == again
    assert body["event"] == "failed"
    assert "diverged" in body["detail"]
    assert re.search(r"ratchet: webhook: `failed` not delivered \(no answer within [\d.]+ s; 2 attempts\)", done.stderr)
    assert TOKEN not in done.stdout + done.stderr
    assert holding(tmp_path, TOKEN) == []
