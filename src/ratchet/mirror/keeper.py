"""The mirror of a run as its supervisor sees it: take the run, keep the copy going, wait for it, give the run back."""

import re
import socket
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from uuid import uuid4

from ratchet.config import Machine
from ratchet.errors import InterruptedRunError, MirrorError
from ratchet.mirror import claims, restore
from ratchet.mirror.address import shown
from ratchet.mirror.claims import Key, Origin
from ratchet.mirror.lease import SIGNS, Lease
from ratchet.mirror.names import RunNames
from ratchet.mirror.restore import Source
from ratchet.mirror.store import Store, Terms
from ratchet.mirror.upload import Duty, Upload
from ratchet.run import mirrored
from ratchet.run.directory import Run
from ratchet.run.mirrored import Mirrored

PATIENCE_S = 20.0
"""How long one call tries again while a training is under way; who called tries again later."""
TIMEOUT_S = 30.0
LAST_WORD_S = 5.0
"""For giving the run back, when nothing else is left to do."""
POLL_S = 0.05


def node_name() -> str:
    """Of this process, for no other one: the machine's name and eight random digits."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:50] or "machine"
    return f"{host}-{uuid4().hex[:8]}"


class Keeper:
    """Implements `run.custody.Custody`.

    Args:
        run: opened; its lock is held.
        machine: with `mirror` set.
    """

    def __init__(self, run: Run, machine: Machine) -> None:
        self._run, self._machine = run, machine
        self._node, self._place = node_name(), shown(machine.mirror or "")
        self._names = RunNames(run.paths.root.name)
        self._stopping: Callable[[], bool] = lambda: False
        self._upload: Upload | None = None
        self._last_word_s: float | None = None
        quarter_s = machine.lease_s / SIGNS
        quick = Terms(patience_s=quarter_s, timeout_s=min(TIMEOUT_S, quarter_s))
        self._lease = Lease(self._store(quick, self._is_over), self._names, self._node, machine.lease_s)

    def take(self, stopping: Callable[[], bool]) -> None:
        """See Custody."""
        noted = mirrored.read(self._run.paths)
        noted = noted if noted is not None and noted.place == self._place else None
        if noted is not None and noted.result and self._run.paths.is_finished():
            return
        store = self._store(Terms(patience_s=self._machine.mirror_wait_s, timeout_s=TIMEOUT_S), stopping)
        try:
            self._take(store, stopping, noted)
        except MirrorError:
            if stopping():
                raise InterruptedRunError(f"run {self._names.run_id}: stopped while it waited for its mirror") from None
            raise

    def _take(self, store: Store, stopping: Callable[[], bool], noted: Mirrored | None) -> None:
        store.check()
        source = Source(store, self._names)
        known = restore.require_same_spec(store, self._names, self._run.spec)
        if known and self._is_finished_there(source):
            self._tell(source.notices)
            return
        self._lease.take(stopping, _say, self._earlier(noted))
        if not known:
            store.write(self._names.spec, self._run.paths.spec.read_bytes())
        note = self._brought(source, noted)
        store.remove([self._names.object(digest) for digest in source.damaged])
        self._tell(source.notices)
        self._begin(note)

    def lost(self) -> str | None:
        """See Custody."""
        return self._lease.lost()

    def settle(self, wait_s: float) -> str | None:
        """See Custody."""
        if self._upload is None:
            return None
        self._upload.hurry()
        deadline = time.monotonic() + wait_s
        while missing := self._upload.missing():
            if why := self._lease.lost():
                return f"{missing}; {why}"
            if time.monotonic() >= deadline:
                return missing
            time.sleep(POLL_S)
        return None

    def release(self) -> None:
        """See Custody."""
        if self._last_word_s is None:
            self._last_word_s = time.monotonic() + LAST_WORD_S
        if self._upload is not None:
            self._upload.end()
        self._lease.release()

    def _is_over(self) -> bool:
        return self._last_word_s is not None and time.monotonic() > self._last_word_s

    def _store(self, terms: Terms, stopping: Callable[[], bool]) -> Store:
        return Store(self._machine.mirror or "", terms, stopping)

    def _earlier(self, noted: Mirrored | None) -> Key | None:
        """The claim of the supervisor that had this directory before us: we hold its lock, so it is gone."""
        if noted is None or noted.lock != mirrored.identity(self._run.lock):
            return None
        return noted.token, noted.node

    def _is_finished_there(self, source: Source) -> bool:
        """Fetch the result, if the mirror has it: then there is nothing to write, and nobody to agree with."""
        if self._run.paths.is_finished():
            return False
        token = restore.result(self._run, source)
        if token is None:
            return False
        self._note(token, result=True)
        source.notices.append(f"the result of run {self._names.run_id} is taken from its mirror")
        return True

    def _brought(self, source: Source, noted: Mirrored | None) -> Mirrored:
        """Bring the directory to where the mirror stands, if that is further, and say what lies there of it."""
        paths, token = self._run.paths, self._lease.token
        written = claims.highest_token(source.store, self._names, claims.WRITTEN)
        if written == 0 or self._is_further(source.store, noted, written):
            origin = self._own_origin(noted) if written else None
            steps = noted.durable_steps if noted and written else ()
        else:
            had = paths.checkpoint_steps()
            found = restore.everything(self._run, source)
            origin, steps = found.origin, found.steps
            aside = f"; what was here is kept as {restore.SUPERSEDED}*" if had else ""
            source.notices.append(
                f"taken from the mirror: {f'the checkpoint of step {found.step}' if found.step else 'no checkpoint'} "
                f"(holder {written} of this run; we are {token}){aside}"
            )
        if origin is not None:
            self._lease.go_on_from(origin)
        return self._note(token, durable_steps=steps, origin=origin)

    def _is_further(self, store: Store, noted: Mirrored | None, written: int) -> bool:
        """Whether nobody has written the run since this directory's last holder, and nothing was lost here; or the
        mirror has no checkpoint, and we do."""
        token, step = restore.newest_step(store, self._names)
        ours = restore.valid_step(self._run.paths)
        if token == 0 and ours:
            return True
        return noted is not None and noted.token >= written and ours >= step

    def _own_origin(self, noted: Mirrored | None) -> Origin | None:
        """What of this directory's journal is in the mirror; None when they do not agree any more: all is sent anew."""
        if noted is None or not noted.journal_bytes:
            return None
        with self._run.paths.journal.open("rb") as stream:
            known = sha256(stream.read(noted.journal_bytes)).hexdigest()
        return (noted.token, noted.journal_bytes) if known == noted.journal_sha256 else None

    def _note(
        self, token: int, durable_steps: tuple[int, ...] = (), origin: Origin | None = None, result: bool = False
    ) -> Mirrored:
        end = origin[1] if origin else 0
        with self._run.paths.journal.open("rb") as stream:
            known = sha256(stream.read(end)).hexdigest()
        note = Mirrored(
            place=self._place, token=token, node=self._node, lock=mirrored.identity(self._run.lock),
            durable_steps=durable_steps, result=result, journal_bytes=end, journal_sha256=known,
        )  # fmt: skip
        note.save(self._run.paths.mirror)
        return note

    def _begin(self, note: Mirrored) -> None:
        terms = Terms(self._machine.mirror_bytes_s, PATIENCE_S, TIMEOUT_S)
        store = self._store(terms, lambda: self._last_word_s is not None)
        duty = Duty(self._run, self._names, store, self._lease, self._node, self._machine)
        self._upload = Upload(duty, note)
        self._upload.start()

    def _tell(self, notices: list[str]) -> None:
        """What happened on the way, in the journal that goes on: it may have come from the mirror."""
        for text in notices:
            self._run.journal.append("notice", text=text)
            _say(text)


def _say(text: str) -> None:
    print(f"ratchet: {text}", file=sys.stderr)
