"""Tests of a run in a replica that is read repeatedly: nothing is read twice, and the journal of another holder is
read from the start."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ratchet.runs.journal import JournalEvent
from ratchet.runs.replication import remote_status
from ratchet.runs.replication.lease import LeaseRecord, State
from ratchet.runs.replication.manifests import JournalStart, JournalUploader, ReplicaManifest
from ratchet.runs.replication.remote_status import RemoteRunSource
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, TransferLimits

RUN = "0123456789ab"
NAMES = RunObjectNames(RUN)


class Counted(ReplicaStore):
    """Replica store that counts the journal bytes that were read."""

    journal_bytes = 0

    def read_from(self, name: str, start: int, end: int) -> bytes | None:
        found = super().read_from(name, start, end)
        self.journal_bytes += len(found or b"") if "/journal/" in name else 0
        return found


@pytest.fixture
def store(tmp_path: Path) -> Counted:
    return Counted(str(tmp_path / "replica"), TransferLimits(retry_timeout_s=5.0), lambda: False)


def holder(store: ReplicaStore, token: int, state: State, journal_origin: tuple[int, int] | None = None) -> None:
    origins = {token: journal_origin} if journal_origin else {}
    made = LeaseRecord(token, f"node-{token}", state, 1, "2026-11-02T12:00:00+00:00", origins=origins)
    store.write(NAMES.lease, made.as_bytes())


def reports(store: ReplicaStore, token: int, last_t: float) -> None:
    told: dict[str, Any] = {"bytes_sent": 1, "bytes_skipped": 0, "send_s": 1.0, "outages": 0, "last": last_t}
    store.write(NAMES.node(f"node-{token}"), json.dumps(told | {"node": f"node-{token}"}).encode())


def lines(numbers: Sequence[int]) -> bytes:
    figures = {"loss": 1.0, "learning_rate": 0.1, "step_s": 1.0, "input_tokens": 5, "trained_tokens": 5}
    return b"".join(JournalEvent("step", 1e9 + n, 1, {"step": n, **figures}).line() for n in numbers)


def append(path: Path, numbers: Sequence[int]) -> None:
    with path.open("ab") as stream:
        stream.write(lines(numbers))


def test_only_what_is_new_is_read(tmp_path: Path, store: Counted) -> None:
    path = tmp_path / "journal.jsonl"
    path.touch()
    holder(store, 1, "holding")
    copy, run, seen = JournalUploader(path, store, NAMES, 1, JournalStart()), RemoteRunSource(store, RUN), []
    run.refresh()
    assert not run.new_events
    for first in range(1, 201, 5):
        append(path, range(first, first + 5))
        copy.copy()
        run.refresh()
        seen += [event.data["step"] for event in run.new_events]
    assert seen == list(range(1, 201))
    assert run.view.progress.step == 200
    assert store.journal_bytes == path.stat().st_size
    read = store.journal_bytes
    run.refresh()
    assert not run.new_events
    assert store.journal_bytes == read


def test_the_whole_run_is_read_again_after_a_change_of_holder(tmp_path: Path, store: Counted) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    append(first, range(1, 8))
    holder(store, 1, "holding")
    JournalUploader(first, store, NAMES, 1, JournalStart()).copy()
    run = RemoteRunSource(store, RUN)
    run.refresh()
    length = len(lines(range(1, 5)))
    holder(store, 2, "holding", (1, length))  # this machine had received four steps and continues from there
    append(second, range(1, 7))
    JournalUploader(second, store, NAMES, 2, JournalStart((1, length), length)).copy()
    run.refresh()
    assert [event.data["step"] for event in run.new_events] == [1, 2, 3, 4, 5, 6]
    assert run.view.progress.step == 6
    assert run.view.progress.trained_tokens == 30


def test_who_holds_a_run_and_reports_trains_it(store: Counted) -> None:
    holder(store, 1, "holding")
    run = RemoteRunSource(store, RUN)
    run.refresh()
    assert not run.sidecar.running  # its claim is old and it has not reported
    reports(store, 1, time.time() - 20)
    run.refresh()
    assert run.sidecar.running
    reports(store, 1, time.time() - 1000)
    run.refresh()
    assert not run.sidecar.running
    store.write(NAMES.spec, b"{}")
    assert remote_status.list_held_runs(store) == [RUN]
    holder(store, 1, "released")
    assert remote_status.list_held_runs(store) == []


def test_durable_and_finished_are_reported(store: Counted) -> None:
    holder(store, 1, "holding")
    reports(store, 1, time.time())
    store.write(NAMES.checkpoint(1, 4), ReplicaManifest("checkpoint", 4, {}).as_bytes())
    run = RemoteRunSource(store, RUN)
    run.refresh()
    assert run.sidecar.replica is not None
    assert run.sidecar.replica.durable_steps == (4,)
    assert (run.sidecar.replica.result, run.sidecar.finished) == (False, False)
    store.write(NAMES.result(1), ReplicaManifest("result", 9, {}).as_bytes())
    run.refresh()
    assert (run.sidecar.replica.result, run.sidecar.finished, run.sidecar.running) == (True, True, False)
    assert remote_status.list_held_runs(store) == []
