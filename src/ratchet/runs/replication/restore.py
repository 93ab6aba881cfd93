"""Restores a run from a replica, with its progress. A request to stop interrupts a download."""

import json
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ratchet.config.units import format_bytes
from ratchet.errors import DamagedFileError, InterruptedRunError, ReplicaError, SettingsError
from ratchet.runs.directory import CHECKPOINT, BaseRunSpec, RunDirectory, RunPaths, spec_identity
from ratchet.runs.replication import manifests
from ratchet.runs.replication.lease import Origin
from ratchet.runs.replication.manifests import ReplicaManifest
from ratchet.runs.replication.store import ReplicaStore, RunObjectNames, parse_numbers
from ratchet.storage import files
from ratchet.storage.files import Entry
from ratchet.storage.progress import report_progress
from ratchet.storage.records.base import find_differing_keys

RESTORING = "restoring"
"""Name of the file in a run directory that exists while a restore has moved the local state aside."""
SUPERSEDED = "superseded-"
"""Prefix of local checkpoints and journals that were replaced by those of the replica. Only the last replaced set is
kept."""


class DownloadProgress:
    """Progress of downloads, one sealed directory at a time.

    Args:
        run_id: the run.
        stopping: called at each received piece; returns whether to stop.
    """

    def __init__(self, run_id: str, stopping: Callable[[], bool]) -> None:
        self._run_id, self._stopping = run_id, stopping
        self._what, self._expected_bytes, self._received_bytes = "", 0, 0

    def start(self, what: str, size: int) -> None:
        """Start counting the `size` bytes of `what`."""
        self._what, self._expected_bytes, self._received_bytes = what, size, 0

    def receive(self, count: int) -> None:
        """Count received bytes. Raises InterruptedRunError if `stopping` returns True."""
        if self._stopping():
            raise InterruptedRunError(
                f"run {self._run_id}: stopped while fetching from its replica; run it again to resume"
            )
        # Damaged pieces are received again, so the sum may exceed the expected bytes.
        self._received_bytes = min(self._expected_bytes, self._received_bytes + count)
        report_progress(f"{self._what} from the replica", self._received_bytes, self._expected_bytes, "bytes")


@dataclass(frozen=True)
class RestoreSource:
    """A replica to restore from, with the problems found."""

    store: ReplicaStore
    names: RunObjectNames
    progress: DownloadProgress
    notices: list[str] = field(default_factory=list)
    """Messages about what was skipped, and why."""
    damaged: set[str] = field(default_factory=set)
    """Digests of damaged objects. Their content is uploaded again only after they are removed."""
    mirror: ReplicaStore | None = None
    """`machine.replica_mirror`. It may lack objects, because the storage service copies them later. Their names are
    digests, so it cannot have an old content of one."""
    mirrored: list[int] = field(default_factory=list)
    """Sizes in bytes of the files that the mirror had."""
    mirror_failures: list[ReplicaError] = field(default_factory=list)
    """Error of the mirror. After one it is not asked again."""

    def fetch(self, sealed: ReplicaManifest, target: Path) -> None:
        """Fetch a sealed directory as `manifests.fetch_sealed` does. Also raises InterruptedRunError."""
        self.progress.start(f"{sealed.kind} of step {sealed.step}", sealed.size_bytes)
        manifests.fetch_sealed(self._fetch_object, self.names, sealed, target, self.damaged, self.progress.receive)
        if self.mirror is not None:
            self.notices.append(
                f"{sealed.kind} of step {sealed.step}: {format_bytes(sum(self.mirrored))} read from the mirror "
                f"{self.mirror.display_url}"
            )
            self.mirrored.clear()

    def _fetch_object(self, name: str, path: Path, entry: Entry, on_bytes: Callable[[int], None]) -> None:
        """Fetch an object from the mirror; from the replica if the mirror lacks it, or does not answer."""
        if self.mirror is not None and not self.mirror_failures:
            try:
                with suppress(DamagedFileError):
                    self.mirror.fetch(name, path, entry, on_bytes)
                    self.mirrored.append(entry[1])
                    return
            except ReplicaError as error:
                self.mirror_failures.append(error)
                self.notices.append(f"the mirror is not used: {error}")
        self.store.fetch(name, path, entry, on_bytes)


@dataclass(frozen=True)
class RestoreResult:
    """Result of a restore."""

    step: int | None
    """Step of the restored checkpoint; None: the replica has no complete checkpoint."""
    steps: tuple[int, ...]
    """Steps of the restored checkpoint and of the checkpoints that it refers to."""
    origin: Origin | None
    """Token of the holder whose journal was restored, and length of this journal in bytes; None: no journal was
    restored."""
    has_kept_local: bool = False
    """Whether the local state was kept, because the replica has no complete checkpoint."""


def require_same_spec(store: ReplicaStore, names: RunObjectNames, spec: BaseRunSpec) -> bool:
    """Return whether the replica has this run. Raises SettingsError if it has another run under this id."""
    data = store.read(names.spec)
    if data is None:
        if unknown_objects := sorted(store.list(names.folder("objects"))):
            raise SettingsError(
                f"machine.replica: {unknown_objects[0]} is there, but no {names.spec}: this is not a replica of a run, "
                f"or a part was removed; set another replica, or run `ratchet reset --replica {names.run_id}`"
            )
        return False
    local_spec = spec.model_dump(mode="json")
    try:
        differences = find_differing_keys(spec_identity(json.loads(data)), spec_identity(local_spec))
    except (ValueError, TypeError, AttributeError):
        raise SettingsError(
            f"machine.replica: {names.spec} is not the spec of a run; set another replica, or run "
            f"`ratchet reset --replica {names.run_id}`"
        ) from None
    if differences:
        raise SettingsError(
            f"machine.replica: {names.spec} belongs to another run (differs in {', '.join(differences)}), written by "
            "another version or project; set another replica"
        )
    return True


def find_newest_step(store: ReplicaStore, names: RunObjectNames) -> tuple[int, int]:
    """Return token and step of the last checkpoint in the replica; (0, 0) without one."""
    return max(_list_checkpoints(store, names), default=(0, 0))


def has_result(store: ReplicaStore, names: RunObjectNames) -> bool:
    """Return whether the replica has a complete result, judged by names and sizes of its objects."""
    sizes = {name.rsplit("/", 1)[-1]: size for name, size in store.list(names.folder("objects")).items()}
    for name in store.list(names.folder("result")):
        for token in parse_numbers(name):
            with suppress(DamagedFileError):
                entries = manifests.read_replica_manifest(store, names.result(token)).files.values()
                if all(sizes.get(sha) == size for sha, size in entries):
                    return True
    return False


def restore_result(run: RunDirectory, source: RestoreSource) -> int | None:
    """Fetch the sealed result. Return its token; None if the replica has no complete result."""
    store, names = source.store, source.names
    for token in sorted(
        (n[0] for name in store.list(names.folder("result")) if (n := parse_numbers(name))), reverse=True
    ):
        try:
            source.fetch(manifests.read_replica_manifest(store, names.result(token)), run.paths.result)
        except DamagedFileError as error:
            source.notices.append(f"the result in the replica is skipped: {error}")
        else:
            restore_journal(run, store, names)
            return token
    return None


def restore_checkpoint(paths: RunPaths, source: RestoreSource) -> tuple[int, ...]:
    """Fetch the newest complete checkpoint by token, then by step. The checkpoints that it refers to are fetched first.

    Args:
        paths: a run directory without checkpoints that are newer than the replica's.
        source: the replica; its notices name each skipped checkpoint.

    Returns:
        The fetched steps, the checkpoint's own last; empty if no checkpoint is complete.

    Raises:
        ReplicaError: the replica does not answer.
    """
    skipped = set[tuple[int, int]]()
    while (
        candidates := set(_list_checkpoints(source.store, source.names)) - skipped
    ):  # listed in each round, because a holder may collect garbage
        token, step = max(candidates)
        skipped.add((token, step))
        try:
            documents = _collect_manifests(source.store, source.names, token, step)
            for document in documents:
                source.fetch(document, paths.checkpoint(document.step))
        except DamagedFileError as error:
            source.notices.append(f"checkpoint of step {step} in the replica is skipped: {error}")
        else:
            return tuple(document.step for document in documents)
    return ()


def restore_journal(run: RunDirectory, store: ReplicaStore, names: RunObjectNames) -> Origin | None:
    """Replace the local journal by that of the replica. Return the token of its holder and its length; None if the
    replica has none."""
    recovered = manifests.recover_journal(store, names)
    if recovered.origin is not None:
        files.write_atomic(run.paths.journal, recovered.content)
        run.journal.reopen()
    return recovered.origin


def set_aside(run: RunDirectory) -> set[str]:
    """Rename the local checkpoints and the journal, so that they can still be inspected.

    Returns their new names.
    """
    paths, names = run.paths, set[str]()
    files.write_atomic(paths.root / RESTORING, b"")
    for path in map(paths.checkpoint, paths.checkpoint_steps()):
        names.add(name := f"{SUPERSEDED}{path.name}")
        files.publish_directory(path, path.with_name(name))
    if paths.journal.exists() and paths.journal.stat().st_size:
        names.add(name := f"{SUPERSEDED}{paths.journal.name}")
        files.write_atomic(paths.journal.with_name(name), paths.journal.read_bytes())
        files.write_atomic(paths.journal, b"")
        run.journal.reopen()
    return names


def _put_back(run: RunDirectory, names: Collection[str]) -> None:
    """Undo `set_aside`."""
    for folder in (run.paths.checkpoints, run.paths.root):
        for path in [folder / name for name in names if (folder / name).exists()]:
            files.publish_directory(path, path.with_name(path.name.removeprefix(SUPERSEDED)))
    run.journal.reopen()
    (run.paths.root / RESTORING).unlink(missing_ok=True)


def _list_superseded(paths: RunPaths) -> set[str]:
    return {path.name for folder in (paths.checkpoints, paths.root) for path in folder.glob(f"{SUPERSEDED}*")}


def remove_superseded(paths: RunPaths, but: Collection[str] = ()) -> None:
    """Remove the files that `set_aside` renamed, except those named in `but`. Raises OSError."""
    for folder in (paths.checkpoints, paths.root):
        for path in folder.glob(f"{SUPERSEDED}*"):
            if path.name not in but:
                files.remove_sealed(path)


def restore_all(run: RunDirectory, source: RestoreSource) -> RestoreResult:
    """Restore the state in the replica. The local state is moved aside first.

    If the replica has no complete checkpoint but the local state has a valid one, the local state is moved back. It is
    also moved back if the restore fails; after a kill, the next restore moves it back first.
    """
    if (run.paths.root / RESTORING).exists():  # a restore was killed
        _put_back(run, _list_superseded(run.paths))
    local_step, superseded = find_valid_step(run.paths), set_aside(run)
    try:
        steps = restore_checkpoint(run.paths, source)
    except BaseException:
        _put_back(run, superseded)
        raise
    if local_step and not steps:
        _put_back(run, superseded)
        return RestoreResult(None, (), None, has_kept_local=True)
    origin = restore_journal(run, source.store, source.names)
    if superseded:  # keep only the last set
        remove_superseded(run.paths, superseded)
    (run.paths.root / RESTORING).unlink()
    return RestoreResult(steps[-1] if steps else None, steps, origin)


def find_valid_step(paths: RunPaths) -> int:
    """Return the newest step whose local checkpoint, and all checkpoints that it refers to, are complete; 0 if there is
    none. Partial files of a repair that was killed are removed."""
    for step in reversed(paths.checkpoint_steps()):
        try:
            files.remove_partials(paths.checkpoint(step))  # of a repair that was killed
            files.verify_sealed(paths.checkpoint(step), CHECKPOINT)
            for other in manifests.build_checkpoint_manifest(paths.checkpoint(step)).refers_to:
                files.verify_sealed(paths.checkpoint(other), CHECKPOINT)
        except DamagedFileError:
            continue
        return step
    return 0


def _list_checkpoints(store: ReplicaStore, names: RunObjectNames) -> list[tuple[int, int]]:
    all_numbers = map(parse_numbers, store.list(names.folder("checkpoints")))
    return [(numbers[0], numbers[1]) for numbers in all_numbers if len(numbers) == 2]


def _collect_manifests(store: ReplicaStore, names: RunObjectNames, token: int, step: int) -> list[ReplicaManifest]:
    """Read the documents of a checkpoint and of the checkpoints that it refers to; its own is last."""
    document = manifests.read_replica_manifest(store, names.checkpoint(token, step))
    if document.kind != CHECKPOINT or document.step != step:
        raise DamagedFileError(f"{names.checkpoint(token, step)}: belongs to a {document.kind} of step {document.step}")
    return [
        *(manifests.read_replica_manifest(store, names.checkpoint(token, other)) for other in document.refers_to),
        document,
    ]
