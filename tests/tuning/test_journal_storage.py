"""Tests that the journal of studies has only complete lines after any failure of writers and disk."""

import errno
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import FloatDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal._storage import JournalOperation
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from ratchet.errors import DamagedFileError, LockHeldError, StorageError
from ratchet.storage import files
from ratchet.tuning import journal_storage
from ratchet.tuning.journal_storage import StudyJournalBackend, encode_operation, make_study_lock, repair
from study_storages import asked


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sweeps" / "studies.jsonl"


def log(number: int) -> dict[str, Any]:
    """Return an operation that differs from all others: an attribute of a missing study."""
    return {"op_code": 2, "worker_id": "w", "study_id": 7, "user_attr": {"number": number, "text": 'ä\n"' * 3}}


def numbers(logs: list[dict[str, Any]]) -> list[int]:
    return [one["user_attr"]["number"] for one in logs]


def written(path: Path, count: int) -> StudyJournalBackend:
    """Write a journal of `count` operations."""
    file = StudyJournalBackend(path)
    for number in range(count):
        file.append_logs([log(number)])
    return file


def read(path: Path) -> list[dict[str, Any]]:
    """Read the journal as another process does."""
    file = StudyJournalBackend(path)
    try:
        return file.read_logs(0)
    finally:
        file.close()


def study(path: Path) -> tuple[JournalStorage, int]:
    """Create a study with a finished and a running trial."""
    storage = JournalStorage(StudyJournalBackend(path))
    number = storage.create_new_study([StudyDirection.MINIMIZE], "sweep")
    space = {"x": FloatDistribution(0, 1)}
    for state, values in ((TrialState.COMPLETE, [0.25]), (TrialState.RUNNING, None)):
        trial = create_trial(state=state, values=values, params={"x": 0.5}, distributions=space, user_attrs={"a": [1]})
        storage.create_new_trial(number, trial)
    return storage, number


def test_operations_are_read_as_they_were_written(path: Path) -> None:
    file = written(path, 5)
    assert file.read_logs(0) == [log(number) for number in range(5)]
    assert numbers(file.read_logs(3)) == [3, 4]
    assert file.read_logs(5) == []
    other = StudyJournalBackend(path)
    file.append_logs([log(5), log(6)])
    assert numbers(other.read_logs(4)) == [4, 5, 6]
    file.close()
    other.close()


def test_optuna_and_its_dashboard_read_and_write_the_file(path: Path) -> None:
    ours, number = study(path)
    theirs = JournalStorage(JournalFileBackend(str(path)))
    assert theirs.get_all_trials(theirs.get_study_id_from_name("sweep")) == ours.get_all_trials(number)
    theirs.set_study_user_attr(number, "note", "by hand")
    ours.set_study_user_attr(number, "mine", 1)
    assert ours.get_study_user_attrs(number) == theirs.get_study_user_attrs(number) == {"note": "by hand", "mine": 1}

    from optuna_dashboard import wsgi  # not at the top: processes that tests start would import it, in one second each

    app = wsgi(str(path))
    assert [one["study_name"] for one in asked(app, "/api/studies")["study_summaries"]] == ["sweep"]
    detail = asked(app, f"/api/studies/{number}")
    assert [trial["state"] for trial in detail["trials"]] == ["Complete", "Running"]


def test_all_operations_of_the_installed_optuna_are_known() -> None:
    assert [int(code) for code in JournalOperation] == list(journal_storage._OPERATIONS)


def test_a_line_torn_at_any_byte_costs_that_line_only(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(path, 3).close()
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    kept = len(whole) - len(last)
    for length in range(1, len(last)):
        path.write_bytes(whole[: kept + length])
        assert numbers(read(path)) == [0, 1], length
        file = StudyJournalBackend(path)
        file.append_logs([log(9)])
        assert numbers(file.read_logs(0)) == [0, 1, 9], length
        file.close()
        aside = path.with_name(f"studies.jsonl.torn-{length}")
        assert aside.read_bytes() == last[:length]
        assert aside.name in capsys.readouterr().err
        assert path.read_bytes() == whole[:kept] + encode_operation(log(9))


@pytest.mark.parametrize("tail", [b"\0" * 70, b"\0" * 70 + b"\n", encode_operation(log(2))[:-20] + b"\0" * 19 + b"\n"])
def test_a_last_line_damaged_by_a_power_loss_is_cut_too(path: Path, tail: bytes) -> None:
    file = written(path, 2)
    with path.open("ab") as stream:
        stream.write(tail)
    assert numbers(read(path)) == [0, 1]
    file.append_logs([log(5)])
    assert numbers(read(path)) == [0, 1, 5]
    assert path.with_name("studies.jsonl.torn-1").read_bytes() == tail
    file.close()


def test_no_damaged_bit_before_the_last_line_goes_unnoticed(path: Path) -> None:
    written(path, 3).close()
    whole = path.read_bytes()
    first, second, _ = whole.splitlines(keepends=True)
    noticed = 0
    for place in range(len(first), len(first) + len(second)):
        for bit in (0, 5):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                # Only damage to the name of our key can leave the meaning unchanged.
                assert numbers(read(path)) == [0, 1, 2]
            except DamagedFileError as error:
                assert f"{path}:2: " in str(error)
                noticed += 1
    assert noticed > 2 * (len(second) - len('"ratchet":"1'))


def test_nothing_is_appended_behind_damage(path: Path) -> None:
    file = written(path, 3)
    damaged = path.read_bytes().replace(b'"number":1', b'"number":7')
    path.write_bytes(damaged)
    other = StudyJournalBackend(path)
    with pytest.raises(DamagedFileError, match=r"studies.jsonl:2: .*checksum.*`ratchet sweep --repair`"):
        other.append_logs([log(3)])
    assert path.read_bytes() == damaged
    file.close()
    other.close()


@pytest.mark.parametrize("last", [False, True])
def test_lines_of_a_newer_version_are_not_touched(path: Path, last: bool) -> None:
    written(path, 1).close()
    with path.open("ab") as stream:
        stream.write(encode_operation(log(1)).replace(b'"ratchet":"1-', b'"ratchet":"2-'))
        stream.write(b"" if last else encode_operation(log(2)))
    content = path.read_bytes()
    file = StudyJournalBackend(path)
    for touch in (lambda: file.read_logs(0), lambda: file.append_logs([log(2)]), lambda: repair(path)):
        with pytest.raises(DamagedFileError, match=r"studies.jsonl:2: written by a newer version .*format 2"):
            touch()
    assert path.read_bytes() == content
    file.close()


def _append_to_full_disk(path: Path, room: int, told: Any) -> None:
    file = StudyJournalBackend(path)
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))  # the kernel refuses to write more
    try:
        file.append_logs([log(9)])
    except StorageError as error:
        told.put(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    file.append_logs([log(10)])
    file.close()


@pytest.mark.parametrize("room", [0, 1, 40, len(encode_operation(log(9))) - 1])
def test_a_full_disk_leaves_nothing_half_written(path: Path, processes: Any, room: int) -> None:
    written(path, 2).close()
    before = path.read_bytes()
    told = processes.SimpleQueue()
    child = processes.Process(target=_append_to_full_disk, args=(path, room, told))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert str(path) in told.get()
    assert path.read_bytes() == before + encode_operation(log(10))
    assert not list(path.parent.glob("*.torn-*"))


@pytest.mark.parametrize(("operation", "lines"), [("write", 2), ("fsync", 3)])
def test_a_failing_disk_leaves_whole_lines(
    path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, lines: int
) -> None:
    file = written(path, 2)

    def fail(what: str, where: Path) -> None:
        if (what, where) == (operation, path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(where))

    monkeypatch.setattr(files, "before", fail)
    with pytest.raises(StorageError, match=f"{path.name}: Input/output error"):
        file.append_logs([log(2)])
    monkeypatch.undo()
    assert len(read(path)) == lines
    file.append_logs([log(3)])
    assert len(file.read_logs(0)) == lines + 1
    file.close()


def test_a_journal_that_is_exchanged_under_a_process_is_noticed(path: Path) -> None:
    file = written(path, 3)
    copy = path.read_bytes()
    path.with_name("copy").write_bytes(copy)
    path.with_name("copy").rename(path)
    with pytest.raises(StorageError, match="replaced"):
        file.read_logs(3)
    path.unlink()
    with pytest.raises(StorageError, match="removed"):
        file.append_logs([log(3)])
    assert not path.exists()
    path.write_bytes(copy)
    with pytest.raises(StorageError, match="replaced"):
        file.append_logs([log(3)])
    file.close()


def test_a_journal_that_was_cut_under_a_process_is_noticed(path: Path) -> None:
    file = written(path, 3)
    file.read_logs(0)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(StorageError, match="was cut"):
        file.read_logs(3)
    file.close()


def test_a_folder_that_takes_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "sweeps").write_text("a file")
    with pytest.raises(StorageError, match="sweeps"):
        StudyJournalBackend(tmp_path / "sweeps" / "studies.jsonl")


def test_repair_keeps_the_lines_before_the_damage_and_sets_the_rest_aside(path: Path) -> None:
    file = written(path, 5)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b"number", b"nmuber")
    path.write_bytes(b"".join(lines))
    told = repair(path)
    assert "line 3 is damaged" in told and "lines kept: 2, set aside in studies.jsonl.damaged-1: 3" in told
    assert path.with_name("studies.jsonl.damaged-1").read_bytes() == b"".join(lines[2:])
    assert numbers(read(path)) == [0, 1]
    with pytest.raises(StorageError, match="replaced"):  # the object knows operations that are no longer stored
        file.read_logs(5)
    file.close()
    assert repair(path) == f"{path}: 2 lines, none damaged"


def test_repair_cuts_a_torn_line_and_does_not_wait_for_a_lock(path: Path) -> None:
    assert "no such file" in repair(path)
    written(path, 2).close()
    os.truncate(path, path.stat().st_size - 3)
    with make_study_lock(path), pytest.raises(LockHeldError, match=f"process {os.getpid()}"):
        repair(path)
    assert "the last line is torn; lines kept: 1, set aside in studies.jsonl.damaged-1: 1" in repair(path)
    assert numbers(read(path)) == [0]


def _append_for_ever(path: Path, worker: int) -> None:
    file = StudyJournalBackend(path)
    number = len([one for one in file.read_logs(0) if one["worker_id"] == str(worker)])
    while True:
        file.append_logs([{**log(number), "worker_id": str(worker)}])
        number += 1


def test_writers_that_are_killed_at_any_moment_lose_no_line_and_keep_no_lock(path: Path, processes: Any) -> None:
    chance = random.Random(3)

    def start(worker: int) -> Any:
        process = processes.Process(target=_append_for_ever, args=(path, worker), daemon=True)
        process.start()
        return process

    running = [start(worker) for worker in range(3)]
    reader = StudyJournalBackend(path)
    known: list[dict[str, Any]] = []
    for _ in range(8):
        wanted = len(known) + 5
        while len(known) < wanted:  # a reader sees complete lines only, and never loses one
            known += reader.read_logs(len(known))
            time.sleep(chance.random() / 50)
        victim = chance.randrange(3)
        os.kill(running[victim].pid, signal.SIGKILL)
        running[victim].join()
        running[victim] = start(victim)
    for process in running:
        process.kill()
        process.join()
    reader.append_logs([log(0)])  # without delay, because no lock is left behind
    assert reader.read_logs(0)[: len(known)] == known
    reader.close()
    for worker in "012":  # each worker continues after the operation at which it was killed
        mine = [one for one in read(path) if one["worker_id"] == worker]
        assert numbers(mine) == list(range(len(mine)))
