"""Tests webhook events of the gate and of promotions, sent to a real server by the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

import promotion_project
from promotion_project import write_outputs
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import GateError, SettingsError
from ratchet.stages.callbacks import notify_promotions, notify_verdict
from ratchet.stages.project import Project
from ratchet.stages.promote import PromoteOptions, promote, rollback
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Verdict
from ratchet.tracking.webhook import VARIABLE
from receiver import Receiver, served


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(body) for _, _, body in receiver.got]


@pytest.fixture(autouse=True)
def actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_ACTOR", "ada@example.org")


def test_every_change_of_the_champion_is_posted_once(
    tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, settings = tracked_project, promotion_project.SETTINGS
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    with served(200) as receiver:
        monkeypatch.setenv(VARIABLE, receiver.url)
        for model in "ab":
            write_outputs(layout, model)
            assert main(["--project", str(layout.root), "promote"]) == 0
        assert main(["--project", str(layout.root), "promote"]) == 0  # the model is already champion
        project = Project.from_parts(layout, settings)
        rollback(project, 1, PromoteOptions(reason="worse on Mondays"), promotion_project.accept_model)
    told = bodies(receiver)
    assert [(one["action"], one["version"], one["previous_version"]) for one in told] == [
        ("promote", 1, None), ("promote", 2, 1), ("rollback", 1, 2),
    ]  # fmt: skip
    assert told[0]["text"] == "my project: version 1 of ratchet-model is champion now (ada@example.org)"
    assert (told[2]["reason"], told[2]["event"]) == ("worse on Mondays", "promoted")


def test_a_promotion_that_is_refused_is_no_news(
    tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_outputs(tracked_project, "a", "HOLD")
    with served(200) as receiver:
        monkeypatch.setenv(VARIABLE, receiver.url)
        with pytest.raises(GateError):
            promote(Project.from_parts(tracked_project, promotion_project.SETTINGS))
    assert receiver.got == []


def test_an_address_that_is_none_is_refused_before_anything_is_promoted(
    tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "hooks/xyzzy")
    for notify in (notify_promotions, notify_verdict):
        with (
            pytest.raises(SettingsError, match="expected a URL such as https"),
            notify(Project.from_parts(tracked_project, Settings())),
        ):
            pytest.fail("begun")


@pytest.mark.parametrize("decision", ["PROMOTE", "HOLD"])
def test_a_verdict_is_posted_and_written_for_prometheus(
    decision: str, tracked_project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ratchet.prom"
    machine = Settings().machine.model_copy(update={"metrics_file": str(path)})
    with served(200) as receiver:
        monkeypatch.setenv(VARIABLE, receiver.url)
        with notify_verdict(Project.from_parts(tracked_project, Settings(machine=machine))):
            write_outputs(tracked_project, "a", decision)
    [body] = bodies(receiver)
    verdict = Verdict.load(tracked_project.verdict)
    assert (body["event"], body["decision"], body["run"]) == ("gated", decision, verdict.run_id)
    assert body["text"] == f"my project: gate: {decision} for model {verdict.model_digest[:12]} of run run-a"
    text = (tmp_path / "ratchet-gate.prom").read_text(encoding="utf-8")
    assert f'ratchet_gate_verdict{{run="run-a",verdict="{decision}"}} 1.0' in text
