"""Atomic files and sealed directories: the only code that renames or fsyncs.

A sealed directory is complete or absent: it is written aside, every file and folder is fsynced, the manifest (SHA-256
and size of each file) is written last, and one rename publishes it. `verify_sealed` reads it all back. The order
follows T. S. Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014): nothing is renamed before its
contents are durable, and nothing is removed before the rename that replaces it is. `before` is the seam through which
disks are made to fail: called before every operation here that changes one, it may raise OSError, wait, or kill the
process (runs/fault_injection/injection.py).
"""

import glob
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ratchet.errors import DamagedFileError
from ratchet.storage import digests, disk

MANIFEST = "manifest.json"
MANIFEST_FORMAT = 1
FOREIGN = "registered_model_meta"
"""MLflow writes it into the folder of a version that it opens; it belongs to no seal, and nothing here reads it."""
PARTIAL = disk.PARTIAL
"""What is being written, or removed: nobody may read it."""
DISPLACED = ".displaced-"
"""What stood under a name until the new one is there; only where names cannot be exchanged at once."""

Operation = Literal["mkdir", "write", "fsync", "link", "rename", "unlink"]
Entry = tuple[str, int]
"""SHA-256 and size in bytes of a file."""
Block = Iterable[bytes | memoryview]
"""What is written at once."""


def _ignore_beat(*about: object) -> None:
    """Nobody wants to know."""


before: Callable[[Operation, Path], None] = _ignore_beat
"""Called with what is about to happen, and to which path (of a rename: the new name). Replace it to imitate nature."""


@dataclass(frozen=True)
class Manifest:
    """What a sealed directory holds: `files` maps relative names to (SHA-256, size in bytes)."""

    kind: str
    files: dict[str, Entry]

    @property
    def digest(self) -> str:
        """Fingerprint of names and contents."""
        return digests.hash_files({name: sha for name, (sha, _) in self.files.items()})

    @property
    def size_bytes(self) -> int:
        """Sum of the sizes of the files."""
        return sum(size for _, size in self.files.values())


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    before("fsync", path)
    disk.fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def make_directory(path: Path) -> None:
    """Make a folder and those above it that are missing; their names are durable."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        before("mkdir", folder)
        folder.mkdir(exist_ok=True)
        fsync_directory(folder.parent)


def write_blocks(path: Path, blocks: Iterable[Block], beat: Callable[[], None] = _ignore_beat) -> None:
    """Write a new file and fsync it (not its name: whoever seals or renames it does).

    Args:
        path: the file; one that is there is written over, so it must be no sealed one.
        blocks: its contents.
        beat: called after each block.
    """
    before("write", path)
    with disk.name_file_in_errors(path), path.open("wb") as stream:
        for block in blocks:
            before("write", path)
            stream.writelines(block)
            stream.flush()
            beat()
        before("fsync", path)
        os.fsync(stream.fileno())


def _remove_tree(root: Path) -> None:
    """Remove a file, or a folder and all in it (links themselves, not what they lead to)."""
    if not root.is_dir() or root.is_symlink():
        before("unlink", root)
        root.unlink()
        return
    for path in list(root.iterdir()):
        _remove_tree(path)
    before("unlink", root)
    root.rmdir()


def _clear(path: Path, error: BaseException) -> None:
    """Remove what a failed writer made; if even that fails, say so in a note of its error."""
    try:
        if os.path.lexists(path):
            _remove_tree(path)
    except OSError as second:
        error.add_note(f"{path} is left behind until the next start: {second}")


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`: after a crash either the old or the new bytes are there, never a mixture."""
    data = content.encode() if isinstance(content, str) else content
    make_directory(path.parent)
    partial = path.parent / f"{PARTIAL}{path.name}-{os.getpid()}"
    try:
        write_blocks(partial, [[data]])
        before("rename", path)
        partial.replace(path)
    except BaseException as error:
        _clear(partial, error)
        raise
    fsync_directory(path.parent)


def json_bytes(value: Any) -> bytes:
    """JSON for people and machines: sorted, indented, NaN refused; equal values give equal bytes."""
    return (json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Write `json_bytes` of a value, atomically."""
    write_atomic(path, json_bytes(value))


def _list_files(root: Path) -> list[str]:
    own = (root / MANIFEST, root / FOREIGN)  # those of sealed directories inside are ordinary files of this one
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and p not in own)


@contextmanager
def sealed_directory(target: Path, kind: str, known: Mapping[str, Entry] | None = None) -> Iterator[Path]:
    """Yield a scratch directory; on a clean exit seal it and publish it as `target`, on an error leave no trace.

    An existing `target` is replaced: readers see the old one or the new one (for an instant none, on file systems
    that cannot exchange two names; see `publish_directory`).

    Args:
        target: the final name.
        kind: what it is, for `verify_sealed`.
        known: see `seal_directory`; may be filled while the directory is.
    """
    make_directory(target.parent)
    _remove_orphans(target)
    scratch = target.parent / f"{PARTIAL}{target.name}-{os.getpid()}"
    try:
        before("mkdir", scratch)
        scratch.mkdir()
        yield scratch
        seal_directory(scratch, kind, known)
        publish_directory(scratch, target)
    except BaseException as error:
        _clear(scratch, error)
        raise


def _remove_orphans(target: Path) -> None:
    """Delete what processes that were killed left of earlier attempts at `target`, or put it back."""
    for prefix in (PARTIAL, DISPLACED):
        for path in target.parent.glob(f"{prefix}{glob.escape(target.name)}-*"):
            pid = path.name.removeprefix(f"{prefix}{target.name}-").removeprefix("doomed-")
            if pid.isdigit() and (pid == str(os.getpid()) or not Path(f"/proc/{pid}").exists()):
                _remove_or_restore(path)


def seal_directory(directory: Path, kind: str, known: Mapping[str, Entry] | None = None) -> Manifest:
    """Fsync every file and folder below `directory`, then write the manifest; returns it.

    Args:
        directory: what to seal.
        kind: what it is, for `verify_sealed`.
        known: durable files whose digest the caller vouches for: of `write_blocks`, or links to sealed ones; not read.
    """
    entries: dict[str, Entry] = {}
    for name in _list_files(directory):
        path = directory / name
        if known is not None and name in known:
            entries[name] = known[name]
        else:
            before("fsync", path)
            disk.grant_read(path, like=directory)
            disk.fsync(path)
            entries[name] = (digests.hash_file(path), path.stat().st_size)
    for folder in sorted((p for p in directory.rglob("*") if p.is_dir()), reverse=True):
        fsync_directory(folder)
    listed = {name: {"sha256": sha, "bytes": size} for name, (sha, size) in entries.items()}
    write_json(directory / MANIFEST, {"format": MANIFEST_FORMAT, "kind": kind, "files": listed})
    return Manifest(kind, entries)


def publish_directory(scratch: Path, target: Path) -> None:
    """Give a sealed scratch directory its final name, durably, in the place of what had it.

    Where the file system can, both names are exchanged at once (`disk.exchange_names`). Elsewhere the old one steps
    aside; a crash in that instant leaves no `target`, and the next writer (or `remove_partials`) puts the old one back.
    """
    if not os.path.lexists(target):
        before("rename", target)
        scratch.rename(target)
        fsync_directory(target.parent)
        return
    before("rename", target)
    old = scratch
    if not disk.exchange_names(scratch, target):
        old = target.parent / f"{DISPLACED}{target.name}-{os.getpid()}"
        target.rename(old)
        try:
            before("rename", target)
            scratch.rename(target)
        except BaseException:
            old.rename(target)
            raise
    fsync_directory(target.parent)  # first: a machine that dies must not lose the exchange and keep the removal
    _remove_tree(old)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a sealed directory, without checking the files. Raises DamagedFileError when there is none."""
    path = directory / MANIFEST
    try:
        raw = json.loads(content := path.read_bytes())
        if (found := raw["format"]) != MANIFEST_FORMAT:
            raise DamagedFileError(
                f"{path}: manifest format {found}, this version reads {MANIFEST_FORMAT}; use the version that wrote it"
            )
        if content != json_bytes(raw):
            raise ValueError("not the bytes that were written")
        entries = {name: (str(e["sha256"]), int(e["bytes"])) for name, e in raw["files"].items()}
        return Manifest(str(raw["kind"]), entries)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedFileError(
            f"{directory}: not sealed (no {MANIFEST}); it was never finished, make it again"
        ) from None
    except OSError as error:
        raise DamagedFileError(f"{path}: cannot be read ({error.strerror}); make the directory again") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedFileError(f"{path}: unreadable manifest ({error}); make the directory again") from None


def verify_sealed(directory: Path, kind: str | None = None) -> Manifest:
    """Check every byte of a sealed directory against its manifest.

    Raises:
        DamagedFileError: names the first file that is missing, unreadable, of another size or content, or not in the
            manifest.
    """
    manifest = read_manifest(directory)
    if kind is not None and manifest.kind != kind:
        raise DamagedFileError(f"{directory}: sealed as {manifest.kind!r}, expected {kind!r}")
    if extra := sorted(set(_list_files(directory)) - set(manifest.files)):
        names = str(directory / extra[0]) + (f" and {len(extra) - 1} more" if extra[1:] else "")
        left = " (`map` of `datasets` left it)" if Path(extra[0]).match("cache-*.arrow") else ""
        raise DamagedFileError(f"{names}: not named in the manifest{left}; remove, or make the directory again")
    for name, entry in manifest.files.items():
        try:
            _check_file(directory / name, entry)
        except OSError as error:  # a bad sector is damage
            raise DamagedFileError(f"{directory / name}: cannot be read ({error.strerror})") from None
    return manifest


def _check_file(path: Path, entry: Entry) -> None:
    sha, size = entry
    if not path.is_file():
        raise DamagedFileError(f"{path}: missing although the manifest names it")
    if path.stat().st_size != size:
        raise DamagedFileError(f"{path}: {path.stat().st_size} bytes, the manifest says {size}")
    if digests.hash_file(path) != sha:
        raise DamagedFileError(f"{path}: content differs from the manifest (SHA-256)")


def link_file(source: Path, target: Path) -> bool:
    """Give a sealed (durable, never again written) file a second name; False where the file system cannot.

    Whether the source is undamaged is for the caller to know.
    """
    before("link", target)
    try:
        os.link(source, target)
    except OSError:  # another file system, one without links, too many links: the caller writes, and learns of the rest
        return False
    return True


def link_or_copy(source: Path, target: Path) -> None:
    """Put sealed files elsewhere without using space twice; copy, durably, where they cannot be linked."""
    make_directory(target.parent)
    if os.path.lexists(target):
        _remove_tree(target)  # copying over it would write into the sealed file that it may be a link to
    if link_file(source, target):
        return
    before("write", target)
    shutil.copyfile(source, target)
    before("fsync", target)
    disk.fsync(target)


def link_tree(source: Path, target: Path) -> None:
    """`link_or_copy` for every file below `source`, its manifest included."""
    for path in sorted(source.rglob("*")):
        if path.is_file():
            link_or_copy(path, target / path.relative_to(source))


def remove_sealed(directory: Path) -> None:
    """Remove a directory: renamed aside first, so that a crash never leaves half of it under its name."""
    doomed = directory.parent / f"{PARTIAL}{directory.name}-doomed-{os.getpid()}"
    if doomed.exists():
        _remove_tree(doomed)
    before("rename", doomed)
    directory.rename(doomed)
    fsync_directory(directory.parent)
    _remove_tree(doomed)


def remove_partials(directory: Path) -> None:
    """Delete what writers that died left behind, or put it back. Only for whoever holds the directory's lock."""
    for prefix in (PARTIAL, DISPLACED):
        for path in list(directory.glob(f"{prefix}*")):
            _remove_or_restore(path)


def _remove_or_restore(left: Path) -> None:
    """Of what stepped aside for a new one: back to its name if the new one did not come, else gone."""
    if left.name.startswith(DISPLACED):
        target = left.parent / left.name.removeprefix(DISPLACED).rsplit("-", 1)[0]
        if not target.exists():
            before("rename", target)
            left.rename(target)
            fsync_directory(left.parent)
            return
    _remove_tree(left)
