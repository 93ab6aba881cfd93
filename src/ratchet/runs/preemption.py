"""Preemption notices: a file that appears, or the metadata server of a cloud, which is polled every two seconds.

Documentation of the notices for spot machines:

Amazon EC2      "Spot Instance interruption notices", "EC2 instance rebalance recommendations", "Use the Instance
                Metadata Service" (Amazon EC2 User Guide). The notice comes two minutes ahead; IMDSv2 requires a session
                token.
Google Compute  "Spot VMs: preemption process" and "Query a VM's host maintenance event" (Compute Engine documentation).
                The notice comes thirty seconds ahead.
Azure           "Scheduled Events for Linux VMs" (Azure Virtual Machines documentation). The notice comes thirty seconds
                ahead; the first request of a machine may take minutes. An event applies to the machines that it names.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

AUTO = "auto"
POLL_S = 2.0

MAX_ANSWER_BYTES = 1 << 16
LINK_LOCAL = "http://169.254.169.254"
"""Metadata server of all three clouds. It is an address and not a host name, because a resolver may need a long time to
fail for a host name."""

TIMEOUT_S = 1.0
FIRST_EVENT_TIMEOUT_S = 10.0
"""Timeout for Azure's list of events, which Azure sets up at the first request."""
FIND_TIMEOUT_S = 2.0
"""Time that `find_provider` waits for a cloud to identify itself."""

_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 (the name of a header)
_TOKEN_LIFE_S = 21600


class MetadataResponse(NamedTuple):
    """Response of a metadata server with status 200."""

    text: str
    """Body without surrounding white space; may be empty."""
    headers: Mapping[str, str]
    """Headers by lower-case name."""


def query_metadata(
    url: str, headers: Mapping[str, str], timeout_s: float, method: str = "GET"
) -> MetadataResponse | None:
    """Query a metadata server, directly: proxy settings do not apply to it. Returns None for 404.

    Args:
        url: http or https.
        headers: headers of the request.
        timeout_s: timeout for connecting, and between two bytes.
        method: `GET` or `PUT`.

    Raises:
        OSError: the status is not 200 (urllib.error.HTTPError has its number), or there is no answer.
        ValueError: invalid URL.
    """
    from urllib.error import HTTPError  # imported late, because workers do not need it
    from urllib.request import ProxyHandler, Request, build_opener

    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(Request(url, method=method, headers=dict(headers)), timeout=timeout_s) as reply:  # noqa: S310 (http, by our callers)
            content: bytes = reply.read(MAX_ANSWER_BYTES)
            received = {name.lower(): value for name, value in reply.headers.items()}
    except HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise
    return MetadataResponse(content.decode(errors="replace").strip(), received)


def get_http_status(error: OSError) -> int | None:
    """Return the HTTP status of an error; None if there was no response."""
    code = getattr(error, "code", None)
    return code if isinstance(code, int) else None


class PreemptionPoll(NamedTuple):
    """Result of a poll."""

    notice: str = ""
    """Why this machine is about to be preempted; empty if it is not."""
    remark: str = ""
    """Other information for a person, such as an increased risk of preemption."""


class PreemptionProvider(Protocol):
    """Metadata server of a cloud. Both methods raise OSError or ValueError if the answer is invalid or missing."""

    def is_current(self) -> bool:
        """Return whether this machine belongs to the cloud."""

    def poll(self) -> PreemptionPoll:
        """Ask the server once."""


class AwsPreemptionProvider:
    """EC2: the server answers 404 without a notice, and JSON with a notice."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._address = address
        self._token = ""

    def is_current(self) -> bool:
        self._renew()
        return bool(self._token)

    def poll(self) -> PreemptionPoll:
        action = self._ask("spot/instance-action")
        if action is not None:
            event = _parse_object(action)
            return PreemptionPoll(
                f"EC2 will {event.get('action', 'take back')} this spot instance at {event.get('time', '?')}"
            )
        if (advice := self._ask("events/recommendations/rebalance")) is not None:
            since = _parse_object(advice).get("noticeTime", "?")
            return PreemptionPoll(
                remark=f"EC2 reported at {since} that this spot instance has a higher risk of interruption"
            )
        return PreemptionPoll()

    def _ask(self, path: str) -> str | None:
        """Get a path below latest/meta-data. An expired token is renewed once."""
        if not self._token:
            self._renew()
        url = f"{self._address}/latest/meta-data/{path}"
        try:
            answer = query_metadata(url, {_TOKEN: self._token}, TIMEOUT_S)
        except OSError as error:
            if get_http_status(error) != 401:
                raise
            self._renew()
            answer = query_metadata(url, {_TOKEN: self._token}, TIMEOUT_S)
        return None if answer is None else answer.text

    def _renew(self) -> None:
        lifetime = {f"{_TOKEN}-ttl-seconds": str(_TOKEN_LIFE_S)}
        answer = query_metadata(f"{self._address}/latest/api/token", lifetime, TIMEOUT_S, "PUT")
        self._token = answer.text if answer else ""


class GcpPreemptionProvider:
    """Google Compute Engine: a value on the server changes when there is a notice."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._instance = f"{address}/computeMetadata/v1/instance"

    def is_current(self) -> bool:
        answer = query_metadata(f"{self._instance}/id", {"Metadata-Flavor": "Google"}, TIMEOUT_S)
        return answer is not None and answer.headers.get("metadata-flavor") == "Google"

    def poll(self) -> PreemptionPoll:
        if self._get("preempted").upper() == "TRUE":
            return PreemptionPoll("Google Compute Engine has preempted this machine: it ends in 30 s")
        event = self._get("maintenance-event").upper()
        if event.startswith("TERMINATE"):
            return PreemptionPoll(f"Google Compute Engine is about to stop this machine for maintenance ({event})")
        if event not in ("", "NONE"):
            return PreemptionPoll(remark=f"Google Compute Engine reports maintenance: {event[:100]}")
        return PreemptionPoll()

    def _get(self, name: str) -> str:
        answer = query_metadata(f"{self._instance}/{name}", {"Metadata-Flavor": "Google"}, TIMEOUT_S)
        return answer.text if answer else ""


class AzurePreemptionProvider:
    """Azure: the server lists events, each with the machines that it applies to."""

    ENDS = ("Preempt", "Terminate")
    """Events that end the machine. Other events (Freeze, Reboot, Redeploy) do not, and are announced minutes ahead."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._metadata = f"{address}/metadata"
        self._name = ""

    def is_current(self) -> bool:
        self._name = self._machine_name()
        return bool(self._name)

    def poll(self) -> PreemptionPoll:
        self._name = self._name or self._machine_name()
        answer = self._ask("scheduledevents?api-version=2020-07-01", FIRST_EVENT_TIMEOUT_S)
        poll = PreemptionPoll()
        for event in answer.get("Events") or []:
            if not isinstance(event, dict) or self._name not in (event.get("Resources") or []):
                continue
            kind, when = str(event.get("EventType")), event.get("NotBefore") or "now"
            if kind in self.ENDS:
                return PreemptionPoll(f"Azure will take away this machine: {kind}, not before {when}")
            poll = PreemptionPoll(remark=f"Azure reports an event for this machine: {kind[:100]}, not before {when}")
        return poll

    def _machine_name(self) -> str:
        return str(self._ask("instance/compute?api-version=2021-02-01&format=json", TIMEOUT_S).get("name", ""))

    def _ask(self, path: str, timeout_s: float) -> dict[str, Any]:
        answer = query_metadata(f"{self._metadata}/{path}", {"Metadata": "true"}, timeout_s)
        return _parse_object(answer.text) if answer else {}


def _parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Return an empty dictionary for other text, because a notice without details is still a
    notice."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


CLOUDS: Mapping[str, Callable[[], PreemptionProvider]] = {
    "aws": AwsPreemptionProvider,
    "gcp": GcpPreemptionProvider,
    "azure": AzurePreemptionProvider,
}
"""Providers by their names in `machine.preemption_notice`."""


def find_provider(
    clouds: Mapping[str, Callable[[], PreemptionProvider]], timeout_s: float = FIND_TIMEOUT_S
) -> tuple[str, PreemptionProvider] | None:
    """Find the cloud of this machine by asking all clouds at the same time; None if none identifies itself in time."""
    identified: list[tuple[str, PreemptionProvider]] = []
    done = threading.Event()

    def ask(name: str, cloud: PreemptionProvider) -> None:
        try:
            if cloud.is_current():
                identified.append((name, cloud))
                done.set()
        except (OSError, ValueError):
            pass  # no answer, or the answer of another cloud

    def wait_for_all() -> None:
        for thread in threads:
            thread.join()
        done.set()

    threads = [
        threading.Thread(target=ask, args=(name, make()), name=f"cloud-{name}", daemon=True)
        for name, make in clouds.items()
    ]
    for thread in threads:
        thread.start()
    threading.Thread(target=wait_for_all, name="clouds", daemon=True).start()
    done.wait(timeout_s)
    return identified[0] if identified else None


class PreemptionMonitor(threading.Thread):
    """Thread that polls a source until there is a notice. Read `notice` and `new_remarks`.

    Args:
        where: `machine.preemption_notice`: `auto`, the name of a cloud, a file or a URL.
        poll_s: interval in seconds.
        clouds: known clouds, by name.
    """

    def __init__(
        self, where: str, poll_s: float = POLL_S, clouds: Mapping[str, Callable[[], PreemptionProvider]] = CLOUDS
    ) -> None:
        super().__init__(name="preemption-notice", daemon=True)
        self.where = where
        self.notice = ""
        """Text of the notice; empty while there is none."""
        self.errors = 0
        """Number of failed requests."""
        self.complaint = ""
        """The first error, for display; it does not stop the run."""
        self._remarks: deque[str] = deque()
        self._seen_remarks: set[str] = set()
        self._poll_s, self._clouds = poll_s, clouds
        self._ended = threading.Event()

    def new_remarks(self) -> list[str]:
        """Return the remarks since the last call: the first error, and each remark of a cloud once."""
        return [self._remarks.popleft() for _ in range(len(self._remarks))]

    def run(self) -> None:
        poll = self._find_source()
        while poll is not None and not self._ended.is_set():
            try:
                result = poll()
            except (OSError, ValueError) as error:  # URLError, timeouts and refusals are OSErrors
                self.errors += 1
                self._complain(f"no answer ({_describe_error(error)}); retrying every 2 s, training continues")
            else:
                self._add_remark(result.remark)
                self.notice = result.notice
            if self.notice:
                return
            self._ended.wait(self._poll_s)

    def stop(self) -> None:
        """Stop polling."""
        self._ended.set()

    def _find_source(self) -> Callable[[], PreemptionPoll] | None:
        """Return the function to poll; None if there is no source."""
        if self.where == AUTO:
            identified = find_provider(self._clouds)
            if identified is None:
                names = ", ".join(self._clouds)
                self._complain(
                    f"no answer from the clouds {names}: there will be no preemption notice, training continues"
                )
                return None
            self._add_remark(f"machine.preemption_notice auto: found the cloud {identified[0]}; polling it for notices")
            return identified[1].poll
        if self.where in self._clouds:
            return self._clouds[self.where]().poll
        return _NoticeServer(self.where).poll if urlsplit(self.where).scheme in ("http", "https") else self._poll_file

    def _poll_file(self) -> PreemptionPoll:
        try:
            Path(self.where).stat()
        except (FileNotFoundError, NotADirectoryError):
            return PreemptionPoll()
        return PreemptionPoll(
            f"{self.where} exists: this machine is about to be preempted (remove the file if it is an old one)"
        )

    def _complain(self, text: str) -> None:
        if not self.complaint:
            self.complaint = f"machine.preemption_notice {self.where}: {text}"
            self._add_remark(self.complaint)

    def _add_remark(self, text: str) -> None:
        if text and text not in self._seen_remarks:
            self._seen_remarks.add(text)
            self._remarks.append(text)


class _NoticeServer:
    """Server at a URL that answers 404 or FALSE until there is a notice. It may require a session token, like EC2."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._headers = {"Metadata-Flavor": "Google"}

    def poll(self) -> PreemptionPoll:
        answer = self._answer()
        if answer is None or answer.upper() == "FALSE":
            return PreemptionPoll()
        return PreemptionPoll(f"{self._url} answered {answer[:100]!r}: this machine is about to be preempted")

    def _answer(self) -> str | None:
        """Return the body of a response 200, which may be empty; None for 404. Raises OSError for another status."""
        try:
            answer = query_metadata(self._url, self._headers, TIMEOUT_S)
        except OSError as error:
            if get_http_status(error) != 401 or _TOKEN in self._headers:
                self._headers.pop(_TOKEN, None)  # the token may have expired; the next request gets a new one
                raise
        else:
            return None if answer is None else answer.text
        parts = urlsplit(self._url)
        token = query_metadata(
            f"{parts.scheme}://{parts.netloc}/latest/api/token",
            {f"{_TOKEN}-ttl-seconds": str(_TOKEN_LIFE_S)},
            TIMEOUT_S,
            "PUT",
        )
        self._headers[_TOKEN] = token.text if token else ""
        return None  # the next request uses the token


def _describe_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
