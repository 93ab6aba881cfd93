"""What clouds tell their spot machines before they take them away, each in its own way.

Amazon EC2      "Spot Instance interruption notices", "EC2 instance rebalance recommendations", "Use the Instance
                Metadata Service" (Amazon EC2 User Guide). Two minutes before; IMDSv2 wants a session token.
Google Compute  "Spot VMs: preemption process" and "Query a VM's host maintenance event" (Compute Engine
                documentation). Thirty seconds before.
Azure           "Scheduled Events for Linux VMs" (Azure Virtual Machines documentation). Thirty seconds before; the
                first question of a machine's life may take minutes. An event is for the machines that it names.
"""

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from ratchet.run.metadata import LINK_LOCAL, ask, code_of

TIMEOUT_S = 1.0
FIRST_EVENT_TIMEOUT_S = 10.0
"""For Azure's list of events, which has to be set up when it is asked for the first time."""
FOUND_WITHIN_S = 2.0
"""How long `find` waits for a cloud to say that it is there."""
_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 (the name of a header)
_TOKEN_LIFE_S = 21600


class Sighting(NamedTuple):
    """What one question has found."""

    notice: str = ""
    """Why this machine is about to be taken away; empty: it is not."""
    remark: str = ""
    """What else a person should know, such as that it may happen soon."""


class Cloud(Protocol):
    """The metadata server of one cloud. Both questions raise OSError or ValueError when the answer is none."""

    def is_here(self) -> bool:
        """Whether this machine is one of that cloud's."""

    def look(self) -> Sighting:
        """Ask once."""


class Aws:
    """EC2: 404 while there is nothing, then JSON."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._address = address
        self._token = ""

    def is_here(self) -> bool:
        self._renew()
        return bool(self._token)

    def look(self) -> Sighting:
        action = self._ask("spot/instance-action")
        if action is not None:
            found = _fields(action)
            return Sighting(
                f"EC2 will {found.get('action', 'take back')} this spot instance at {found.get('time', '?')}"
            )
        if (advice := self._ask("events/recommendations/rebalance")) is not None:
            since = _fields(advice).get("noticeTime", "?")
            return Sighting(
                remark=f"EC2 has told at {since} that this spot instance is at a higher risk to be taken back"
            )
        return Sighting()

    def _ask(self, path: str) -> str | None:
        """The answer below latest/meta-data. A token that has expired is replaced once."""
        if not self._token:
            self._renew()
        url = f"{self._address}/latest/meta-data/{path}"
        try:
            answer = ask(url, {_TOKEN: self._token}, TIMEOUT_S)
        except OSError as error:
            if code_of(error) != 401:
                raise
            self._renew()
            answer = ask(url, {_TOKEN: self._token}, TIMEOUT_S)
        return None if answer is None else answer.text

    def _renew(self) -> None:
        lifetime = {f"{_TOKEN}-ttl-seconds": str(_TOKEN_LIFE_S)}
        answer = ask(f"{self._address}/latest/api/token", lifetime, TIMEOUT_S, "PUT")
        self._token = answer.text if answer else ""


class Gcp:
    """Google: a word that changes."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._instance = f"{address}/computeMetadata/v1/instance"

    def is_here(self) -> bool:
        answer = ask(f"{self._instance}/id", {"Metadata-Flavor": "Google"}, TIMEOUT_S)
        return answer is not None and answer.headers.get("metadata-flavor") == "Google"

    def look(self) -> Sighting:
        if self._word("preempted").upper() == "TRUE":
            return Sighting("Google Compute Engine has preempted this machine: it ends in 30 s")
        event = self._word("maintenance-event").upper()
        if event.startswith("TERMINATE"):
            return Sighting(f"Google Compute Engine is about to stop this machine for maintenance ({event})")
        if event not in ("", "NONE"):
            return Sighting(remark=f"Google Compute Engine has told of maintenance: {event[:100]}")
        return Sighting()

    def _word(self, name: str) -> str:
        answer = ask(f"{self._instance}/{name}", {"Metadata-Flavor": "Google"}, TIMEOUT_S)
        return answer.text if answer else ""


class Azure:
    """Azure: a list of events, each with the machines that it is about."""

    ENDS = ("Preempt", "Terminate")
    """Events after which the machine is gone. Others (Freeze, Reboot, Redeploy) leave it, and come minutes before."""

    def __init__(self, address: str = LINK_LOCAL) -> None:
        self._metadata = f"{address}/metadata"
        self._name = ""

    def is_here(self) -> bool:
        self._name = self._own_name()
        return bool(self._name)

    def look(self) -> Sighting:
        self._name = self._name or self._own_name()
        told = self._ask("scheduledevents?api-version=2020-07-01", FIRST_EVENT_TIMEOUT_S)
        sighting = Sighting()
        for event in told.get("Events") or []:
            if not isinstance(event, dict) or self._name not in (event.get("Resources") or []):
                continue
            kind, when = str(event.get("EventType")), event.get("NotBefore") or "now"
            if kind in self.ENDS:
                return Sighting(f"Azure will take away this machine: {kind}, not before {when}")
            sighting = Sighting(remark=f"Azure has told of an event for this machine: {kind[:100]}, not before {when}")
        return sighting

    def _own_name(self) -> str:
        return str(self._ask("instance/compute?api-version=2021-02-01&format=json", TIMEOUT_S).get("name", ""))

    def _ask(self, path: str, timeout_s: float) -> dict[str, Any]:
        answer = ask(f"{self._metadata}/{path}", {"Metadata": "true"}, timeout_s)
        return _fields(answer.text) if answer else {}


def _fields(text: str) -> dict[str, Any]:
    """A JSON object; empty if it is none, for a notice without words is a notice."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


CLOUDS: Mapping[str, Callable[[], Cloud]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
"""By the name that `machine.preemption_notice` gives them."""


def find(clouds: Mapping[str, Callable[[], Cloud]], within_s: float = FOUND_WITHIN_S) -> tuple[str, Cloud] | None:
    """The cloud that this machine is in: all are asked at once. None when none says so in time."""
    found: list[tuple[str, Cloud]] = []
    over = threading.Event()

    def ask_one(name: str, cloud: Cloud) -> None:
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
