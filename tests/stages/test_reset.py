"""Tests of `ratchet reset`: it shows what would be lost, asks for confirmation, and removes all of a run or nothing."""

import io
import json
import os
import sys
from pathlib import Path

import pytest

from ratchet.cli.main import main
from ratchet.cli.reset import format_reset, format_target
from ratchet.config.train import Train
from ratchet.errors import DataError, LockHeldError, SettingsError, StorageError
from ratchet.runs.directory import RESULT, RunDirectory, RunPaths, RunSpec
from ratchet.runs.journal import JournalEvent
from ratchet.stages.reset import ResetTarget, reset
from ratchet.stages.status import StatusReport
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Champion, ChampionFile
from ratchet.storage.records.training import TrainReport


def make(layout: ProjectLayout, seed: int = 0) -> RunPaths:
    run = RunDirectory.open(layout.runs, RunSpec(train=Train(seed=seed), data_digest="d" * 64, base_digest="b" * 64))
    run.journal.append("attempt_started", pid=1, code_version="1")
    run.journal.append("worker_ready", start_step=0, planned_steps=40)
    run.journal.append("step", step=7, loss=1.0, learning_rate=0.1, trained_tokens=1, input_tokens=1, step_s=1.0)
    run.paths.checkpoint(7).mkdir()
    (run.paths.checkpoint(7) / "weights").write_bytes(b"w" * 300_000)
    run.close()
    return run.paths


@pytest.fixture
def layout(tmp_path: Path) -> ProjectLayout:
    return ProjectLayout(tmp_path)


@pytest.fixture
def run(layout: ProjectLayout) -> RunPaths:
    return make(layout)


def report(run_id: str) -> TrainReport:
    return TrainReport(
        run_id=run_id, adapter_digest="a", base_digest="b", data_digest="d", steps=1, planned_steps=1, best_step=1,
        kept_step=1, validation_loss={1: 1.0}, final_train_loss=1.0, trained_tokens=1, input_tokens=1,
        trainable_parameters=1, total_parameters=1,
    )  # fmt: skip


def champion(run_id: str) -> Champion:
    return Champion(version=1, model_digest="m", adapter_digest="a", run_id=run_id)


def test_the_named_run_is_removed_and_others_stay(layout: ProjectLayout, run: RunPaths) -> None:
    other = make(layout, seed=1)
    result = reset(layout, run.root.name[:6])
    assert result.was_removed
    target = result.target
    assert (target.run_id, target.kind, target.step, target.planned_steps) == (run.root.name, "training", 7, 40)
    assert (target.has_result, target.is_train_output, target.champion) == (False, False, None)
    assert target.size_bytes >= 300_000
    text = format_reset(result)
    assert f"run {run.root.name}: step 7 of 40, " in text
    assert text.endswith("it has no result yet\nremoved")
    assert list(layout.runs.iterdir()) == [other.root]


def refuse(layout: ProjectLayout, run: RunPaths) -> str:
    """Reset a run without confirming; return the text that is shown to the user."""
    targets: list[ResetTarget] = []

    def confirm(target: ResetTarget) -> bool:
        targets.append(target)
        return False

    result = reset(layout, run.root.name, confirm)
    assert format_reset(result) == f"run {run.root.name} was kept"
    assert run.journal.exists()
    assert targets == [result.target]
    return format_target(result.target)


def test_the_user_is_shown_what_would_be_lost(layout: ProjectLayout, run: RunPaths) -> None:
    report("other").save(layout.train_report)
    ChampionFile(champion=champion("other")).save(layout.champion)
    assert "comes from it" not in refuse(layout, run)
    ChampionFile(champion=champion("other"), previous=(champion(run.root.name),)).save(layout.champion)
    assert "an earlier champion comes from it" in refuse(layout, run)
    with files.sealed_directory(run.result, RESULT) as scratch:
        (scratch / "train.json").write_bytes(b"{}")
    report(run.root.name).save(layout.train_report)
    ChampionFile(champion=champion(run.root.name)).save(layout.champion)
    question = refuse(layout, run)
    assert "KiB; its result is complete" in question
    assert "experiments/train comes from it: those files stay" in question
    assert "the champion comes from it: the promoted model stays" in question


class Terminal(io.StringIO):
    """Standard input that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def project_run(project: ProjectLayout) -> RunPaths:
    """Create a run in a project that the CLI can open."""
    return make(project)


def answer(paths: RunPaths, text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run `ratchet reset RUN` and answer its question with `text`; return the exit code."""
    monkeypatch.setattr(sys, "stdin", Terminal(text))
    return main(["--project", str(paths.root.parent.parent), "reset", paths.root.name])


@pytest.mark.parametrize("text", ["y", "yes", " YES \n", "Y"])
def test_yes_removes(
    project_run: RunPaths, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(project_run, text, monkeypatch) == 0
    assert not project_run.root.exists()
    printed = capsys.readouterr()
    assert printed.err.endswith("remove it permanently? [y/N] ")
    assert printed.out.endswith("\nremoved\n")


def test_every_other_answer_keeps_the_run(
    project_run: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("", "\n", "n", "no", "yep"):  # the empty text is the end of the input
        assert answer(project_run, text, monkeypatch) == 0
        assert capsys.readouterr().out == f"run {project_run.root.name} was kept\n"
        assert project_run.checkpoint_steps() == [7]


def test_without_a_terminal_only_yes_removes(
    project_run: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--project", str(project_run.root.parent.parent), "reset", project_run.root.name]
    with Path(os.devnull).open() as nowhere, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", nowhere)
        assert main(command) == 2
    assert "nothing was removed: no terminal to ask on; `--yes` removes it" in capsys.readouterr().err
    assert project_run.checkpoint_steps() == [7]
    assert main([*command, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["was_removed"]
    assert not project_run.root.exists()


def test_status_prints_the_record_as_json(project_run: RunPaths, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--project", str(project_run.root.parent.parent), "status", "--json"]) == 0
    report = StatusReport.model_validate_json(capsys.readouterr().out)
    [run] = report.runs
    assert (run.run_id, run.kind, run.state, run.step) == (project_run.root.name, "training", "not_running", 7)
    assert (run.planned_steps, run.loss, report.champion) == (40, 1.0, None)


def test_a_reset_that_is_refused_keeps_the_run(
    layout: ProjectLayout, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(operation: str, path: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    in_use = rf"run {run.root.name} is in use by process {os.getpid()}"
    with run.lock().acquire(), pytest.raises(LockHeldError, match=in_use):
        reset(layout, run.root.name)
    assert run.checkpoint_steps() == [7]
    monkeypatch.setattr(files, "before", fail)
    with pytest.raises(StorageError, match="Read-only file system"):
        reset(layout, run.root.name)
    assert run.checkpoint_steps() == [7]


def test_no_training_can_start_while_the_user_is_asked(layout: ProjectLayout, run: RunPaths) -> None:
    def confirm(target: ResetTarget) -> bool:
        with pytest.raises(LockHeldError):
            run.lock().acquire()
        return True

    reset(layout, run.root.name, confirm)
    assert not run.root.exists()


def test_reset_refuses_an_empty_run_id(layout: ProjectLayout, run: RunPaths) -> None:
    with pytest.raises(SettingsError, match="which run"):
        reset(layout, "")
    assert run.root.exists()


def test_a_missing_run_is_reported_with_those_that_exist(layout: ProjectLayout, run: RunPaths) -> None:
    with pytest.raises(DataError, match=rf"zzz: matches no run in .*; found: {run.root.name}"):
        reset(layout, "zzz")
    with pytest.raises(DataError, match="found: none"):
        reset(ProjectLayout(layout.root / "empty"), "zzz")


def test_a_run_of_a_newer_version_or_without_a_journal_can_be_removed(layout: ProjectLayout, run: RunPaths) -> None:
    other = make(layout, seed=1)
    other.format.write_text('{"format": 99}')
    reset(layout, other.root.name)
    assert not other.root.exists()
    run.journal.unlink()
    assert "step 0 of ?" in format_reset(reset(layout, run.root.name))
    assert not run.root.exists()


def test_leftovers_of_a_killed_reset_are_removed_but_not_those_of_a_running_one(
    layout: ProjectLayout, run: RunPaths
) -> None:
    dead = layout.runs / f"{files.PARTIAL}old-doomed-4194305"  # above the largest process id of Linux
    alive = layout.runs / f"{files.PARTIAL}other-doomed-{os.getppid()}"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "journal.jsonl").write_bytes(JournalEvent("notice", 9e9, 1, {"text": "x"}).line())
    reset(layout, run.root.name)
    assert list(layout.runs.iterdir()) == [alive]


def test_a_run_that_was_moved_to_another_disk_is_removed_there(
    layout: ProjectLayout, run: RunPaths, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    run.root.rename(tmp_path / "disk" / run.root.name)
    run.root.symlink_to(tmp_path / "disk" / run.root.name)
    reset(layout, run.root.name)
    assert list((tmp_path / "disk").iterdir()) == []
    assert list(layout.runs.iterdir()) == []
