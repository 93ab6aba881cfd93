"""Events that hooks are told of: a folder each, with the bytes that are sent and how far each hook is.

    outbox/000003-5f0c.../event.json   what is sent, to the byte; written last: without it the folder does not count
                          hooks.json   who is to be told
                          KEY.json     how it went with one hook: told, or given up (promotion.hooks.key names it)
                          KEY.log      what a command said

Names begin with the line of the ledger, so that their order is that of the promotions.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.config.gate import HookSettings
from ratchet.errors import DamagedFileError
from ratchet.registry import hooks
from ratchet.registry import hooks as calls
from ratchet.storage import files
from ratchet.storage.locks import FileLock
from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import Promotion

LOCK_WAIT_S = 3600.0
"""Longest wait for a delivery that is at work: it has deadlines of its own."""


class HookDelivery(Record):
    """How it went with one hook."""

    hook: str
    """For people; without what may be secret in an address."""
    told: bool
    """False: given up, until somebody asks for it again."""
    detail: str
    tries: int


class EventRecipients(Record):
    """hooks.json: who is to be told of an event."""

    hooks: tuple[HookSettings, ...]


@dataclass(frozen=True)
class EventDelivery:
    """An event and how far it is."""

    folder: Path
    id: str
    told: tuple[HookDelivery, ...]
    waiting: tuple[HookSettings, ...]
    """Hooks that were neither told nor given up."""

    @property
    def failed(self) -> tuple[HookDelivery, ...]:
        """Hooks that were given up."""
        return tuple(t for t in self.told if not t.told)


def build_event(entry: Promotion, line: int, project: str, model_name: str, source: str) -> dict[str, Any]:
    """What is sent.

    Args:
        line: of the ledger, from 1: of two events, the later one has the higher.
        project: the project's name.
        model_name: of the registered model.
        source: URI of the folder of the promoted model.
    """
    return {
        "id": entry.id, "line": line, "action": entry.action, "time": entry.time, "project": project,
        "model_name": model_name, "version": entry.version, "model_digest": entry.model_digest, "before": entry.before,
        "by": entry.by, "decision": entry.decision, "forced": entry.forced, "reason": entry.reason, "source": source,
    }  # fmt: skip


def add_event(outbox: Path, content: dict[str, Any], told: Sequence[HookSettings]) -> str:
    """Store an event for the hooks that want to be told of it; returns its name. Doing it again changes nothing."""
    name = f"{content['line']:06d}-{content['id']}"
    wanted = _subscribed_hooks(told, content["action"])
    if wanted and not (outbox / name / "event.json").exists():
        files.remove_partials(outbox / name)  # of a process that died here
        EventRecipients(hooks=wanted).save(outbox / name / "hooks.json")
        files.write_json(outbox / name / "event.json", content)
    return name


def read_deliveries(outbox: Path) -> list[EventDelivery]:
    """All events, oldest first. Raises DamagedFileError for a folder that cannot be read."""
    return [_read_delivery(path.parent) for path in sorted(outbox.glob("*/event.json"))]


def retry_failed(outbox: Path, told: Sequence[HookSettings]) -> int:
    """Let hooks that were given up wait again, as the settings name them now; returns of how many events.

    An address that was mended in the settings takes the place of the one that was wrong.
    """
    asked = 0
    with acquire_lock(outbox):
        for delivery in read_deliveries(outbox):
            if not delivery.failed:
                continue
            action = json.loads((delivery.folder / "event.json").read_bytes())["action"]
            EventRecipients(hooks=_subscribed_hooks(told, action)).save(delivery.folder / "hooks.json")
            for path in _result_files(delivery.folder):
                if not HookDelivery.load(path).told:
                    files.before("unlink", path)
                    path.unlink()
            asked += 1
    return asked


def acquire_lock(outbox: Path) -> FileLock:
    """Waits for, and takes, the lock of whoever tells hooks: one at a time, so that they hear in order."""
    return FileLock(outbox / "delivery.lock", "the outbox").acquire(wait_s=LOCK_WAIT_S)


def record_result(delivery: EventDelivery, hook: HookSettings, outcome: calls.HookResult) -> HookDelivery:
    """Note durably how it went."""
    told = HookDelivery(hook=calls.hook_label(hook), told=outcome.told, detail=outcome.detail, tries=outcome.tries)
    told.save(delivery.folder / f"{calls.hook_key(hook)}.json")
    return told


def _subscribed_hooks(hooks: Sequence[HookSettings], action: str) -> tuple[HookSettings, ...]:
    """Hooks that want to be told of this, each once."""
    return tuple({calls.hook_key(hook): hook for hook in hooks if action in hook.events}.values())


def _result_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("*.json") if p.name not in ("event.json", "hooks.json"))


def _read_delivery(folder: Path) -> EventDelivery:
    try:
        content = json.loads((folder / "event.json").read_bytes())
        identity = str(content["id"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFileError(
            f"{folder / 'event.json'}: no event ({error}); remove the folder, and tell the hooks yourself"
        ) from None
    marks = {path.stem: HookDelivery.load(path) for path in _result_files(folder)}
    hooks = EventRecipients.load(folder / "hooks.json").hooks
    return EventDelivery(
        folder, identity, tuple(marks.values()), tuple(h for h in hooks if calls.hook_key(h) not in marks)
    )


# `python -m ratchet.registry.outbox OUTBOX PROJECT`: sends the events in the outbox to hooks, oldest first.
#
# A process and a session of its own, so that it goes on when whoever started it is killed. One is at work at a time (a
# lock on the outbox); whoever is started meanwhile waits for it and does what is left. A hook is told, then its mark
# is
# written: a machine that dies in between makes the next delivery tell it again, with the same id.

WAIT_S = 60.0
"""How long a promotion waits for its hooks; delivery goes on without it."""


def main(arguments: Sequence[str]) -> int:
    """Deliver until nothing waits."""
    box, root = map(Path, arguments)
    with acquire_lock(box):
        for delivery in read_deliveries(box):
            for hook in delivery.waiting:
                record_result(delivery, hook, hooks.send_event(hook, delivery.folder / "event.json", root))
    return 0


def deliver_pending(box: Path, root: Path, wait_s: float = WAIT_S) -> str | None:
    """Start a delivery if anything waits, and wait for it a while. Returns what is wrong, or None.

    Args:
        box: the outbox.
        root: the project.
        wait_s: longest wait.
    """
    if not any(delivery.waiting for delivery in read_deliveries(box)):
        return None
    log = box / "delivery.log"
    command = [sys.executable, "-m", "ratchet.registry.outbox", str(box), str(root)]
    with log.open("ab") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True, cwd=root
        )
    try:
        code = process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.returncode = 0  # it outlives us, as it should; Popen would complain
        return f"hooks are still being told (process {process.pid}); `ratchet promotions` says how it went"
    return f"telling hooks broke off with exit code {code} (see {log}); `ratchet promotions` goes on" if code else None


def describe_deliveries(box: Path, event: str) -> list[str]:
    """A line for each hook of an event: told, or a warning with the way to try again."""
    lines = []
    for delivery in read_deliveries(box):
        if delivery.folder.name != event:
            continue
        for told in delivery.told:
            if told.told:
                lines.append(f"{told.hook}: told ({told.detail})")
            else:
                tries = "1 try" if told.tries == 1 else f"{told.tries} tries"
                lines.append(
                    f"warning: {told.hook}: not told ({told.detail}; {tries}); what was promoted stays so. "
                    "`ratchet promotions --deliver` tries again"
                )
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
