"""Stores promotion events for hooks and delivers them: one folder per event, with its bytes and the result of each
hook.

    outbox/000003-5f0c.../event.json   the exact bytes to send; written last: a folder without it is ignored
                          hooks.json   hooks that receive the event
                          KEY.json     result of one hook: delivered or failed (KEY: see hooks.hook_key)
                          KEY.log      output of a command

Names begin with the line number in the ledger, so that they sort in the order of the promotions.

`python -m ratchet.registry.outbox OUTBOX PROJECT` sends the events to hooks, oldest first. It runs in its own process
and session, so it continues if the caller is killed. A lock on the outbox admits one at a time; a second process waits
and then delivers what is left. A result is written after a hook was called: after a crash in between, the next delivery
calls the hook again with the same id.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config.promote import HookSettings
from ratchet.errors import DamagedFileError
from ratchet.registry import hooks
from ratchet.storage import files
from ratchet.storage.locks import FileLock
from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import Promotion

LOCK_WAIT_S = 3600.0
"""Maximum wait for a running delivery, which has its own timeouts."""
WAIT_S = 60.0
"""How long a promotion waits for its hooks; delivery continues in the background."""


class HookDelivery(Record):
    """Result of delivering an event to one hook."""

    hook: str
    """Description of the hook without secrets."""
    is_delivered: bool
    """False: the delivery failed, and is repeated only on request."""
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
        return tuple(one for one in self.results if not one.is_delivered)


def build_event(entry: Promotion, line: int, project: str, model_name: str, source: str) -> dict[str, Any]:
    """Build the content of an event.

    Args:
        entry: the ledger's entry.
        line: its line in the ledger, from 1; the later of two events has the higher one.
        project: name of the project.
        model_name: name of the registered model.
        source: URI of the promoted model's folder.
    """
    return {
        "id": entry.id, "line": line, "action": entry.action, "time": entry.time, "project": project,
        "model_name": model_name, "version": entry.version, "model_digest": entry.model_digest,
        "previous_version": entry.previous_version, "actor": entry.actor, "decision": entry.decision,
        "forced": entry.forced, "reason": entry.reason, "source": source,
    }  # fmt: skip


def add_event(outbox: Path, content: dict[str, Any], recipients: Sequence[HookSettings]) -> str:
    """Store an event for the hooks that subscribe to it, and return its name. Repeating this changes nothing."""
    name = f"{content['line']:06d}-{content['id']}"
    subscribed = _subscribed_hooks(recipients, content["action"])
    if subscribed and not (outbox / name / "event.json").exists():
        files.remove_partials(outbox / name)  # of an interrupted process
        EventRecipients(hooks=subscribed).save(outbox / name / "hooks.json")
        files.write_json(outbox / name / "event.json", content)
    return name


def read_deliveries(outbox: Path) -> list[EventDelivery]:
    """Read all events, oldest first. Raises DamagedFileError for a folder that cannot be read."""
    return [_read_delivery(path.parent) for path in sorted(outbox.glob("*/event.json"))]


def retry_failed(outbox: Path, recipients: Sequence[HookSettings]) -> int:
    """Schedule failed deliveries again, with the hooks of the current settings, so that corrected addresses are used.

    Returns:
        Number of events.
    """
    count = 0
    with acquire_lock(outbox):
        for delivery in read_deliveries(outbox):
            if not delivery.failed:
                continue
            action = json.loads((delivery.folder / "event.json").read_bytes())["action"]
            EventRecipients(hooks=_subscribed_hooks(recipients, action)).save(delivery.folder / "hooks.json")
            for path in _result_files(delivery.folder):
                if not HookDelivery.load(path).is_delivered:
                    files.before("unlink", path)
                    path.unlink()
            count += 1
    return count


def acquire_lock(outbox: Path) -> FileLock:
    """Wait for the delivery lock and take it; one process delivers at a time, so that hooks receive events in order."""
    return FileLock(outbox / "delivery.lock", "the outbox").acquire(wait_s=LOCK_WAIT_S)


def record_result(delivery: EventDelivery, hook: HookSettings, result: hooks.HookResult) -> HookDelivery:
    """Store a hook's result durably."""
    record = HookDelivery(
        hook=hooks.hook_label(hook), is_delivered=result.is_delivered, detail=result.detail, attempts=result.attempts
    )
    record.save(delivery.folder / f"{hooks.hook_key(hook)}.json")
    return record


def _subscribed_hooks(candidates: Sequence[HookSettings], action: str) -> tuple[HookSettings, ...]:
    """Hooks that subscribe to this action, each once."""
    return tuple({hooks.hook_key(hook): hook for hook in candidates if action in hook.events}.values())


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
        folder, identity, tuple(results.values()), tuple(h for h in recipients if hooks.hook_key(h) not in results)
    )


def deliver_pending(outbox: Path, root: Path, wait_s: float = WAIT_S) -> str | None:
    """Start a delivery process if any event waits, and wait for it.

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
        process.returncode = 0  # it continues on purpose; otherwise Popen would warn
        return f"hooks are still running (process {process.pid}); check `ratchet promotions`"
    if code:
        return f"delivery to hooks failed with exit code {code} (see {log_path}); `ratchet promotions` continues it"
    return None


def read_event_deliveries(outbox: Path, event: str) -> tuple[HookDelivery, ...]:
    """Results of one event; hooks without a result are not included."""
    return tuple(
        result for delivery in read_deliveries(outbox) if delivery.folder.name == event for result in delivery.results
    )


def main(arguments: Sequence[str]) -> int:
    """Deliver until no event waits."""
    outbox, root = map(Path, arguments)
    with acquire_lock(outbox):
        for delivery in read_deliveries(outbox):
            for hook in delivery.waiting:
                record_result(delivery, hook, hooks.send_event(hook, delivery.folder / "event.json", root))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
