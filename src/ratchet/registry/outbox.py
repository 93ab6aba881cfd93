"""Stores promotion events and delivers them to hooks: a signed POST request or a command, with retries.

    outbox/000003-5f0c.../event.json   the exact bytes to send; written last: a folder without it is ignored
                          hooks.json   hooks that receive the event
                          KEY.json     result of one hook: delivered or failed (KEY: see `hook_key`)
                          KEY.log      output of a command

Names begin with the line number in the ledger, so that they sort in the order of the promotions.

`python -m ratchet.registry.outbox OUTBOX PROJECT` sends the events to hooks, oldest first. It runs in its own process
and session, so it continues if the caller is killed. A lock admits one such process at a time; a second process waits,
and then delivers the remaining events. A hook's result is written after the call of the hook. After a crash in between,
the next delivery calls the hook again with the same id.

A webhook request has these headers (times in Unix seconds; the key comes from the environment and is never stored):

    X-Ratchet-Event       promote | rollback
    X-Ratchet-Delivery    id of the event, the same for every attempt, so that a receiver recognizes repetitions
    X-Ratchet-Timestamp   time of this attempt
    X-Ratchet-Signature   sha256=HMAC-SHA256(key, timestamp + "." + body), hexadecimal; only if there is a key.
                          Receivers should compare it in constant time, and reject old timestamps.

A request is retried after connection errors, 5xx and 429 (Retry-After is obeyed), but not after other answers, which
would be the same again. Redirects are not followed, because they would send the signature elsewhere. A command is
retried after any failure, unless the program cannot be started.
"""

import hashlib
import hmac
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ratchet import http_client
from ratchet.config.promote import HookSettings
from ratchet.errors import DamagedFileError, SettingsError
from ratchet.http_client import PostResult
from ratchet.storage import digests, files
from ratchet.storage.files import FileLock
from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import Promotion

LOCK_WAIT_S = 3600.0
"""Maximum wait for a running delivery, which has its own timeouts."""

WAIT_S = 60.0
"""Maximum wait of a promotion for its hooks; after that, delivery continues in the background."""


class HookDelivery(Record):
    """Result of delivering an event to one hook."""

    hook: str
    """Description of the hook without secrets."""
    is_delivered: bool
    """False: the delivery failed and is repeated only on request (`retry_failed`)."""
    detail: str
    attempts: int


class EventRecipients(Record):
    """hooks.json: hooks that receive an event."""

    hooks: tuple[HookSettings, ...]


@dataclass(frozen=True)
class EventDelivery:
    """An event and the state of its delivery."""

    folder: Path
    id: str
    results: tuple[HookDelivery, ...]
    waiting: tuple[HookSettings, ...]
    """Hooks without a result."""

    @property
    def failed(self) -> tuple[HookDelivery, ...]:
        """Results of failed hooks."""
        return tuple(result for result in self.results if not result.is_delivered)


def build_event(entry: Promotion, line: int, project: str, model_name: str, source: str) -> dict[str, Any]:
    """Build the content of an event.

    Args:
        entry: the ledger's entry.
        line: number of the entry's line in the ledger, from 1; of two events, the later has the higher number.
        project: name of the project.
        model_name: name of the registered model.
        source: URI of the promoted model's folder.
    """
    return {
        "id": entry.id, "line": line, "action": entry.action, "time": entry.time, "project": project,
        "model_name": model_name, "version": entry.version, "model_digest": entry.model_digest,
        "previous_version": entry.previous_version, "actor": entry.actor, "decision": entry.decision,
        "forced": entry.forced, "reason": entry.reason, "source": source,
        "approvals": entry.approvals.model_dump(mode="json") if entry.approvals else None,
    }  # fmt: skip


def add_event(outbox: Path, content: dict[str, Any], recipients: Sequence[HookSettings]) -> str:
    """Store an event for the hooks that subscribe to it, and return its name. Repeating this changes nothing."""
    name = f"{content['line']:06d}-{content['id']}"
    subscribed = _subscribed_hooks(recipients, content["action"])
    if subscribed and not (outbox / name / "event.json").exists():
        files.remove_partials(outbox / name)  # left by an interrupted process
        EventRecipients(hooks=subscribed).save(outbox / name / "hooks.json")
        files.write_json(outbox / name / "event.json", content)
    return name


def deliver_pending(outbox: Path, root: Path, wait_s: float = WAIT_S) -> str | None:
    """Start a delivery process if an event waits for delivery, and wait for the process.

    Args:
        outbox: the outbox.
        root: directory of the project.
        wait_s: maximum wait.

    Returns:
        A problem to report, or None.
    """
    if not any(delivery.waiting for delivery in read_deliveries(outbox)):
        return None
    log_path = outbox / "delivery.log"
    command = [sys.executable, "-m", "ratchet.registry.outbox", str(outbox), str(root)]
    with log_path.open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=root
        )
    try:
        code = process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.returncode = 0  # the process continues on purpose; without this, Popen would warn
        return f"hooks are still running (process {process.pid}); check `ratchet promotions`"
    if code:
        return f"delivery to hooks failed with exit code {code} (see {log_path}); `ratchet promotions` continues it"
    return None


def main(arguments: Sequence[str]) -> int:
    """Deliver all waiting events."""
    outbox, root = map(Path, arguments)
    with acquire_lock(outbox):
        for delivery in read_deliveries(outbox):
            for hook in delivery.waiting:
                result = send_event(hook, delivery.folder / "event.json", root)
                result.save(delivery.folder / f"{hook_key(hook)}.json")
    return 0


def read_deliveries(outbox: Path) -> list[EventDelivery]:
    """Read all events, oldest first. Raises DamagedFileError for a folder that cannot be read."""
    return [_read_delivery(path.parent) for path in sorted(outbox.glob("*/event.json"))]


def read_event_deliveries(outbox: Path, event: str) -> tuple[HookDelivery, ...]:
    """Return the results of one event; hooks without a result are not included."""
    return tuple(
        result for delivery in read_deliveries(outbox) if delivery.folder.name == event for result in delivery.results
    )


def retry_failed(outbox: Path, recipients: Sequence[HookSettings]) -> int:
    """Schedule failed deliveries again, for the hooks in the current settings, whose addresses may have been corrected.

    Returns:
        Number of events that are scheduled again: those with failed deliveries, and a hook for them in the settings.
    """
    count = 0
    with acquire_lock(outbox):
        for delivery in read_deliveries(outbox):
            if not delivery.failed:
                continue
            action = json.loads((delivery.folder / "event.json").read_bytes())["action"]
            if not (hooks := _subscribed_hooks(recipients, action)):
                continue  # the failure stays listed
            EventRecipients(hooks=hooks).save(delivery.folder / "hooks.json")
            for path in _result_files(delivery.folder):
                if not HookDelivery.load(path).is_delivered:
                    files.before("unlink", path)
                    path.unlink()
            count += 1
    return count


def acquire_lock(outbox: Path) -> FileLock:
    """Wait for the delivery lock and take it; one process delivers at a time, so that hooks receive events in order."""
    return FileLock(outbox / "delivery.lock", "the outbox").acquire(wait_s=LOCK_WAIT_S)


def _subscribed_hooks(candidates: Sequence[HookSettings], action: str) -> tuple[HookSettings, ...]:
    """Return the hooks that subscribe to this action, without duplicates."""
    return tuple({hook_key(hook): hook for hook in candidates if action in hook.events}.values())


def _result_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*.json") if p.name not in ("event.json", "hooks.json"))


def _read_delivery(folder: Path) -> EventDelivery:
    try:
        content = json.loads((folder / "event.json").read_bytes())
        identity = str(content["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(
            f"{folder / 'event.json'}: not an event ({error}); remove the folder, and inform the receivers of the "
            "hooks yourself"
        ) from None
    results = {path.stem: HookDelivery.load(path) for path in _result_files(folder)}
    recipients = EventRecipients.load(folder / "hooks.json").hooks
    return EventDelivery(
        folder, identity, tuple(results.values()), tuple(h for h in recipients if hook_key(h) not in results)
    )


# Hooks: checks, and sending one event to one hook.


def check_hooks(hooks: Sequence[HookSettings], require_keys: bool = True) -> None:
    """Check, before a promotion, that hooks can receive events.

    Args:
        hooks: hooks in params.yaml.
        require_keys: also require the key of every webhook whose `key_variable` is set explicitly.

    Raises:
        SettingsError: an address is invalid, or a key is missing.
    """
    for number, hook in enumerate(hooks):
        if hook.webhook is not None and (problem := http_client.find_address_problem(hook.webhook)):
            raise SettingsError(f"promote.hooks[{number}].webhook: {problem}")
        names_key = hook.webhook is not None and "key_variable" in hook.model_fields_set
        if require_keys and names_key and not os.environ.get(hook.key_variable):
            raise SettingsError(
                f"promote.hooks[{number}].key_variable: the environment variable {hook.key_variable} is not set, so "
                "events cannot be signed; set it, or remove key_variable to send them unsigned"
            )


def hook_key(hook: HookSettings) -> str:
    """Return a digest of a hook's address or command; other settings, such as timeouts, do not change it."""
    return digests.hash_json([hook.webhook, list(hook.command)])[: digests.SHORT]


def hook_label(hook: HookSettings) -> str:
    """Describe a hook, without the path and query of its address, which contain a secret for some services."""
    if hook.webhook is None:
        return f"command {Path(hook.command[0]).name}"
    parts = urlsplit(hook.webhook)
    return f"webhook {parts.scheme}://{parts.netloc}"


def send_event(hook: HookSettings, event: Path, root: Path, wait: Callable[[float], None] = time.sleep) -> HookDelivery:
    """Send an event to a hook until it succeeds or no retry is left. Failures of the receiver are not raised.

    Args:
        hook: the hook.
        event: file with the bytes to send.
        root: directory of the project, in which a command runs.
        wait: called with the seconds between two attempts.
    """
    attempts = 0
    while True:
        answer = _post_event(hook, event) if hook.webhook is not None else _run_command(hook, event, root)
        attempts += 1
        if answer.is_delivered or not answer.is_retryable or attempts > hook.retries:
            return HookDelivery(
                hook=hook_label(hook), is_delivered=answer.is_delivered, detail=answer.detail, attempts=attempts
            )
        wait(http_client.compute_retry_delay_s(attempts, answer))


def _post_event(hook: HookSettings, event: Path) -> PostResult:
    """Send a request once. If the event was sent unsigned, the result's detail says so."""
    body, timestamp = event.read_bytes(), str(int(time.time()))
    content = json.loads(body)
    headers = {
        "X-Ratchet-Event": str(content["action"]),
        "X-Ratchet-Delivery": str(content["id"]),
        "X-Ratchet-Timestamp": timestamp,
    }
    if secret := os.environ.get(hook.key_variable):
        digest = hmac.new(secret.encode(), timestamp.encode() + b"." + body, hashlib.sha256).hexdigest()
        headers["X-Ratchet-Signature"] = f"sha256={digest}"
    answer = http_client.post(str(hook.webhook), body, headers, hook.timeout_s)
    if answer.is_delivered and not secret:
        return PostResult(True, f"{answer.detail}; unsigned: {hook.key_variable} is not set")
    return answer


def _run_command(hook: HookSettings, event: Path, root: Path) -> PostResult:
    """Run the command once, with the event on standard input and the event's id in RATCHET_EVENT_ID."""
    environment = os.environ | {"RATCHET_EVENT_ID": str(json.loads(event.read_bytes())["id"])}
    log = event.parent / f"{hook_key(hook)}.log"
    with event.open("rb") as stdin, log.open("ab") as out:
        try:
            process = subprocess.Popen(
                hook.command, cwd=root, env=environment, stdin=stdin, stdout=out, stderr=out, start_new_session=True
            )
        except OSError as error:
            return PostResult(False, f"cannot be started ({error.strerror})", is_retryable=False)
        try:
            code = process.wait(hook.timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the process group, so that its children end, too
            process.wait()
            return PostResult(False, f"timed out after {hook.timeout_s:g} s and was killed")
    return PostResult(code == 0, f"exit code {code}" + (f" (see {log})" if code else ""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
