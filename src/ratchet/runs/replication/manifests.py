"""Sealed directories and journals in a replica.

The files of a sealed directory are stored as objects by digest; a JSON document, written last, lists them.

A journal is stored in segments, named by holder and start. The last segment grows until it has SEGMENT_BYTES. A holder
continues a number of bytes of an earlier holder's journal (`origins` of the lease) and adds its own. Journals are only
appended to, so these bytes do not change if the earlier holder writes more.

Each of several machines that train together has its own journal. A machine that becomes the holder during training
keeps all events that the previous holder has uploaded, and adds its own later events.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Self

from ratchet.errors import DamagedFileError
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.replication import lease
from ratchet.runs.replication.lease import Origin
from ratchet.runs.replication.store import FetchObject, ReplicaStore, RunObjectNames, parse_numbers
from ratchet.storage import files
from ratchet.storage.files import Entry

if TYPE_CHECKING:
    from obstore import UpdateVersion

FORMAT = 1
SEGMENT_BYTES = 1 << 18
"""Size in bytes from which a segment of a journal does not grow any more."""
MAX_UPLOAD_BYTES = 16 << 20
"""Maximum number of bytes that are added to a segment in one upload."""

_Segments = Mapping[int, Mapping[int, int]]
"""Size of each segment in bytes, by token and start offset."""
_GARBAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class ReplicaManifest:
    """Files of a sealed directory, and the checkpoints that it refers to."""

    kind: str
    """Kind of the sealed directory: `checkpoint` or `result`."""
    step: int
    files: dict[str, Entry]
    refers_to: tuple[int, ...] = ()
    """Steps of the checkpoints that this checkpoint needs."""

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.files.values())

    @property
    def digest(self) -> str:
        """Fingerprint of names and contents, equal to that of the directory's manifest."""
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
        """Parse a document. Raises DamagedFileError if it is not valid, or names a file outside its directory."""
        try:
            raw = json.loads(data)
            if (version := raw["format"]) != FORMAT:
                raise DamagedFileError(
                    f"{where}: format {version}, this version reads {FORMAT}; use the version that wrote it"
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
    """Build the document of a sealed checkpoint. Raises DamagedFileError if the directory is not a checkpoint.

    The document refers to the checkpoints of the best step and of the last good step, if these differ from the
    checkpoint's own step. They are the `required_steps` of training/train_state.py, read here without the libraries of
    training.
    """
    manifest = files.read_manifest(directory)
    try:
        state = json.loads((directory / "state.json").read_bytes())["state"]
        step = int(state["step"])
        referenced_steps = {int(state["best_step"]), int(state["rollback_step"])} - {0, step}
    except (OSError, *_GARBAGE) as error:
        raise DamagedFileError(f"{directory}: its state is unreadable ({error})") from None
    return ReplicaManifest(manifest.kind, step, manifest.files, tuple(sorted(referenced_steps)))


@dataclass
class TransferStatistics:
    """Cost of a transfer."""

    bytes_sent: int = 0
    bytes_skipped: int = 0
    """Size of the files that the replica already had."""


@dataclass(frozen=True)
class SealedDirectoryUploader:
    """Uploader of sealed directories to a replica."""

    store: ReplicaStore
    names: RunObjectNames
    confirm: Callable[[], None]
    """Called right before a document is written; raises LeaseHeldError if another machine holds the run."""

    def send(self, directory: Path, sealed: ReplicaManifest, name: str) -> TransferStatistics:
        """Upload objects, then the document. On return, the replica has listed all of these objects.

        Raises:
            LeaseHeldError: another machine holds the run; the document is not written.
            ReplicaError: the replica cannot be written.
            DamagedFileError: a file differs from the manifest.
            FileNotFoundError: the directory was removed during the upload.
        """
        cost = TransferStatistics()
        missing = dict(self._objects(sealed))
        while missing:
            for file, (sha, size) in missing.items():
                sent = self.store.send(self.names.object(sha), directory / file, (sha, size))
                cost.bytes_sent += sent
                cost.bytes_skipped += max(0, size - sent)
            self.confirm()
            self.store.publish(name, sealed.as_bytes())
            # A former holder that wakes up may have collected garbage and removed one of these objects: list again.
            listed_digests = {known.rsplit("/", 1)[-1] for known in self.store.list(self.names.folder("objects"))}
            missing = {file: entry for file, entry in self._objects(sealed) if entry[0] not in listed_digests}
        return cost

    def _objects(self, sealed: ReplicaManifest) -> Iterator[tuple[str, Entry]]:
        """Yield one file of each content."""
        seen: set[str] = set()
        for file, entry in sorted(sealed.files.items()):
            if entry[0] not in seen:
                seen.add(entry[0])
                yield file, entry


def read_replica_manifest(store: ReplicaStore, name: str) -> ReplicaManifest:
    """Read a document of a replica. Raises DamagedFileError if it is missing or unreadable."""
    data = store.read(name)
    if data is None:
        raise DamagedFileError(f"{name}: was removed")
    return ReplicaManifest.from_bytes(data, name)


def fetch_sealed(
    fetch: FetchObject,
    names: RunObjectNames,
    sealed: ReplicaManifest,
    target: Path,
    damaged: set[str],
    on_bytes: Callable[[int], None],
) -> None:
    """Restore a sealed directory. If it exists and is undamaged, it is left unchanged.

    Args:
        fetch: downloads an object to a file, as `ReplicaStore.fetch` does.
        names: object names of the run.
        sealed: the expected files.
        target: path of the restored directory.
        damaged: receives the digests of objects whose content is damaged.
        on_bytes: called with the size of each received piece. If it raises, nothing is left on the disk.

    Raises:
        DamagedFileError: an object is missing or damaged; nothing is left on the disk.
        OSError: the disk is full, or fails.
        ReplicaError: the replica does not answer.
    """
    try:
        if files.verify_sealed(target, sealed.kind).files == sealed.files:
            return
    except DamagedFileError:
        pass  # the directory is damaged, or does not exist
    files.make_directory(target.parent)
    files.require_space(target.parent, sealed.size_bytes)
    with files.sealed_directory(target, sealed.kind, sealed.files) as scratch:
        fetched: dict[str, Path] = {}
        for file, entry in sorted(sealed.files.items()):
            path = scratch / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if entry[0] in fetched:
                files.link_or_copy(fetched[entry[0]], path)
                continue
            try:
                fetch(names.object(entry[0]), path, entry, on_bytes)
            except DamagedFileError:
                damaged.add(entry[0])
                raise
            files.grant_read(path, like=scratch)
            files.fsync(path)
            fetched[entry[0]] = path


@dataclass(frozen=True)
class JournalStart:
    """Start of a holder's part of a journal."""

    origin: Origin | None = None
    """Part of an earlier holder's journal that this holder's journal continues."""
    start: int = 0
    """Number of bytes at the start of the local journal that are not uploaded, because the replica has these bytes, or
    has the same events from another machine."""
    shift: int = 0
    """Offset of an event in the replica's journal minus its offset in the local journal."""


@dataclass(frozen=True)
class RecoveredJournal:
    """Journal recovered from a replica."""

    content: bytes
    origin: Origin | None
    """Token of the journal's holder, and length of the journal in bytes; None: the replica has no journal."""


def recover_journal(store: ReplicaStore, names: RunObjectNames) -> RecoveredJournal:
    """Recover the journal of the last holder that uploaded one, up to the first gap."""
    segments = _list_segments(store, names)
    if not segments:
        return RecoveredJournal(b"", None)
    claim, token = lease.read_lease(store, names), max(segments)
    origins = claim.origins if claim else {}
    parts = [(token, -1)]
    """Tokens and lengths of the parts, the last one first; -1: the whole part."""
    while (origin := origins.get(parts[-1][0])) and origin[0] < parts[-1][0]:
        parts.append(origin)
    content = b""
    for holder, length in reversed(parts):
        content += _read_added(store, names, holder, len(content), segments)
        if length >= 0 and len(content) < length:
            break
        content = content if length < 0 else content[:length]
    return RecoveredJournal(content, (token, len(content)))


def _list_segments(store: ReplicaStore, names: RunObjectNames) -> _Segments:
    segments: dict[int, dict[int, int]] = {}
    for name, size in sorted(store.list(names.folder("journal")).items()):
        if len(numbers := parse_numbers(name)) == 2:
            segments.setdefault(numbers[0], {})[numbers[1]] = size
    return segments


def _read_added(store: ReplicaStore, names: RunObjectNames, token: int, offset: int, segments: _Segments) -> bytes:
    """Read the bytes of a holder's own segments from an offset to the first gap."""
    content = b""
    for start, size in sorted(segments.get(token, {}).items()):
        at = offset + len(content)
        if start <= at < start + size:
            content += store.read_from(names.journal(token, start), at - start, size) or b""
    return content


class ReplicaJournalReader:
    """Reader of a growing journal in a replica. It returns each byte only once while the holder stays the same."""

    def __init__(self, store: ReplicaStore, names: RunObjectNames) -> None:
        self._store, self._names = store, names
        self._token, self._length = 0, 0

    def read_new(self) -> tuple[bytes, bool]:
        """Return the new complete lines, and whether they are the whole journal because the holder has changed.

        Raises ReplicaError.
        """
        segments = _list_segments(self._store, self._names)
        if not segments:
            return b"", False
        if max(segments) == self._token:
            new = _read_added(self._store, self._names, self._token, self._length, segments)
            self._length += len(new)
            return new, False
        recovered = recover_journal(self._store, self._names)
        if recovered.origin is None:
            return b"", False
        self._token, self._length = recovered.origin
        return recovered.content, True


def join_journal(path: Path, store: ReplicaStore, names: RunObjectNames) -> JournalStart:
    """Find the part of the local journal that continues the journal in the replica, which another machine of the
    training may have written.

    If the local journal begins with the whole journal of the replica, the part is the rest of the local journal.
    Otherwise the part begins after the last step that both journals contain with the same figures (`_step_figures`).
    Steps that were repeated with other results are uploaded again.
    """
    recovered = recover_journal(store, names)
    if recovered.origin is None:
        return JournalStart()
    length = len(recovered.content)
    if _read_range(path, 0, length) == recovered.content:
        return JournalStart(recovered.origin, length)
    with tempfile.TemporaryDirectory(prefix="ratchet-journal-") as folder:
        remote_path = Path(folder, path.name)
        remote_path.write_bytes(recovered.content)
        known_steps = {figures for event in JournalReader(remote_path).read() if (figures := _step_figures(event))}
    reader, start = JournalReader(path), 0
    for event in reader.read():
        if _step_figures(event) in known_steps:
            start = reader.offset
    return JournalStart(recovered.origin, start, length - start)


def _step_figures(event: JournalEvent) -> str:
    """Return the figures of a step that are equal on all machines; empty for other events."""
    if event.kind not in ("step", "step_skipped"):
        return ""
    return repr([event.data.get(key) for key in ("step", "loss", "grad_norm", "batch", "action")])


class JournalUploader:
    """Uploader of a growing journal: each call sends the lines that were appended since the last call.

    Args:
        path: the journal.
        store: the replica.
        names: object names of the run.
        token: token of the holder.
        journal_start: start of this holder's part of the journal; the bytes before it are not uploaded.
    """

    def __init__(
        self, path: Path, store: ReplicaStore, names: RunObjectNames, token: int, journal_start: JournalStart
    ) -> None:
        self._path, self._store, self._names, self._token = path, store, names, token
        self._shift, start = journal_start.shift, journal_start.start
        self._segment_start = start
        self._version: UpdateVersion | None = None
        """Version of the segment that grows."""
        self._digest = hashlib.sha256(_read_range(path, 0, start))
        self.end = start
        """Number of bytes of the local journal that are in the replica."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes that are in the replica."""
        return self._digest.hexdigest()

    def behind(self) -> int:
        """Return the number of bytes up to the last complete line that are not in the replica."""
        return len(self._read_new())

    def copy(self) -> int:
        """Upload new bytes up to the last complete line. Return the bytes sent. Raises ReplicaError."""
        sent = 0
        while new := self._read_new():
            if self.end - self._segment_start >= SEGMENT_BYTES:
                self._segment_start, self._version = self.end, None
            start, end = self._segment_start, self.end + len(new)
            content = _read_range(self._path, start, end - start)
            name = self._names.journal(self._token, start + self._shift)
            self._version = self._store.publish(name, content, self._version)
            self._digest.update(new)
            self.end = end
            sent += len(content)
        return sent

    def _read_new(self) -> bytes:
        data = _read_range(self._path, self.end, MAX_UPLOAD_BYTES)
        return data[: data.rfind(b"\n") + 1]


def _read_range(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(start, os.SEEK_SET)
        return stream.read(length)
