"""Saving in the background: what is submitted while a save is in progress."""

from pathlib import Path

import pytest

import snapshots
from ratchet.runs.directory import RunDirectory
from ratchet.storage import files
from ratchet.training import checkpoint
from ratchet.training.async_checkpoint import AsyncCheckpointer
from ratchet.training.train_state import TrainState


def test_a_newer_state_of_the_step_that_is_being_saved_is_saved_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory.open(tmp_path, snapshots.SPEC)
    before_validation, validated = snapshots.snapshot(4), snapshots.snapshot(4, best=4)
    saver = AsyncCheckpointer(run.paths, run.journal, snapshots.identity(), 1, TrainState())
    submitted = []

    def submit_during_the_save(operation: files.Operation, path: Path) -> None:
        if operation == "write" and path.is_relative_to(run.paths.checkpoints) and not submitted:
            submitted.append(path)
            saver.submit(validated, 0.0)

    monkeypatch.setattr(files, "before", submit_during_the_save)
    saver.submit(before_validation, 0.0)
    assert saver.drain(30, lambda: None)
    assert submitted
    assert saver.sealed == validated.state
    assert checkpoint.read(run.paths.checkpoint(4)).state == validated.state
    saver.close()
    run.close()
