"""Tests the worker pool with real processes that die, stop and fail, and are started again."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import plain_fork_server
from ratchet.config.machine import Machine
from ratchet.errors import InputError, RunFailedError
from ratchet.runs import fork_server
from ratchet.tuning import worker_pool
from ratchet.tuning.worker_pool import (
    LocalWorkerLauncher,
    SweepWorkerProcess,
    WorkerKillInjector,
    WorkerPool,
    WorkerSlot,
    divide_threads,
)


def use_code(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(fork_server, "SERVER", plain_fork_server.COMMAND)
    monkeypatch.setattr(worker_pool, "WORKER_MODULE", "plain_fork_server")
    monkeypatch.setenv(plain_fork_server.CODE, code)


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WorkerPool]]:
    pools: list[WorkerPool] = []
    monkeypatch.setattr(worker_pool, "RESTART_DELAY_S", 0.01)

    def make(code: str, count: int = 1, kills: WorkerKillInjector | None = None) -> WorkerPool:
        use_code(monkeypatch, code)
        told: list[str] = []
        made = WorkerPool(LocalWorkerLauncher([]), count, tmp_path, kills, told.append)
        made.told = told  # type: ignore[attr-defined]
        pools.append(made)
        return made

    yield make
    for pool in pools:
        pool.stop(1.0)


def until(done: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def test_a_worker_with_nothing_left_to_do_is_not_started_again(team: Callable[..., WorkerPool]) -> None:
    one = team("pass", count=2)
    until(lambda: not one.poll(), "they never ended")
    assert [member.deaths for member in one.slots] == [0, 0]


def test_one_that_was_killed_is_replaced_and_one_that_was_asked_to_stop_too(
    team: Callable[..., WorkerPool], tmp_path: Path
) -> None:
    code = f"import os, sys, time; open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w'); time.sleep(60)"
    one = team(code)
    one.poll()
    first = one.slots[0].process
    assert first is not None
    until(lambda: one.poll() and (tmp_path / str(first.pid)).exists(), "it never began")
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: one.poll() and one.slots[0].is_alive and one.slots[0].process is not first, "it was not replaced")
    assert one.slots[0].deaths == 1
    assert "killed by SIGKILL" in one.told[0]  # type: ignore[attr-defined]
    one.stop(1.0)
    assert one.alive_count == 0


def test_settings_that_a_worker_cannot_use_end_the_command_with_its_last_words(team: Callable[..., WorkerPool]) -> None:
    one = team("import sys; print('first', file=sys.stderr); print('params.yaml: no', file=sys.stderr); sys.exit(2)")
    with pytest.raises(InputError, match=r"worker 1: params.yaml: no$"):
        until(lambda: not one.poll(), "it went on")


def test_workers_that_die_as_soon_as_they_are_started_are_given_up(team: Callable[..., WorkerPool]) -> None:
    one = team("raise ValueError('a bug')")
    with pytest.raises(RunFailedError, match=f"died {worker_pool.MAX_SHORT_LIVES} times in a row.*ValueError: a bug"):
        until(lambda: not one.poll(), "it went on")


def test_those_that_are_killed_on_purpose_are_no_fault_of_theirs(team: Callable[..., WorkerPool]) -> None:
    wanted = worker_pool.MAX_SHORT_LIVES + 2
    one = team("import time; time.sleep(60)", kills=WorkerKillInjector(wanted, 0, (0.01, 0.02)))
    until(lambda: one.poll() and one.kill_count == wanted and one.alive_count == 1, "nobody was killed")
    until(lambda: one.poll() and one.slots[0].deaths == wanted, "a kill was counted without a death")
    one.stop(1.0)


class Lossy(LocalWorkerLauncher):
    """Launches workers on nodes that are lost."""

    max_losses = 2

    def start(self, number: int, log: Path) -> SweepWorkerProcess:
        process = super().start(number, log)
        process.lost = "node 7 was lost"
        return process


def test_workers_that_are_lost_with_their_nodes_are_replaced_as_often_as_is_put_up_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "RESTART_DELAY_S", 0.01)
    use_code(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    told: list[str] = []
    one = WorkerPool(Lossy([]), 1, tmp_path, None, told.append)
    with pytest.raises(RunFailedError, match="lost 3 times, the last time because node 7 was lost"):
        until(lambda: not one.poll(), "it went on")
    one.stop(1.0)
    assert told == ["worker 1 died (node 7 was lost); starting another one, trials resume from their checkpoints"] * 2


def test_one_that_does_not_listen_is_killed_after_the_grace(
    team: Callable[..., WorkerPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "KILL_WAIT_S", 0.1)
    ready = tmp_path / "ready"
    code = (
        f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({str(ready)!r}, 'w'); time.sleep(60)"
    )
    one = team(code)
    one.poll()
    until(ready.exists, "it never began")
    one.stop(0.1)
    process = one.slots[0].process
    assert process is not None
    assert process.returncode == -signal.SIGKILL


def test_the_cores_are_divided_unless_a_number_of_threads_is_set() -> None:
    cores = len(os.sched_getaffinity(0))
    assert divide_threads(Machine(), 1) == Machine()
    assert divide_threads(Machine(), 2).threads == max(1, cores // 2)
    assert divide_threads(Machine(threads=7), 2).threads == 7
    assert divide_threads(Machine(), 10 * cores).threads == 1


def test_each_worker_has_a_gpu_of_its_own(team: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5,-1,7")  # -1 ends the list
    code = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], file=sys.stderr)"
    three = team(code, count=3)
    until(lambda: not three.poll(), "they never ended")
    assert [_said(member) for member in three.slots] == ["3", "GPU-5", "3"]


def _said(member: WorkerSlot) -> str:
    return member.log.read_text(encoding="utf-8").strip()
