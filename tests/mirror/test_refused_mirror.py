"""A mirror that only its user can mend, as `ratchet train` says it: one message, exit 2, nothing begun."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_project
from behind_proxy import Mirror
from faulty_proxy import Fault
from ratchet.cli import main
from ratchet.layout import Layout
from ratchet.run.directory import newest
from ratchet.run.journal import Reader
from s3_server import KEY_ID, SECRET, TOKEN

WRONG = {
    "InvalidAccessKeyId": "credentials are missing, wrong, expired",
    "ExpiredToken": "credentials are missing, wrong, expired",
    "RequestTimeTooSkewed": "this machine's clock is off by more than the service accepts in signatures: set it (NTP)",
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return tiny_project.prepared(tmp_path_factory.mktemp("refused") / "project")


@pytest.fixture
def refused(template: Layout, tmp_path: Path, calm: None, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """What `ratchet train` prints with a mirror that it refuses."""

    def train(url: str) -> str:
        layout, settings = Layout(tmp_path / "project"), tiny_project.SETTINGS
        shutil.copytree(template.root, layout.root)
        machine = settings.machine.model_copy(update={"mirror": url})
        tiny_project.save(layout, settings.model_copy(update={"machine": machine}))
        code = main(["--project", str(layout.root), "train"])
        said = "".join(capsys.readouterr())
        assert code == 2, said
        assert "Traceback" not in said
        assert not [secret for secret in (KEY_ID, SECRET, TOKEN) if secret in said]
        run = newest(layout.runs)
        assert run is None or not [event for event in Reader(run.journal).read() if event.kind == "attempt"]
        assert not layout.train.exists()
        return said

    return train


@pytest.mark.parametrize("code", WRONG)
def test_credentials_and_clock_are_named_before_anything_is_trained(
    refused: Callable[[str], str], mirror: Mirror, code: str
) -> None:
    mirror.proxy.inject(Fault("status", None, status=403, code=code))
    said = refused(mirror.url)
    assert f"ratchet train: machine.mirror {mirror.url}: cannot " in said
    assert code in said and WRONG[code] in said


def test_a_bucket_that_is_not_there_is_named_before_anything_is_trained(
    refused: Callable[[str], str], tmp_path: Path, mirror: Mirror
) -> None:
    said = refused("s3://another-bucket/mirror")
    assert "machine.mirror s3://another-bucket/mirror: cannot " in said
    assert "NoSuchBucket" in said and "there is no such bucket" in said
    status = tiny_project.ratchet(Layout(tmp_path / "project"), "status").stdout
    assert "not running; the last start was refused: machine.mirror s3://another-bucket/mirror: cannot " in status


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("/proc/mirror", "machine.mirror /proc/mirror: cannot write there: "),
        ("nonsense://x", "machine.mirror nonsense://x: Protocol not known: nonsense"),
        ("memory://x", "memory: is no place for a mirror"),
    ],
)
def test_a_place_that_can_be_no_mirror_is_one_message(refused: Callable[[str], str], url: str, says: str) -> None:
    said = refused(url)
    assert says in said.splitlines()[-1]


def test_who_only_asks_without_credentials_is_told_at_once(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    assert main(["status", "--mirror", mirror.url]) == 2
    assert "credentials are missing" in capsys.readouterr().err


def test_who_only_asks_is_told_at_once(template: Layout, mirror: Mirror, capsys: pytest.CaptureFixture[str]) -> None:
    here = ["--project", str(template.root)]
    for verb in (["status"], ["reset", "0123", "--yes"]):
        assert main([*here, *verb, "--mirror", "s3://another-bucket/mirror"]) == 2
        assert "there is no such bucket" in capsys.readouterr().err
    mirror.proxy.inject(Fault("status", None, status=403, code="ExpiredToken"))
    assert main([*here, "status", "--mirror", mirror.url]) == 2
    assert WRONG["ExpiredToken"] in capsys.readouterr().err
