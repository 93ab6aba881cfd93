"""`ratchet train` refuses a replica that only the user can correct: one message, exit code 2, and no run."""

from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_project
from behind_proxy import Replica
from faulty_proxy import Fault
from ratchet.cli.main import main
from ratchet.runs.directory import find_newest_run
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout
from s3_server import KEY_ID, SECRET, TOKEN

WRONG = {
    "InvalidAccessKeyId": "credentials are missing, wrong, expired",
    "RequestTimeTooSkewed": "this machine's clock differs by more than the service accepts: set it (NTP)",
}


@pytest.fixture
def refused(tmp_path: Path, calm: None, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Return a function that runs `ratchet train` with this replica, checks that it is refused, and returns the
    output."""

    def train(url: str) -> str:
        settings = tiny_project.SETTINGS
        machine = settings.machine.model_copy(update={"replica": url})
        layout = tiny_project.prepared(tmp_path / "project", settings.model_copy(update={"machine": machine}))
        code = main(["--project", str(layout.root), "train"])
        said = "".join(capsys.readouterr())
        assert code == 2, said
        assert "Traceback" not in said
        assert not [secret for secret in (KEY_ID, SECRET, TOKEN) if secret in said]
        run = find_newest_run(layout.runs)
        assert run is None or not [
            event for event in JournalReader(run.journal).read() if event.kind == "attempt_started"
        ]
        assert not layout.train.exists()
        return said

    return train


@pytest.mark.parametrize("code", WRONG)
def test_credentials_and_clock_are_named_before_anything_is_trained(
    refused: Callable[[str], str], replica: Replica, code: str
) -> None:
    replica.proxy.inject(Fault("status", None, status=403, code=code))
    said = refused(replica.url)
    assert f"ratchet train: machine.replica {replica.url}: cannot " in said
    assert code in said and WRONG[code] in said


def test_a_bucket_that_is_not_there_is_named_before_anything_is_trained(
    refused: Callable[[str], str], tmp_path: Path, replica: Replica
) -> None:
    said = refused("s3://another-bucket/replica")
    assert "machine.replica s3://another-bucket/replica: cannot " in said
    assert "NoSuchBucket" in said and "the bucket, region or directory does not exist" in said
    status = tiny_project.ratchet(ProjectLayout(tmp_path / "project"), "status").stdout
    assert "not running; the last start was refused: machine.replica s3://another-bucket/replica: cannot " in status


def test_a_bad_address_is_refused_by_every_command_before_there_is_a_run(
    project: ProjectLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    text = project.params.read_text()
    assert text.count("  replica: null\n") == 1
    project.params.write_text(text.replace("  replica: null\n", "  replica: s3:///no-bucket\n"))
    for verb in (["train"], ["sweep"], ["status", "--replica"], ["prepare"]):
        assert main(["--project", str(project.root), *verb]) == 2
        said = capsys.readouterr().err
        assert "machine.replica: found 's3:///no-bucket'; expected s3://BUCKET/FOLDER" in said
        assert said.startswith(f"ratchet {verb[0]}: params.yaml:"), said
    assert not project.runs.exists()


def test_status_and_reset_name_a_refused_replica(
    project: ProjectLayout, replica: Replica, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--project", str(project.root)]
    for verb in (["status"], ["reset", "0123", "--yes"]):
        assert main([*here, *verb, "--replica", "s3://another-bucket/replica"]) == 2
        assert "the bucket, region or directory does not exist" in capsys.readouterr().err
    replica.proxy.inject(Fault("status", None, status=403, code="ExpiredToken"))
    assert main([*here, "status", "--replica", replica.url]) == 2
    assert "credentials are missing, wrong, expired" in capsys.readouterr().err
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    monkeypatch.chdir(project.root.parent)  # the current directory is not in a project
    assert main(["status", "--replica", replica.url]) == 2
    assert "credentials are missing" in capsys.readouterr().err
