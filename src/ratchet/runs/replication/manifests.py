"""A sealed directory in a mirror: its files lie as objects under their digests, a document of JSON says which."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self

from ratchet.errors import DamagedFileError
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.replication import lease
from ratchet.runs.replication.lease import LeaseRecord, Origin
from ratchet.runs.replication.object_names import RunObjectNames, parse_numbers
from ratchet.runs.replication.store import ReplicaStore
from ratchet.storage import disk, files
from ratchet.storage.files import Entry

FORMAT = 1
_GARBAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class ReplicaManifest:
    """What is in a sealed directory, and what it needs beside it."""

    kind: str
    """As in its manifest: `checkpoint` or `result`."""
    step: int
    files: dict[str, Entry]
    refers_to: tuple[int, ...] = ()
    """Steps of the checkpoints without which this one is of no use."""

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.files.values())

    @property
    def digest(self) -> str:
        """Fingerprint of names and contents, as of its manifest."""
        return files.Manifest(self.kind, self.files).digest

    @property
    def digests(self) -> set[str]:
        return {digest for digest, _ in self.files.values()}

    def as_bytes(self) -> bytes:
        listed = {name: {"sha256": sha, "bytes": size} for name, (sha, size) in self.files.items()}
        document = {
            "format": FORMAT,
            "kind": self.kind,
            "step": self.step,
            "refers_to": self.refers_to,
            "files": listed,
        }
        return files.json_bytes(document)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        """Raises DamagedFileError when it is no such document, or names a file outside its directory."""
        try:
            raw = json.loads(data)
            if (found := raw["format"]) != FORMAT:
                raise DamagedFileError(
                    f"{where}: format {found}, this version reads {FORMAT}; use the version that wrote it"
                )
            entries = {str(name): (str(e["sha256"]), int(e["bytes"])) for name, e in raw["files"].items()}
            for name, (sha, _) in entries.items():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not _is_digest(sha):
                    raise ValueError(f"file {name!r} of digest {sha!r}")
            return cls(str(raw["kind"]), int(raw["step"]), entries, tuple(map(int, raw["refers_to"])))
        except _GARBAGE as error:
            raise DamagedFileError(f"{where}: not the document of a sealed directory ({error})") from None


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def build_checkpoint_manifest(directory: Path) -> ReplicaManifest:
    """The document of a sealed checkpoint. Raises DamagedFileError when it is none.

    Like State.refers_to of the training, read without its libraries: best and last good step, if they are others.
    """
    manifest = files.read_manifest(directory)
    try:
        state = json.loads((directory / "state.json").read_bytes())["state"]
        step = int(state["step"])
        others = {int(state["best_step"]), int(state["good_step"])} - {0, step}
    except (OSError, *_GARBAGE) as error:
        raise DamagedFileError(f"{directory}: its state is unreadable ({error})") from None
    return ReplicaManifest(manifest.kind, step, manifest.files, tuple(sorted(others)))


def build_result_manifest(directory: Path, step: int) -> ReplicaManifest:
    """The document of a sealed result. Raises DamagedFileError when it is none."""
    manifest = files.read_manifest(directory)
    return ReplicaManifest(manifest.kind, step, manifest.files)


@dataclass
class TransferStatistics:
    """What a copy has cost."""

    bytes_sent: int = 0
    bytes_skipped: int = 0
    """Of files that the mirror had already."""


@dataclass
class SealedDirectoryUploader:
    """Copies sealed directories to a mirror."""

    store: ReplicaStore
    names: RunObjectNames
    _done: set[str] = field(default_factory=set)

    def send(self, directory: Path, sealed: ReplicaManifest, name: str) -> TransferStatistics:
        """Copy objects, then the document; when this returns, all of it has been seen there.

        Raises:
            MirrorError: the mirror does not take it now.
            DamagedFileError: a file is not what was sealed.
            FileNotFoundError: the directory was removed meanwhile.
        """
        cost = TransferStatistics()
        missing = dict(self._objects(sealed))
        while missing:
            for file, (sha, size) in missing.items():
                sent = self.store.send(self.names.object(sha), directory / file, (sha, size))
                cost.bytes_sent += sent
                cost.bytes_skipped += max(0, size - sent)
            self.store.write(name, sealed.as_bytes())
            # A holder that was thought gone, and tidied up, may have removed what we saw there: so look again.
            there = {known.rsplit("/", 1)[-1] for known in self.store.list(self.names.folder("objects"))}
            missing = {file: entry for file, entry in self._objects(sealed) if entry[0] not in there}
        return cost

    def _objects(self, sealed: ReplicaManifest) -> Iterator[tuple[str, Entry]]:
        """Each content once."""
        seen: set[str] = set()
        for file, entry in sorted(sealed.files.items()):
            if entry[0] not in seen:
                seen.add(entry[0])
                yield file, entry


def read_replica_manifest(store: ReplicaStore, name: str) -> ReplicaManifest:
    """A document of a mirror. Raises DamagedFileError when there is none, or it is unreadable."""
    data = store.read(name)
    if data is None:
        raise DamagedFileError(f"{name}: is not there any more")
    return ReplicaManifest.from_bytes(data, name)


def fetch_sealed(
    store: ReplicaStore,
    names: RunObjectNames,
    sealed: ReplicaManifest,
    target: Path,
    damaged: set[str],
    beat: Callable[[int], None],
) -> None:
    """Make the sealed directory anew; one that is there already, undamaged, is left as it is.

    Args:
        store: where it comes from.
        names: of the run.
        sealed: what it is to hold.
        target: its name here.
        damaged: gets the digests of objects that are not what they are called.
        beat: told of the bytes of each piece that came; may raise, and then nothing is left.

    Raises:
        DamagedFileError: something of it is missing in the mirror, or damaged; nothing of it is left.
        OSError: the disk has no room for it, or fails.
        MirrorError: the mirror does not answer.
    """
    try:
        if files.verify_sealed(target, sealed.kind).files == sealed.files:
            return
    except DamagedFileError:
        pass  # or not there
    files.make_directory(target.parent)
    disk.require_space(target.parent, sealed.size_bytes)
    with files.sealed_directory(target, sealed.kind, sealed.files) as scratch:
        have: dict[str, Path] = {}
        for file, entry in sorted(sealed.files.items()):
            path = scratch / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if entry[0] in have:
                files.link_or_copy(have[entry[0]], path)
                continue
            try:
                store.fetch(names.object(entry[0]), path, entry, beat)
            except DamagedFileError:
                damaged.add(entry[0])
                raise
            disk.grant_read(path, like=scratch)
            disk.fsync(path)
            have[entry[0]] = path


# A journal in a mirror: pieces of it by holder, begin and end; few pieces, however long the run.
#
# A holder goes on from some bytes of the journal of a holder before it (its claim says which: `goes_on`), and adds its
# own. Journals are only ever appended to, so those bytes stay what they are, whatever that earlier holder still
# writes.
# Eight pieces of about one size become one of the next: a piece is sent again three or four times in a run of a day.
#
# Machines that train together have a journal each. One that becomes the holder while it trains goes on from all that
# the
# holder before it has told, with what it has itself told since.

MERGED = 8
"""So many pieces of one level become one."""
LARGEST_BYTES = 64 << 20
"""Of one piece."""
LOOKS = 5
"""At pieces that are being put together meanwhile."""

_Pieces = Mapping[int, Sequence[tuple[int, int]]]
"""Start and end of pieces, by token."""


@dataclass(frozen=True)
class JournalStart:
    """Where what a holder adds to a journal begins."""

    origin: Origin | None = None
    """What it goes on from."""
    start: int = 0
    """Bytes of the journal on its disk that are not added: the mirror has them, or the same told by another machine."""
    shift: int = 0
    """Added to a place in the journal on its disk, this is the place in the mirror's."""


@dataclass(frozen=True)
class RecoveredJournal:
    """What a mirror has of a journal."""

    content: bytes
    origin: Origin | None
    """Whose it is, and how many bytes; None: nobody has written any."""


def recover_journal(store: ReplicaStore, names: RunObjectNames) -> RecoveredJournal:
    """The journal of the last holder who wrote one: its longest beginning without a gap."""
    pieces: _Pieces = {}
    for _ in range(LOOKS):
        before, pieces = pieces, _list_pieces(store, names)
        if not pieces:
            return RecoveredJournal(b"", None)
        token, gone = max(pieces), set[str]()
        content = _read_holder_journal(token, store, names, pieces, gone)
        if not gone or pieces == before:
            break
    return RecoveredJournal(content, (token, len(content)))


def _list_pieces(store: ReplicaStore, names: RunObjectNames) -> _Pieces:
    found: dict[int, list[tuple[int, int]]] = {}
    for name in sorted(store.list(names.folder("journal"))):
        if len(numbers := parse_numbers(name)) == 3:
            found.setdefault(numbers[0], []).append((numbers[1], numbers[2]))
    return found


def _read_holder_journal(
    token: int, store: ReplicaStore, names: RunObjectNames, pieces: _Pieces, gone: set[str]
) -> bytes:
    """The journal as this holder had it: what it went on from, then its own pieces.

    `gone` gets the names of pieces that could not be read: a holder may have put them together since we looked.
    """
    content, origin = b"", _read_origin(token, store, names)
    if origin is not None and origin[0] < token:
        content = _read_holder_journal(origin[0], store, names, pieces, gone)[: origin[1]]
        if len(content) < origin[1]:
            return content
    return content + _read_added(ReplicaJournal(store, names, token), len(content), pieces, gone)


@dataclass(frozen=True)
class ReplicaJournal:
    """A journal in a mirror, as one of the run's holders had it."""

    store: ReplicaStore
    names: RunObjectNames
    token: int


def _read_added(journal: ReplicaJournal, place: int, pieces: _Pieces, gone: set[str]) -> bytes:
    """What the holder's own pieces tell from this place on, up to the first gap."""
    token, content = journal.token, b""
    while following := [
        (end, start)
        for start, end in pieces.get(token, ())
        if start <= place + len(content) < end and journal.names.journal(token, start, end) not in gone
    ]:
        end, start = max(following)
        found = journal.store.read(name := journal.names.journal(token, start, end))
        if found is None or len(found) != end - start:
            gone.add(name)
        else:
            content += found[place + len(content) - start :]
    return content


class ReplicaJournalReader:
    """A journal in a mirror for somebody who looks at it again and again: what was read is not read a second time."""

    def __init__(self, store: ReplicaStore, names: RunObjectNames) -> None:
        self._store, self._names = store, names
        self._token, self._length = 0, 0

    def look(self) -> tuple[bytes, bool]:
        """What is new, in whole lines; and whether it is a journal from its beginning, since another holder tells now.

        Raises MirrorError.
        """
        pieces = _list_pieces(self._store, self._names)
        if not pieces:
            return b"", False
        if max(pieces) == self._token:
            journal = ReplicaJournal(self._store, self._names, self._token)
            new = _read_added(journal, self._length, pieces, set())  # what was put together meanwhile: the next time
            self._length += len(new)
            return new, False
        found = recover_journal(self._store, self._names)
        if found.origin is None:
            return b"", False
        self._token, self._length = found.origin
        return found.content, True


def _read_origin(token: int, store: ReplicaStore, names: RunObjectNames) -> Origin | None:
    for key in lease.list_keys(store, names):
        if (
            key[0] == token
            and (claim := LeaseRecord.from_bytes(store.read(names.claim(*key)) or b""))
            and claim.goes_on
        ):
            return claim.goes_on
    return None


def join_journal(path: Path, store: ReplicaStore, names: RunObjectNames) -> JournalStart:
    """How a journal here goes on from the mirror's, which may be another machine's of the same training.

    A journal that begins with the mirror's goes on where that ends. Of another one goes on what follows the last step
    that the mirror's tells as well, with the same figures: what was done anew, and came out otherwise, is told anew.
    """
    found = recover_journal(store, names)
    if found.origin is None:
        return JournalStart()
    length = len(found.content)
    if _read_range(path, 0, length) == found.content:
        return JournalStart(found.origin, length)
    with tempfile.TemporaryDirectory(prefix="ratchet-journal-") as folder:
        theirs = Path(folder, path.name)
        theirs.write_bytes(found.content)
        told = {figures for event in JournalReader(theirs).read() if (figures := _step_figures(event))}
    reader, start = JournalReader(path), 0
    for event in reader.read():
        if _step_figures(event) in told:
            start = reader.offset
    return JournalStart(found.origin, start, length - start)


def _step_figures(event: JournalEvent) -> str:
    """What all machines tell alike of a step; empty for what is no step."""
    if event.kind not in ("step", "skipped"):
        return ""
    return repr([event.data.get(key) for key in ("step", "loss", "grad_norm", "batch", "action")])


class JournalUploader:
    """Copies what was appended to a journal since the last time.

    Args:
        path: the journal.
        store: where to.
        names: of the run.
        token: of its holder.
        beginning: what of it is not copied.
    """

    def __init__(
        self, path: Path, store: ReplicaStore, names: RunObjectNames, token: int, beginning: JournalStart
    ) -> None:
        self._path, self._store, self._names, self._token = path, store, names, token
        self._shift, start = beginning.shift, beginning.start
        self._pieces: list[tuple[int, int, int]] = []
        """Start, end, level."""
        self._digest = hashlib.sha256(_read_range(path, 0, start))
        self.end = start
        """Bytes of the journal that are in the mirror."""
        self.bytes_sent = 0

    @property
    def sha256(self) -> str:
        """Of the bytes that are in the mirror."""
        return self._digest.hexdigest()

    def behind(self) -> int:
        """Bytes, up to the last whole line, that are not in the mirror."""
        return len(self._new())

    def copy(self) -> int:
        """Copy what is new, up to the last whole line; returns the bytes sent. Raises MirrorError."""
        sent = 0
        while new := self._new():
            start, end = self.end, self.end + len(new)
            self._store.write(self._name(start, end), new)
            self._digest.update(new)
            self.end = end
            self._pieces.append((start, end, 0))
            sent += len(new) + self._merge()
        self.bytes_sent += sent
        return sent

    def _new(self) -> bytes:
        data = _read_range(self._path, self.end, LARGEST_BYTES)
        return data[: data.rfind(b"\n") + 1]

    def _merge(self) -> int:
        """Put pieces together while there are enough of one level at the end; returns the bytes sent."""
        sent = 0
        while len(last := self._pieces[-MERGED:]) == MERGED and len({level for _, _, level in last}) == 1:
            start, end, level = last[0][0], last[-1][1], last[0][2] + 1
            if end - start > LARGEST_BYTES:
                break
            self._store.write(self._name(start, end), _read_range(self._path, start, end - start))
            self._pieces[-MERGED:] = [(start, end, level)]
            sent += end - start
            self._store.remove([self._name(first, second) for first, second, _ in last])
        return sent

    def _name(self, start: int, end: int) -> str:
        return self._names.journal(self._token, start + self._shift, end + self._shift)


def _read_range(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(start, os.SEEK_SET)
        return stream.read(length)
