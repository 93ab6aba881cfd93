"""Tests the outbox: events arrive in order, each hook gets each event once, and delivery survives its starter."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ratchet.cli.promote import format_delivery
from ratchet.config.promote import HookSettings
from ratchet.errors import DamagedFileError
from ratchet.registry import outbox
from ratchet.storage.records.gate import Promotion

COUNT = HookSettings(command=("sh", "-c", "echo $RATCHET_EVENT_ID >> told.txt"), retries=0)


def put(box: Path, line: int, *told: HookSettings, action: str = "promote") -> str:
    entry = Promotion.model_validate({
        "id": f"event-{line}", "time": "2026-01-01T00:00:00+00:00", "action": action, "actor": "ada", "version": line,
        "model_digest": "m" * 64, "adapter_digest": "a" * 64, "run_id": "run", "previous_version": None,
        "previous": None,
    })  # fmt: skip
    return outbox.add_event(box, outbox.build_event(entry, line, "project", "model", "file:///model"), told)


@pytest.fixture
def box(tmp_path: Path) -> Path:
    return tmp_path / "mlruns" / "outbox"


def told(root: Path) -> list[str]:
    path = root / "told.txt"
    return path.read_text().split() if path.exists() else []


def wait_until(true: Callable[[], bool]) -> None:
    """Wait up to 60 s for other processes."""
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


def test_events_are_delivered_in_order_and_once(tmp_path: Path, box: Path) -> None:
    for line in (2, 10, 1):
        name = put(box, line, COUNT, COUNT)  # a hook that is listed twice counts once
    assert put(box, 1, COUNT) == name  # the promotion is finished a second time
    put(box, 11, COUNT.model_copy(update={"events": ("rollback",)}))
    for _ in range(2):
        assert outbox.deliver_pending(box, tmp_path) is None
    assert told(tmp_path) == ["event-1", "event-2", "event-10"]
    assert put(box, 1, COUNT) == name
    assert outbox.deliver_pending(box, tmp_path) is None
    assert len(told(tmp_path)) == 3
    [delivery] = outbox.read_event_deliveries(box, name)
    assert (delivery.hook, delivery.is_delivered, delivery.detail) == ("command sh", True, "exit code 0")
    assert format_delivery(delivery) == "command sh: delivered (exit code 0)"


def test_an_event_contains_all_fields(box: Path) -> None:
    name = put(box, 7, COUNT, action="rollback")
    assert json.loads((box / name / "event.json").read_bytes()) == {
        "id": "event-7", "line": 7, "action": "rollback", "time": "2026-01-01T00:00:00+00:00", "project": "project",
        "model_name": "model", "version": 7, "model_digest": "m" * 64, "previous_version": None, "actor": "ada",
        "decision": None,
        "forced": False, "reason": None, "source": "file:///model", "approvals": None,
    }  # fmt: skip


def test_a_failed_hook_affects_no_other_and_can_be_repeated(tmp_path: Path, box: Path) -> None:
    broken = HookSettings(command=("no-such-program",))
    name = put(box, 1, broken, COUNT)
    assert outbox.deliver_pending(box, tmp_path) is None
    assert told(tmp_path) == ["event-1"]
    failed, successful = sorted(outbox.read_event_deliveries(box, name), key=lambda one: one.is_delivered)
    warning = format_delivery(failed)
    assert warning.startswith("warning: command no-such-program: not delivered (cannot be started")
    assert "`ratchet promotions --deliver` tries again" in warning
    assert format_delivery(successful).startswith("command sh: delivered")
    assert outbox.deliver_pending(box, tmp_path) is None  # the hook gave up, so a delivery does not repeat the event
    assert outbox.read_deliveries(box)[0].waiting == ()

    assert outbox.retry_failed(box, []) == 0
    assert [len(delivery.failed) for delivery in outbox.read_deliveries(box)] == [1]

    mended = HookSettings(command=("sh", "-c", "echo mended >> told.txt"))
    assert outbox.retry_failed(box, [COUNT, mended]) == 1
    assert outbox.deliver_pending(box, tmp_path) is None
    assert told(tmp_path) == ["event-1", "mended"]
    assert outbox.retry_failed(box, [COUNT, mended]) == 0


def test_delivery_survives_a_kill_of_its_starter(tmp_path: Path, box: Path) -> None:
    slow = HookSettings(command=("sh", "-c", "touch begun; cat wait; echo $RATCHET_EVENT_ID >> told.txt"), retries=0)
    put(box, 1, slow, COUNT)
    os.mkfifo(tmp_path / "wait")
    code = "import sys; from pathlib import Path; from ratchet.registry import outbox as delivery; "
    code += "delivery.deliver_pending(Path(sys.argv[1]), Path(sys.argv[2]))"
    starter = subprocess.Popen([sys.executable, "-c", code, str(box), str(tmp_path)], start_new_session=True)
    wait_until((tmp_path / "begun").exists)
    os.killpg(starter.pid, signal.SIGKILL)
    assert starter.wait() == -signal.SIGKILL
    problem = outbox.deliver_pending(box, tmp_path, wait_s=0.5)  # a second delivery has to wait for the first
    assert problem is not None
    assert "hooks are still running" in problem
    (tmp_path / "wait").write_text("go on")
    wait_until(lambda: not any(found.waiting for found in outbox.read_deliveries(box)))
    with outbox.acquire_lock(box):
        assert told(tmp_path) == ["event-1", "event-1"]  # one line from each of the two hooks


def test_after_a_kill_before_the_result_the_hook_gets_the_same_id_again(tmp_path: Path, box: Path) -> None:
    """A sender cannot close this gap, so receivers must recognize ids."""
    once = HookSettings(
        command=("sh", "-c", "echo $RATCHET_EVENT_ID >> told.txt; test -e wait && cat wait; true"), retries=0
    )
    put(box, 1, once)
    os.mkfifo(tmp_path / "wait")
    assert outbox.deliver_pending(box, tmp_path, wait_s=0.0) is not None
    wait_until(lambda: told(tmp_path) == ["event-1"])
    os.kill(int((box / "delivery.lock").read_text()), signal.SIGKILL)
    (tmp_path / "wait").write_text("go on")
    (tmp_path / "wait").unlink()
    assert outbox.deliver_pending(box, tmp_path) is None
    assert told(tmp_path) == ["event-1", "event-1"]
    assert outbox.deliver_pending(box, tmp_path) is None
    assert len(told(tmp_path)) == 2


def test_a_damaged_event_is_refused_and_an_incomplete_one_ignored(tmp_path: Path, box: Path) -> None:
    name = put(box, 1, COUNT)
    (box / name / "event.json").write_text("{")
    with pytest.raises(DamagedFileError, match=r"event\.json: not an event .*remove the folder"):
        outbox.read_deliveries(box)
    (box / name / "event.json").unlink()  # as after a kill before it was written
    assert outbox.read_deliveries(box) == []
    put(box, 1, COUNT)
    assert outbox.deliver_pending(box, tmp_path) is None
    assert told(tmp_path) == ["event-1"]


def test_a_failed_delivery_is_reported_with_its_log(tmp_path: Path, box: Path) -> None:
    put(box, 1, COUNT)
    (box / "delivery.lock").mkdir()
    problem = outbox.deliver_pending(box, tmp_path)
    assert problem is not None
    assert "failed with exit code 1 (see" in problem
    assert "IsADirectoryError" in (box / "delivery.log").read_text()


def test_the_key_is_stored_nowhere(tmp_path: Path, box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_WEBHOOK_KEY", "hunter2-hunter2")
    put(box, 1, HookSettings(webhook="http://127.0.0.1:9/", retries=0), COUNT)
    assert outbox.deliver_pending(box, tmp_path) is None
    assert [one.is_delivered for one in outbox.read_deliveries(box)[0].results].count(False) == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]


def test_a_hook_keeps_its_key_when_its_timeout_changes() -> None:
    assert outbox.hook_key(COUNT) == outbox.hook_key(COUNT.model_copy(update={"timeout_s": 1.0, "retries": 3}))
    assert outbox.hook_key(COUNT) != outbox.hook_key(HookSettings(command=("sh",)))
