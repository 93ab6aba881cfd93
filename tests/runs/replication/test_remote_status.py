"""Tests of the status and the removal of runs in a replica, by its content and by the CLI."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ratchet.cli.main import main
from ratchet.cli.reset import format_replica_reset
from ratchet.cli.status import format_replica_status
from ratchet.config.machine import Machine
from ratchet.errors import DataError, LockHeldError, SettingsError
from ratchet.runs.journal import JournalEvent
from ratchet.runs.replication import remote_status
from ratchet.runs.replication.lease import LeaseRecord, State
from ratchet.runs.replication.manifests import ReplicaManifest
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, TransferLimits
from ratchet.stages.reset import reset_replica
from ratchet.stages.status import replica_status

RUN, OTHER = "a1b2c3d4e5f6", "a1ffffffffff"
LEASE_S = 2.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "replica").as_uri()


@pytest.fixture
def store(url: str) -> ReplicaStore:
    return ReplicaStore(url, TransferLimits(retry_timeout_s=5.0), lambda: False)


def told(store: ReplicaStore, token: int, start: int, *events: tuple[str, float, dict[str, Any]]) -> int:
    """Upload a segment of the journal; return the offset of its end."""
    content = b"".join(JournalEvent(kind, t, 1, data).line() for kind, t, data in events)
    store.write(RunObjectNames(RUN).journal(token, start), content)
    return start + len(content)


def claim(
    store: ReplicaStore, token: int, node: str, state: State, journal_origin: tuple[int, int] | None = None
) -> None:
    origins = {token: journal_origin} if journal_origin else {}
    made = LeaseRecord(token, node, state, 1, "2026-11-02T12:00:00+00:00", None, token, origins)
    store.write(RunObjectNames(RUN).lease, made.as_bytes())


def step(number: int, t: float) -> tuple[str, float, dict[str, Any]]:
    return "step", t, {
        "step": number, "loss": 1.0, "learning_rate": 0.1, "step_s": 10.0, "input_tokens": 5, "trained_tokens": 5,
    }  # fmt: skip


def filled(store: ReplicaStore, state: State = "holding") -> None:
    """Write the objects of two machines: the first trained 3 steps and stopped; the second resumed after step 2 and
    has reached step 4."""
    names, now = RunObjectNames(RUN), time.time()
    store.write(names.spec, b"{}")
    t = now - 100
    sealed = {"size_bytes": 10, "blocked_s": 0.1, "seconds": 0.2, "is_best": False}
    ready = {"planned_steps": 40, "trainable_parameters": 1, "total_parameters": 1}
    claim(store, 1, "first-00000001", "holding")
    end = told(
        store, 1, 0,
        ("attempt_started", t, {"pid": 1, "code_version": "1"}), ("worker_ready", t + 5, ready | {"start_step": 0}),
        step(1, t + 15), step(2, t + 25), ("checkpoint_saved", t + 25, sealed | {"step": 2}), step(3, t + 35),
    )  # fmt: skip
    claim(store, 2, "second-00000002", state, journal_origin=(1, end))
    told(
        store, 2, end,
        ("attempt_started", t + 60, {"pid": 1, "code_version": "1"}), ("worker_ready", t + 65,
            ready | {"start_step": 2}),
        step(3, t + 75), step(4, t + 85), ("checkpoint_saved", t + 85, sealed | {"step": 4}),
    )  # fmt: skip
    for token, number in ((1, 2), (2, 4)):
        store.write(names.checkpoint(token, number), ReplicaManifest("checkpoint", number, {}).as_bytes())
    report = {"bytes_sent": 1_000_000, "bytes_skipped": 500_000, "send_s": 1.0, "outages": 1}
    for node, last in (("first-00000001", t + 35), ("second-00000002", now - 3)):
        text = json.dumps(report | {"node": node, "token": 1, "started": t, "last": last, "step": 2})
        store.write(names.node(node), text.encode())
    store.write(names.node("garbled"), b"{")


def test_a_run_is_described_from_its_replica_alone(store: ReplicaStore) -> None:
    filled(store)
    text = remote_status.describe_remote_run(remote_status.read_remote_run(store, RUN))
    first, *rest = text.splitlines()
    assert first == f"run {RUN}: held by machine second-00000002 since 2026-11-02T12:00:00+00:00"
    told_lines = {line.split()[0]: " ".join(line.split()[1:]) for line in rest}
    assert told_lines["step"] == "4 of 40"
    assert told_lines["durable"].startswith("step 4, sealed 1")
    assert told_lines["machines"].startswith("2, which have held it 2 times; second-00000002 reported last, ")
    assert told_lines["interrupted"] == "1 time; 1 step done again"
    assert told_lines["goodput"] == "47.1%: steps that count took 40 s of 1 min 25 s"
    assert told_lines["upload"] == "1.9 MiB sent at 8.0 Mbps, 976.6 KiB were there already, 2 outages"


def test_a_token_that_is_higher_counts_more_than_a_step_that_is(store: ReplicaStore) -> None:
    filled(store)
    names = RunObjectNames(RUN)
    store.write(names.checkpoint(1, 9), ReplicaManifest("checkpoint", 9, {}).as_bytes())  # its writer lost the lease
    told(store, 1, 10_000, step(9, time.time()))
    found = remote_status.read_remote_run(store, RUN)
    assert found.state.durable == (2, 4)
    assert found.progress.step == 4


@pytest.mark.parametrize(("state", "says"), [("released", "stopped; machine second-00000002"), ("holding", "held by")])
def test_all_runs_are_listed_each_on_a_line(
    store: ReplicaStore, url: str, tmp_path: Path, state: State, says: str
) -> None:
    (tmp_path / "replica").mkdir()
    assert format_replica_status(replica_status(Machine(replica=url), True, None)) == "no run in this replica yet"
    filled(store, state)
    store.write(RunObjectNames(OTHER).spec, b"{}")
    lines = format_replica_status(replica_status(Machine(), url, None)).splitlines()
    assert lines[0].startswith(f"run {RUN}: {says}")
    assert "step 4 of 40" in lines[0]
    assert lines[1] == f"run {OTHER}: not begun; step 0 of ?, no checkpoint yet"


def test_a_finished_run_is_finished_and_durable_to_its_last_step(store: ReplicaStore) -> None:
    filled(store, "released")
    told(store, 2, 20_000, step(5, time.time()))  # the result arrived before its checkpoint
    store.write(RunObjectNames(RUN).result(1), b"garbled")
    store.write(RunObjectNames(RUN).result(2), ReplicaManifest("result", 5, {}).as_bytes())
    assert remote_status.summarize_run(remote_status.read_remote_run(store, RUN)).startswith(f"run {RUN}: finished")
    assert remote_status.read_remote_run(store, RUN).state.durable == (2, 5)
    assert "durable     step 5" in remote_status.describe_remote_run(remote_status.read_remote_run(store, RUN))


def test_a_run_that_was_refused_says_why(store: ReplicaStore) -> None:
    claim(store, 1, "first-00000001", "released")
    assert remote_status.summarize_run(remote_status.read_remote_run(store, RUN)).startswith(
        f"run {RUN}: not begun; machine first-00000001 has released it; step 0"
    )
    died = {
        "exit_code": 2,
        "failure_class": "data",
        "decision": "GiveUp",
        "text": "train.adapter: bitsandbytes is missing",
    }
    told(store, 1, 0, ("attempt_started", 1.0, {"pid": 1, "code_version": "1"}), ("worker_exited", 2.0, died))
    says = "stopped; machine first-00000001 has released it: attempt 1: data, train.adapter: bitsandbytes is missing"
    assert remote_status.summarize_run(remote_status.read_remote_run(store, RUN)).startswith(
        f"run {RUN}: {says}; step 0 of ?"
    )


def test_a_missing_folder_is_not_an_empty_replica(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["status"], ["status", RUN], ["reset", RUN, "--yes"]):
        assert main([*verb, "--replica", str(tmp_path / "typo")]) == 2
        said = capsys.readouterr().err
        assert f"ratchet {verb[0]}: machine.replica {tmp_path / 'typo'}: directory not found" in said
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://x", "scheme memory cannot hold a replica"),
        ("s3:///x", "expected s3://BUCKET/FOLDER"),
        ("sftp://me:planted@host/x", "found 'sftp://host/x'; expected a URL without a password or query"),
    ],
)
def test_a_replica_of_the_command_line_is_checked_before_it_is_opened(
    capsys: pytest.CaptureFixture[str], url: str, said: str
) -> None:
    for verb in (["status"], ["reset", RUN, "--yes"], ["doctor", "--require", "upload=1kbps"]):
        assert main([*verb, "--replica", url]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"ratchet {verb[0]}: --replica: found '") and said in error
        assert "planted" not in error


def test_a_run_is_named_by_its_beginning(store: ReplicaStore, url: str) -> None:
    filled(store)
    store.write(RunObjectNames(OTHER).spec, b"{}")
    assert format_replica_status(replica_status(Machine(replica=url), "a1b2", None)).startswith(f"run {RUN}: ")
    assert format_replica_status(replica_status(Machine(), url, "a1b2")).startswith(f"run {RUN}: ")
    with pytest.raises(DataError, match="matches 2 runs in"):
        replica_status(Machine(replica=url), "a1", None)
    with pytest.raises(DataError, match=f"matches no run in the replica; found: {RUN}, {OTHER}"):
        replica_status(Machine(), url, "b")
    several, others = [f"a0{number:010x}" for number in range(7)], [f"b{number:011x}" for number in range(30)]
    for run in (*several, *others):
        store.write(RunObjectNames(run).spec, b"{}")
    listed = re.escape(", ".join(several[:6]))
    with pytest.raises(DataError, match=rf"a: matches 9 runs in .*: {listed} and 3 more; give more of the id$"):
        replica_status(Machine(replica=url), "a", None)
    with pytest.raises(DataError, match=rf"c: matches no run in .*: {listed} and 33 more$"):
        replica_status(Machine(replica=url), "c", None)


def test_without_any_replica_it_says_what_to_do() -> None:
    with pytest.raises(SettingsError, match=r"set machine\.replica"):
        replica_status(Machine(), True, None)
    with pytest.raises(
        SettingsError, match=r"--replica folder: without a / this is a run.*or write .* --replica /FOLDER"
    ):
        replica_status(Machine(), "folder", None)


def test_from_a_machine_without_a_project(
    store: ReplicaStore, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(store)
    monkeypatch.chdir(tmp_path)
    assert main(["status", "--replica", url, "a1b"]) == 0
    assert "goodput     47.1%" in capsys.readouterr().out
    assert main(["status", "--replica"]) == 2
    assert "set machine.replica" in capsys.readouterr().err


def remove(url: str, run: str | None = RUN) -> str:
    return format_replica_reset(reset_replica(Machine(lease_timeout_s=LEASE_S), url, run))


@pytest.mark.parametrize("state", ["released", "holding"])
def test_an_idle_run_is_removed_and_others_stay(store: ReplicaStore, url: str, state: State) -> None:
    filled(store, state)  # `holding`: the machine does not respond, so its claim must expire
    store.write(RunObjectNames(OTHER).spec, b"{}")
    text = remove(url, "a1b")
    assert "step        4 of 40" in text
    assert text.endswith("removed from the replica")
    assert remote_status.list_remote_runs(store) == [OTHER]
    assert list(store.list(RunObjectNames(RUN).root)) == []


def test_a_run_that_a_machine_trains_is_not_removed(store: ReplicaStore, url: str) -> None:
    from ratchet.runs.replication.lease import ReplicaLease

    names = RunObjectNames(RUN)
    filled(store, "released")
    lease = ReplicaLease(store, names, "third-00000003", LEASE_S)
    lease.acquire(lambda: False, lambda _: None)
    try:
        with pytest.raises(LockHeldError, match="machine third-00000003 trains it"):
            remove(url)
        assert lease.lost_reason() is None
    finally:
        lease.release()
    assert remote_status.read_remote_run(store, RUN).progress.step == 4


def test_nothing_is_removed_without_asking(store: ReplicaStore, url: str) -> None:
    filled(store, "released")
    result = reset_replica(Machine(), url, RUN, lambda target: False)
    assert format_replica_reset(result) == f"run {RUN} was kept"
    assert (result.target.run_id, result.target.step, result.target.durable_step) == (RUN, 4, 4)
    assert "durable     step 4" in result.target.description
    assert remote_status.list_remote_runs(store) == [RUN]
    with pytest.raises(SettingsError, match="reset --replica: which run"):
        remove(url, None)
