"""A sealed directory in a mirror: its files lie as objects under their digests, a document of JSON says which."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Self

from ratchet.errors import DamagedError
from ratchet.runs.replication.object_names import RunNames
from ratchet.runs.replication.store import Store
from ratchet.storage import disk, files
from ratchet.storage.files import Entry

FORMAT = 1
_GARBAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Sealed:
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
        """Raises DamagedError when it is no such document, or names a file outside its directory."""
        try:
            raw = json.loads(data)
            if (found := raw["format"]) != FORMAT:
                raise DamagedError(
                    f"{where}: format {found}, this version reads {FORMAT}; use the version that wrote it"
                )
            entries = {str(name): (str(e["sha256"]), int(e["bytes"])) for name, e in raw["files"].items()}
            for name, (sha, _) in entries.items():
                if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or not _is_digest(sha):
                    raise ValueError(f"file {name!r} of digest {sha!r}")
            return cls(str(raw["kind"]), int(raw["step"]), entries, tuple(map(int, raw["refers_to"])))
        except _GARBAGE as error:
            raise DamagedError(f"{where}: not the document of a sealed directory ({error})") from None


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def of_checkpoint(directory: Path) -> Sealed:
    """The document of a sealed checkpoint. Raises DamagedError when it is none.

    Like State.refers_to of the training, read without its libraries: best and last good step, if they are others.
    """
    manifest = files.read_manifest(directory)
    try:
        state = json.loads((directory / "state.json").read_bytes())["state"]
        step = int(state["step"])
        others = {int(state["best_step"]), int(state["good_step"])} - {0, step}
    except (OSError, *_GARBAGE) as error:
        raise DamagedError(f"{directory}: its state is unreadable ({error})") from None
    return Sealed(manifest.kind, step, manifest.files, tuple(sorted(others)))


def of_result(directory: Path, step: int) -> Sealed:
    """The document of a sealed result. Raises DamagedError when it is none."""
    manifest = files.read_manifest(directory)
    return Sealed(manifest.kind, step, manifest.files)


@dataclass
class Sent:
    """What a copy has cost."""

    bytes_sent: int = 0
    bytes_skipped: int = 0
    """Of files that the mirror had already."""


@dataclass
class Sender:
    """Copies sealed directories to a mirror."""

    store: Store
    names: RunNames
    _done: set[str] = field(default_factory=set)

    def send(self, directory: Path, sealed: Sealed, name: str) -> Sent:
        """Copy objects, then the document; when this returns, all of it has been seen there.

        Raises:
            MirrorError: the mirror does not take it now.
            DamagedError: a file is not what was sealed.
            FileNotFoundError: the directory was removed meanwhile.
        """
        cost = Sent()
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

    def _objects(self, sealed: Sealed) -> Iterator[tuple[str, Entry]]:
        """Each content once."""
        seen: set[str] = set()
        for file, entry in sorted(sealed.files.items()):
            if entry[0] not in seen:
                seen.add(entry[0])
                yield file, entry


def read(store: Store, name: str) -> Sealed:
    """A document of a mirror. Raises DamagedError when there is none, or it is unreadable."""
    data = store.read(name)
    if data is None:
        raise DamagedError(f"{name}: is not there any more")
    return Sealed.from_bytes(data, name)


def fetch(
    store: Store, names: RunNames, sealed: Sealed, target: Path, damaged: set[str], beat: Callable[[int], None]
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
        DamagedError: something of it is missing in the mirror, or damaged; nothing of it is left.
        OSError: the disk has no room for it, or fails.
        MirrorError: the mirror does not answer.
    """
    try:
        if files.verify(target, sealed.kind).files == sealed.files:
            return
    except DamagedError:
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
            except DamagedError:
                damaged.add(entry[0])
                raise
            disk.let_read(path, like=scratch)
            disk.fsync(path)
            have[entry[0]] = path
