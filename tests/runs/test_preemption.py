"""Tests of preemption notices from a file or a metadata server. A failed request is not a notice."""

import socket
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

from metadata_server import MetadataServer, wait_until
from ratchet.runs.preemption import PreemptionMonitor


def wait_for(notice: PreemptionMonitor, name: str) -> str:
    wait_until(lambda: getattr(notice, name))
    return str(getattr(notice, name))


class Metadata(MetadataServer):
    """Metadata server that returns the answer set by the test."""

    def __init__(self) -> None:
        self.status, self.body, self.token = 404, "", ""
        self.asked: list[tuple[str, str, str | None]] = []
        super().__init__()
        self.url = f"{self.address}/latest/spot"

    def answer(self, method: str, path: str, headers: Message) -> tuple[int, str]:
        about = "X-aws-ec2-metadata-token-ttl-seconds" if method == "PUT" else "Metadata-Flavor"
        self.asked.append((method, path, headers.get(about)))
        if method == "PUT":
            return 200, self.token
        if self.token and headers.get("X-aws-ec2-metadata-token") != self.token:
            return 401, ""
        return self.status, self.body

    def questions(self, more: int) -> None:
        """Wait until the server has received `more` further requests."""
        goal = len(self.asked) + more
        wait_until(lambda: len(self.asked) >= goal)


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    server = Metadata()
    yield server
    server.close()


@pytest.fixture
def begun() -> Iterator[list[PreemptionMonitor]]:
    notices: list[PreemptionMonitor] = []
    yield notices
    for notice in notices:
        notice.stop()
        notice.join()


def begin(begun: list[PreemptionMonitor], where: str) -> PreemptionMonitor:
    notice = PreemptionMonitor(where, poll_s=0.02)
    begun.append(notice)
    notice.start()
    return notice


def test_a_file_is_a_notice_once_it_is_there(tmp_path: Path, begun: list[PreemptionMonitor]) -> None:
    notice = begin(begun, str(tmp_path / "gone" / "notice"))
    assert notice.notice == ""
    (tmp_path / "gone").mkdir()
    assert notice.notice == ""
    (tmp_path / "gone" / "notice").touch()
    assert wait_for(notice, "notice").startswith(f"{tmp_path / 'gone' / 'notice'} exists: this machine is about to")
    assert notice.errors == 0


def test_a_place_that_cannot_be_looked_at_is_an_error_and_no_notice(
    tmp_path: Path, begun: list[PreemptionMonitor]
) -> None:
    notice = begin(begun, str(tmp_path / ("x" * 300)))  # longer than a file name may be
    assert "no answer (OSError" in wait_for(notice, "complaint")
    assert notice.notice == ""


@pytest.mark.parametrize("quiet", [(404, "404 - Not Found"), (200, "FALSE"), (200, "false\n")])
@pytest.mark.parametrize("answer", ["TRUE", ""])
def test_a_server_gives_notice_when_its_answer_changes(
    metadata: Metadata, begun: list[PreemptionMonitor], quiet: tuple[int, str], answer: str
) -> None:
    metadata.status, metadata.body = quiet
    notice = begin(begun, metadata.url)
    metadata.questions(3)
    assert (notice.notice, notice.errors) == ("", 0)
    metadata.status, metadata.body = 200, answer
    assert f"{metadata.url} answered '{answer}'" in wait_for(notice, "notice")
    assert {(method, path, flavour) for method, path, flavour in metadata.asked} == {("GET", "/latest/spot", "Google")}


def test_a_proxy_of_the_environment_is_not_asked(
    metadata: Metadata, begun: list[PreemptionMonitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    metadata.status, metadata.body = 200, '{"action": "terminate"}'
    assert "terminate" in wait_for(begin(begun, metadata.url), "notice")


def test_a_server_that_wants_a_session_token_gets_it(metadata: Metadata, begun: list[PreemptionMonitor]) -> None:
    metadata.token = "first"  # noqa: S105
    notice = begin(begun, metadata.url)
    metadata.questions(4)
    assert notice.errors == 0
    metadata.token = "another"  # noqa: S105 (the old one has expired)
    metadata.questions(4)
    metadata.status, metadata.body = 200, '{"action": "stop"}'
    assert "stop" in wait_for(notice, "notice")
    assert ("PUT", "/latest/api/token", "21600") in metadata.asked


@pytest.mark.parametrize("status", [500, 503, 403])
def test_errors_are_no_notice_are_counted_and_told_once(
    metadata: Metadata, begun: list[PreemptionMonitor], status: int
) -> None:
    metadata.status = status
    notice = begin(begun, metadata.url)
    complaint = wait_for(notice, "complaint")
    assert str(status) in complaint
    metadata.questions(3)
    assert notice.errors >= 2
    assert notice.complaint == complaint
    assert notice.notice == ""
    metadata.status, metadata.body = 200, "TRUE"
    assert wait_for(notice, "notice")


def test_server_that_is_away_or_never_answers_is_an_error_and_no_notice(
    metadata: Metadata, begun: list[PreemptionMonitor]
) -> None:
    url = metadata.url
    metadata.server.socket.close()
    away = begin(begun, url)
    assert "training continues" in wait_for(away, "complaint")
    assert away.notice == ""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        notice = begin(begun, f"http://127.0.0.1:{silent.getsockname()[1]}/")
        assert "timed out" in wait_for(notice, "complaint")
    assert notice.notice == ""
