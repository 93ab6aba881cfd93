"""Tests both storages: one holder at a time, refused addresses, and servers that fail."""

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.study import StudyDirection

import postgres
from ratchet.errors import DamagedFileError, LockHeldError, SettingsError, StorageError
from ratchet.storage.layout import ProjectLayout
from ratchet.tuning import storage as storages
from ratchet.tuning.leases import SweepWorker
from ratchet.tuning.storage import StudyStorage, open_storage
from study_storages import asked


def _hold(layout: ProjectLayout, url: str | None, inside: Any) -> None:
    storage = open_storage(layout, url)
    with storage.locked():
        inside.put(os.getpid())
        time.sleep(600)


def _holder(layout: ProjectLayout, url: str | None, processes: Any) -> Any:
    """Start a process that holds the storage until it is killed."""
    inside = processes.SimpleQueue()
    process = processes.Process(target=_hold, args=(layout, url, inside), daemon=True)
    process.start()
    assert inside.get() == process.pid
    return process


def test_a_storage_says_what_it_is(storage: StudyStorage, project: ProjectLayout, url: str | None) -> None:
    assert storage.kind == ("postgres" if url else "sqlite")
    assert storage.where == (url or str(project.studies))


def test_only_one_process_is_inside_and_its_death_lets_the_next_in(
    storage: StudyStorage, project: ProjectLayout, url: str | None, processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = _holder(project, url, processes)
    with monkeypatch.context() as patched:
        patched.setattr(storages, "LOCK_WAIT_S", 0.1)
        name = SweepWorker.current().host + f"/{holder.pid}" if url else f"process {holder.pid}"
        with pytest.raises(LockHeldError, match=name), storage.locked():
            pytest.fail("two at once")
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with storage.locked():
        pass


def test_a_thread_may_lock_again_and_another_may_not(storage: StudyStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def lock_in_a_thread() -> None:
        def lock() -> None:
            try:
                with storage.locked():
                    told.append("inside")
            except LockHeldError as error:
                told.append(str(error))

        thread = threading.Thread(target=lock)
        thread.start()
        thread.join()

    monkeypatch.setattr(storages, "LOCK_WAIT_S", 0.1)
    with storage.locked():
        with storage.locked():
            pass
        lock_in_a_thread()
    assert "another thread" in told.pop()
    lock_in_a_thread()
    with pytest.raises(ValueError, match="of the worker"), storage.locked():
        raise ValueError("of the worker")
    lock_in_a_thread()
    assert told == ["inside", "inside"]


def test_who_is_interrupted_while_it_waits_holds_nothing(
    project: ProjectLayout, postgres_server: postgres.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres may grant the lock at the moment when a signal ends the wait for it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    url = postgres_server.database()
    one, other = open_storage(project, url), open_storage(project, url)
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with one.locked(), pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with other.locked():
                pytest.fail("two at once")
    finally:
        signal.signal(signal.SIGALRM, previous)
    monkeypatch.setattr(storages, "LOCK_WAIT_S", 5.0)
    for storage in (one, other, one):
        with storage.locked():
            pass
    one.close()
    other.close()


def test_optuna_and_its_dashboard_open_studies_while_workers_use_them(
    storage: StudyStorage, project: ProjectLayout, url: str | None
) -> None:
    from optuna_dashboard import wsgi  # not at the top: processes that tests start would import it, in one second each

    study = storage.optuna.create_new_study([StudyDirection.MINIMIZE], "sweep")
    address = url.replace("postgresql:", "postgresql+psycopg:") if url else f"sqlite:///{project.studies}"
    with storage.locked():
        storage.optuna.create_new_trial(study)
        theirs = optuna.storages.RDBStorage(address)
        assert [one["study_name"] for one in asked(wsgi(theirs), "/api/studies")["study_summaries"]] == ["sweep"]
        loaded = optuna.load_study(study_name="sweep", storage=address)
        loaded.set_user_attr("dashboard:note", "a note")
        assert [one.number for one in loaded.trials] == [0]
    assert storage.optuna.get_study_user_attrs(study) == {"dashboard:note": "a note"}
    loaded._storage.remove_session()
    loaded._storage._backend.engine.dispose()
    theirs.engine.dispose()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://me:secret@host/studies", "PGPASSWORD"),
        ("postgresql://me@host/studies?password=secret", "PGPASSWORD"),
        ("postgresql://me@host", "has no database"),
        ("postgresql://me:secret@host:port/studies", "invalid host or port"),
        ("sqlite:///secret.db", "shared by machines"),
        ("mysql+pymysql://me:secret@host/studies", "only PostgreSQL"),
        ("redis://:secret@host", "only PostgreSQL"),
        ("secret", "only PostgreSQL"),
        ("", "only PostgreSQL"),
    ],
)
def test_an_invalid_address_is_refused_without_repeating_it(project: ProjectLayout, url: str, told: str) -> None:
    with pytest.raises(SettingsError, match=r"params.yaml: machine.study_storage: .*" + told) as refused:
        open_storage(project, url)
    assert "secret" not in str(refused.value) or url == "secret"


def test_a_missing_server_database_or_right_is_named(project: ProjectLayout, postgres_server: postgres.Server) -> None:
    with pytest.raises(StorageError, match=r"postgresql://me@127.0.0.1:1/studies: connection failed: .*refused"):
        open_storage(project, "postgresql://me@127.0.0.1:1/studies")
    with pytest.raises(StorageError, match=r'database "nowhere" does not exist'):
        open_storage(project, postgres_server.url("nowhere"))
    url = postgres_server.database()
    postgres_server.run("CREATE ROLE guest LOGIN")
    with pytest.raises(StorageError, match=r"permission denied.* right to create tables"):
        open_storage(project, url.replace(f"{postgres.USER}@", "guest@"))


@pytest.mark.parametrize(
    ("version", "cure"), [("v9.9.9.a", "install that version"), ("v3.0.0.a", "optuna storage upgrade")]
)
def test_tables_of_another_optuna_are_refused(
    project: ProjectLayout, postgres_server: postgres.Server, version: str, cure: str
) -> None:
    url = postgres_server.database()
    open_storage(project, url).close()
    database = url.rpartition("/")[2]
    postgres_server.run(f"UPDATE alembic_version SET version_num = '{version}'", database)  # noqa: S608
    with pytest.raises(DamagedFileError, match=rf"{url}: .*schema {version}\).*{cure}"):
        open_storage(project, url)


def test_a_file_that_is_damaged_is_not_opened(project: ProjectLayout) -> None:
    open_storage(project, None).close()
    project.studies.write_bytes(b"x" * 4096)
    with pytest.raises(DamagedFileError, match=r"studies.db: file is not a database. .*move the file away"):
        open_storage(project, None)


def test_a_disk_that_is_full_loses_no_trial_and_the_study_continues(project: ProjectLayout) -> None:
    storage = open_storage(project, None)
    study = storage.optuna.create_new_study([StudyDirection.MINIMIZE], "sweep")
    storage.optuna.create_new_trial(study)
    size = max(path.stat().st_size for path in project.sweeps.iterdir())
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for room in range(0, 9000, 900):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, resource.RLIM_INFINITY))
            try:
                with pytest.raises(StorageError, match=r"studies.db: .*free space"), storage.connected():
                    for number in range(1000):
                        storage.optuna.set_study_user_attr(study, f"{room} {number}", number)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    finally:
        signal.signal(signal.SIGXFSZ, previous)
    with storage.connected():
        storage.optuna.create_new_trial(study)
    storage.close()
    reopened = open_storage(project, None)
    assert [trial.number for trial in reopened.optuna.get_all_trials(study)] == [0, 1]
    reopened.close()


def test_a_reader_does_not_wait_for_the_lock(
    storage: StudyStorage, project: ProjectLayout, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storages, "LOCK_WAIT_S", 0.1)
    with storage.locked():
        other = open_storage(project, url)
        assert other.optuna.get_all_studies() == []
        other.close()


def test_a_server_that_was_started_again_is_used_again(project: ProjectLayout) -> None:
    with postgres.serve() as server:
        storage = open_storage(project, server.database())
        study = storage.optuna.create_new_study([StudyDirection.MINIMIZE], "sweep")
        with pytest.raises(StorageError, match="the connection was lost while"), storage.locked():
            server.stop()
        with pytest.raises(StorageError, match=r"connection .*failed"), storage.locked():
            pytest.fail("nobody is there")
        with pytest.raises(StorageError, match=r"connection .*failed"), storage.connected():
            storage.optuna.create_new_study([StudyDirection.MINIMIZE], "other")
        server.start()
        with storage.locked(), storage.connected():
            assert storage.optuna.get_study_id_from_name("sweep") == study
        with pytest.raises(ValueError, match="of the worker"), storage.locked():
            server.stop()
            raise ValueError("of the worker")
        storage.close()


def test_locks_of_two_databases_are_two(project: ProjectLayout, postgres_server: postgres.Server) -> None:
    one, other = (open_storage(project, postgres_server.database()) for _ in range(2))
    with one.locked(), other.locked():
        pass
    one.close()
    other.close()


def test_a_folder_that_cannot_be_locked_is_named(project: ProjectLayout) -> None:
    storage = open_storage(project, None)
    lock = Path(f"{project.studies}.lock")
    lock.unlink()
    lock.mkdir()
    with pytest.raises(StorageError, match=r"studies.db: cannot be locked: Is a directory"), storage.locked():
        pytest.fail("not locked")
    storage.close()
