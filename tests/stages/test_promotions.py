"""`ratchet promotions`: the timeline, and every way in which it may no longer be true."""

import json
import subprocess
from pathlib import Path

import pytest

from promotable import NAME, SETTINGS, chain, stage, tree, with_hooks, works
from ratchet.config.gate import HookSettings
from ratchet.registry import ledger
from ratchet.stages.promote import PromoteOptions, promote, rollback
from ratchet.stages.promotions import promotions
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.registry import MlflowModelRegistry


@pytest.fixture(autouse=True)
def ada(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ledger.VARIABLE, "ada")


@pytest.fixture
def history(tracked_project: ProjectLayout) -> ProjectLayout:
    """a, then b by force, then a again."""
    stage(tracked_project, "a")
    promote(tracked_project, SETTINGS)
    stage(tracked_project, "b", "REJECT")
    promote(tracked_project, SETTINGS, PromoteOptions(force=True, reason="it is Friday"))
    rollback(tracked_project, SETTINGS, None, PromoteOptions(reason="it was"), works)
    return tracked_project


def test_the_timeline_and_what_may_be_wrong_with_it(history: ProjectLayout) -> None:
    before = tree(history.root)
    well, text = promotions(history, SETTINGS)
    assert well
    lines = text.splitlines()
    assert lines[0].split() == ["time", "action", "version", "from", "model", "verdict", "by"]
    cells = [line.split()[1:4] for line in lines if "promote" in line[:40] or "rollback" in line[:40]]
    assert cells == [["promote", "1", "-"], ["promote", "2", "1"], ["rollback", "1", "2"]]
    assert "REJECT FORCED" in text
    for part in ("reason: it is Friday", "reason: it was", "became the anchor", "the chain is whole: 3 lines"):
        assert part in text
    assert tree(history.root) == before

    _, text = promotions(history, SETTINGS, as_json=True)
    shown = json.loads(text)
    assert [entry["version"] for entry in shown["entries"]] == [1, 2, 1]
    assert shown["broken"] == []

    MlflowModelRegistry(history, NAME).set_champion(2, expected=1)
    well, text = promotions(history, SETTINGS)
    assert not well
    assert "names version 1, but the registry's alias is at version 2; choose: `ratchet rollback 1`" in text
    MlflowModelRegistry(history, NAME).set_champion(1, expected=2)

    content = history.promotions.read_text()
    history.promotions.write_text(content.replace("it is Friday", "it is good"))
    well, text = promotions(history, SETTINGS)
    assert not well
    assert "promotions.jsonl:2: changed" in text
    history.promotions.write_text("".join(content.splitlines(keepends=True)[:2]))
    well, text = promotions(history, SETTINGS)
    assert not well
    assert "the tail was cut off" in text
    history.promotions.write_text(content)

    history.mlruns.rename(history.root / "elsewhere")  # as in a clone
    well, text = promotions(history, SETTINGS)
    assert well
    assert "the alias was not compared" in text
    assert not history.mlruns.exists()


def test_before_the_first_promotion(project: ProjectLayout) -> None:
    assert promotions(project, SETTINGS) == (True, "nothing was promoted yet")
    assert promotions(project, SETTINGS, deliver=True) == (True, "nothing was promoted yet\nno hook was given up")


def test_hooks_get_events_and_failed_ones_are_repeated_on_request(tracked_project: ProjectLayout) -> None:
    stage(tracked_project, "a")
    settings = with_hooks(HookSettings(command=("sh", "-c", "cat > told.json")), HookSettings(command=("no-such",)))
    text = promote(tracked_project, settings)
    assert "command sh: told (exit code 0)" in text
    assert "warning: command no-such: not told" in text
    [entry] = chain(tracked_project)
    event = json.loads((tracked_project.root / "told.json").read_bytes())
    assert (event["id"], event["version"], event["model_name"], event["line"]) == (entry.id, 1, NAME, 1)
    assert event["source"] == tracked_project.promoted_model(entry.model_digest).as_uri()
    assert event["project"] == "my project"

    well, text = promotions(tracked_project, settings)
    assert well
    assert "command no-such: NOT told (does not start" in text
    (tracked_project.root / "told.json").unlink()
    mended = with_hooks(settings.promote.hooks[0], HookSettings(command=("touch", "mended")))
    _, text = promotions(tracked_project, mended, deliver=True)
    assert "telling hooks again of 1 event" in text
    assert "command touch: told" in text
    assert (tracked_project.root / "mended").exists()
    assert not (tracked_project.root / "told.json").exists()  # who was told is not told again


def test_the_actor_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ledger.current_actor(tmp_path) == "ada"
    monkeypatch.setenv(ledger.VARIABLE, " ci\n\x1b[31m bot ")
    assert ledger.current_actor(tmp_path) == "ci \\u001b[31m bot"
    monkeypatch.setenv(ledger.VARIABLE, "")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    monkeypatch.setenv("LOGNAME", "lovelace")
    assert ledger.current_actor(tmp_path) == "lovelace"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "config", "user.email", "ada@example.org"], check=True)
    assert ledger.current_actor(tmp_path) == "ada@example.org"
    monkeypatch.setenv("PATH", "")
    assert ledger.current_actor(tmp_path) == "lovelace"
