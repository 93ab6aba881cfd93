"""Tests the registry: it has each model once and one champion."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from ratchet.config.promote import Promote
from ratchet.config.settings import Settings
from ratchet.errors import ChampionError, TrackingError
from ratchet.registry.promotion import PromotionIntent
from ratchet.stages.promote import recover_interrupted
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Champion
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.registry import MlflowModelRegistry

A, B, C = "a" * 64, "b" * 64, "c" * 64


def test_a_model_is_registered_once(tracked_project: ProjectLayout) -> None:
    registry = MlflowModelRegistry(tracked_project, "model")
    folder = tracked_project.models / "x"
    first = registry.ensure_version(A, folder, "run-a", {"ratchet.run_id": "run-a"})
    other = registry.ensure_version(B, folder, "run-b", {})
    again = MlflowModelRegistry(tracked_project, "model").ensure_version(
        A, folder, "run-a", {"ratchet.run_id": "changed"}
    )
    assert (first, other, again) == (1, 2, 1)
    found = registry.version(1)
    assert found is not None
    assert (found.model_digest, found.tags["ratchet.run_id"]) == (A, "run-a")
    assert Path(found.source.removeprefix("file://").replace("%20", " ")) == folder
    assert [v.number for v in registry.versions()] == [1, 2]
    assert registry.version(3) is None
    theirs = MlflowModelRegistry(tracked_project, "theirs")
    assert theirs.versions() == [], "models of another name"
    assert theirs.ensure_version(A, folder, "run", {}) == 1


def test_alias_moves_only_between_known_versions_and_from_where_it_was_seen(tracked_project: ProjectLayout) -> None:
    registry = MlflowModelRegistry(tracked_project, "model")
    assert registry.champion() is None
    for digest in (A, B):
        registry.ensure_version(digest, tracked_project.models, "run", {})
    with pytest.raises(TrackingError, match="7"):
        registry.set_champion(7, expected=None)
    assert registry.champion() is None
    registry.set_champion(2, expected=None)
    assert registry.champion() == 2
    registry.set_champion(2, expected=None)  # the version is already champion
    registry.set_champion(1, expected=2)
    for expected, said in ((None, "from no version to version 1"), (3, "from version 3 to version 1")):
        with pytest.raises(ChampionError, match=said):
            registry.set_champion(2, expected)
    assert MlflowModelRegistry(tracked_project, "model").champion() == 1


def test_asking_makes_no_database(project: ProjectLayout) -> None:
    registry = MlflowModelRegistry(project, "model")
    assert registry.champion() is None
    assert registry.versions() == []
    assert not project.mlruns.exists()


@pytest.mark.parametrize("content", [b"this is no database, but it is long enough to have a header" * 20, None])
def test_broken_database_is_reported_without_retries(
    project: ProjectLayout, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.mlruns.mkdir()
    if content is None:
        project.mlflow_database.mkdir()  # a directory cannot be opened as a file, even by root
    else:
        project.mlflow_database.write_bytes(content)
    slept_s: list[float] = []
    monkeypatch.setattr("mlflow.store.db.utils.time", SimpleNamespace(sleep=slept_s.append))
    with pytest.raises(TrackingError, match=r"mlflow\.db"):
        MlflowModelRegistry(project, "model").champion()
    assert slept_s == [], "MLflow alone retries for 100 s"


def test_what_is_told_of_a_version_stands_on_its_run_too(tracked_project: ProjectLayout) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracked_project.mlflow_database}")
    run = client.create_run(client.create_experiment("model"), tags={"ratchet.run_id": "run-a"}).info.run_id
    registry = MlflowModelRegistry(tracked_project, "model")
    assert registry.ensure_version(A, tracked_project.models, "run-a", {}) == 1
    registry.ensure_version(B, tracked_project.models, "run-of-another-machine", {})
    registry.annotate_version(1, "run-a", {"ratchet.forced": "true"}, "in words")
    registry.annotate_version(1, "run-a", {"ratchet.forced": "false"}, None)
    registry.annotate_version(2, "run-of-another-machine", {"ratchet.forced": "true"}, None)
    version = client.get_model_version("model", "1")
    assert (version.run_id, version.tags["ratchet.forced"], version.description) == (run, "false", "in words")
    tags = client.get_run(run).data.tags
    assert (tags["ratchet.forced"], tags["ratchet.version"]) == ("false", "1")
    assert registry.find_version(B) == 2
    assert registry.find_version(C) is None


def test_a_promotion_of_a_renamed_model_is_completed_in_the_named_experiment(
    tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "team")
    old, new = (
        MlflowModelRegistry.open(tracked_project, Settings(promote=Promote(model_name=name))) for name in ("old", "new")
    )
    client = MlflowClient(f"sqlite:///{tracked_project.mlflow_database}")
    run = client.create_run(client.create_experiment("team"), tags={"ratchet.run_id": "run-a"}).info.run_id
    assert old.ensure_version(A, tracked_project.models, "run-a", {}) == 1
    old.set_champion(1, expected=None)
    champion = Champion(version=1, model_digest=A, adapter_digest="a" * 64, run_id="run-a")
    PromotionIntent(
        id="event", time="2026-01-01T00:00:00+00:00", action="promote", actor="ada", project="project",
        model_name="old", champion=champion, alias=None, previous_version=None, decision="PROMOTE", reason=None,
        is_anchor=False,
    ).save(tracked_project.promotion_intent)  # fmt: skip
    [note] = recover_interrupted(tracked_project, new)
    assert "completed" in note
    assert client.get_run(run).data.tags["ratchet.version"] == "1"


def test_a_copied_project_writes_into_itself_and_not_into_the_one_it_was_copied_from(
    tracked_project: ProjectLayout, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = Settings()
    first = MlflowTracker(tracked_project, "model")
    first.find_or_create("run-a", 1)
    MlflowModelRegistry(tracked_project, "model").ensure_version(A, tracked_project.models / "x", "run-a", {})
    copied = ProjectLayout(tmp_path / "elsewhere" / "a copy")
    shutil.copytree(tracked_project.root, copied.root)
    before = {path: path.read_bytes() for path in tracked_project.mlruns.rglob("*") if path.is_file()}

    note = tmp_path / "note.txt"
    note.write_text("from the copy", encoding="utf-8")
    MlflowTracker(copied, settings.promote.model_name).find("run-a")
    MlflowTracker(copied, "model").log_report("run-a", {"x": 1.0}, {"notes": [note]}, {})
    assert len(list(copied.artifacts.rglob("note.txt"))) == 1
    assert {path: path.read_bytes() for path in tracked_project.mlruns.rglob("*") if path.is_file()} == before
    version = MlflowModelRegistry(copied, "model").version(1)
    assert version is not None
    assert version.source == (copied.models / "x").as_uri()
    assert capfd.readouterr().err.count("was moved or copied") == 1, "told once: then it is so"
