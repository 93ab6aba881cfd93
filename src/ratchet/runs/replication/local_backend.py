"""A mirror in a folder: another disk of this machine, or one that several machines share."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

from ratchet.runs.replication.backend import PIECE_BYTES, Trying, WrongBytesError, damaged
from ratchet.runs.replication.throttle import Progress, Throttle, Watch
from ratchet.storage import disk, files
from ratchet.storage.files import Entry

PARTIAL = files.PARTIAL
DURABLE_BYTES = 32 << 20
"""Written between two fsyncs, so that none takes long."""
OLD_S = 86_400.0
"""What has been partial for so long was left by somebody who died."""


class Folder:
    """Written aside, fsynced, read back, renamed: a name appears only with its content."""

    def __init__(self, root: Path, throttle: Throttle, watch: Watch) -> None:
        self._root = root
        self._throttle, self._watch = throttle, watch

    def reopen(self) -> None:
        """Nothing is open between calls."""

    def list(self, folder: str) -> dict[str, int]:
        return self._watch.call(lambda progress: dict(self._below(self._root / folder, progress)))

    def _below(self, folder: Path, progress: Progress) -> Iterator[tuple[str, int]]:
        for here, _, names in os.walk(folder, onerror=_unless_absent):
            progress.moved()
            for name in names:
                path = Path(here, name)
                if not name.startswith(PARTIAL):
                    try:
                        yield path.relative_to(self._root).as_posix(), path.stat().st_size
                    except FileNotFoundError:  # removed while we looked
                        continue

    def is_there(self) -> bool:
        """Whether there is such a folder; writing makes it."""
        return self._watch.call(lambda _: self._root.is_dir())

    def size(self, name: str) -> int:
        return self._watch.call(lambda _: (self._root / name).stat().st_size)

    def read(self, name: str) -> bytes:
        return self._watch.call(lambda _: (self._root / name).read_bytes())

    def piece(self, name: str, start: int) -> bytes:
        def read(_: Progress) -> bytes:
            with (self._root / name).open("rb") as stream:
                stream.seek(start)
                return stream.read(PIECE_BYTES)

        return self._watch.call(read)

    def write(self, name: str, data: bytes) -> None:
        def write(_: Progress) -> None:
            self._throttle.take(len(data))
            self._publish(self._root / name, lambda partial: files.write_blocks(partial, [[data]]))

        self._watch.call(write, slack_s=self._throttle.seconds(len(data)))

    def send(self, name: str, path: Path, entry: Entry, trying: Trying) -> int:
        def send(progress: Progress) -> int:
            target = self._root / name
            try:
                if target.stat().st_size == entry[1]:  # nothing gets this name unverified
                    return 0
            except FileNotFoundError:
                pass
            self._publish(target, lambda partial: self._copy(path, partial, entry, progress))
            return entry[1]

        return trying(f"write {name}", lambda: self._watch.call(send))

    def remove(self, name: str) -> None:
        self._watch.call(lambda _: (self._root / name).unlink())

    def tidy(self) -> None:
        """Remove what writers that died have left for more than a day, by the clock of the disk."""

        def tidy(progress: Progress) -> None:
            partials = [Path(here, name) for here, _, names in os.walk(self._root) for name in names]
            for path in (one for one in partials if one.name.startswith(PARTIAL)):
                progress.moved()
                if path.stat().st_mtime < time.time() - OLD_S:
                    path.unlink(missing_ok=True)

        self._watch.call(tidy)

    def _publish(self, target: Path, fill: Callable[[Path], None]) -> None:
        """Let `fill` write aside, then give it its name."""
        files.make_directory(target.parent)
        partial = target.parent / f"{PARTIAL}{uuid4().hex}"
        try:
            fill(partial)
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        files.fsync_directory(target.parent)

    def _copy(self, source: Path, partial: Path, entry: Entry, progress: Progress) -> None:
        unsafe = 0

        def beat() -> None:
            nonlocal unsafe
            progress.moved()
            unsafe += self._throttle.at_once_bytes
            if unsafe >= DURABLE_BYTES:
                disk.fsync(partial)
                unsafe = 0
                progress.moved()

        read = hashlib.sha256()
        files.write_blocks(partial, self._blocks(source, progress, read), beat)
        if read.hexdigest() != entry[0]:
            raise damaged(source, (read.hexdigest(), partial.stat().st_size))
        found = hashlib.sha256()
        with partial.open("rb") as stream:
            while block := stream.read(PIECE_BYTES):
                found.update(block)
                progress.moved()
        if found.hexdigest() != entry[0]:
            raise WrongBytesError("read back, it is not what was written")

    def _blocks(self, source: Path, progress: Progress, read: "hashlib._Hash") -> Iterator[files.Block]:
        with source.open("rb") as stream:
            while block := stream.read(self._throttle.at_once_bytes):
                self._throttle.take(len(block))
                read.update(block)
                progress.moved()
                yield [block]


def _unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
