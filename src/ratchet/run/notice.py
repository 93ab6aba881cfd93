"""Spot machines are taken away with a notice: a file that appears, or a metadata server's answer that changes.

Known answers (the clouds' documentation of their instance metadata):
    Google Compute Engine   .../computeMetadata/v1/instance/preempted: FALSE, then TRUE; wants `Metadata-Flavor: Google`
    Amazon EC2              .../latest/meta-data/spot/instance-action: 404, then JSON; IMDSv2 wants a session token,
                            which is asked for with PUT .../latest/api/token after a 401
"""

import threading
from pathlib import Path
from urllib.parse import urlsplit

POLL_S = 2.0
TIMEOUT_S = 1.0
LONGEST_ANSWER_BYTES = 4096
_TOKEN = "X-aws-ec2-metadata-token"  # noqa: S105 (the name of a header)


class Notice(threading.Thread):
    """Asks until there is a notice. Whoever wants to know reads `text` and `complaint`.

    Args:
        where: `machine.preemption_notice`.
        poll_s: between two questions, in seconds.
    """

    def __init__(self, where: str, poll_s: float = POLL_S) -> None:
        super().__init__(name="preemption-notice", daemon=True)
        self.where = where
        self.text = ""
        """What was found; empty while there is no notice."""
        self.errors = 0
        """Questions without an answer."""
        self.complaint = ""
        """What went wrong the first time: an error is no notice, but somebody should know."""
        self._poll_s = poll_s
        self._over = threading.Event()
        self._headers = {"Metadata-Flavor": "Google"}

    def run(self) -> None:
        while not self._over.is_set():
            try:
                self.text = self._ask()
            except (OSError, ValueError) as error:  # URLError, time-outs and refusals are OSErrors
                self.errors += 1
                self.complaint = self.complaint or (
                    f"machine.preemption_notice {self.where}: no answer ({_cause(error)}); "
                    "asked again every 2 s, and training goes on"
                )
            if self.text:
                return
            self._over.wait(self._poll_s)

    def stop(self) -> None:
        """Ask no more."""
        self._over.set()

    def _ask(self) -> str:
        if urlsplit(self.where).scheme in ("http", "https"):
            answer = self._answer()
            if answer is None or answer.upper() == "FALSE":
                return ""
            return f"{self.where} answered {answer[:100]!r}: this machine is about to be taken away"
        try:
            Path(self.where).stat()
        except (FileNotFoundError, NotADirectoryError):
            return ""
        return f"{self.where} is there: this machine is about to be taken away (remove the file if it is an old one)"

    def _answer(self) -> str | None:
        """The body of an answer 200, which may be empty; None for 404. Raises OSError for every other."""
        from urllib.error import HTTPError

        try:
            return self._request(self.where, "GET", self._headers)
        except HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            if error.code != 401 or _TOKEN in self._headers:
                self._headers.pop(_TOKEN, None)  # it may have expired: the next question asks for a new one
                raise
        parts = urlsplit(self.where)
        self._headers[_TOKEN] = self._request(
            f"{parts.scheme}://{parts.netloc}/latest/api/token", "PUT", {f"{_TOKEN}-ttl-seconds": "21600"}
        )
        return None  # asked with the token the next time

    def _request(self, url: str, method: str, headers: dict[str, str]) -> str:
        from urllib.request import ProxyHandler, Request, build_opener  # not for workers, who import this room too

        opener = build_opener(ProxyHandler({}))  # metadata servers are on the machine itself, behind no proxy
        with opener.open(Request(url, method=method, headers=headers), timeout=TIMEOUT_S) as reply:  # noqa: S310 (http, see _ask)
            content: bytes = reply.read(LONGEST_ANSWER_BYTES)
        return content.decode(errors="replace").strip()


def _cause(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
