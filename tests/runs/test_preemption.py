"""Tests of preemption notices from a file, a URL and the clouds, with a local server that answers as their
documentation describes. A failed request is not a notice."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from email.message import Message
from pathlib import Path

import pytest

from metadata_server import PATIENCE_S, MetadataServer, wait_until
from ratchet.runs.preemption import (
    AwsPreemptionProvider,
    AzurePreemptionProvider,
    GcpPreemptionProvider,
    PreemptionMonitor,
    PreemptionPoll,
    PreemptionProvider,
    find_provider,
)

INSTANCE = "/computeMetadata/v1/instance"
META = "/latest/meta-data"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
COMPUTE = "/metadata/instance/compute?api-version=2021-02-01&format=json"


class Metadata(MetadataServer):
    """Metadata server that returns `pages` to requests with the required header."""

    def __init__(self, wanted: tuple[str, str] = ("", ""), flavour: str = "") -> None:
        self.pages: dict[str, str | int] = {}
        """Text or status by path."""
        self.wanted, self.flavour = wanted, flavour
        self.tokens = 0
        """Number of session tokens issued. If `wanted` names no token, none is issued."""
        self.valid_tokens: set[str] = set()
        self.asked: list[tuple[str, str, str | None]] = []
        """Method, path and Metadata-Flavor of each request."""
        self.silent = threading.Event()
        self.silent.set()
        super().__init__()

    def answer(self, method: str, path: str, headers: Message) -> tuple[int, str]:
        self.silent.wait(PATIENCE_S)
        self.asked.append((method, path, headers.get("Metadata-Flavor")))
        if method == "PUT":
            if path != "/latest/api/token" or "ec2" not in self.wanted[0]:
                return 405, ""
            has_lifetime = headers.get("X-aws-ec2-metadata-token-ttl-seconds") == "21600"
            return (200, self.issue_token()) if has_lifetime else (400, "")
        name, value = self.wanted
        if "ec2" in name and headers.get(name) not in self.valid_tokens:
            return 401, ""
        if name and "ec2" not in name and headers.get(name) != value:
            return 400, ""
        page = self.pages.get(path, 404)
        return (page, "") if isinstance(page, int) else (200, page)

    def issue_token(self) -> str:
        """Issue a session token. Earlier tokens stay valid, as on EC2."""
        self.tokens += 1
        self.valid_tokens.add(f"token-{self.tokens}")
        return f"token-{self.tokens}"

    def expire_tokens(self) -> None:
        """Make all session tokens invalid."""
        self.valid_tokens.clear()

    def wait_for_questions(self, more: int) -> None:
        """Wait until the server has received `more` further requests."""
        goal = len(self.asked) + more
        wait_until(lambda: len(self.asked) >= goal)

    def close(self) -> None:
        self.silent.set()
        super().close()


@pytest.fixture
def aws() -> Iterator[Metadata]:
    server = Metadata(("X-aws-ec2-metadata-token", "none yet"))
    yield server
    server.close()


@pytest.fixture
def gcp() -> Iterator[Metadata]:
    server = Metadata(("Metadata-Flavor", "Google"), flavour="Google")
    server.pages = {
        f"{INSTANCE}/id": "123", f"{INSTANCE}/preempted": "FALSE", f"{INSTANCE}/maintenance-event": "NONE",
    }  # fmt: skip
    yield server
    server.close()


@pytest.fixture
def azure() -> Iterator[Metadata]:
    server = Metadata(("Metadata", "true"))
    server.pages = {COMPUTE: json.dumps({"name": "trainer_0"}), EVENTS: events()}
    yield server
    server.close()


def events(*kinds: str, resource: str = "trainer_0") -> str:
    """Return Azure's list of scheduled events, with one event of each kind."""
    listed = [
        {
            "EventId": f"{number}", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": [resource],
            "EventStatus": "Scheduled", "NotBefore": "Mon, 19 Sep 2022 18:29:47 GMT", "EventSource": "Platform",
        }
        for number, kind in enumerate(kinds)
    ]  # fmt: skip
    return json.dumps({"DocumentIncarnation": 1, "Events": listed})


def test_ec2_gives_notice_of_an_interruption_and_an_expired_session_is_renewed(aws: Metadata) -> None:
    cloud = AwsPreemptionProvider(aws.address)
    assert [cloud.poll(), cloud.poll()] == [PreemptionPoll()] * 2
    assert aws.tokens == 1
    aws.expire_tokens()
    aws.pages[f"{META}/spot/instance-action"] = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
    assert cloud.poll() == PreemptionPoll("EC2 will terminate this spot instance at 2017-09-18T08:22:00Z")
    assert aws.tokens == 2


@pytest.mark.parametrize("page", ["", "soon", "[]", '"stop"'])
def test_a_notice_of_ec2_without_sensible_words_is_a_notice(aws: Metadata, page: str) -> None:
    aws.pages[f"{META}/spot/instance-action"] = page
    assert "EC2 will take back this spot instance" in AwsPreemptionProvider(aws.address).poll().notice


REBALANCE = '{"noticeTime": "2020-10-27T08:22:00Z"}'


@pytest.mark.parametrize(
    ("cloud", "make", "path", "page", "words"),
    [
        ("aws", AwsPreemptionProvider, f"{META}/events/recommendations/rebalance", REBALANCE, "2020-10-27T08:22:00Z"),
        (
            "gcp",
            GcpPreemptionProvider,
            f"{INSTANCE}/maintenance-event",
            "MIGRATE_ON_HOST_MAINTENANCE",
            "MIGRATE_ON_HOST_MAINTENANCE",
        ),
        *[("azure", AzurePreemptionProvider, EVENTS, events(kind), kind) for kind in ("Freeze", "Reboot", "Redeploy")],
    ],
)
def test_event_that_leaves_the_machine_is_a_remark_and_not_a_notice(
    request: pytest.FixtureRequest,
    cloud: str,
    make: Callable[[str], PreemptionProvider],
    path: str,
    page: str,
    words: str,
) -> None:
    server = request.getfixturevalue(cloud)
    server.pages[path] = page
    sighting = make(server.address).poll()
    assert sighting.notice == ""
    assert words in sighting.remark


@pytest.mark.parametrize(
    ("page", "text", "words"),
    [
        ("preempted", "TRUE", "has preempted this machine"),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", "TERMINATE_ON_HOST_MAINTENANCE"),
    ],
)
def test_google_gives_notice(gcp: Metadata, page: str, text: str, words: str) -> None:
    cloud = GcpPreemptionProvider(gcp.address)
    assert cloud.poll() == PreemptionPoll()
    gcp.pages[f"{INSTANCE}/{page}"] = text
    assert words in cloud.poll().notice


@pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
def test_azure_gives_notice_to_the_machine_that_is_named(azure: Metadata, kind: str) -> None:
    cloud = AzurePreemptionProvider(azure.address)
    assert cloud.poll() == PreemptionPoll()
    azure.pages[EVENTS] = events(kind, resource="another")
    assert cloud.poll() == PreemptionPoll()
    azure.pages[EVENTS] = events("Freeze", kind)
    assert cloud.poll().notice == f"Azure will take away this machine: {kind}, not before Mon, 19 Sep 2022 18:29:47 GMT"


@pytest.mark.parametrize("page", ["", "{}", '{"Events": null}', '{"Events": ["Preempt"]}', "<html>"])
def test_a_list_of_azure_that_makes_no_sense_is_no_notice(azure: Metadata, page: str) -> None:
    azure.pages[EVENTS] = page
    assert AzurePreemptionProvider(azure.address).poll() == PreemptionPoll()


@pytest.fixture
def makers(
    aws: Metadata, gcp: Metadata, azure: Metadata
) -> Callable[[str], dict[str, Callable[[], PreemptionProvider]]]:
    """Return a function that gives the providers of all three clouds on a machine of one of them. All providers
    query the address of that cloud's server."""
    servers = {"aws": aws, "gcp": gcp, "azure": azure}

    def of(here: str) -> dict[str, Callable[[], PreemptionProvider]]:
        address = servers[here].address
        return {
            "aws": lambda: AwsPreemptionProvider(address),
            "gcp": lambda: GcpPreemptionProvider(address),
            "azure": lambda: AzurePreemptionProvider(address),
        }

    return of


@pytest.mark.parametrize("here", ["aws", "gcp", "azure"])
def test_auto_finds_the_cloud_that_answers(
    makers: Callable[[str], Mapping[str, Callable[[], PreemptionProvider]]], here: str
) -> None:
    found = find_provider(makers(here), timeout_s=PATIENCE_S)
    assert found is not None
    assert found[0] == here
    assert found[1].poll() == PreemptionPoll()


def begin(where: str, clouds: Mapping[str, Callable[[], PreemptionProvider]]) -> PreemptionMonitor:
    notice = PreemptionMonitor(where, poll_s=0.02, clouds=clouds)
    notice.start()
    return notice


def test_auto_asks_the_cloud_it_found_until_there_is_a_notice(
    azure: Metadata, makers: Callable[[str], Mapping[str, Callable[[], PreemptionProvider]]]
) -> None:
    notice = begin("auto", makers("azure"))
    told: list[str] = []
    wait_until(lambda: told.extend(notice.new_remarks()) or told)
    assert told == ["machine.preemption_notice auto: found the cloud azure; polling it for notices"]
    azure.pages[EVENTS] = events("Preempt")
    wait_until(lambda: notice.notice)
    assert "Preempt" in notice.notice
    notice.join()


def test_a_remark_is_told_once(aws: Metadata) -> None:
    aws.pages[f"{META}/events/recommendations/rebalance"] = "{}"
    notice = begin("aws", {"aws": lambda: AwsPreemptionProvider(aws.address)})
    told: list[str] = []
    wait_until(lambda: told.extend(notice.new_remarks()) or told)
    aws.pages[f"{META}/spot/instance-action"] = "{}"
    notice.join(PATIENCE_S)
    assert notice.notice
    assert told + notice.new_remarks() == [
        "EC2 reported at ? that this spot instance has a higher risk of interruption"
    ]


def test_outside_of_every_cloud_auto_says_so_once_and_asks_no_more(gcp: Metadata) -> None:
    gcp.silent.clear()  # a server that accepts connections but never answers
    address = gcp.address
    clouds: dict[str, Callable[[], PreemptionProvider]] = {
        "gcp": lambda: GcpPreemptionProvider(address),
        "aws": lambda: AwsPreemptionProvider("http://127.0.0.1:9"),
    }
    notice = begin("auto", clouds)
    notice.join(PATIENCE_S)
    assert notice.notice == ""
    (told,) = notice.new_remarks()
    assert told.startswith("machine.preemption_notice auto: no answer from the clouds gcp, aws")


def test_a_cloud_by_name_that_does_not_answer_is_told_once_and_asked_again(gcp: Metadata) -> None:
    gcp.wanted = ("Metadata-Flavor", "nobody's")
    notice = begin("gcp", {"gcp": lambda: GcpPreemptionProvider(gcp.address)})
    wait_until(lambda: notice.errors > 2)
    assert "training continues" in notice.complaint
    assert notice.new_remarks() == [notice.complaint]
    gcp.wanted = ("Metadata-Flavor", "Google")
    gcp.pages[f"{INSTANCE}/preempted"] = "TRUE"
    wait_until(lambda: notice.notice)
    notice.join()


# ------------------------------------------------------------------------------------------------- a file, or a URL

SPOT = "/latest/spot"


@pytest.fixture
def server() -> Iterator[Metadata]:
    made = Metadata()
    yield made
    made.close()


@pytest.fixture
def begun() -> Iterator[list[PreemptionMonitor]]:
    notices: list[PreemptionMonitor] = []
    yield notices
    for notice in notices:
        notice.stop()
        notice.join()


def begin_at(begun: list[PreemptionMonitor], where: str) -> PreemptionMonitor:
    begun.append(begin(where, {}))
    return begun[-1]


def wait_for(notice: PreemptionMonitor, name: str) -> str:
    wait_until(lambda: getattr(notice, name))
    return str(getattr(notice, name))


def test_a_file_is_a_notice_once_it_is_there(tmp_path: Path, begun: list[PreemptionMonitor]) -> None:
    notice = begin_at(begun, str(tmp_path / "gone" / "notice"))
    assert notice.notice == ""
    (tmp_path / "gone").mkdir()
    assert notice.notice == ""
    (tmp_path / "gone" / "notice").touch()
    assert wait_for(notice, "notice").startswith(f"{tmp_path / 'gone' / 'notice'} exists: this machine is about to")
    assert notice.errors == 0


def test_a_place_that_cannot_be_looked_at_is_an_error_and_no_notice(
    tmp_path: Path, begun: list[PreemptionMonitor]
) -> None:
    notice = begin_at(begun, str(tmp_path / ("x" * 300)))  # longer than a file name may be
    assert "no answer (OSError" in wait_for(notice, "complaint")
    assert notice.notice == ""


@pytest.mark.parametrize("quiet", [404, "FALSE", "false\n"])
@pytest.mark.parametrize("answer", ["TRUE", ""])
def test_a_server_gives_notice_when_its_answer_changes(
    server: Metadata, begun: list[PreemptionMonitor], quiet: int | str, answer: str
) -> None:
    server.pages[SPOT] = quiet
    notice = begin_at(begun, f"{server.address}{SPOT}")
    server.wait_for_questions(3)
    assert (notice.notice, notice.errors) == ("", 0)
    server.pages[SPOT] = answer
    assert f"{server.address}{SPOT} answered '{answer}'" in wait_for(notice, "notice")
    assert set(server.asked) == {("GET", "/latest/spot", "Google")}


def test_a_proxy_of_the_environment_is_not_asked(
    server: Metadata, begun: list[PreemptionMonitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server.pages[SPOT] = '{"action": "terminate"}'
    assert "terminate" in wait_for(begin_at(begun, f"{server.address}{SPOT}"), "notice")


def test_a_server_that_wants_a_session_token_gets_it(server: Metadata, begun: list[PreemptionMonitor]) -> None:
    server.wanted = ("X-aws-ec2-metadata-token", "none yet")
    notice = begin_at(begun, f"{server.address}{SPOT}")
    server.wait_for_questions(4)
    server.expire_tokens()  # the old one has expired
    server.wait_for_questions(4)
    assert notice.errors == 0
    server.pages[SPOT] = '{"action": "stop"}'
    assert "stop" in wait_for(notice, "notice")
    assert server.tokens == 2


@pytest.mark.parametrize("status", [500, 503, 403])
def test_errors_are_no_notice_are_counted_and_told_once(
    server: Metadata, begun: list[PreemptionMonitor], status: int
) -> None:
    server.pages[SPOT] = status
    notice = begin_at(begun, f"{server.address}{SPOT}")
    complaint = wait_for(notice, "complaint")
    assert str(status) in complaint
    server.wait_for_questions(3)
    assert notice.errors >= 2
    assert notice.complaint == complaint
    assert notice.notice == ""
    server.pages[SPOT] = "TRUE"
    assert wait_for(notice, "notice")


def test_server_that_is_away_or_never_answers_is_an_error_and_no_notice(
    server: Metadata, begun: list[PreemptionMonitor]
) -> None:
    url = f"{server.address}{SPOT}"
    server.server.socket.close()
    away = begin_at(begun, url)
    assert "training continues" in wait_for(away, "complaint")
    assert away.notice == ""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        notice = begin_at(begun, f"http://127.0.0.1:{silent.getsockname()[1]}/")
        assert "timed out" in wait_for(notice, "complaint")
    assert notice.notice == ""
