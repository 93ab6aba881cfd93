"""Telling people that a run has ended or stalled, what the gate has decided, who is champion: one POST an event.

The address comes from the environment, for those of chat services hold a secret: it is in no file, and in no text that
is printed. The body is JSON, `text` for people beside fields for programs: chat services show the former.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet import http_client
from ratchet.config.schema import Machine, WebhookEvent
from ratchet.errors import SettingsError
from ratchet.runs.callbacks import Status
from ratchet.runs.journal import JournalEvent
from ratchet.runs.log import print_message
from ratchet.runs.status import RunProgress

VARIABLE = "RATCHET_WEBHOOK_URL"
TRIES = 4
TRY_S = 5.0
"""Longest wait for one answer."""
LONGEST_TEXT = 1000

Field = str | int | float | None


@dataclass(frozen=True)
class Webhook:
    """The address, and what it is to be told."""

    address: str
    events: tuple[WebhookEvent, ...]
    wait_s: float
    project: str
    """Its name."""

    @classmethod
    def of_environment(cls, machine: Machine, project: str) -> "Webhook | None":
        """What the environment and the settings say; None: nobody is to be told of anything.

        Raises:
            SettingsError: the variable holds no address that could be told.
        """
        address = os.environ.get(VARIABLE, "").strip()
        if not address or not machine.webhook_events:
            return None
        if problem := http_client.find_address_problem(address):
            raise SettingsError(f"{VARIABLE} (in the environment): {problem}; or unset it, and nobody is told")
        return cls(address, machine.webhook_events, machine.webhook_wait_s, project)

    def tell(self, event: WebhookEvent, text: str, **fields: Field) -> None:
        """Tell it, if it is wanted. Ends within `wait_s`; what did not work is told on standard error. Never raises.

        Args:
            event: what has happened.
            text: the same for people, after the project's name.
            fields: the same for programs.
        """
        if event not in self.events:
            return
        body = _build_body(self.project, event, text, fields)
        until_s = time.monotonic() + self.wait_s
        answer, tries = http_client.PostResult(False, f"nothing was heard within {self.wait_s:g} s"), 0
        while tries < TRIES and (left_s := until_s - time.monotonic()) > 0:
            answer = http_client.post(self.address, body, {"X-Ratchet-Event": event}, min(TRY_S, round(left_s, 3)))
            tries += 1
            pause_s = http_client.compute_pause_s(tries, answer)
            if answer.told:
                return
            if not answer.again or tries == TRIES or time.monotonic() + pause_s >= until_s:
                break
            time.sleep(pause_s)
        print_message(f"webhook: nobody was told of `{event}` ({answer.detail}; {http_client.format_tries(tries)})")


def _build_body(project: str, event: WebhookEvent, text: str, fields: dict[str, Field]) -> bytes:
    """In `text`, what chat services take for mark-up is escaped: nobody is called by the message of an exception."""
    shown = f"{project}: {text}"[:LONGEST_TEXT].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    about: dict[str, Field] = {"event": event, "project": project, "host": socket.gethostname()}
    return json.dumps({"text": shown, **about, "time": round(time.time(), 3), **fields}).encode()


class WebhookCallback:
    """Tells of one run: an observer of its journal. What happened before this process began is no news.

    Args:
        webhook: is told.
        run: id of the run.
    """

    name = "webhook"

    def __init__(self, webhook: Webhook, run: str) -> None:
        self._webhook, self._run = webhook, run
        self._progress = RunProgress()
        self._began_t = round(time.time(), 3)
        self._ours = False
        """Whether the last attempt is one of this process."""
        self._leads = True
        """Of several machines, one tells that the run has finished."""

    def see(self, events: Sequence[JournalEvent]) -> None:
        """Take the next events; tell of a worker that has stalled."""
        for event in events:
            self._progress.see(event)
            if event.kind == "attempt":  # in a container, an earlier process may have had the same number
                self._ours = event.data.get("pid") == os.getpid() and event.t >= self._began_t
            elif event.kind == "ready":
                self._leads = bool(event.data.get("leads", True))
        stalls = [e for e in events if e.kind == "died" and e.data.get("class") == "stalled"]
        if stalls and self._ours and stalls[-1].attempt == self._progress.attempts:
            text, again = str(stalls[-1].data.get("text", "")), stalls[-1].data.get("decision") == "Retry"
            then = "it is started again" if again else "it is given up"
            self._tell("stalled", f"stalled{self._where()}: {text}; {then}", detail=text)

    def finish(self, status: Status) -> None:
        """Tell how the run has ended, if it was trained now; being stopped on request is no news."""
        p = self._progress
        if not self._ours:
            return
        if status == "FINISHED" and self._leads:
            early = " early" if p.finished == "early_stopped" else ""
            best = "" if p.best_loss is None else f", validation loss {p.best_loss:.4f} at step {p.best_step}"
            self._tell("finished", f"has finished{early}{self._where()}{best}", validation_loss=p.best_loss)
        elif status == "FAILED":
            cause = p.ends[-1] if p.ends else "before its first attempt had ended"
            self._tell("failed", f"has failed{self._where()}: {cause}", detail=cause)

    def _where(self) -> str:
        planned = self._progress.planned_steps
        return f" at step {self._progress.step} of {planned}" if planned else ""

    def _tell(self, event: WebhookEvent, text: str, **fields: Field) -> None:
        p = self._progress
        about: dict[str, Field] = {"run": self._run, "step": p.step, "planned_steps": p.planned_steps}
        self._webhook.tell(event, f"run {self._run} {text}", **about, **fields)
