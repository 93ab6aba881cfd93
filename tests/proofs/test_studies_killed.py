"""Proves the README's sentence "every trial is accounted for, none is trained twice" for studies with workers that are
killed, stopped or started at the same time."""

import dataclasses
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from contextlib import closing
from typing import Any

import pytest

from ratchet.storage.layout import ProjectLayout
from ratchet.tuning.leases import SweepWorker, TrialLeaseLostError
from ratchet.tuning.storage import StudyStorage, open_storage
from ratchet.tuning.study import TrialStore
from study_storages import storage, url  # noqa: F401 (fixtures)
from trial_store_cases import (
    LONG,
    NARROW,
    Dying,
    begin,
    ended,
    here,  # noqa: F401 (a fixture)
    opened,
    populate,
    settings,
    store,  # noqa: F401 (a fixture)
    values,
)

PACKAGES = ("tuning",)


@pytest.mark.parametrize("write", range(1, 14))
def test_a_fork_that_is_cut_off_anywhere_is_gone_on_with(
    store: TrialStore, storage: StudyStorage, here: SweepWorker, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    populate(store, here)
    dying = Dying(storage.optuna, write)
    with monkeypatch.context() as patched:
        dying.replace(patched, "create_new_study", "set_study_user_attr", "create_new_trial")
        try:
            opened(storage, settings(NARROW), fork=True)
        except KeyboardInterrupt:
            assert dying.writes == write
        else:
            assert write > dying.writes == 12  # the loop above covers each write
    forked = opened(storage, settings(NARROW), fork=True)
    assert (forked.study, forked.carried, len(forked.trials())) == ("sweep.2", 6, 6)
    assert set(forked.versions) == {"optuna", "cmaes", "scipy", "ratchet"}
    names = {study.study_name for study in storage.optuna.get_all_studies()}
    assert names == {"sweep", "sweep.2"}


TRIALS = 60


def _work(layout: ProjectLayout, url: str | None, seed: int) -> None:
    """Run a worker without training: it takes over or begins a trial, renews its lease and finishes the trial, until
    the study has TRIALS trials."""
    chance = random.Random(seed)
    storage = open_storage(layout, url)
    store = opened(storage, settings())
    worker = SweepWorker.current()
    while True:
        with store.locked():
            taken = store.take_over(worker, LONG)
            trials = store.trials()
            if taken is not None:
                number, chosen = taken.number, taken.values
            elif len(trials) < TRIALS:
                chosen = values(learning_rate=1e-4 * (1 + len(trials)))
                number = begin(store, worker, chosen)
            elif any(not trial.is_over for trial in trials):
                number = -1
            else:
                break
        if number >= 0:
            for rows in (70, 140):
                store.report(number, rows, rows * chosen["train.learning_rate"])
                store.renew(number, worker)
            curve = {rows: rows * chosen["train.learning_rate"] for rows in (70, 140, 210)}
            state = chance.choice(["complete", "pruned", "infeasible", "failed"])
            changes = {"constraints": {"memory": 1.0}} if state == "infeasible" else {}
            store.finish(number, ended(state, curve=curve, **changes), worker)
        time.sleep(chance.random() / 100)
    storage.close()


def test_workers_that_are_killed_lose_no_trial_and_do_none_twice(
    project: ProjectLayout, url: str | None, processes: Any
) -> None:
    chance = random.Random(5)
    seeds = iter(range(1000))

    def start() -> Any:
        process = processes.Process(target=_work, args=(project, url, next(seeds)))
        process.start()
        return process

    running = [start() for _ in range(4)]
    watching = open_storage(project, url)
    store = opened(watching, settings())
    killed = 0
    for wanted in range(8, TRIALS, 8):  # wait for some trials before the first kill
        while len(store.trials()) < wanted:
            time.sleep(chance.random() / 20)
        victim = chance.randrange(4)
        os.kill(running[victim].pid, signal.SIGKILL)
        running[victim].join()
        killed += 1
        running[victim] = start()
    for process in running:
        process.join()
        assert process.exitcode == 0
    trials = store.trials()
    assert killed == 7
    assert [trial.number for trial in trials] == list(range(TRIALS))
    assert Counter(trial.is_over for trial in trials) == {True: TRIALS}
    rates = {trial.values["train.learning_rate"] for trial in trials}
    assert len(rates) == TRIALS
    for trial in trials:
        assert trial.curve == {rows: rows * trial.values["train.learning_rate"] for rows in (70, 140, 210)}
        assert len(trial.executions) >= 1
    watching.close()


def _train_for_ever(layout: ProjectLayout, url: str | None, told: Any) -> None:
    storage = open_storage(layout, url)
    store = opened(storage, settings())
    # Simulate another machine: this machine cannot see whether the process of the worker runs.
    worker = dataclasses.replace(SweepWorker.current(), boot="another boot")
    number = begin(store, worker)
    told.put(number)
    try:
        while True:
            store.renew(number, worker)
            time.sleep(0.05)
    except TrialLeaseLostError as error:
        told.put(str(error))
    try:
        store.finish(number, ended(objectives=(9.0,)), worker)
    except TrialLeaseLostError as error:
        told.put(str(error))
    storage.close()


def test_a_process_that_was_stopped_and_goes_on_finds_its_trial_taken(
    store: TrialStore, here: SweepWorker, project: ProjectLayout, url: str | None, processes: Any
) -> None:
    told = processes.SimpleQueue()
    child = processes.Process(target=_train_for_ever, args=(project, url, told))
    child.start()
    assert told.get() == 0
    assert store.take_over(here, 1.0) is None
    while not any(take.last_seen > take.started for take in store.trials()[0].executions):
        time.sleep(0.01)
    # A child that is stopped while it writes into the SQLite file would block all others until it is killed.
    with closing(sqlite3.connect(":memory:" if url else project.studies, timeout=5, isolation_level=None)) as file:
        file.execute("BEGIN IMMEDIATE")
        os.kill(child.pid, signal.SIGSTOP)
        file.execute("ROLLBACK")
    while store.take_over(here, 1.0) is None:
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGCONT)
    assert f"trial 0: {here.name} holds it now" in told.get()
    assert f"trial 0: {here.name} holds it now" in told.get()
    child.join()
    assert child.exitcode == 0
    store.renew(0, here)
    store.finish(0, ended(), here)
    assert store.trials()[0].objectives == (1.5,)


def _open_first(layout: ProjectLayout, url: str | None, start: Any, told: Any) -> None:
    start.wait()
    storage = open_storage(layout, url)
    store = opened(storage, settings())
    told.put((store.study, begin(store, SweepWorker.current())))
    storage.close()


def test_eight_workers_that_start_first_share_one_study(
    project: ProjectLayout, url: str | None, processes: Any
) -> None:
    start, told = processes.Barrier(8), processes.SimpleQueue()
    started = [processes.Process(target=_open_first, args=(project, url, start, told)) for _ in range(8)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert sorted(told.get() for _ in started) == [("sweep", number) for number in range(8)]
