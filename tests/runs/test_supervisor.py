"""Tests of the supervisor with real processes that run a script, one act per attempt, instead of a training."""

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.errors import InputError, InterruptedRunError, RunFailedError, StorageError
from ratchet.runs import heartbeat, supervisor
from ratchet.runs.directory import RunDirectory, RunSpec, TrainingLaunchSpec
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.supervisor import count_oom_kills, supervise
from ratchet.stages.status import read_run_status
from ratchet.storage.records.base import BaseCard

BASE = BaseCard(
    source="tiny", revision=None, digest="b" * 64, files={"a": "b"}, architecture="LlamaForCausalLM", parameters=1,
    licence=None,
)  # fmt: skip

PATIENCE_S = 60.0

# The worker imports only modules that load in milliseconds, because it is started often.
WORKER = """
import faulthandler, json, os, signal, sys, time
from pathlib import Path
from ratchet.storage import files
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal
from ratchet.runs.signals import die_with_parent
die_with_parent(signal.SIGKILL)
asked = []
signal.signal(signal.SIGTERM, lambda *about: asked.append(1))
root, number = Path(sys.argv[1]), int(sys.argv[2])
assert os.getppid() == int(sys.argv[3])
machine = json.loads((root / "launch.json").read_text())["machine"]
heartbeat = Heartbeat(int(sys.argv[4]), machine["stall_timeout_s"], machine["first_stall_timeout_s"])
faulthandler.register(signal.SIGUSR1, file=(root / "stacks.txt").open("a"), all_threads=True)
journal = Journal(root / "journal.jsonl", number)
heartbeat.beat("step")
heartbeat.beat("step")
journal.append("worker_ready", start_step=0, planned_steps=9)

def checkpoint(step):
    cost = {"size_bytes": 1, "bytes_written": 1, "bytes_linked": 0, "blocked_s": 0, "seconds": 0}
    journal.append("checkpoint_saved", step=step, is_best=False, **cost)

def fail(kind, text, code=1):
    journal.append("worker_error", failure_class=kind, text=text)
    sys.exit(code)

def kill(): os.kill(os.getpid(), signal.SIGKILL)

def hasten(stall_timeout_s):
    # The following steps have a short deadline, not the writes of the acts around them.
    global heartbeat
    heartbeat = Heartbeat(int(sys.argv[4]), stall_timeout_s, machine["first_stall_timeout_s"])
    heartbeat.beat("step")
    heartbeat.beat("step")

def hang():
    hasten(1.0)
    time.sleep(3600)

def stop_myself():
    hasten(1.0)
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)

def until_asked():
    while not asked:
        heartbeat.beat("step")
        time.sleep(0.01)
    checkpoint(5)
    journal.append("interrupted", step=5)
    sys.exit(75)

def finish():
    with files.sealed_directory(root / "result", "result") as scratch:
        (scratch / "train.json").write_text("{}")
    journal.append("finished", step=9, reason="completed", adapter_digest="a")

acts = json.loads((root / "acts.json").read_text())
exec(acts[min(number, len(acts)) - 1])
"""


class Stage:
    """A run, and a supervisor for it in this process."""

    def __init__(self, root: Path) -> None:
        self.run = RunDirectory.open(root / "runs", RunSpec(train=Train(), data_digest="d" * 64, base_digest="b" * 64))
        self.machine = Machine(
            stall_timeout_s=30, first_stall_timeout_s=60, grace_period_s=30, restart_delay_s=0.01, max_restarts=3
        )

    def set(self, **changes: object) -> None:
        assert changes.keys() <= type(self.machine).model_fields.keys(), "model_copy accepts unknown names"
        self.machine = self.machine.model_copy(update=changes)

    def play(self, *acts: str, version: str = "1") -> None:
        (self.run.paths.root / "acts.json").write_text(json.dumps(acts))
        launch = TrainingLaunchSpec(machine=self.machine, base_path="/base", data_path="/data", base=BASE)
        supervise(self.run, launch, [], version)

    def events(self, *kinds: str) -> list[JournalEvent]:
        return [e for e in JournalReader(self.run.paths.journal).read() if e.kind in kinds]

    def ends(self) -> list[tuple[str, str]]:
        """Return failure class and decision of every worker that ended."""
        return [(e.data["failure_class"], e.data["decision"]) for e in self.events("worker_exited")]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(supervisor, "WORKER", (sys.executable, str(script)))
    made = Stage(tmp_path)
    yield made
    made.run.close()


@contextmanager
def when(there: Callable[[], object], act: Callable[[], object]) -> Iterator[None]:
    """Call `act` in another thread as soon as the condition `there` holds."""

    def wait() -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not there() and time.monotonic() < deadline:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopped(stage: Stage, act: str, message: str, there: Callable[[], object] | None = None) -> None:
    """Play an act, request a stop when the worker is ready or the condition `there` holds, and expect
    InterruptedRunError."""
    asks = when(there or (lambda: stage.events("worker_ready")), terminate)
    with asks, pytest.raises(InterruptedRunError, match=message):
        stage.play(act)


def test_worker_that_dies_is_started_again_until_there_is_a_result(stage: Stage) -> None:
    stage.play("checkpoint(1); kill()", "checkpoint(2); kill()", "fail('hardware', 'bus error')", "pass", "finish()")
    assert stage.run.paths.is_finished()
    assert stage.ends() == [("killed", "Retry"), ("killed", "Retry"), ("hardware", "Retry"), ("bug", "Retry")]
    assert [e.attempt for e in stage.events("attempt_started")] == [1, 2, 3, 4, 5]
    stage.play("kill()")
    assert len(stage.events("attempt_started")) == 5, "a finished run starts no worker"


@pytest.mark.parametrize("last", ["kill()", "hang()", "sys.exit(1)"])
def test_a_worker_that_fails_after_its_end_was_told_has_done_its_work(stage: Stage, last: str) -> None:
    stage.play(f"finish(); {last}")
    assert stage.ends() == []
    assert len(stage.events("attempt_started")) == 1


def test_deaths_without_progress_end_the_run_and_those_with_progress_do_not(stage: Stage) -> None:
    stage.set(max_restarts=2)
    gives_up = (
        r"bus error; gave up after 2 restarts without .*; earlier causes: disk full; killed by(?s:.*)step 3; worker"
    )
    with pytest.raises(RunFailedError, match=gives_up):
        stage.play(
            "checkpoint(1); kill()", "checkpoint(2); kill()", "checkpoint(3); fail('storage', 'disk full')", "kill()",
            "fail('hardware', 'bus error')",
        )  # fmt: skip
    killed = ("killed", "Retry")
    assert stage.ends() == [killed, killed, ("storage", "Retry"), killed, ("hardware", "GiveUp")]


def test_a_bug_is_tried_once_more(stage: Stage) -> None:
    with pytest.raises(RunFailedError, match="KeyError: 'x'; failed the same way after a restart"):
        stage.play("fail('bug', \"KeyError: 'x'\")")
    assert stage.ends() == [("bug", "Retry"), ("bug", "GiveUp")]


@pytest.mark.parametrize(
    ("act", "error", "says"),
    [
        ("fail('data', 'no column', 2)", InputError, "^no column$"),
        ("fail('storage', 'waited for 600 s', 2)", StorageError, "^waited for 600 s$"),
        ("fail('diverged', 'loss is nan')", RunFailedError, "diverged: loss is nan"),
        ("fail('out_of_memory', 'one row does not fit')", RunFailedError, "out of memory: one row does not fit"),
    ],
)
def test_what_a_restart_cannot_mend_is_not_tried_again(
    stage: Stage, act: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        stage.play(act, "finish()")
    assert len(stage.events("attempt_started")) == 1


def test_worker_that_cannot_be_started_is_tried_again(stage: Stage) -> None:
    stage.run.paths.worker_log.mkdir()
    stage.set(max_restarts=1000)
    with when(lambda: stage.events("worker_exited"), stage.run.paths.worker_log.rmdir):
        stage.play("finish()")
    assert stage.ends()[0] == ("storage", "Retry")
    assert "the worker could not be started" in stage.events("worker_exited")[0].data["text"]


def test_changed_code_version_is_noted_and_the_worker_holds_the_lock(stage: Stage) -> None:
    with pytest.raises(InputError):
        stage.play("fail('data', 'x', 2)")
    holds = (
        "held = {os.path.realpath(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd')}\n"
        "assert os.path.realpath(root / 'lock') in held\n"
        "finish()"
    )
    stage.play("", holds, version="2")
    assert [e.data["text"] for e in stage.events("notice")] == ["code version changed within the run, from 1 to 2"]
    assert len(stage.events("worker_exited")) == 1


# ------------------------------------------------------------------------------------------------------------ stalls


@pytest.mark.parametrize(
    ("act", "says"),
    [("hang()", "phase step"), ("stop_myself()", "it was stopped by a signal")],
    ids=["hangs", "is stopped"],
)
def test_stalled_worker_is_killed_reported_and_started_again(stage: Stage, act: str, says: str) -> None:
    stage.play(f"checkpoint(1); {act}", "finish()")
    assert stage.ends() == [("stalled", "Retry")]
    text = stage.events("alert")[0].data["text"]
    assert says in text
    assert re.search(r"no heartbeat for \d.* s in phase step \(deadline 1 s\)", text)
    assert f"stacks in {stage.run.paths.stacks}" in text
    assert "worker.py" in stage.run.paths.stacks.read_text()


@pytest.mark.parametrize(
    ("stall_timeout_s", "act"),
    [
        (30, "hasten(0.2); " + 2 * "heartbeat.beat('validate'); time.sleep(0.5); " + "hasten(30); finish()"),
        (0, "time.sleep(1.5); finish()"),
    ],
    ids=["slow unit within its deadline", "no deadlines"],
)
def test_slow_worker_is_left_alone(stage: Stage, stall_timeout_s: float, act: str) -> None:
    stage.set(stall_timeout_s=stall_timeout_s)
    stage.play(act)
    assert stage.ends() == []


def test_a_worker_that_stalls_again_and_again_is_given_up(stage: Stage) -> None:
    stage.set(max_restarts=1)
    with pytest.raises(RunFailedError, match="stalled: no heartbeat"):
        stage.play("hang()")
    assert stage.ends() == [("stalled", "Retry"), ("stalled", "GiveUp")]


# ------------------------------------------------------------------------------------------------------------- stops


def test_checkpoints_after_a_damaged_one_are_progress_too(stage: Stage) -> None:
    stage.set(max_restarts=1)
    with pytest.raises(RunFailedError, match="without a new checkpoint"):
        stage.play(*(f"checkpoint({step}); kill()" for step in (9, 4, 5, 6, 6)), "finish()")
    assert stage.ends() == [("killed", "Retry")] * 4 + [("killed", "GiveUp")]


def test_stop_is_passed_on_and_the_sealed_checkpoint_is_named(stage: Stage) -> None:
    stopped(stage, "until_asked()", r"stopped on request; run it again to resume \(a checkpoint of step 5")
    assert stage.ends() == []


def test_stop_wakes_a_worker_that_a_signal_has_stopped(stage: Stage) -> None:
    def is_stopped() -> bool:
        children = [p.read_text().split() for p in Path("/proc/self/task").glob("*/children")]
        return any(heartbeat.read_process_state(int(child)) == "stopped" for group in children for child in group)

    act = "os.kill(os.getpid(), signal.SIGSTOP)\nuntil_asked()"
    stopped(stage, act, "a checkpoint of step 5", is_stopped)
    assert stage.ends() == []


def test_worker_that_is_stopped_while_loading_counts_as_stopped(stage: Stage) -> None:
    stopped(stage, "while not asked: time.sleep(0.01)\nos._exit(75)", "no checkpoint was saved yet")
    assert [e.data for e in stage.events("interrupted")] == [{"step": 0}]
    assert "stopped on request at step 0" in read_run_status(stage.run.paths).description
    assert "killed together with its supervisor" not in read_run_status(stage.run.paths).description


def test_stop_between_two_attempts_starts_no_further_one(stage: Stage) -> None:
    stage.set(restart_delay_s=50)
    message = "a checkpoint of step 4 is saved"
    stopped(stage, "checkpoint(4); kill()", message, lambda: stage.events("worker_exited"))
    assert len(stage.events("attempt_started")) == 1
    assert [e.data["step"] for e in stage.events("interrupted")] == [4]


def test_worker_that_dies_of_a_stop_is_an_interruption(stage: Stage) -> None:
    message = r"asked to stop, and the worker ended: killed by SIGKILL"
    stopped(stage, "while not asked: time.sleep(0.01)\nkill()", message)
    assert stage.ends() == [("killed", "Interrupted")]


def test_hung_worker_does_not_hold_up_the_exit(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "STOP_EXTRA_S", 0.3)
    stage.set(grace_period_s=0.3)
    stopped(stage, "checkpoint(2); hang()", r"no heartbeat .*\(a checkpoint of step 2 is saved\)")
    assert stage.ends() == [("stalled", "Interrupted")]


def test_spot_notice_is_a_stop(stage: Stage, tmp_path: Path) -> None:
    stage.set(preemption_notice=str(tmp_path / "taken"))
    is_taken = when(lambda: stage.events("worker_ready"), (tmp_path / "taken").touch)
    with is_taken, pytest.raises(InterruptedRunError, match="checkpoint of step 5"):
        stage.play("until_asked()")
    assert "this machine is about to be preempted" in stage.events("alert")[0].data["text"]


# ------------------------------------------------------------------------------------------------------------ memory


def test_kills_for_memory_are_counted(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 3\npgfault 7\n")
    (tmp_path / "events").write_text("low 0\noom 2\noom_kill 5\noom_group_kill 9\n")
    assert count_oom_kills(tmp_path / "vmstat", tmp_path / "events") == (3, 5)
    assert count_oom_kills(tmp_path / "none", tmp_path / "none") == (0, 0)
    assert min(count_oom_kills()) >= 0


def test_a_kill_while_the_system_ran_out_of_memory_is_called_so(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = iter([(7, 0), (8, 0), (8, 0), (8, 0)])
    monkeypatch.setattr(supervisor, "count_oom_kills", lambda: next(counters))
    stage.play("kill()", "finish()")
    assert stage.ends() == [("out_of_memory", "Retry")]
    assert "lower machine.micro_batch_size" in stage.events("worker_exited")[0].data["text"]


def test_long_journal_is_read_once_and_a_failing_notice_is_reported_once(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2000):
        stage.run.journal.append("notice", text="x" * 100)
    offsets: list[int] = []
    read = JournalReader.read

    def watched(self: JournalReader) -> Iterator[JournalEvent]:
        offsets.append(self.offset)
        return read(self)

    monkeypatch.setattr(JournalReader, "read", watched)
    stage.set(preemption_notice=str(tmp_path / ("x" * 300)))  # longer than a file name may be
    stage.play("kill()", "kill()", "finish()")
    whole, *later = sorted(offsets)
    assert whole == 0
    assert min(later) > 2000 * 100
    assert len([e for e in stage.events("notice") if "no answer" in e.data["text"]]) == 1
