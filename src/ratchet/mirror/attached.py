"""A run in a mirror, for somebody who looks at it again and again from any machine."""

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

from ratchet.mirror import survey
from ratchet.mirror.names import RunNames
from ratchet.mirror.segments import Following
from ratchet.mirror.store import Store
from ratchet.mirror.survey import Standing
from ratchet.run.aside import Aside
from ratchet.run.journal import Event, read_line
from ratchet.run.mirrored import Mirrored
from ratchet.run.vitals import Vitals

SILENT_S = 300.0
"""A machine that holds a run, and has not reported for so long, is not thought to train it."""


class There:
    """One run in a mirror; see run/attached.py.

    Args:
        store: the mirror.
        name: the run's id.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.name = name
        self.vitals, self.aside = Vitals(), Aside()
        self.new: Sequence[Event] = ()
        self._store, self._names = store, RunNames(name)
        self._journal = Following(store, self._names)

    def look(self) -> None:
        """Take in what has arrived since the last time. Raises MirrorError when the mirror cannot be read."""
        content, anew = self._journal.look()
        if anew:
            self.vitals = Vitals()
        self.new = [event for event, _ in map(read_line, content.splitlines(keepends=True)) if event is not None]
        for event in self.new:
            self.vitals.see(event)
        self.aside = self._aside()

    def _aside(self) -> Aside:
        found = survey.standing(self._store, self._names)
        token, step = found.durable
        noted = Mirrored(
            place=self._store.shown, token=token, node=found.holder.node if found.holder else "", lock=(0, 0),
            durable_steps=(step,) if step else (), result=found.finished,
        )  # fmt: skip
        return Aside(running=_is_trained(found), mirror=noted, finished=found.finished)


def _is_trained(found: Standing) -> bool:
    """Whether a machine holds the run, and has given a sign of life lately, by its own clock."""
    if found.holder is None or found.holder.state != "holding" or found.finished:
        return False
    signs = [one.last_t for one in found.machines]
    with suppress(ValueError):  # for people, and so in any form
        signs.append(datetime.fromisoformat(found.holder.since).timestamp())
    return time.time() - max(signs, default=0.0) < SILENT_S
