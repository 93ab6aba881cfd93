"""Tests of bucket, credentials and clock: problems are reported at the start, awaited later, and never printed."""

import io
import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from behind_proxy import FAULTS, ONCE, QUICK, Replica
from faulty_proxy import Fault, Request
from ratchet.errors import DamagedFileError, ReplicaError, SettingsError
from ratchet.runs.replication.store import ReplicaStore
from s3_server import KEY_ID, SECRET, TOKEN

WRONG = {
    "InvalidAccessKeyId": "credentials",
    "SignatureDoesNotMatch": "credentials",
    "ExpiredToken": "expired",
    "AccessDenied": "lack permission",
    "RequestTimeTooSkewed": "clock",
}


@pytest.mark.parametrize("code", WRONG)
def test_errors_that_only_the_user_can_correct_are_reported_at_the_start(replica: Replica, code: str) -> None:
    replica.proxy.inject(Fault("status", None, status=403, code=code))
    with pytest.raises(SettingsError, match=rf"machine.replica {replica.url}: .*{code}.*{WRONG[code]}"):
        replica.store().check()


def test_missing_bucket_network_and_credentials_have_different_messages_at_the_start(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match=r"NoSuchBucket.*the bucket, region or directory does not exist"):
        ReplicaStore("s3://another-bucket/replica", QUICK, lambda: False).check()
    replica.proxy.down = True
    with pytest.raises(ReplicaError):
        replica.store(ONCE).check()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(SettingsError, match=r"NoCredentials.*credentials are missing"):
        replica.store().check()


def test_a_service_without_conditional_writes_is_refused_at_the_start(replica: Replica) -> None:
    replica.store().check()
    replica.proxy.ignores_conditions = True
    with pytest.raises(SettingsError, match=rf"machine\.replica {replica.url}: the service ignores the conditions"):
        replica.store().check()


def test_credentials_that_expire_are_read_again(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    name, path, entry = replica.file(60_000)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAOLD")

    def old(request: Request) -> bool:
        return "AKIAOLD" in request.headers.get("authorization", "")

    replica.proxy.inject(Fault("status", None, old, status=403, code="ExpiredToken"))
    sending = threading.Thread(target=replica.store().send, args=(name, path, entry))
    sending.start()
    while replica.proxy.struck < 3 and sending.is_alive():
        sending.join(0.01)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANEW")
    sending.join(60)
    assert replica.holds(name) == entry[0]


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """Return the text of all log records, those of the storage libraries included."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    yield stream
    logging.getLogger().removeHandler(handler)


@pytest.mark.long
def test_credentials_are_in_no_message(replica: Replica, log: io.StringIO, capfd: pytest.CaptureFixture[str]) -> None:
    """Messages hide credentials even if the server returns them in its answer."""
    name, path, entry = replica.file(60_000)
    store, told = replica.store(ONCE), []
    calls: list[Callable[[], object]] = [
        store.check,
        lambda: store.send(name, path, entry),
        lambda: store.fetch(name, path.with_suffix(".back"), entry),
        lambda: store.list("objects"),
    ]

    def told_by(call: Callable[[], object]) -> None:
        try:
            call()
        except (ReplicaError, SettingsError, DamagedFileError) as error:
            told.extend([str(error), repr(error), repr(error.__cause__)])

    for call in calls:
        for make in (
            *FAULTS.values(),
            lambda: Fault("status", None, status=403, code=f"Odd {KEY_ID} {SECRET} {TOKEN}"),
        ):
            replica.proxy.inject(make())
            told_by(call)
            replica.proxy.heal()
        replica.proxy.down = True
        told_by(call)
        replica.proxy.heal()
    assert len(told) > 50
    out = capfd.readouterr()
    everything = "\n".join([*told, log.getvalue(), out.out, out.err])
    assert not [secret for secret in (KEY_ID, SECRET, TOKEN) if secret in everything]
