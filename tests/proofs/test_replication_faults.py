"""Proves row R13: data that is reported as durable is in the replica, under any fault of network and credentials."""

import hashlib
import json
import os
import random
from pathlib import Path

import pytest

import snapshots
from faulty_proxy import Fault, FaultyProxy, Request
from machines import NAMES, Node, settings, wait_until
from ratchet.config.machine import Machine
from ratchet.runs.replication import replicator
from s3_server import SECRET, TOKEN, S3Server
from snapshots import contents

PACKAGES = ("runs",)
SEED = int(os.environ.get("RATCHET_TEST_SEED", "11"))
SHARE = 0.12
"""Share of requests with a fault."""


def on_s3(root: Path, bucket: str) -> Machine:
    changes = {"replica": f"s3://{bucket}/runs of all", "lease_timeout_s": 30.0, "replica_timeout_s": 60.0}
    return settings(root).model_copy(update=changes)


def require_whole(server: S3Server, bucket: str, one: Node, step: int) -> None:
    """Check that the server itself has all files of this checkpoint, to the last byte."""
    there = {name.removeprefix("runs of all/"): data for name, data in server.files(bucket).items()}
    document = json.loads(there[NAMES.checkpoint(one.replicator._lease.token, step)])
    made = contents(one.paths.checkpoint(step))
    for name, entry in document["files"].items():
        assert hashlib.sha256(there[NAMES.object(entry["sha256"])]).hexdigest() == entry["sha256"] == made[name]


def bad_network(proxy: FaultyProxy) -> None:
    draw = random.Random(SEED)

    def strikes(request: Request) -> bool:
        return draw.random() < SHARE / 6

    def strikes_content(request: Request) -> bool:
        return "/objects/" in request.target and draw.random() < SHARE / 3

    proxy.inject(
        Fault("status", None, strikes, 500, "InternalError"),
        Fault("status", None, strikes, 503, "SlowDown"),
        Fault("reset", None, strikes, bytes=100),
        Fault("lost", None, strikes),
        Fault("truncate", None, strikes),
        Fault("flip-sent", None, strikes_content),
        Fault("flip-read", None, strikes_content),
    )


def test_what_is_told_to_be_durable_is_there_whatever_the_network_does(
    tmp_path: Path, s3: S3Server, proxy: FaultyProxy, capfd: pytest.CaptureFixture[str]
) -> None:
    bucket = s3.bucket()
    bad_network(proxy)
    told = ""
    for number in (1, 2, 3):
        one = Node(tmp_path, f"machine {number}", on_s3(tmp_path, bucket)).acquire()
        assert snapshots.newest(one.paths)[0] == (None if number == 1 else 4 * number - 4)
        for step in (4 * number - 2, 4 * number):
            one.save(step, best=2)
            one.wait_until_replicated()
            require_whole(s3, bucket, one, step)
        assert [event.data["step"] for event in one.events("checkpoint_saved")] == list(range(2, 4 * number + 1, 2))
        told += one.paths.journal.read_text() + one.paths.replication_state.read_text()
        one.close()
    assert proxy.struck > 10
    told += "".join(capfd.readouterr())
    assert SECRET not in told
    assert TOKEN not in told


def test_an_outage_loses_nothing_and_is_caught_up_with(
    tmp_path: Path, s3: S3Server, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicator, "RETRY_TIMEOUT_S", 0.5)
    bucket = s3.bucket()
    one = Node(tmp_path, "one", on_s3(tmp_path, bucket)).acquire()
    one.save(2)
    one.wait_until_replicated()
    proxy.down = True
    for step in (4, 6, 8):
        one.save(step)
    wait_until(lambda: one.texts("alert"))
    assert "step 8" in (one.replicator.wait_until_replicated(0.2) or "")
    assert one.replicator.lost_reason() is None
    proxy.heal()
    one.wait_until_replicated()
    require_whole(s3, bucket, one, 8)
    wait_until(lambda: any("reached again" in text for text in one.texts("alert")))
    one.close()


def test_credentials_that_expire_in_a_run_are_an_outage_and_none_when_they_are_renewed(
    tmp_path: Path, s3: S3Server, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicator, "RETRY_TIMEOUT_S", 0.5)
    bucket = s3.bucket()
    one = Node(tmp_path, "one", on_s3(tmp_path, bucket)).acquire()
    proxy.inject(Fault("status", None, status=403, code="ExpiredToken"))
    one.save(2)
    wait_until(lambda: one.texts("alert"))
    assert "credentials are missing, wrong, expired" in one.texts("alert")[0]
    proxy.heal()
    one.wait_until_replicated()
    require_whole(s3, bucket, one, 2)
    one.close()
