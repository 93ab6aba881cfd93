"""Sends webhook notifications, one POST per event: a run has ended or stalled, the gate has decided, a champion was
promoted.

The address comes from the environment, because addresses of chat services contain a secret. No file and no message
contains the address. The body is JSON: chat services show `text`, and programs read the other fields.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ratchet import http_client
from ratchet.config.machine import Machine, WebhookEvent
from ratchet.errors import SettingsError
from ratchet.runs.callbacks import Status
from ratchet.runs.journal import JournalEvent
from ratchet.runs.log import print_message
from ratchet.runs.status import RunProgress

VARIABLE = "RATCHET_WEBHOOK_URL"
MAX_TRIES = 4
TRY_TIMEOUT_S = 5.0
MAX_TEXT = 1000
"""Maximum number of characters of `text`, before mark-up is escaped."""

Field = str | int | float | None


@dataclass(frozen=True)
class Webhook:
    """A webhook and the events that it receives."""

    address: str
    events: tuple[WebhookEvent, ...]
    wait_s: float
    """Maximum time in seconds for sending an event, all attempts included."""
    project: str
    """Name of the project."""

    @classmethod
    def from_environment(cls, machine: Machine, project: str) -> "Webhook | None":
        """Create the webhook from the environment and the settings; None if either does not enable it.

        Raises:
            SettingsError: the variable contains an invalid address.
        """
        address = os.environ.get(VARIABLE, "").strip()
        if not address or not machine.webhook_events:
            return None
        if problem := http_client.find_address_problem(address):
            raise SettingsError(f"{VARIABLE} (in the environment): {problem}; or unset it to send no notifications")
        return cls(address, machine.webhook_events, machine.webhook_timeout_s, project)

    def send(self, event: WebhookEvent, text: str, **fields: Field) -> bool:
        """Send an event if it is enabled, and return whether it was delivered. Return within `wait_s` seconds. Print a
        failure on standard error; never raise.

        Chat services show the text, after the project's name; programs read the fields.
        """
        if event not in self.events:
            return False
        body = _build_body(self.project, event, text, fields)
        until_s = time.monotonic() + self.wait_s
        answer, tries = http_client.PostResult(False, f"no answer within {self.wait_s:g} s"), 0
        while tries < MAX_TRIES and (left_s := until_s - time.monotonic()) > 0:
            timeout_s = min(TRY_TIMEOUT_S, round(left_s, 3))
            answer = http_client.post(self.address, body, {"X-Ratchet-Event": event}, timeout_s)
            tries += 1
            pause_s = http_client.compute_retry_delay_s(tries, answer)
            if answer.is_delivered:
                return True
            if not answer.is_retryable or tries == MAX_TRIES or time.monotonic() + pause_s >= until_s:
                break
            time.sleep(pause_s)
        print_message(f"webhook: `{event}` not delivered ({answer.detail}; {http_client.format_attempts(tries)})")
        return False


def _build_body(project: str, event: WebhookEvent, text: str, fields: dict[str, Field]) -> bytes:
    """Encode the body. Mark-up of chat services is escaped in `text`, so that an exception's message cannot notify a
    user."""
    shown = f"{project}: {text}"[:MAX_TEXT].replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    shared_fields: dict[str, Field] = {"event": event, "project": project, "host": socket.gethostname()}
    return json.dumps({"text": shown, **shared_fields, "time": round(time.time(), 3), **fields}).encode()


class WebhookCallback:
    """Callback that sends events of one run. Events before the start of this process are not sent."""

    name = "webhook"

    def __init__(self, webhook: Webhook, run: str) -> None:
        self._webhook, self._run = webhook, run
        self._progress = RunProgress()
        self._began_t = round(time.time(), 3)
        self._is_own_attempt = False
        """Whether the last attempt belongs to this process."""
        self._has_rank_zero = True
        """Whether this machine has rank 0. Of several machines, only the machine with rank 0 reports that the run has
        finished; every machine reports a failure."""

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Process the next events, and report a stalled worker."""
        for event in events:
            self._progress.update(event)
            if event.kind == "attempt_started":  # in a container, an earlier process may have had the same pid
                self._is_own_attempt = event.data.get("pid") == os.getpid() and event.t >= self._began_t
            elif event.kind == "worker_ready":
                self._has_rank_zero = bool(event.data.get("has_rank_zero", True))
        stalls = [e for e in events if e.kind == "worker_exited" and e.data.get("failure_class") == "stalled"]
        if stalls and self._is_own_attempt and stalls[-1].attempt == self._progress.attempts:
            text, is_retried = str(stalls[-1].data.get("text", "")), stalls[-1].data.get("decision") == "Retry"
            consequence = "restarting" if is_retried else "giving up"
            self._send("stalled", f"stalled{self._describe_step()}: {text}; {consequence}", detail=text)

    def on_end(self, status: Status) -> None:
        """Report how the run has ended, if this process trained it. A requested stop is not reported."""
        p = self._progress
        if not self._is_own_attempt:
            return
        if status == "FINISHED" and self._has_rank_zero:
            early = " early" if p.finished == "early_stopped" else ""
            best = "" if p.best_loss is None else f", validation loss {p.best_loss:.4f} at step {p.best_step}"
            self._send("finished", f"finished{early}{self._describe_step()}{best}", validation_loss=p.best_loss)
        elif status == "FAILED":
            cause = p.attempt_ends[-1] if p.attempt_ends else "before the end of its first attempt"
            self._send("failed", f"failed{self._describe_step()}: {cause}", detail=cause)

    def _describe_step(self) -> str:
        planned = self._progress.planned_steps
        return f" at step {self._progress.step} of {planned}" if planned else ""

    def _send(self, event: WebhookEvent, text: str, **fields: Field) -> None:
        p = self._progress
        shared_fields: dict[str, Field] = {"run": self._run, "step": p.step, "planned_steps": p.planned_steps}
        self._webhook.send(event, f"run {self._run} {text}", **shared_fields, **fields)
