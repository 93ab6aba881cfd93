"""Tests of the lock of trainings that share a device."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ratchet.errors import InterruptedRunError
from ratchet.runs.device_lock import DeviceLock

WAIT_S = 30.0


class Training:
    """A training in a thread, which holds the lock until `end`."""

    def __init__(self, folder: Path, is_exclusive: bool) -> None:
        self.holds, self._may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(folder, is_exclusive), daemon=True)
        self._thread.start()

    def _run(self, folder: Path, is_exclusive: bool) -> None:
        with DeviceLock(folder).hold(is_exclusive, lambda: None):
            self.holds.set()
            self._may_end.wait(WAIT_S)

    def end(self) -> None:
        self._may_end.set()
        self._thread.join(WAIT_S)


def until(done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_training_alone_waits_for_the_group_and_new_ones_wait_behind_it(tmp_path: Path) -> None:
    first, second = Training(tmp_path, is_exclusive=False), Training(tmp_path, is_exclusive=False)
    assert first.holds.wait(WAIT_S)
    assert second.holds.wait(WAIT_S)
    assert not DeviceLock(tmp_path).has_queue()
    alone = Training(tmp_path, is_exclusive=True)
    until(DeviceLock(tmp_path).has_queue)
    late = Training(tmp_path, is_exclusive=False)
    first.end()
    assert not alone.holds.wait(0.5)
    second.end()
    assert alone.holds.wait(WAIT_S)
    assert not late.holds.wait(0.5)
    alone.end()
    assert late.holds.wait(WAIT_S)
    late.end()
    assert not DeviceLock(tmp_path).has_queue()


def test_a_group_that_joined_is_waited_for_and_a_request_to_stop_ends_the_wait(tmp_path: Path) -> None:
    group = DeviceLock(tmp_path)

    def stop() -> None:
        assert group.has_queue()
        raise InterruptedRunError("stopped on request")

    with group.hold_shared():
        with pytest.raises(InterruptedRunError), DeviceLock(tmp_path).hold(True, stop):
            raise AssertionError("the group has the lock")
        assert not group.has_queue()


def test_without_a_group_nothing_waits() -> None:
    with DeviceLock(None).hold(True, lambda: None), DeviceLock(None).hold(True, lambda: None):
        assert not DeviceLock(None).has_queue()
