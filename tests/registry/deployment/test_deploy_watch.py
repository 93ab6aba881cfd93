"""`--watch` follows the champion through promotions, rollbacks and damage, until SIGTERM; and hooks can do the same."""

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

from deployable import SETTINGS, crown, few_bytes, keep, promoted
from ratchet.config.gate import HookSettings
from ratchet.errors import SettingsError
from ratchet.registry import hooks
from ratchet.stages import deploy as stage
from ratchet.stages.deploy import DeployOptions, check_release, watch_champion
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout

QUIET = DeployOptions(smoke=False)
CODE = """
import signal, sys
from pathlib import Path
from ratchet.stages import deploy
from ratchet.config.schema import Settings
from ratchet.storage.layout import ProjectLayout

def interrupt(number, frame):  # as the command line does
    raise KeyboardInterrupt

signal.signal(signal.SIGTERM, interrupt)
deploy.POLL_S = 0.02
say = lambda text: print(text.replace(chr(10), " "), flush=True)
layout, options = ProjectLayout(Path(sys.argv[1])), deploy.DeployOptions(smoke=False)
sys.exit(deploy.watch_champion(layout, Settings(), Path(sys.argv[2]), options, say))
"""
WAIT_S = 60.0


class Watching:
    """A watch in a process of its own, and what it says."""

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
        """The next line; a watch that says nothing fails the test instead of holding it up."""
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
    assert watching.said().startswith("watching ")
    assert "there is no champion yet" in watching.said()
    a = promoted(project, "a")
    assert "version 1 " in watching.said()
    assert version(project, served) == 1
    promoted(project, "b")
    assert "version 2 " in watching.said()
    crown(project, a.model_digest, "rollback", "it swears")
    assert "version 1 " in watching.said()
    assert version(project, served) == 1
    history = [json.loads(line) for line in (served / "deployments.jsonl").read_text().splitlines()]
    assert [(e["version"], e["event"]) for e in history] == [(1, "event0"), (2, "event1"), (1, "event2")]
    watching.process.send_signal(signal.SIGTERM)
    assert watching.said().startswith("stopped watching")
    assert watching.process.wait(WAIT_S) == 0


def test_a_watch_continues_after_refusals(project: ProjectLayout, served: Path, watching: Watching) -> None:
    promoted(project, "a")
    while "version 1 " not in (line := watching.said()):
        assert "watching" in line or "no champion" in line
    whole = project.promotions.read_bytes()
    files.write_atomic(project.promotions, whole[:-20])  # as a pull that is not through may leave it
    assert "promotions.jsonl:1: no entry" in watching.said()
    files.write_atomic(project.promotions, whole)
    assert "already" in watching.said()
    bad = project.root / "bad"
    few_bytes(bad, "b")
    bundle = keep(project, bad, ("hf", "gguf/q8_0"))
    folder = project.promoted_model(bundle.model_digest)
    (folder / "model.sig").unlink()
    crown(project, bundle.model_digest)
    assert "model.sig: missing although the manifest names it" in watching.said()
    assert version(project, served) == 1
    promoted(project, "c")
    assert "version 3 " in watching.said()
    assert version(project, served) == 3


def test_transient_failures_are_retried(project: ProjectLayout, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is reported once, and retried without a new promotion."""
    promoted(project, "a")
    tries, told = [], list[str]()
    really = stage.deploy

    def deploy(*about: object) -> str:
        tries.append(about)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device", "disk")
        return really(*about)  # type: ignore[arg-type]

    def sleep(seconds: float) -> None:
        if told and "is current" in told[-1]:
            raise KeyboardInterrupt

    monkeypatch.setattr(stage, "deploy", deploy)
    monkeypatch.setattr(stage, "AGAIN_S", 0.001)
    monkeypatch.setattr(time, "sleep", sleep)
    assert watch_champion(project, SETTINGS, served, QUIET, told.append) == 0
    assert len(tries) == 3
    assert ["No space left" in text for text in told] == [False, True, False, False]


def test_a_watch_takes_no_version(project: ProjectLayout, served: Path) -> None:
    for options in (DeployOptions(version=1), DeployOptions(rollback=True)):
        with pytest.raises(SettingsError, match="--watch follows the champion"):
            watch_champion(project, SETTINGS, served, options, print)


def test_a_promotion_hook_deploys(project: ProjectLayout, served: Path, tmp_path: Path) -> None:
    """The other way to follow: a hook of kind command, started by promotion in the project's root."""
    promoted(project, "a")
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"id": "1", "action": "promote"}))
    code = CODE.replace("sys.exit(deploy.watch_champion(", "print(deploy.deploy(").replace(", say))", "))")
    hook = HookSettings(command=(sys.executable, "-c", code, str(project.root), str(served)), retries=0)
    outcome = hooks.send_event(hook, event, project.root)
    assert outcome.told, "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert version(project, served) == 1
