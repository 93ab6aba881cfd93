"""Tests of `ratchet promotions`: the history of champions, and every inconsistency that it reports."""

import json
import subprocess
from pathlib import Path

import pytest

from promotion_project import NAME, SETTINGS, accept_model, read_ledger, read_tree, with_hooks, write_outputs
from ratchet.cli.main import main
from ratchet.cli.promote import format_promotion
from ratchet.cli.promotions import format_history
from ratchet.config.promote import HookSettings
from ratchet.stages.project import Project
from ratchet.stages.promote import PromoteOptions, promote, rollback
from ratchet.stages.promotions import PromotionHistory, promotions
from ratchet.storage import actors
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.registry import MlflowModelRegistry


@pytest.fixture(autouse=True)
def ada(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(actors.ACTOR_VARIABLE, "ada")


@pytest.fixture
def history(tracked_project: ProjectLayout) -> ProjectLayout:
    """Promote a, promote b by force, then roll back to a."""
    write_outputs(tracked_project, "a")
    promote(Project.from_parts(tracked_project, SETTINGS))
    write_outputs(tracked_project, "b", "REJECT")
    promote(Project.from_parts(tracked_project, SETTINGS), PromoteOptions(force=True, reason="it is Friday"))
    rollback(Project.from_parts(tracked_project, SETTINGS), None, PromoteOptions(reason="it was"), accept_model)
    return tracked_project


def test_the_history_and_every_disagreement(history: ProjectLayout, capsys: pytest.CaptureFixture[str]) -> None:
    before = read_tree(history.root)
    shown = promotions(Project.from_parts(history, SETTINGS))
    assert [entry.promotion.version for entry in shown.entries] == [1, 2, 1]
    assert shown.problems == ()
    text = format_history(shown)
    lines = text.splitlines()
    assert lines[0].split() == ["time", "action", "version", "from", "model", "verdict", "by"]
    cells = [
        list_champions.split()[1:4]
        for list_champions in lines
        if "promote" in list_champions[:40] or "rollback" in list_champions[:40]
    ]
    assert cells == [["promote", "1", "-"], ["promote", "2", "1"], ["rollback", "1", "2"]]
    assert "REJECT FORCED" in text
    for part in ("reason: it is Friday", "reason: it was", "became the anchor", "the ledger is intact: 3 lines"):
        assert part in text
    assert read_tree(history.root) == before

    assert main(["--project", str(history.root), "promotions", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [entry["promotion"]["version"] for entry in printed["entries"]] == [1, 2, 1]
    assert printed["problems"] == []

    MlflowModelRegistry(history, NAME).set_champion(2, expected=1)
    shown = promotions(Project.from_parts(history, SETTINGS))
    assert len(shown.problems) == 1
    text = format_history(shown)
    assert "names version 1 (" in text
    assert ", but the registry's alias points to version 2" in text
    assert "choose one: `ratchet rollback 1` or `ratchet rollback 2 --reason TEXT`" in text
    MlflowModelRegistry(history, NAME).set_champion(1, expected=2)

    content = history.promotions.read_text()
    history.promotions.write_text(content.replace("it is Friday", "it is good"))
    shown = promotions(Project.from_parts(history, SETTINGS))
    assert len(shown.problems) == 1
    text = format_history(shown)
    assert "promotions.jsonl:2: changed" in text
    history.promotions.write_text("".join(content.splitlines(keepends=True)[:2]))
    shown = promotions(Project.from_parts(history, SETTINGS))
    assert len(shown.problems) == 1
    text = format_history(shown)
    assert "was removed, or the two files are from different commits" in text
    history.promotions.write_text(content)

    history.mlruns.rename(history.root / "elsewhere")  # a clone has no registry
    shown = promotions(Project.from_parts(history, SETTINGS))
    assert shown.problems == ()
    assert "the alias was not compared" in format_history(shown)
    assert not history.mlruns.exists()


def test_before_the_first_promotion(project: ProjectLayout) -> None:
    empty = Project.from_parts(project, SETTINGS)
    assert promotions(empty) == PromotionHistory(entries=(), problems=(), notes=())
    assert format_history(promotions(empty)) == "nothing was promoted yet"
    assert format_history(promotions(empty, deliver=True)) == "nothing was promoted yet\nno failed hook to call again"


def test_hooks_get_events_and_failed_ones_are_repeated_on_request(tracked_project: ProjectLayout) -> None:
    write_outputs(tracked_project, "a")
    settings = with_hooks(HookSettings(command=("sh", "-c", "cat > told.json")), HookSettings(command=("no-such",)))
    hooked = Project.from_parts(tracked_project, settings)
    result = promote(hooked)
    assert [delivery.is_delivered for delivery in sorted(result.deliveries, key=lambda one: one.hook)] == [False, True]
    text = format_promotion(result, tracked_project)
    assert "command sh: delivered (exit code 0)" in text
    assert "warning: command no-such: not delivered" in text
    [entry] = read_ledger(tracked_project)
    event = json.loads((tracked_project.root / "told.json").read_bytes())
    assert (event["id"], event["version"], event["model_name"], event["line"]) == (entry.id, 1, NAME, 1)
    assert event["source"] == tracked_project.promoted_model(entry.model_digest).as_uri()
    assert event["project"] == "my project"

    shown = promotions(hooked)
    assert shown.problems == ()
    assert "command no-such: NOT delivered (cannot be started" in format_history(shown)
    (tracked_project.root / "told.json").unlink()
    repaired = with_hooks(settings.promote.hooks[0], HookSettings(command=("touch", "repaired")))
    text = format_history(promotions(Project.from_parts(tracked_project, repaired), deliver=True))
    assert "calling hooks again for 1 event" in text
    assert "command touch: delivered" in text
    assert (tracked_project.root / "repaired").exists()
    assert not (tracked_project.root / "told.json").exists()  # a hook that received the event is not called again


def test_the_actor_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert actors.current_actor(tmp_path) == "ada"
    monkeypatch.setenv(actors.ACTOR_VARIABLE, " ci\n\x1b[31m bot ")
    assert actors.current_actor(tmp_path) == "ci \\u001b[31m bot"
    monkeypatch.setenv(actors.ACTOR_VARIABLE, "")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    monkeypatch.setenv("LOGNAME", "lovelace")
    assert actors.current_actor(tmp_path) == "lovelace"
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "config", "user.email", "ada@example.org"], check=True)
    assert actors.current_actor(tmp_path) == "ada@example.org"
    monkeypatch.setenv("PATH", "")
    assert actors.current_actor(tmp_path) == "lovelace"
