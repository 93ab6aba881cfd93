"""Messages to a webhook: against a real server on loopback that answers, fails, stalls, or is not there."""

import json
import os
import socket
import time
from typing import Any

import pytest

from ratchet.config import Machine, WebhookEvent
from ratchet.errors import SettingsError
from ratchet.run.journal import Event
from ratchet.run.observers import Status
from ratchet.services import webhook as module
from ratchet.services.webhook import VARIABLE, RunNews, Webhook
from receiver import HANGS_UP, STALLS, Receiver, served

TOKEN = "T0PLANTED/B1/xyzzy"  # noqa: S105
ALL: tuple[WebhookEvent, ...] = ("finished", "failed", "stalled", "gated", "promoted")


def webhook(receiver: Receiver, wait_s: float = 10.0, events: tuple[WebhookEvent, ...] = ALL) -> Webhook:
    receiver.path = f"/services/{TOKEN}"
    return Webhook(receiver.url, events, wait_s, "shop")


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(body) for _, _, body in receiver.got]


def attempt(number: int = 1, **data: Any) -> Event:
    return Event("attempt", round(time.time(), 3), number, {"pid": os.getpid(), "code_version": "1"} | data)


def event(kind: str, number: int = 1, **data: Any) -> Event:
    return Event(kind, time.time(), number, data)


READY = event("ready", start_step=0, planned_steps=9, leads=True)
STALLED = {"exit_code": -9, "class": "stalled", "decision": "Retry", "text": "no sign of life for 5 s in phase step"}


def test_one_message_has_text_for_people_and_fields_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with served(200) as receiver:
        webhook(receiver).tell("failed", "run 1 has failed: <!channel> & more", run="1", step=4)
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
        ((404,), 1, "HTTP 404 Not Found; 1 try"),
        ((307,), 1, "redirects are not followed"),
    ],
    ids=["errors that pass", "hangs up", "refused", "redirected"],
)
def test_what_may_pass_is_tried_again_and_what_will_not_is_told(
    answers: tuple[int, ...], tries: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(*answers) as receiver:
        webhook(receiver, wait_s=60.0).tell("gated", "gate: HOLD")
    assert len(receiver.got) == tries
    error = capsys.readouterr().err
    assert said in error
    assert bool(said) == bool(error)
    assert TOKEN not in error


@pytest.mark.parametrize("answer", [STALLS, 500], ids=["stalls", "fails"])
def test_nobody_is_waited_for_beyond_the_bound(answer: int, capsys: pytest.CaptureFixture[str]) -> None:
    with served(answer) as receiver:
        began_s = time.monotonic()
        webhook(receiver, wait_s=1.5).tell("finished", "run 1 has finished")
        waited_s = time.monotonic() - began_s
        assert 1 <= len(receiver.got) <= module.TRIES
    assert waited_s < 60  # of a server that stalls until the test is over
    error = capsys.readouterr().err
    assert error.startswith("ratchet: webhook: nobody was told of `finished` (")
    assert TOKEN not in error


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    with served(200) as receiver:
        told = webhook(receiver, wait_s=1.0)
    told.tell("finished", "run 1 has finished")
    error = capsys.readouterr().err
    assert "ConnectionRefusedError" in error
    assert TOKEN not in error


def test_an_address_that_no_request_can_be_sent_to_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    Webhook(f"http://127.0.0.1:9/{TOKEN}\x7f", ALL, 5.0, "shop").tell("finished", "over")
    error = capsys.readouterr().err
    assert "no address that a request could be sent to; 1 try" in error
    assert TOKEN not in error


def test_events_that_are_not_wanted_are_not_told() -> None:
    with served(200) as receiver:
        told = webhook(receiver, events=("failed",))
        told.tell("finished", "over")
        told.tell("failed", "over")
    assert [body["event"] for body in bodies(receiver)] == ["failed"]


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (f"hooks.example.org/{TOKEN}", "is no address"),
        (f"http://hooks.example.org/{TOKEN}", "write https"),
        (f"https://me:{TOKEN}@example.org/", "has no host and port"),
        ("https://me:xyzzy@example.org/", "holds a name or password"),
    ],
    ids=["no scheme", "no encryption", "a password with slashes", "a password"],
)
def test_an_address_that_is_none_is_refused_and_not_repeated(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, address)
    with pytest.raises(SettingsError, match=message) as refused:
        Webhook.of_environment(Machine(), "shop")
    assert VARIABLE in str(refused.value)
    assert "xyzzy" not in str(refused.value)


def test_without_an_address_or_wanted_events_there_is_nobody_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Webhook.of_environment(Machine(), "shop") is None
    monkeypatch.setenv(VARIABLE, "")
    assert Webhook.of_environment(Machine(), "shop") is None
    monkeypatch.setenv(VARIABLE, "https://hooks.example.org/x")
    assert Webhook.of_environment(Machine(webhook_events=()), "shop") is None
    assert Webhook.of_environment(Machine(), "shop") is not None


def test_a_stall_and_the_end_of_a_run_are_told() -> None:
    with served(200) as receiver:
        news = RunNews(webhook(receiver), "abc")
        news.see([attempt(), READY])
        news.see([event("died", **STALLED)])
        news.see([attempt(2), READY, event("validation", 2, step=9, loss=1.25, improved=True, seconds=1.0)])
        news.finish("FINISHED")
    stalled, finished = bodies(receiver)
    assert stalled["text"] == (
        "shop: run abc stalled at step 0 of 9: no sign of life for 5 s in phase step; it is started again"
    )
    assert (stalled["event"], stalled["run"]) == ("stalled", "abc")
    assert finished["text"] == "shop: run abc has finished at step 0 of 9, validation loss 1.2500 at step 9"
    assert (finished["event"], finished["validation_loss"]) == ("finished", 1.25)


def test_a_failure_is_told_with_its_cause() -> None:
    with served(200) as receiver:
        news = RunNews(webhook(receiver), "abc")
        cause = {"exit_code": 1, "class": "diverged", "decision": "GiveUp", "text": "8 bad steps in a row"}
        news.see([attempt(), READY, event("died", **cause)])
        news.finish("FAILED")
    [body] = bodies(receiver)
    assert body["text"] == "shop: run abc has failed at step 0 of 9: attempt 1: diverged, 8 bad steps in a row"


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([attempt(pid=1), event("died", **STALLED)], "FINISHED"),
        ([Event("attempt", 5.0, 1, {"pid": os.getpid(), "code_version": "1"})], "FINISHED"),
        ([], "FINISHED"),
        ([attempt(), READY], "KILLED"),
        ([attempt(), event("ready", start_step=0, planned_steps=9, leads=False)], "FINISHED"),
    ],
    ids=["another process's", "before this process", "trained before", "stopped on request", "another machine leads"],
)
def test_what_is_no_news_is_not_told(events: list[Event], status: Status) -> None:
    with served(200) as receiver:
        news = RunNews(webhook(receiver), "abc")
        shifted = [one._replace(t=one.t if one.t == 5.0 else round(time.time(), 3)) for one in events]
        news.see(shifted)
        news.finish(status)
    assert receiver.got == []
