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
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from ratchet.http_client import describe_error

if TYPE_CHECKING:
    import httpx2

AUTO = "auto"
POLL_S = 2.0

LINK_LOCAL = "http://169.254.169.254"
"""Metadata server of all three clouds. It is an address and not a host name, because a resolver may need a long time to
fail for a host name."""

TIMEOUT_S = 1.0
FIRST_EVENT_TIMEOUT_S = 10.0
"""Timeout for Azure's list of events, which Azure sets up at the first request."""
FIND_TIMEOUT_S = 2.0

_GOOGLE = {"Metadata-Flavor": "Google"}
_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 (the name of a header)
_TOKEN_LIFE_S = 21600


class MetadataSession:
    """Requests to a metadata server, without a proxy. The server may require a session token as EC2 does."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        self.address = address
        self._headers = dict(headers or {})

    def get(self, path: str = "", timeout_s: float = TIMEOUT_S) -> "httpx2.Response | None":
        """Return the response of status 200 to a path; None for status 404. Raises OSError for another status, and
        if there is no answer within the timeout (for connecting, and between two bytes)."""
        response = self._send("GET", f"{self.address}{path}", self._headers, timeout_s)
        if response.status_code == 401 and self.renew_token():
            response = self._send("GET", f"{self.address}{path}", self._headers, timeout_s)
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise ConnectionError(f"HTTP {response.status_code}")
        return response

    def get_text(self, path: str = "") -> str | None:
        """Return the text of `get` without surrounding white space, which may be empty; None for 404."""
        response = self.get(path)
        return None if response is None else response.text.strip()

    def get_object(self, path: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Return the JSON object of `get`; empty for 404 and for other content."""
        response = self.get(path, timeout_s)
        return {} if response is None else _parse_object(response.text)

    def renew_token(self) -> bool:
        """Request a session token. Return whether the server has given one."""
        parts = urlsplit(self.address)
        url = f"{parts.scheme}://{parts.netloc}/latest/api/token"
        response = self._send("PUT", url, {f"{_TOKEN}-ttl-seconds": str(_TOKEN_LIFE_S)}, TIMEOUT_S)
        token = response.text.strip() if response.status_code == 200 else ""
        self._headers[_TOKEN] = token
        return bool(token)

    def _send(self, method: str, url: str, headers: Mapping[str, str], timeout_s: float) -> "httpx2.Response":
        import httpx2  # imported late, because most runs ask no server

        try:
            # Loading certificates would take most of the time of a request by http.
            verify = ssl.create_default_context() if url.startswith("https") else False
            with httpx2.Client(trust_env=False, verify=verify, timeout=timeout_s) as client:
                return client.request(method, url, headers=headers)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ConnectionError(describe_error(error)) from None


class PreemptionPoll(NamedTuple):
    """Result of a poll."""

    notice: str = ""
    """Why this machine is about to be preempted; empty if it is not."""
    remark: str = ""
    """Other information for a person, such as an increased risk of preemption."""


class PreemptionProvider(Protocol):
    """Metadata server of a cloud. Both methods raise OSError if the answer is missing or an error."""

    def is_current(self) -> bool:
        """Return whether this machine belongs to the cloud."""

    def poll(self) -> PreemptionPoll:
        """Ask the server once."""


class AwsPreemptionProvider:
    """EC2: the server answers 404 without a notice, and JSON with a notice."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._session = MetadataSession(address)

    def is_current(self) -> bool:
        return self._session.renew_token()

    def poll(self) -> PreemptionPoll:
        if (action := self._session.get_text("/latest/meta-data/spot/instance-action")) is not None:
            event = _parse_object(action)
            return PreemptionPoll(
                f"EC2 will {event.get('action', 'take back')} this spot instance at {event.get('time', '?')}"
            )
        if (advice := self._session.get_text("/latest/meta-data/events/recommendations/rebalance")) is not None:
            since = _parse_object(advice).get("noticeTime", "?")
            return PreemptionPoll(
                remark=f"EC2 reported at {since} that this spot instance has a higher risk of interruption"
            )
        return PreemptionPoll()


class GcpPreemptionProvider:
    """Google Compute Engine: a value on the server changes when there is a notice."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._session = MetadataSession(f"{address}/computeMetadata/v1/instance", _GOOGLE)

    def is_current(self) -> bool:
        response = self._session.get("/id")
        return response is not None and response.headers.get("Metadata-Flavor") == "Google"

    def poll(self) -> PreemptionPoll:
        if (self._session.get_text("/preempted") or "").upper() == "TRUE":
            return PreemptionPoll("Google Compute Engine has preempted this machine: it ends in 30 s")
        event = (self._session.get_text("/maintenance-event") or "").upper()
        if event.startswith("TERMINATE"):
            return PreemptionPoll(f"Google Compute Engine is about to stop this machine for maintenance ({event})")
        if event not in ("", "NONE"):
            return PreemptionPoll(remark=f"Google Compute Engine reports maintenance: {event[:100]}")
        return PreemptionPoll()


class AzurePreemptionProvider:
    """Azure: the server lists events, each with the machines that it applies to."""

    ENDS = ("Preempt", "Terminate")
    """Events that end the machine. Other events (Freeze, Reboot, Redeploy) do not, and are announced minutes ahead."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._session = MetadataSession(f"{address}/metadata", {"Metadata": "true"})
        self._name = ""

    def is_current(self) -> bool:
        machine = self._session.get_object("/instance/compute?api-version=2021-02-01&format=json")
        self._name = str(machine.get("name", ""))
        return bool(self._name)

    def poll(self) -> PreemptionPoll:
        if not self._name:
            self.is_current()
        answer = self._session.get_object("/scheduledevents?api-version=2020-07-01", FIRST_EVENT_TIMEOUT_S)
        poll = PreemptionPoll()
        for event in answer.get("Events") or []:
            if not isinstance(event, dict) or self._name not in (event.get("Resources") or []):
                continue
            kind, when = str(event.get("EventType")), event.get("NotBefore") or "now"
            if kind in self.ENDS:
                return PreemptionPoll(f"Azure will take away this machine: {kind}, not before {when}")
            poll = PreemptionPoll(remark=f"Azure reports an event for this machine: {kind[:100]}, not before {when}")
        return poll


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


def find_provider(
    clouds: Mapping[str, Callable[[], PreemptionProvider]], timeout_s: float = FIND_TIMEOUT_S
) -> tuple[str, PreemptionProvider] | None:
    """Find the cloud of this machine by asking all clouds at the same time; None if none identifies itself in time."""
    providers = {name: make() for name, make in clouds.items()}
    pool = ThreadPoolExecutor(len(providers), "cloud")
    answers = {pool.submit(provider.is_current): name for name, provider in providers.items()}
    try:
        for answer in as_completed(answers, timeout_s):
            with suppress(OSError):  # no answer, or the answer of another cloud
                if answer.result():
                    return answers[answer], providers[answers[answer]]
    except TimeoutError:
        pass
    finally:
        pool.shutdown(wait=False)
    return None


class PreemptionMonitor(threading.Thread):
    """Thread that polls a source until there is a notice. Read `notice` and `new_remarks`."""

    def __init__(
        self, where: str, poll_s: float = POLL_S, clouds: Mapping[str, Callable[[], PreemptionProvider]] = CLOUDS
    ) -> None:
        super().__init__(name="preemption-notice", daemon=True)
        self.where = where
        self.notice = ""
        self.errors = 0
        self.complaint = ""
        """The first error, for display; it does not stop the run."""
        self._remarks: deque[str] = deque()
        self._seen_remarks: set[str] = set()
        self._poll_s, self._clouds = poll_s, clouds
        self._session = MetadataSession(where, _GOOGLE)
        self._ended = threading.Event()

    def new_remarks(self) -> list[str]:
        """Return the remarks since the last call: the first error, and each remark of a cloud once."""
        return [self._remarks.popleft() for _ in range(len(self._remarks))]

    def run(self) -> None:
        poll = self._find_source()
        while poll is not None and not self._ended.is_set():
            try:
                result = poll()
            except OSError as error:
                self.errors += 1
                cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self._complain(f"no answer ({cause}); retrying every 2 s, training continues")
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
        return self._poll_url if urlsplit(self.where).scheme in ("http", "https") else self._poll_file

    def _poll_url(self) -> PreemptionPoll:
        """Ask a server that answers 404 or FALSE until there is a notice."""
        answer = self._session.get_text()
        if answer is None or answer.upper() == "FALSE":
            return PreemptionPoll()
        return PreemptionPoll(f"{self.where} answered {answer[:100]!r}: this machine is about to be preempted")

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
