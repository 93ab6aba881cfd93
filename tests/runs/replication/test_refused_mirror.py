"""`ratchet train` with a mirror that only its user can correct: one message, exit 2, nothing begun."""

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_project
from behind_proxy import Mirror
from faulty_proxy import Fault
from ratchet.cli.command_line import main
from ratchet.runs.directory import find_newest_run
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout
from s3_server import KEY_ID, SECRET, TOKEN

WRONG = {
    "InvalidAccessKeyId": "credentials are missing, wrong, expired",
    "RequestTimeTooSkewed": "this machine's clock is off by more than the service accepts in signatures: set it (NTP)",
}


@pytest.fixture
def refused(tmp_path: Path, calm: None, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Output of `ratchet train` with a mirror that it refuses."""

    def train(url: str) -> str:
        settings = tiny_project.SETTINGS
        machine = settings.machine.model_copy(update={"mirror": url})
        layout = tiny_project.prepared(tmp_path / "project", settings.model_copy(update={"machine": machine}))
        code = main(["--project", str(layout.root), "train"])
        said = "".join(capsys.readouterr())
        assert code == 2, said
        assert "Traceback" not in said
        assert not [secret for secret in (KEY_ID, SECRET, TOKEN) if secret in said]
        run = find_newest_run(layout.runs)
        assert run is None or not [event for event in JournalReader(run.journal).read() if event.kind == "attempt"]
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
    status = tiny_project.ratchet(ProjectLayout(tmp_path / "project"), "status").stdout
    assert "not running; the last start was refused: machine.mirror s3://another-bucket/mirror: cannot " in status


def test_status_and_reset_name_a_refused_mirror(
    project: ProjectLayout, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--project", str(project.root)]
    for verb in (["status"], ["reset", "0123", "--yes"]):
        assert main([*here, *verb, "--mirror", "s3://another-bucket/mirror"]) == 2
        assert "there is no such bucket" in capsys.readouterr().err
    mirror.proxy.inject(Fault("status", None, status=403, code="ExpiredToken"))
    assert main([*here, "status", "--mirror", mirror.url]) == 2
    assert "credentials are missing, wrong, expired" in capsys.readouterr().err
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.chdir(project.root.parent)  # not in a project
    assert main(["status", "--mirror", mirror.url]) == 2
    assert "credentials are missing" in capsys.readouterr().err
