"""Tests `--watch`: it follows the champion through promotions, rollbacks and damage until SIGTERM.

Also tests that a hook can deploy.
"""

import errno
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from promoted_models import SETTINGS, make_champion, promote_fake_model, store_fake_model, write_fake_export
from ratchet.config.promote import HookSettings
from ratchet.errors import SettingsError
from ratchet.registry import outbox
from ratchet.stages import deploy as stage
from ratchet.stages.deploy import DeployOptions, DeployResult, check_release, watch_champion
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout

QUIET = DeployOptions(smoke_test=False)
CODE = """
import signal, sys
from pathlib import Path
from ratchet.cli.deploy import format_deployment
from ratchet.stages import deploy
from ratchet.stages.project import Project
from ratchet.config.settings import Settings
from ratchet.storage.layout import ProjectLayout

def interrupt(number, frame):  # as the command line does
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, interrupt)
deploy.POLL_INTERVAL_S = 0.02
report = lambda text: print(text.replace(chr(10), " "), flush=True)
report_deployment = lambda result: report(format_deployment(result))
project = Project.from_parts(ProjectLayout(Path(sys.argv[1])), Settings())
directory, options = Path(sys.argv[2]), deploy.DeployOptions(smoke_test=False)
report("watching")
try:
    deploy.watch_champion(project, directory, options, report_deployment, report)
except KeyboardInterrupt:
    report("stopped watching")
"""
WAIT_S = 60.0


class Watching:
    """Runs a watch in its own process, and reads its output."""

    def __init__(self, project: ProjectLayout, served: Path) -> None:
        command = [sys.executable, "-c", CODE, str(project.root), str(served)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            for line in stream:
                self._lines.put(line)

    def said(self) -> str:
        """Return the next line; a silent watch fails the test after WAIT_S seconds."""
        return self._lines.get(timeout=WAIT_S)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()


@pytest.fixture
def served(tmp_path: Path) -> Path:
    return tmp_path / "served"


@pytest.fixture
def watching(project: ProjectLayout, served: Path) -> Iterator[Watching]:
    found = Watching(project, served)
    yield found
    found.end()


def version(layout: ProjectLayout, served: Path) -> int:
    return check_release(layout, served / "current").version


def test_a_watch_follows_promotions_and_rollbacks(project: ProjectLayout, served: Path, watching: Watching) -> None:
    assert watching.said().startswith("watching")
    assert "there is no champion yet" in watching.said()
    a = promote_fake_model(project, "a")
    assert "version 1 " in watching.said()
    assert version(project, served) == 1
    promote_fake_model(project, "b")
    assert "version 2 " in watching.said()
    make_champion(project, a.model_digest, "rollback", "it swears")
    assert "version 1 " in watching.said()
    assert version(project, served) == 1
    history = [json.loads(line) for line in (served / "deployments.jsonl").read_text().splitlines()]
    assert [(e["version"], e["event"]) for e in history] == [(1, "event0"), (2, "event1"), (1, "event2")]
    watching.process.send_signal(signal.SIGTERM)
    assert watching.said().startswith("stopped watching")
    assert watching.process.wait(WAIT_S) == 0


@pytest.mark.long
def test_a_watch_continues_after_refusals(project: ProjectLayout, served: Path, watching: Watching) -> None:
    promote_fake_model(project, "a")
    while "version 1 " not in (line := watching.said()):
        assert "watching" in line or "no champion" in line
    whole = project.promotions.read_bytes()
    files.write_atomic(project.promotions, whole[:-20])  # an incomplete file, as an unfinished pull may leave it
    assert "promotions.jsonl:1: not an entry" in watching.said()
    files.write_atomic(project.promotions, whole)
    assert "already" in watching.said()
    bad = project.root / "bad"
    write_fake_export(bad, "b")
    bundle = store_fake_model(project, bad, ("hf", "gguf/q8_0"))
    folder = project.promoted_model(bundle.model_digest)
    (folder / "model.sig").unlink()
    make_champion(project, bundle.model_digest)
    assert "model.sig: missing, but listed in the manifest" in watching.said()
    assert version(project, served) == 1
    promote_fake_model(project, "c")
    assert "version 3 " in watching.said()
    assert version(project, served) == 3


def test_transient_failures_are_retried(project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch reports a full disk once, and retries without a new promotion."""
    promote_fake_model(project, "a")
    attempts, results, problems = list[object](), list[DeployResult](), list[str]()
    real_deploy = stage.deploy

    def fail_twice(*arguments: object) -> DeployResult:
        attempts.append(arguments)
        if len(attempts) < 3:
            raise OSError(errno.ENOSPC, "No space left on device", "disk")
        return real_deploy(*arguments)  # type: ignore[arg-type]

    def stop_after_success(seconds: float) -> None:
        if results:
            raise KeyboardInterrupt

    monkeypatch.setattr(stage, "deploy", fail_twice)
    monkeypatch.setattr(stage, "RETRY_AFTER_S", 0.001)
    monkeypatch.setattr(time, "sleep", stop_after_success)
    with pytest.raises(KeyboardInterrupt):
        watch_champion(Project.from_parts(project, SETTINGS), served, QUIET, results.append, problems.append)
    assert len(attempts) == 3
    assert ["No space left" in text for text in problems] == [True]
    assert [result.status for result in results] == ["deployed"]


def test_a_watch_refuses_a_version(project: ProjectLayout, served: Path) -> None:
    for options in (DeployOptions(version=1), DeployOptions(rollback=True)):
        with pytest.raises(SettingsError, match="--watch follows the champion"):
            watch_champion(Project.from_parts(project, SETTINGS), served, options, print, print)


def test_a_promotion_hook_deploys(project: ProjectLayout, served: Path, tmp_path: Path) -> None:
    """A command hook, started by a promotion in the project's root, can deploy too."""
    promote_fake_model(project, "a")
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"id": "1", "action": "promote"}))
    code = CODE[: CODE.index('report("watching")')] + "report_deployment(deploy.deploy(project, directory, options))"
    hook = HookSettings(command=(sys.executable, "-c", code, str(project.root), str(served)), retries=0)
    outcome = outbox.send_event(hook, event, project.root)
    assert outcome.is_delivered, "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert version(project, served) == 1
