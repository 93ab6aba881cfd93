"""Tests one hook and one event: real servers on loopback with realistic failures, and real programs."""

import hashlib
import hmac
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from ratchet.config.promote import HookSettings
from ratchet.errors import SettingsError
from ratchet.registry import outbox
from ratchet.registry.outbox import HookDelivery
from ratchet.storage import files
from receiver import Receiver, served

EVENT = {"id": "e" * 32, "action": "promote", "version": 3, "actor": "Zoë"}
SECRET = "not for logs"  # noqa: S105
UNSIGNED = "HTTP 200; unsigned: RATCHET_WEBHOOK_KEY is not set"
Serve = Callable[..., Receiver]


@pytest.fixture
def serve() -> Iterator[Serve]:
    with ExitStack() as servers:
        yield lambda *answers: servers.enter_context(served(*answers))


@pytest.fixture
def event(tmp_path: Path) -> Path:
    files.write_json(tmp_path / "outbox" / "event.json", EVENT)
    return tmp_path / "outbox" / "event.json"


def tell(hook: HookSettings, event: Path) -> tuple[HookDelivery, list[float]]:
    """Send an event without pauses; return the result and the requested pauses in seconds."""
    waits: list[float] = []
    return outbox.send_event(hook, event, event.parents[1], waits.append), waits


def as_tuple(result: HookDelivery) -> tuple[bool, str, int]:
    return result.is_delivered, result.detail, result.attempts


def test_an_event_is_sent_once_and_signed(serve: Serve, event: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPLOY_KEY", SECRET)
    receiver = serve(204)
    outcome, waits = tell(HookSettings(webhook=receiver.url, key_variable="DEPLOY_KEY"), event)
    assert (as_tuple(outcome), waits) == ((True, "HTTP 204", 1), [])
    [(path, headers, body)] = receiver.got
    assert path == "/deploy?token=secret"
    assert body == event.read_bytes()
    assert json.loads(body) == EVENT
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Ratchet-Event"] == "promote"
    assert headers["X-Ratchet-Delivery"] == EVENT["id"]
    stamp = headers["X-Ratchet-Timestamp"]
    assert abs(int(stamp) - time.time()) < 600
    expected = hmac.new(SECRET.encode(), stamp.encode() + b"." + body, hashlib.sha256).hexdigest()
    assert headers["X-Ratchet-Signature"] == f"sha256={expected}"
    assert SECRET not in str(outcome)


def test_the_receiver_of_the_docs_refuses_forgeries_and_repetitions(
    serve: Serve, event: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")
    deployed: list[str] = []
    found: dict[str, Any] = {"deploy": deployed.append}
    exec(text.split("```python\n")[1].split("```")[0], found)  # noqa: S102 (our own page)
    files.write_json(event, EVENT | {"line": 4, "source": "file:///model"})
    monkeypatch.setenv("RATCHET_WEBHOOK_KEY", SECRET)
    receiver = serve(204)
    assert tell(HookSettings(webhook=receiver.url), event)[0].is_delivered
    [(_, headers, body)] = receiver.got
    seen: set[str] = set()
    assert found["receive"](headers, body, "another key", seen, 3) == (401, 3)
    assert found["receive"](headers, body.replace(b"4", b"5"), SECRET, seen, 3) == (401, 3)
    assert not found["genuine"](headers, body, SECRET, time.time() + 3600)
    assert found["receive"](headers, body, SECRET, seen, 3) == (204, 4)
    assert found["receive"](headers, body, SECRET, seen, 4) == (204, 4)
    assert found["receive"](headers, body, SECRET, set(), 9) == (204, 9)
    assert deployed == ["file:///model"]


def test_retries_have_one_id_and_longer_waits_and_no_signature_without_a_key(
    serve: Serve, event: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_WEBHOOK_KEY", "")
    receiver = serve(503, 500, 1, 429, 200)
    outcome, waits = tell(HookSettings(webhook=receiver.url), event)
    assert as_tuple(outcome) == (True, UNSIGNED, 5)
    assert [low <= wait <= 1.25 * low for low, wait in zip((1, 2, 4, 8), waits, strict=True)] == [True] * 4
    assert {headers["X-Ratchet-Delivery"] for _, headers, _ in receiver.got} == {EVENT["id"]}
    assert {body for _, _, body in receiver.got} == {event.read_bytes()}
    assert not any("X-Ratchet-Signature" in headers for _, headers, _ in receiver.got)


@pytest.mark.parametrize(
    ("status", "retries", "says"),
    [
        (503, 2, "HTTP 503 Service Unavailable"),
        (400, 0, "HTTP 400"),
        (401, 0, "HTTP 401"),
        (404, 0, "HTTP 404"),
        (408, 0, "HTTP 408"),
        (410, 0, "HTTP 410"),
        (301, 0, "redirects are not followed"),
        (302, 0, "redirects are not followed"),
        (307, 0, "redirects are not followed"),
        (308, 0, "redirects are not followed"),
    ],
)
def test_only_transient_failures_are_retried_and_no_redirect_is_followed(
    serve: Serve, event: Path, status: int, retries: int, says: str
) -> None:
    other = serve(200)
    receiver = serve((status, {"Location": other.url}))
    outcome, waits = tell(HookSettings(webhook=receiver.url, retries=2), event)
    assert (outcome.is_delivered, outcome.attempts, len(waits), len(receiver.got)) == (
        False,
        retries + 1,
        retries,
        retries + 1,
    )
    assert says in outcome.detail
    assert other.got == []


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [("7", 7, 7), ("100000", 60, 60), ("soon", 1, 1.25), ("-3", 1, 1.25), ("date", 20, 30)],
    ids=["seconds", "too long", "no number", "negative", "a date"],
)
def test_retry_after_sets_the_wait_within_limits(
    serve: Serve, event: Path, asked: str, least: float, most: float
) -> None:
    value = formatdate(time.time() + 30, usegmt=True) if asked == "date" else asked
    receiver = serve((429, {"Retry-After": value}), 200)
    outcome, [wait] = tell(HookSettings(webhook=receiver.url), event)
    assert outcome.is_delivered
    assert least <= wait <= most


def test_a_stalling_server_times_out(serve: Serve, event: Path) -> None:
    """The server sends single bytes, so no single read times out."""
    receiver = serve(0, 200)
    outcome, _ = tell(HookSettings(webhook=receiver.url, timeout_s=1.5), event)
    assert as_tuple(outcome) == (True, UNSIGNED, 2)
    stalling = serve(0)
    outcome, _ = tell(HookSettings(webhook=stalling.url, timeout_s=0.3, retries=0), event)
    assert as_tuple(outcome) == (False, "no answer within 0.3 s", 1)


def test_loopback_without_proxy_and_refused_connections(
    serve: Serve, event: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # the proxy is not used for loopback
    assert tell(HookSettings(webhook=serve(200).url), event)[0].is_delivered
    outcome, _ = tell(HookSettings(webhook="http://127.0.0.1:9/", retries=1), event)
    assert (outcome.is_delivered, outcome.attempts) == (False, 2)
    assert "ConnectionRefusedError" in outcome.detail


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://deploy.example.org/", "expected https"),
        ("ftp://example.org/", "expected a URL such as https"),
        ("https:///path", "expected a URL such as https"),
        ("deploy", "expected a URL such as https"),
        ("https://example.org/a b", "expected a URL such as https"),
        ("https://user:pass@example.org/", "without user name and password"),
        ("https://example.org:port/", "valid host and port"),
        ("http://127.0.0.1.example.org/", "expected https"),
    ],
    ids=["http", "ftp", "no host", "a word", "a space", "a password", "a port", "almost loopback"],
)
def test_an_invalid_address_is_refused_before_anything_happens(address: str, message: str) -> None:
    with pytest.raises(SettingsError, match=rf"promote\.hooks\[1\]\.webhook: .*{message}"):
        outbox.check_hooks([HookSettings(command=("true",)), HookSettings(webhook=address)])


def test_valid_addresses_are_accepted() -> None:
    for address in ("https://example.org", "http://localhost:8000/x", "http://127.0.0.9/", "http://[::1]:80/"):
        outbox.check_hooks([HookSettings(webhook=address)])


def test_a_label_holds_no_secret() -> None:
    assert (
        outbox.hook_label(HookSettings(webhook="https://hooks.example.org/T0/secret?k=1"))
        == "webhook https://hooks.example.org"
    )
    assert outbox.hook_label(HookSettings(command=("/opt/deploy", "--key", "secret"))) == "command deploy"


# --- programs ---------------------------------------------------------------------------------------------------------


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_a_program_gets_the_event_and_no_shell_reads_its_arguments(event: Path) -> None:
    code = (
        "import json, os, sys; event = json.load(sys.stdin); "
        "open('seen.json', 'w').write(json.dumps([event, os.environ['RATCHET_EVENT_ID']])); print('deployed')"
    )
    hook = HookSettings(command=(*python(code), "$(touch made); touch made"))
    outcome, _ = tell(hook, event)
    assert as_tuple(outcome) == (True, "exit code 0", 1)
    assert json.loads((event.parents[1] / "seen.json").read_text()) == [EVENT, EVENT["id"]]
    assert (event.parent / f"{outbox.hook_key(hook)}.log").read_text() == "deployed\n"
    assert not (event.parents[1] / "made").exists()


def test_a_program_that_fails_is_retried_and_one_that_does_not_start_is_not(event: Path) -> None:
    code = "import os, sys; n = os.path.exists('once'); open('once', 'w'); sys.exit(0 if n else 3)"
    assert as_tuple(tell(HookSettings(command=python(code)), event)[0]) == (True, "exit code 0", 2)
    outcome, waits = tell(HookSettings(command=("false",), retries=1), event)
    assert (outcome.is_delivered, outcome.attempts, len(waits)) == (False, 2, 1)
    assert outcome.detail.startswith("exit code 1 (see ")
    outcome, _ = tell(HookSettings(command=("no-such-program",)), event)
    assert as_tuple(outcome) == (False, "cannot be started (No such file or directory)", 1)


def test_a_program_that_hangs_is_killed_with_all_that_it_started(event: Path) -> None:
    os.mkfifo(event.parents[1] / "end")
    reader = os.open(event.parents[1] / "end", os.O_RDONLY | os.O_NONBLOCK)
    outcome, _ = tell(
        HookSettings(command=("sh", "-c", "exec 3> end; sleep 600 & sleep 600"), timeout_s=1.0, retries=0), event
    )
    assert as_tuple(outcome) == (False, "timed out after 1 s and was killed", 1)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""  # the last writer has ended
    os.close(reader)


def test_a_named_key_must_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUR_KEY", raising=False)
    hook = HookSettings(webhook="https://example.org/hook", key_variable="OUR_KEY")
    with pytest.raises(
        SettingsError, match=r"promote.hooks\[0\].key_variable: the environment variable OUR_KEY is not set"
    ):
        outbox.check_hooks((hook,))
    outbox.check_hooks((hook,), require_keys=False)
    monkeypatch.setenv("OUR_KEY", "x")
    outbox.check_hooks((hook,))
