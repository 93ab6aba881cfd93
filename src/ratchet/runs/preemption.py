"""One question to a metadata server: it is on the machine itself, behind no proxy, and answers at once or never."""

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

LONGEST_ANSWER_BYTES = 1 << 16
LINK_LOCAL = "http://169.254.169.254"
"""Where all three clouds have theirs. No name is used: resolvers can take long to say that there is none."""


class MetadataResponse(NamedTuple):
    """An answer 200."""

    text: str
    """The body without white space around it; may be empty."""
    headers: Mapping[str, str]
    """By name in small letters."""


def query_metadata(
    url: str, headers: Mapping[str, str], timeout_s: float, method: str = "GET"
) -> MetadataResponse | None:
    """What is at a URL; None for 404.

    Args:
        url: http or https.
        headers: of the request.
        timeout_s: for each wait: to connect, and between two bytes.
        method: `GET` or `PUT`.

    Raises:
        OSError: every other answer (urllib.error.HTTPError has its number), or none.
        ValueError: a URL that is none.
    """
    from urllib.error import HTTPError  # not for workers, who import this room too
    from urllib.request import ProxyHandler, Request, build_opener

    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(Request(url, method=method, headers=dict(headers)), timeout=timeout_s) as reply:  # noqa: S310 (http, by our callers)
            content: bytes = reply.read(LONGEST_ANSWER_BYTES)
            told = {name.lower(): value for name, value in reply.headers.items()}
    except HTTPError as error:
        error.close()
        if error.code == 404:
            return None
        raise
    return MetadataResponse(content.decode(errors="replace").strip(), told)


def get_http_status(error: OSError) -> int | None:
    """The number of the answer that an error is about; None when there was no answer."""
    code = getattr(error, "code", None)
    return code if isinstance(code, int) else None


# What clouds tell their spot machines before they take them away, each in its own way.
#
# Amazon EC2      "Spot Instance interruption notices", "EC2 instance rebalance recommendations", "Use the Instance
#                 Metadata Service" (Amazon EC2 User Guide). Two minutes before; IMDSv2 wants a session token.
# Google Compute  "Spot VMs: preemption process" and "Query a VM's host maintenance event" (Compute Engine
#                 documentation). Thirty seconds before.
# Azure           "Scheduled Events for Linux VMs" (Azure Virtual Machines documentation). Thirty seconds before; the
#                 first question of a machine's life may take minutes. An event is for the machines that it names.

TIMEOUT_S = 1.0
FIRST_EVENT_TIMEOUT_S = 10.0
"""For Azure's list of events, which has to be set up when it is asked for the first time."""
FOUND_WITHIN_S = 2.0
"""How long `find_provider` waits for a cloud to say that it is there."""
_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 (the name of a header)
_TOKEN_LIFE_S = 21600


class PreemptionPoll(NamedTuple):
    """What one question has found."""

    notice: str = ""
    """Why this machine is about to be taken away; empty: it is not."""
    remark: str = ""
    """What else a person should know, such as that it may happen soon."""


class PreemptionProvider(Protocol):
    """The metadata server of one cloud. Both questions raise OSError or ValueError when the answer is none."""

    def is_here(self) -> bool:
        """Whether this machine is one of that cloud's."""

    def look(self) -> PreemptionPoll:
        """Ask once."""


class AwsPreemptionProvider:
    """EC2: 404 while there is nothing, then JSON."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._address = address
        self._token = ""

    def is_here(self) -> bool:
        self._renew()
        return bool(self._token)

    def look(self) -> PreemptionPoll:
        action = self._ask("spot/instance-action")
        if action is not None:
            found = _parse_object(action)
            return PreemptionPoll(
                f"EC2 will {found.get('action', 'take back')} this spot instance at {found.get('time', '?')}"
            )
        if (advice := self._ask("events/recommendations/rebalance")) is not None:
            since = _parse_object(advice).get("noticeTime", "?")
            return PreemptionPoll(
                remark=f"EC2 has told at {since} that this spot instance is at a higher risk to be taken back"
            )
        return PreemptionPoll()

    def _ask(self, path: str) -> str | None:
        """The answer below latest/meta-data. A token that has expired is replaced once."""
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
    """Google: a word that changes."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._instance = f"{address}/computeMetadata/v1/instance"

    def is_here(self) -> bool:
        answer = query_metadata(f"{self._instance}/id", {"Metadata-Flavor": "Google"}, TIMEOUT_S)
        return answer is not None and answer.headers.get("metadata-flavor") == "Google"

    def look(self) -> PreemptionPoll:
        if self._word("preempted").upper() == "TRUE":
            return PreemptionPoll("Google Compute Engine has preempted this machine: it ends in 30 s")
        event = self._word("maintenance-event").upper()
        if event.startswith("TERMINATE"):
            return PreemptionPoll(f"Google Compute Engine is about to stop this machine for maintenance ({event})")
        if event not in ("", "NONE"):
            return PreemptionPoll(remark=f"Google Compute Engine has told of maintenance: {event[:100]}")
        return PreemptionPoll()

    def _word(self, name: str) -> str:
        answer = query_metadata(f"{self._instance}/{name}", {"Metadata-Flavor": "Google"}, TIMEOUT_S)
        return answer.text if answer else ""


class AzurePreemptionProvider:
    """Azure: a list of events, each with the machines that it is about."""

    ENDS = ("Preempt", "Terminate")
    """Events after which the machine is gone. Others (Freeze, Reboot, Redeploy) leave it, and come minutes before."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._metadata = f"{address}/metadata"
        self._name = ""

    def is_here(self) -> bool:
        self._name = self._own_name()
        return bool(self._name)

    def look(self) -> PreemptionPoll:
        self._name = self._name or self._own_name()
        told = self._ask("scheduledevents?api-version=2020-07-01", FIRST_EVENT_TIMEOUT_S)
        sighting = PreemptionPoll()
        for event in told.get("Events") or []:
            if not isinstance(event, dict) or self._name not in (event.get("Resources") or []):
                continue
            kind, when = str(event.get("EventType")), event.get("NotBefore") or "now"
            if kind in self.ENDS:
                return PreemptionPoll(f"Azure will take away this machine: {kind}, not before {when}")
            sighting = PreemptionPoll(
                remark=f"Azure has told of an event for this machine: {kind[:100]}, not before {when}"
            )
        return sighting

    def _own_name(self) -> str:
        return str(self._ask("instance/compute?api-version=2021-02-01&format=json", TIMEOUT_S).get("name", ""))

    def _ask(self, path: str, timeout_s: float) -> dict[str, Any]:
        answer = query_metadata(f"{self._metadata}/{path}", {"Metadata": "true"}, timeout_s)
        return _parse_object(answer.text) if answer else {}


def _parse_object(text: str) -> dict[str, Any]:
    """A JSON object; empty if it is none, for a notice without words is a notice."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


CLOUDS: Mapping[str, Callable[[], PreemptionProvider]] = {
    "aws": AwsPreemptionProvider,
    "gcp": GcpPreemptionProvider,
    "azure": AzurePreemptionProvider,
}
"""By the name that `machine.preemption_notice` gives them."""


def find_provider(
    clouds: Mapping[str, Callable[[], PreemptionProvider]], within_s: float = FOUND_WITHIN_S
) -> tuple[str, PreemptionProvider] | None:
    """The cloud that this machine is in: all are asked at once. None when none says so in time."""
    found: list[tuple[str, PreemptionProvider]] = []
    over = threading.Event()

    def ask_one(name: str, cloud: PreemptionProvider) -> None:
        try:
            if cloud.is_here():
                found.append((name, cloud))
                over.set()
        except (OSError, ValueError):
            pass  # no answer, or another cloud's: it is not this one

    def ask_all() -> None:
        for one in questions:
            one.join()
        over.set()

    questions = [
        threading.Thread(target=ask_one, args=(name, make()), name=f"cloud-{name}", daemon=True)
        for name, make in clouds.items()
    ]
    for one in questions:
        one.start()
    threading.Thread(target=ask_all, name="clouds", daemon=True).start()
    over.wait(within_s)
    return found[0] if found else None


# Spot machines are taken away with a notice: a file that appears, or a metadata server's answer that changes.
#
# Where it comes from is `machine.preemption_notice`: `auto`, the name of a cloud (clouds.py), a file or a URL.

AUTO = "auto"
POLL_S = 2.0


class PreemptionMonitor(threading.Thread):
    """Asks until there is a notice. Whoever wants to know reads `text` and `news`.

    Args:
        where: `machine.preemption_notice`.
        poll_s: between two questions, in seconds.
        clouds: those that are known, by name.
    """

    def __init__(
        self, where: str, poll_s: float = POLL_S, clouds: Mapping[str, Callable[[], PreemptionProvider]] = CLOUDS
    ) -> None:
        super().__init__(name="preemption-notice", daemon=True)
        self.where = where
        self.text = ""
        """What was found; empty while there is no notice."""
        self.errors = 0
        """Questions without an answer."""
        self.complaint = ""
        """What went wrong the first time: an error is no notice, but somebody should know."""
        self._remarks: deque[str] = deque()
        self._remarked: set[str] = set()
        self._poll_s, self._clouds = poll_s, clouds
        self._over = threading.Event()

    def news(self) -> list[str]:
        """What somebody should know and was not told yet: the first complaint, and each remark of a cloud once."""
        return [self._remarks.popleft() for _ in range(len(self._remarks))]

    def run(self) -> None:
        look = self._source()
        while look is not None and not self._over.is_set():
            try:
                sighting = look()
            except (OSError, ValueError) as error:  # URLError, time-outs and refusals are OSErrors
                self.errors += 1
                self._complain(f"no answer ({_describe_error(error)}); asked again every 2 s, and training goes on")
            else:
                self._remark(sighting.remark)
                self.text = sighting.notice
            if self.text:
                return
            self._over.wait(self._poll_s)

    def stop(self) -> None:
        """Ask no more."""
        self._over.set()

    def _source(self) -> Callable[[], PreemptionPoll] | None:
        """What to ask again and again; None when there is nobody to ask."""
        if self.where == AUTO:
            found = find_provider(self._clouds)
            if found is None:
                known = ", ".join(self._clouds)
                self._complain(
                    f"none of the clouds {known} answered: no notice will come from one, and training goes on"
                )
                return None
            self._remark(
                f"machine.preemption_notice auto: this machine is in the cloud {found[0]}, and asks it for notice"
            )
            return found[1].look
        if self.where in self._clouds:
            return self._clouds[self.where]().look
        return _NoticeServer(self.where).look if urlsplit(self.where).scheme in ("http", "https") else self._file

    def _file(self) -> PreemptionPoll:
        try:
            Path(self.where).stat()
        except (FileNotFoundError, NotADirectoryError):
            return PreemptionPoll()
        return PreemptionPoll(
            f"{self.where} is there: this machine is about to be taken away (remove the file if it is an old one)"
        )

    def _complain(self, text: str) -> None:
        if not self.complaint:
            self.complaint = f"machine.preemption_notice {self.where}: {text}"
            self._remark(self.complaint)

    def _remark(self, text: str) -> None:
        if text and text not in self._remarked:
            self._remarked.add(text)
            self._remarks.append(text)


class _NoticeServer:
    """A URL that answers 404 or FALSE, until it answers something else. It may want a session token as EC2's does."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._headers = {"Metadata-Flavor": "Google"}

    def look(self) -> PreemptionPoll:
        answer = self._answer()
        if answer is None or answer.upper() == "FALSE":
            return PreemptionPoll()
        return PreemptionPoll(f"{self._url} answered {answer[:100]!r}: this machine is about to be taken away")

    def _answer(self) -> str | None:
        """The body of an answer 200, which may be empty; None for 404. Raises OSError for every other."""
        try:
            answer = query_metadata(self._url, self._headers, TIMEOUT_S)
        except OSError as error:
            if get_http_status(error) != 401 or _TOKEN in self._headers:
                self._headers.pop(_TOKEN, None)  # it may have expired: the next question asks for a new one
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
        return None  # asked with the token the next time


def _describe_error(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
