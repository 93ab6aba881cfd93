"""`ratchet reset`: says what is lost, asks, and leaves nothing or everything."""

import os
import sys
from pathlib import Path

import pytest

from ratchet.config.train import Train
from ratchet.errors import DataError, LockHeldError, SettingsError, StorageError
from ratchet.runs.directory import RESULT, Run, RunPaths, RunSpec
from ratchet.runs.journal import JournalEvent
from ratchet.stages import reset
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import TrainReport
from ratchet.storage.records.gate import Champion, ChampionFile


def make(layout: ProjectLayout, seed: int = 0) -> RunPaths:
    run = Run.open(layout.runs, RunSpec(train=Train(seed=seed), data_digest="d" * 64, base_digest="b" * 64))
    run.journal.append("attempt", pid=1, code_version="1")
    run.journal.append("ready", start_step=0, planned_steps=40)
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


def test_with_yes_it_is_gone_and_others_stay(layout: ProjectLayout, run: RunPaths) -> None:
    other = make(layout, seed=1)
    text = reset.reset(layout, run.root.name[:6], yes=True)
    assert f"run {run.root.name}: step 7 of 40, " in text
    assert text.endswith("it has no result yet\nremoved")
    assert list(layout.runs.iterdir()) == [other.root]


def refused_question(layout: ProjectLayout, run: RunPaths) -> str:
    """What is asked, when the answer is no."""
    questions: list[str] = []

    def no(question: str) -> str:
        questions.append(question)
        return "n"

    assert reset.reset(layout, run.root.name, yes=False, ask=no) == f"run {run.root.name} was kept"
    assert run.journal.exists()
    (question,) = questions
    assert question.endswith("remove it for good? [y/N] ")
    return question


def test_the_question_says_what_is_lost(layout: ProjectLayout, run: RunPaths) -> None:
    report("other").save(layout.train_report)
    ChampionFile(champion=champion("other")).save(layout.champion)
    assert "comes from it" not in refused_question(layout, run)
    ChampionFile(champion=champion("other"), previous=(champion(run.root.name),)).save(layout.champion)
    assert "an earlier champion comes from it" in refused_question(layout, run)
    with files.sealed_directory(run.result, RESULT) as scratch:
        (scratch / "train.json").write_bytes(b"{}")
    report(run.root.name).save(layout.train_report)
    ChampionFile(champion=champion(run.root.name)).save(layout.champion)
    question = refused_question(layout, run)
    assert "kB; its result is sealed" in question
    assert "experiments/train comes from it: those files stay" in question
    assert "the champion comes from it: the promoted model stays" in question


@pytest.mark.parametrize("answer", ["y", "yes", " YES \n", "Y"])
def test_yes_removes(layout: ProjectLayout, run: RunPaths, answer: str) -> None:
    assert reset.reset(layout, run.root.name, False, lambda question: answer).endswith("removed")
    assert not run.root.exists()


def test_every_other_answer_keeps_the_run(layout: ProjectLayout, run: RunPaths) -> None:
    def end(question: str) -> str:
        raise EOFError

    for answer in ("", "n", "no", "yep"):
        assert reset.reset(layout, run.root.name, False, lambda question, said=answer: said).endswith("was kept")
        assert run.checkpoint_steps() == [7]
    assert reset.reset(layout, run.root.name, False, end).endswith("was kept")
    assert run.checkpoint_steps() == [7]


def test_a_reset_that_is_refused_keeps_the_run(
    layout: ProjectLayout, run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(operation: str, path: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with Path(os.devnull).open() as nowhere, monkeypatch.context() as patched:
        patched.setattr(sys, "stdin", nowhere)
        with pytest.raises(SettingsError, match="nothing was removed: there is no terminal to ask on; --yes"):
            reset.reset(layout, run.root.name, yes=False)
    assert run.checkpoint_steps() == [7]
    in_use = rf"run {run.root.name} is in use by process {os.getpid()}"
    with run.lock().acquire(), pytest.raises(LockHeldError, match=in_use):
        reset.reset(layout, run.root.name, yes=True)
    assert run.checkpoint_steps() == [7]
    monkeypatch.setattr(files, "before", refuse)
    with pytest.raises(StorageError, match="Read-only file system"):
        reset.reset(layout, run.root.name, yes=True)
    assert run.checkpoint_steps() == [7]


def test_no_training_can_begin_while_the_question_is_asked(layout: ProjectLayout, run: RunPaths) -> None:
    def look(question: str) -> str:
        with pytest.raises(LockHeldError):
            run.lock().acquire()
        return "y"

    reset.reset(layout, run.root.name, False, look)
    assert not run.root.exists()


def test_a_run_that_is_not_there_is_named_with_those_that_are(layout: ProjectLayout, run: RunPaths) -> None:
    with pytest.raises(DataError, match=rf"zzz: no run of that name .*there are: {run.root.name}"):
        reset.reset(layout, "zzz", yes=True)
    with pytest.raises(DataError, match="there are: none"):
        reset.reset(ProjectLayout(layout.root / "empty"), "zzz", yes=True)


def test_a_run_of_a_newer_version_or_without_a_journal_can_be_removed(layout: ProjectLayout, run: RunPaths) -> None:
    other = make(layout, seed=1)
    other.format.write_text('{"format": 99}')
    reset.reset(layout, other.root.name, yes=True)
    assert not other.root.exists()
    run.journal.unlink()
    assert "step 0 of ?" in reset.reset(layout, run.root.name, yes=True)
    assert not run.root.exists()


def test_what_a_killed_reset_left_is_removed_and_what_another_is_removing_is_not(
    layout: ProjectLayout, run: RunPaths
) -> None:
    dead = layout.runs / f"{files.PARTIAL}old-doomed-4194305"  # beyond the largest process id of Linux
    alive = layout.runs / f"{files.PARTIAL}other-doomed-{os.getppid()}"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / "journal.jsonl").write_bytes(JournalEvent("notice", 9e9, 1, {"text": "x"}).line())
    reset.reset(layout, run.root.name, yes=True)
    assert list(layout.runs.iterdir()) == [alive]


def test_a_run_that_was_moved_to_another_disk_is_removed_there(
    layout: ProjectLayout, run: RunPaths, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    run.root.rename(tmp_path / "disk" / run.root.name)
    run.root.symlink_to(tmp_path / "disk" / run.root.name)
    reset.reset(layout, run.root.name, yes=True)
    assert list((tmp_path / "disk").iterdir()) == []
    assert list(layout.runs.iterdir()) == []
