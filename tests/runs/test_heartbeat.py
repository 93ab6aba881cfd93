"""Tests of the heartbeat page: processes share it, reads are consistent, and deadlines adapt to the worker."""

import os
import signal
import subprocess
import sys
import time

import pytest

from ratchet.runs.heartbeat import PHASES, Heartbeat

TWIN = "from ratchet.runs.heartbeat import Heartbeat; import sys; h = Heartbeat(int(sys.argv[1]), 10.0, 100.0)\n"


def child(heartbeat: Heartbeat, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TWIN + code, str(heartbeat.fd)],
        pass_fds=[heartbeat.fd], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_loading_and_the_first_unit_of_each_kind_have_the_long_deadline() -> None:
    heartbeat = Heartbeat.create(10.0, 100.0)
    beat = heartbeat.read()
    assert (beat.phase, beat.deadline_s) == ("load", 100.0)
    assert 0 <= beat.age_s < 60
    for _ in range(3):
        heartbeat.beat("load")
        assert heartbeat.read().deadline_s == 100.0
    for phase in ("step", "validate", "save"):
        heartbeat.beat(phase)
        assert (heartbeat.read().phase, heartbeat.read().deadline_s) == (phase, 100.0)
        heartbeat.beat(phase)
        assert heartbeat.read().deadline_s == 10.0
    heartbeat.close()


def test_a_long_unit_makes_the_deadline_of_its_kind_longer_and_of_no_other() -> None:
    heartbeat = Heartbeat.create(0.01, 100.0)
    for phase in ("step", "validate", "step"):
        heartbeat.beat(phase)
    heartbeat.beat("step")
    time.sleep(0.05)
    heartbeat.beat("step")
    learned = heartbeat.read().deadline_s
    assert 0.5 <= learned < 60
    heartbeat.beat("step")
    assert heartbeat.read().deadline_s == learned  # a short unit of work does not shorten the deadline
    heartbeat.beat("validate")
    assert heartbeat.read().deadline_s < learned
    heartbeat.close()


@pytest.mark.parametrize(("stall_timeout_s", "first_s"), [(0.0, 100.0), (10.0, 0.0), (0.0, 0.0)])
def test_nought_turns_a_deadline_off(stall_timeout_s: float, first_s: float) -> None:
    heartbeat = Heartbeat.create(stall_timeout_s, first_s)
    heartbeat.beat("step")
    assert heartbeat.read().deadline_s == 0.0
    heartbeat.beat("step")
    assert heartbeat.read().deadline_s == stall_timeout_s
    heartbeat.close()


def test_beats_of_another_process_are_seen() -> None:
    heartbeat = Heartbeat.create(10.0, 100.0)
    before = heartbeat.read().number
    worker = child(heartbeat, "h.beat('step'); h.beat('validate')")
    assert worker.wait() == 0
    worker.stdout.close()
    beat = heartbeat.read()
    assert beat.phase == "validate"
    assert beat.number == before + 2
    assert 0 <= beat.age_s < 60
    heartbeat.close()


def test_private_heartbeat_has_no_deadline_and_no_descriptor_and_a_wrong_descriptor_is_refused() -> None:
    heartbeat = Heartbeat(None, 0.0, 0.0)
    heartbeat.beat("step")
    heartbeat.beat("step")
    assert heartbeat.read().deadline_s == 0.0
    with pytest.raises(RuntimeError, match="not shared"):
        _ = heartbeat.fd
    with pytest.raises((OSError, ValueError)):
        Heartbeat(10_000, 1.0, 1.0)


def test_readers_never_see_half_a_record_while_another_process_writes() -> None:
    heartbeat = Heartbeat.create(10.0, 100.0)
    worker = child(heartbeat, "print('go', flush=True)\nwhile True: h.beat('step'); h.beat('validate')")
    assert worker.stdout.readline() == "go\n"
    numbers = []
    for _ in range(20_000):
        beat = heartbeat.read()
        assert beat.phase in PHASES
        assert beat.age_s < 60
        assert beat.deadline_s in (10.0, 100.0) or beat.deadline_s > 10.0
        numbers.append(beat.number)
    worker.kill()
    worker.wait()
    worker.stdout.close()
    assert numbers == sorted(numbers)
    assert numbers[-1] > numbers[0]
    assert numbers[0] > 0
    heartbeat.close()


def test_a_writer_stopped_or_killed_at_any_moment_leaves_a_whole_record() -> None:
    for signal_number in (signal.SIGSTOP, signal.SIGKILL):
        for _ in range(4):
            heartbeat = Heartbeat.create(10.0, 100.0)
            worker = child(heartbeat, "print('go', flush=True)\nwhile True: h.beat('step')")
            assert worker.stdout.readline() == "go\n"
            os.kill(worker.pid, signal_number)
            os.waitpid(worker.pid, os.WUNTRACED)
            assert [heartbeat.read().phase, heartbeat.read().number > 0] in (["step", True], ["load", True])
            if signal_number == signal.SIGSTOP:
                worker.kill()
                worker.wait()
            else:
                worker.returncode = -signal.SIGKILL
            worker.stdout.close()
            heartbeat.close()
