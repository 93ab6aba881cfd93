"""The worker removes no checkpoint that is newer than the replica."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import snapshots
from machines import wait_until
from ratchet.config.machine import Machine
from ratchet.runs import replication_protocol
from ratchet.runs.directory import RunDirectory, RunPaths, TrainingLaunchSpec
from ratchet.runs.replication_protocol import ReplicationState
from ratchet.storage import files
from ratchet.storage.records.base import BaseCard
from ratchet.training.async_checkpoint import AsyncCheckpointer
from ratchet.training.train_state import TrainState

BASE = BaseCard(
    source="tiny", revision=None, digest="b" * 64, files={}, architecture="Any", parameters=1, licence=None
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    opened = RunDirectory.open(tmp_path, snapshots.SPEC)
    launch(opened.paths, "s3://bucket/folder")
    yield opened
    opened.close()


def launch(paths: RunPaths, replica: str | None) -> None:
    TrainingLaunchSpec(machine=Machine(replica=replica), base_path="/base", data_path="/data", base=BASE).save(
        paths.launch
    )


def note(paths: RunPaths, *durable: int, in_flight: int | None = None) -> None:
    ReplicationState(
        place="s3://bucket/folder", token=1, node="one-1", lock=(1, 2), durable_steps=durable, in_flight=in_flight
    ).save(paths.replication_state)


def saved(run: RunDirectory, *steps: int) -> AsyncCheckpointer:
    """Save checkpoints of these steps with a writer that keeps one checkpoint; return the writer."""
    saver = AsyncCheckpointer(run.paths, run.journal, snapshots.identity(), 1, TrainState())
    for step in steps:
        saver.submit(snapshots.snapshot(step), 0.0)
        assert saver.drain(30, lambda: None)
    return saver


def test_checkpoints_stay_until_the_replica_has_something_newer(run: RunDirectory) -> None:
    note(run.paths, 2)
    saver = saved(run, 2, 4, 6)
    assert run.paths.checkpoint_steps() == [4, 6]
    note(run.paths, 2, 6)
    saver.submit(snapshots.snapshot(8), 0.0)
    assert saver.drain(30, lambda: None)
    assert run.paths.checkpoint_steps() == [8]
    saver.close()


def test_a_checkpoint_in_flight_stays(run: RunDirectory) -> None:
    note(run.paths, 6, in_flight=4)
    saver = saved(run, 2, 4, 6, 8)
    assert run.paths.checkpoint_steps() == [4, 8]
    saver.close()


def test_without_a_replica_or_a_keeper_nothing_more_is_kept(run: RunDirectory) -> None:
    saver = saved(run, 2, 4)
    assert run.paths.checkpoint_steps() == [4], "nobody copies: a trial of a sweep"
    note(run.paths)
    launch(run.paths, None)
    saver.submit(snapshots.snapshot(6), 0.0)
    assert saver.drain(30, lambda: None)
    assert run.paths.checkpoint_steps() == [6], "the replica was given up"
    saver.close()


def test_a_note_that_cannot_be_read_keeps_everything(run: RunDirectory) -> None:
    run.paths.replication_state.write_text("{")
    saver = saved(run, 2, 4, 6)
    assert run.paths.checkpoint_steps() == [2, 4, 6]
    assert replication_protocol.find_unsent_steps(run.paths) == {2, 4, 6}
    saver.close()


def test_on_a_full_disk_only_the_newest_unsent_checkpoints_stay(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(run.paths)
    saver = saved(run, 2, 4, 6)
    assert run.paths.checkpoint_steps() == [2, 4, 6]

    def full(operation: files.Operation, path: Path) -> None:
        if operation == "write" and len(run.paths.checkpoint_steps()) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "before", full)
    saver.submit(snapshots.snapshot(8), 0.0)
    wait_until(lambda: run.paths.checkpoint_steps() == [6, 8])
    saver.close()
