"""Tests webhooks, with a real server on loopback that answers, fails, stalls, or is missing."""

import json
import os
import socket
import time
from typing import Any

import pytest

from ratchet.config.machine import Machine, WebhookEvent
from ratchet.errors import SettingsError
from ratchet.runs.callbacks import Status
from ratchet.runs.journal import JournalEvent
from ratchet.tracking import webhook as module
from ratchet.tracking.webhook import VARIABLE, Webhook, WebhookCallback
from receiver import HANGS_UP, STALLS, Receiver, served

TOKEN = "T0PLANTED/B1/xyzzy"  # noqa: S105
ALL: tuple[WebhookEvent, ...] = ("finished", "failed", "stalled", "gated", "promoted")


def webhook(receiver: Receiver, wait_s: float = 10.0, events: tuple[WebhookEvent, ...] = ALL) -> Webhook:
    receiver.path = f"/services/{TOKEN}"
    return Webhook(receiver.url, events, wait_s, "shop")


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(body) for _, _, body in receiver.got]


def attempt(number: int = 1, **data: Any) -> JournalEvent:
    return JournalEvent(
        "attempt_started", round(time.time(), 3), number, {"pid": os.getpid(), "code_version": "1"} | data
    )


def event(kind: str, number: int = 1, **data: Any) -> JournalEvent:
    return JournalEvent(kind, time.time(), number, data)


READY = event("worker_ready", start_step=0, planned_steps=9, has_rank_zero=True)
STALLED = {
    "exit_code": -9,
    "failure_class": "stalled",
    "decision": "Retry",
    "text": "no heartbeat for 5 s in phase step",
}


def test_one_message_has_text_for_people_and_fields_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with served(200) as receiver:
        webhook(receiver).send("failed", "run 1 has failed: <!channel> & more", run="1", step=4)
    [(path, headers, _)] = receiver.got
    assert path == f"/services/{TOKEN}"
    assert headers["Content-Type"] == "application/json"
    assert headers["X-Ratchet-Event"] == "failed"
    [body] = bodies(receiver)
    assert body["text"] == "shop: run 1 has failed: &lt;!channel&gt; &amp; more"
    assert (body["event"], body["project"], body["run"], body["step"]) == ("failed", "shop", "1", 4)
    assert (body["host"], capsys.readouterr().err) == (socket.gethostname(), "")


@pytest.mark.parametrize(
    ("answers", "tries", "said"),
    [
        ((500, 503, 200), 3, ""),
        ((HANGS_UP, 200), 2, ""),
        ((404,), 1, "HTTP 404 Not Found; 1 attempt"),
        ((307,), 1, "redirects are not followed"),
    ],
    ids=["errors that pass", "hangs up", "refused", "redirected"],
)
def test_what_may_pass_is_tried_again_and_what_will_not_is_told(
    answers: tuple[int, ...], tries: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(*answers) as receiver:
        webhook(receiver, wait_s=60.0).send("gated", "gate: HOLD")
    assert len(receiver.got) == tries
    error = capsys.readouterr().err
    assert said in error
    assert bool(said) == bool(error)
    assert TOKEN not in error


@pytest.mark.parametrize("answer", [STALLS, 500], ids=["stalls", "fails"])
def test_delivery_gives_up_while_the_server_fails(answer: int, capsys: pytest.CaptureFixture[str]) -> None:
    with served(answer) as receiver:  # leaving this block waits for a stalled server
        webhook(receiver, wait_s=1.5).send("finished", "run 1 has finished")
        assert 1 <= len(receiver.got) <= module.MAX_TRIES
    error = capsys.readouterr().err
    assert error.startswith("ratchet: webhook: `finished` not delivered (")
    assert TOKEN not in error


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"http://127.0.0.1:{{port}}/{TOKEN}", "ConnectionRefusedError"),
        (f"http://127.0.0.1:9/{TOKEN}\x7f", "invalid address; 1 attempt"),
    ],
    ids=["nobody listens", "no address"],
)
def test_error_of_an_unreachable_address_does_not_repeat_it(
    url: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(200) as receiver:
        port = receiver.port
    Webhook(url.format(port=port), ALL, 1.0, "shop").send("finished", "over")
    error = capsys.readouterr().err
    assert said in error
    assert TOKEN not in error


def test_events_that_are_not_wanted_are_not_told() -> None:
    with served(200) as receiver:
        told = webhook(receiver, events=("failed",))
        told.send("finished", "over")
        told.send("failed", "over")
    assert [body["event"] for body in bodies(receiver)] == ["failed"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (f"hooks.example.org/{TOKEN}", "expected a URL such as https"),
        (f"http://hooks.example.org/{TOKEN}", "expected https"),
        (f"https://me:{TOKEN}@example.org/", "valid host and port"),
        ("https://me:xyzzy@example.org/", "without user name and password"),
    ],
    ids=["no scheme", "no encryption", "a password with slashes", "a password"],
)
def test_an_address_that_is_none_is_refused_and_not_repeated(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, address)
    with pytest.raises(SettingsError, match=message) as refused:
        Webhook.from_environment(Machine(), "shop")
    assert VARIABLE in str(refused.value)
    assert "xyzzy" not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "events", "made"),
    [(None, ALL, False), ("", ALL, False), ("https://hooks.example.org/x", (), False),
     ("https://hooks.example.org/x", Machine().webhook_events, True)],
)  # fmt: skip
def test_webhook_needs_an_address_and_events(
    address: str | None, events: tuple[WebhookEvent, ...], made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if address is not None:
        monkeypatch.setenv(VARIABLE, address)
    assert (Webhook.from_environment(Machine(webhook_events=events), "shop") is not None) == made


def test_stall_success_and_failure_of_a_run_are_sent() -> None:
    with served(200) as receiver:
        news = WebhookCallback(webhook(receiver), "abc")
        news.on_events([attempt(), READY])
        news.on_events([event("worker_exited", **STALLED)])
        news.on_events([attempt(2), READY, event("validation", 2, step=9, loss=1.25, improved=True, seconds=1.0)])
        news.on_end("FINISHED")
        news = WebhookCallback(webhook(receiver), "abc")
        cause = {"exit_code": 1, "failure_class": "diverged", "decision": "GiveUp", "text": "8 bad steps in a row"}
        news.on_events([attempt(), READY, event("worker_exited", **cause)])
        news.on_end("FAILED")
    stalled, finished, failed = bodies(receiver)
    assert stalled["text"] == ("shop: run abc stalled at step 0 of 9: no heartbeat for 5 s in phase step; restarting")
    assert (stalled["event"], stalled["run"]) == ("stalled", "abc")
    assert finished["text"] == "shop: run abc finished at step 0 of 9, validation loss 1.2500 at step 9"
    assert (finished["event"], finished["validation_loss"]) == ("finished", 1.25)
    assert failed["text"] == "shop: run abc failed at step 0 of 9: attempt 1: diverged, 8 bad steps in a row"


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([attempt(pid=1), event("worker_exited", **STALLED)], "FINISHED"),
        ([JournalEvent("attempt_started", 5.0, 1, {"pid": os.getpid(), "code_version": "1"})], "FINISHED"),
        ([], "FINISHED"),
        ([attempt(), READY], "KILLED"),
        ([attempt(), event("worker_ready", start_step=0, planned_steps=9, has_rank_zero=False)], "FINISHED"),
    ],
    ids=["another process's", "before this process", "trained before", "stopped on request", "another machine leads"],
)
def test_what_is_no_news_is_not_told(events: list[JournalEvent], status: Status) -> None:
    with served(200) as receiver:
        news = WebhookCallback(webhook(receiver), "abc")
        shifted = [one._replace(t=one.t if one.t == 5.0 else round(time.time(), 3)) for one in events]
        news.on_events(shifted)
        news.on_end(status)
    assert receiver.got == []
