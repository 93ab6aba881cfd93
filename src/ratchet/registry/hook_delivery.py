"""`python -m ratchet.registry.hook_delivery OUTBOX PROJECT`: sends the events in the outbox to hooks, oldest first.

A process and a session of its own, so that it goes on when whoever started it is killed. One is at work at a time (a
lock on the outbox); whoever is started meanwhile waits for it and does what is left. A hook is told, then its mark is
written: a machine that dies in between makes the next delivery tell it again, with the same id.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ratchet.registry import hooks, outbox

WAIT_S = 60.0
"""How long a promotion waits for its hooks; delivery goes on without it."""


def main(arguments: Sequence[str]) -> int:
    """Deliver until nothing waits."""
    box, root = map(Path, arguments)
    with outbox.lock(box):
        for delivery in outbox.deliveries(box):
            for hook in delivery.waiting:
                outbox.mark(delivery, hook, hooks.tell(hook, delivery.folder / "event.json", root))
    return 0


def deliver(box: Path, root: Path, wait_s: float = WAIT_S) -> str | None:
    """Start a delivery if anything waits, and wait for it a while. Returns what is wrong, or None.

    Args:
        box: the outbox.
        root: the project.
        wait_s: longest wait.
    """
    if not any(delivery.waiting for delivery in outbox.deliveries(box)):
        return None
    log = box / "delivery.log"
    command = [sys.executable, "-m", "ratchet.registry.hook_delivery", str(box), str(root)]
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


def describe(box: Path, event: str) -> list[str]:
    """A line for each hook of an event: told, or a warning with the way to try again."""
    lines = []
    for delivery in outbox.deliveries(box):
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
