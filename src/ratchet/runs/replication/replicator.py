"""The mirror of a run as its supervisor sees it: take the run, keep the copy going, wait for it, give the run back.

Of a run that one machine trains; `member` is the same for several that train one together.
"""

from collections.abc import Callable
from hashlib import sha256

from ratchet.config.schema import Machine
from ratchet.runs.directory import Run
from ratchet.runs.replication import journal_segments, lease, restore
from ratchet.runs.replication.journal_segments import Beginning
from ratchet.runs.replication.replica_state import Local, say, settled
from ratchet.runs.replication.restore import Source
from ratchet.runs.replication.store import Store
from ratchet.runs.replication.upload import Upload
from ratchet.runs.replication_protocol import Mirrored


class Keeper:
    """Implements `run.custody.Custody`.

    Args:
        run: opened; its lock is held.
        machine: with `mirror` set.
    """

    def __init__(self, run: Run, machine: Machine) -> None:
        self._here = Local(run, machine)
        self._lease = self._here.lease()
        self._upload: Upload | None = None

    def take(self, stopping: Callable[[], bool]) -> None:
        """See Custody."""
        here = self._here
        if here.is_done(stopping):
            return
        noted = here.noted()
        with here.opened(stopping) as source:
            known = restore.require_same_spec(source.store, here.names, here.run.spec)
            if known and here.is_finished_there(source):
                here.tell(source.notices)
                return
            self._lease.take(stopping, say, here.earlier(noted))
            if not known:
                source.store.write(here.names.spec, here.run.paths.spec.read_bytes())
            note = self._brought(source, noted)
            source.store.remove([here.names.object(digest) for digest in source.damaged])
            here.tell(source.notices)
        self._upload = here.upload(self._lease, note)

    def lost(self) -> str | None:
        """See Custody."""
        return self._lease.lost()

    def settle(self, wait_s: float) -> str | None:
        """See Custody."""
        if self._upload is None:
            return None
        self._upload.hurry()
        return settled(self._upload.missing, self.lost, wait_s)

    def release(self) -> None:
        """See Custody."""
        self._here.leave()
        if self._upload is not None:
            self._upload.end()
        self._lease.release()

    def _brought(self, source: Source, noted: Mirrored | None) -> Mirrored:
        """Bring the directory to where the mirror stands, if that is further, and say what lies there of it."""
        here, token = self._here, self._lease.token
        written = lease.highest_token(source.store, here.names, lease.WRITTEN)
        begins = Beginning()
        steps: tuple[int, ...] = ()
        if written == 0:
            pass
        elif self._is_further(source.store, noted, written):
            begins = self._own_beginning(source.store, noted)
            steps = noted.durable_steps if noted else ()
        else:
            found = here.fetch(source, f"holder {written} of this run; we are {token}")
            steps = found.steps
            begins = Beginning(found.origin, found.origin[1]) if found.origin else begins
        if begins.origin is not None:
            self._lease.go_on_from(begins.origin)
        return here.note(token, steps, begins)

    def _is_further(self, store: Store, noted: Mirrored | None, written: int) -> bool:
        """Whether this directory has all that the mirror has, or the mirror has no checkpoint and we do: nobody else
        has written the run since this directory's last holder, or its last training was one of several machines, of
        which another one was the holder."""
        token, step = restore.newest_step(store, self._here.names)
        ours = restore.valid_step(self._here.run.paths)
        if token == 0 and ours:
            return True
        return noted is not None and (noted.token >= written or noted.token == 0) and ours >= step

    def _own_beginning(self, store: Store, noted: Mirrored | None) -> Beginning:
        """How this directory's journal goes on from the mirror's; if they do not agree any more, all is sent anew."""
        here = self._here
        if noted is not None and noted.token == 0:
            return journal_segments.joined(here.run.paths.journal, store, here.names)
        if noted is None or not noted.journal_bytes:
            return Beginning()
        with here.run.paths.journal.open("rb") as stream:
            known = sha256(stream.read(noted.journal_bytes)).hexdigest()
        if known != noted.journal_sha256:
            return Beginning()
        there = noted.journal_bytes + noted.journal_shift
        return Beginning((noted.token, there), noted.journal_bytes, noted.journal_shift)
