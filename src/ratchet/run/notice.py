"""Spot machines are taken away with a notice: a file that appears, or a metadata server's answer that changes.

Where it comes from is `machine.preemption_notice`: `auto`, the name of a cloud (clouds.py), a file or a URL.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from ratchet.run.clouds import CLOUDS, Cloud, Sighting, find
from ratchet.run.metadata import ask, code_of

AUTO = "auto"
POLL_S = 2.0
TIMEOUT_S = 1.0
_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 (the name of a header)


class Notice(threading.Thread):
    """Asks until there is a notice. Whoever wants to know reads `text` and `news`.

    Args:
        where: `machine.preemption_notice`.
        poll_s: between two questions, in seconds.
        clouds: those that are known, by name.
    """

    def __init__(self, where: str, poll_s: float = POLL_S, clouds: Mapping[str, Callable[[], Cloud]] = CLOUDS) -> None:
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
                self._complain(f"no answer ({_cause(error)}); asked again every 2 s, and training goes on")
            else:
                self._remark(sighting.remark)
                self.text = sighting.notice
            if self.text:
                return
            self._over.wait(self._poll_s)

    def stop(self) -> None:
        """Ask no more."""
        self._over.set()

    def _source(self) -> Callable[[], Sighting] | None:
        """What to ask again and again; None when there is nobody to ask."""
        if self.where == AUTO:
            found = find(self._clouds)
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
        return _Server(self.where).look if urlsplit(self.where).scheme in ("http", "https") else self._file

    def _file(self) -> Sighting:
        try:
            Path(self.where).stat()
        except (FileNotFoundError, NotADirectoryError):
            return Sighting()
        return Sighting(
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


class _Server:
    """A URL that answers 404 or FALSE, until it answers something else. It may want a session token as EC2's does."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._headers = {"Metadata-Flavor": "Google"}

    def look(self) -> Sighting:
        answer = self._answer()
        if answer is None or answer.upper() == "FALSE":
            return Sighting()
        return Sighting(f"{self._url} answered {answer[:100]!r}: this machine is about to be taken away")

    def _answer(self) -> str | None:
        """The body of an answer 200, which may be empty; None for 404. Raises OSError for every other."""
        try:
            answer = ask(self._url, self._headers, TIMEOUT_S)
        except OSError as error:
            if code_of(error) != 401 or _TOKEN in self._headers:
                self._headers.pop(_TOKEN, None)  # it may have expired: the next question asks for a new one
                raise
        else:
            return None if answer is None else answer.text
        parts = urlsplit(self._url)
        token = ask(
            f"{parts.scheme}://{parts.netloc}/latest/api/token", {f"{_TOKEN}-ttl-seconds": "21600"}, TIMEOUT_S, "PUT"
        )
        self._headers[_TOKEN] = token.text if token else ""
        return None  # asked with the token the next time


def _cause(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
