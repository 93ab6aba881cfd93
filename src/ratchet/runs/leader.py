"""Of several machines that train one run together, the one that shows it in a place which all of them share.

Each has a journal of its own, with the same steps at slightly other times: if all told of them, each step would be
there several times. So only the machine of rank 0 tells. Which one that is, every meeting decides anew, and the event
`ready` says.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ratchet.config.schema import Machine
from ratchet.runs.callbacks import Observer, Status
from ratchet.runs.journal import Event, Reader


class Shared(Observer, Protocol):
    """Shows a run where others show it too; tells nothing that is there."""

    def forget(self) -> None:
        """Look anew, at the next use, what is there."""


class Lead:
    """An observer that passes on what it is told while its machine leads, and tells what is missing when it takes over.

    Args:
        observer: is told.
        journal: of the run, on this machine.
    """

    patient = True

    def __init__(self, observer: Shared, journal: Path) -> None:
        self.name = observer.name
        self._observer, self._journal = observer, journal
        self._ours = False
        """Whether the last attempt is one of this process."""
        self._led = False
        """Whether this machine leads in the attempt that was ready last."""

    def see(self, events: Sequence[Event]) -> None:
        """Take the next events, or the same ones again with newer ones after them."""
        if self._takes_over(events):
            self._observer.forget()
            events = _all(self._journal)
        if self._ours and self._led:
            self._observer.see(events)

    def finish(self, status: Status) -> None:
        """The run has ended for now; a machine that does not lead says nothing: it may go on elsewhere."""
        if not self._led:
            return
        if not self._ours:  # nothing was trained: what was missed is sent, if the run is over
            if status != "FINISHED":
                return
            self._observer.see(_all(self._journal))
        self._observer.finish(status)

    def _takes_over(self, events: Sequence[Event]) -> bool:
        """Whether an attempt became ready that this machine leads."""
        taken = False
        for event in events:
            if event.kind == "attempt":
                ours = event.data.get("pid") == os.getpid()
                # What an earlier process led says nothing: others may have taken over since, and be at work.
                self._led = self._led and (self._ours or not ours)
                self._ours = ours
            elif event.kind == "ready":
                self._led = _leads(event)
                taken = self._ours and self._led
        return taken


def observed(observer: Shared, journal: Path, machine: Machine) -> Observer:
    """The observer, told by one of the machines only where there are several and a server that they share.

    The project's own store is each machine's own.
    """
    return Lead(observer, journal) if _is_shared(machine) else observer


def tells(journal: Path, machine: Machine) -> bool:
    """Whether this machine is the one to tell of a run that has ended: it led when the run was ready last."""
    ready = [event for event in _all(journal) if event.kind == "ready"]
    return not _is_shared(machine) or (bool(ready) and _leads(ready[-1]))


def _is_shared(machine: Machine) -> bool:
    return machine.tracking is not None and machine.node_range[1] > 1


def _leads(ready: Event) -> bool:
    return bool(ready.data.get("leads", True))  # journals of before had no such word, and one machine


def _all(journal: Path) -> list[Event]:
    return list(Reader(journal).read())
